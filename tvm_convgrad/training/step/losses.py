# SPDX-License-Identifier: Apache-2.0
"""Loss functions on predictions and targets, each the mean over its elements; of all samples, or of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import tvm_ffi
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.counting import count_of, scalar, scaled_sum
from tvm_convgrad.training.ir.graph import element_type, static_shape, type_text
from tvm_convgrad.training.step.names import LOSSES, LossName
from tvm_convgrad.training.step.options import check_choice


@dataclass(frozen=True)
class Loss:
    """How to name and type the target of some predictions, the loss of both, and the loss of each sample, a vector."""

    name: str
    target_type: Callable[[Any], Any]
    value: Callable[[Any, Any, Any], Any]
    each: Callable[[Any, Any, Any], Any]


def _class_target(predictions: relax.Expr) -> relax.TensorType:
    shape = static_shape(predictions)
    if len(shape) < 2 or not isinstance(shape[1], int):
        raise ModelError(
            "cross_entropy needs predictions of the shape [batch, classes, ...] with a fixed number of classes, "
            f"but the model's are [{', '.join(map(str, shape))}]; use the loss mse, or return class scores."
        )
    return relax.TensorType([shape[0], *shape[2:]], "int64")


def cross_entropy(builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr) -> relax.Expr:
    """-mean(log_softmax(predictions)[target]) over classes in axis 1, as torch.nn.functional.cross_entropy.

    A label outside 0..classes-1 adds nothing to the sum (no memory is read out of bounds); whoever feeds the step
    should refuse such labels.
    """
    return _cross_entropy(builder, predictions, target, first_axis=0)


def _cross_entropy(
    builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr, first_axis: int
) -> relax.Expr:
    """The mean over the axes from `first_axis` on."""
    shape = static_shape(predictions)
    logarithms = builder.emit(relax.op.nn.log_softmax(predictions, axis=1))
    dtype = element_type(predictions)
    chosen = relax.op.one_hot(
        target,
        relax.prim_value(1.0, dtype),
        relax.prim_value(0.0, dtype),
        depth=int(shape[1]),
        axis=1 if len(shape) > 2 else -1,
    )
    chosen = builder.emit(relax.op.grad.no_grad(builder.emit(chosen)))
    axes = list(range(first_axis, len(shape)))
    count = count_of(builder, predictions, [axis for axis in axes if axis != 1])
    # A choice and no product: the logarithm of an impossible class, such as a masked one, is -inf, and 0 * -inf is NaN.
    is_target = relax.op.greater(chosen, scalar(0.0, dtype))
    picked = builder.emit(relax.op.where(is_target, logarithms, scalar(0.0, dtype)))
    return builder.emit(relax.op.negative(scaled_sum(builder, picked, axes, count)))


def mean_squared_error(builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr) -> relax.Expr:
    """mean((predictions - target)^2), as torch.nn.functional.mse_loss."""
    return _mean_squared_error(builder, predictions, target, first_axis=0)


def _mean_squared_error(
    builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr, first_axis: int
) -> relax.Expr:
    """The mean over the axes from `first_axis` on."""
    difference = builder.emit(relax.op.subtract(predictions, target))
    axes = list(range(first_axis, len(static_shape(predictions))))
    squares = builder.emit(relax.op.multiply(difference, difference))
    return scaled_sum(builder, squares, axes, count_of(builder, predictions, axes))


def ensemble_loss(loss: Loss, count: int, own_data: bool) -> Loss:
    """The sum of the losses of an ensemble's members; predictions have these along axis 1, targets too if `own_data`.

    A sum, so that each member's gradients are those of its own loss.
    """

    def one(predictions: relax.Expr) -> relax.Var:
        samples, _, *rest = static_shape(predictions)
        return relax.Var("predictions", relax.TensorType([samples, *rest], element_type(predictions)))

    def target_type(predictions: relax.Expr) -> relax.TensorType:
        single = loss.target_type(one(predictions))
        if not own_data:
            return single
        first, *rest = single.shape.values
        return relax.TensorType([first, count, *rest], single.dtype)

    def folded(builder: relax.BlockBuilder, value: relax.Expr, place: int) -> relax.Expr:
        """The members, along `place`, in front and then part of the samples."""
        order = [place, *(axis for axis in range(len(static_shape(value))) if axis != place)]
        value = builder.emit(relax.op.permute_dims(value, order))
        _, samples, *rest = static_shape(value)
        return builder.emit(relax.op.reshape(value, relax.ShapeExpr([count * samples, *rest])))

    def losses(builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr) -> relax.Expr:
        """(members, samples)."""
        samples = static_shape(predictions)[0]
        if not own_data:
            shape = relax.ShapeExpr([count, *static_shape(target)])
            target = builder.emit(relax.op.broadcast_to(builder.emit(relax.op.expand_dims(target, 0)), shape))
        flat = folded(builder, predictions, 1)
        each = loss.each(builder, flat, folded(builder, target, 1 if own_data else 0))
        return builder.emit(relax.op.reshape(each, relax.ShapeExpr([count, samples])))

    def value(builder: relax.BlockBuilder, predictions: relax.Expr, target: relax.Expr) -> relax.Expr:
        each = losses(builder, predictions, target)
        return builder.emit(relax.op.sum(scaled_sum(builder, each, [1], count_of(builder, each, [1]))))

    return Loss(loss.name, target_type, value, losses)


def target_of(
    loss: Loss, types: Sequence[relax.TensorType], outputs: Mapping[str, float], source: str
) -> relax.TensorType:
    """The type of the one target that all outputs of a model are compared with.

    Raises:
        ModelError: the loss does not take the outputs, or they have different shapes.
    """
    for name, type_ in zip(outputs, types, strict=True):
        dtype = element_type(relax.Var(name, type_))
        if not dtype.startswith(("float", "bfloat")):
            raise ModelError(
                f"{source}: output {name!r} is {type_text(type_)}, but a loss needs floating-point numbers; return "
                "class scores or values, without an argmax or a conversion behind them."
            )
        if not tvm_ffi.structural_equal(type_, types[0]):
            raise ModelError(
                f"{source}: output {next(iter(outputs))!r} is {type_text(types[0])}, but output {name!r} is "
                f"{type_text(type_)}; the losses of all outputs compare with one target, so choose outputs of one "
                "shape."
            )
    try:
        return loss.target_type(relax.Var("predictions", types[0]))
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error


def weighted_sum(builder: relax.BlockBuilder, losses: Iterable[relax.Expr], outputs: Mapping[str, float]) -> relax.Expr:
    """The sum of the losses of a model's outputs, each times the weight of its output."""
    total = None
    for value, weight in zip(losses, outputs.values(), strict=True):
        if weight != 1.0:
            value = builder.emit(relax.op.multiply(value, scalar(weight, element_type(value))))
        total = value if total is None else builder.emit(relax.op.add(total, value))
    return total


LOSS_FUNCTIONS: dict[LossName, Loss] = {
    "cross_entropy": Loss("cross_entropy", _class_target, cross_entropy, partial(_cross_entropy, first_axis=1)),
    "mse": Loss(
        "mse", lambda predictions: predictions.ty, mean_squared_error, partial(_mean_squared_error, first_axis=1)
    ),
}


def find_loss(name: str) -> Loss:
    """The loss of that name.

    Raises:
        UnsupportedError: there is none.
    """
    check_choice("loss", name, LOSSES)
    return LOSS_FUNCTIONS[cast(LossName, name)]
