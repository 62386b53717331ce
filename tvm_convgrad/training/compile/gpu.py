# SPDX-License-Identifier: Apache-2.0
"""Compiling a step for an NVIDIA GPU: TVM's own pipeline and schedules for what is not a call of a library, NVRTC."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax.backend.cuda import pipeline as stages
from tvm.s_tir import dlight

from relax_ops.compat import starts_threads
from tvm_convgrad.core.errors import ConvGradError, UnsupportedError
from tvm_convgrad.offload.nvrtc import header_folders, precise_kernels, uses_nvrtc
from tvm_convgrad.training.passes.gpu_fusion import FuseForGpu
from tvm_convgrad.training.passes.order import ReadersFirst
from tvm_convgrad.training.passes.recompute import Recompute
from tvm_convgrad.training.passes.staged_sums import SumInStages
from tvm_convgrad.training.passes.wide_products import WidenProducts


def compile_for_gpu(module: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Executable:
    """The executable of a module of Relax functions for a GPU; no GPU is needed to make it.

    Raises:
        SetupError: what compiles CUDA is not installed.
        UnsupportedError: TVM has no GPU schedule for an operation of the module.
    """
    whole = tvm.target.Target(target, host="llvm")
    if uses_nvrtc():
        header_folders()  # what is missing is said before anything is compiled
    with precise_kernels(str(target.attrs["arch"])):
        try:
            return tvm.compile(module, target=whole, relax_pipeline=_pipeline(whole))
        except ConvGradError:
            raise
        except (RuntimeError, ValueError) as error:  # TVM's own are of these kinds
            lines = str(error).strip().splitlines() or [type(error).__name__]
            said = lines[0] if isinstance(error, ValueError) else lines[-1]
            raise UnsupportedError(
                f"target {target.attrs['arch']}: TVM's schedules and NVRTC cannot compile the step for a GPU "
                f"({said}); use --target llvm, or tvm_convgrad.partition for a part."
            ) from error


def _pipeline(target: tvm.target.Target) -> tvm.transform.Pass:
    """TVM's pipeline for GPUs, in which a schedule that fails is left out, and none at all is refused."""
    rules = dlight.gpu.Matmul, dlight.gpu.GEMV, dlight.gpu.Reduction, dlight.gpu.GeneralReduction, dlight.gpu.Fallback
    *legalize, _fusion, fuse_functions, _schedules = stages.legalize_passes(target)
    passes = [
        WidenProducts(),
        Recompute(),
        SumInStages(),
        relax.transform.DeadCodeElimination(),
        *stages.library_dispatch_passes(target),
        *legalize,
        FuseForGpu(),
        fuse_functions,
        ReadersFirst(),
        dlight.ApplyDefaultSchedule(*(_Careful(rule()) for rule in rules)),
        _refuse_unscheduled,
        *stages.dataflow_lower_passes(target),
        *stages.finalize_passes(target),
    ]
    return tvm.transform.Sequential(passes)


class _Careful(dlight.ScheduleRule):
    """A schedule of TVM's that is not applied where it fails, as some do for functions of two reductions or slices."""

    def __init__(self, rule: dlight.ScheduleRule) -> None:
        self._rule = rule

    def apply(
        self, func: tirx.PrimFunc, target: tvm.target.Target, tunable: bool
    ) -> tvm.s_tir.Schedule | list[tvm.s_tir.Schedule] | None:
        """The schedule, or None: then the next one is tried."""
        try:
            return self._rule.apply(func, target, tunable)
        except (AssertionError, RuntimeError, ValueError):  # its own assertions, and TVM's errors
            return None


@tvm.transform.module_pass(opt_level=0)
def _refuse_unscheduled(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """The module as it is.

    Raises:
        UnsupportedError: no schedule has made a function one for the GPU: it would run on the host, with addresses of
            the GPU's memory.
    """
    left = [
        variable.name_hint
        for variable, function in module.functions.items()
        if isinstance(function, tirx.PrimFunc)
        and not (function.attrs or {}).get("tirx.is_scheduled")
        and not starts_threads(function)
    ]
    if left:
        raise UnsupportedError(
            f"target {tvm.target.Target.current().attrs['arch']}: TVM has no GPU schedule for {', '.join(left)}; use "
            "--target llvm, or replace the operator in the model."
        )
    return module


__all__ = ["compile_for_gpu"]
