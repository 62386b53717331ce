# SPDX-License-Identifier: Apache-2.0
"""SGD, Adam, AdamW and LAMB as Relax expressions, by the rules of torch.optim, and of LAMB's paper.

Every update is written for one parameter; the learning rate is a run-time scalar and the number of the step
(1 for the first) comes from a counter in the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tvm import relax

from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.graph import element_type
from tvm_convgrad.training.step.names import OptimizerName
from tvm_convgrad.training.step.options import optimizer_settings

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Update:
    """The operands of one parameter's update.

    Attributes:
        parameter, gradient: tensors of one shape and dtype.
        slots: the tensors that the optimizer keeps for this parameter.
        rate: the learning rate, a scalar of the parameter's dtype.
        step: the number of this step, a float64 scalar; None where the rule needs none.
    """

    parameter: relax.Expr
    gradient: relax.Expr
    slots: Sequence[relax.Expr]
    rate: relax.Expr
    step: relax.Expr | None


Updated = tuple[relax.Expr, list[relax.Expr]]
"""The new parameter, and its new slots."""
Rule = Callable[[relax.BlockBuilder, Update, Settings], Updated]


@dataclass(frozen=True)
class Optimizer:
    """An update rule with its settings. `slots` are the names of the tensors that it keeps for each parameter."""

    name: str
    settings: Settings
    rule: Rule
    slots: tuple[str, ...] = ()
    needs_step: bool = False

    @property
    def learning_rate(self) -> float:
        """The learning rate that a driver starts from; the step takes it as an argument."""
        return float(self.settings["lr"])

    @property
    def plain_settings(self) -> dict[str, Any]:
        """The settings as JSON has them: lists in place of tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.items()}

    def update(self, builder: relax.BlockBuilder, operands: Update, decays: bool = True) -> Updated:
        """Emit the update of one parameter, with weight decay if it `decays`."""
        settings = self.settings if decays else {**self.settings, "weight_decay": 0.0}
        return self.rule(builder, operands, settings)


def _sgd(builder: relax.BlockBuilder, operands: Update, settings: Settings) -> Updated:
    parameter, slots = operands.parameter, list(operands.slots)
    dtype = element_type(parameter)
    gradient = _decayed(builder, parameter, operands.gradient, settings)
    if slots:
        # The buffer starts at zero, so the first step gives buffer = gradient, as torch does (dampening 0).
        momentum = scalar(settings["momentum"], dtype)
        buffer = builder.emit(relax.op.add(relax.op.multiply(slots[0], momentum), gradient))
        slots = [buffer]
        if settings["nesterov"]:
            gradient = builder.emit(relax.op.add(gradient, relax.op.multiply(buffer, momentum)))
        else:
            gradient = buffer
    return builder.emit(relax.op.subtract(parameter, relax.op.multiply(gradient, operands.rate))), slots


def _decayed(
    builder: relax.BlockBuilder, parameter: relax.Expr, gradient: relax.Expr, settings: Settings
) -> relax.Expr:
    """gradient + weight_decay * parameter."""
    decay = settings["weight_decay"]
    if not decay:
        return gradient
    return builder.emit(relax.op.add(gradient, relax.op.multiply(parameter, scalar(decay, element_type(parameter)))))


def _adam(builder: relax.BlockBuilder, operands: Update, settings: Settings) -> Updated:
    gradient = _decayed(builder, operands.parameter, operands.gradient, settings)
    return _moments(builder, operands, operands.parameter, gradient, settings)


def _adamw(builder: relax.BlockBuilder, operands: Update, settings: Settings) -> Updated:
    parameter, decay = operands.parameter, settings["weight_decay"]
    dtype = element_type(parameter)
    if decay:
        kept = relax.op.subtract(scalar(1.0, dtype), relax.op.multiply(operands.rate, scalar(decay, dtype)))
        parameter = builder.emit(relax.op.multiply(parameter, kept))
    return _moments(builder, operands, parameter, operands.gradient, settings)


def _lamb(builder: relax.BlockBuilder, operands: Update, settings: Settings) -> Updated:
    """x − lr·(‖x‖/‖u‖)·u with u = m/(√v + eps) + weight_decay·x, m and v bias-corrected; the ratio is 1 if a norm is 0.

    Algorithm 2 of You et al., Large Batch Optimization for Deep Learning (2020), with φ the identity.
    """
    parameter, dtype = operands.parameter, element_type(operands.parameter)
    ratio, slots = _ratio_of_moments(builder, operands, operands.gradient, settings)
    moved = builder.emit(relax.op.divide(ratio, _bias_correction(settings["betas"][0], operands.step, dtype)))
    moved = _decayed(builder, parameter, moved, settings)

    # Its own view: a step and an update alone give the same bits where the model, too, squares a parameter.
    own = builder.emit(relax.op.memory.ensure_zero_offset(parameter))

    def norm(value: relax.Expr) -> relax.Expr:
        return builder.emit(relax.op.sqrt(builder.emit(relax.op.sum(builder.emit(relax.op.multiply(value, value))))))

    zero, one = scalar(0.0, dtype), scalar(1.0, dtype)
    sizes = norm(own), norm(moved)
    known = builder.emit(relax.op.logical_and(*(relax.op.greater(size, zero) for size in sizes)))
    trust = builder.emit(relax.op.where(known, relax.op.divide(*sizes), one))
    rate = builder.emit(relax.op.multiply(operands.rate, trust))
    return builder.emit(relax.op.subtract(parameter, relax.op.multiply(moved, rate))), slots


def _moments(
    builder: relax.BlockBuilder, operands: Update, parameter: relax.Expr, gradient: relax.Expr, settings: Settings
) -> Updated:
    """The step of Adam by the bias-corrected first and second moments of the gradient."""
    dtype = element_type(operands.parameter)
    ratio, slots = _ratio_of_moments(builder, operands, gradient, settings)
    rate = relax.op.divide(operands.rate, _bias_correction(settings["betas"][0], operands.step, dtype))
    moved = relax.op.multiply(builder.emit(rate), ratio)
    return builder.emit(relax.op.subtract(parameter, moved)), slots


def _ratio_of_moments(
    builder: relax.BlockBuilder, operands: Update, gradient: relax.Expr, settings: Settings
) -> Updated:
    """m/(√v + eps) with the first moment m as it is and the second one bias-corrected; the new moments."""
    dtype = element_type(operands.parameter)
    beta1, beta2 = settings["betas"]
    first = builder.emit(
        relax.op.add(
            relax.op.multiply(operands.slots[0], scalar(beta1, dtype)),
            relax.op.multiply(gradient, scalar(1.0 - beta1, dtype)),
        )
    )
    second = builder.emit(
        relax.op.add(
            relax.op.multiply(operands.slots[1], scalar(beta2, dtype)),
            relax.op.multiply(relax.op.multiply(gradient, gradient), scalar(1.0 - beta2, dtype)),
        )
    )
    root = builder.emit(relax.op.sqrt(_bias_correction(beta2, operands.step, dtype)))
    denominator = relax.op.add(relax.op.divide(relax.op.sqrt(second), root), scalar(float(settings["eps"]), dtype))
    return relax.op.divide(first, denominator), [first, second]


def _bias_correction(base: float, step: relax.Expr | None, dtype: str) -> relax.Expr:
    """1 - base ** step in `dtype`, computed as exp(step * log(base)) in float64, where nothing cancels."""
    if base == 0.0:
        return scalar(1.0, dtype)
    power = relax.op.exp(relax.op.multiply(step, scalar(math.log(base), "float64")))
    return relax.op.astype(relax.op.subtract(scalar(1.0, "float64"), power), dtype)


UPDATE_RULES: dict[OptimizerName, Rule] = {"sgd": _sgd, "adam": _adam, "adamw": _adamw, "lamb": _lamb}


def make_optimizer(name: str, settings: Settings) -> Optimizer:
    """The optimizer of that name; settings that are None take its default (see `names.OPTIMIZER_DEFAULTS`).

    Raises:
        UnsupportedError: an unknown name or setting, or a value out of range.
    """
    chosen = optimizer_settings(name, settings)
    rule = UPDATE_RULES[cast(OptimizerName, name)]
    if rule is _sgd:
        return Optimizer(name, chosen, rule, ("momentum",) if chosen["momentum"] else ())
    return Optimizer(name, chosen, rule, ("exp_avg", "exp_avg_sq"), needs_step=True)
