# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on two tensors that broadcast against each other.

Stock sums a broadcast operand's gradient in its own dtype and by collapse_sum_to, which stops layouts; its gradient of
power is NaN at 0⁰.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tvm import relax, tirx
from tvm.relax import op

from relax_ops.compat import Constant, array_of
from relax_ops.gradients.common import dtype_of, fit, scalar
from relax_ops.rules.contract import Legalization, LegalizationRule
from relax_ops.rules.elementwise import broadcast_rules, emit_elementwise, no_gradients

Combine: TypeAlias = "Callable[[tirx.Expr, tirx.Expr, str], tirx.Expr]"
"""Combines two elements of a type."""


def add(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x + y."""
    return [fit(ctx, output_grad, operand) for operand in orig_call.args]


def subtract(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x − y."""
    x, y = orig_call.args
    return [fit(ctx, output_grad, x), op.negative(fit(ctx, output_grad, y))]


def multiply(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x·y."""
    x, y = orig_call.args
    return [fit(ctx, op.multiply(output_grad, y), x), fit(ctx, op.multiply(output_grad, x), y)]


def divide(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x/y: dx = dz/y, dy = −dz·z/y."""
    x, y = orig_call.args
    dx = ctx.emit(op.divide(output_grad, y))
    return [fit(ctx, dx, x), fit(ctx, op.negative(op.multiply(dx, orig_var)), y)]


def power(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x^y: dx = dz·y·x^(y−1), 0 where y = 0; dy = dz·z·ln x, 0 where x = 0 and y ≥ 0."""
    x, y = orig_call.args
    zero, one = scalar(0, dtype_of(y)), scalar(1, dtype_of(y))
    less = scalar(float(array_of(y)) - 1, dtype_of(y)) if _is_number(y) else op.subtract(y, one)
    dx = op.multiply(op.multiply(output_grad, y), op.power(x, less))
    dx = op.where(op.equal(y, zero), zero, dx)
    dy = op.multiply(op.multiply(output_grad, orig_var), op.log(x))
    flat = op.logical_and(op.equal(x, zero), op.greater_equal(y, zero))
    return [fit(ctx, dx, x), fit(ctx, op.where(flat, zero, dy), y)]


def floor_modulo(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x − y·⌊x/y⌋: dx = dz, dy = −dz·⌊x/y⌋, the quotient from the exact remainders, as PyTorch rounds it."""
    x, y = orig_call.args
    towards_zero = ctx.emit(op.mod(x, y))
    quotient = op.round(op.divide(op.subtract(x, towards_zero), y))
    below = op.astype(op.not_equal(orig_var, towards_zero), dtype_of(x))
    quotient = ctx.emit(op.subtract(quotient, below))
    return [fit(ctx, output_grad, x), fit(ctx, op.negative(op.multiply(output_grad, quotient)), y)]


def _floored(combine: Combine) -> LegalizationRule:
    """Legalization of what rounds the quotient of two floats down, by the exact remainder; TVM divides first.

    Of 1e9 and 0.3 in float32 ⌊x/y⌋·y is larger than x, and of 1 and inf x − y·⌊x/y⌋ is NaN.
    """

    def make(stock: Legalization) -> Legalization:
        def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            dtype = dtype_of(call)
            if dtype not in ("float32", "float64") or getattr(call.ty.shape, "values", None) is None:
                return stock(block_builder, call)
            return emit_elementwise(block_builder, call, call.args, lambda x, y: combine(x, y, dtype))

        return legalize

    return make


def _is_below(remainder: tirx.Expr, y: tirx.Expr, zero: tirx.Expr) -> tirx.Expr:
    """Whether a remainder with the sign of x has not that of y, so that the quotient rounded down is one less."""
    return tirx.Or(tirx.And(y < zero, remainder > zero), tirx.And(y > zero, remainder < zero))


def _floored_remainder(x: tirx.Expr, y: tirx.Expr, dtype: str) -> tirx.Expr:
    """The remainder that has the sign of y."""
    remainder = tirx.Mod(x, y)
    return tirx.Select(_is_below(remainder, y, tirx.const(0, dtype)), remainder + y, remainder)


def _floored_quotient(x: tirx.Expr, y: tirx.Expr, dtype: str) -> tirx.Expr:
    """⌊x/y⌋; x less its remainder is a multiple of y. The plain quotient where y is 0, as in PyTorch."""
    zero, remainder = tirx.const(0, dtype), tirx.Mod(x, y)
    quotient = tirx.round((x - remainder) / y)
    quotient = tirx.Select(_is_below(remainder, y, zero), quotient - tirx.const(1, dtype), quotient)
    return tirx.Select(tirx.EQ(y, zero), x / y, quotient)


def modulo(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x − y·trunc(x/y): dx = dz, dy = −dz·trunc(x/y)."""
    x, y = orig_call.args
    quotient = ctx.emit(op.trunc(ctx.emit(op.divide(x, y))))
    return [fit(ctx, output_grad, x), fit(ctx, op.negative(op.multiply(output_grad, quotient)), y)]


def atan2(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = atan(y/x) in the quadrant of (x, y): dy = dz·x/(x² + y²), dx = −dz·y/(x² + y²)."""
    y, x = orig_call.args
    share = ctx.emit(op.divide(output_grad, op.add(op.multiply(x, x), op.multiply(y, y))))
    return [fit(ctx, op.multiply(share, x), y), fit(ctx, op.negative(op.multiply(share, y)), x)]


def _is_number(expr: relax.Expr) -> bool:
    """Whether a tensor is a constant scalar of floats."""
    return isinstance(expr, Constant) and not array_of(expr).ndim and "float" in dtype_of(expr)


def _products(stock: Legalization) -> Legalization:
    """Lowering of squares, cubes and fourth powers to products, as PyTorch computes the first two.

    TVM calls the library's pow for each element, and warns of negative ones each time.
    """

    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        x, y = call.args
        exponent = float(array_of(y)) if _is_number(y) else 0.0
        if exponent not in (2.0, 3.0, 4.0) or getattr(call.ty.shape, "values", None) is None:
            return stock(block_builder, call)

        def multiplied(base: tirx.Expr) -> tirx.Expr:
            square = base * base
            return square if exponent == 2 else square * base if exponent == 3 else square * square

        return emit_elementwise(block_builder, call, [x], multiplied)

    return legalize


def _exponent_varies(call: relax.Call) -> str:
    return "" if isinstance(call.args[1], Constant) else "TVM's rule gives NaN where base and exponent are 0"


RULES = (
    broadcast_rules("add", gradient=add, linear=((0, 1),)),
    broadcast_rules("subtract", gradient=subtract, linear=((0, 1),)),
    broadcast_rules("multiply", gradient=multiply, linear=((0,), (1,))),
    broadcast_rules("divide", gradient=divide, linear=((0,),)),
    broadcast_rules("power", gradient=power, stock_fails=_exponent_varies, legalize=_products),
    broadcast_rules("floor_mod", gradient=floor_modulo, legalize=_floored(_floored_remainder)),
    broadcast_rules("mod", gradient=modulo),
    broadcast_rules("atan2", gradient=atan2),
    broadcast_rules("floor_divide", gradient=no_gradients, legalize=_floored(_floored_quotient)),
    broadcast_rules("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", gradient=no_gradients),
)
