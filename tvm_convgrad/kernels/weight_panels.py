# SPDX-License-Identifier: Apache-2.0
"""The geometry of wgrad, and the packing of the panel of its vectors (a `VectorPanel`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
from tvm_convgrad.kernels.weight_spec import TapPanel, VectorPanel, WeightSpec, WeightTiling

SIDES = ("first", "end")
"""Of the positions of dY where a tap meets X."""

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
        square = self.lanes if self._transposes() else 1
        self.panel = VectorPanel.of(spec, tiling.lines, tiling.planes, self.width, square)
        self.grad_size: Any = spec.dy.size
        self.tile_size = tiling.rows * self.width
        panel, (depth, height, width) = self.panel, spec.dilation
        plane_step = depth if panel.shares_planes else 1
        shifts = [
            (kd * plane_step * panel.lines + kh * height) * panel.line_size
            + (kw * width - panel.first_column) * self.width
            for kd, kh, kw in self.taps
        ]
        self.shifts = Numbers(loops, "tap_shifts", shifts)
        met = list(itertools.product(*spec.met))
        if spec.gathered is not None:
            met = TapPanel.of(spec, tiling.rows, (tiling.lines, tiling.planes), self.lanes).met
        # For each axis, by tap or by block of pairs of tap and channel: where X is met, and whether that is all of dY.
        self.bounds = [
            [
                Numbers(loops, f"{side}_met", list(numbers))
                for side, numbers in zip(SIDES, zip(*each, strict=True), strict=True)
            ]
            for each in zip(*met, strict=True)
        ]
        self.meets_all = [
            set(each) == {(0, extent)} for each, extent in zip(zip(*met, strict=True), spec.dy.extents, strict=True)
        ]

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
        """The panel of a slab of so many planes and lines: those that exist in X."""
        loops, spec = self.loops, self.spec
        channel = loops.let(group * spec.in_channels + first_in, "channel")
        if self.panel.shares_planes:
            first, end = spec.planes_met(plane, planes)
            first = loops.let(first, "first_plane")
            with loops.loop(loops.let(larger(end - first, 0), "x_planes"), "p") as p:
                number = loops.let(first + p, "number")
                n, d = quotient(number, spec.x.extents[0]), remainder(number, spec.x.extents[0])
                self._pack_plane(panel, p, n, d, line, lines, channel, first_in)
            return
        depth = spec.dy.extents[0]
        with loops.loop(planes, "p") as p, loops.loop(spec.kernel[0], "kd") as kd:
            number = loops.let(plane + p, "number")
            d = remainder(number, depth) * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]
            d = loops.let(d, "d")
            with loops.when(within(d, spec.x.extents[0])):
                into = p * spec.kernel[0] + kd
                self._pack_plane(panel, into, quotient(number, depth), d, line, lines, channel, first_in)

    def _pack_plane(
        self, panel: Any, into: Any, n: Any, d: Any, line: Any, lines: Any, channel: Any, first_in: Any
    ) -> None:
        """Plane d of image n of X."""
        loops, spec, x = self.loops, self.spec, self.spec.x
        base = loops.let(expr(n * x.batch + d * x.spatial[0] + channel * x.channel), "from_plane")
        into = loops.let(expr(into * self.panel.plane_size), "into_plane")
        with loops.loop((lines - 1) * spec.line_step + spec.panel_lines(1), "r") as r:
            h = loops.let(expr(line * spec.strides[1] + r * spec.line_pace - spec.low[1]), "h")
            with loops.when(within(h, x.extents[1])):
                at = loops.let(base + h * x.spatial[1], "from")
                to = loops.let(into + r * self.panel.line_size, "into")
                if self._transposes():
                    self._pack_transposed(panel, to, at, first_in)
                else:
                    self._pack_columns(panel, to, at, first_in)

    def _pack_transposed(self, panel: Any, into: Any, base: Any, first_in: Any) -> None:
        """One line, `lanes` columns of `lanes` channels at a time, by transposing a square of registers."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        limit = spec.x.extents[2]
        ragged = spec.in_channels % self.width != 0
        with loops.loop(self.panel.pitch // lanes, "c") as chunk:
            first = chunk * lanes + self.panel.first_column
            column = loops.let(expr((first * spec.column_pace - spec.low[2]) * spec.x.spatial[2]), "column")
            with loops.loop(self.tiling.columns, "j") as j:
                rows = []
                for c in range(lanes):
                    within_block: Any = limit
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

    def _pack_columns(self, panel: Any, into: Any, base: Any, first_in: Any) -> None:
        """One line, the channels of a column at a time."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        x = spec.x
        step = spec.column_pace
        vectors = x.channel == 1 and x.dtype == spec.dtype
        ragged = spec.in_channels % self.width != 0
        with loops.loop(self.panel.columns, "c") as c:
            column = loops.let(expr((c + self.panel.first_column) * step - spec.low[2]), "column")
            at = loops.let(base + column * x.spatial[2], "pixel")
            start = loops.let(into + c * self.width, "start")
            with loops.when(within(column, x.extents[2])):
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


__all__ = ["WeightPanels"]
