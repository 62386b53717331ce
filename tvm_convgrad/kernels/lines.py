# SPDX-License-Identifier: Apache-2.0
"""Vectors of neighbouring columns of a line: depthwise kernels where columns are neighbours in memory (NCHW)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.loops import (
    Loops,
    expr,
    lanes_below,
    lanes_within,
    load,
    load_masked,
    ramp,
    smaller,
    splat,
)
from tvm_convgrad.kernels.packing import shuffle

AHEAD = 6144
"""Bytes of memory between what is computed with and what is asked for: a tile or some planes."""


@dataclass(frozen=True)
class LineReader:
    """Reads, for positions x .. x + lanes of `count`, the columns position * step + offset of lines of `width`.

    Columns outside the line are zeros, and so are columns that no position meets: nothing unwritten, infinite or
    not a number gets into a sum by a product with zero.

    Attributes:
        step: 1, or 2: then two vectors are read, and their even and odd lanes taken apart.
    """

    loops: Loops
    lanes: int
    step: int
    count: int
    width: int

    def read(self, buffer: Any, at: Any, x: Any, offsets: Sequence[Any]) -> list[Any]:
        """One vector for each offset, of the line whose column 0 is at index `at`.

        Offsets are numbers, in ascending order; a single one may be an expression if step is 1.
        """
        if self.step == 1:
            return [self._load(buffer, at, x, offset, offset) for offset in offsets]
        loops, lanes = self.loops, self.lanes
        values: list[Any] = []
        left = list(offsets)
        while left:
            offset = left.pop(0)
            paired = bool(left) and left[0] == offset + 1
            last = left.pop(0) if paired else offset
            low = self._load(buffer, at, x * 2, offset, last)
            high = self._load(buffer, at, x * 2 + lanes, offset, last)
            low, high = loops.let(low, "low"), loops.let(high, "high")
            values.append(loops.let(shuffle(low, high, range(0, 2 * lanes, 2)), "even"))
            if paired:
                values.append(loops.let(shuffle(low, high, range(1, 2 * lanes, 2)), "odd"))
        return values

    def _load(self, buffer: Any, at: Any, x: Any, offset: Any, last: Any) -> Any:
        """Columns x + offset .. + lanes; `last` is the larger offset that is taken from the same vector."""
        lanes = self.lanes
        first = x + offset
        met = (self.count - 1) * self.step + last + 1
        limit = smaller(met, self.width)
        place = at + first
        if isinstance(offset, int):
            whole = -(-self.count // lanes) * lanes * self.step + offset <= limit
            if offset >= 0:
                return (
                    load(buffer, place, lanes)
                    if whole
                    else load_masked(buffer, place, lanes_below(first, limit, lanes), lanes)
                )
        return load_masked(buffer, place, lanes_within(first, limit, lanes), lanes)


@dataclass(frozen=True)
class FoldedReader:
    """Reads the columns of `rows` lines that follow each other in memory as one vector: lines shorter than half of it.

    Lane l is line l // width, column l % width.
    """

    lanes: int
    rows: int
    height: int
    width: int

    def read(self, buffer: Any, at: Any, first: int, offset: Any) -> Any:
        """Lines first .. first + rows, whose first element is at index `at`, all shifted by `offset` columns.

        What is outside of the plane is zero; `offset` may be an expression.
        """
        lanes, width = self.lanes, self.width
        low, high = max(0, -first), min(self.rows, self.height - first)
        column = tirx.truncmod(ramp(0, lanes), splat(expr(width), lanes)) + splat(expr(offset), lanes)
        mask = tirx.And(column >= splat(expr(0), lanes), column < splat(expr(width), lanes))
        mask = tirx.And(mask, lanes_within(-low * width, (high - low) * width, lanes))
        return load_masked(buffer, at + offset, mask, lanes)


def interleaved(loops: Loops, even: Any, odd: Any, lanes: int) -> tuple[Any, Any]:
    """The two vectors even[0], odd[0], even[1], odd[1], …"""
    low = [i // 2 + (i % 2) * lanes for i in range(lanes)]
    high = [lane + lanes // 2 for lane in low]
    return loops.let(shuffle(even, odd, low), "low"), loops.let(shuffle(even, odd, high), "high")


def prefetch_ahead(
    loops: Loops,
    buffer: Any,
    at: Any,
    pitch: int,
    lines: int,
    vectors: int,
    lanes: int,
    write: bool = False,
    ahead: int | None = None,
) -> None:
    """Ask for what lies AHEAD (or `ahead` elements) of `vectors` in each of some lines, into the first level.

    Planes follow each other in memory, but a tile goes through its lines side by side: so many streams at once are
    beyond what hardware foresees. With it, layers that come from memory take half of the time.
    """
    distance = AHEAD // DTYPE_BYTES[str(buffer.dtype)] if ahead is None else ahead
    together = max(1, lanes // max(1, pitch))  # lines of one vector's bytes
    for line in range(0, lines, together):
        for vector in range(vectors):
            loops.prefetch(buffer, at + (line * pitch + vector * lanes + distance), write, near=True)


__all__ = ["FoldedReader", "LineReader", "interleaved", "prefetch_ahead"]
