# SPDX-License-Identifier: Apache-2.0
"""gather_nd and scatter_nd, whose places are vectors along the last axis of their indices. TVM has no gradients."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.expressions import ndim_of
from relax_ops.gradients.common import dtype_of, no_grads, shape_of
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.mapped_axis import Axes
from tvm_convgrad.core.errors import UnsupportedError


def gather_nd(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y[b, i, ...] = x[b, places[b, i], ...]: dx is dy summed at each place."""
    x, places = orig_call.args
    zeros = ctx.emit(op.zeros_like(x))
    whole = _with_batch(ctx, places, int(orig_call.attrs.batch_dims))
    return [op.scatter_nd(zeros, whole, output_grad, "add"), *no_grads([places])]


def _with_batch(ctx: relax.BlockBuilder, places: relax.Expr, count: int) -> relax.Expr:
    """Places with those of the first `count` axes in front, as scatter_nd reads them."""
    shape, dtype = list(shape_of(places, "relax.gather_nd")), dtype_of(places)
    columns = []
    for axis in range(count):
        extent = shape[axis]
        line = ctx.emit(op.arange(0, extent, 1, dtype))
        own = [extent if i == axis else 1 for i in range(len(shape))]
        column = ctx.emit(op.reshape(line, relax.ShapeExpr(own)))
        columns.append(ctx.emit(op.broadcast_to(column, relax.ShapeExpr([*shape[:-1], 1]))))
    return ctx.emit(op.concat([*columns, places], -1)) if columns else places


def scatter_nd(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y is x with updates at places, or with them added there: the updates' gradient is dy at the places.

    Where updates replace elements of x, those have none. Of several updates of one place, any may be the one that
    stays, as in ONNX and PyTorch; their gradients are all dy, as PyTorch's.

    Raises:
        UnsupportedError: another reduction.
    """
    _, places, updates = orig_call.args
    reduction = str(orig_call.attrs.reduction)
    at_places = op.gather_nd(output_grad, places)
    if reduction == "add":
        return [output_grad, *no_grads([places]), at_places]
    if reduction != "update":
        raise UnsupportedError(f"relax.scatter_nd: reduction {reduction!r} has no gradient; use 'update' or 'add'")
    kept = op.scatter_nd(output_grad, places, ctx.emit(op.zeros_like(updates)), "update")
    return [kept, *no_grads([places]), at_places]


def gather_nd_axis(call: relax.Call, axes: Axes) -> int | str:
    """Data and places have the samples on an axis of the batch."""
    data, places, batch = axes[0], axes[1], int(call.attrs.batch_dims)
    if data == places and data is not None and data < batch:
        return data
    if places is not None and data is None and places < ndim_of(call.args[1]) - 1 and not batch:
        return places
    depth = shape_of(call.args[1])[-1]
    if places is None and data is not None and isinstance(depth, int) and data >= batch + depth:
        return data - batch - depth + ndim_of(call.args[1]) - 1
    return "it selects samples"


RULES = (
    OperatorRules(named("gather_nd"), gradient=gather_nd, mapped_axis=gather_nd_axis),
    OperatorRules(named("scatter_nd"), gradient=scatter_nd),
)
