# SPDX-License-Identifier: Apache-2.0
"""The scalar operand of wgrad's register tile: dY in place or packed, or im2col rows of X from their panel."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import HALF, as_number, contiguous_words, low_half, word_at, words
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    choose,
    expr,
    lanes_below,
    lanes_within,
    load,
    load_masked,
    quotient,
    remainder,
    splat,
    within,
    zero,
)
from tvm_convgrad.codegen.packing import transpose
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.wgrad.panel_shapes import Im2colPanel
from tvm_convgrad.kernels.wgrad.panels import Slab, WgradPanels

Steps = tuple[Index, int, int]
"""Where the operand of a depth slice begins, and its elements from a row to the next and from a pixel to the next."""

Blocks = tuple[Index, LookupTable | None, list[int]]
"""Blocks that share code: how many, their numbers (None: 0, 1, …), and the offsets of their scalars in a pixel."""


class Scalars:
    """dY read in place; the base of the other two.

    Attributes:
        buffer: what the scalars are read from.
    """

    def __init__(self, kernel: WgradPanels) -> None:
        self.kernel, self.loops, self.spec, self.tiling = kernel, kernel.loops, kernel.spec, kernel.tiling
        self.buffer: Buffer = kernel.dy

    def allocate(self, blocks: int) -> None:
        """Room for a slab of so many blocks of `tile_m`, in the innermost open loop."""

    def pack(self, slab: Slab, blocks: Index, first_block: Index) -> None:
        """Pack a slab of so many blocks into the panel."""

    def read(self, at: Index, alone: bool = False) -> Expr:
        """A scalar; in dot products a word of a pixel and the next one, or of the pixel alone."""
        if not self.spec.dots:
            return load(self.buffer, at)
        if str(self.buffer.dtype) == HALF:
            return words(load(self.buffer, at), tir.const(0, HALF)) if alone else word_at(self.buffer, at)
        word = load(self.buffer, at)
        return low_half(word) if alone else word

    def blocks_of_code(self, count: Index) -> Iterator[Blocks]:
        """All blocks that have code of their own."""
        yield count, None, [i * self.spec.dy.channel for i in range(self.tiling.tile_m)]

    def at(self, slab: Slab, number: Index, d: Index, out_block: Index, local_block: Index) -> Steps:
        """Where depth slice d of a slab is, which is slice `number` of all images.

        Args:
            out_block, local_block: the number of the block among all, and among those of the work item.
        """
        dy = self.spec.dy
        channel = slab.group * self.spec.out_channels + self.kernel.blocks.first_out(out_block)
        return self.kernel.at(dy, number, slab.first_row) + channel * dy.channel, dy.spatial[1], dy.spatial[2]


class PackedScalars(Scalars):
    """A panel of a slab of dY: [block][depth slice][row][column][m], of each or of each second column.

    Attributes:
        columns: of a row of the panel.
        pitch: elements from one to the next; an even number where only even pairs are held, so that a column of dY has
            half of it.
    """

    def __init__(self, kernel: WgradPanels) -> None:
        super().__init__(kernel)
        step = self.spec.word_columns
        self.columns = -(-self.spec.dy.extents[2] // step)
        self.pitch = round_up(self.tiling.tile_m, step)

    def allocate(self, blocks: int) -> None:
        """Allocate the panel; the last stores of a row reach behind its last pixel."""
        tiling = self.tiling
        rows = blocks * tiling.slab_d * tiling.slab_h
        size = rows * self.columns * self.pitch + self.kernel.lanes * (self.pitch + 1)
        self.buffer = self.loops.buffer("grad_panel", size, self.spec.dtype)

    def blocks_of_code(self, count: Index) -> Iterator[Blocks]:
        """All blocks share code: scalars are contiguous."""
        yield count, None, list(range(self.tiling.tile_m))

    def at(self, slab: Slab, number: Index, d: Index, out_block: Index, local_block: Index) -> Steps:
        """Where a depth slice is in the panel."""
        rows, row = (local_block * self.tiling.slab_d + d) * self.tiling.slab_h, self.columns * self.pitch
        return rows * row, row, self.pitch // self.spec.word_columns

    def pack(self, slab: Slab, blocks: Index, first_block: Index) -> None:
        """Pack in the order of the panel: what a pixel's store writes behind its own, the next ones overwrite."""
        loops, spec, tiling = self.loops, self.spec, self.tiling
        dy = spec.dy
        with loops.loop(blocks, "o") as o, loops.loop(slab.slices, "d") as d:
            number = loops.let(slab.first_slice + d, "number")
            channel = slab.group * spec.out_channels + self.kernel.blocks.first_out(first_block + o)
            at = loops.let(expr(self.kernel.at(dy, number, slab.first_row) + channel * dy.channel), "from_slice")
            with loops.loop(slab.rows, "h") as h:
                start = loops.let(at + h * dy.spatial[1], "from")
                into = (o * tiling.slab_d + d) * tiling.slab_h + h
                into = loops.let(into * (self.columns * self.pitch), "into")
                if dy.channel != 1 and dy.spatial[2] == 1 and self.kernel.machine.has_masks:
                    self._pack_transposed(into, start)
                else:
                    self._pack_pixels(into, start)

    def _pack_pixels(self, into: Index, start: Index) -> None:
        """One row, pixel after pixel."""
        loops, tile_m, lanes, dy = self.loops, self.tiling.tile_m, self.kernel.lanes, self.spec.dy
        width, step = dy.extents[2], self.spec.word_columns
        with loops.loop(self.columns, "w") as w:
            pixel = loops.let(start + w * (step * dy.spatial[2]), "pixel")
            dots, following = self.spec.dots, None if self.spec.has_partners else expr(w * step) < width - 1
            if dy.channel != 1 or not self.kernel.machine.has_masks:
                for i in range(tile_m):
                    at = pixel + i * dy.channel
                    value = load(self.kernel.dy, at)
                    if dots:
                        high = load(self.kernel.dy, at + dy.spatial[2])
                        high = high if following is None else choose(following, high, tir.const(0, HALF))
                        value = words(value, high)
                    else:
                        value = as_number(value, self.spec.dtype)
                    loops.store(self.buffer, into + w * self.pitch + i, value)
                return
            for first in range(0, tile_m, lanes):
                mask = lanes_below(0, min(tile_m - first, lanes), lanes)
                value = load_masked(self.kernel.dy, pixel + first, mask, lanes)
                value = value if dots else as_number(value, self.spec.dtype)
                if dots:
                    second = mask if following is None else tir.And(mask, splat(following, lanes))
                    value = words(value, load_masked(self.kernel.dy, pixel + dy.spatial[2] + first, second, lanes))
                loops.store_masked(self.buffer, into + w * self.pitch + first, value, mask)

    def _pack_transposed(self, into: Index, start: Index) -> None:
        """One row, in squares of `lanes` pixels by `lanes` channels that are transposed in registers."""
        loops, tile_m, lanes, step = self.loops, self.tiling.tile_m, self.kernel.lanes, self.spec.dy.channel
        columns = lanes * self.spec.word_columns
        with loops.loop(-(-self.columns // lanes), "square") as square:
            for first in range(0, tile_m, lanes):
                count = min(tile_m - first, lanes)
                starts = [start + (first + i) * step + square * columns for i in range(count)]
                values = [loops.let(self._columns(at, square * columns), "r") for at in starts]
                values += [zero(self.spec.dtype, lanes)] * (lanes - count)
                for w, value in enumerate(transpose(loops, values)):
                    at = into + (square * lanes + w) * self.pitch + first
                    loops.store_masked(self.buffer, at, value, lanes_below(0, count, lanes))

    def _columns(self, at: Index, first: Index) -> Expr:
        """A vector of pixels of a channel from column `first` on, or of words of them and the next ones."""
        lanes, dy, width = self.kernel.lanes, self.kernel.dy, self.spec.dy.extents[2]
        if self.spec.even_pairs:
            return contiguous_words(load_masked(dy, at, lanes_below(first, width, 2 * lanes), 2 * lanes))
        value = load_masked(dy, at, lanes_below(first, width, lanes), lanes)
        if not self.spec.dots:
            return as_number(value, self.spec.dtype)
        return words(value, load_masked(dy, at + 1, lanes_below(first + 1, width, lanes), lanes))


class Im2colScalars(Scalars):
    """im2col rows of X: the scalars (tap, channel) of each pixel, read from an `Im2colPanel` of its slab."""

    def __init__(self, kernel: WgradPanels) -> None:
        super().__init__(kernel)
        tiling = self.tiling
        self.panel = Im2colPanel.of(self.spec, tiling.tile_m, (tiling.slab_h, tiling.slab_d), kernel.lanes)
        self.source = self.panel.source
        alike = self.panel.blocks_by_offsets()
        self._offsets = [list(offsets) for offsets in alike]
        self._numbers = [LookupTable(self.loops, "row_blocks", blocks) for blocks in alike.values()]
        self._starts = LookupTable(self.loops, "row_starts", self.panel.starts)

    def allocate(self, blocks: int) -> None:
        """Allocate the panel, which all blocks read."""
        self.buffer = self.loops.buffer("im2col_panel", self.panel.size, self.spec.dtype)

    def blocks_of_code(self, count: Index) -> Iterator[Blocks]:
        """Blocks whose im2col rows lie at the same offsets share code."""
        if len(self._offsets) == 1:
            yield count, None, self._offsets[0]
            return
        for offsets, numbers in zip(self._offsets, self._numbers, strict=True):
            yield len(numbers), numbers, offsets

    def at(self, slab: Slab, number: Index, d: Index, out_block: Index, local_block: Index) -> Steps:
        """Where the im2col rows of a block begin in a depth slice of the panel."""
        start = self.loops.let(self._starts.at(out_block), "rows_at")
        panel = self.panel
        return d * panel.slice_size + start, panel.source.step_h * panel.row_size, panel.column_size

    def pack(self, slab: Slab, blocks: Index, first_block: Index) -> None:
        """Pack X row by row, with zeros outside of it."""
        loops, spec, panel = self.loops, self.source, self.panel
        x, depth = spec.x, spec.dy.extents[0]
        vectors = self.kernel.machine.has_masks and spec.has_vectors(x)
        lanes = self.kernel.lanes if vectors else 1
        rows = (slab.rows - 1) * spec.step_h + spec.panel_rows(1)
        with loops.loop(slab.slices, "p") as p, loops.loop(spec.kernel[0], "kd") as kd, loops.loop(rows, "r") as r:
            number = loops.let(slab.first_slice + p, "number")
            d = remainder(number, depth) * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]
            h = slab.first_row * spec.strides[1] + r * spec.packed_stride_h - spec.low[1]
            valid = loops.let(tir.And(within(d, x.extents[0]), within(h, x.extents[1])), "valid")
            limit = loops.let(choose(valid, x.extents[2] * panel.scale, 0), "limit")
            base = quotient(number, depth) * x.batch + d * x.spatial[0] + h * x.spatial[1]
            base = loops.let(expr(base), "from")
            into = ((p * spec.kernel[0] + kd) * panel.rows + r) * panel.row_size
            into = loops.let(expr(into), "into")
            with loops.loop(panel.runs, "run") as run, loops.loop(panel.pitch // lanes, "v") as v:
                place = loops.let(expr(v * lanes - spec.low[2] * panel.scale), "place")
                at = base + run * x.channel + place
                if vectors:
                    value = load_masked(self.kernel.dy, at, lanes_within(place, limit, lanes), lanes)
                    if spec.dots:
                        second = lanes_within(place + panel.column_size, limit, lanes)
                        value = words(value, load_masked(self.kernel.dy, at + panel.column_size, second, lanes))
                    else:
                        value = as_number(value, spec.dtype)
                else:
                    value = self._element(at, place, limit)
                    if spec.dots:
                        step = panel.column_size
                        value = words(value, self._element(at + step, place + step, limit))
                loops.store(self.buffer, into + run * panel.pitch + v * lanes, value)

    def _element(self, at: Index, place: Index, limit: Index) -> Expr:
        """An element of a row of X, zero where `place` is not below `limit`; of dot products half of a word."""
        spec = self.source
        value = load(self.kernel.dy, at)
        inside = tir.And(expr(place) >= 0, expr(place) < limit)
        if spec.dots:
            return choose(inside, value, tir.const(0, HALF))
        return choose(inside, as_number(value, spec.dtype), zero(spec.dtype))


def scalars_of(kernel: WgradPanels) -> Scalars:
    """The scalar operand of a kernel, as its spec and tiling have it."""
    if kernel.spec.im2col_of is not None:
        return Im2colScalars(kernel)
    return PackedScalars(kernel) if kernel.tiling.scalars_packed else Scalars(kernel)


__all__ = ["Scalars", "scalars_of"]
