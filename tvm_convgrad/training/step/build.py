# SPDX-License-Identifier: Apache-2.0
"""From a model to the IRModule of one training step: loss, gradients, optimizer, new state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_ops.active import rules
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.model.program import TrainingProgram
from tvm_convgrad.training.step.from_model import step_of_model
from tvm_convgrad.training.step.from_program import step_of_program
from tvm_convgrad.training.step.module import StepModule
from tvm_convgrad.training.step.options import StepOptions


@rules()
def build_step(model: Model | TrainingProgram, options: StepOptions | None = None, /, **fields: Any) -> StepModule:
    """The training step of a model, or of a program that computes its own gradients (whose loss, bn and dropout stay).

    Args:
        model: of `frontends.load_model` or `model.from_module`.
        options: see `StepOptions`.
        fields: fields of `StepOptions` as keywords, in place of `options` or to replace some of its fields:
            `build_step(model, optimizer="adam")` is `build_step(model, StepOptions(optimizer="adam"))`.

    Returns:
        One IRModule with the functions step, predict and init, and the schemas of what they take and give.

    Raises:
        UnsupportedError: an option that does not exist, or that the model does not take.
        ModelError: operators without gradient (all of them are named), or a shape that the loss does not fit.
    """
    chosen = StepOptions(**fields) if options is None else replace(options, **fields)
    if isinstance(model, TrainingProgram):
        return step_of_program(model, chosen)
    return step_of_model(model, chosen)
