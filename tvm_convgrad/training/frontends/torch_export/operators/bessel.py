# SPDX-License-Identifier: Apache-2.0
"""Modified Bessel functions of the first kind, i0 and i1 and their exponentially scaled forms, by polynomials.

exp(-x)·I(x) on [0, 8] is a polynomial in x, and sqrt(x)·exp(-x)·I(x) on [8, ∞) one in 1/x (the ranges of the Cephes
library), to 1e-9. They are interpolated from the integral DLMF 10.32.3 by the trapezoidal rule, which converges
exponentially for a periodic function. Derivatives are those of DLMF 10.29.3, not of the polynomials.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_POINTS, _DEGREE, _SMALLEST, _BORDER = 4096, 28, 1e-10, 8.0


def i0(x: Tensor) -> Tensor:
    """I0(x)."""
    size = x.abs().exp()
    return _with_slope(x, _scaled(x, 0) * size, _scaled(x, 1) * size)


def i0e(x: Tensor) -> Tensor:
    """exp(-|x|)·I0(x)."""
    even, odd = _scaled(x, 0), _scaled(x, 1)
    return _with_slope(x, even, odd - x.sign() * even)


def i1(x: Tensor) -> Tensor:
    """I1(x)."""
    size = x.abs().exp()
    return _with_slope(x, _scaled(x, 1) * size, _slope(x) * size)


def i1e(x: Tensor) -> Tensor:
    """exp(-|x|)·I1(x)."""
    return _with_slope(x, _scaled(x, 1), _slope(x) - x.sign() * _scaled(x, 1))


def _slope(x: Tensor) -> Tensor:
    """exp(-|x|)·I1'(x) = exp(-|x|)·(I0(x) - I1(x)/x), 1/2 at 0."""
    import torch

    zero = x == 0
    quotient = _scaled(x, 1) / torch.where(zero, torch.ones_like(x), x)
    return torch.where(zero, torch.full_like(x, 0.5), _scaled(x, 0) - quotient)


def _with_slope(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """A value with a given derivative."""
    import torch

    stop = torch.ops.convgrad.stop_gradient
    changed: Tensor = stop(value) + stop(slope) * (x - stop(x))
    return changed


def _scaled(x: Tensor, order: int) -> Tensor:
    """exp(-|x|) times the function of an order."""
    import torch

    near, far = _series(order)
    size = x.abs()
    large = size.clamp(min=_BORDER)
    inner = _polynomial(size.clamp(max=_BORDER) / 4 - 1, near)
    outer = _polynomial(16 / large - 1, far) / torch.sqrt(large)
    found = torch.where(size <= _BORDER, inner, outer)
    return found * x.sign() if order else found


def _polynomial(at: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """A polynomial, highest power first, by Horner's rule: each value is used once, so that kernels stay small."""
    import torch

    total = torch.full_like(at, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * at + coefficient
    return total


@cache
def _series(order: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The coefficients of the two series of an order."""
    at = np.polynomial.chebyshev.chebpts1(_DEGREE + 1)
    near = _integral(order, 4 * (at + 1))
    far = np.sqrt(16 / (at + 1)) * _integral(order, 16 / (at + 1))
    return _powers(at, near), _powers(at, far)


def _powers(at: Array, values: Array) -> tuple[float, ...]:
    """The Chebyshev series through values, without its smallest terms, as coefficients of powers, the highest first."""
    series = np.polynomial.chebyshev.chebfit(at, values, _DEGREE)
    count = int(np.flatnonzero(np.abs(series) > _SMALLEST).max()) + 1
    return tuple(float(number) for number in np.polynomial.chebyshev.cheb2poly(series[:count])[::-1])


def _integral(order: int, x: Array) -> Array:
    """exp(-x)·I(x): the mean of exp(x·(cos θ - 1))·cos(order·θ) over a period."""
    angles = np.arange(_POINTS) * (2 * math.pi / _POINTS)
    waves = np.exp(x[..., None] * (np.cos(angles) - 1)) * np.cos(order * angles)
    mean: Array = waves.mean(-1)
    return mean


__all__ = ["i0", "i0e", "i1", "i1e"]
