# SPDX-License-Identifier: Apache-2.0
"""The packing of the two panels that wgrad's tile registers are loaded from (`tile_shape.TileShape`)."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import HALF, contiguous_words, words
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    ceiling,
    choose,
    expr,
    lanes_below,
    lanes_within,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
    within,
)
from tvm_convgrad.codegen.packing import shuffle, transpose
from tvm_convgrad.codegen.tile_product import WORDS
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.wgrad.panels import Slab, WgradPanels
from tvm_convgrad.kernels.wgrad.scalars import Blocks, Scalars, Steps
from tvm_convgrad.kernels.wgrad.tile_shape import TileShape


class GradTiles(Scalars):
    """A panel of a slab of dY: A of `TileShape`."""

    def __init__(self, kernel: WgradPanels, shape: TileShape) -> None:
        super().__init__(kernel)
        self.shape, self.slice_size = shape, self.tiling.tile_m * shape.grad_pitch
        dy = self.spec.dy
        # Rows without zeros between them are packed as one.
        whole = 2 * shape.pitch == dy.extents[2] and dy.spatial[1] == dy.extents[2] * dy.spatial[2]
        self.joins_rows = whole and self.tiling.slab_h > 1

    def allocate(self, blocks: int) -> None:
        """Allocate the panel."""
        self.buffer = self.loops.buffer("grad_panel", blocks * self.tiling.slab_d * self.slice_size, self.spec.dtype)

    def blocks_of_code(self, count: Index) -> Iterator[Blocks]:
        """All blocks share code."""
        yield count, None, []

    def at(self, slab: Slab, number: Index, d: Index, out_block: Index, local_block: Index) -> Steps:
        """Where a depth slice is in the panel; the words of its rows, and of a pixel, follow each other."""
        return (local_block * self.tiling.slab_d + d) * self.slice_size, self.shape.pitch, 1

    def pack(self, slab: Slab, blocks: Index, first_block: Index) -> None:
        """Pack in the order of the panel: what a vector writes behind a row, the next row overwrites."""
        loops, spec, tiling, shape = self.loops, self.spec, self.tiling, self.shape
        dy = spec.dy
        rows, columns, count = slab.rows, dy.extents[2], shape.pitch
        if self.joins_rows:
            rows, columns, count = 1, loops.let(slab.rows * columns, "pixels"), loops.let(slab.rows * count, "words")
        with loops.loop(blocks, "o") as o, loops.loop(slab.slices, "d") as d:
            channel = slab.group * spec.out_channels + self.kernel.blocks.first_out(first_block + o)
            at = self.kernel.at(dy, loops.let(slab.first_slice + d, "number"), slab.first_row)
            at = loops.let(expr(at + channel * dy.channel), "from_slice")
            into = loops.let(expr((o * tiling.slab_d + d) * self.slice_size), "into")
            if dy.channel == 1:
                with loops.loop(rows, "h") as h, loops.loop(ceiling(count, WORDS), "square") as square:
                    start = loops.let(at + h * dy.spatial[1], "from")
                    self._pack_square(into + h * shape.pitch, start, loops.let(square * WORDS, "word"), columns)
            else:
                with loops.loop(tiling.tile_m, "m") as m, loops.loop(rows, "h") as h:
                    start = loops.let(at + m * dy.channel + h * dy.spatial[1], "from")
                    self._pack_row(into + m * shape.grad_pitch + h * shape.pitch, start, columns, count)

    def _pack_row(self, into: Index, start: Index, columns: Index, count: Index) -> None:
        """Pack the words of a row of one channel, by vectors where its pixels are contiguous."""
        loops, dy, step = self.loops, self.kernel.dy, self.spec.dy.spatial[2]
        if step == 1:
            with loops.loop(ceiling(count, WORDS), "v") as v:
                first = loops.let(v * (2 * WORDS), "first")
                value = load_masked(dy, start + first, lanes_below(first, columns, 2 * WORDS), 2 * WORDS)
                loops.store(self.buffer, into + v * WORDS, contiguous_words(value))
            return
        with loops.loop(count, "v") as v:
            halves = [
                choose(expr(2 * v + i) < columns, load(dy, start + (2 * v + i) * step), tir.const(0, HALF))
                for i in range(2)
            ]
            loops.store(self.buffer, into + v, words(*halves))

    def _pack_square(self, into: Index, start: Index, word: Index, columns: Index) -> None:
        """Pack WORDS words of a row of all channels, which are contiguous, by squares."""
        loops, dy, step, tile_m = self.loops, self.kernel.dy, self.spec.dy.spatial[2], self.tiling.tile_m
        for first in range(0, tile_m, WORDS):
            count = min(tile_m - first, WORDS)
            rows = []
            for w in range(WORDS):
                halves = []
                for i in range(2):
                    column = loops.let(expr(2 * (word + w) + i), "column")
                    limit = loops.let(choose(expr(column) < columns, count, 0), "limit")
                    mask = lanes_below(0, limit, WORDS)
                    halves.append(load_masked(dy, start + column * step + first, mask, WORDS))
                rows.append(loops.let(words(*halves), "r"))
            for m, value in enumerate(transpose(loops, rows)[:count]):
                loops.store(self.buffer, into + (first + m) * self.shape.grad_pitch + word, value)


class DataTiles:
    """The panel of a slab of X, B of `TileShape`, which the kernel allocates; and its packing."""

    def __init__(self, kernel: WgradPanels, shape: TileShape) -> None:
        self.kernel, self.loops, self.spec, self.shape = kernel, kernel.loops, kernel.spec, shape
        spec, source = self.spec, self.spec.taps_of or self.spec
        x, stride, extent = spec.x, source.strides[2], spec.dy.extents[2]
        self.source, self.folds = source, spec.taps_of is not None
        self.step = stride * x.spatial[2]  # elements from what a pixel is multiplied with to that of the next one
        firsts = [k * source.dilation[2] - source.low[2] for k in range(source.kernel[2])]
        ends = [min(x.extents[2], first + (extent - 1) * stride + 1) for first in firsts]
        channels = source.in_channels if self.folds else 1
        self.firsts, self.ends, self.channels, self.phases = (
            LookupTable(self.loops, name, values)
            for name, values in (
                ("first_columns", [first for first in firsts for _ in range(channels)]),
                ("end_columns", [end for end in ends for _ in range(channels)]),
                ("tap_channels", [c * x.channel for _ in firsts for c in range(channels)]),
                ("phases", list(shape.phases)),
            )
        )

    def pack(self, slab: Slab, first_in: Index) -> None:
        """Pack in the order of the panel: what a square writes behind a row, the next row overwrites."""
        loops, spec, shape, x = self.loops, self.spec, self.shape, self.spec.x
        channel = slab.group * self.source.in_channels + (0 if self.folds else first_in)
        with loops.loop(slab.slices, "p") as p, loops.loop(spec.kernel[0], "kd") as kd:
            number = loops.let(slab.first_slice + p, "number")
            n, d = quotient(number, spec.dy.extents[0]), remainder(number, spec.dy.extents[0])
            d = loops.let(expr(d * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]), "d")
            base = loops.let(expr(n * x.batch + d * x.spatial[0] + channel * x.channel), "from_slice")
            with (
                loops.when(within(d, x.extents[0])),
                loops.loop(spec.kernel[2], "kw") as kw,
                loops.loop(len(shape.phases), "phase") as phase,
                loops.loop(slab.rows + shape.reach, "r") as r,
            ):
                h = (slab.first_row + r) * spec.strides[1] + self.phases.at(phase) - spec.low[1]
                h = loops.let(expr(h), "h")
                to = ((p * spec.kernel[0] + kd) * spec.kernel[2] + kw) * shape.tap_size
                to = to + (phase * shape.phase_rows + r) * (shape.pitch * shape.width)
                exists = within(h, x.extents[1])
                into, at = loops.let(expr(to), "into"), loops.let(base + h * x.spatial[1], "from")
                if x.channel == 1:
                    self._pack_vectors(slab.panel, into, at, exists, kw, first_in)
                elif self.step in (1, 2):
                    self._pack_squares(slab.panel, into, at, exists, kw, first_in)
                else:
                    self._pack_words(slab.panel, into, at, exists, kw, first_in)

    def _pack_vectors(self, panel: Buffer, into: Index, at: Index, exists: Expr, kw: Index, first_in: Index) -> None:
        """Pack a row in vectors of contiguous n, a word after the other."""
        loops, spec, x, width = self.loops, self.spec, self.spec.x, self.shape.width
        # The first n and its column: with pairs of tap and channel, those of the row's first tap.
        first = -self.source.low[2] if self.folds else self.firsts.at(kw)
        with loops.loop(self.shape.pitch, "word") as word:
            columns = []
            for i in range(2):
                pixel = loops.let(expr(2 * word + i), "pixel")
                column = loops.let(expr(first + pixel * self.source.strides[2]), "column")
                inside = tir.And(exists, expr(pixel) < spec.dy.extents[2])
                inside = inside if self.folds else tir.And(inside, within(column, x.extents[2]))
                columns.append((column, inside))
            for j in range(self.kernel.tiling.tile_n):
                n = loops.let(expr(first_in + j * WORDS), "n")
                halves = []
                for column, inside in columns:
                    mask = lanes_below(n, loops.let(choose(inside, spec.in_channels, 0), "limit"), WORDS)
                    place = column * x.spatial[2] + (n if self.folds else j * WORDS)
                    place = loops.let(expr(place), "place")
                    if self.folds:
                        mask = tir.And(mask, lanes_within(place, x.extents[2] * x.spatial[2], WORDS))
                    halves.append(load_masked(self.kernel.x, at + place, mask, WORDS))
                loops.store(panel, into + word * width + j * WORDS, words(*halves))

    def _lane(self, n: Index, kw: Index, exists: Expr) -> tuple[Index, Index, Index]:
        """The elements from the first channel to that of an n, its first column and its end, 0 without such an n."""
        loops, spec = self.loops, self.spec
        if self.kernel.blocks.ragged:
            exists = tir.And(exists, expr(n) < spec.in_channels)
        if not self.folds:
            return 0, self.firsts.at(kw), loops.let(choose(exists, self.ends.at(kw), 0), "end")
        n = loops.let(smaller(n, spec.in_channels - 1), "n")
        end = loops.let(choose(exists, self.ends.at(n), 0), "end")
        return loops.let(self.channels.at(n), "lane"), loops.let(self.firsts.at(n), "first"), end

    def _pack_squares(self, panel: Buffer, into: Index, at: Index, exists: Expr, kw: Index, first_in: Index) -> None:
        """Pack a row in squares of WORDS words by as many n, which are transposed in registers."""
        loops, x, shape = self.loops, self.spec.x, self.shape
        with (
            loops.loop(ceiling(shape.pitch, WORDS), "square") as square,
            loops.loop(self.kernel.tiling.tile_n, "j") as j,
        ):
            rows = []
            for c in range(WORDS):
                lane, first, end = self._lane(loops.let(expr(first_in + j * WORDS + c), "n"), kw, exists)
                if not self.folds:
                    lane = (j * WORDS + c) * x.channel
                place = loops.let(expr(first * x.spatial[2] + square * (2 * WORDS * self.step)), "place")
                limit = loops.let(expr((end - 1) * x.spatial[2] + 1), "limit")
                rows.append(loops.let(self._row_of_words(at + lane, place, limit), "row"))
            start = loops.let(expr(into + square * (WORDS * shape.width) + j * WORDS), "start")
            for w, value in enumerate(transpose(loops, rows)):
                loops.store(panel, start + w * shape.width, value)

    def _row_of_words(self, base: Index, place: Index, limit: Index) -> Expr:
        """WORDS words of a channel from the element `place` of its row on; zeros outside of 0 to `limit`."""
        loops, lanes = self.loops, 2 * WORDS
        halves = [
            load_masked(self.kernel.x, base + at, lanes_within(at, limit, lanes), lanes)
            for at in (place + lanes * i for i in range(self.step))
        ]
        if self.step == 1:
            return contiguous_words(halves[0])
        low, high = (loops.let(half, "half") for half in halves)
        return contiguous_words(shuffle(low, high, range(0, 2 * lanes, 2)))

    def _pack_words(self, panel: Buffer, into: Index, at: Index, exists: Expr, kw: Index, first_in: Index) -> None:
        """Pack a row word by word."""
        loops, x, width = self.loops, self.spec.x, self.shape.width
        with loops.loop(width, "i") as i, loops.loop(self.shape.pitch, "word") as word:
            lane, first, end = self._lane(loops.let(expr(first_in + i), "n"), kw, exists)
            lane = lane if self.folds else i * x.channel
            halves = []
            for half in range(2):
                column = loops.let(expr(first + (2 * word + half) * self.source.strides[2]), "column")
                inside = tir.And(expr(column) >= 0, expr(column) < end)
                value = load(self.kernel.x, at + lane + column * x.spatial[2])
                halves.append(choose(inside, value, tir.const(0, HALF)))
            loops.store(panel, into + word * width + i, words(*halves))


__all__ = ["DataTiles", "GradTiles"]
