# SPDX-License-Identifier: Apache-2.0
"""The memory that a step will take, planned without compiling its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax import vm_build

from relax_ops.active import rules
from tvm_convgrad.codegen.hardware import is_gpu
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.offload.partition import offload
from tvm_convgrad.offload.registry import NONE
from tvm_convgrad.training.compile.lower import finished, ordered, simplified
from tvm_convgrad.training.ir.recomputation import ALL, Recomputation, recomputation_of, with_recomputation
from tvm_convgrad.training.ir.recomputation import NONE as NOTHING
from tvm_convgrad.training.passes.in_place import STEP
from tvm_convgrad.training.passes.remat_choice import FOREVER
from tvm_convgrad.training.passes.rematerialise import Repeated, recorded_repetitions
from tvm_convgrad.training.runtime.memory import ANY_BATCH, StepMemory, bytes_of, moments_of
from tvm_convgrad.training.step.module import StepModule


class Planner:
    """Plans the memory of a step for different recomputations."""

    @rules()
    def __init__(self, step: StepModule, target: tvm.target.Target, backends: Sequence[str] = (NONE,)) -> None:
        """A step as `compile_with_plan` compiles it.

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
            raise UnsupportedError(ANY_BATCH)
        self._step, self._target = step, target
        self._module, self._seconds = ordered(offload(simplified(step.module), backends, target).module, target)

    @rules()
    def plan(self, recomputation: Recomputation) -> tuple[StepMemory, Repeated]:
        """The memory, and what is computed again."""
        if recomputation.values == NOTHING:  # repeats nothing either, and is estimated
            recomputation = Recomputation(ALL, FOREVER)
        module = with_recomputation(self._module, recomputation)
        with recorded_repetitions() as repeated:
            lowered = finished(module, self._target, self._seconds, scheduled=False)
        builder = relax.ExecBuilder()
        vm_build._vmcodegen(builder, lowered)
        return memory_of_executable(self._step, builder.get()), repeated[STEP]


def plan_memory(step: StepModule, target: tvm.target.Target, backends: Sequence[str] = (NONE,)) -> StepMemory:
    """The memory that a step has if `compile_with_plan` compiles it; arguments and errors as of `Planner`."""
    return Planner(step, target, backends).plan(recomputation_of(step.module[STEP]))[0]


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


__all__ = ["Planner", "memory_of_executable", "plan_memory"]
