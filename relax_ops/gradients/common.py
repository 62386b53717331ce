# SPDX-License-Identifier: Apache-2.0
"""What gradient rules share: types and shapes of expressions, sums back to an operand's shape, element counts.

See relax_ops.rules.contract.GradientRule for what a rule is; `ctx` is the block builder of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax
from tvm.relax.op.grad import no_grad

from legalize.builder import Extent
from relax_ops.expressions import known_shape, same_extent, same_shape
from relax_ops.rules.contract import GradientRule
from tvm_convgrad.core.dtypes import SHORT_FLOATS, wide_dtype
from tvm_convgrad.core.errors import UnsupportedError

FLOATS = (*SHORT_FLOATS, "float32", "float64")


def dtype_of(expr: relax.Expr) -> str:
    """The element type of a tensor expression, such as "float32"."""
    dtype = expr.ty.dtype
    return str(getattr(dtype, "dtype", dtype))


def shape_of(expr: relax.Expr, op: str = "gradient") -> tuple[Extent, ...]:
    """The extents of a tensor expression: ints where constant, IR expressions elsewhere.

    Raises:
        UnsupportedError: the shape is not known at compile time.
    """
    shape = known_shape(expr.ty)
    if shape is None:
        raise UnsupportedError(f"{op}: the gradient needs the shape of {expr}, which is not known; use R.match_cast")
    return shape


def scalar(value: float, dtype: str) -> Any:
    """A constant of rank 0."""
    return relax.const(value, dtype)


def cast(expr: relax.Expr, dtype: str, ctx: relax.BlockBuilder) -> relax.Expr:
    """`expr` as `dtype`, itself if it is of that type already."""
    expr = ctx.normalize(expr)
    return expr if dtype_of(expr) == dtype else ctx.emit(relax.op.astype(expr, dtype))


def widened(ctx: relax.BlockBuilder, *exprs: relax.Expr) -> list[relax.Expr]:
    """The tensors with 16-bit floats as float32, so that what is computed from them keeps its digits."""
    return [cast(e, wide_dtype(dtype_of(ctx.normalize(e))), ctx) for e in exprs]


def zeros_like(expr: relax.Expr) -> relax.Expr:
    """A scalar zero of the expression's dtype, for use in `where`."""
    return scalar(0, dtype_of(expr))


def sum_to(ctx: relax.BlockBuilder, expr: relax.Expr, shape: Sequence[Extent]) -> relax.Expr:
    """Sum `expr` over the axes along which `shape` was broadcast to it: the adjoint of broadcasting.

    Built of relax.sum, through which layouts propagate, unless an axis can be proven neither equal nor 1: then
    collapse_sum_to. 16-bit floats are summed in float32.
    """
    expr = ctx.normalize(expr)
    have = shape_of(expr)
    if same_shape(have, shape):
        return expr
    dtype = dtype_of(expr)
    lead = len(have) - len(shape)
    ones, doubtful = [], False
    for axis, (extent, want) in enumerate(zip(have[lead:], shape, strict=True)):
        if same_extent(extent, want):
            continue
        if same_extent(want, 1):
            ones.append(axis)
        else:
            doubtful = True
    expr = cast(expr, wide_dtype(dtype), ctx)
    if doubtful:
        expr = ctx.emit(relax.op.collapse_sum_to(expr, relax.ShapeExpr(list(shape))))
        return cast(expr, dtype, ctx)
    if ones:
        expr = ctx.emit(relax.op.sum(expr, axis=[a + lead for a in ones], keepdims=True))
    if lead:
        expr = ctx.emit(relax.op.sum(expr, axis=list(range(lead))))
    return cast(expr, dtype, ctx)


def fit(ctx: relax.BlockBuilder, partial: relax.Expr, operand: relax.Expr) -> relax.Expr:
    """`partial` with the shape and dtype of `operand`, which may have been broadcast."""
    return cast(sum_to(ctx, partial, shape_of(operand)), dtype_of(operand), ctx)


def count(ctx: relax.BlockBuilder, tensor: relax.Expr, axes: Sequence[int], dtype: str) -> relax.Expr:
    """The product of the extents of `tensor` along `axes`: a Python int, or a scalar tensor computed at run time.

    A symbolic extent is counted by summing a line of ones, as TVM 0.27 does not compile a kernel whose symbolic extent
    occurs in none of its tensors. `dtype` is float32 (exact below 2^24 along one axis) or float64.
    """
    shape = shape_of(tensor)
    fixed = math.prod(shape[a] for a in axes if isinstance(shape[a], int))
    result: Any = fixed
    for axis in (a for a in axes if not isinstance(shape[a], int)):
        others = [a for a in range(len(shape)) if a != axis]
        line = tensor
        if others:
            zeros, units = [0] * len(others), [1] * len(others)
            line = ctx.emit(relax.op.strided_slice(tensor, axes=others, begin=zeros, end=units, assume_inbound=True))
        ones = ctx.emit(relax.op.astype(ctx.emit(relax.op.ones_like(line)), dtype))
        extent = ctx.emit(relax.op.sum(ones))
        result = ctx.emit(relax.op.multiply(extent, scalar(result, dtype) if isinstance(result, int) else result))
    return result if isinstance(result, int) else ctx.emit(no_grad(result))


def divide_by_count(ctx: relax.BlockBuilder, expr: relax.Expr, tensor: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """`expr` over the number of elements of `tensor` along `axes`; `expr` is float32 or float64."""
    dtype = dtype_of(ctx.normalize(expr))
    number = count(ctx, tensor, axes, dtype)
    return ctx.emit(relax.op.divide(expr, scalar(number, dtype) if isinstance(number, int) else number))


def restore_axes(ctx: relax.BlockBuilder, expr: relax.Expr, axes: Sequence[int], keepdims: bool) -> relax.Expr:
    """The result of a reduction with the reduced axes put back with extent 1."""
    if keepdims or not axes:
        return expr
    return ctx.emit(relax.op.expand_dims(expr, list(axes)))


def slice_axis(ctx: relax.BlockBuilder, expr: relax.Expr, axis: int, begin: Extent, end: Extent) -> relax.Expr:
    """Elements begin ≤ i < end along one axis."""
    return ctx.emit(relax.op.strided_slice(expr, axes=[axis], begin=[begin], end=[end], assume_inbound=True))


def no_grads(arguments: Sequence[relax.Expr]) -> list[relax.Expr]:
    """The mark "no gradient" for each of these arguments."""
    return [no_grad(argument) for argument in arguments]


def is_float(expr: relax.Expr) -> bool:
    """Whether a tensor has a floating-point element type."""
    return dtype_of(expr) in FLOATS


def elementwise_gradient(derivative: Callable[[Any, Any, Any], Any]) -> GradientRule:
    """The rule of a unary operator y = f(x) from `derivative(ctx, x, y)`, computed in float32 at least."""

    def rule(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        x = orig_call.args[0]
        wide_x, wide_y, wide_grad = widened(ctx, x, orig_var, output_grad)
        return [cast(relax.op.multiply(wide_grad, derivative(ctx, wide_x, wide_y)), dtype_of(x), ctx)]

    rule.__doc__ = derivative.__doc__
    return rule
