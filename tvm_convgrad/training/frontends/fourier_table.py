# SPDX-License-Identifier: Apache-2.0
"""Tables of cosines and sines, of which Fourier transforms are products."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Table: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

LARGEST_FACTOR = 2048
"""A table for a longer transform would be too large; a transform may be split by the factors of its length."""


def wave_table(rows: int, columns: int, period: int, is_sine: bool, scale: float, is_folded: bool) -> Table:
    """The cosines or sines of 2π·jk/period, times scale, for rows j and columns k.

    Args:
        is_folded: rows that have a conjugate twin among the period, as in half a spectrum, are doubled.
    """
    steps = np.outer(np.arange(rows, dtype="int64"), np.arange(columns, dtype="int64")) % period
    angles = np.arange(period, dtype="float64") * (2 * math.pi / period)
    wave = np.sin(angles) if is_sine else np.cos(angles)
    quarters = np.arange(period, dtype="int64") * 4
    wave[(quarters % period == 0)] = np.round(wave[(quarters % period == 0)])  # 0, 1 and -1 exactly
    table: Table = wave[steps] * scale
    if is_folded:
        numbers = np.arange(rows)
        table[(numbers > 0) & (2 * numbers < period)] *= 2
    return table


def interleaved_table(rows: int, columns: int, period: int, parts: int, *, is_inverse: bool) -> Table:
    """The transform of numbers with their parts beside each other: (rows · parts, columns · 2).

    Args:
        parts: 1: real numbers; 2: real and imaginary parts.
    """
    scale = 1 / period if is_inverse else 1.0
    cosines = wave_table(rows, columns, period, False, scale, False)
    sines = wave_table(rows, columns, period, True, scale if is_inverse else -scale, False)
    table = np.empty((rows, parts, columns, 2))
    table[:, 0, :, 0], table[:, 0, :, 1] = cosines, sines
    if parts == 2:
        table[:, 1, :, 0], table[:, 1, :, 1] = -sines, cosines
    return table.reshape(rows * parts, columns * 2)


__all__ = ["LARGEST_FACTOR", "Table", "interleaved_table", "wave_table"]
