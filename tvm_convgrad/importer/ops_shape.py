# SPDX-License-Identifier: Apache-2.0
"""Operators that move, select or repeat elements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.attributes import MAX_INTEGER, axis_of, integers
from tvm_convgrad.importer.context import Context, extent_product
from tvm_convgrad.importer.ops_elementwise import checked_shape, clipped
from tvm_convgrad.importer.shapes import reshaped, reversed_reshape, slice_bounds
from tvm_convgrad.importer.table import op


@op("reshape", "contrib_reverse_reshape", attributes="ReshapeAttrs", note="codes 0, -1, -2, -3, -4 are supported")
def _reshape(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    codes = integers("newshape", attrs.newshape, lowest=-4)
    backwards = attrs.op_name == "contrib_reverse_reshape" or attrs.reverse
    function = reversed_reshape if backwards else reshaped
    return context.reshape(args[0], function(context.shape(args[0]), codes, attrs.allowzero))


@op("dyn.reshape", attributes="ReshapeAttrs", operands=2, note="the shape must be a constant")
def _dyn_reshape(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    codes = context.constant(args[1])
    if codes is None:
        raise ModelError("the shape is not a constant")
    listed = integers("newshape", tuple(codes.ravel().tolist()), lowest=-4)
    return context.reshape(args[0], reshaped(context.shape(args[0]), listed, attrs.allowzero))


@op("reshape_like", attributes="ReshapeLikeAttrs", operands=2)
def _reshape_like(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    first, second = context.shape(args[0]), context.shape(args[1])
    ends = [
        len(shape) if end is None else integers("end", end, count=(1,))[0]
        for shape, end in ((first, attrs.lhs_end), (second, attrs.rhs_end))
    ]
    lhs = slice(attrs.lhs_begin, ends[0]).indices(len(first))
    rhs = slice(attrs.rhs_begin, ends[1]).indices(len(second))
    return context.reshape(args[0], [*first[: lhs[0]], *second[rhs[0] : rhs[1]], *first[lhs[1] :]])


@op("transpose", attributes="TransposeAttrs")
def _transpose(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = context.rank(args[0])
    given = () if attrs.axes is None else integers("axes", attrs.axes)
    axes = [axis_of("transpose", axis, rank) for axis in given] or list(reversed(range(rank)))
    return context.permute(args[0], axes)


@op("squeeze", attributes="SqueezeAttrs")
def _squeeze(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    shape = context.shape(args[0])
    listed = () if attrs.axis is None else integers("axis", attrs.axis)
    axes = {axis_of("squeeze", axis, len(shape)) for axis in listed}
    if attrs.axis is None:
        axes = {axis for axis, extent in enumerate(shape) if isinstance(extent, int) and extent == 1}
    if any(isinstance(shape[axis], int) and shape[axis] != 1 for axis in axes):
        raise ModelError(f"axes {sorted(axes)} of {list(map(str, shape))} are not all of extent 1")
    return context.reshape(args[0], [extent for axis, extent in enumerate(shape) if axis not in axes])


@op("expand_dims", attributes="ExpandDimsAttrs")
def _expand_dims(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    shape, count = context.shape(args[0]), attrs.num_newaxis
    if not 0 <= count <= 16:
        raise ModelError(f"{count} new axes")
    axis = axis_of("expand_dims", attrs.axis, len(shape) + 1)
    return context.reshape(args[0], [*shape[:axis], *[1] * count, *shape[axis:]])


def _list(value: relax.Expr) -> list[relax.Expr]:
    items = value if isinstance(value, list) else [value]
    if not items or any(isinstance(item, list) for item in items):
        raise ModelError("a tuple of tensors is expected")
    return items


def _alike(context: Context, items: list[Any], but: int | None) -> None:
    """All extents but those of one axis must agree, and so must the types."""
    first = context.shape(items[0])
    for item in items[1:]:
        shape = context.shape(item)
        if len(shape) != len(first) or context.dtype(item) != context.dtype(items[0]):
            raise ModelError("the operands differ in rank or element type")
        for axis, (a, b) in enumerate(zip(first, shape, strict=True)):
            if axis != but and isinstance(a, int) and isinstance(b, int) and a != b:
                raise ModelError(f"the operands have the extents {a} and {b} in axis {axis}")


@op("concatenate", attributes="ConcatenateAttrs")
def _concatenate(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    items = _list(args[0])
    axis = axis_of("concatenate", attrs.axis, context.rank(items[0]))
    _alike(context, items, axis)
    return items[0] if len(items) == 1 else context.emit(relax.op.concat(items, axis))


@op("stack", attributes="StackAttrs")
def _stack(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    items = _list(args[0])
    _alike(context, items, None)
    shape = context.shape(items[0])
    axis = axis_of("stack", attrs.axis, len(shape) + 1)
    grown = [context.reshape(item, [*shape[:axis], 1, *shape[axis:]]) for item in items]
    return grown[0] if len(grown) == 1 else context.emit(relax.op.concat(grown, axis))


@op("split", attributes="SplitAttrs")
def _split(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> list[relax.Expr]:
    shape = context.shape(args[0])
    axis = axis_of("split", attrs.axis, len(shape))
    extent, given = shape[axis], attrs.indices_or_sections
    if not isinstance(extent, int):
        raise ModelError("the extent of the axis must be known")
    if isinstance(given, int):
        if not 1 <= given <= extent or extent % given:
            raise ModelError(f"{extent} does not divide into {given} parts")
        splits = [extent // given * part for part in range(1, given)]
    else:
        splits = list(integers("indices_or_sections", given, lowest=0))
        if splits != sorted(splits) or (splits and splits[-1] > extent):
            raise ModelError(f"{splits} are not places to split {extent} at")
    if not splits:
        return [args[0]]
    return context.fields(relax.op.split(args[0], splits, axis), len(splits) + 1)


@op("strided_slice", attributes="StridedSliceAttrs")
def _strided_slice(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    shape = context.shape(args[0])
    axes, begin, end, strides = slice_bounds(shape, attrs)
    kept = [i for i, axis in enumerate(axes) if (begin[i], end[i], strides[i]) != (0, shape[axis], 1)]
    if not kept:
        return args[0]
    picked = [[values[i] for i in kept] for values in (axes, begin, end, strides)]
    return context.emit(relax.op.strided_slice(args[0], picked[0], picked[1], picked[2], picked[3]))


@op("slice_like", attributes="SliceLikeAttrs", operands=2)
def _slice_like(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    first, second = context.static(args[0], "slice_like"), context.static(args[1], "slice_like")
    listed = () if attrs.axes is None else integers("axes", attrs.axes)
    axes = [axis_of("slice_like", axis, len(first)) for axis in listed] or list(range(min(len(first), len(second))))
    ends = [second[axis_of("slice_like", axis, len(second))] for axis in axes]
    if any(first[axis] < end for axis, end in zip(axes, ends, strict=True)):
        raise ModelError(f"{list(first)} is smaller than {list(second)}")
    return context.slice(args[0], axes, [0] * len(axes), ends)


@op("tile", attributes="TileAttrs")
def _tile(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    reps = integers("reps", attrs.reps, lowest=1)
    if len(reps) > 16 or extent_product(reps) > MAX_INTEGER:
        raise ModelError(f"reps {list(reps)} are too many")
    return context.emit(relax.op.tile(args[0], list(reps)))


@op("repeat", attributes="RepeatAttrs")
def _repeat(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    if not 1 <= attrs.repeats <= MAX_INTEGER:
        raise ModelError(f"{attrs.repeats} repeats")
    value, axis = args[0], attrs.axis
    if axis is None:
        value, axis = context.reshape(value, [extent_product(context.shape(value))]), 0
    return context.emit(relax.op.repeat(value, attrs.repeats, axis_of("repeat", axis, context.rank(value))))


@op("reverse", attributes="ReverseAttrs")
def _reverse(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    return context.emit(relax.op.flip(args[0], axis_of("reverse", attrs.axis or 0, context.rank(args[0]))))


@op("broadcast_to", attributes="InitOpAttrs", operands=(1, 2))
def _broadcast_to(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    given = context.constant(args[1]) if len(args) == 2 else None
    shape = attrs.shape if given is None else tuple(given.ravel().tolist())
    return _broadcast(context, args[0], checked_shape(context, "the shape", shape))


@op("broadcast_to_like", operands=2)
def _broadcast_like(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    return _broadcast(context, args[0], context.shape(args[1]))


def _broadcast(context: Context, value: relax.Expr, shape: Any) -> relax.Expr:
    return context.emit(relax.op.broadcast_to(value, relax.ShapeExpr(list(shape))))


@op("take", attributes="TakeAttrs", operands=2, note="without batch_dims; modes clip, wrap and fast")
def _take(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    value, indices = args
    if attrs.batch_dims:
        raise ModelError("batch_dims are not imported")
    if not context.dtype(indices).startswith(("int", "uint")):
        raise ModelError(f"the indices are {context.dtype(indices)}")
    if attrs.axis is None:
        value, axis = context.reshape(value, [extent_product(context.shape(value))]), 0
    else:
        axis = axis_of("take", attrs.axis, context.rank(value))
    extent = context.shape(value)[axis]
    if not isinstance(extent, int) or extent < 1:
        raise ModelError(f"the extent {extent} of the axis must be known and positive")
    constant = context.constant(indices)
    if attrs.mode not in ("clip", "wrap", "fast"):
        raise ModelError(f"the mode {attrs.mode!r} is unknown")
    if constant is not None:
        bounded = np.mod(constant, extent) if attrs.mode == "wrap" else np.clip(constant, 0, extent - 1)
        indices = context.const(bounded, context.dtype(indices))
    elif attrs.mode == "wrap":
        indices = context.emit(relax.op.floor_mod(indices, context.scalar_like(extent, indices)))
    elif attrs.mode == "clip":
        indices = clipped(context, indices, 0, extent - 1)
    return context.emit(relax.op.take(value, indices, axis))


@op("one_hot", attributes="OneHotAttrs", operands=3)
def _one_hot(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    indices, on, off = args
    rank = context.rank(indices)
    dtype = attrs.dtype or "float32"
    if not 1 <= attrs.depth <= MAX_INTEGER // 2**16:
        raise ModelError(f"depth {attrs.depth}")
    axis = axis_of("one_hot", attrs.axis, rank + 1)
    shape = context.shape(indices)
    spread = context.reshape(indices, [*shape[:axis], 1, *shape[axis:]])
    numbers = context.const(np.arange(attrs.depth).reshape(-1, *[1] * (rank - axis)), context.dtype(indices))
    same = context.emit(relax.op.equal(spread, numbers))
    return context.emit(relax.op.where(same, context.cast(on, dtype), context.cast(off, dtype)))


@op("gather", attributes="GatherAttrs", operands=2)
def _gather(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    axis = axis_of("gather", attrs.axis, context.rank(args[0]))
    if context.rank(args[1]) != context.rank(args[0]):
        raise ModelError("data and indices differ in rank")
    return context.emit(relax.op.gather_elements(args[0], context.cast(args[1], "int64"), axis))


@op("nn.pad", attributes="PadAttrs", operands=(1, 2), note="the value must be a constant")
def _pad(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    value: float = attrs.pad_value
    if len(args) == 2:
        constant = context.constant(args[1])
        if constant is None or constant.size != 1:
            raise ModelError("the value to pad with is not a constant")
        value = float(constant.item())
    if attrs.pad_mode not in ("constant", "edge", "reflect"):
        raise ModelError(f"the mode {attrs.pad_mode!r} is unknown")
    return padded(context, args[0], attrs.pad_width, attrs.pad_mode, value)


@op("nn.mirror_pad", attributes="MirrorPadAttrs")
def _mirror_pad(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    if attrs.mode not in ("SYMMETRIC", "REFLECT"):
        raise ModelError(f"the mode {attrs.mode!r} is unknown")
    return padded(context, args[0], attrs.pad_width, attrs.mode.lower(), 0.0)


def padded(context: Context, data: relax.Expr, pad_width: Any, mode: str, value: float) -> relax.Expr:
    """`data` with elements before and after, those of the modes other than constant by taking some of its own."""
    rank = context.rank(data)
    if not isinstance(pad_width, tuple) or len(pad_width) != rank:
        raise ModelError(f"pad_width does not fit {rank} axes")
    widths = [integers("pad_width", pair, lowest=0, count=(2,)) for pair in pad_width]
    if not any(map(any, widths)):
        return data
    if mode == "constant":
        if not context.is_float(data):
            value = int(value)
        return context.emit(relax.op.nn.pad(data, [width for pair in widths for width in pair], "constant", value))
    for axis, (low, high) in enumerate(widths):
        if not (low or high):
            continue
        extent = context.shape(data)[axis]
        most = extent - (mode == "reflect") if isinstance(extent, int) else 0
        if not isinstance(extent, int) or extent < 1 or (mode != "edge" and max(low, high) > most):
            raise ModelError(f"padding by {low}, {high} does not fit the extent {extent}")
        if low + high + extent > 1 << 24:
            raise ModelError(f"padding by {low}, {high} is too large")
        how: Any = mode
        places = np.pad(np.arange(extent), (low, high), mode=how)
        data = context.emit(relax.op.take(data, context.const(places, "int64"), axis))
    return data


@op("nn.dilate", attributes="DilateAttrs")
def _dilate(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    value = args[0]
    strides = integers("strides", attrs.strides, lowest=1, count=(context.rank(value),))
    for axis, stride in enumerate(strides):
        if stride == 1:
            continue
        shape = context.shape(value)
        grown = context.reshape(value, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
        widths = [0] * (2 * len(shape) + 2)
        widths[2 * axis + 3] = stride - 1
        fill: float = attrs.dilation_value if context.is_float(value) else int(attrs.dilation_value)
        wide = context.emit(relax.op.nn.pad(grown, widths, "constant", fill))
        flat = context.reshape(wide, [*shape[:axis], shape[axis] * stride, *shape[axis + 1 :]])
        value = context.slice(flat, [axis], [0], [shape[axis] * stride - (stride - 1)])
    return value


@op("nn.depth_to_space", "nn.space_to_depth", attributes="SubPixelAttrs")
def _sub_pixel(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    """Blocks of `block_size` squared pixels from or into channels; mode CRD has the channel outermost."""
    value, block = args[0], attrs.block_size
    if attrs.layout not in ("NCHW", "NHWC") or attrs.mode not in ("DCR", "CRD") or not 1 <= block <= 4096:
        raise ModelError(f"layout {attrs.layout!r}, mode {attrs.mode!r}, block_size {block}")
    if context.rank(value) != 4:
        raise ModelError(f"the data has {context.rank(value)} axes")
    if attrs.layout == "NHWC":
        value = context.permute(value, [0, 3, 1, 2])
    n, c, h, w = context.shape(value)
    unit = block * block
    if attrs.op_name == "nn.depth_to_space":
        if not isinstance(c, int) or c % unit:
            raise ModelError(f"{c} channels do not divide by {unit}")
        if attrs.mode == "DCR":
            value = context.permute(context.reshape(value, [n, block, block, c // unit, h, w]), [0, 3, 4, 1, 5, 2])
        else:
            value = context.permute(context.reshape(value, [n, c // unit, block, block, h, w]), [0, 1, 4, 2, 5, 3])
        value = context.reshape(value, [n, c // unit, h * block, w * block])
    else:
        if not isinstance(h, int) or not isinstance(w, int) or h % block or w % block:
            raise ModelError(f"{h} by {w} does not divide by {block}")
        value = context.reshape(value, [n, c, h // block, block, w // block, block])
        value = context.reshape(context.permute(value, [0, 3, 5, 1, 2, 4]), [n, c * unit, h // block, w // block])
    return context.permute(value, [0, 2, 3, 1]) if attrs.layout == "NHWC" else value
