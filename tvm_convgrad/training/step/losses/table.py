# SPDX-License-Identifier: Apache-2.0
"""The losses by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.step.losses.loss import Loss
from tvm_convgrad.training.step.losses.of_classes import class_loss
from tvm_convgrad.training.step.losses.of_values import (
    absolute_error,
    binary_cross_entropy,
    huber,
    squared_error,
    value_loss,
)
from tvm_convgrad.training.step.options import LossSettings, check_loss

LOSS_FUNCTIONS: dict[str, Callable[[LossSettings], Loss]] = {
    "cross_entropy": partial(class_loss, "cross_entropy"),
    "nll": partial(class_loss, "nll"),
    "bce": partial(value_loss, "bce", binary_cross_entropy),
    "mse": partial(value_loss, "mse", squared_error),
    "l1": partial(value_loss, "l1", absolute_error),
    "huber": partial(value_loss, "huber", huber),
}


def find_loss(name: str, settings: LossSettings | None = None) -> Loss:
    """The loss of that name.

    Raises:
        UnsupportedError: there is none, or it lacks a setting.
    """
    settings = settings or LossSettings()
    check_loss(name, settings)
    if name not in LOSS_FUNCTIONS:
        raise UnsupportedError(f"loss = {name!r} is not a function; choose one of {', '.join(LOSS_FUNCTIONS)}.")
    return LOSS_FUNCTIONS[name](settings)
