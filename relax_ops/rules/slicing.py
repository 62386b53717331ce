# SPDX-License-Identifier: Apache-2.0
"""Parts of a tensor: strided_slice, and slice_scatter, which writes one."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax import op

from legalize.builder import Extent
from relax_ops.expressions import ndim_of, same_extent, same_shape
from relax_ops.gradients.common import no_grads, shape_of, slice_axis
from relax_ops.ir import extents_of
from relax_ops.layouts.algebra import position
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import Legalization, OperatorRules, named
from relax_ops.vmap.common import along_one_axis, same_axis
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes
from tvm_convgrad.core.errors import UnsupportedError


def strided_slice_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
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
    bases, inbound = [x], bool(orig_call.attrs.assume_inbound)
    for axis, begin, end, stride in list(zip(axes, begins, ends, strides, strict=True))[:-1]:
        part = op.strided_slice(bases[-1], [axis], [begin], [end], [stride], assume_inbound=inbound)
        bases.append(ctx.emit(part))
    grad = output_grad
    for base, axis, begin, stride in reversed(list(zip(bases, axes, begins, strides, strict=True))):
        length, extent = shape_of(ctx.normalize(grad))[axis], shape[axis]
        start = begin if inbound and _is_place(begin) else _start(begin, extent, stride)
        if stride < 0:
            grad = ctx.emit(op.flip(grad, axis))
            start, stride = start + (length - 1) * stride, -stride
        if not (stride == 1 and same_extent(length, extent)):
            grad = put_back(ctx, grad, base, axis, start, stride)
    return [grad, *no_grads(orig_call.args[1:])]


def put_back(
    ctx: relax.BlockBuilder, grad: relax.Expr, base: relax.Expr, axis: int, start: Extent, stride: int
) -> relax.Expr:
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


def _start(begin: Extent, extent: Extent, stride: int) -> Any:
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


def _is_place(begin: Extent) -> bool:
    """Whether the start of a slice that is in bounds is a number that counts from the first element."""
    return isinstance(begin, int) and begin >= 0


def _index(value: relax.Expr) -> relax.Expr:
    return tvm.tirx.IntImm("int64", value) if isinstance(value, int) else value


def slice_scatter_layout(site: Site) -> Decision:
    """Writing a slice: the slice is stored as the tensor is."""
    layout = site.tensor(0)
    axis = position(layout, int(site.attrs.axis))
    return Decision([layout, layout, None, None, None], layout, site.changed_attrs(axis=axis))


def strided_slice_axis(call: relax.Call, axes: Axes) -> int | str:
    """A part of other axes."""
    axis = axes.first
    sliced = {int(place) % ndim_of(call) for place in extents_of(call.args[1].fields)}
    return "it selects samples" if axis in sliced else axis


def strided_slice_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """Parts along the axes that are named."""
    ndim, inbound = m.own_ndim(args[0], True), bool(call.attrs.assume_inbound)
    axes = [int(axis.value) % ndim + 1 for axis in args[1].fields]
    return relax.op.strided_slice(args[0], axes, *args[2:], assume_inbound=inbound)


def slice_scatter_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x with a slice overwritten: that slice of dy is the gradient of what is written, the rest that of x."""
    x, written, begin, end, stride = orig_call.args
    axis = int(orig_call.attrs.axis)
    if same_shape(shape_of(written), shape_of(x)):
        return [ctx.emit(op.zeros_like(output_grad)), output_grad, *no_grads([begin, end, stride])]
    zeros = ctx.emit(op.zeros_like(written))
    dx = op.slice_scatter(output_grad, zeros, begin, end, stride, axis=axis)
    part = op.strided_slice(output_grad, [axis], [begin], [end], [stride])
    return [dx, part, *no_grads([begin, end, stride])]


def _slice_scatter_legalization(stock: Legalization) -> Legalization:
    """Lowering of slice_scatter to one loop that reads inside of the slice.

    TVM's own reads up to the extent of the tensor, which is more than the slice has, and writes a warning each time.
    """

    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        x, written, *bounds = call.args
        shape, axis = shape_of(x), int(call.attrs.axis) % ndim_of(x)
        numbers = extents_of(bounds)
        if same_shape(shape_of(written), shape):
            return written
        if not all(isinstance(number, int) for number in numbers) or numbers[2] < 1:
            return stock(block_builder, call)
        if shape_of(written)[axis] == 0:
            return x

        def write(whole: te.Tensor, part: te.Tensor) -> te.Tensor:
            extent = shape[axis] if isinstance(shape[axis], int) else whole.shape[axis]
            begin, end = (_start(number, extent, 1) for number in numbers[:2])
            step = numbers[2]

            def element(*place: Any) -> Any:
                at = place[axis]
                row = tirx.floordiv(at - begin, step)
                inside = tirx.all(at >= begin, at < end)
                if step != 1:
                    inside = tirx.all(inside, tirx.floormod(at - begin, step) == 0)
                # A select would read the slice at all places, out of bounds, too.
                return tirx.if_then_else(inside, part(*place[:axis], row, *place[axis + 1 :]), whole(*place))

            return te.compute(whole.shape, element, name="slice_scatter")

        return block_builder.call_te(write, x, written, primfunc_name_hint="slice_scatter")

    return legalize


def slice_scatter_axis(call: relax.Call, axes: Axes) -> int | str:
    """Tensor and slice have the samples on the same axis, if at all, which is not the one that is sliced."""
    axis = same_axis(call, axes)
    return "it writes samples" if int(call.attrs.axis) % ndim_of(call) == axis else axis


RULES = (
    OperatorRules(
        named("strided_slice"),
        gradient=strided_slice_gradient,
        mapped_axis=strided_slice_axis,
        vmap=strided_slice_vmap,
        linear=((0,),),
    ),
    OperatorRules(
        named("slice_scatter"),
        gradient=slice_scatter_gradient,
        layout=slice_scatter_layout,
        mapped_axis=slice_scatter_axis,
        vmap=along_one_axis,
        linear=((0, 1),),
        legalize=_slice_scatter_legalization,
    ),
)
