# SPDX-License-Identifier: Apache-2.0
"""The options of a training step in one value, checked when it is made. Loads no TVM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.step.names import (
    BATCH_NORMS,
    DECAYED,
    DROPOUTS,
    DTYPES,
    DYNAMIC,
    LAYOUTS,
    LOSS_SETTINGS,
    LOSSES,
    OPTIMIZER_DEFAULTS,
    OPTIMIZERS,
    RECOMPUTED,
    RESULTS,
    LossName,
    OptimizerName,
)

_DEFAULT_SCALE = {"float32": 1.0, "float16": 1024.0, "bfloat16": 1.0}


@dataclass(frozen=True)
class LossSettings:
    """Settings of losses, with the semantics of torch.nn.functional; None means that a setting is not used.

    Attributes:
        label_smoothing: the share of each label that is distributed over all classes.
        class_weights: a weight for each class.
        ignore_index: the class number of positions that the loss ignores.
        positive_weight: for each class of `bce`, the weight of positive targets.
        delta: the absolute error at which `huber` becomes linear; 1 by default.
    """

    label_smoothing: float | None = None
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None
    positive_weight: tuple[float, ...] | None = None
    delta: float | None = None


@dataclass(frozen=True)
class StepOptions:
    """The options of `build_step`; every field has a default.

    Attributes:
        loss: "cross_entropy" of class scores, "nll" of their logarithms (int64 class labels); "bce" of scores, "mse",
            "l1" and "huber" (values).
        label_smoothing, class_weights, ignore_index, positive_weight, delta: settings of the loss, see `LossSettings`.
        optimizer: "sgd", "adam", "adamw" or "lamb".
        lr, momentum, weight_decay, nesterov, betas, eps: settings of the optimizer, with the semantics of torch.optim;
            None means the optimizer's default.
        decayed: the parameters that have weight decay: "all", or "matrices" (those with at least two axes).
        clip_norm: upper bound of the norm of all gradients together, as in torch.nn.utils.clip_grad_norm_; None: no
            bound.
        clip_value: upper bound of the absolute value of each gradient element; None: no bound.
        ema: decay of moving averages of the parameters, which start with the initial values and become
            ema * average + (1 - ema) * parameter after each update; None: no averages.
        dtype: "float32", or "float16"/"bfloat16" for the operands of convolutions and matrix products, which
            accumulate in float32; weights and everything else stay float32.
        results: the type in which results of convolutions and matrix products are stored: "float32"; "operands" for
            that of their operands, as in PyTorch's autocast and as cuDNN requires; "activations" for the same, and for
            all tensors computed from them except gradients of weights, statistics and losses (see `storage`).
            `convgrad build` takes "activations" on CPUs and "operands" on GPUs.
        loss_scale: factor by which the loss is multiplied in the backward pass; gradients are divided by it before the
            update. None: 1024 for float16, else 1. "dynamic": a factor that adapts; updates with gradients that are
            not finite are skipped (`scaling`).
        layout: "NCHW"; "NHWC": convert the data of convolutions to NHWC; "NHWC:OHWI": convert their weights, too.
        bn: which batch norms use batch statistics, whatever mode the model was exported in: "train", all except those
            with frozen scale and shift; "train-all", all; "frozen", none. The others use their running statistics,
            which then do not change.
        dropout_mode: "train" enables every dropout (seeded by `seed` and the step counter); "off" disables all.
        accumulate: number of micro-batches of one step. A step takes that many times the model's batch, and updates
            once by the gradient of the mean loss (see `micro_batches`).
        seed: seed of dropout.
        split: whether the step also has the functions gradients, apply and evaluate (see `split`).
        recompute: which values of the forward pass are computed again in the backward pass instead of being kept, to
            save memory: "none", "cheap" (no convolution or matrix product is computed twice), "all", or "auto": those
            of "cheap" that cost hardly any time, on a CPU and if all sizes are known. A number is a budget in bytes for
            the tensors of a step without its state and inputs: as little as possible is recomputed to meet it, or to
            come as close as possible. Results are bit-identical in all cases.
        mean, std: normalisation of images with pixels from 0 to 1, one number for all channels or one for each. They
            are stored in the manifest; `convgrad run` applies them to its data.

    Raises:
        UnsupportedError: a value is unknown or out of range.
    """

    loss: str = "cross_entropy"
    label_smoothing: float | None = None
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None
    positive_weight: tuple[float, ...] | None = None
    delta: float | None = None
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    nesterov: bool | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    decayed: str = "all"
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: float | None = None
    dtype: str = "float32"
    results: str = "float32"
    loss_scale: float | str | None = None
    layout: str = "NCHW"
    bn: str = "train"
    dropout_mode: str = "train"
    accumulate: int = 1
    seed: int = 0
    split: bool = False
    recompute: str | int = "auto"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        optimizer_settings(self.optimizer, self.given_settings)
        check_loss(self.loss, self.loss_settings)
        for option, allowed in (
            ("decayed", DECAYED),
            ("bn", BATCH_NORMS),
            ("dropout_mode", DROPOUTS),
            ("layout", LAYOUTS),
            ("dtype", DTYPES),
            ("results", RESULTS),
        ):
            check_choice(option, getattr(self, option), allowed)
        if self.dtype == "float32" and self.results != "float32":
            raise UnsupportedError(
                f"build_step: results = {self.results!r} stores 16-bit numbers, but dtype is 'float32'; "
                f"give dtype {' or '.join(repr(dtype) for dtype in DTYPES if dtype != self.dtype)}, or no results."
            )
        if isinstance(self.loss_scale, str) and self.loss_scale != DYNAMIC:
            raise UnsupportedError(
                f"build_step: loss_scale = {self.loss_scale!r}; give a positive number, or {DYNAMIC!r}."
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise UnsupportedError(f"build_step: loss_scale must be a positive number, but is {self.scale}.")
        check_clipping(self.clip_norm, self.clip_value)
        if self.ema is not None and not 0 < self.ema < 1:
            raise UnsupportedError(f"build_step: ema must be between 0 and 1, such as 0.999, but is {self.ema}.")
        check_normalisation(self.mean, self.std)
        if isinstance(self.recompute, str):
            check_choice("recompute", self.recompute, RECOMPUTED)
        elif self.recompute < 1:
            raise UnsupportedError(f"build_step: recompute = {self.recompute}; a budget is a positive number of bytes.")
        if self.accumulate < 1:
            raise UnsupportedError(f"build_step: accumulate = {self.accumulate}; a step takes at least 1 micro-batch.")

    @property
    def given_settings(self) -> dict[str, Any]:
        """The settings of the optimizer by name; None: its default."""
        names = ("lr", "momentum", "weight_decay", "nesterov", "betas", "eps")
        return {name: getattr(self, name) for name in names}

    @property
    def normalisation(self) -> dict[str, tuple[float, ...]]:
        """What is given of `mean` and `std`."""
        given = {"mean": self.mean, "std": self.std}
        return {name: numbers for name, numbers in given.items() if numbers is not None}

    @property
    def loss_settings(self) -> LossSettings:
        """The settings of the loss."""
        return LossSettings(**{field.name: getattr(self, field.name) for field in fields(LossSettings)})

    @property
    def is_scale_dynamic(self) -> bool:
        """Whether the factor on the loss adapts."""
        return self.loss_scale == DYNAMIC

    @property
    def scale(self) -> float:
        """The static factor on the loss; 1 if it adapts."""
        if isinstance(self.loss_scale, str):
            return 1.0
        return _DEFAULT_SCALE[self.dtype] if self.loss_scale is None else float(self.loss_scale)


def check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that an option does not take.

    Raises:
        UnsupportedError: the value is not among `allowed`.
    """
    if value not in allowed:
        raise UnsupportedError(f"build_step: {option} = {value!r} is unknown; choose one of {', '.join(allowed)}.")


def check_loss(name: str, settings: LossSettings) -> None:
    """Refuse a loss that does not exist, settings that it does not have, and numbers for which they have no meaning.

    Raises:
        UnsupportedError: with the sentence of the rule.
    """
    check_choice("loss", name, LOSSES)
    known = LOSS_SETTINGS[cast(LossName, name)]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is None:
            continue
        if field.name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise UnsupportedError(f"build_step: {name} has no setting {field.name!r} (given {value!r}); {has}.")
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(number) for number in numbers) or not numbers:
            raise UnsupportedError(f"build_step: {field.name} needs finite numbers, but is {value!r}.")
        if field.name not in ("ignore_index",) and min(numbers) < 0:
            raise UnsupportedError(f"build_step: {field.name} needs numbers from 0 on, but is {value!r}.")
    if settings.ignore_index is not None and not -(2**63) <= settings.ignore_index < 2**63:
        raise UnsupportedError(f"build_step: ignore_index must be an int64 number, but is {settings.ignore_index}.")
    if (settings.label_smoothing or 0.0) > 1:
        raise UnsupportedError(f"build_step: label_smoothing must be from 0 to 1, but is {settings.label_smoothing}.")
    if settings.delta == 0:
        raise UnsupportedError("build_step: delta must be a positive number, but is 0.")


def check_clipping(norm: float | None, value: float | None) -> None:
    """Refuse bounds of gradients that are not positive numbers, and both at once.

    Raises:
        UnsupportedError: with the sentence of the rule.
    """
    for name, bound in (("clip_norm", norm), ("clip_value", value)):
        if bound is not None and not (math.isfinite(bound) and bound > 0):
            raise UnsupportedError(f"build_step: {name} must be a positive number, but is {bound}.")
    if norm is not None and value is not None:
        raise UnsupportedError("build_step: clip_norm and clip_value are both given; choose one.")


def check_normalisation(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    """Refuse means that are not finite, and deviations that are not positive numbers.

    Raises:
        UnsupportedError: with the sentence of the rule.
    """
    for name, numbers in (("mean", mean), ("std", std)):
        if numbers is None:
            continue
        if not numbers or not all(math.isfinite(number) and (name == "mean" or number > 0) for number in numbers):
            wanted = "finite" if name == "mean" else "positive"
            raise UnsupportedError(f"build_step: {name} needs {wanted} numbers, but is {numbers!r}.")


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
