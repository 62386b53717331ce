# SPDX-License-Identifier: Apache-2.0
"""The logarithm of the gamma function and its derivatives, as sums of a fixed number of terms.

Asymptotic series of the NIST Digital Library of Mathematical Functions (https://dlmf.nist.gov, 5.11.1, 5.11.2 and
5.15.8), at arguments of 8 and more, where the omitted terms are below 1e-9; smaller arguments by the recurrences 5.5.1
and 5.15.5 and negative ones by the reflections 5.5.3 and 5.15.6.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

_SHIFT = 8
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)
"""B2, B4, … (DLMF 24.2)."""


def lgamma(x: Tensor) -> Tensor:
    """ln|Γ(x)|; infinite at 0, -1, -2, …"""
    import torch

    positive, at, small = _positive(x)
    z = torch.where(small, at + _SHIFT, at)
    factor = inside = torch.where(small, at, torch.ones_like(at))
    for number in range(1, _SHIFT):
        factor = factor * (inside + number)
    series = _series(z, [even / (2 * k * (2 * k - 1)) for k, even in enumerate(_BERNOULLI, 1)], 1)
    shifted = torch.where(small, torch.log(factor), torch.zeros_like(factor))
    found = (z - 0.5) * (torch.log(z) - 1) + (math.log(2 * math.pi) - 1) / 2 + series - shifted
    angle = torch.where(positive, torch.full_like(x, 0.5), x - torch.round(x))
    reflected = math.log(math.pi) - torch.log(torch.sin(angle * math.pi).abs()) - found
    return torch.where(positive, found, reflected)


def digamma(x: Tensor) -> Tensor:
    """The derivative of ln Γ(x); -inf at 0, NaN at -1, -2, …, as in PyTorch."""
    import torch

    return torch.where(x == 0, torch.full_like(x, -math.inf), polygamma(0, x))


def polygamma(n: int, x: Tensor) -> Tensor:
    """The derivative of order n + 1 of ln Γ(x)."""
    import torch

    positive, at, small = _positive(x)
    z = torch.where(small, at + _SHIFT, at)
    sign = -1.0 if n % 2 == 0 else 1.0
    series = _series(
        z, [even * math.factorial(2 * k + n - 1) / math.factorial(2 * k) for k, even in enumerate(_BERNOULLI, 1)], 2 + n
    )
    first = -torch.log(z) if n == 0 else math.factorial(n - 1) * _power(z, -n)
    found = sign * (first + math.factorial(n) / 2 * _power(z, -n - 1) + series)
    inside = torch.where(small, at, torch.ones_like(at))
    terms = sum((_power(inside + number, -n - 1) for number in range(_SHIFT)), torch.zeros_like(at))
    found = found + torch.where(small, sign * math.factorial(n) * terms, torch.zeros_like(terms))
    angle = torch.where(positive, torch.full_like(x, 0.25), x - torch.round(x)) * math.pi
    cotangent = torch.cos(angle) / torch.sin(angle)
    polynomial = _derivative_of_cotangent(n)
    slope = torch.full_like(x, polynomial[-1])
    for coefficient in reversed(polynomial[:-1]):
        slope = slope * cotangent + coefficient
    return torch.where(positive, found, -sign * found - slope)


def _positive(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether x is not negative; the argument that is not, x or 1 - x; and whether that is too small for the series."""
    import torch

    positive = x >= 0
    at = torch.where(positive, x, 1 - x)
    return positive, at, at < _SHIFT


def _series(z: Tensor, coefficients: list[float], power: int) -> Tensor:
    """The sum of coefficients over z to the powers `power`, `power` + 2, …"""
    import torch

    inverse = 1 / z
    square, total = inverse * inverse, torch.zeros_like(z)
    for coefficient in reversed(coefficients):
        total = total * square + coefficient
    return total * _power(inverse, power)


def _power(x: Tensor, exponent: int) -> Tensor:
    """x to a whole power, as products."""
    factor = x if exponent > 0 else 1 / x
    found = factor
    for _ in range(abs(exponent) - 1):
        found = found * factor
    return found


def _derivative_of_cotangent(n: int) -> list[float]:
    """The coefficients of the n-th derivative of π·cot(πx), a polynomial in cot(πx)."""
    found = np.polynomial.Polynomial([0.0, math.pi])
    for _ in range(n):
        found = found.deriv() * np.polynomial.Polynomial([-math.pi, 0.0, -math.pi])
    return [float(coefficient) for coefficient in found.coef]
