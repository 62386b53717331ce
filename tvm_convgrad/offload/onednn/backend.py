# SPDX-License-Identifier: Apache-2.0
"""The backend of oneDNN: where its packages lie, its runtime, and a call as plain numbers."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import platform
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tvm_convgrad
from tvm_convgrad.errors import SetupError
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.plan import REPRESENTATIVE_BATCH
from tvm_convgrad.offload import libraries
from tvm_convgrad.offload.calls import call_numbers
from tvm_convgrad.offload.common import Engine
from tvm_convgrad.offload.libraries import installed_file as _find
from tvm_convgrad.offload.onednn import rules
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.threads import intended_threads

INTERFACE = 2
"""Of the runtime: of the numbers that it reads, and of the meaning of its functions."""

FILE = f"libconvgrad_onednn.so.{INTERFACE}"
INSTALL = "pip install 'tvm-convgrad[onednn]'"

_LIBRARY = ("onednn-cpu-gomp", "libdnnl.so.3")
_HEADERS = ("onednn-devel-cpu-gomp", "oneapi/dnnl/dnnl.hpp")
_TYPES = {"bfloat16": 2, "float32": 3}
_FORMATS = (rules.ANY, rules.PLAIN_DATA)
_SOURCE = Path(__file__).parent / "runtime" / "runtime.cc"


class OneDnn:
    """oneDNN for CPUs, of the packages onednn-cpu-gomp and onednn-devel-cpu-gomp."""

    name = "onednn"
    kinds: tuple[str, ...] = ("llvm",)
    entry = f"convgrad.onednn.{INTERFACE}.run"
    # GNU OpenMP's threads spin after each primitive otherwise, on the cores that TVM's threads want.
    setting: tuple[str, str] | None = ("OMP_WAIT_POLICY", "passive")

    def unavailable(self, target: Any) -> str:
        """Why programs for a target cannot use it at all, with the remedy."""
        if target is not None and target.kind.name not in self.kinds:
            return f"the target is {target.kind.name}; oneDNN is used on CPUs"
        if platform.machine() != "x86_64" or platform.system() != "Linux":
            return f"its packages are for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
        triple = str(target.attrs.get("mtriple", "") or "") if target is not None else ""
        if triple and not triple.startswith("x86_64"):
            return f"the target is for {triple}; its packages are for x86-64"
        for package, file in (_LIBRARY, _HEADERS):
            if _find(package, file) is None:
                return f"not installed (the package {package} with {file}): {INSTALL}"
        return ""

    def refusal(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any = None) -> str:
        """Why it does not compute a face of a problem, by its rules."""
        return rules.refusal(face, problem, epilogue)

    def engine(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any = None) -> Engine | str:
        """What oneDNN uses on this CPU; for any batch, what it would for some batch."""
        if isinstance(problem.batch, str):
            problem = replace(problem, batch=REPRESENTATIVE_BATCH)
        return _engine(face, problem, epilogue, intended_threads(), self.library())

    def numbers(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any = None) -> list[int]:
        """The fields of Spec in runtime/spec.h."""
        formats = _FORMATS.index(rules.formats(face, problem))
        return [*call_numbers(face, problem, epilogue, _TYPES), formats, int(epilogue.bias_accumulate)]

    def digest(self) -> str:
        """The key of the runtime's folder in the cache."""
        found, header = _find(*_LIBRARY), _find(*_HEADERS)
        return "" if found is None or header is None else _recipe(found, header)[0]

    def version(self) -> str:
        """The version that oneDNN itself states."""
        import tvm_ffi

        return f"oneDNN {tvm_ffi.get_global_func(f'convgrad.onednn.{INTERFACE}.version')()}"

    def library(self) -> Path:
        """The runtime, built if it was not."""
        found, header = _find(*_LIBRARY), _find(*_HEADERS)
        if found is None or header is None:
            raise SetupError(f"the runtime for onednn needs packages: {INSTALL}")
        key, options = _recipe(found, header)
        return libraries.build(self.name, key, FILE, _SOURCE, options)


@lru_cache(maxsize=4)
def _recipe(found: Path, header: Path) -> tuple[str, tuple[str, ...]]:
    """The key of the runtime that calls a libdnnl, and the options that compile it."""
    import tvm
    from tvm_ffi import libinfo

    tvm_lib = Path(tvm.__file__).parent / "lib"
    ffi_lib = Path(libinfo.find_libtvm_ffi()).parent
    include = header.parents[2]
    options = (
        *(
            f"-isystem{folder}"
            for folder in (
                include,
                libinfo.find_include_path(),
                libinfo.find_dlpack_include_path(),
                tvm.libinfo.find_include_path(),
            )
        ),
        *(f"-L{folder}" for folder in (found.parent, ffi_lib, tvm_lib)),
        "-Wl,--no-as-needed",
        f"-l:{found.name}",
        "-ltvm_ffi",
        "-ltvm_runtime",
        f"-Wl,-rpath,{found.parent}:{ffi_lib}:{tvm_lib}",
    )
    digest = hashlib.sha256()
    for source in sorted(_SOURCE.parent.iterdir()):
        digest.update(source.read_bytes())
    versions = [importlib.metadata.version(each) for each in (_LIBRARY[0], _HEADERS[0], "apache-tvm", "apache-tvm-ffi")]
    digest.update("\0".join([tvm_convgrad.__version__, *versions, *options]).encode())
    return digest.hexdigest()[:16], options


@lru_cache(maxsize=4096)
def _engine(face: str, problem: ConvProblem, epilogue: Epilogue, threads: int, library: Path) -> Engine | str:
    import tvm_ffi

    libraries.load(OneDnn.name, library, OneDnn.entry, dict([OneDnn.setting] if OneDnn.setting else []))
    numbers = OneDnn().numbers(face, problem, epilogue)
    block = (ctypes.c_int64 * len(numbers))(*numbers)
    describe = tvm_ffi.get_global_func(f"convgrad.onednn.{INTERFACE}.describe")
    try:
        text = str(describe(ctypes.c_void_p(ctypes.addressof(block)), threads))
    except ValueError as error:
        return f"the library has nothing for it on this CPU: {str(error).splitlines()[0]}"
    implementation, primitives, workspace = text.split(";")
    if implementation.startswith("ref"):
        return "the library has only its slow reference implementation for it on this CPU"
    detail = f"formats {rules.formats(face, problem)}, {primitives} primitives"
    return Engine(implementation, detail, int(workspace))


__all__ = ["FILE", "INSTALL", "INTERFACE", "OneDnn"]
