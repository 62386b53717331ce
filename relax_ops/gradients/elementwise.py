# SPDX-License-Identifier: Apache-2.0
"""Gradients of element-wise arithmetic: what stock lacks (square, rsqrt, erf), and what it gets wrong.

Stock sums a broadcast operand's gradient in its own dtype and by collapse_sum_to, which stops layouts; it forgets to
sum the broadcast operands of `where`; power has NaN at 0⁰. At kinks and ties the derivative is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.relax import op

from relax_ops.gradients.common import Rule, dtype_of, elementwise, fit, is_float, no_grads, scalar


def add(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """z = x + y."""
    return [fit(ctx, output_grad, operand) for operand in orig_call.args]


def subtract(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """z = x − y."""
    x, y = orig_call.args
    return [fit(ctx, output_grad, x), op.negative(fit(ctx, output_grad, y))]


def multiply(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """z = x·y."""
    x, y = orig_call.args
    return [fit(ctx, op.multiply(output_grad, y), x), fit(ctx, op.multiply(output_grad, x), y)]


def divide(orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """z = x/y: dx = dz/y, dy = −dz·z/y."""
    x, y = orig_call.args
    dx = ctx.emit(op.divide(output_grad, y))
    return [fit(ctx, dx, x), fit(ctx, op.negative(op.multiply(dx, orig_var)), y)]


def power(orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """z = x^y: dx = dz·y·x^(y−1), 0 where y = 0; dy = dz·z·ln x, 0 where x = 0 and y ≥ 0."""
    x, y = orig_call.args
    zero, one = scalar(0, dtype_of(y)), scalar(1, dtype_of(y))
    dx = op.multiply(op.multiply(output_grad, y), op.power(x, op.subtract(y, one)))
    dx = op.where(op.equal(y, zero), zero, dx)
    dy = op.multiply(op.multiply(output_grad, orig_var), op.log(x))
    flat = op.logical_and(op.equal(x, zero), op.greater_equal(y, zero))
    return [fit(ctx, dx, x), fit(ctx, op.where(flat, zero, dy), y)]


def _choice(worse: Callable[[Any, Any], Any]) -> Rule:
    def rule(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
        x, y = orig_call.args
        zero = scalar(0, dtype_of(x))
        tie = op.equal(x, y)
        share = ctx.emit(op.where(tie, op.multiply(output_grad, scalar(0.5, dtype_of(x))), output_grad))
        dx, dy = op.where(worse(x, y), zero, share), op.where(worse(y, x), zero, share)
        return [fit(ctx, dx, x), fit(ctx, dy, y)]

    rule.__doc__ = """z is x or y, whichever is not worse: the gradient goes to that one, half to each where they tie.

    Where one of them is NaN, so is z, and both get the gradient, as in PyTorch.
    """
    return rule


def where(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """z = x where the condition holds, else y; all three may be broadcast."""
    condition, x, y = orig_call.args
    zero = scalar(0, dtype_of(x))
    return [
        *no_grads([condition]),
        fit(ctx, op.where(condition, output_grad, zero), x),
        fit(ctx, op.where(condition, zero, output_grad), y),
    ]


def flat(_orig_var: Any, orig_call: Any, _output_grad: Any, _ctx: Any) -> list[Any]:
    """Derivative 0 wherever there is one (sign, rounding, comparison): nothing flows back."""
    return no_grads(orig_call.args)


def _abs(ctx: Any, x: Any, _y: Any) -> Any:
    """y = |x|: y' = sign x, 0 at 0."""
    return op.sign(x)


def _square(ctx: Any, x: Any, _y: Any) -> Any:
    """y = x²: y' = 2x."""
    return op.multiply(x, scalar(2, dtype_of(x)))


def _rsqrt(ctx: Any, x: Any, y: Any) -> Any:
    """y = x^(−1/2): y' = −y³/2."""
    return op.multiply(scalar(-0.5, dtype_of(x)), op.multiply(y, op.multiply(y, y)))


def _erf(ctx: Any, x: Any, _y: Any) -> Any:
    """y = erf x: y' = (2/√π)·exp(−x²)."""
    return op.multiply(scalar(1.1283791670955126, dtype_of(x)), op.exp(op.negative(op.multiply(x, x))))


def _tan(ctx: Any, x: Any, y: Any) -> Any:
    """y = tan x: y' = 1 + y²."""
    return op.add(scalar(1, dtype_of(x)), op.multiply(y, y))


def astype(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = x as another dtype: the gradient cast back; nothing flows into or out of integers and booleans."""
    x = orig_call.args[0]
    if not is_float(x) or not is_float(output_grad):
        return no_grads([x])
    return [op.astype(output_grad, dtype_of(x))]


GRADIENTS: dict[str, Rule] = {
    "relax.add": add,
    "relax.subtract": subtract,
    "relax.multiply": multiply,
    "relax.divide": divide,
    "relax.power": power,
    "relax.maximum": _choice(op.less),
    "relax.minimum": _choice(op.greater),
    "relax.where": where,
    "relax.abs": elementwise(_abs),
    "relax.square": elementwise(_square),
    "relax.rsqrt": elementwise(_rsqrt),
    "relax.erf": elementwise(_erf),
    "relax.tan": elementwise(_tan),
    "relax.astype": astype,
    **{
        f"relax.{name}": flat
        for name in ("sign", "floor", "ceil", "round", "trunc", "logical_and", "logical_or", "logical_not", "isnan")
    },
}
"""Gradient rules by operator."""
