# SPDX-License-Identifier: Apache-2.0
"""Vectors of contiguous columns of a row, for depthwise kernels over columns: reads with padding, strides, prefetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import HALF, as_number, contiguous_words, halves_apart
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    Loops,
    ceiling,
    expr,
    lanes_below,
    lanes_of,
    lanes_within,
    load,
    load_masked,
    ramp,
    smaller,
    splat,
    zero,
)
from tvm_convgrad.codegen.packing import shuffle
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.vectors import element_bytes, load_vector

PREFETCH_BYTES = 6144
"""Bytes of memory from what is computed with to what is prefetched: a tile or some depth slices."""

CONVERTED_BYTES = Machine.l1_bytes // 2
"""The most bytes of a panel of a channel's numbers: beside it the first-level cache has the other tensor's rows."""


@dataclass(frozen=True)
class RowReader:
    """Reads, for positions x to x + lanes of `count`, the columns position * step + offset of rows of `width` columns.

    Columns outside the row are zeros, and so are columns that no position reads: nothing unwritten, infinite or
    not a number gets into a sum by a product with zero.

    Attributes:
        dtype: of the vectors that are returned.
        step: 1, or 2: then two vectors are read, and their even and odd lanes separated.
    """

    loops: Loops
    lanes: int
    dtype: str
    step: int
    count: int
    width: int

    def read(self, buffer: Buffer, at: Index, x: Index, offsets: Sequence[Index]) -> list[Expr]:
        """One vector for each offset, of the row whose column 0 is at index `at`.

        Offsets are numbers, in ascending order; a single one may be an expression if step is 1.
        """
        if self.step == 1:
            return [as_number(self._load(buffer, at, x, offset, offset), self.dtype) for offset in offsets]
        loops, lanes = self.loops, self.lanes
        values: list[Expr] = []
        left = list(offsets)
        while left:
            offset = left.pop(0)
            paired = bool(left) and left[0] == offset + 1
            last = left.pop(0) if paired else offset
            if str(buffer.dtype) == HALF:
                both = loops.let(self._load(buffer, at, x * 2, offset, last, 2), "both")
                even, odd = halves_apart(both)
                values += [even, odd] if paired else [even]
                continue
            low = self._load(buffer, at, x * 2, offset, last)
            high = self._load(buffer, at, x * 2 + lanes, offset, last)
            low, high = (loops.let(as_number(each, self.dtype), name) for each, name in ((low, "low"), (high, "high")))
            values.append(loops.let(shuffle(low, high, range(0, 2 * lanes, 2)), "even"))
            if paired:
                values.append(loops.let(shuffle(low, high, range(1, 2 * lanes, 2)), "odd"))
        return values

    def words(self, buffer: Buffer, at: Index, x: Index, offset: Index, apart: int) -> Expr:
        """Words of bfloat16: the columns that `read` returns for an offset, and those `apart` columns further.

        With steps of two `apart` is 1, else at most the lanes of a vector; `buffer` is of HALF.
        """
        value = self._load(buffer, at, x * self.step, offset, offset + apart, 2, ahead=self.step == 1)
        return contiguous_words(value if self.step == 2 else _pairs(value, apart))

    def pixel_pairs(self, buffer: Buffer, at: Index, x: Index, offset: Index) -> Expr:
        """Words of bfloat16, each of two positions that follow each other, from x on: twice the lanes of columns.

        Steps are of one column; `buffer` is of HALF.
        """
        return contiguous_words(self._load(buffer, at, x, offset, offset, 2))

    def _load(
        self,
        buffer: Buffer,
        at: Index,
        x: Index,
        offset: Index,
        last: Index,
        vectors: int = 1,
        ahead: bool = False,
    ) -> Expr:
        """Columns x + offset to x + offset + lanes of so many vectors; `last` is the larger offset that they serve.

        `ahead`: whether the last of the vectors is behind the positions.
        """
        lanes = self.lanes * vectors
        first = x + offset
        limit = smaller((self.count - 1) * self.step + last + 1, self.width)
        place = at + first
        if isinstance(offset, int) and offset >= 0:
            # With steps of two a vector of positions has two vectors of columns, which one load or two read.
            positions = self.lanes if ahead or self.step == 2 else lanes
            end = round_up(self.count, positions) * self.step + ahead * self.lanes + offset
            if isinstance(limit, int) and end <= limit:
                return load(buffer, place, lanes)
            return load_masked(buffer, place, lanes_below(first, limit, lanes), lanes)
        return load_masked(buffer, place, lanes_within(first, limit, lanes), lanes)


@dataclass(frozen=True)
class MultiRowReader:
    """Reads the columns of `rows` contiguous rows as one vector: rows of at most half of a vector.

    Lane l is row l // width, column l % width; `dtype` is that of the vectors that are returned.
    """

    lanes: int
    dtype: str
    rows: int
    height: int
    width: int

    def read(self, buffer: Buffer, at: Index, first: int, offset: Index) -> Expr:
        """Rows `first` to `first + rows`, whose first element is at index `at`, all shifted by `offset` columns.

        What is outside of the depth slice is zero; `offset` may be an expression.
        """
        return as_number(self._load(buffer, at, first, offset, self.lanes), self.dtype)

    def pixel_pairs(self, buffer: Buffer, at: Index, first: int, offset: Index) -> Expr:
        """Words of bfloat16, each of two elements of what `read` returns that follow each other: of twice the lanes."""
        return contiguous_words(self._load(buffer, at, first, offset, 2 * self.lanes))

    def _load(self, buffer: Buffer, at: Index, first: int, offset: Index, lanes: int) -> Expr:
        width = self.width
        low, high = max(0, -first), min(self.rows, self.height - first)
        column = tir.truncmod(ramp(0, lanes), splat(expr(width), lanes)) + splat(expr(offset), lanes)
        mask = tir.And(column >= splat(expr(0), lanes), column < splat(expr(width), lanes))
        mask = tir.And(mask, lanes_within(-low * width, (high - low) * width, lanes))
        return load_masked(buffer, at + offset, mask, lanes)

    def words(self, buffer: Buffer, at: Index, first: int, offset: Index, apart: int) -> Expr:
        """Words of bfloat16: what `read` returns for an offset, and for one `apart` columns further."""
        lanes, width = 2 * self.lanes, self.width
        low, high = max(0, -first), min(self.rows, self.height - first)
        # The elements that a lane's second column needs are those of other lanes, perhaps of other rows.
        loaded = lanes_within(expr(offset) - low * width, (high - low) * width, lanes)
        value = _pairs(load_masked(buffer, at + offset, loaded, lanes), apart)
        lane = tir.truncdiv(ramp(0, lanes), splat(expr(2), lanes))
        column = tir.truncmod(lane, splat(expr(width), lanes)) + splat(expr(offset), lanes)
        column = column + tir.truncmod(ramp(0, lanes), splat(expr(2), lanes)) * splat(expr(apart), lanes)
        mask = tir.And(column >= splat(expr(0), lanes), column < splat(expr(width), lanes))
        rows = tir.And(lane >= splat(expr(low * width), lanes), lane < splat(expr(high * width), lanes))
        return contiguous_words(tir.Select(tir.And(mask, rows), value, zero(HALF, lanes)))


def _pairs(value: Expr, apart: int) -> Expr:
    """From a vector of halves the lower lanes, each followed by that `apart` lanes further."""
    return shuffle(value, value, [i // 2 + i % 2 * apart for i in range(lanes_of(value))])


def convert_run(
    loops: Loops, tensor: Buffer, begin: Index, count: Index, panel: Buffer, dtype: str, lanes: int, ahead: int = 0
) -> None:
    """Convert `count` contiguous elements of 16 bits, from index `begin` on, into a panel of numbers of type `dtype`.

    Rows are read once for each column tap, and weights for each tile: from a panel these reads cost as much as in
    float32. The panel has room for whole vectors.

    Args:
        ahead: elements from what is converted to what is prefetched, or 0 without prefetches.
    """
    begin = loops.let(expr(begin), "begin")
    with loops.loop(ceiling(count, lanes), "vector") as vector:
        at = loops.let(expr(vector * lanes), "at")
        if ahead:
            loops.prefetch(tensor, begin + at + ahead, near=True)
        whole = isinstance(count, int) and count % lanes == 0
        mask = None if whole else lanes_below(at, count, lanes)
        loops.store(panel, at, as_number(load_vector(tensor, begin + at, lanes, mask), dtype))


def interleave(loops: Loops, even: Expr, odd: Expr, lanes: int) -> tuple[Expr, Expr]:
    """The two vectors even[0], odd[0], even[1], odd[1], …"""
    low = [i // 2 + (i % 2) * lanes for i in range(lanes)]
    high = [lane + lanes // 2 for lane in low]
    return loops.let(shuffle(even, odd, low), "low"), loops.let(shuffle(even, odd, high), "high")


def prefetch_rows(
    loops: Loops,
    buffer: Buffer,
    at: Index,
    pitch: int,
    rows: int,
    vectors: int,
    lanes: int,
    write: bool = False,
    distance: int | None = None,
) -> None:
    """Prefetch, into the first-level cache, what lies PREFETCH_BYTES (or `distance` elements) behind a tile.

    Depth slices follow each other in memory, but a tile goes through its rows side by side, which are more streams than
    hardware prefetchers follow. With it, layers that come from memory take half of the time.

    Args:
        at, pitch: where the tile begins, and the elements from one of its rows to the next.
        vectors: in each row.
    """
    distance = PREFETCH_BYTES // element_bytes(buffer) if distance is None else distance
    step = max(1, lanes // max(1, pitch))  # rows that share a vector's bytes are prefetched once
    for row in range(0, rows, step):
        for vector in range(vectors):
            loops.prefetch(buffer, at + (row * pitch + vector * lanes + distance), write, near=True)


__all__ = ["PREFETCH_BYTES", "MultiRowReader", "RowReader", "convert_run", "interleave", "prefetch_rows"]
