# SPDX-License-Identifier: Apache-2.0
"""Gradients of operators that only move elements: reshape-like, broadcast, slices, tile, stack, flip, triangles."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.gradients.common import Rule, fit, no_grads, same_extent, same_shape, shape_of, slice_axis
from relax_ops.ir import extents_of
from tvm_convgrad.errors import UnsupportedError


def reshaped(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y holds x's elements in the same order in another shape (reshape, flatten, batch_flatten): dx = dy reshaped."""
    x = orig_call.args[0]
    back = op.reshape(output_grad, relax.ShapeExpr(list(shape_of(x, str(orig_call.op.name)))))
    return [back, *no_grads(orig_call.args[1:])]


def squeeze(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = x without axes of extent 1: dx = dy with these axes put back."""
    x = orig_call.args[0]
    shape = shape_of(x, "relax.squeeze")
    if orig_call.attrs.axis is None:
        axes = [i for i, extent in enumerate(shape) if same_extent(extent, 1)]
    else:
        axes = sorted({int(a) % len(shape) for a in orig_call.attrs.axis})
    return [op.expand_dims(output_grad, axes) if axes else output_grad]


def broadcast_to(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = x repeated along axes of extent 1 and new leading axes: dx = dy summed over these."""
    return [fit(ctx, output_grad, orig_call.args[0]), *no_grads(orig_call.args[1:])]


def strided_slice(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = x[begin:end:stride] along some axes: dx is dy put back there, and 0 elsewhere.

    An axis at a time, last one first, as zeros of the shape that the slices before it leave.

    Raises:
        UnsupportedError: a stride that is not a constant.
    """
    x, axes = orig_call.args[0], [int(a.value) for a in orig_call.args[1].fields]
    begins, ends = (extents_of(arg.fields) for arg in orig_call.args[2:4])
    strides = extents_of(orig_call.args[4].fields) if len(orig_call.args) > 4 else (1,) * len(axes)
    if not all(isinstance(s, int) for s in strides):
        raise UnsupportedError(f"relax.strided_slice: the gradient needs constant strides, but they are {strides}")
    shape = shape_of(x, "relax.strided_slice")
    axes = [axis % len(shape) for axis in axes]
    bases = [x]
    for axis, begin, end, stride in list(zip(axes, begins, ends, strides, strict=True))[:-1]:
        bases.append(ctx.emit(op.strided_slice(bases[-1], axes=[axis], begin=[begin], end=[end], strides=[stride])))
    grad = output_grad
    for base, axis, begin, stride in reversed(list(zip(bases, axes, begins, strides, strict=True))):
        length, extent = shape_of(ctx.normalize(grad))[axis], shape[axis]
        start = _start(begin, extent, stride)
        if stride < 0:
            grad = ctx.emit(op.flip(grad, axis))
            start, stride = start + (length - 1) * stride, -stride
        if not (stride == 1 and same_extent(length, extent)):
            grad = _put_back(ctx, grad, base, axis, start, stride)
    return [grad, *no_grads(orig_call.args[1:])]


def _put_back(ctx: Any, grad: Any, base: Any, axis: int, start: Any, stride: int) -> Any:
    """A tensor of the shape of `base`: `grad` at start, start + stride, … of the axis, zeros elsewhere."""
    length, extent = shape_of(ctx.normalize(grad))[axis], shape_of(base)[axis]
    end = start + (length - 1) * stride + 1
    if isinstance(start, int) and isinstance(end, int) and isinstance(extent, int):
        zeros = ctx.emit(op.zeros_like(base))
        return ctx.emit(op.slice_scatter(zeros, grad, start, end, stride, axis=axis))
    # slice_scatter takes constants only.
    if stride > 1:
        column = ctx.emit(op.expand_dims(grad, [axis + 1]))
        gap = ctx.emit(op.zeros_like(column))
        spread = ctx.emit(op.concat([column, *[gap] * (stride - 1)], axis + 1))
        shape = list(shape_of(grad))
        shape[axis] = length * stride
        spread = ctx.emit(op.reshape(spread, relax.ShapeExpr(shape)))
        grad = slice_axis(ctx, spread, axis, 0, (length - 1) * stride + 1)
    parts = []
    if not same_extent(start, 0):
        parts.append(ctx.emit(op.zeros_like(slice_axis(ctx, base, axis, 0, start))))
    parts.append(grad)
    if not same_extent(end, extent):
        parts.append(ctx.emit(op.zeros_like(slice_axis(ctx, base, axis, end, extent))))
    whole = ctx.emit(op.concat(parts, axis)) if len(parts) > 1 else grad
    if same_shape(shape_of(ctx.normalize(whole)), shape_of(base)):
        return whole
    # Equal to the extent, but by a sum of minima and floor divisions that cannot be proven to be.
    return ctx.emit(op.reshape(whole, relax.ShapeExpr(list(shape_of(base)))))


def _start(begin: Any, extent: Any, stride: int) -> Any:
    """Where a slice really starts: negative indices count from the end, and those outside are brought to the border."""
    if isinstance(begin, int) and isinstance(extent, int):
        begin = begin + extent if begin < 0 else begin
        return min(max(begin, 0), extent) if stride > 0 else min(max(begin, -1), extent - 1)
    if isinstance(begin, int):
        if begin >= 0:
            lowest = begin if stride > 0 else tvm.tirx.min(_index(begin), extent - 1)
            return tvm.tirx.min(_index(begin), extent) if stride > 0 and begin > 0 else lowest
        return tvm.tirx.max(extent + begin, _index(0 if stride > 0 else -1))
    return begin


def _index(value: Any) -> Any:
    return tvm.tirx.IntImm("int64", value) if isinstance(value, int) else value


def stack(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = the tensors of a tuple along a new axis: each one's gradient is its slice of dy."""
    fields = orig_call.args[0].ty.fields
    axis = int(orig_call.attrs.axis or 0) % (fields[0].ndim + 1)
    parts = [ctx.emit(op.squeeze(slice_axis(ctx, output_grad, axis, i, i + 1), [axis])) for i in range(len(fields))]
    return [relax.Tuple(parts)]


def flip(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = x backwards along an axis: dx = dy backwards."""
    return [op.flip(output_grad, int(orig_call.attrs.axis))]


def tile(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = x repeated as a whole along each axis: dx = Σ over the copies."""
    x = orig_call.args[0]
    shape = list(shape_of(x, "relax.tile"))
    repeats = [int(r) for r in orig_call.attrs.repeats]
    lead = max(len(repeats), len(shape))
    shape, repeats = [1] * (lead - len(shape)) + shape, [1] * (lead - len(repeats)) + repeats
    split = [value for extent, times in zip(shape, repeats, strict=True) for value in (times, extent)]
    copies = op.reshape(output_grad, relax.ShapeExpr(split))
    total = op.sum(copies, axis=list(range(0, 2 * lead, 2)))
    return [op.reshape(total, relax.ShapeExpr(list(shape_of(x))))]


def repeat(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = each element of x repeated along an axis (over all elements without one): dx = Σ over the copies."""
    x, times, axis = orig_call.args[0], int(orig_call.attrs.repeats), orig_call.attrs.axis
    shape = list(shape_of(x, "relax.repeat"))
    if axis is None:
        split, where = [*shape, times], len(shape)
    else:
        where = int(axis) % len(shape) + 1
        split = [*shape[:where], times, *shape[where:]]
    return [op.sum(op.reshape(output_grad, relax.ShapeExpr(split)), axis=[where])]


def triangle(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = upper or lower triangle of x: dx = the same triangle of dy. (Stock returns too few partials for triu.)"""
    make = {"relax.triu": op.triu, "relax.tril": op.tril}[str(orig_call.op.name)]
    return [make(output_grad, orig_call.args[1]), *no_grads(orig_call.args[1:])]


GRADIENTS: dict[str, Rule] = {
    "relax.reshape": reshaped,
    "relax.flatten": reshaped,
    "relax.nn.batch_flatten": reshaped,
    "relax.squeeze": squeeze,
    "relax.broadcast_to": broadcast_to,
    "relax.strided_slice": strided_slice,
    "relax.stack": stack,
    "relax.flip": flip,
    "relax.tile": tile,
    "relax.repeat": repeat,
    "relax.triu": triangle,
    "relax.tril": triangle,
}
"""Gradient rules by operator."""
