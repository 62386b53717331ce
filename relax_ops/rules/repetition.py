# SPDX-License-Identifier: Apache-2.0
"""Copies: tile repeats a tensor as a whole, repeat each of its elements."""

from __future__ import annotations

import math

from tvm import relax
from tvm.relax import op

from relax_ops.expressions import ndim_of
from relax_ops.gradients.common import shape_of
from relax_ops.layouts.common import along_axis_layout
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.common import shifted_axes
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes


def tile_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
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


def repeat_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = each element of x repeated along an axis (over all elements without one): dx = Σ over the copies."""
    x, times, axis = orig_call.args[0], int(orig_call.attrs.repeats), orig_call.attrs.axis
    shape = list(shape_of(x, "relax.repeat"))
    if axis is None:
        split, where = [*shape, times], len(shape)
    else:
        where = int(axis) % len(shape) + 1
        split = [*shape[:where], times, *shape[where:]]
    return [op.sum(op.reshape(output_grad, relax.ShapeExpr(split)), axis=[where])]


def tile_axis(call: relax.Call, axes: Axes) -> int | str:
    """Copies along other axes, of which there may be new ones in front."""
    axis = axes.first + ndim_of(call) - ndim_of(call.args[0])
    repeats = [int(times) for times in call.attrs.repeats]
    times = [1] * (ndim_of(call) - len(repeats)) + repeats
    return axis if times[axis] == 1 else "it repeats the samples"


def repeat_axis(call: relax.Call, axes: Axes) -> int | str:
    """Copies of elements along another axis."""
    if call.attrs.axis is None:
        return "it runs over all elements"
    return "it repeats the samples" if int(call.attrs.axis) % ndim_of(call) == axes.first else axes.first


def tile_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """Copies along the last axes, or along new ones behind the mapped axis."""
    return m.call(call, [m.aligned(args[0], True, max(m.own_ndim(args[0], True), len(call.attrs.repeats)))])


def repeat_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """Copies of each element along an axis, or of all elements in a line."""
    if call.attrs.axis is not None:
        return shifted_axes(m, call, args, mapped)
    line = m.mark(m.emit(m.reshaped(args[0], [math.prod(m.shape(args[0])[1:])])))
    return m.call(call, [line], axis=1)


RULES = (
    OperatorRules(named("tile"), gradient=tile_gradient, mapped_axis=tile_axis, vmap=tile_vmap, linear=((0,),)),
    OperatorRules(
        named("repeat"),
        gradient=repeat_gradient,
        layout=along_axis_layout,
        mapped_axis=repeat_axis,
        vmap=repeat_vmap,
        linear=((0,),),
    ),
)
