# SPDX-License-Identifier: Apache-2.0
"""A step of ours beside PyTorch's in float64.

An error is measured in the error that PyTorch itself makes in float32 on the same step, so that an ill-conditioned
model is not counted against either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from benchmarks.zoo.problem import Problem, torch_step_of
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.module import StepModule

TIMES_FLOAT32 = 8.0
"""How many times PyTorch's own float32 error ours may be."""

LEAST_ERROR = 2e-5
"""An error that is always accepted, relative to the largest gradient."""

RATE = 1.0


@dataclass(frozen=True)
class Comparison:
    """A step beside PyTorch's in float64.

    Attributes:
        differing: relative errors of the loss and the gradients and statistics that differ by more than rounding.
        count: how many gradients and statistics there are.
        others: names of parameters and statistics that PyTorch's module has not or that begin with other values there
            (a weight that a batch norm was folded into), and of those with a gradient that our step has not.
        error, float32_error: the largest error of a gradient, of ours and of PyTorch's float32.
    """

    differing: Mapping[str, float]
    count: int
    others: frozenset[str]
    error: float
    float32_error: float

    def sentence(self, names: Collection[str]) -> str:
        """Those of the names that differ most; "" for none."""
        worst = sorted(((self.differing[name], name) for name in names), reverse=True)
        shown = ", ".join(f"{name} by {error:.1e}" for error, name in worst[:3])
        return f"{len(worst)} of {self.count} differ: {shown}" if worst else ""


def compare(module: nn.Module, session: Session, step: StepModule, problem: Problem) -> Comparison:
    """A step of ours beside PyTorch's in float64 and in float32.

    A gradient is the difference of float32 parameters, which carries their rounding, half a unit of their size.
    """
    wanted_loss, wanted = torch_step_of(module, problem, torch.float64)
    rounded_loss, rounded = torch_step_of(module, problem, torch.float32)
    roles = {schema.name: schema.role for schema in step.state}
    before = {name: np.array(value) for name, value in session.state.items()}
    loss, _ = session.step(
        tuple(value.numpy() for value in problem.inputs) if len(problem.inputs) > 1 else problem.inputs[0].numpy(),
        problem.target.numpy(),
        RATE,
    )
    after = session.state
    ours = {
        name: (before[name] - after[name]).astype("float64") / RATE if role == "parameter" else after[name]
        for name, role in roles.items()
        if role in ("parameter", "running_stat")
    }
    differing = {}
    limit = max(1e-4 * abs(wanted_loss), TIMES_FLOAT32 * abs(rounded_loss - wanted_loss))
    if not abs(loss - wanted_loss) <= limit:
        differing["the loss"] = abs(loss - wanted_loss) / abs(wanted_loss)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    begin = {name: value.detach().numpy() for name, value in parameters.items()}
    moved = {name for name in ours.keys() & begin.keys() if not np.array_equal(before[name], begin[name])}
    known = (ours.keys() & wanted.keys()) - moved
    largest = max((float(np.abs(wanted[name]).max(initial=0.0)) for name in known), default=0.0) or 1.0
    worst, worst32 = 0.0, 0.0
    for name in known:
        scale = max(float(np.abs(wanted[name]).max(initial=0.0)), 1e-2 * largest)
        error = float(np.abs(ours[name] - wanted[name]).max(initial=0.0)) / scale
        error32 = float(np.abs(rounded[name] - wanted[name]).max(initial=0.0)) / scale
        stored = float(np.abs(before[name]).max(initial=0.0)) * 2.0**-23 / scale
        worst, worst32 = max(worst, error), max(worst32, error32)
        if not error <= max(LEAST_ERROR, TIMES_FLOAT32 * error32) + stored:
            differing[name] = error
    held = {id(parameters[name]) for name in ours.keys() & parameters.keys()}  # an exporter takes any of several names
    lost = {name for name, value in module.named_parameters() if wanted[name].any() and id(value) not in held}
    others = frozenset(ours.keys() - wanted.keys() | lost | moved)
    return Comparison(differing, len(ours), others, worst, worst32)
