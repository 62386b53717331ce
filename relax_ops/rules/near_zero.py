# SPDX-License-Identifier: Apache-2.0
"""special.log1p, special.expm1 and special.erfc: log(1 + x), exp(x) − 1 and 1 − erf(x) without their cancellation.

TVM has no such operators, and its importer of PyTorch writes them as those differences, which lose the digits of small
results: log(1 + 1e-8) is 0 in float32. nn.softplus, which has the same logarithm, is in activations.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax, te, tirx
from tvm.relax import op

from relax_ops.declaration import declare_operator
from relax_ops.gradients.common import FLOATS, dtype_of, elementwise_gradient, scalar
from relax_ops.layouts.common import unary_layout
from relax_ops.rules.contract import GradientRule, Legalization, LegalizationRule, OperatorRules
from relax_ops.vmap.common import elementwise, same_axis
from tvm_convgrad.codegen.loops import dtype_of as element_type
from tvm_convgrad.core.dtypes import SHORT_FLOATS, wide_dtype
from tvm_convgrad.core.errors import DTypeError

LOG1P, EXPM1, ERFC = (f"relax.special.{name}" for name in ("log1p", "expm1", "erfc"))

_TERMS = {"float32": 10, "float64": 18}
"""Of the series of exp(x) − 1, which is right to rounding for |x| ≤ 1: the next term is x/(terms + 1)! of the first."""

_ARTANH_TERMS = {"float32": 5, "float64": 11}
"""Of the series s + s³/3 + s⁵/5 + ..., for |s| ≤ 0.18."""


def log1p(x: relax.Expr) -> relax.Call:
    """log(1 + x)."""
    return relax.Call(tvm.ir.Op.get(LOG1P), [x])


def expm1(x: relax.Expr) -> relax.Call:
    """exp(x) − 1."""
    return relax.Call(tvm.ir.Op.get(EXPM1), [x])


def erfc(x: relax.Expr) -> relax.Call:
    """1 − erf(x)."""
    return relax.Call(tvm.ir.Op.get(ERFC), [x])


def log1p_of(x: tirx.Expr) -> tirx.Expr:
    """log(1 + x) of a float32 or float64: 2·artanh(s), s = x/(2 + x), as a series for −0.3 ≤ x ≤ 0.4.

    The C library's log1p takes three times as long, and TVM simplifies Kahan's correction, x − ((1 + x) − 1), to 0.
    """
    dtype = element_type(x)

    def number(value: float) -> tirx.Expr:
        return tirx.const(value, dtype)

    ratio = x / (x + number(2.0))
    square = ratio * ratio
    total = number(1 / (2 * _ARTANH_TERMS[dtype] - 1))
    for place in range(_ARTANH_TERMS[dtype] - 2, -1, -1):
        total = total * square + number(1 / (2 * place + 1))
    is_near = tirx.And(x >= number(-0.3), x <= number(0.4))
    return tirx.Select(is_near, total * ratio * number(2.0), tirx.log(x + number(1.0)))


def expm1_of(x: tirx.Expr, exp: Callable[[tirx.Expr], tirx.Expr] = tirx.exp) -> tirx.Expr:
    """exp(x) − 1 of a float32 or float64: the series x + x²/2! + ... for |x| ≤ 1, which loops vectorize."""
    dtype = element_type(x)
    one = tirx.const(1.0, dtype)
    total = one
    for number in range(_TERMS[dtype], 1, -1):
        total = one + total * x * tirx.const(1.0 / number, dtype)
    return tirx.Select(tirx.abs(x) <= one, total * x, exp(x) - one)


def erfc_of(x: tirx.Expr) -> tirx.Expr:
    """1 − erf(x) of a float32 or float64: the C library's."""
    dtype = element_type(x)
    return tirx.call_pure_extern(dtype, {"float32": "erfcf", "float64": "erfc"}[dtype], x)


def _log1p(_ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = log(1 + x): y' = 1/(1 + x)."""
    one = scalar(1, dtype_of(x))
    return op.divide(one, op.add(one, x))


def _expm1(_ctx: relax.BlockBuilder, _x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """y = exp(x) − 1: y' = y + 1."""
    return op.add(y, scalar(1, dtype_of(y)))


def _erfc(_ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = 1 − erf(x): y' = −(2/√π)·exp(−x²)."""
    return op.multiply(scalar(-2 / math.sqrt(math.pi), dtype_of(x)), op.exp(op.negative(op.multiply(x, x))))


def computed(
    builder: relax.BlockBuilder, x: relax.Expr, name: str, function: Callable[[tirx.Expr], tirx.Expr]
) -> relax.Expr:
    """A function of each element, computed in float32 if they have 16 bits.

    The name of the TIR function differs from that of the C library's.
    """
    dtype = dtype_of(x)

    def element(value: tirx.Expr) -> tirx.Expr:
        if dtype not in SHORT_FLOATS:
            return function(value)
        return tirx.Cast(dtype, function(tirx.Cast(wide_dtype(dtype), value)))

    def compute(data: te.Tensor) -> te.Tensor:
        return te.compute(data.shape, lambda *place: element(data(*place)), name=name)

    return builder.call_te(compute, x, primfunc_name_hint=f"tir_{name}")


def _legalization(name: str, function: Callable[[tirx.Expr], tirx.Expr]) -> LegalizationRule:
    def rule(_stock: Legalization) -> Legalization:
        return lambda builder, call: computed(builder, call.args[0], name, function)

    return rule


def _type(call: relax.Call, _builder: relax.BlockBuilder) -> relax.TensorType:
    """FInferType: that of the operand."""
    (operand,) = (argument.ty for argument in call.args)
    if not isinstance(operand, relax.TensorType) or str(operand.dtype) not in FLOATS:
        raise DTypeError(f"{call.op.name}: its operand must be a floating-point tensor, but is {operand}")
    return operand


def declared_rules(
    name: str, text: str, gradient: GradientRule, function: Callable[[tirx.Expr], tirx.Expr]
) -> OperatorRules:
    """The rules of a function of each element that TVM has no operator for; `function` takes float32 and float64."""
    return OperatorRules(
        (name,),
        gradient=gradient,
        layout=unary_layout,
        mapped_axis=same_axis,
        vmap=elementwise,
        legalize=_legalization(name.rpartition(".")[2], function),
        declare=partial(declare_operator, name, text, _type),
    )


RULES = (
    declared_rules(LOG1P, "log(1 + x)", elementwise_gradient(_log1p), log1p_of),
    declared_rules(EXPM1, "exp(x) - 1", elementwise_gradient(_expm1), expm1_of),
    declared_rules(ERFC, "1 - erf(x)", elementwise_gradient(_erfc), erfc_of),
)
