# SPDX-License-Identifier: Apache-2.0
"""Element-wise operators of one tensor, and the rules that all element-wise operators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import op

from relax_ops.gradients.common import dtype_of, elementwise_gradient, is_float, no_grads, scalar
from relax_ops.layouts.common import broadcast_layout, unary_layout
from relax_ops.rules.contract import GradientRule, OperatorRules, named
from relax_ops.vmap.common import broadcast_axis, elementwise, same_axis


def unary_rules(*names: str, **rules: Any) -> OperatorRules:
    """Rules of element-wise operators of one tensor; further arguments are scalars. `rules` are those besides."""
    return OperatorRules(named(*names), mapped_axis=same_axis, vmap=elementwise, **rules)


def broadcast_rules(*names: str, **rules: Any) -> OperatorRules:
    """Rules of element-wise operators whose operands broadcast against each other. `rules` are those besides."""
    return OperatorRules(named(*names), layout=broadcast_layout, mapped_axis=broadcast_axis, vmap=elementwise, **rules)


def emit_elementwise(
    builder: relax.BlockBuilder, call: relax.Call, operands: Sequence[relax.Expr], combine: Callable[..., tirx.Expr]
) -> relax.Expr:
    """Emit a TIR function named after the call's operator.

    Args:
        call: its shape is known.
        operands: broadcast to that shape.
        combine: makes an element of the result from one of each operand.
    """
    name, shape = str(call.op.name).rpartition(".")[2], call.ty.shape.values

    def compute(*tensors: te.Tensor) -> te.Tensor:
        return te.compute(shape, lambda *place: combine(*(_element_at(each, place) for each in tensors)), name=name)

    return builder.call_te(compute, *operands, primfunc_name_hint=name)


def _element_at(operand: relax.Expr, place: Sequence[Any]) -> relax.Expr:
    """The element of a tensor that is broadcast to the result's shape; a scalar of the program is its own element."""
    if not hasattr(operand, "shape"):
        return operand
    last = list(place)[len(place) - len(operand.shape) :]
    is_one = [isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in operand.shape]
    return operand(*(0 if one else index for one, index in zip(is_one, last, strict=True)))


def no_gradients(
    _orig_var: relax.Var, orig_call: relax.Call, _output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Derivative 0 wherever there is one (sign, rounding, comparison): nothing flows back."""
    return no_grads(orig_call.args)


def _abs(ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = |x|: y' = sign x, 0 at 0."""
    return op.sign(x)


def _square(ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = x²: y' = 2x."""
    return op.multiply(x, scalar(2, dtype_of(x)))


def _rsqrt(ctx: relax.BlockBuilder, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """y = x^(−1/2): y' = −y³/2."""
    return op.multiply(scalar(-0.5, dtype_of(x)), op.multiply(y, op.multiply(y, y)))


def _erf(ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = erf x: y' = (2/√π)·exp(−x²)."""
    return op.multiply(scalar(1.1283791670955126, dtype_of(x)), op.exp(op.negative(op.multiply(x, x))))


def _tan(ctx: relax.BlockBuilder, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """y = tan x: y' = 1 + y²."""
    return op.add(scalar(1, dtype_of(x)), op.multiply(y, y))


def _of_square(sign_of_square: int, shift: int, power: float, sign: int = 1) -> GradientRule:
    """The rule of an inverse function: y' = ±(±x² + shift)^power."""

    def derivative(_ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
        dtype = dtype_of(x)
        inner = op.add(op.multiply(scalar(sign_of_square, dtype), op.multiply(x, x)), scalar(shift, dtype))
        found = op.rsqrt(inner) if power == -0.5 else op.divide(scalar(1, dtype), inner)
        return op.negative(found) if sign < 0 else found

    return elementwise_gradient(derivative)


def _sinh(ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = sinh x: y' = cosh x."""
    return op.cosh(x)


def _cosh(ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = cosh x: y' = sinh x."""
    return op.sinh(x)


def _is_no_cast_of_floats(call: relax.Call) -> str:
    if is_float(call.args[0]) and is_float(call):
        return ""
    return "TVM's rule lets a gradient flow into integers"


def astype(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x as another dtype: the gradient cast back; nothing flows into or out of integers and booleans."""
    x = orig_call.args[0]
    if not is_float(x) or not is_float(output_grad):
        return no_grads([x])
    return [op.astype(output_grad, dtype_of(x))]


RULES = (
    unary_rules("abs", gradient=elementwise_gradient(_abs)),
    unary_rules("square", gradient=elementwise_gradient(_square)),
    unary_rules("rsqrt", gradient=elementwise_gradient(_rsqrt)),
    unary_rules("erf", gradient=elementwise_gradient(_erf)),
    unary_rules("tan", gradient=elementwise_gradient(_tan)),
    unary_rules("negative", linear=((0,),), isometric=True),
    unary_rules("sinh", gradient=elementwise_gradient(_sinh)),
    unary_rules("cosh", gradient=elementwise_gradient(_cosh)),
    unary_rules("atan", gradient=_of_square(1, 1, -1)),
    unary_rules("atanh", gradient=_of_square(-1, 1, -1)),
    unary_rules("asin", gradient=_of_square(-1, 1, -0.5)),
    unary_rules("acos", gradient=_of_square(-1, 1, -0.5, -1)),
    unary_rules("asinh", gradient=_of_square(1, 1, -0.5)),
    unary_rules("acosh", gradient=_of_square(1, -1, -0.5)),
    unary_rules("cos", "exp", "log", "sigmoid", "sin", "sqrt", "tanh"),
    unary_rules("sign", "floor", "ceil", "round", "trunc", "logical_not", "bitwise_not", gradient=no_gradients),
    unary_rules("isnan", "isfinite", "isinf", gradient=no_gradients),
    unary_rules("zeros_like", "ones_like", "full_like", layout=unary_layout),
    unary_rules("astype", gradient=astype, stock_fails=_is_no_cast_of_floats, linear=((0,),)),
)
