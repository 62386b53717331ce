# SPDX-License-Identifier: Apache-2.0
"""Operators along one axis that keep the shape: softmax, log_softmax, cumsum, cumprod, flip."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.gradients.common import cast, dtype_of, shape_of
from relax_ops.layouts.common import along_axis_layout
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.common import along_axis, shifted_axes


def flip(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x backwards along an axis: dx = dy backwards."""
    return [op.flip(output_grad, int(orig_call.attrs.axis))]


def cumsum(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = sums of x up to each place, exclusive of it if so asked: dx = such sums of dy from the other end."""
    attrs, x = orig_call.attrs, orig_call.args[0]
    if attrs.axis is None:
        output_grad = ctx.emit(op.reshape(output_grad, relax.ShapeExpr([-1])))
    axis = 0 if attrs.axis is None else int(attrs.axis)
    summed = op.cumsum(op.flip(cast(output_grad, dtype_of(x), ctx), axis), axis, exclusive=bool(attrs.exclusive))
    return [op.reshape(op.flip(summed, axis), relax.ShapeExpr(list(shape_of(x, "relax.cumsum"))))]


def _is_exclusive(call: relax.Call) -> str:
    """Whether TVM's own rule is wrong."""
    return "TVM's rule ignores `exclusive`" if bool(call.attrs.exclusive) else ""


RULES = (
    OperatorRules(
        named("nn.softmax", "nn.log_softmax"), layout=along_axis_layout, mapped_axis=along_axis, vmap=shifted_axes
    ),
    OperatorRules(
        named("cumsum"),
        gradient=cumsum,
        stock_fails=_is_exclusive,
        layout=along_axis_layout,
        mapped_axis=along_axis,
        vmap=shifted_axes,
        linear=((0,),),
    ),
    OperatorRules(named("cumprod"), layout=along_axis_layout, mapped_axis=along_axis),
    OperatorRules(
        named("flip"), gradient=flip, mapped_axis=along_axis, vmap=shifted_axes, linear=((0,),), isometric=True
    ),
)
