# SPDX-License-Identifier: Apache-2.0
"""Maxima and minima of floats in TIR that keep NaN, as PyTorch and numpy do.

`tirx.max(a, b)` is `a > b ? a : b`, which loses a NaN in `a`; on GPUs it loses one in either operand. These forms
compare such that a NaN is what remains. Against a constant that costs nothing on x86: it is one maxps or minps with
its operands in the right order. Between two values it is a maxps, a comparison and a blend.

What is no NaN is recognised by `x <= inf`: TVM simplifies `x != x` to false and `not x <= inf` to `inf < x`, and makes
vectors of everything but `tirx.isnan`.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.loops import dtype_of, lanes_of, splat


def is_nan(value: Any) -> Any:
    """Whether a float is NaN; elementwise for vectors."""
    dtype = dtype_of(value)
    if dtype.startswith("bfloat16"):  # tirx.isnan has no bfloat16
        value = tirx.Cast(dtype.replace("bfloat16", "float32"), value)
    return tirx.isnan(value)


def exceeds(value: Any, best: Any) -> Any:
    """Whether `value` takes the place of `best` in a running maximum: it is larger, or NaN.

    For loops that TVM does not vectorise, and for explicit vectors.
    """
    return tirx.Or(value > best, is_nan(value))


def maximum(a: Any, b: Any) -> Any:
    """The larger of two values, NaN if either is NaN; for integers, too."""
    return _unless_nan(a, b, tirx.Max(a, b))


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two values, NaN if either is NaN; for integers, too."""
    return _unless_nan(a, b, tirx.Min(a, b))


def _unless_nan(a: Any, b: Any, chosen: Any) -> Any:
    """One test that neither is NaN, and a blend with a constant."""
    if not is_float(a):
        return chosen
    dtype, lanes = dtype_of(a).partition("x")[0], lanes_of(a)
    infinity, nan = (splat(tirx.const(number, dtype), lanes) for number in (math.inf, math.nan))
    return tirx.Select(tirx.And(a <= infinity, b <= infinity), chosen, nan)


def at_least(value: Any, bound: Any) -> Any:
    """The larger of a value and a bound that is not NaN: NaN if the value is."""
    return tirx.Select(value < bound, bound, value)


def at_most(value: Any, bound: Any) -> Any:
    """The smaller of a value and a bound that is not NaN: NaN if the value is."""
    return tirx.Select(value > bound, bound, value)


def is_float(value: Any) -> bool:
    """Whether an expression is of a floating-point type, which has a NaN."""
    return "float" in dtype_of(value)


__all__ = ["at_least", "at_most", "exceeds", "is_float", "is_nan", "maximum", "minimum"]
