# SPDX-License-Identifier: Apache-2.0
"""`convgrad config`: where the C library's files are, for build systems."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    cmakedir: Annotated[bool, typer.Option("--cmakedir", help="The folder of the CMake package convgrad.")] = False,
    includedir: Annotated[bool, typer.Option("--includedir", help="The folder of convgrad.h.")] = False,
    sourcedir: Annotated[bool, typer.Option("--sourcedir", help="The folder of the C library's sources.")] = False,
    tvm_library: Annotated[bool, typer.Option("--tvm-library", help="libtvm_runtime.so.")] = False,
    tvm_ffi_library: Annotated[bool, typer.Option("--tvm-ffi-library", help="libtvm_ffi.so.")] = False,
    tvm_ffi_include: Annotated[bool, typer.Option("--tvm-ffi-include", help="The folder of its headers.")] = False,
    tvm_version: Annotated[bool, typer.Option("--tvm-version", help="The version of Apache TVM.")] = False,
) -> None:
    """Print the paths of the C library's files and of TVM's libraries: those of the options, or all with names."""
    from tvm_convgrad.device.files import CMAKE, INCLUDE, SOURCES, Runtime

    runtime = Runtime.installed()
    lines = {
        "cmakedir": (cmakedir, CMAKE),
        "includedir": (includedir, INCLUDE),
        "sourcedir": (sourcedir, SOURCES),
        "tvm-library": (tvm_library, runtime.tvm),
        "tvm-ffi-library": (tvm_ffi_library, runtime.ffi),
        "tvm-ffi-include": (tvm_ffi_include, runtime.include),
        "tvm-version": (tvm_version, runtime.version),
    }
    wanted = any(chosen for chosen, _ in lines.values())
    for name, (chosen, value) in lines.items():
        if wanted and chosen:
            print(value)
        elif not wanted:
            print(f"{name} {value}")
