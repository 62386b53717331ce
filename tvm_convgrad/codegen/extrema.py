# SPDX-License-Identifier: Apache-2.0
"""Maxima and minima of floats in TIR that propagate NaN, as those of PyTorch and numpy do.

`tirx.max(a, b)` is `a > b ? a : b`, which loses a NaN in `a`; on GPUs it loses one in either operand. These functions
propagate it. With a constant bound that costs nothing on x86: it is one maxps or minps with its operands in the right
order. Of two values it is a maxps, a comparison and a blend.

The test for "not NaN" is `x <= inf`, because TVM simplifies `x != x` to false and `not x <= inf` to `inf < x`, and does
not vectorize `tirx.isnan`.
"""

from __future__ import annotations

import math

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.loops import Expr, dtype_of, lanes_of, splat


def is_nan(value: Expr) -> Expr:
    """Whether a float is NaN; elementwise for vectors."""
    dtype = dtype_of(value)
    if dtype.startswith("bfloat16"):  # tir.isnan has no bfloat16
        value = tir.Cast(dtype.replace("bfloat16", "float32"), value)
    return tir.isnan(value)


def exceeds(value: Expr, best: Expr) -> Expr:
    """Whether `value` replaces `best` in a running maximum: it is larger, or NaN.

    Use it in loops that TVM does not vectorize, or on explicit vectors.
    """
    return tir.Or(value > best, is_nan(value))


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger of two values, NaN if either is NaN; for integers, too."""
    return _unless_nan(a, b, tir.Max(a, b))


def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller of two values, NaN if either is NaN; for integers, too."""
    return _unless_nan(a, b, tir.Min(a, b))


def _unless_nan(a: Expr, b: Expr, chosen: Expr) -> Expr:
    """`chosen` where neither value is NaN, else NaN: one test and a blend with a constant."""
    if not is_float(a):
        return chosen
    dtype, lanes = dtype_of(a).partition("x")[0], lanes_of(a)
    infinity, nan = (splat(tir.const(number, dtype), lanes) for number in (math.inf, math.nan))
    return tir.Select(tir.And(a <= infinity, b <= infinity), chosen, nan)


def at_least(value: Expr, bound: Expr) -> Expr:
    """The larger of a value and a bound that is not NaN: NaN if the value is."""
    return tir.Select(value < bound, bound, value)


def at_most(value: Expr, bound: Expr) -> Expr:
    """The smaller of a value and a bound that is not NaN: NaN if the value is."""
    return tir.Select(value > bound, bound, value)


def is_float(value: Expr) -> bool:
    """Whether an expression is of a floating-point type, which has a NaN."""
    return "float" in dtype_of(value)


__all__ = ["at_least", "at_most", "exceeds", "is_float", "is_nan", "maximum", "minimum"]
