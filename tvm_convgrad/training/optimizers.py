# SPDX-License-Identifier: Apache-2.0
"""SGD, Adam and AdamW as Relax expressions, by the update rules in the documentation of torch.optim.

Every update is written for one parameter; the learning rate is a run-time scalar and the number of the step
(1 for the first) comes from a counter in the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.training.counting import scalar
from tvm_convgrad.training.graph import element_type

_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
}


@dataclass(frozen=True)
class Optimizer:
    """A rule with its constants. `slots` are the names of the tensors that it keeps for each parameter."""

    name: str
    settings: Mapping[str, Any]
    slots: tuple[str, ...] = field(default=())
    needs_step: bool = False

    @property
    def learning_rate(self) -> float:
        """The learning rate that a driver starts from; the step takes it as an argument."""
        return float(self.settings["lr"])

    def update(
        self, builder: Any, parameter: Any, gradient: Any, slots: list[Any], rate: Any, step: Any
    ) -> tuple[Any, list[Any]]:
        """The new parameter and the new slots. `rate` is a scalar of the parameter's dtype, `step` a float64 one."""
        if self.name == "sgd":
            return self._sgd(builder, parameter, gradient, slots, rate)
        return self._adam(builder, parameter, gradient, slots, rate, step)

    def _sgd(self, builder: Any, parameter: Any, gradient: Any, slots: list[Any], rate: Any) -> tuple[Any, list[Any]]:
        dtype = element_type(parameter)
        gradient = self._decayed(builder, parameter, gradient)
        if slots:
            # The buffer starts at zero, so the first step gives buffer = gradient, as torch does (dampening 0).
            momentum = scalar(self.settings["momentum"], dtype)
            buffer = builder.emit(relax.op.add(relax.op.multiply(slots[0], momentum), gradient))
            slots = [buffer]
            if self.settings["nesterov"]:
                gradient = builder.emit(relax.op.add(gradient, relax.op.multiply(buffer, momentum)))
            else:
                gradient = buffer
        return builder.emit(relax.op.subtract(parameter, relax.op.multiply(gradient, rate))), slots

    def _decayed(self, builder: Any, parameter: Any, gradient: Any) -> Any:
        """gradient + weight_decay * parameter."""
        decay = self.settings["weight_decay"]
        if not decay:
            return gradient
        return builder.emit(
            relax.op.add(gradient, relax.op.multiply(parameter, scalar(decay, element_type(parameter))))
        )

    def _adam(
        self, builder: Any, parameter: Any, gradient: Any, slots: list[Any], rate: Any, step: Any
    ) -> tuple[Any, list[Any]]:
        dtype = element_type(parameter)
        beta1, beta2 = self.settings["betas"]
        if self.name == "adamw":
            decay = self.settings["weight_decay"]
            if decay:
                kept = relax.op.subtract(scalar(1.0, dtype), relax.op.multiply(rate, scalar(decay, dtype)))
                parameter = builder.emit(relax.op.multiply(parameter, kept))
        else:
            gradient = self._decayed(builder, parameter, gradient)
        first = builder.emit(
            relax.op.add(
                relax.op.multiply(slots[0], scalar(beta1, dtype)),
                relax.op.multiply(gradient, scalar(1.0 - beta1, dtype)),
            )
        )
        second = builder.emit(
            relax.op.add(
                relax.op.multiply(slots[1], scalar(beta2, dtype)),
                relax.op.multiply(relax.op.multiply(gradient, gradient), scalar(1.0 - beta2, dtype)),
            )
        )
        step_size = builder.emit(relax.op.divide(rate, _bias_correction(beta1, step, dtype)))
        root = builder.emit(relax.op.sqrt(_bias_correction(beta2, step, dtype)))
        denominator = relax.op.add(
            relax.op.divide(relax.op.sqrt(second), root), scalar(float(self.settings["eps"]), dtype)
        )
        moved = relax.op.multiply(step_size, relax.op.divide(first, denominator))
        return builder.emit(relax.op.subtract(parameter, moved)), [first, second]


def _bias_correction(base: float, step: Any, dtype: str) -> Any:
    """1 - base ** step in `dtype`, computed as exp(step * log(base)) in float64, where nothing cancels."""
    if base == 0.0:
        return scalar(1.0, dtype)
    power = relax.op.exp(relax.op.multiply(step, scalar(math.log(base), "float64")))
    return relax.op.astype(relax.op.subtract(scalar(1.0, "float64"), power), dtype)


def make_optimizer(name: str, settings: Mapping[str, Any]) -> Optimizer:
    """The optimizer of that name; settings that are None take the default of torch.optim (SGD: lr 0.1).

    Raises:
        UnsupportedError: an unknown name or setting, or a value out of range.
    """
    if name not in _DEFAULTS:
        raise UnsupportedError(f"build_step: optimizer {name!r} is unknown; choose one of {', '.join(_DEFAULTS)}.")
    chosen = dict(_DEFAULTS[name])
    for key, value in settings.items():
        if value is None:
            continue
        if key not in chosen:
            raise UnsupportedError(
                f"build_step: {name} has no setting {key!r} (given {value!r}); it has {', '.join(chosen)}."
            )
        chosen[key] = value
    _check(name, chosen)
    if name == "sgd":
        return Optimizer(name, chosen, ("momentum",) if chosen["momentum"] else ())
    return Optimizer(name, chosen, ("exp_avg", "exp_avg_sq"), needs_step=True)


def _check(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings for which the update rule is not defined."""
    for key in ("lr", "weight_decay", "momentum", "eps"):
        value = settings.get(key, 0.0)
        if not (math.isfinite(value) and value >= 0):
            raise UnsupportedError(f"build_step: {name} needs {key} >= 0, but {key} = {value}.")
    betas = settings.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise UnsupportedError(f"build_step: {name} needs two betas in [0, 1), but betas = {betas}.")
    if settings.get("nesterov") and not settings["momentum"]:
        raise UnsupportedError(
            "build_step: sgd with nesterov needs a momentum above 0; give momentum=0.9, for example."
        )
