# SPDX-License-Identifier: Apache-2.0
"""Losses whose targets are values of the predictions' shape, each the mean over all elements.

As torch.nn.functional.mse_loss, l1_loss, huber_loss and binary_cross_entropy_with_logits have them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.counting import count_of, scalar, scaled_sum
from tvm_convgrad.training.ir.graph import element_type, static_shape
from tvm_convgrad.training.step.losses.loss import Computation, Loss
from tvm_convgrad.training.step.losses.of_classes import check_weights
from tvm_convgrad.training.step.options import LossSettings


def squared_error(_settings: LossSettings) -> Computation:
    """(p − t)²."""

    def elements(builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr) -> relax.Expr:
        difference = builder.emit(op.subtract(predictions, target))
        return builder.emit(op.multiply(difference, difference))

    return elements


def absolute_error(_settings: LossSettings) -> Computation:
    """|p − t|, whose gradient is 0 where both are equal."""
    return lambda builder, predictions, target: builder.emit(op.abs(builder.emit(op.subtract(predictions, target))))


def huber(settings: LossSettings) -> Computation:
    """d²/2 for |d| = |p − t| up to delta, delta·(|d| − delta/2) beyond: c·(d − c/2) with d clipped to ±delta as c."""
    delta = 1.0 if settings.delta is None else settings.delta

    def elements(builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr) -> relax.Expr:
        emit, half = builder.emit, scalar(0.5, element_type(predictions))
        difference = emit(op.subtract(predictions, target))
        clipped = emit(op.clip(difference, -delta, delta))
        rest = emit(op.subtract(difference, emit(op.multiply(clipped, half))))
        return emit(op.multiply(clipped, rest))

    return elements


def binary_cross_entropy(settings: LossSettings) -> Computation:
    """−w·(p·t·log σ(x) + (1 − t)·log(1 − σ(x))) of scores x, with positive weights p and class weights w, along axis 1.

    Computed as w·((1 − t)·x + (1 + (p − 1)·t)·(log(1 + exp(−|x|)) + max(−x, 0))), in which nothing overflows.
    """

    def elements(builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr) -> relax.Expr:
        emit, dtype, ndim = builder.emit, element_type(predictions), len(static_shape(predictions))
        one = scalar(1.0, dtype)

        def column(numbers: np.ndarray[tuple[int], np.dtype[np.float64]]) -> relax.Expr:
            return relax.const(numbers.astype(dtype).reshape(-1, *[1] * (ndim - 2)), dtype)

        softplus = emit(op.nn.softplus(emit(op.negative(predictions))))
        if settings.positive_weight is not None:
            more = emit(op.multiply(target, column(np.array(settings.positive_weight) - 1.0)))
            softplus = emit(op.multiply(emit(op.add(more, one)), softplus))
        loss = emit(op.add(emit(op.multiply(emit(op.subtract(one, target)), predictions)), softplus))
        if settings.class_weights is not None:
            loss = emit(op.multiply(loss, column(np.array(settings.class_weights))))
        return loss

    return elements


def value_loss(name: str, elements: Callable[[LossSettings], Computation], settings: LossSettings) -> Loss:
    """The mean of a loss of elements."""
    element = elements(settings)

    def target_type(predictions: relax.Expr) -> relax.TensorType:
        shape = static_shape(predictions)
        for setting in ("class_weights", "positive_weight"):
            weights = getattr(settings, setting)
            if weights is not None and (len(shape) < 2 or not isinstance(shape[1], int)):
                raise ModelError(
                    f"{name}: {setting} needs predictions of the shape [batch, classes, ...], but the model's are "
                    f"[{', '.join(map(str, shape))}]."
                )
            if weights is not None:
                check_weights(name, setting, weights, shape[1])
        return predictions.ty

    def compute(
        first_axis: int, builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr
    ) -> relax.Expr:
        axes = list(range(first_axis, len(static_shape(predictions))))
        losses = element(builder, predictions, target)
        return scaled_sum(builder, losses, axes, count_of(builder, predictions, axes))

    return Loss(name, target_type, partial(compute, 0), partial(compute, 1))
