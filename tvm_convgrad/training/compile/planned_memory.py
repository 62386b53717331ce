# SPDX-License-Identifier: Apache-2.0
"""The memory that a step will take, planned without compiling its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax import vm_build

from relax_ops.active import rules
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.offload.partition import offload
from tvm_convgrad.offload.registry import NONE
from tvm_convgrad.training.compile.gpu import is_gpu
from tvm_convgrad.training.compile.lower import LowerStep, simplified
from tvm_convgrad.training.runtime.memory import StepMemory, bytes_of, moments_of
from tvm_convgrad.training.step.module import StepModule


@rules()
def plan_memory(step: StepModule, target: tvm.target.Target, backends: Sequence[str] = (NONE,)) -> StepMemory:
    """The memory that a step has if `compile_with_plan` compiles it.

    Args:
        step: of a fixed batch.
        target: of kind llvm.
        backends: as there.

    Raises:
        UnsupportedError: the target is a GPU, or the batch is free.
    """
    if is_gpu(target):
        raise UnsupportedError("memory: it is planned for CPUs only, but the target is a GPU; leave --memory out.")
    if not isinstance(step.inputs[0].shape[0], int):
        raise UnsupportedError("memory: the batch is free, so that sizes follow at run time; build with --batch N.")
    module = offload(simplified(step.module), backends, target).module
    with target:
        lowered = LowerStep(target)(module)
    builder = relax.ExecBuilder()
    vm_build._vmcodegen(builder, lowered)
    return memory_of_executable(step, builder.get())


def memory_of_executable(step: StepModule, executable: tvm.runtime.Executable) -> StepMemory:
    """The memory of a step of fixed batch, from its executable.

    Raises:
        UnsupportedError: the step has branches, or this TVM writes the code in an unknown form.
    """
    code = executable.mod
    moments = moments_of(str(code["as_text"]()), str(code["stats"]()))
    given = (*step.inputs, step.target)
    return StepMemory(
        sum(bytes_of(tuple(each.shape), each.dtype) for each in step.state),
        sum(bytes_of(tuple(each.shape), each.dtype) for each in given),
        tuple(moments),
    )


__all__ = ["memory_of_executable", "plan_memory"]
