# SPDX-License-Identifier: Apache-2.0
"""Taps and borders of the depthwise kernels: which taps are in bounds where, for loops and for code without loops."""

from __future__ import annotations

from typing import NamedTuple

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.loops import Index, Loops, expr, larger, quotient, smaller
from tvm_convgrad.codegen.tir import Expr
from tvm_convgrad.kernels.borders import valid_range

Taps = tuple[tuple[int, int], ...]
"""(kernel index, offset) of each tap along an axis, as in `AxisPhase`."""


class TapRun(NamedTuple):
    """Taps in ascending order of their offsets: kernel index k + i * k_step, offset + i * offset_step."""

    k: int
    k_step: int
    offset: int
    offset_step: int


def tap_run(taps: Taps) -> TapRun:
    """The run of some taps."""
    ordered = sorted(taps, key=lambda tap: tap[1])
    (k, offset), (k_next, offset_next) = ordered[0], ordered[min(1, len(ordered) - 1)]
    return TapRun(k, k_next - k, offset, max(1, offset_next - offset))


def valid_taps(loops: Loops, taps: Taps, positions: int, step: int, extent: int, q: Index) -> tuple[Index, Index]:
    """(first, count) of the taps of a run that are in bounds at position q: 0 <= q * step + offset < extent."""
    if not taps:
        return 0, 0
    count = len(taps)
    run = tap_run(taps)
    low, pace = run.offset, run.offset_step
    if low >= 0 and (positions - 1) * step + low + (count - 1) * pace < extent:
        return 0, count
    place = q * step + low
    if isinstance(place, int):
        first, end = valid_range(place, pace, count, extent)
        return (first, end - first) if first < end else (0, 0)
    place = loops.let(expr(place), "place")
    first = loops.let(quotient(larger(pace - 1 - place, 0), pace), "first_tap")
    end = smaller(quotient(larger(extent + pace - 1 - place, 0), pace), count)
    return first, loops.let(larger(end - first, 0), "tap_count")


def rows_in_bounds(loops: Loops, start: Expr, reach: int, extent: int) -> tuple[Index, Index]:
    """(first, count) of those of the `reach` rows from `start` on that a source of `extent` rows has."""
    row = loops.opaque(tir.min(tir.max(start, expr(0)), expr(extent)), "row")
    end = tir.max(tir.min(start + reach, expr(extent)), row)
    return row, loops.opaque(end - row, "rows")


class Piece(NamedTuple):
    """Consecutive positions whose code has no loop.

    Attributes:
        first, size: its positions.
        repeats: how many pieces follow each other that have the same code.
        valid: for each tap, in ascending order of offsets, the positions in the piece where it is in bounds.
    """

    first: int
    size: int
    repeats: int
    valid: list[list[int]]


def border_pieces(count: int, limit: int, taps: Taps, step: int, extent: int) -> list[Piece]:
    """The positions 0 to `count` along an axis in pieces of at most `limit`, of about equal size."""
    size = -(-count // -(-count // limit))
    ordered = sorted(taps, key=lambda tap: tap[1])
    pieces: list[Piece] = []
    for first in range(0, count, size):
        width = min(size, count - first)
        valid = [list(range(*valid_range(first * step + offset, step, width, extent))) for _, offset in ordered]
        if pieces and pieces[-1].size == width and pieces[-1].valid == valid:
            pieces[-1] = pieces[-1]._replace(repeats=pieces[-1].repeats + 1)
        else:
            pieces.append(Piece(first, width, 1, valid))
    return pieces


def vector_piece(count: int, per_vector: int, taps: Taps, extent: int) -> Piece:
    """The positions 0 to `count` along an axis in vectors of `per_vector`, all of them in one piece.

    Its size and its valid positions are vectors; one is valid for a tap where any of its positions is in bounds.
    """
    vectors = -(-count // per_vector)
    ordered = sorted(offset for _, offset in taps)
    valid = [[i for i in range(vectors) if -per_vector < i * per_vector + offset < extent] for offset in ordered]
    return Piece(0, vectors, 1, valid)


__all__ = ["Piece", "TapRun", "border_pieces", "rows_in_bounds", "tap_run", "valid_taps", "vector_piece"]
