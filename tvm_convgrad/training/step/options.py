# SPDX-License-Identifier: Apache-2.0
"""The options of a training step in one value, checked when it is made. Loads no TVM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.step.names import (
    BATCH_NORMS,
    DROPOUTS,
    DTYPES,
    LAYOUTS,
    LOSSES,
    OPTIMIZER_DEFAULTS,
    OPTIMIZERS,
    RESULTS,
    OptimizerName,
)

_DEFAULT_SCALE = {"float32": 1.0, "float16": 1024.0, "bfloat16": 1.0}


@dataclass(frozen=True)
class StepOptions:
    """What `build_step` makes of a model; every field has a default.

    Attributes:
        loss: "cross_entropy" (int64 class labels) or "mse".
        optimizer: "sgd", "adam" or "adamw".
        lr, momentum, weight_decay, nesterov, betas, eps: settings of the optimizer, with torch.optim's meaning; None
            takes the optimizer's default.
        dtype: "float32", or "float16"/"bfloat16" for the operands of convolutions and matrix products, which
            accumulate in float32; weights and everything else stay float32.
        results: what these are stored in: "float32", or "operands" for the type of their operands, as PyTorch's
            autocast does and cuDNN demands.
        loss_scale: factor on the loss during the backward pass, undone before the optimizer; None: 1024 for float16,
            else 1.
        layout: "NCHW"; "NHWC" converts the data of convolutions to it; "NHWC:OHWI" their kernels too.
        bn: "train" normalises with batch statistics, whatever mode the model was exported in, except for layers whose
            scale and shift are frozen with their running statistics, which stay; "train-all" takes batch statistics
            for those, too; "frozen" for none.
        dropout_mode: "train" makes every dropout real (seeded by `seed` and the step counter); "off" drops nothing.
        accumulate: micro-batches of the model's batch in one step, which then takes that many times the samples and
            updates once, by the gradient of the mean loss (see `micro_batches`).
        seed: of dropout.

    Raises:
        UnsupportedError: a value that does not exist, or is out of range.
    """

    loss: str = "cross_entropy"
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    nesterov: bool | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    dtype: str = "float32"
    results: str = "float32"
    loss_scale: float | None = None
    layout: str = "NCHW"
    bn: str = "train"
    dropout_mode: str = "train"
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        optimizer_settings(self.optimizer, self.given_settings)
        for option, allowed in (
            ("loss", LOSSES),
            ("bn", BATCH_NORMS),
            ("dropout_mode", DROPOUTS),
            ("layout", LAYOUTS),
            ("dtype", DTYPES),
            ("results", RESULTS),
        ):
            check_choice(option, getattr(self, option), allowed)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise UnsupportedError(f"build_step: loss_scale must be a positive number, but is {self.scale}.")
        if self.accumulate < 1:
            raise UnsupportedError(f"build_step: accumulate = {self.accumulate}; a step takes at least 1 micro-batch.")

    @property
    def given_settings(self) -> dict[str, Any]:
        """The settings of the optimizer by name; None: its default."""
        names = ("lr", "momentum", "weight_decay", "nesterov", "betas", "eps")
        return {name: getattr(self, name) for name in names}

    @property
    def scale(self) -> float:
        """The static factor on the loss."""
        return _DEFAULT_SCALE[self.dtype] if self.loss_scale is None else float(self.loss_scale)


def check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that an option does not take.

    Raises:
        UnsupportedError: the value is not among `allowed`.
    """
    if value not in allowed:
        raise UnsupportedError(f"build_step: {option} = {value!r} is unknown; choose one of {', '.join(allowed)}.")


def optimizer_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of an optimizer: those given, and defaults for those that are None.

    Raises:
        UnsupportedError: an unknown name or setting, or a value for which the update rule is not defined.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    chosen = dict(OPTIMIZER_DEFAULTS[cast(OptimizerName, name)])
    for key, value in given.items():
        if value is None:
            continue
        if key not in chosen:
            raise UnsupportedError(
                f"build_step: {name} has no setting {key!r} (given {value!r}); it has {', '.join(chosen)}."
            )
        chosen[key] = value
    for key in ("lr", "weight_decay", "momentum", "eps"):
        value = chosen.get(key, 0.0)
        if not (math.isfinite(value) and value >= 0):
            raise UnsupportedError(f"build_step: {name} needs {key} >= 0, but {key} = {value}.")
    betas = chosen.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise UnsupportedError(f"build_step: {name} needs two betas in [0, 1), but betas = {betas}.")
    if chosen.get("nesterov") and not chosen["momentum"]:
        raise UnsupportedError(
            "build_step: sgd with nesterov needs a momentum above 0; give momentum=0.9, for example."
        )
    return chosen
