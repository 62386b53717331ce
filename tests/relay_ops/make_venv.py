# SPDX-License-Identifier: Apache-2.0
"""Makes a virtual environment with a real Relay: TVM 0.17 as the bitblas wheel of the package index carries it.

    python tests/relay_ops/make_venv.py .venv-relay

Exit codes: 0 made; 3 the wheel cannot be had (one line says why), so that there is nothing to test with; 1 anything
else. apache-tvm has no Relay any more, and no wheel of a version that had it exists for today's Pythons. Of the bitblas
wheel only TVM's Python package and its two libraries are taken; bitblas itself is not installed.

Those libraries were linked with CUDA and do not load where there is none. So three stand-ins for libcuda, libcudart and
libnvrtc are compiled, in which every function that TVM refers to returns 100, CUDA's code for "no device". They make
TVM load on a machine without CUDA and do nothing else: TVM then finds no GPU, and the tests run on the CPU. That of
libcuda has what the package's own stand-in for the driver has besides, so that cuDNN can be asked for its engines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

WHEEL = "bitblas==0.1.0.post1"
PLATFORM = ("--platform", "manylinux1_x86_64", "--only-binary", ":all:")
PREFIX = "bitblas/3rdparty/tvm/"
PARTS = (PREFIX + "python/tvm/", PREFIX + "build/libtvm.so", PREFIX + "build/libtvm_runtime.so", PREFIX + "LICENSE")
REQUIREMENTS = (
    "numpy>=1.26",
    "ml_dtypes>=0.4",
    "platformdirs>=4",
    "filelock>=3.13",
    "attrs",
    "cloudpickle",
    "decorator",
    "psutil",
    "typing_extensions",
    "setuptools>=77",  # builds this package (test_install.py)
    "typer>=0.12",
    "rich>=13",
    "pytest>=8",
    "pytest-xdist>=3.5",
    "onednn-cpu-gomp==2023.2.0",  # these two as the extra onednn of pyproject.toml has them
    "onednn-devel-cpu-gomp==2023.2.0",
)
STAND_INS = {"libcuda.so.1": "cu", "libcudart.so.12": "cuda", "libnvrtc.so.12": "nvrtc"}
NO_DRIVER = Path(__file__).parents[2] / "tvm_convgrad" / "offload" / "cudnn" / "runtime" / "no_driver.cc"
NO_DEVICE = 100
UNREACHABLE = 3

# Runs in every Python of the environment before anything is imported: whoever imports TVM then finds its libraries.
HOOK = '''"""Loads the stand-ins for CUDA's libraries and tells TVM where its own are. Written by make_venv.py."""
import ctypes, os, pathlib

_here = pathlib.Path(__file__).parent / "relay_tvm"
os.environ["TVM_LIBRARY_PATH"] = str(_here / "build")
os.environ["TOPHUB_LOCATION"] = "NONE"
for _name in {names!r}:
    ctypes.CDLL(str(_here / "stand_ins" / _name), ctypes.RTLD_GLOBAL)
'''


def main(arguments: list[str]) -> int:
    """Make the environment at the path that is the only argument."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(arguments[0]).resolve()
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, *PLATFORM, "--dest", download, WHEEL], capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"no Relay to test with: pip cannot download {WHEEL}: {reason}")
            return UNREACHABLE
        (wheel,) = Path(download).glob("*.whl")
        venv.create(target, with_pip=True, clear=True)
        python = target / "bin" / "python"
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS], check=True
        )
        packages = target / Path(sysconfig.get_path("purelib", vars={"base": str(target)})).relative_to(target)
        unpack(wheel, packages / "relay_tvm")
    make_stand_ins(packages / "relay_tvm")
    (packages / "relay_tvm_hook.py").write_text(HOOK.format(names=sorted(STAND_INS)))
    # A .pth file is read whenever a Python of the environment starts; it adds the folder to sys.path, too.
    (packages / "relay_tvm.pth").write_text(f"{packages / 'relay_tvm' / 'python'}\nimport relay_tvm_hook\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [python, "-c", "import tvm.relay; print('Relay of TVM', tvm.__version__)"], check=True, env=environment
    )
    return 0


def unpack(wheel: Path, folder: Path) -> None:
    """Write the wanted parts of the wheel below `folder`, without the wheel's own leading folders."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(PARTS) and not name.endswith("/"):
                path = folder / name.removeprefix(PREFIX)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))

    # export_library passes TVM's folder of headers to the compiler and insists that there is one; our C needs none.
    (folder / "include").mkdir(exist_ok=True)


def make_stand_ins(folder: Path) -> None:
    """Compile the stand-ins for what the two libraries refer to, into `folder`/stand_ins."""
    symbols: set[str] = set()
    for library in (folder / "build").glob("*.so"):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        symbols.update(line.split()[-1].partition("@")[0] for line in listed.splitlines())
    out = folder / "stand_ins"
    out.mkdir(exist_ok=True)
    for name, prefix in STAND_INS.items():
        # "cu" is a beginning of "cuda": what follows the prefix is a capital letter.
        mine = sorted(s for s in symbols if s.startswith(prefix) and s[len(prefix) :][:1].isupper())
        more = [NO_DRIVER] if prefix == "cu" else []
        known = "".join(each.read_text() for each in more)
        mine = [symbol for symbol in mine if re.search(rf"\b{symbol}\b", known) is None]
        source, script = out / f"{name}.cc", out / f"{name}.map"
        source.write_text("".join(f'extern "C" int {symbol}() {{ return {NO_DEVICE}; }}\n' for symbol in mine))
        # Versioned names are looked up under the library's own name.
        script.write_text(f"{name} {{ global: *; }};\n")
        versioned = [] if prefix == "cu" else [f"-Wl,--version-script={script}"]
        command = ["c++", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", *versioned, "-o", out / name, source, *more]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
