# SPDX-License-Identifier: Apache-2.0
"""What compiles a kernel: nvcc and CUDA's headers, of the registry's packages or a toolkit, and CUTLASS's headers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tvm

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.offload.cutlass.entry import ENTRY
from tvm_convgrad.offload.libraries import installed_file

_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
_DEFAULT_TOOLKIT = "/usr/local/cuda"
_HEADERS = "CUTLASS_PATH"
_PACKAGES = (
    ("nvidia-cuda-nvcc", "bin/nvcc"),
    ("nvidia-cuda-runtime", "include/cuda_runtime.h"),
    ("nvidia-cuda-crt", "include/crt/host_config.h"),
    ("nvidia-nvvm", "nvvm/bin/cicc"),
    ("nvidia-cuda-cccl", "include/cccl/cuda/std/cstdint"),
)
_LEAST = 12


@dataclass(frozen=True)
class Toolchain:
    """nvcc, with the versions that decide what it makes.

    Attributes:
        nvcc: the compiler.
        headers: the folder of CUTLASS's; CUDA's own nvcc finds.
        libraries: folders of CUDA's static runtime beside nvcc, where it has one.
        release: of nvcc, such as "13.0.88".
        cutlass: version of CUTLASS, such as "4.1.0".
    """

    nvcc: Path
    headers: Path
    libraries: tuple[Path, ...]
    release: str
    cutlass: str


@lru_cache(maxsize=4)
def toolchain() -> Toolchain | str:
    """What compiles kernels, or what of it is missing, with the remedy."""
    found = _nvcc()
    if isinstance(found, str):
        return found
    headers = cutlass_headers()
    if headers is None:
        return f"CUTLASS's headers are not where TVM's wheel has them; set {_HEADERS} to a copy of CUTLASS"
    done = subprocess.run([str(found), "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"V(\d+)([.\d]*)", done.stdout)
    if done.returncode or release is None:
        return f"{found} does not run: {(done.stderr.splitlines() or ['?'])[-1].strip()}"
    if int(release[1]) < _LEAST:
        return f"{found} is of CUDA {release[1]}; CUTLASS needs {_LEAST} or newer: {ENTRY.install}"
    folders = (found.parents[1] / name for name in ("lib", "lib64"))
    libraries = tuple(folder for folder in folders if (folder / "libcudart_static.a").is_file())
    return Toolchain(found, headers, libraries, release[1] + release[2], _cutlass_version(headers))


def required() -> Toolchain:
    """What compiles kernels.

    Raises:
        SetupError: something of it is missing; the text has the remedy.
    """
    found = toolchain()
    if isinstance(found, str):
        raise SetupError(f"the kernels of cutlass cannot be compiled: {found}")
    return found


@lru_cache(maxsize=1)
def cutlass_headers() -> Path | None:
    """The folder of CUTLASS's headers: of CUTLASS_PATH, or of TVM's wheel, which carries them."""
    stated = os.environ.get(_HEADERS)
    root = Path(stated) if stated else Path(tvm.__file__).parent / "3rdparty" / "cutlass"
    folder = root / "include"
    return folder if (folder / "cutlass" / "version.h").is_file() else None


def _nvcc() -> Path | str:
    """The compiler: of a toolkit that the user states, of the packages, else of any toolkit."""
    stated = [folder / "bin" / "nvcc" for folder in _toolkits(stated_only=True)]
    packaged = installed_file(*_PACKAGES[0])
    missing = [package for package, file in _PACKAGES if installed_file(package, file) is None]
    on_path = shutil.which("nvcc")
    others = [Path(on_path)] if on_path else []
    for path in (*stated, *([] if missing else [packaged]), *others, *(f / "bin" / "nvcc" for f in _toolkits())):
        if path is not None and path.is_file():
            return path.resolve()
    return f"not installed (nvcc and its headers: the packages {', '.join(missing)}): {ENTRY.install}"


def _toolkits(stated_only: bool = False) -> list[Path]:
    stated = [Path(os.environ[name]) for name in _TOOLKITS if os.environ.get(name)]
    return stated if stated_only else [*stated, Path(_DEFAULT_TOOLKIT)]


def _cutlass_version(headers: Path) -> str:
    text = (headers / "cutlass" / "version.h").read_text()
    return ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text))


__all__ = ["Toolchain", "cutlass_headers", "required", "toolchain"]
