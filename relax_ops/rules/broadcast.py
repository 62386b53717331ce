# SPDX-License-Identifier: Apache-2.0
"""broadcast_to, and the sums that undo it: collapse_sum_to and collapse_sum_like."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents, known_shape, ndim_of, same_extent
from relax_ops.gradients.common import fit, no_grads, shape_of
from relax_ops.layouts.algebra import initial, stored
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes


def broadcast_to_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x repeated along axes of extent 1 and new leading axes: dx = dy summed over these."""
    return [fit(ctx, output_grad, orig_call.args[0]), *no_grads(orig_call.args[1:])]


def collapse_sum_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x summed to a shape that broadcasts to x's: dx = dy broadcast. The second argument is a shape or its like."""
    x = orig_call.args[0]
    return [
        op.broadcast_to(output_grad, relax.ShapeExpr(list(shape_of(x, str(orig_call.op.name))))),
        *no_grads(orig_call.args[1:]),
    ]


def broadcast_to_layout(site: Site) -> Decision:
    """To more elements along the same axes: stored alike. A scalar becomes what feature maps are."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    shape = known_shape(site.call.ty)
    before = site.shape(0)
    if shape is None or before is None:
        return Decision([site.initial(0), None], initial(ndim))
    if all(same_extent(extent, 1) for extent in before) and len(layout) < ndim:
        output = site.preferred(ndim)
    elif len(layout) == ndim:
        output = layout
    else:
        layout, output = site.initial(0), initial(ndim)
    return Decision([layout, None], output, None, {1: relax.ShapeExpr(stored(shape, output))})


def collapse_sum_to_layout(site: Site) -> Decision:
    """Sums over axes: stored alike if no axis goes away."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    shape = known_shape(site.call.ty)
    if shape is None or len(layout) != ndim:
        return Decision([site.initial(0), None], initial(ndim))
    return Decision([layout, None], layout, None, {1: relax.ShapeExpr(stored(shape, layout))})


def collapse_sum_like_layout(site: Site) -> Decision:
    """As collapse_sum_to; the second operand is stored as the first one is."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    if len(layout) != ndim:
        return Decision([site.initial(0), site.initial(1)], initial(ndim))
    return Decision([layout, layout], layout)


def broadcast_to_axis(call: relax.Call, axes: Axes) -> int | str:
    """To a larger shape, whose last axes are those of the operand."""
    return axes.first + ndim_of(call) - ndim_of(call.args[0])


def broadcast_to_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """To the shape of one index, for all of them."""
    shape = list(known_extents(call))
    value = m.aligned(args[0], True, len(shape))
    return relax.op.broadcast_to(value, relax.ShapeExpr([m.count, *shape]))


RULES = (
    OperatorRules(
        named("broadcast_to"),
        gradient=broadcast_to_gradient,
        layout=broadcast_to_layout,
        mapped_axis=broadcast_to_axis,
        vmap=broadcast_to_vmap,
        linear=((0,),),
    ),
    OperatorRules(named("collapse_sum_to"), gradient=collapse_sum_gradient, layout=collapse_sum_to_layout),
    OperatorRules(named("collapse_sum_like"), gradient=collapse_sum_gradient, layout=collapse_sum_like_layout),
)
