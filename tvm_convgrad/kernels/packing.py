# SPDX-License-Identifier: Apache-2.0
"""Rearranging vectors in registers, for panels whose order is not that of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.loops import INDEX, Loops


def shuffle(first: Any, second: Any, order: Sequence[int]) -> Any:
    """Lanes of two vectors by number: those of `first`, then those of `second`."""
    return tirx.Shuffle([first, second], [tirx.IntImm(INDEX, i) for i in order])


def transpose(loops: Loops, rows: Sequence[Any]) -> list[Any]:
    """The transpose of a square of vectors, in log2(lanes) rounds of pairwise exchanges.

    A round of distance d exchanges, between rows r and r + d, the off-diagonal d x d squares.
    """
    lanes = len(rows)
    values = list(rows)
    distance = lanes // 2
    while distance:
        keep_low = [i if not i & distance else lanes + i - distance for i in range(lanes)]
        keep_high = [i + distance if not i & distance else lanes + i for i in range(lanes)]
        for r in range(lanes):
            if r & distance:
                continue
            a, b = values[r], values[r + distance]
            values[r] = loops.let(shuffle(a, b, keep_low), "t")
            values[r + distance] = loops.let(shuffle(a, b, keep_high), "t")
        distance //= 2
    return values
