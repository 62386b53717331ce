# SPDX-License-Identifier: Apache-2.0
"""The rows of wgrad's register tile: scalars of dY's channels, or of X's channels at all taps, and their panels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.loops import (
    Numbers,
    choose,
    convert,
    expr,
    lanes_below,
    lanes_within,
    load,
    load_masked,
    quotient,
    remainder,
    within,
    zero,
)
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.weight_panels import WeightPanels
from tvm_convgrad.kernels.weight_spec import TapPanel


class Rows:
    """Rows read where they are in memory.

    Attributes:
        buffer: what their scalars are read from.
    """

    def __init__(self, kernel: WeightPanels) -> None:
        self.kernel, self.loops, self.spec, self.tiling = kernel, kernel.loops, kernel.spec, kernel.tiling
        self.buffer: Any = kernel.dy

    def allocate(self, blocks: int) -> None:
        """Room for a slab of so many blocks of rows, in the innermost open loop."""

    def pack(self, slab: Any, blocks: Any, first_block: Any) -> None:
        """Bring a slab into the panel."""

    def kinds(self, count: Any) -> Iterator[tuple[Any, Numbers | None, list[int]]]:
        """For blocks that need code of their own: how many, their numbers (None: all), the offsets of their rows."""
        yield count, None, [i * self.spec.dy.channel for i in range(self.tiling.rows)]

    def at(self, slab: Any, number: Any, p: Any, out_block: Any, local_block: Any) -> tuple[Any, int, int]:
        """Where the scalars of a plane begin, and their steps: a line, a pixel."""
        dy = self.spec.dy
        channel = slab.group * self.spec.out_channels + self.kernel.first_out(out_block)
        return self.kernel.at(dy, number, slab.line) + channel * dy.channel, dy.spatial[1], dy.spatial[2]


class PackedRows(Rows):
    """A slab of dY as [block][plane][line][column][row]."""

    def allocate(self, blocks: int) -> None:
        """The last stores reach behind the pixels that exist."""
        rows, tiling = self.tiling.rows, self.tiling
        pixels = tiling.planes * tiling.lines * self.spec.dy.extents[2]
        self.buffer = self.loops.buffer(
            "grad_panel", blocks * pixels * rows + self.kernel.lanes * (rows + 1), self.spec.dtype
        )

    def kinds(self, count: Any) -> Iterator[tuple[Any, Numbers | None, list[int]]]:
        """One kind: rows are neighbours."""
        yield count, None, list(range(self.tiling.rows))

    def at(self, slab: Any, number: Any, p: Any, out_block: Any, local_block: Any) -> tuple[Any, int, int]:
        """Where the scalars of a plane begin, and their steps: a line, a pixel."""
        columns, rows = self.spec.dy.extents[2], self.tiling.rows
        lines = (local_block * self.tiling.planes + p) * self.tiling.lines
        return lines * (columns * rows), columns * rows, rows

    def pack(self, slab: Any, blocks: Any, first_block: Any) -> None:
        """In the order of the panel: what a pixel's store writes behind its own, the next ones overwrite."""
        loops, spec, tiling, rows = self.loops, self.spec, self.tiling, self.tiling.rows
        dy, columns = spec.dy, spec.dy.extents[2]
        with loops.loop(blocks, "o") as o, loops.loop(slab.planes, "p") as p:
            number = loops.let(slab.plane + p, "number")
            channel = slab.group * spec.out_channels + self.kernel.first_out(first_block + o)
            at = loops.let(expr(self.kernel.at(dy, number, slab.line) + channel * dy.channel), "from_plane")
            with loops.loop(slab.lines, "l") as line_number:
                start = loops.let(at + line_number * dy.spatial[1], "from")
                into = (o * tiling.planes + p) * tiling.lines + line_number
                into = loops.let(into * (columns * rows), "into")
                if dy.channel != 1 and dy.spatial[2] == 1:
                    self._pack_transposed(into, start, columns)
                else:
                    self._pack_pixels(into, start, columns)

    def _pack_pixels(self, into: Any, start: Any, columns: int) -> None:
        loops, rows, lanes, dy = self.loops, self.tiling.rows, self.kernel.lanes, self.spec.dy
        with loops.loop(columns, "x") as x:
            pixel = loops.let(start + x * dy.spatial[2], "pixel")
            if dy.channel != 1:
                for i in range(rows):
                    loops.store(self.buffer, into + x * rows + i, load(self.kernel.dy, pixel + i * dy.channel))
                return
            for first in range(0, rows, lanes):
                mask = lanes_below(0, min(rows - first, lanes), lanes)
                value = load_masked(self.kernel.dy, pixel + first, mask, lanes)
                loops.store_masked(self.buffer, into + x * rows + first, value, mask)

    def _pack_transposed(self, into: Any, start: Any, columns: int) -> None:
        loops, rows, lanes, step = self.loops, self.tiling.rows, self.kernel.lanes, self.spec.dy.channel
        with loops.loop(-(-columns // lanes), "chunk") as chunk:
            mask = lanes_below(chunk * lanes, columns, lanes)
            for first in range(0, rows, lanes):
                count = min(rows - first, lanes)
                values = [
                    loops.let(load_masked(self.kernel.dy, start + (first + i) * step + chunk * lanes, mask, lanes), "r")
                    for i in range(count)
                ]
                values += [zero(self.spec.dtype, lanes)] * (lanes - count)
                for x, value in enumerate(transpose(loops, values)):
                    at = into + (chunk * lanes + x) * rows + first
                    loops.store_masked(self.buffer, at, value, lanes_below(0, count, lanes))


class TapRows(Rows):
    """Pairs of tap and channel of X, read from its slab with borders of zeros.

    The panel is [plane][depth tap][line][column][channel], or [...][line][channel][column], as X is in memory: a line
    is packed by vectors, and each pixel's pairs lie at the same offsets from it.
    """

    def __init__(self, kernel: WeightPanels) -> None:
        super().__init__(kernel)
        self.taps = TapPanel.of(self.spec, self.tiling.rows, (self.tiling.lines, self.tiling.planes), kernel.lanes)
        self.source = self.taps.source
        kinds = self.taps.kinds()
        self._offsets = [list(offsets) for offsets in kinds]
        self._numbers = [Numbers(self.loops, "row_blocks", blocks) for blocks in kinds.values()]
        self._starts = Numbers(self.loops, "row_starts", self.taps.starts)

    def allocate(self, blocks: int) -> None:
        """All blocks read the same panel."""
        self.buffer = self.loops.buffer("tap_panel", self.taps.size, self.spec.dtype)

    def kinds(self, count: Any) -> Iterator[tuple[Any, Numbers | None, list[int]]]:
        """Blocks whose rows lie alike have one code."""
        if len(self._offsets) == 1:
            yield count, None, self._offsets[0]
            return
        for offsets, numbers in zip(self._offsets, self._numbers, strict=True):
            yield len(numbers), numbers, offsets

    def at(self, slab: Any, number: Any, p: Any, out_block: Any, local_block: Any) -> tuple[Any, int, int]:
        """Where the scalars of a plane begin, and their steps: a line, a pixel."""
        start = self.loops.let(self._starts.at(out_block), "rows_at")
        taps = self.taps
        return p * taps.plane_size + start, taps.source.line_step * taps.line_size, taps.column_size

    def pack(self, slab: Any, blocks: Any, first_block: Any) -> None:
        """A line at a time, with zeros where X ends."""
        loops, spec, taps = self.loops, self.source, self.taps
        x, depth = spec.x, spec.dy.extents[0]
        vectors = self.kernel.machine.has_masks and x.dtype == spec.dtype
        lanes = self.kernel.lanes if vectors else 1
        lines = (slab.lines - 1) * spec.line_step + spec.panel_lines(1)
        with loops.loop(slab.planes, "p") as p, loops.loop(spec.kernel[0], "kd") as kd, loops.loop(lines, "r") as r:
            number = loops.let(slab.plane + p, "number")
            d = remainder(number, depth) * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]
            h = slab.line * spec.strides[1] + r * spec.line_pace - spec.low[1]
            valid = loops.let(tirx.And(within(d, x.extents[0]), within(h, x.extents[1])), "valid")
            limit = loops.let(choose(valid, x.extents[2] * taps.scale, 0), "limit")
            base = quotient(number, depth) * x.batch + d * x.spatial[0] + h * x.spatial[1]
            base = loops.let(expr(base), "from")
            into = ((p * spec.kernel[0] + kd) * taps.lines + r) * taps.line_size
            into = loops.let(expr(into), "into")
            with loops.loop(taps.runs, "run") as run, loops.loop(taps.pitch // lanes, "v") as v:
                place = loops.let(expr(v * lanes - spec.low[2] * taps.scale), "place")
                at = base + run * x.channel + place
                if vectors:
                    value = load_masked(self.kernel.dy, at, lanes_within(place, limit, lanes), lanes)
                else:
                    inside = tirx.And(place >= 0, place < limit)
                    value = choose(inside, convert(load(self.kernel.dy, at), spec.dtype), zero(spec.dtype))
                loops.store(self.buffer, into + run * taps.pitch + v * lanes, value)


def rows_of(kernel: WeightPanels) -> Rows:
    """The rows of a kernel, as its tiling has them."""
    if kernel.spec.gathered is not None:
        return TapRows(kernel)
    return PackedRows(kernel) if kernel.tiling.packed else Rows(kernel)


__all__ = ["Rows", "rows_of"]
