# SPDX-License-Identifier: Apache-2.0
"""Losses of several members or outputs: the sum of an ensemble's, and the weighted sum of a model's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tvm_ffi
from tvm import relax

from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.ir.counting import count_of, scalar, scaled_sum
from tvm_convgrad.training.ir.graph import element_type, static_shape, type_text
from tvm_convgrad.training.step.losses.loss import Loss


def ensemble_loss(loss: Loss, count: int, own_data: bool) -> Loss:
    """The sum of the losses of an ensemble's members; predictions have these along axis 1, targets too if `own_data`.

    A sum, so that each member's gradients are those of its own loss.

    Raises:
        UnsupportedError: a weighted mean, which is not a mean of the samples' own losses.
    """
    if not loss.of_samples:
        raise UnsupportedError(
            f"build_step: the {loss.name} of an ensemble takes no class_weights and no ignore_index; leave them out."
        )

    def one(predictions: relax.Expr) -> relax.Var:
        samples, _, *rest = static_shape(predictions)
        return relax.Var("predictions", relax.TensorType([samples, *rest], element_type(predictions)))

    def target_type(predictions: relax.Expr) -> relax.TensorType:
        single = loss.target_type(one(predictions))
        if not own_data:
            return single
        first, *rest = single.shape.values
        return relax.TensorType([first, count, *rest], single.dtype)

    def target_range(predictions: relax.Expr) -> IndexRange | None:
        return loss.target_range(one(predictions))

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

    return Loss(loss.name, target_type, value, losses, target_range=target_range)


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
