# SPDX-License-Identifier: Apache-2.0
"""Operators that sort along an axis: topk, sort and argsort.

The gradient of the values goes back to the places from which they came, found by sorting once more where the call does
not give them.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.expressions import ndim_of
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.rules.elementwise import no_gradients
from relax_ops.vmap.common import along_axis
from relax_ops.vmap.mapped_axis import Axes


def topk(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = the k largest or smallest of x along an axis, and their places: dx is dy there, 0 elsewhere."""
    x, attrs = orig_call.args[0], orig_call.attrs
    kind, axis = str(attrs.ret_type), int(attrs.axis)
    if kind == "indices":
        return [op.grad.no_grad(x)]
    grad = output_grad if kind == "values" else ctx.emit(relax.TupleGetItem(ctx.emit(output_grad), 0))
    if kind == "both":
        places = ctx.emit(relax.TupleGetItem(orig_var, 1))
    else:
        places = ctx.emit(op.topk(x, int(attrs.k), axis, "indices", bool(attrs.largest), "int64"))
    return [op.scatter_elements(ctx.emit(op.zeros_like(x)), places, grad, axis, "add")]


def sort(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x sorted along an axis: dx is dy at the places from which the values came."""
    x, axis = orig_call.args[0], int(orig_call.attrs.axis)
    places = ctx.emit(op.argsort(x, axis, bool(orig_call.attrs.descending), "int64"))
    return [op.scatter_elements(ctx.emit(op.zeros_like(x)), places, output_grad, axis, "add")]


def topk_axis(call: relax.Call, axes: Axes) -> int | str:
    """The first of another axis."""
    axis = axes.first
    return "it selects samples" if int(call.attrs.axis) % ndim_of(call.args[0]) == axis else axis


RULES = (
    OperatorRules(named("topk"), gradient=topk, mapped_axis=topk_axis),
    OperatorRules(named("sort"), gradient=sort, mapped_axis=along_axis),
    OperatorRules(named("argsort"), gradient=no_gradients, mapped_axis=along_axis),
)
