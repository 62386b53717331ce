# SPDX-License-Identifier: Apache-2.0
"""The geometry of wgrad, and the panel of its vectors: X of a slab as [plane][depth tap][line][column][channel]."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.loops import (
    Loops,
    Numbers,
    ceiling,
    choose,
    convert,
    expr,
    lanes_below,
    lanes_within,
    larger,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
    within,
    zero,
)
from tvm_convgrad.kernels.packing import shuffle, transpose
from tvm_convgrad.kernels.spec import View
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile
from tvm_convgrad.kernels.weight_spec import WeightSpec, WeightTiling

PIECES = 64
"""Work items of a pass over all elements of dY or dW."""


class WeightPanels:
    """The geometry of a wgrad kernel, and the code that packs the operand of its vectors."""

    def __init__(
        self, loops: Loops, spec: WeightSpec, tiling: WeightTiling, machine: Machine, dy: Any, x: Any, dw: Any
    ) -> None:
        self.loops, self.spec, self.tiling, self.machine = loops, spec, tiling, machine
        self.dy, self.x, self.dw = dy, x, dw
        self.lanes = machine.lanes(spec.dtype)
        self.rows, self.columns, self.width = tiling.rows, tiling.columns, tiling.columns * self.lanes
        self.in_blocks = -(-spec.in_channels // self.width)
        self.out_blocks = -(-spec.out_channels // tiling.rows)
        self.ragged = spec.in_channels % self.width != 0
        self.taps: list[tuple[int, ...]] = list(itertools.product(*(range(k) for k in spec.kernel)))
        self.kind = "parallel" if tiling.parallel else "serial"
        _, kh, kw = spec.kernel
        # Without taps along an axis the panel holds only the lines or columns that are met.
        self.line_step = spec.line_step
        self.column_step = spec.strides[2] if kw > 1 else 1
        self.reach = (kh - 1) * spec.dilation[1] + 1
        self.panel_lines = spec.panel_lines(tiling.lines)
        self.panel_columns = (spec.dy.extents[2] - 1) * self.column_step + (kw - 1) * spec.dilation[2] + 1
        self.pitch = -(-self.panel_columns // self.lanes) * self.lanes if self._transposes() else self.panel_columns
        self.plane_size = spec.kernel[0] * self.panel_lines * self.pitch * self.width
        self.grad_size: Any = spec.dy.size
        self.tile_size = tiling.rows * self.width
        shifts = [
            ((kd * self.panel_lines + kh * spec.dilation[1]) * self.pitch + kw * spec.dilation[2]) * self.width
            for kd, kh, kw in self.taps
        ]
        self.shifts = Numbers(loops, "tap_shifts", shifts)
        self.bounds: tuple[Numbers, Numbers] | None = None
        if spec.share_of_lines < 1:
            first, end = zip(*(spec.met_lines[kh] for _, kh, _ in self.taps), strict=True)
            self.bounds = Numbers(loops, "first_lines", list(first)), Numbers(loops, "end_lines", list(end))

    def _transposes(self) -> bool:
        """Whether X is packed by transposing registers."""
        return self.spec.turns and self.machine.has_masks

    def first_out(self, out_block: Any) -> Any:
        """The first output channel of a block; the last block overlaps the one before it."""
        return smaller(out_block * self.tiling.rows, self.spec.out_channels - self.tiling.rows)

    def convert_grad(self) -> None:
        """dY of another type is converted once, as its elements are read many times; a panel of taps does it itself."""
        loops, spec = self.loops, self.spec
        if spec.dy.dtype == spec.dtype or spec.gathered is not None:
            return
        converted = loops.buffer("grad_sums", self.grad_size, spec.dtype)
        with self._elements(self.grad_size) as e:
            loops.store(converted, e, load(self.dy, e))
        self.dy = converted

    def clear(self) -> None:
        """Zeros for the taps that meet only padding, and for all others until their sums are written."""
        with self._elements(self.spec.dw.size) as e:
            self.loops.store(self.dw, e, zero(self.spec.dtype))

    @contextmanager
    def _elements(self, size: Any) -> Iterator[Any]:
        """All elements of a tensor, shared by threads."""
        loops = self.loops
        piece = loops.let(ceiling(size, PIECES), "piece_size")
        with loops.loop(PIECES, "piece", self.kind) as number:
            first = loops.let(number * piece, "first")
            with loops.loop(larger(smaller(size - first, piece), 0), "e") as e:
                yield first + e

    def keep(self, tile: Tile, sums: Any, at: Any, slab_number: Any) -> None:
        """Add the tile to the item's sums; the first slab sets them."""
        loops, lanes = self.loops, self.lanes
        positions = [(i, j) for i in range(tile.rows) for j in range(tile.columns)]
        if isinstance(slab_number, int):
            for i, j in positions:
                loops.store(sums, at + (i * tile.columns + j) * lanes, tile.value(i, j))
            return
        first = slab_number < 1
        with loops.when(first):
            for i, j in positions:
                loops.store(sums, at + (i * tile.columns + j) * lanes, tile.value(i, j))
        with loops.otherwise(first):
            for i, j in positions:
                index = at + (i * tile.columns + j) * lanes
                loops.store(sums, index, load(sums, index, lanes) + tile.value(i, j))

    def at(self, view: View, plane: Any, line: Any, scale: int = 1) -> Any:
        """Where a line of a plane begins."""
        depth = self.spec.dy.extents[0]
        at = quotient(plane, depth) * view.batch + remainder(plane, depth) * view.spatial[0]
        return at + line * (view.spatial[1] * scale)

    # -- the panel of X -----------------------------------------------------------------------------------------

    def _pack(self, panel: Any, plane: Any, line: Any, group: Any, first_in: Any, planes: Any, lines: Any) -> None:
        """The panel of a slab of so many planes and lines."""
        loops, spec = self.loops, self.spec
        x, depth = spec.x, spec.dy.extents[0]
        channel = loops.let(group * spec.in_channels + first_in, "channel")
        panel_lines = (lines - 1) * self.line_step + self.reach
        with loops.loop(planes, "p") as p, loops.loop(spec.kernel[0], "kd") as kd:
            number = loops.let(plane + p, "number")
            d = remainder(number, depth) * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]
            n = quotient(number, depth)
            with loops.loop(panel_lines, "r") as r:
                h = line * spec.strides[1] + r * spec.line_pace - spec.low[1]
                valid = loops.let(tirx.And(within(d, x.extents[0]), within(h, x.extents[1])), "valid")
                base = n * x.batch + d * x.spatial[0] + h * x.spatial[1] + channel * x.channel
                base = loops.let(expr(base), "from")
                into = ((p * spec.kernel[0] + kd) * self.panel_lines + r) * (self.pitch * self.width)
                into = loops.let(into, "into")
                if self._transposes():
                    self._pack_transposed(panel, into, base, valid, first_in)
                else:
                    self._pack_columns(panel, into, base, valid, first_in)

    def _pack_transposed(self, panel: Any, into: Any, base: Any, valid: Any, first_in: Any) -> None:
        """One line, `lanes` columns of `lanes` channels at a time, by transposing a square of registers."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        limit = loops.let(choose(valid, spec.x.extents[2], 0), "limit")
        ragged = spec.in_channels % self.width != 0
        with loops.loop(self.pitch // lanes, "c") as chunk:
            column = loops.let((chunk * lanes * spec.column_pace - spec.low[2]) * spec.x.spatial[2], "column")
            with loops.loop(self.tiling.columns, "j") as j:
                rows = []
                for c in range(lanes):
                    within_block = limit
                    if ragged:
                        exists = expr(first_in + j * lanes + c) < spec.in_channels
                        within_block = choose(exists, limit, 0)
                    rows.append(
                        loops.let(self._columns(base + (j * lanes + c) * spec.x.channel, column, within_block), "row")
                    )
                start = loops.let(into + chunk * lanes * self.width + j * lanes, "start")
                for c, value in enumerate(transpose(loops, rows)):
                    loops.store(panel, start + c * self.width, value)

    def _columns(self, base: Any, first: Any, limit: Any) -> Any:
        """A vector of columns of a channel, each or each second element from `first` on; zeros outside of X."""
        spec, lanes = self.spec, self.lanes
        step = spec.x.spatial[2]
        if step * spec.column_pace == 1:
            return load_masked(self.x, base + first, lanes_within(first, limit, lanes), lanes)
        end = (limit - 1) * step + 1
        near, far = (
            self.loops.let(load_masked(self.x, base + at, lanes_within(at, end, lanes), lanes), "half")
            for at in (first, first + lanes)
        )
        return shuffle(near, far, range(0, 2 * lanes, 2))

    def _pack_columns(self, panel: Any, into: Any, base: Any, valid: Any, first_in: Any) -> None:
        """One line, the channels of a column at a time."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        x = spec.x
        step = spec.column_pace
        vectors = x.channel == 1 and x.dtype == spec.dtype
        ragged = spec.in_channels % self.width != 0
        with loops.loop(self.panel_columns, "c") as c:
            column = loops.let(expr(c * step - spec.low[2]), "column")
            inside = loops.let(tirx.And(valid, within(column, x.extents[2])), "inside")
            at = loops.let(base + column * x.spatial[2], "pixel")
            start = loops.let(into + c * self.width, "start")
            with loops.when(inside):
                if vectors and (not ragged or self.machine.has_masks):
                    for j in range(self.tiling.columns):
                        value = load(self.x, at + j * lanes, lanes)
                        if ragged:
                            mask = lanes_below(first_in + j * lanes, spec.in_channels, lanes)
                            value = load_masked(self.x, at + j * lanes, mask, lanes)
                        loops.store(panel, start + j * lanes, value)
                else:
                    with loops.loop(self.width, "i") as i:
                        value = convert(load(self.x, at + i * x.channel), spec.dtype)
                        if ragged:
                            value = choose(expr(first_in + i) < spec.in_channels, value, zero(spec.dtype))
                        loops.store(panel, start + i, value)
            with loops.otherwise(inside):
                for j in range(self.tiling.columns):
                    loops.store(panel, start + j * lanes, zero(spec.dtype, lanes))


__all__ = ["WeightPanels"]
