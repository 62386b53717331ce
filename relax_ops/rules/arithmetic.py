# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on two tensors that broadcast against each other.

Stock sums a broadcast operand's gradient in its own dtype and by collapse_sum_to, which stops layouts; its gradient of
power is NaN at 0⁰.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax import op

from relax_ops.compat import Constant
from relax_ops.gradients.common import dtype_of, fit, scalar
from relax_ops.rules.contract import GradientRule
from relax_ops.rules.elementwise import broadcast_rules, no_gradients


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
    dx = op.multiply(op.multiply(output_grad, y), op.power(x, op.subtract(y, one)))
    dx = op.where(op.equal(y, zero), zero, dx)
    dy = op.multiply(op.multiply(output_grad, orig_var), op.log(x))
    flat = op.logical_and(op.equal(x, zero), op.greater_equal(y, zero))
    return [fit(ctx, dx, x), fit(ctx, op.where(flat, zero, dy), y)]


def _remainder(rounded: Callable[[relax.Expr], relax.Expr]) -> GradientRule:
    def rule(
        _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        x, y = orig_call.args
        quotient = ctx.emit(rounded(ctx.emit(op.divide(x, y))))
        return [fit(ctx, output_grad, x), fit(ctx, op.negative(op.multiply(output_grad, quotient)), y)]

    rule.__doc__ = """z = x − y·round(x/y), rounded down or to zero: dx = dz, dy = −dz·round(x/y)."""
    return rule


def atan2(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = atan(y/x) in the quadrant of (x, y): dy = dz·x/(x² + y²), dx = −dz·y/(x² + y²)."""
    y, x = orig_call.args
    share = ctx.emit(op.divide(output_grad, op.add(op.multiply(x, x), op.multiply(y, y))))
    return [fit(ctx, op.multiply(share, x), y), fit(ctx, op.negative(op.multiply(share, y)), x)]


def _exponent_varies(call: relax.Call) -> str:
    return "" if isinstance(call.args[1], Constant) else "TVM's rule gives NaN where base and exponent are 0"


RULES = (
    broadcast_rules("add", gradient=add, linear=((0, 1),)),
    broadcast_rules("subtract", gradient=subtract, linear=((0, 1),)),
    broadcast_rules("multiply", gradient=multiply, linear=((0,), (1,))),
    broadcast_rules("divide", gradient=divide, linear=((0,),)),
    broadcast_rules("power", gradient=power, stock_fails=_exponent_varies),
    broadcast_rules("floor_mod", gradient=_remainder(op.floor)),
    broadcast_rules("mod", gradient=_remainder(op.trunc)),
    broadcast_rules("atan2", gradient=atan2),
    broadcast_rules("floor_divide", gradient=no_gradients),
    broadcast_rules("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", gradient=no_gradients),
)
