# SPDX-License-Identifier: Apache-2.0
"""Compiling a step for an NVIDIA GPU: TVM's own pipeline and schedules for what is no call of a library, NVRTC."""

from __future__ import annotations

import importlib.util
from typing import Any

import tvm

from tvm_convgrad.errors import SetupError, UnsupportedError
from tvm_convgrad.offload.cuda import INSTALL


def is_gpu(target: Any) -> bool:
    """Whether a target is an NVIDIA GPU."""
    return isinstance(target, tvm.target.Target) and target.kind.name == "cuda"


def compile_for_gpu(module: Any, target: Any) -> Any:
    """The executable of a module of Relax functions for a GPU; no GPU is needed to make it.

    Raises:
        SetupError: what compiles CUDA is not installed.
        UnsupportedError: TVM has no GPU schedule for an operation of the module.
    """
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings.nvrtc") is None:
        raise SetupError(f"compiling for a GPU needs NVRTC (the packages cuda-bindings, nvidia-cuda-nvrtc): {INSTALL}")
    whole = tvm.target.Target(target, host="llvm")
    try:
        return tvm.compile(module, target=whole)
    except (tvm.error.TVMError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f"target {target.attrs['arch']}: TVM's own schedules cannot compile the rest of the step for a GPU "
            f"({str(error).strip().splitlines()[-1]}); use --target llvm, or offload single modules by partition"
        ) from error


__all__ = ["compile_for_gpu", "is_gpu"]
