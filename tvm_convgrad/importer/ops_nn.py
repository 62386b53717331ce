# SPDX-License-Identifier: Apache-2.0
"""Matrix products, normalisations, activations, losses, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.attributes import axis_of, integers
from tvm_convgrad.importer.context import Context, extent_product
from tvm_convgrad.importer.table import op


def _product(context: Context, first: relax.Expr, second: relax.Expr, dtype: str) -> relax.Expr:
    inner = context.shape(first)[-1], context.shape(second)[-2]
    if all(isinstance(extent, int) for extent in inner) and inner[0] != inner[1]:
        raise ModelError(f"the inner extents are {inner[0]} and {inner[1]}")
    if context.dtype(first) != context.dtype(second):
        raise ModelError(f"the operands are {context.dtype(first)} and {context.dtype(second)}")
    return context.emit(relax.op.matmul(first, second, out_dtype=dtype or None))


def _swapped(context: Context, value: relax.Expr, swap: bool) -> relax.Expr:
    rank = context.rank(value)
    return context.permute(value, [*range(rank - 2), rank - 1, rank - 2]) if swap else value


def _with_units(context: Context, weight: relax.Expr, attrs: SimpleNamespace) -> relax.Expr:
    """The second factor of a product, whose columns are the units that the attributes may state."""
    columns = context.shape(weight)[-1]
    if isinstance(columns, int) and attrs.units not in (None, columns):
        raise ModelError(f"units {attrs.units} are not those of the weight, {columns}")
    return weight


@op("nn.dense", attributes="DenseAttrs", operands=2)
def _dense(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    if context.rank(args[0]) < 1 or context.rank(args[1]) != 2:
        raise ModelError(f"the operands have {context.rank(args[0])} and {context.rank(args[1])} axes")
    return _product(context, args[0], _with_units(context, _swapped(context, args[1], True), attrs), attrs.out_dtype)


@op("nn.matmul", attributes="MatmulAttrs", operands=2)
@op("nn.batch_matmul", attributes="BatchMatmulAttrs", operands=2)
def _matmul(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    wanted = 3 if "batch" in attrs.op_name else 2
    if any(context.rank(value) != wanted for value in args) and not (wanted == 2 and context.rank(args[0]) > 2):
        raise ModelError(f"the operands have {[context.rank(value) for value in args]} axes, not {wanted}")
    first = _swapped(context, args[0], attrs.transpose_a)
    second = _swapped(context, args[1], attrs.transpose_b)
    return _product(context, first, second if wanted == 3 else _with_units(context, second, attrs), attrs.out_dtype)


def along(context: Context, vector: relax.Expr, axis: int, rank: int) -> relax.Expr:
    """A vector shaped so that it broadcasts along one axis of `rank`."""
    extents = context.shape(vector)
    if len(extents) != 1:
        raise ModelError(f"a vector is expected, but it has {len(extents)} axes")
    return vector if axis == rank - 1 else context.reshape(vector, [*extents, *[1] * (rank - 1 - axis)])


@op("nn.bias_add", attributes="BiasAddAttrs", operands=2)
def _bias_add(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = context.rank(args[0])
    axis = axis_of("nn.bias_add", attrs.axis, rank)
    bias = along(context, args[1], axis, rank)
    extents = context.shape(args[0])[axis], context.shape(args[1])[0]
    if all(isinstance(extent, int) for extent in extents) and extents[0] != extents[1]:
        raise ModelError(f"a bias of {extents[1]} does not fit the extent {extents[0]}")
    return context.emit(relax.op.add(args[0], bias))


def _checked_vectors(context: Context, args: list[relax.Expr], axis: int) -> None:
    extent = context.shape(args[0])[axis]
    for vector in args[1:]:
        shape = context.shape(vector)
        if len(shape) != 1 or (isinstance(extent, int) and shape[0] != extent):
            raise ModelError(f"a vector of {list(map(str, shape))} does not fit the extent {extent}")
        if context.dtype(vector) != context.dtype(args[0]):
            raise ModelError(f"the operands are {context.dtype(args[0])} and {context.dtype(vector)}")


@op("nn.batch_norm", attributes="BatchNormAttrs", operands=5, note="normalises with the running statistics")
def _batch_norm(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> list[relax.Expr]:
    axis = axis_of("nn.batch_norm", attrs.axis, context.rank(args[0]))
    _checked_vectors(context, args, axis)
    call = relax.op.nn.batch_norm(
        *args,
        axis=axis,
        epsilon=attrs.epsilon,
        center=attrs.center,
        scale=attrs.scale,
        training=False,
    )
    return context.fields(call, 3)


def _affine(
    context: Context, value: relax.Expr, args: list[relax.Expr], attrs: SimpleNamespace, axis: int
) -> relax.Expr:
    """value · gamma + beta, each only if the attributes demand it."""
    rank = context.rank(value)
    if attrs.scale:
        value = context.emit(relax.op.multiply(value, along(context, args[1], axis, rank)))
    if attrs.center:
        value = context.emit(relax.op.add(value, along(context, args[2], axis, rank)))
    return value


def _normalised(context: Context, value: relax.Expr, axes: Sequence[int], epsilon: float) -> relax.Expr:
    """(value - mean) / sqrt(variance + epsilon) over `axes`."""
    mean = context.emit(relax.op.mean(value, list(axes), keepdims=True))
    centred = context.emit(relax.op.subtract(value, mean))
    square = context.emit(relax.op.multiply(centred, centred))
    variance = context.emit(relax.op.mean(square, list(axes), keepdims=True))
    shifted = context.emit(relax.op.add(variance, context.scalar_like(epsilon, value)))
    return context.emit(relax.op.divide(centred, context.emit(relax.op.sqrt(shifted))))


@op("nn.layer_norm", attributes="LayerNormAttrs", operands=3)
def _layer_norm(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    axis = axis_of("nn.layer_norm", attrs.axis, context.rank(args[0]))
    _checked_vectors(context, args, axis)
    return _affine(context, _normalised(context, args[0], [axis], attrs.epsilon), args, attrs, axis)


@op("nn.instance_norm", attributes="InstanceNormAttrs", operands=3)
def _instance_norm(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = context.rank(args[0])
    axis = axis_of("nn.instance_norm", attrs.axis, rank)
    _checked_vectors(context, args, axis)
    axes = [place for place in range(1, rank) if place != axis]
    return _affine(context, _normalised(context, args[0], axes, attrs.epsilon), args, attrs, axis)


@op("nn.group_norm", attributes="GroupNormAttrs", operands=3, note="channels in axis 1")
def _group_norm(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    value, shape = args[0], context.shape(args[0])
    axis = axis_of("nn.group_norm", attrs.axis, len(shape))
    _checked_vectors(context, args, axis)
    groups = attrs.num_groups
    if axis != 1 or groups < 1 or not isinstance(shape[1], int) or shape[1] % groups:
        raise ModelError(f"{groups} groups of axis {axis} with the extents {list(map(str, shape))}")
    grouped = context.reshape(value, [shape[0], groups, shape[1] // groups, *shape[2:]])
    normal = _normalised(context, grouped, range(2, len(shape) + 1), attrs.epsilon)
    return _affine(context, context.reshape(normal, shape), args, attrs, axis)


@op("nn.l2_normalize", attributes="L2NormalizeAttrs")
def _l2_normalize(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = context.rank(args[0])
    given = range(rank) if attrs.axis is None else integers("axis", attrs.axis)
    axes = [axis_of("nn.l2_normalize", axis, rank) for axis in given]
    square = context.emit(relax.op.multiply(args[0], args[0]))
    total = context.emit(relax.op.sum(square, axes, keepdims=True))
    least = context.emit(relax.op.maximum(total, context.scalar_like(attrs.eps, args[0])))
    return context.emit(relax.op.divide(args[0], context.emit(relax.op.sqrt(least))))


@op("nn.lrn", attributes="LRNAttrs")
def _lrn(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    """x / (bias + alpha/size · sum of squares over `size` channels around)^beta."""
    value, size = args[0], attrs.size
    shape = context.static(value, "nn.lrn")
    axis = axis_of("nn.lrn", attrs.axis, len(shape))
    if not 1 <= size <= 255 or size % 2 == 0:
        raise ModelError(f"size {size} is not an odd number up to 255")
    square = context.emit(relax.op.multiply(value, value))
    widths = [0] * (2 * len(shape))
    widths[2 * axis] = widths[2 * axis + 1] = size // 2
    padded = context.emit(relax.op.nn.pad(square, widths, "constant", 0.0))
    total = None
    for shift in range(size):
        part = context.slice(padded, [axis], [shift], [shift + shape[axis]])
        total = part if total is None else context.emit(relax.op.add(total, part))
    scaled = context.emit(relax.op.multiply(total, context.scalar_like(attrs.alpha / size, value)))
    base = context.emit(relax.op.add(scaled, context.scalar_like(attrs.bias, value)))
    power = context.emit(relax.op.power(base, context.scalar_like(attrs.beta, value)))
    return context.emit(relax.op.divide(value, power))


@op("nn.relu")
def _relu(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    return context.emit(relax.op.nn.relu(args[0]))


@op("nn.leaky_relu", attributes="LeakyReluAttrs")
def _leaky_relu(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    if not math.isfinite(attrs.alpha) or not context.is_float(args[0]):
        raise ModelError(f"alpha = {attrs.alpha} for {context.dtype(args[0])}")
    return context.emit(relax.op.nn.leakyrelu(args[0], attrs.alpha))


@op("nn.prelu", attributes="PReluAttrs", operands=2)
def _prelu(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = context.rank(args[0])
    slope = along(context, args[1], axis_of("nn.prelu", attrs.axis, rank), rank)
    positive = context.emit(relax.op.greater(args[0], context.scalar_like(0, args[0])))
    return context.emit(relax.op.where(positive, args[0], context.emit(relax.op.multiply(args[0], slope))))


@op("nn.softmax", "nn.fast_softmax", "nn.log_softmax", attributes="SoftmaxAttrs")
def _softmax(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    axis = axis_of(attrs.op_name, attrs.axis, context.rank(args[0]))
    function = relax.op.nn.log_softmax if "log" in attrs.op_name else relax.op.nn.softmax
    return context.emit(function(args[0], axis))


@op("nn.dropout", attributes="DropoutAttrs", note="the identity in predict; random in training steps")
def _dropout(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> list[relax.Expr]:
    if not 0.0 <= attrs.rate < 1.0:
        raise ModelError(f"the rate {attrs.rate} does not lie in [0, 1)")
    return context.fields(relax.op.nn.dropout(args[0], attrs.rate), 2)


@op("nn.cross_entropy", "nn.cross_entropy_with_logits", operands=2, note="-sum(log(x)·y)/N; with logits -sum(x·y)/N")
def _cross_entropy(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    """Relay's "logits" are logarithms of probabilities: it takes no log_softmax itself."""
    value, label = args
    shape = context.shape(value)
    if len(shape) != 2 or context.rank(label) != 2:
        raise ModelError(f"the operands have {len(shape)} and {context.rank(label)} axes, not 2")
    if attrs.op_name == "nn.cross_entropy":
        value = context.emit(relax.op.log(value))
    return context.emit(relax.op.nn.cross_entropy_with_logits(value, label))


@op("nn.nll_loss", attributes="NLLLossAttrs", operands=3)
def _nll_loss(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    if attrs.reduction not in ("mean", "sum", "none"):
        raise ModelError(f"the reduction {attrs.reduction!r} is unknown")
    return context.emit(relax.op.nn.nll_loss(*args, reduction=attrs.reduction, ignore_index=attrs.ignore_index))


@op("nn.batch_flatten")
def _batch_flatten(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    shape = context.shape(args[0])
    if not shape:
        raise ModelError("a scalar cannot be flattened")
    return context.reshape(args[0], [shape[0], extent_product(shape[1:])])
