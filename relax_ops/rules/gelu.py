# SPDX-License-Identifier: Apache-2.0
"""nn.gelu, and special.gelu_derivative, the factor of its gradient as one operator.

gelu(x) = x Φ(x) with Φ the normal distribution (Hendrycks and Gimpel 2016), so that gelu'(x) = Φ(x) + x φ(x). Φ and its
density φ share the exponential exp(−x²/2), and only an operator of their sum lets a CPU compute that once
(`fast_derivative_of`).
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, tirx
from tvm.relax import op

from relax_ops.gradients.common import dtype_of, elementwise_gradient, scalar
from relax_ops.rules.elementwise import unary_rules
from relax_ops.rules.near_zero import declared_rules
from tvm_convgrad.codegen.loops import dtype_of as element_type

GELU_DERIVATIVE = "relax.special.gelu_derivative"

_DENSITY = 1 / math.sqrt(2 * math.pi)

_TAIL = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_TAIL_SCALE = 0.3275911
"""erfc(u) = (a₁t + a₂t² + ... + a₅t⁵)·exp(−u²) within 1.5e-7 for u ≥ 0, t = 1/(1 + 0.3275911·u): formula 7.1.26 of
Abramowitz and Stegun, Handbook of Mathematical Functions (1964)."""


def derivative_of(x: tirx.Expr) -> tirx.Expr:
    """Φ(x) + x φ(x) of a float32 or float64."""

    def number(value: float) -> tirx.Expr:
        return tirx.const(value, element_type(x))

    cdf = number(0.5) * (number(1.0) + tirx.erf(x * number(math.sqrt(0.5))))
    return cdf + x * tirx.exp(x * x * number(-0.5)) * number(_DENSITY)


def fast_derivative_of(x: tirx.Expr, bell: tirx.Expr) -> tirx.Expr:
    """Φ(x) + x φ(x) of a float32 from bell = exp(−x²/2), within 3e-7 for |x| ≤ 12, and NaN of infinity as 0·∞ is."""

    def number(value: float) -> tirx.Expr:
        return tirx.const(value, "float32")

    t = number(1.0) / (tirx.abs(x) * number(_TAIL_SCALE * math.sqrt(0.5)) + number(1.0))
    total = number(_TAIL[-1] / 2)
    for coefficient in _TAIL[-2::-1]:
        total = total * t + number(coefficient / 2)
    tail = total * t * bell
    return tirx.Select(x < number(0.0), tail, number(1.0) - tail) + x * bell * number(_DENSITY)


def _gelu(_ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = x·Φ(x): y' = Φ(x) + x·φ(x)."""
    return relax.Call(tvm.ir.Op.get(GELU_DERIVATIVE), [x])


def _second(_ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = Φ(x) + x·φ(x): y' = (2 − x²)·φ(x)."""
    dtype = dtype_of(x)
    square = op.multiply(x, x)
    bell = op.exp(op.multiply(scalar(-0.5, dtype), square))
    return op.multiply(op.subtract(scalar(2.0, dtype), square), op.multiply(bell, scalar(_DENSITY, dtype)))


RULES = (
    unary_rules("nn.gelu", gradient=elementwise_gradient(_gelu)),
    declared_rules(GELU_DERIVATIVE, "the derivative of gelu", elementwise_gradient(_second), derivative_of),
)
