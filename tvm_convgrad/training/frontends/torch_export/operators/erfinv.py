# SPDX-License-Identifier: Apache-2.0
"""The inverse error function, by polynomials for single precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503),
    *(-0.00417768164, 0.246640727, 1.50140941),
)
TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613),
    *(0.00943887047, 1.00167406, 2.83297682),
)
"""Polynomials of the inverse error function (M. Giles, "Approximating the erfinv function", 2010), highest first."""


def inverse_error(x: Tensor) -> Tensor:
    """The number whose error function is x, to some units of float32; infinite at 1 and -1, NaN beyond."""
    import torch

    given, stop = x, torch.ops.convgrad.stop_gradient
    x = stop(x)
    size = -torch.log((1 - x) * (1 + x))
    near = size < 5
    at = torch.where(near, size - 2.5, torch.sqrt(torch.where(near, 5.0, size)) - 3)
    found = torch.where(near, _polynomial(at, CENTRE), _polynomial(at, TAIL)) * x
    found = torch.where(x.abs() == 1, x * math.inf, found)
    slope = torch.exp(found * found) * (math.sqrt(math.pi) / 2)
    changed: Tensor = found + torch.where(x.abs() == 1, 0.0, slope) * (given - x)
    return changed


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    import torch

    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


__all__ = ["CENTRE", "TAIL", "inverse_error"]
