# SPDX-License-Identifier: Apache-2.0
"""The base of the wgrad kernel: its tables, addresses and sums, and the packing of the panel of vectors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import HALF, as_number, contiguous_words, words
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    ceiling,
    choose,
    expr,
    lanes_below,
    lanes_within,
    larger,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
    splat,
    within,
    zero,
)
from tvm_convgrad.codegen.packing import shuffle, transpose
from tvm_convgrad.codegen.register_tile import Tile
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.spec import View
from tvm_convgrad.kernels.vectors import load_vector
from tvm_convgrad.kernels.wgrad.panel_shapes import Im2colPanel, VectorPanel
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, WgradTiling
from tvm_convgrad.kernels.wgrad.store import DwBlocks

PIECES = 64
"""Work items of a pass over all elements of dY or dW."""


@dataclass(frozen=True)
class Slab:
    """A slab of dY of a work item.

    Attributes:
        first_slice, slices: its depth slices, numbered through all images.
        first_row, rows: its rows in each depth slice.
        group: of the work item.
        panel: of its vectors; None if they are read in place.
        to_next: elements from its first pixel to that of the next slab, in dY and in X; None without prefetch.
    """

    first_slice: Index
    slices: Index
    first_row: Index
    rows: Index
    group: Index
    panel: Buffer | None
    to_next: tuple[Index, Index] | None


class WgradPanels:
    """Tables and addresses of a wgrad kernel, and the code that packs the operand of its vectors.

    Attributes:
        dy, x: the tensors of scalars and of vectors: X and dY if the product is transposed.
        valid: for each axis, by tap, or by block of im2col rows: the first position of dY that is in bounds, and the
            one after the last; all_valid: whether that is all of dY.
    """

    def __init__(
        self, frame: KernelFrame, spec: WgradSpec, tiling: WgradTiling, machine: Machine, dy: Buffer, x: Buffer
    ) -> None:
        self.frame, self.loops, self.spec, self.tiling, self.machine = frame, frame.loops, spec, tiling, machine
        self.dy, self.x, self.dw = dy, x, frame.tensors[2]
        self.lanes = machine.lanes(spec.dtype)
        self.blocks = DwBlocks(spec, tiling.tile_m, tiling.tile_n, self.lanes)
        self.width = self.blocks.width
        self.kind = "parallel" if tiling.parallel else "serial"
        self.shifts = LookupTable(self.loops, "tap_shifts", self._tap_shifts())
        ranges = list(itertools.product(*spec.valid_ranges))
        if spec.im2col_of is not None:
            slab = (tiling.slab_h, tiling.slab_d)
            ranges = Im2colPanel.of(spec, tiling.tile_m, slab, self.lanes).valid_ranges
        by_axis = list(zip(*ranges, strict=True))
        self.valid = [
            [
                LookupTable(self.loops, f"{side}_valid", list(numbers))
                for side, numbers in zip(("first", "end"), zip(*each, strict=True), strict=True)
            ]
            for each in by_axis
        ]
        self.all_valid = [set(each) == {(0, extent)} for each, extent in zip(by_axis, spec.dy.extents, strict=True)]

    @cached_property
    def panel(self) -> VectorPanel:
        """The shape of the panel of vectors."""
        square = self.lanes if self._transposes() else 1
        return VectorPanel.of(self.spec, self.tiling.slab_h, self.tiling.slab_d, self.width, square)

    @property
    def panel_size(self) -> int:
        """Elements of the panel of vectors."""
        return self.panel.size

    def _tap_shifts(self) -> list[int]:
        """Where in the panel each tap's vectors begin, from those of the first tap at the first column of X on."""
        panel, (depth, height, width) = self.panel, self.spec.dilation
        slice_step = depth if panel.shares_slices else 1
        return [
            (kd * slice_step * panel.rows + kh * height) * panel.row_size
            + (kw * width - panel.first_column) * self.width
            for kd, kh, kw in self.blocks.taps
        ]

    def _transposes(self) -> bool:
        """Whether vectors are packed by transposing squares of registers."""
        return self.spec.transposes_x and self.machine.has_masks

    def convert_grad(self) -> None:
        """Convert dY of another type once, as its elements are read many times; panels of it do so by themselves."""
        loops, spec = self.loops, self.spec
        if not spec.converts_all(self.tiling):
            return
        size = self.frame.batch * spec.dy.batch if self.frame.is_symbolic else spec.dy.size
        converted = loops.buffer("grad_sums", size, spec.dtype)
        with self._elements(size) as e:
            loops.store(converted, e, as_number(load(self.dy, e), spec.dtype))
        self.dy = converted

    def clear(self) -> None:
        """Store zeros to dW: taps that read only padding keep them, all others are stored to later."""
        with self._elements(self.spec.dw.size) as e:
            self.loops.store(self.dw, e, zero(self.spec.dtype))

    @contextmanager
    def _elements(self, size: Index) -> Iterator[Index]:
        """A loop over all elements of a tensor, shared by threads."""
        loops = self.loops
        piece = loops.let(ceiling(size, PIECES), "piece_size")
        with loops.loop(PIECES, "piece", self.kind) as number:
            first = loops.let(number * piece, "first")
            with loops.loop(larger(smaller(size - first, piece), 0), "e") as e:
                yield first + e

    def add_tile(self, tile: Tile, sums: Buffer, at: Index, slab_number: Index) -> None:
        """Add the tile to the sums of the work item; slab 0 sets them."""
        loops, lanes = self.loops, self.lanes

        def store(adds: bool) -> None:
            for i, j in itertools.product(range(tile.rows), range(tile.columns)):
                index, value = at + (i * tile.columns + j) * lanes, tile.value(i, j)
                loops.store(sums, index, load(sums, index, lanes) + value if adds else value)

        if isinstance(slab_number, int):
            store(adds=False)
            return
        first = slab_number < 1
        with loops.when(first):
            store(adds=False)
        with loops.otherwise(first):
            store(adds=True)

    def at(self, view: View, number: Index, row: Index, scale: int = 1) -> Index:
        """Where a row of a depth slice begins, which is slice `number` of dY through all images."""
        depth = self.spec.dy.extents[0]
        at = quotient(number, depth) * view.batch + remainder(number, depth) * view.spatial[0]
        return at + row * (view.spatial[1] * scale)

    # -- the panel of X -----------------------------------------------------------------------------------------

    def pack_vectors(self, slab: Slab, first_in: Index) -> None:
        """Pack the slices, rows and columns of X that exist, of the block of channels from `first_in` on."""
        loops, spec = self.loops, self.spec
        channel = loops.let(slab.group * spec.in_channels + first_in, "channel")
        if self.panel.shares_slices:
            first, end = spec.x_slices(slab.first_slice, slab.slices)
            first = loops.let(first, "first_slice")
            with loops.loop(loops.let(larger(end - first, 0), "x_slices"), "p") as p:
                number = loops.let(first + p, "number")
                n, d = quotient(number, spec.x.extents[0]), remainder(number, spec.x.extents[0])
                self._pack_slice(slab, p, n, d, channel, first_in)
            return
        depth = spec.dy.extents[0]
        with loops.loop(slab.slices, "p") as p, loops.loop(spec.kernel[0], "kd") as kd:
            number = loops.let(slab.first_slice + p, "number")
            d = remainder(number, depth) * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]
            d = loops.let(d, "d")
            with loops.when(within(d, spec.x.extents[0])):
                into = p * spec.kernel[0] + kd
                self._pack_slice(slab, into, quotient(number, depth), d, channel, first_in)

    def _pack_slice(self, slab: Slab, into: Index, n: Index, d: Index, channel: Index, first_in: Index) -> None:
        """Pack depth slice d of image n of X."""
        loops, spec, x = self.loops, self.spec, self.spec.x
        base = loops.let(expr(n * x.batch + d * x.spatial[0] + channel * x.channel), "from_slice")
        into = loops.let(expr(into * self.panel.slice_size), "into_slice")
        with loops.loop((slab.rows - 1) * spec.step_h + spec.panel_rows(1), "r") as r:
            h = slab.first_row * spec.strides[1] + r * spec.packed_stride_h - spec.low[1]
            h = loops.let(expr(h), "h")
            with loops.when(within(h, x.extents[1])):
                at = loops.let(base + h * x.spatial[1], "from")
                to = loops.let(into + r * self.panel.row_size, "into")
                if self._transposes():
                    self._pack_transposed(slab.panel, to, at, first_in)
                else:
                    self._pack_columns(slab.panel, to, at, first_in)

    def _pack_transposed(self, panel: Buffer, into: Index, base: Index, first_in: Index) -> None:
        """Pack one row, in squares of `lanes` columns by `lanes` channels that are transposed in registers."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        limit = spec.x.extents[2]
        with loops.loop(self.panel.pitch // lanes, "square") as square:
            first = square * (lanes * spec.word_columns) + self.panel.first_column
            column = loops.let(expr((first * spec.packed_stride_w - spec.low[2]) * spec.x.spatial[2]), "column")
            with loops.loop(self.tiling.tile_n, "j") as j:
                rows = []
                for c in range(lanes):
                    end: Index = limit
                    if self.blocks.ragged:
                        exists = expr(first_in + j * lanes + c) < spec.in_channels
                        end = choose(exists, limit, 0)
                    at = base + (j * lanes + c) * spec.x.channel
                    rows.append(loops.let(self._row(at, column, end), "row"))
                start = loops.let(into + square * lanes * self.width + j * lanes, "start")
                for c, value in enumerate(transpose(loops, rows)):
                    loops.store(panel, start + c * self.width, value)

    def _row(self, base: Index, first: Index, limit: Index) -> Expr:
        """A vector of columns of a channel, as numbers or as words."""
        spec, lanes = self.spec, self.lanes
        if spec.even_pairs:
            return contiguous_words(self._columns(base, first, limit, 2 * lanes))
        low = self._columns(base, first, limit, lanes)
        if spec.dots:
            return words(low, self._columns(base, first + spec.pair, limit, lanes))
        return as_number(low, spec.dtype)

    def _columns(self, base: Index, first: Index, limit: Index, lanes: int) -> Expr:
        """A vector of columns of a channel, each or each second element from `first` on; zeros outside of X."""
        spec = self.spec
        step = spec.x.spatial[2]
        if step * spec.packed_stride_w == 1:
            return load_masked(self.x, base + first, lanes_within(first, limit, lanes), lanes)
        end = (limit - 1) * step + 1
        low, high = (
            self.loops.let(load_masked(self.x, base + at, lanes_within(at, end, lanes), lanes), "half")
            for at in (first, first + lanes)
        )
        return shuffle(low, high, range(0, 2 * lanes, 2))

    def _pack_columns(self, panel: Buffer, into: Index, base: Index, first_in: Index) -> None:
        """Pack one row, the channels of a column at a time."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        x, ragged = spec.x, self.blocks.ragged
        vectors = x.channel == 1 and spec.has_vectors(x)
        with loops.loop(self.panel.columns, "c") as c:
            column = (c * spec.word_columns + self.panel.first_column) * spec.packed_stride_w - spec.low[2]
            column = loops.let(expr(column), "column")
            at = loops.let(base + column * x.spatial[2], "pixel")
            start = loops.let(into + c * self.width, "start")
            following = None if spec.has_partners else within(column + spec.strides[2], x.extents[2])
            with loops.when(within(column, x.extents[2])):
                if vectors and (not ragged or self.machine.has_masks):
                    for j in range(self.tiling.tile_n):
                        mask = lanes_below(first_in + j * lanes, spec.in_channels, lanes) if ragged else None
                        value = load_vector(self.x, at + j * lanes, lanes, mask)
                        if spec.dots:
                            second = mask if following is None else _both(mask, splat(following, lanes))
                            value = words(value, load_vector(self.x, at + spec.pair + j * lanes, lanes, second))
                        loops.store(panel, start + j * lanes, value if spec.dots else as_number(value, spec.dtype))
                else:
                    with loops.loop(self.width, "i") as i:
                        if spec.dots:
                            high = load(self.x, at + spec.pair + i * x.channel)
                            high = high if following is None else choose(following, high, tir.const(0, HALF))
                            value = words(load(self.x, at + i * x.channel), high)
                        else:
                            value = as_number(load(self.x, at + i * x.channel), spec.dtype)
                        if ragged:
                            value = choose(expr(first_in + i) < spec.in_channels, value, zero(spec.dtype))
                        loops.store(panel, start + i, value)


def _both(mask: Expr | None, other: Expr) -> Expr:
    """The lanes of both masks, of which one may be none."""
    return other if mask is None else tir.And(mask, other)


__all__ = ["Slab", "WgradPanels"]
