# SPDX-License-Identifier: Apache-2.0
"""Tensors put together along an axis, and taken apart: concat, stack, split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tvm import relax, tirx
from tvm.relax import op

from relax_ops.expressions import ndim_of
from relax_ops.gradients.common import slice_axis
from relax_ops.layouts.algebra import initial, layout_of, position, storage_order
from relax_ops.layouts.common import most_common
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.common import shifted_axes
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes


def stack_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = the tensors of a tuple along a new axis: each one's gradient is its slice of dy."""
    fields = orig_call.args[0].ty.fields
    axis = int(orig_call.attrs.axis or 0) % (fields[0].ndim + 1)
    parts = [ctx.emit(op.squeeze(slice_axis(ctx, output_grad, axis, i, i + 1), [axis])) for i in range(len(fields))]
    return [relax.Tuple(parts)]


def concat_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = the tensors of a tuple behind each other: each one's gradient is its part of dy.

    All of dy is that of one tensor alone: a split in one part has the type of a tensor, not that of a tuple. An empty
    tensor gets an empty gradient beside the split, whose parts have one element at least. A split knows its places as
    numbers; of symbolic extents the parts are slices.
    """
    fields = orig_call.args[0].ty.fields
    axis = int(orig_call.attrs.axis or 0)
    filled = [place for place, field in enumerate(fields) if not _is_empty(field, axis)]
    if len(fields) > 1 and not all(isinstance(field.shape.values[axis], tirx.IntImm) for field in fields):
        return [relax.Tuple(_symbolic_parts(ctx, output_grad, fields, axis % fields[0].ndim))]
    if len(filled) == len(fields) > 1:
        return [op.split(output_grad, _borders(fields, axis), axis)]
    parts = [output_grad if filled == [place] else None for place in range(len(fields))]
    if len(filled) > 1:
        apart = ctx.emit(op.split(output_grad, _borders([fields[place] for place in filled], axis), axis))
        for number, place in enumerate(filled):
            parts[place] = ctx.emit(relax.TupleGetItem(apart, number))
    empty = [
        ctx.emit(op.zeros(field.shape, field.dtype)) if part is None else part
        for field, part in zip(fields, parts, strict=True)
    ]
    return [relax.Tuple(empty)]


def _symbolic_parts(
    ctx: relax.BlockBuilder, whole: relax.Expr, fields: Sequence[relax.TensorType], axis: int
) -> list[relax.Expr]:
    """The parts of a tensor along an axis of symbolic extents."""
    ends = list(accumulate(field.shape.values[axis] for field in fields))
    begins = [tirx.const(0, "int64"), *ends[:-1]]
    parts = []
    for field, begin, end in zip(fields, begins, ends, strict=True):
        part = slice_axis(ctx, whole, axis, begin, end)
        parts.append(ctx.emit(op.reshape(part, field.shape)))  # the extent as the tensor has it, not as a difference
    return parts


def _borders(fields: Sequence[relax.TensorType], axis: int) -> list[Any]:
    """Where along an axis each tensor but the first begins."""
    *inner, _ = accumulate(field.shape.values[axis] for field in fields)
    return inner


def _is_empty(field: relax.TensorType, axis: int) -> bool:
    extent = field.shape.values[axis]
    return isinstance(extent, tirx.IntImm) and int(extent) == 0


def _stock_splits_wrongly(call: relax.Call) -> str:
    fields = call.args[0].ty.fields
    if not all(isinstance(field.shape.values[int(call.attrs.axis or 0)], tirx.IntImm) for field in fields):
        return "TVM's rule splits at symbolic places, which its split refuses"
    if len(fields) == 1:
        return "TVM's rule splits in one part, which is not a tuple"
    if any(_is_empty(field, int(call.attrs.axis or 0)) for field in fields):
        return "TVM's rule splits off an empty part, which its split refuses"
    return ""


def concat_layout(site: Site) -> Decision:
    """The layout that most of the tensors have; where as many have another one, not the program's own."""
    layouts = site.layout(site.call.args[0])
    assert isinstance(layouts, list)
    layout = most_common(layouts)
    axis = 0 if site.attrs.axis is None else int(site.attrs.axis)
    return Decision([[layout] * len(layouts)], layout, site.changed_attrs(axis=position(layout, axis)))


def stack_layout(site: Site) -> Decision:
    """The new axis comes first in storage, the others as they are. (Stock names it by a letter that is not an axis.)"""
    layouts = site.layout(site.call.args[0])
    assert isinstance(layouts, list)
    layout = most_common(layouts)
    axis = int(site.attrs.axis or 0) % (len(layout) + 1)
    if layout == initial(len(layout)):
        return Decision([[layout] * len(layouts)], initial(len(layout) + 1))
    moved = [old + (old >= axis) for old in storage_order(layout)]
    return Decision([[layout] * len(layouts)], layout_of([axis, *moved]), site.changed_attrs(axis=0))


def concat_axis(call: relax.Call, axes: Axes) -> int | str:
    """Tensors put together along another axis."""
    axis = axes.first
    along = 0 if call.attrs.axis is None else int(call.attrs.axis) % ndim_of(call)
    return "it puts samples behind each other" if along == axis else axis


def stack_axis(call: relax.Call, axes: Axes) -> int | str:
    """Tensors put together along a new axis."""
    axis = axes.first
    return axis + (_axis_of_stack(call, ndim_of(call)) <= axis)


def _axis_of_stack(call: relax.Call, ndim: int) -> int:
    return (0 if call.attrs.axis is None else int(call.attrs.axis)) % ndim


def split_axis(call: relax.Call, axes: Axes) -> int | str:
    """One tensor in parts along another axis."""
    axis = axes.first
    return "it takes the samples apart" if int(call.attrs.axis) % ndim_of(call.args[0]) == axis else axis


def concat_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """All tensors are mapped, as fields of one tuple."""
    ndim, along = m.own_ndim(args[0].fields[0], True), call.attrs.axis
    return relax.op.concat(list(args[0].fields), (0 if along is None else int(along)) % ndim + 1)


def stack_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """All tensors are mapped, as fields of one tuple."""
    ndim = m.own_ndim(args[0].fields[0], True) + 1
    return relax.op.stack(list(args[0].fields), _axis_of_stack(call, ndim) + 1)


RULES = (
    OperatorRules(
        named("concat"),
        gradient=concat_gradient,
        stock_fails=_stock_splits_wrongly,
        layout=concat_layout,
        mapped_axis=concat_axis,
        vmap=concat_vmap,
        linear=((0,),),
    ),
    OperatorRules(
        named("stack"),
        gradient=stack_gradient,
        layout=stack_layout,
        always=True,
        mapped_axis=stack_axis,
        vmap=stack_vmap,
        linear=((0,),),
    ),
    OperatorRules(named("split"), mapped_axis=split_axis, vmap=shifted_axes, linear=((0,),)),
)
