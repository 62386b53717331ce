# SPDX-License-Identifier: Apache-2.0
"""From a model to the IRModule of one training step: loss, gradients, optimizer, new state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_ops.active import rules
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.ir.recomputation import Recomputation, with_recomputation
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.model.program import TrainingProgram
from tvm_convgrad.training.step.from_model import step_of_model
from tvm_convgrad.training.step.from_program import step_of_program
from tvm_convgrad.training.step.module import StepModule
from tvm_convgrad.training.step.options import StepOptions


@rules()
def build_step(model: Model | TrainingProgram, options: StepOptions | None = None, /, **fields: Any) -> StepModule:
    """Build the training step of a model: loss, gradients and update in one module.

    Args:
        model: result of `load_model` or `from_module`; a program that computes its own gradients keeps its loss, batch
            norms and dropout.
        options: the settings of the step; None means the defaults of `StepOptions`.
        fields: fields of `StepOptions` as keywords, which replace those of `options`:
            `build_step(model, optimizer="adam")` is `build_step(model, StepOptions(optimizer="adam"))`.

    Returns:
        An IRModule with the functions step, predict and init, and the schemas of their arguments and results.

    Raises:
        UnsupportedError: an option is unknown, out of range or not supported by the model, such as `recompute` with a
            symbolic batch.
        ModelError: operators have no gradient (all are named), or the loss does not support the shape of the outputs.
    """
    chosen = StepOptions(**fields) if options is None else replace(options, **fields)
    step = step_of_program(model, chosen) if isinstance(model, TrainingProgram) else step_of_model(model, chosen)
    wanted = Recomputation.of(chosen.recompute)
    symbolic = [schema for schema in step.inputs if not all(isinstance(extent, int) for extent in schema.shape)]
    if symbolic and not wanted.is_required:
        return step
    if symbolic:
        is_batch = all(isinstance(extent, int) for schema in symbolic for extent in schema.shape[1:])
        remedy = "build with a batch, such as --batch 8" if is_batch else "export the model with fixed extents"
        raise UnsupportedError(
            f"build_step: recompute = {chosen.recompute} needs sizes that are known, but an input is "
            f"{symbolic[0].describe()}; {remedy}."
        )
    # Not among the step's options, which say what is trained.
    return replace(step, module=with_recomputation(step.module, wanted))
