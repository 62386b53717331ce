# SPDX-License-Identifier: Apache-2.0
"""Transposing squares of vectors in registers, to pack panels whose layout is not that of memory."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.loops import Expr, Loops, constant, lanes_of


def shuffle(first: Expr, second: Expr, order: Sequence[int]) -> Expr:
    """A vector of lanes of two others: `order` has their numbers, those of `second` counted after those of `first`."""
    return tir.Shuffle([first, second], [constant(i) for i in order])


def strided_lanes(vectors: Sequence[Expr], first: int, step: int) -> Expr:
    """A vector of every `step`-th lane, from lane `first` on, of as many vectors, whose lanes are counted on."""
    if step == 1:
        return vectors[0]
    lanes = lanes_of(vectors[0])
    return tir.Shuffle(list(vectors), [constant(first + i * step) for i in range(lanes)])


def transpose(loops: Loops, rows: Sequence[Expr]) -> list[Expr]:
    """The transpose of `lanes` vectors of `lanes` elements, in log2(lanes) rounds of pairwise exchanges.

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
