# SPDX-License-Identifier: Apache-2.0
"""NVRTC for the kernels of TVM's schedules, with the arithmetic of IEEE 754 as on CPUs.

TVM compiles kernels with --use_fast_math, which makes tanh right to three digits, a division by 6 inexact and
subnormal numbers zero. PyTorch compiles its kernels without. In the type bfloat16 TVM writes infinities and NaN as
names that C++ does not have.

A step that was built where there is no GPU is compiled when it is loaded, so both are done in `precise_kernels`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tvm
import tvm_ffi

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.offload.cuda import INSTALL
from tvm_convgrad.offload.libraries import installed_file

_CALLBACK = "tvm_callback_cuda_compile"
_HEADERS = (("nvidia-cuda-runtime", "cuda_runtime.h", 1), ("nvidia-cuda-cccl", "cuda/std/cstdint", 3))
"""A header of each package, and how many folders it lies below the folder of headers."""

_NOT_FINITE = (
    (re.compile(r"\binff(?=/\*)"), "__int_as_float(0x7f800000)"),
    (re.compile(r"\bnanf(?=/\*)"), "__int_as_float(0x7fffffff)"),
)


_BLOCK = threading.RLock()
"""Held in each block of `precise_kernels`: TVM has one compiler in a process."""


@contextmanager
def precise_kernels(arch: str | None = None) -> Iterator[None]:
    """What this thread compiles for CUDA by TVM, `compiled` compiles; the blocks of threads are one after another.

    Not if TVM_CUDA_COMPILE_MODE selects nvcc, to which TVM_CUDA_NVCC_NO_FAST_MATH=1 says the same.

    Args:
        arch: such as "sm_90"; None is that of this machine's GPU.
    """
    with _BLOCK:
        before = tvm_ffi.get_global_func(_CALLBACK, allow_missing=True)
        if before is None or not uses_nvrtc():
            yield
            return
        thread = threading.get_ident()

        def compile_source(code: str, *more: object) -> bytes:
            if threading.get_ident() != thread:
                return bytes(before(code, *more))
            return compiled(str(code), arch or _local_arch())

        tvm_ffi.register_global_func(_CALLBACK, compile_source, override=True)
        try:
            yield
        finally:
            tvm_ffi.register_global_func(_CALLBACK, before, override=True)


def uses_nvrtc() -> bool:
    """Whether TVM compiles by NVRTC, as it does by default."""
    return os.environ.get("TVM_CUDA_COMPILE_MODE", "nvrtc").lower() == "nvrtc"


def compiled(source: str, arch: str, *, ptx: bool = False) -> bytes:
    """The machine code, or PTX, of CUDA kernels that TVM wrote; no GPU is needed.

    TVM_CUDA_NVRTC_EXTRA_OPTS may have more options of NVRTC.

    Args:
        arch: such as "sm_90".

    Raises:
        SetupError: NVRTC or CUDA's headers are not installed.
        RuntimeError: NVRTC refuses the source; the text is its log's errors.
    """
    folders = header_folders()
    from cuda.bindings import nvrtc

    text = source
    for pattern, value in _NOT_FINITE:
        text = pattern.sub(value, text)
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"convgrad.cu", 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {status.name}")
    try:
        architecture = arch.replace("sm_", "compute_") if ptx else arch
        options = [f"--gpu-architecture={architecture}", "-default-device", "--device-int128", "--std=c++17"]
        options += [f"-I{folder}" for folder in folders]
        options += shlex.split(os.environ.get("TVM_CUDA_NVRTC_EXTRA_OPTS", ""))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            errors = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
            raise RuntimeError("; ".join([f"NVRTC: {status.name}", *errors]))
        size, read = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        code = bytearray(size(program)[1])
        read(program, code)
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def header_folders() -> list[Path]:
    """Folders of CUDA's headers: those of the toolkit in CUDA_PATH, or of the registry's packages.

    Raises:
        SetupError: NVRTC's bindings or a package are not installed, or CUDA_PATH has no headers.
    """
    missing = []
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        missing.append("cuda-bindings")
    toolkit = os.environ.get("CUDA_PATH")
    if toolkit:
        folders = [Path(toolkit, "include"), *sorted(Path(toolkit, "targets").glob("*/include"))]
        folders += [folder / "cccl" for folder in folders]
        if not any((folder / "cuda_runtime.h").is_file() for folder in folders):
            raise SetupError(
                f"compiling for a GPU needs CUDA's headers, and CUDA_PATH, {toolkit}, has no include/cuda_runtime.h; "
                f"correct it, or unset it to take those of the packages ({INSTALL})."
            )
    else:
        found = {name: (installed_file(name, file), depth) for name, file, depth in _HEADERS}
        missing += [name for name, (file, _) in found.items() if file is None]
        folders = [file.parents[depth - 1] for file, depth in found.values() if file is not None]
    if missing:
        raise SetupError(f"compiling for a GPU needs NVRTC (not installed: {', '.join(missing)}): {INSTALL}")
    return folders


def _local_arch() -> str:
    """That of this machine's GPU."""
    return "sm_" + tvm.cuda(0).compute_version.replace(".", "")


__all__ = ["compiled", "header_folders", "precise_kernels", "uses_nvrtc"]
