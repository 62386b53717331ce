# SPDX-License-Identifier: Apache-2.0
"""From register tiles to the result, with the epilogue.

Vectors go straight to memory where their elements are neighbours there. Where vectors run over channels and the
result's pixels are neighbours, tiles go to a strip [pixel][channel of the block] first, all phases of it interleaved,
and the strip is turned in registers when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gather_shape import GatherTiling, Shape
from tvm_convgrad.kernels.gather_source import Slab
from tvm_convgrad.kernels.loops import (
    Loops,
    Numbers,
    convert,
    expr,
    lanes_below,
    lanes_of,
    load,
    load_masked,
    ramp,
    smaller,
    splat,
)
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.spec import Gather, Phase
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile

LINE_BYTES = 64
"""Of a line of the cache."""

ASK_FROM, FAR = 128, 4
"""Steps of a sum long enough for lines of memory to arrive meanwhile, and how many times the core's own cache a result
is so large that shorter sums, and vectors of pixels, ask as well."""

STRIP_BYTES = 1 << 15
"""Of a strip of pixels that is turned at once: a part of the first cache."""


@dataclass(frozen=True)
class Place:
    """Where a tile belongs: phase, first result channel and how many rows of it another block writes already, line
    in the slab and in the strip, column in the line, and how many columns from there another tile writes already."""

    slab: Slab
    phase: Any
    channel: Any
    channel_fresh: Any
    line: Any
    strip_line: Any
    column: Any
    fresh: Any


class ResultStore:
    """Emits stores."""

    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        phases: tuple[Phase, ...],
        tiling: GatherTiling,
        shape: Shape,
        machine: Machine,
        result: Any,
        bias: Any,
        epilogue: Epilogue,
    ) -> None:
        self.loops, self.gather, self.tiling, self.shape = loops, gather, tiling, shape
        self.machine, self.result, self.bias, self.epilogue = machine, result, bias, epilogue
        self.lanes, self.dtype = machine.lanes(gather.dtype), gather.dtype
        self.width = phases[0][2].count
        view, steps = gather.result, gather.out_step
        same = view.dtype == self.dtype
        self.ragged = gather.result_channels % shape.block != 0
        self._channel_vectors = (
            not tiling.over_pixels and view.channel == 1 and same and (machine.has_masks or not self.ragged)
        )
        self.uses_strip = not tiling.over_pixels and not self._channel_vectors
        bases = [sum(a.base * s for a, s in zip(phase, view.spatial, strict=True)) for phase in phases]
        # A group of phases that has all residues makes whole lines of the result.
        extents = tuple(a.count * s for a, s in zip(phases[0], steps, strict=True))
        self.whole = self.uses_strip and extents == view.extents and len(phases) == steps[0] * steps[1] * steps[2]
        self.steps = steps if self.whole else (1, 1, 1)
        self._base = Numbers(loops, "phase_base", [0] if self.whole else bases)
        self.strip_lines = self._strip_lines()
        self.strip_width = shape.span * self.steps[2]
        residues = [tuple(axis.base for axis in phase) for phase in phases]
        self._strip_base = Numbers(
            loops,
            "strip_base",
            [(d * self.steps[1] * self.strip_lines + h) * self.strip_width + w for d, h, w in residues]
            if self.whole
            else [0] * len(phases),
        )
        long = not tiling.over_pixels and shape.tap_count * gather.source_channels >= ASK_FROM * len(phases)
        self._asks = long or view.size * DTYPE_BYTES[view.dtype] > FAR * machine.l2_bytes
        pixels = self.steps[0] * self.steps[1] * self.strip_lines * self.strip_width
        self.strip_size = (pixels + self.lanes) * shape.block if self.uses_strip else 0
        self._scratch: Any = None

    def _strip_lines(self) -> int:
        """Lines of the slab that are turned together."""
        line = self.shape.span * self.shape.block * self.steps[0] * self.steps[1] * self.steps[2] * 4
        fitting = [
            n
            for n in range(self.tiling.tile_lines, self.tiling.lines + 1)
            if self.tiling.lines % n == 0 and n % self.tiling.tile_lines == 0
        ]
        if not self.uses_strip:
            return self.tiling.lines
        return max((n for n in fitting if n * line <= STRIP_BYTES), default=self.tiling.tile_lines)

    def allocate(self) -> None:
        """Memory of a work item."""
        size = self.strip_size if self.uses_strip else self.tiling.rows * self.tiling.columns * self.lanes
        self._scratch = self.loops.buffer("scratch", size, self.dtype)

    # -- addresses and the epilogue -------------------------------------------------------------------------------

    def _address(self, slab: Slab, line: Any, column: Any, phase: Any) -> Any:
        """Of the first channel of the group at a position of the phase."""
        gather, view = self.gather, self.gather.result
        at = slab.image * view.batch + slab.group * (gather.result_channels * view.channel)
        position = (slab.depth, slab.line + line, column)
        for q, step, stride in zip(position, gather.out_step, view.spatial, strict=True):
            at = at + q * (step * stride)
        return expr(at + self._base.at(phase))

    def _finished(self, total: Any, group: Any, channel: Any, at: Any, mask: Any = None) -> Any:
        """The value to store at `at`; vectors run over channels if `mask` is given or the layout has them so."""
        lanes = lanes_of(total)

        def read(buffer: Any, index: Any, count: int) -> Any:
            value = load_masked(buffer, index, mask, count) if mask is not None else load(buffer, index, count)
            return convert(value, self.dtype)

        def bias() -> Any:
            index = expr(group * self.gather.result_channels + channel)
            if lanes > 1 and self._channel_vectors:
                return read(self.bias, index, lanes)
            return splat(convert(load(self.bias, index), self.dtype), lanes)

        return self.epilogue.apply(total, self.dtype, bias, lambda: read(self.result, at, lanes))

    def ask(self, slab: Slab, phase: Any, channel: Any, line: Any, column: Any) -> None:
        """Ask for the lines of memory that a tile will be stored to: they arrive while it is summed.

        Of results that are near, not for vectors of pixels and short sums: there asking costs more than it gives.
        """
        if not self._asks:
            return
        loops, view, lanes, shape = self.loops, self.gather.result, self.lanes, self.shape
        along, across = (self.gather.out_step[a] * view.spatial[a] for a in (2, 1))
        if self._channel_vectors:
            rows, columns, pixel = shape.tile_columns, self.tiling.columns * lanes, along
            start = channel
        elif view.spatial[2] == 1 and (rows := min(shape.block, self.gather.result_channels)):
            columns, pixel = shape.tile_columns * along, view.channel
            start = channel * view.channel
        else:
            return
        at = loops.let(self._address(slab, line, column, phase) + start, "ask")
        with loops.loop(self.tiling.tile_lines, "line") as number, loops.loop(rows, "row") as row:
            for j in range(0, columns, LINE_BYTES // 4):
                loops.prefetch(self.result, at + number * across + row * pixel + j, write=True, near=True)

    # -- tiles ------------------------------------------------------------------------------------------------------

    def tile(self, tile: Tile, place: Place) -> None:
        """Store a tile, or put it into the strip."""
        if self.tiling.over_pixels:
            self._pixel_tile(tile, place)
        elif self._channel_vectors:
            self._channel_tile(tile, place)
        else:
            self._strip_tile(tile, place)

    def _offset(self, row: int, line: int, pixel: int) -> int:
        """Of a pixel of a channel tile, by distances of lines and pixels."""
        tile_line, x = divmod(row, self.shape.tile_columns)
        return tile_line * line + x * pixel

    def _channel_tile(self, tile: Tile, place: Place) -> None:
        loops, gather, lanes, view = self.loops, self.gather, self.lanes, self.gather.result
        at = loops.let(self._address(place.slab, place.line, place.column, place.phase) + place.channel, "out")
        line, pixel = gather.out_step[1] * view.spatial[1], gather.out_step[2] * view.spatial[2]
        overlaps = self.epilogue.accumulate and self.width % self.shape.tile_columns != 0
        for i in range(self.tiling.rows):

            def row(i: int = i) -> None:
                for j in range(self.tiling.columns):
                    to = at + self._offset(i, line, pixel) + j * lanes
                    channel = expr(place.channel + j * lanes)
                    mask = lanes_below(channel, gather.result_channels, lanes) if self.ragged else None
                    value = self._finished(tile.value(i, j), place.slab.group, channel, to, mask)
                    if mask is None:
                        loops.store(self.result, to, value)
                    else:
                        loops.store_masked(self.result, to, value, mask)

            self._unless_written(overlaps, i % self.shape.tile_columns, place.fresh, row)

    def _unless_written(self, overlaps: bool, number: int, fresh: Any, body: Callable[[], None]) -> None:
        """Sums are added to the result only once: rows that another tile has already written are left out."""
        if not overlaps:
            body()
            return
        with self.loops.when(expr(fresh) <= number):
            body()

    def _pixel_tile(self, tile: Tile, place: Place) -> None:
        loops, gather, lanes, view = self.loops, self.gather, self.lanes, self.gather.result
        at = loops.let(self._address(place.slab, place.line, place.column, place.phase), "out")
        unit = view.spatial[2] * gather.out_step[2]
        narrow = self.width < self.shape.tile_columns
        overlaps = self.epilogue.accumulate and self.width % self.shape.tile_columns != 0
        rows_overlap = self.epilogue.accumulate and self.ragged
        if unit == 1 and view.dtype == self.dtype and (self.machine.has_masks or not (narrow or overlaps)):
            for i in range(self.tiling.rows):

                def row(i: int = i) -> None:
                    for j in range(self.tiling.columns):
                        to = at + (place.channel + i) * view.channel + j * lanes
                        mask = None
                        if narrow:
                            mask = lanes_below(j * lanes, self.width, lanes)
                        elif overlaps:
                            mask = _lanes_from(j * lanes, place.fresh, lanes)
                        value = self._finished(tile.value(i, j), place.slab.group, place.channel + i, to, mask)
                        if mask is None:
                            loops.store(self.result, to, value)
                        else:
                            loops.store_masked(self.result, to, value, mask)

                self._unless_written(rows_overlap, i, place.channel_fresh, row)
            return
        width = self.tiling.columns * lanes
        for i in range(self.tiling.rows):
            for j in range(self.tiling.columns):
                loops.store(self._scratch, (i * self.tiling.columns + j) * lanes, tile.value(i, j))
        first = place.fresh if overlaps else 0
        with loops.loop(min(self.width, width) - first, "l") as step:
            lane = loops.let(expr(first + step), "lane")
            with loops.loop(self.tiling.rows - (place.channel_fresh if rows_overlap else 0), "m") as number:
                m = expr(number + place.channel_fresh) if rows_overlap else number
                to = loops.let(expr(at + lane * unit + (place.channel + m) * view.channel), "to")
                value = load(self._scratch, m * width + lane)
                loops.store(self.result, to, self._finished(value, place.slab.group, place.channel + m, to))

    # -- strips -----------------------------------------------------------------------------------------------------

    def _strip_tile(self, tile: Tile, place: Place) -> None:
        loops, block = self.loops, self.shape.block
        line = self.steps[1] * self.strip_width
        x = place.column - place.slab.column
        at = (self._strip_base.at(place.phase) + place.strip_line * line + x * self.steps[2]) * block
        at = loops.let(expr(at), "strip_at")
        for i in range(self.tiling.rows):
            for j in range(self.tiling.columns):
                to = at + self._offset(i, line, self.steps[2]) * block + j * self.lanes
                loops.store(self._scratch, to, tile.value(i, j))

    def strip(self, slab: Slab, channel: Any, line: Any, phase: Any, fresh: Any) -> None:
        """A complete strip to the result: `line` is its first in the slab, columns from `fresh` on are written."""
        loops, gather, view = self.loops, self.gather, self.gather.result
        base = loops.let(self._address(slab, line, slab.column, phase), "strip_out")
        count = loops.let(smaller(gather.result_channels - channel, self.shape.block), "channels")
        unit = view.spatial[2] * (1 if self.whole else gather.out_step[2])
        out_line = view.spatial[1] * (1 if self.whole else gather.out_step[1])
        lines, first = self.strip_lines * self.steps[1], loops.let(fresh * self.steps[2], "first")
        width = self.strip_width
        if self.shape.strips == 1 and out_line == width * unit:
            lines, width = 1, width * lines  # lines follow one another in memory
        with loops.loop(self.steps[0], "plane") as plane, loops.loop(lines, "line") as row:
            out = loops.let(expr(base + plane * view.spatial[0] + row * out_line), "out")
            number = plane * (self.steps[1] * self.strip_lines * self.strip_width) + row * self.strip_width
            start = loops.let(expr(number * self.shape.block), "start")
            if unit == 1 and view.dtype == self.dtype and self.machine.has_masks:
                self._turned(slab.group, channel, count, start, out, first, width)
            else:
                with loops.loop(width - first, "x") as step, loops.loop(count, "m") as m:
                    x = expr(first + step)
                    to = loops.let(expr(out + x * unit + (channel + m) * view.channel), "to")
                    value = load(self._scratch, start + x * self.shape.block + m)
                    loops.store(self.result, to, self._finished(value, slab.group, channel + m, to))

    def _turned(self, group: Any, channel: Any, count: Any, start: Any, out: Any, first: Any, width: int) -> None:
        loops, lanes, view = self.loops, self.lanes, self.gather.result
        static = isinstance(first, int)
        chunks = -(-(width - first) // lanes) if static else _chunks(width - first, lanes)
        masked = not static or (width - first) % lanes != 0
        with loops.loop(chunks, "chunk") as chunk, loops.loop(self.shape.block // lanes, "j") as j:
            x = loops.let(expr(first + chunk * lanes), "x")
            at = loops.let(expr(start + x * self.shape.block + j * lanes), "at")
            rows = [loops.let(load(self._scratch, at + i * self.shape.block, lanes), "row") for i in range(lanes)]
            mask = lanes_below(x, width, lanes) if masked else None
            for i, value in enumerate(transpose(loops, rows)):
                m = expr(j * lanes + i)

                def row(m: Any = m, value: Any = value) -> None:
                    to = loops.let(expr(out + (channel + m) * view.channel + x), "to")
                    value = self._finished(value, group, channel + m, to, mask)
                    if mask is None:
                        loops.store(self.result, to, value)
                    else:
                        loops.store_masked(self.result, to, value, mask)

                if self.ragged:
                    with loops.when(m < count):
                        row()
                else:
                    row()


def _chunks(length: Any, lanes: int) -> Any:
    return tirx.truncdiv(length + (lanes - 1), lanes)


def _lanes_from(first: int, limit: Any, lanes: int) -> Any:
    """The mask of the lanes l with first + l >= limit."""
    return ramp(first, lanes) >= splat(expr(limit), lanes)


__all__ = ["Place", "ResultStore"]
