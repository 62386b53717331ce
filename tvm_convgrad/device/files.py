# SPDX-License-Identifier: Apache-2.0
"""Where the files of the C library are, and those of TVM that it is linked with; TVM is not loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tvm_convgrad.core.errors import SetupError

ROOT = Path(__file__).parent
INCLUDE, SOURCES, CMAKE, EXAMPLE = ROOT / "include", ROOT / "src", ROOT / "cmake", ROOT / "example"
"""The folders of the header, the sources, the CMake package and the example."""

NAME = "libconvgrad.so"


@dataclass(frozen=True)
class Runtime:
    """What the C library is compiled against.

    Attributes:
        tvm, ffi: libtvm_runtime.so and libtvm_ffi.so for one machine.
        include: the folder of tvm-ffi's headers, the same for all machines.
        version: of Apache TVM.
    """

    tvm: Path
    ffi: Path
    include: Path
    version: str

    @classmethod
    def installed(cls) -> Runtime:
        """That of the installed packages, for this machine.

        Raises:
            SetupError: a library is missing.
        """
        tvm, ffi = _package("tvm"), _package("tvm_ffi")
        found = cls(
            tvm / "lib" / "libtvm_runtime.so",
            ffi / "lib" / "libtvm_ffi.so",
            ffi / "include",
            importlib.metadata.version("apache-tvm"),
        )
        for path in (found.tvm, found.ffi, found.include):
            if not path.exists():
                raise SetupError(f"{path} is missing; reinstall apache-tvm and apache-tvm-ffi.")
        return found


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(f"the package {name} is not installed; install apache-tvm and apache-tvm-ffi.")
    return Path(spec.submodule_search_locations[0])


__all__ = ["CMAKE", "EXAMPLE", "INCLUDE", "NAME", "ROOT", "SOURCES", "Runtime"]
