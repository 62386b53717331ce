# SPDX-License-Identifier: Apache-2.0
"""Compiling the C library against TVM's run-time libraries, those of this machine or of another one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tvm_convgrad.device.files import INCLUDE, NAME, SOURCES, Runtime
from tvm_convgrad.training.compile.linking import Linker


def build_library(
    linker: Linker, output: Path, runtime: Runtime, options: Sequence[str] = ("-O2",), search: Sequence[str] = ()
) -> None:
    """Compile the C library.

    Args:
        linker: for the machine that `runtime` is for.
        output: the file to write.
        runtime: what it is linked with.
        options: further ones of the compiler.
        search: where the library finds those of TVM; default: where they are.

    Raises:
        SetupError: the compiler fails; with its own words.
    """
    folders = search or tuple(dict.fromkeys(str(library.parent) for library in (runtime.tvm, runtime.ffi)))
    with tempfile.TemporaryDirectory() as made:
        # One translation unit takes half the time of one for each source: all of them include tvm-ffi's headers.
        unit = Path(made) / "library.cc"
        unit.write_text("".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*.cc"))))
        linker.for_cpp()(
            str(output),
            [
                str(unit),
                # libtvm_runtime is needed for what it registers when it is loaded, not for a symbol.
                "-Wl,--no-as-needed",
                f"-Wl,-soname,{NAME}",
                f"-Wl,--version-script,{SOURCES / 'exports.map'}",
                str(runtime.tvm),
                str(runtime.ffi),
                *(f"-Wl,-rpath,{folder}" for folder in folders),
            ],
            [
                "-std=c++17",
                "-fvisibility=hidden",
                *options,
                f"-I{INCLUDE}",
                f"-I{SOURCES}",
                "-isystem",
                str(runtime.include),
                f'-DCONVGRAD_TVM_VERSION="{runtime.version}"',
            ],
        )


__all__ = ["build_library"]
