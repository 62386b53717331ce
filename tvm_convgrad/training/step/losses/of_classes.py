# SPDX-License-Identifier: Apache-2.0
"""Losses whose targets are class numbers: cross-entropy of scores, and the negative of given log-likelihoods.

As torch.nn.functional.cross_entropy and nll_loss have them. Classes are along axis 1; all further axes, such as those
of pixels, are positions with a class each.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.ir.counting import count_of, scalar, scaled_sum
from tvm_convgrad.training.ir.graph import element_type, static_shape
from tvm_convgrad.training.step.losses.loss import Loss
from tvm_convgrad.training.step.options import LossSettings


def class_loss(name: str, settings: LossSettings) -> Loss:
    """`cross_entropy` or `nll`, the mean over all positions that are not of the class `ignore_index`.

    With class weights w it is Σ w[t]·loss / Σ w[t]; with label smoothing e the loss of a position is
    −(1 − e)·w[t]·log p[t] − e/C·Σ w[c]·log p[c]. A label outside 0..classes-1 adds nothing to the sum (no memory is
    read out of bounds); whoever feeds the step should refuse such labels, as `target_range` has it.
    """
    weighted = settings.class_weights is not None or settings.ignore_index is not None

    def target_type(predictions: relax.Expr) -> relax.TensorType:
        shape = static_shape(predictions)
        if len(shape) < 2 or not isinstance(shape[1], int):
            raise ModelError(
                f"{name} needs predictions of the shape [batch, classes, ...] with a fixed number of classes, "
                f"but the model's are [{', '.join(map(str, shape))}]; use the loss mse, or return class scores."
            )
        check_weights(name, "class_weights", settings.class_weights, shape[1])
        return relax.TensorType([shape[0], *shape[2:]], "int64")

    def target_range(predictions: relax.Expr) -> IndexRange | None:
        classes = static_shape(predictions)[1]
        return IndexRange.of_classes(classes, settings.ignore_index) if isinstance(classes, int) else None

    compute = partial(_loss, settings, name == "cross_entropy")
    return Loss(name, target_type, partial(compute, 0), partial(compute, 1), not weighted, target_range)


def check_weights(loss: str, setting: str, weights: tuple[float, ...] | None, classes: int) -> None:
    """Refuse weights that are not one for each class.

    Raises:
        ModelError: another number of them.
    """
    if weights is not None and len(weights) != classes:
        raise ModelError(
            f"{loss}: {setting} has {len(weights)} numbers, but the model predicts {classes} classes; give "
            "one for each."
        )


def _loss(
    settings: LossSettings,
    normalise: bool,
    first_axis: int,
    builder: relax.BlockBuilder,
    predictions: relax.Expr,
    target: relax.Expr,
) -> relax.Expr:
    """The mean over the axes from `first_axis` on; `normalise`: predictions are scores, no logarithms."""
    emit, shape, dtype = builder.emit, static_shape(predictions), element_type(predictions)
    logarithms = emit(op.nn.log_softmax(predictions, axis=1)) if normalise else predictions
    zero, axes = scalar(0.0, dtype), list(range(first_axis, len(shape)))
    positions = [axis for axis in axes if axis != 1]
    ignored = None
    if settings.ignore_index is not None:
        ignored = emit(op.equal(target, relax.const(settings.ignore_index, "int64")))
        target = emit(op.where(ignored, relax.const(-1, "int64"), target))  # no class
    chosen = op.one_hot(
        target,
        relax.prim_value(1.0, dtype),
        relax.prim_value(0.0, dtype),
        depth=int(shape[1]),
        axis=1 if len(shape) > 2 else -1,
    )
    chosen = emit(op.grad.no_grad(emit(chosen)))
    weights = None
    if settings.class_weights is not None:
        column = np.array(settings.class_weights, dtype).reshape(-1, *[1] * (len(shape) - 2))
        weights = relax.const(column, dtype)
        logarithms = emit(op.multiply(logarithms, weights))
    # A choice and no product: the logarithm of an impossible class, such as a masked one, is -inf, and 0 * -inf is NaN.
    is_target = op.greater(chosen, zero)
    picked = emit(op.where(is_target, logarithms, zero))
    if weights is not None:
        count = emit(op.sum(emit(op.multiply(chosen, weights)), axes))
    elif ignored is not None:
        count = emit(op.sum(chosen, axes))
    else:
        count = count_of(builder, predictions, positions)
    loss = emit(op.negative(scaled_sum(builder, picked, axes, count)))
    smoothing = settings.label_smoothing or 0.0
    if not smoothing:
        return loss
    if ignored is not None:
        logarithms = emit(op.where(emit(op.expand_dims(ignored, 1)), zero, logarithms))
    uniform = emit(op.negative(scaled_sum(builder, logarithms, axes, count)))
    uniform = emit(op.multiply(uniform, scalar(smoothing / int(shape[1]), dtype)))
    return emit(op.add(emit(op.multiply(loss, scalar(1.0 - smoothing, dtype))), uniform))
