# SPDX-License-Identifier: Apache-2.0
"""Gradients of reductions: sum, mean, variance, std, max, min and collapse_sum; any axes, keepdims, symbolic extents.

Stock mean and variance need static extents. Variance and std are the biased ones (divided by the count), as in Relax.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.relax import op

from relax_ops.gradients.common import (
    Rule,
    axes_of,
    cast,
    divide_by_count,
    dtype_of,
    no_grads,
    restore_axes,
    scalar,
    shape_of,
    widened,
)


def _spread(ctx: Any, expr: Any, x: Any) -> Any:
    """`expr`, of extent 1 on the reduced axes, repeated to the shape of `x`, in x's dtype."""
    return op.broadcast_to(cast(expr, dtype_of(x), ctx), relax.ShapeExpr(list(shape_of(x))))


def _axes(call: Any) -> list[int]:
    return axes_of(call.attrs.axis, len(shape_of(call.args[0], str(call.op.name))))


def sum_(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = Σ x: dx = dy."""
    x, axes = orig_call.args[0], _axes(orig_call)
    return [_spread(ctx, restore_axes(ctx, output_grad, axes, bool(orig_call.attrs.keepdims)), x)]


def mean(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = Σ x / n: dx = dy/n."""
    x, axes = orig_call.args[0], _axes(orig_call)
    (grad,) = widened(ctx, restore_axes(ctx, output_grad, axes, bool(orig_call.attrs.keepdims)))
    return [_spread(ctx, divide_by_count(ctx, grad, x, axes), x)]


def variance(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = Σ (x − m)²/n: dx = dy·2(x − m)/n; the mean's own share cancels."""
    x, axes = orig_call.args[0], _axes(orig_call)
    grad, wide_x = widened(ctx, restore_axes(ctx, output_grad, axes, bool(orig_call.attrs.keepdims)), x)
    factor = divide_by_count(ctx, op.multiply(grad, scalar(2, dtype_of(wide_x))), x, axes)
    return [cast(op.multiply(_deviation(ctx, wide_x, axes), factor), dtype_of(x), ctx)]


def std(orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = √variance: dx = dy·(x − m)/(n·y), infinite or NaN where y = 0."""
    x, axes, keep = orig_call.args[0], _axes(orig_call), bool(orig_call.attrs.keepdims)
    grad, result, wide_x = widened(
        ctx, restore_axes(ctx, output_grad, axes, keep), restore_axes(ctx, orig_var, axes, keep), x
    )
    factor = divide_by_count(ctx, op.divide(grad, result), x, axes)
    return [cast(op.multiply(_deviation(ctx, wide_x, axes), factor), dtype_of(x), ctx)]


def _deviation(ctx: Any, x: Any, axes: list[int]) -> Any:
    return ctx.emit(op.subtract(x, op.mean(x, axis=axes, keepdims=True)))


def extremum(orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = max x or min x: dy is divided evenly among the elements that reach y, as torch.amax does."""
    x, axes, keep = orig_call.args[0], _axes(orig_call), bool(orig_call.attrs.keepdims)
    best = restore_axes(ctx, orig_var, axes, keep)
    reached = ctx.emit(op.astype(op.equal(x, best), wide_type(x)))
    ties = op.sum(reached, axis=axes, keepdims=True)
    (grad,) = widened(ctx, restore_axes(ctx, output_grad, axes, keep))
    # A product and no choice: where y is NaN nothing equals it, and dy / 0 * 0 is NaN for all of x, as in PyTorch.
    return [cast(op.multiply(op.divide(grad, ties), reached), dtype_of(x), ctx)]


def wide_type(x: Any) -> str:
    """The dtype in which ties of `x` are counted."""
    return "float64" if dtype_of(x) == "float64" else "float32"


def collapse_sum(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = x summed to a shape that broadcasts to x's: dx = dy broadcast. The second argument is a shape or its like."""
    x = orig_call.args[0]
    return [
        op.broadcast_to(output_grad, relax.ShapeExpr(list(shape_of(x, str(orig_call.op.name))))),
        *no_grads(orig_call.args[1:]),
    ]


GRADIENTS: dict[str, Rule] = {
    "relax.sum": sum_,
    "relax.mean": mean,
    "relax.variance": variance,
    "relax.std": std,
    "relax.max": extremum,
    "relax.min": extremum,
    "relax.collapse_sum_to": collapse_sum,
    "relax.collapse_sum_like": collapse_sum,
}
"""Gradient rules by operator."""
