# SPDX-License-Identifier: Apache-2.0
"""The source panel of a slab: the lines and columns that its taps reach, with zeros for the borders that are read."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.gather_shape import GatherTiling, Shape
from tvm_convgrad.kernels.loops import (
    Loops,
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
from tvm_convgrad.kernels.spec import Gather
from tvm_convgrad.kernels.target import Machine

FAR_CHANNELS, FAR_PIXELS = 2, 4
"""How many times the core's own cache a source is so large that asking for it gains, by what vectors run over."""


@dataclass(frozen=True)
class Slab:
    """Where a slab begins: image, group, depth, line and column of the result; how many of its first columns the slab
    before it has as well, and how many tiles of a line it has beyond these."""

    image: Any
    group: Any
    depth: Any
    line: Any
    column: Any
    fresh: Any
    tiles: Any


class SourcePanel:
    """Emits the packing of panels, line by line."""

    def __init__(
        self, loops: Loops, gather: Gather, shape: Shape, machine: Machine, over_pixels: bool, source: Any
    ) -> None:
        self.loops, self.gather, self.shape, self.source = loops, gather, shape, source
        self.over_pixels, self.lanes = over_pixels, machine.lanes(gather.dtype)
        self.lines = len(shape.planes) * shape.panel_lines
        self._planes = Numbers(loops, "planes", list(shape.planes))
        self._vectors = gather.source.dtype == gather.dtype and machine.has_masks

    def base(self, slab: Slab) -> Any:
        """Address in the source of a slab's first pixel, for taps without offset."""
        gather, source = self.gather, self.gather.source
        at = slab.image * source.batch + slab.group * (gather.source_channels * source.channel)
        for position, step, stride in zip(
            (slab.depth, slab.line, slab.column), gather.in_step, source.spatial, strict=True
        ):
            at = at + position * (step * stride)
        return at

    def pack_line(self, panel: Any, panel_at: Any, slab: Slab, number: Any) -> None:
        """Line `number` of a slab's panel, over all planes, to `panel` from `panel_at` on."""
        loops, gather, shape, source = self.loops, self.gather, self.shape, self.gather.source
        plane, line = (number, 0) if shape.panel_lines == 1 else divided(loops, number, shape.panel_lines)
        d = slab.depth * gather.in_step[0] + self._planes.at(plane)
        h = slab.line * gather.in_step[1] + shape.low[1] + line * shape.fetch[1]
        read: list[Any] = []
        zeros: list[Any] = []
        (read if shape.met.planes is not None else zeros).append(within(d, source.extents[0]))
        (read if shape.met.clear else zeros).append(within(h, source.extents[1]))
        with loops.when(functools.reduce(tirx.And, read)) if read else nullcontext():
            limit: Any = source.extents[2]
            if zeros:
                limit = loops.let(choose(functools.reduce(tirx.And, zeros), limit, 0), "limit")
            self._pack_met(panel, panel_at, slab, (plane, line), (d, h), limit)

    def _pack_met(
        self, panel: Any, panel_at: Any, slab: Slab, place: tuple[Any, Any], position: tuple[Any, Any], limit: Any
    ) -> None:
        """Line (plane, line) of the panel from line (depth, line) of the source; columns from `limit` on are zeros."""
        loops, gather, shape, source = self.loops, self.gather, self.shape, self.gather.source
        (plane, line), (d, h) = place, position
        base = slab.image * source.batch + slab.group * (gather.source_channels * source.channel)
        base = loops.let(expr(base + d * source.spatial[0] + h * source.spatial[1]), "from")
        into = loops.let(expr(panel_at + plane * shape.plane_pitch + line * shape.line_pitch), "into")
        first = loops.let(expr(slab.column * gather.in_step[2] + shape.low[2]), "column0")
        if self.over_pixels:
            if source.channel == 1 and self._vectors:
                self._turned_to_pixels(panel, into, base, first, limit)
            else:
                self._pixels(panel, into, base, first, limit)
        elif source.spatial[2] == 1 and source.channel != 1 and self._vectors:
            # One pixel a channel is both: then a line of the panel has no room for whole squares.
            self._turned_to_channels(panel, into, base, first, limit)
        else:
            self._channels(panel, into, base, first, limit)

    def _channels(self, panel: Any, into: Any, base: Any, first: Any, limit: Any) -> None:
        """Pixel after pixel, all channels of each."""
        loops, gather, shape, lanes = self.loops, self.gather, self.shape, self.lanes
        source, channels = gather.source, gather.source_channels
        vectors = source.channel == 1 and source.dtype == gather.dtype
        whole = channels - channels % lanes if vectors else 0
        with loops.loop(shape.panel_columns, "x") as x:
            column = loops.let(expr(first + x * shape.fetch[2]), "column")
            inside = loops.let(tirx.And(column >= 0, column < limit), "inside")
            pixel = loops.let(base + column * source.spatial[2], "pixel")
            to = loops.let(expr(into + x * shape.pitch), "to")
            with loops.when(inside):
                if whole:
                    with loops.loop(whole // lanes, "c") as c:
                        loops.store(panel, to + c * lanes, load(self.source, pixel + c * lanes, lanes))
                if channels > whole:
                    with loops.loop(channels - whole, "c") as c:
                        value = convert(load(self.source, pixel + (whole + c) * source.channel), gather.dtype)
                        loops.store(panel, to + whole + c, value)
            with loops.otherwise(inside):
                rounded = channels - channels % lanes
                if rounded:
                    with loops.loop(rounded // lanes, "c") as c:
                        loops.store(panel, to + c * lanes, zero(gather.dtype, lanes))
                if channels > rounded:
                    with loops.loop(channels - rounded, "c") as c:
                        loops.store(panel, to + rounded + c, zero(gather.dtype))

    def _turned_to_channels(self, panel: Any, into: Any, base: Any, first: Any, limit: Any) -> None:
        """Squares of channels x pixels, both neighbours in one of the memories, turned in registers."""
        loops, gather, shape, lanes = self.loops, self.gather, self.shape, self.lanes
        channels = gather.source_channels
        few = channels < lanes
        assert shape.line_pitch >= -(-shape.panel_columns // lanes) * lanes * shape.pitch, "squares fit a line"
        with (
            loops.loop(-(-channels // lanes), "c") as c,
            loops.loop(-(-shape.panel_columns // lanes), "x") as x,
        ):
            column = loops.let(expr(first + x * lanes), "column")
            mask = lanes_within(column, limit, lanes)
            row0 = loops.let(expr(base + c * (lanes * gather.source.channel) + column), "row0")
            rows = []
            for i in range(lanes):
                if few and i >= channels:
                    rows.append(zero(gather.dtype, lanes))
                    continue
                here = mask
                if not few and channels % lanes:
                    inside = choose(expr(c * lanes + i) < channels, limit, 0)
                    here = lanes_within(column, inside, lanes)
                rows.append(loops.let(load_masked(self.source, row0 + i * gather.source.channel, here, lanes), "row"))
            to = loops.let(expr(into + x * (lanes * shape.pitch) + c * lanes), "to")
            for i, value in enumerate(transpose(loops, rows)):
                if few:
                    loops.store_masked(panel, to + i * shape.pitch, value, lanes_below(0, channels, lanes))
                else:
                    loops.store(panel, to + i * shape.pitch, value)

    def _pixels(self, panel: Any, into: Any, base: Any, first: Any, limit: Any) -> None:
        """Channel after channel, the pixels of the line."""
        loops, gather, shape, lanes = self.loops, self.gather, self.shape, self.lanes
        source = gather.source
        with loops.loop(gather.source_channels, "c") as c:
            row = loops.let(expr(base + c * source.channel), "row")
            to = loops.let(expr(into + c * shape.channel_step), "to")
            if source.spatial[2] == 1 and shape.fetch[2] == 1 and self._vectors:
                with loops.loop(-(-shape.panel_columns // lanes), "x") as x:
                    column = loops.let(expr(first + x * lanes), "column")
                    value = load_masked(self.source, row + column, lanes_within(column, limit, lanes), lanes)
                    loops.store(panel, to + x * lanes, value)
            else:
                with loops.loop(shape.panel_columns, "x") as x:
                    column = loops.let(expr(first + x * shape.fetch[2]), "column")
                    value = convert(load(self.source, row + column * source.spatial[2]), gather.dtype)
                    inside = tirx.And(column >= 0, column < limit)
                    loops.store(panel, to + x, choose(inside, value, zero(gather.dtype)))

    def _turned_to_pixels(self, panel: Any, into: Any, base: Any, first: Any, limit: Any) -> None:
        """As above, from neighbouring channels to neighbouring pixels."""
        loops, gather, shape, lanes = self.loops, self.gather, self.shape, self.lanes
        channels = gather.source_channels
        with (
            loops.loop(-(-shape.panel_columns // lanes), "x") as x,
            loops.loop(-(-channels // lanes), "c") as c,
        ):
            rows = []
            for i in range(lanes):
                column = loops.let(expr(first + (x * lanes + i) * shape.fetch[2]), "column")
                inside = tirx.And(column >= 0, column < limit)
                mask = lanes_below(c * lanes, choose(inside, channels, 0), lanes)
                pixel = base + column * gather.source.spatial[2] + c * lanes
                rows.append(loops.let(load_masked(self.source, pixel, mask, lanes), "row"))
            to = loops.let(expr(into + c * (lanes * shape.channel_step) + x * lanes), "to")
            for i, value in enumerate(transpose(loops, rows)):
                if channels % lanes == 0:
                    loops.store(panel, to + i * shape.channel_step, value)
                    continue
                with loops.when(expr(c * lanes + i) < channels):
                    loops.store(panel, to + i * shape.channel_step, value)


class Ahead:
    """Asks for the source of the next slab while this one is summed, a line of the cache for each step.

    Only for sources whose pixels are neighbours: the planes of channels lie far apart, and no prefetcher of the machine
    foresees the way from one to the next.
    """

    def __init__(self, loops: Loops, gather: Gather, shape: Shape, tiling: GatherTiling, source: Any) -> None:
        self.loops, self.gather, self.source = loops, gather, source
        offsets = [offset for of_phase in shape.taps for _, offset in of_phase] or [(0, 0, 0)]
        low, high = (tuple(pick(o[a] for o in offsets) for a in range(3)) for pick in (min, max))
        step = gather.in_step
        # Lines that the slab before does not reach; of a kernel of one line, those that it meets.
        self._line_step = step[1] if low[1] == high[1] else 1
        self._lines = tiling.lines * step[1] // self._line_step
        self._first = (0, high[1] - (step[1] - self._line_step), low[2])
        self._line = 64 // DTYPE_BYTES[gather.source.dtype]
        columns = (shape.span - 1) * step[2] + high[2] - low[2] + 1
        self._chunks = -(-min(columns, gather.source.extents[2]) // self._line)
        self._tile_lines, self._strip = tiling.tile_lines, min(tiling.strip, shape.tiles)
        self._tiles = tiling.lines // tiling.tile_lines * self._strip
        # Tiles of vectors of pixels take whole lines at once: there asking costs more than it gives.
        self.useful = (
            not tiling.over_pixels
            and (tiling.direct or tiling.order == "source")
            and gather.source.channel != 1
            and gather.source_channels >= self._line
        )
        self._base: Any = None
        self._parts = 0

    def begin(self, slab: Slab, blocks: int) -> None:
        """The slab to ask for, and how many blocks of result channels share the work."""
        view = self.gather.source
        at = slab.image * view.batch + slab.group * (self.gather.source_channels * view.channel)
        for first, position, step, stride in zip(
            self._first, (slab.depth, slab.line, slab.column), self.gather.in_step, view.spatial, strict=True
        ):
            at = at + (position * step + first) * stride
        self._base, self._parts = self.loops.let(expr(at), "ahead"), blocks * self._tiles

    def of_tile(self, block: Any, line: Any, tile: Any) -> list[Any]:
        """Where a tile asks, for its first channel: its share of the slab's lines; nowhere if that is not useful.

        Args:
            block: its number among those that share the work.
            line, tile: in the slab, and in the line.
        """
        if not self.useful:
            return []
        tile = quotient(line, self._tile_lines) * self._strip + tile
        view, total = self.gather.source, self._lines * self._chunks
        each = -(-total // self._parts)
        number = self.loops.let(expr(quotient((block * self._tiles + tile) * total, self._parts)), "ask_number")
        places = []
        for i in range(each):
            line, chunk = divided(self.loops, number + i, self._chunks)
            at = self._base + line * (self._line_step * view.spatial[1]) + chunk * (self._line * view.spatial[2])
            places.append(self.loops.let(expr(at), "ask"))
        return places

    def channel(self, places: list[Any], c: Any) -> None:
        """Ask for a channel's lines."""
        for at in places:
            self.loops.prefetch(self.source, at + c * self.gather.source.channel)


class TileAhead:
    """Asks for the lines that the next tile is the first to meet, while this one is summed.

    A tile reads many pixels, or channels, at once, each a stream of its own: more than prefetchers follow. Only for
    sources, and panels of all images, that the core's own cache does not hold.

    Attributes:
        of_channels, of_lines: whether it asks in the one way or the other.
        taps, plane: of the latter: taps of a plane of the first phase, and elements from a plane to the next.
    """

    def __init__(
        self, loops: Loops, gather: Gather, phases: int, shape: Shape, tiling: GatherTiling, machine: Machine
    ) -> None:
        self.loops, self._line = loops, 64 // DTYPE_BYTES[gather.dtype]
        bytes_, taps = gather.source.size * DTYPE_BYTES[gather.dtype], shape.taps[0]
        depths = sorted({offset[0] for _, offset in taps})
        planes = len(depths)
        far = bytes_ > (FAR_PIXELS if tiling.over_pixels else FAR_CHANNELS) * machine.l2_bytes
        # Vectors of pixels from their own place: the same channels of the next pixels.
        self.of_channels = far and tiling.over_pixels and tiling.direct and phases == shape.tap_count == 1
        self._width = shape.tile_columns
        # Pixels one after the other: the last lines that the taps of each plane reach, of the first phase.
        there = planes == 1 and gather.source.channel == 1 if tiling.direct else tiling.order == "weights"
        self.of_lines = far and there and not tiling.over_pixels and bool(taps) and len(taps) % planes == 0
        if not self.of_lines:
            return
        self._channels, self.taps, self.plane = gather.source_channels, len(taps) // planes, shape.plane_pitch
        self._first = 0
        if shape.joint:  # a panel that has each plane of the source at its own place
            self._first = depths[0] * shape.plane_pitch
            self.plane *= depths[1] - depths[0] if planes > 1 else 1
        _, ys, xs = zip(*(offset for of_phase in shape.taps for _, offset in of_phase), strict=True)
        low_y, low_x = (0, 0) if tiling.direct else shape.low[1:]
        lines = max(1, gather.in_step[1] * tiling.tile_lines // shape.fetch[1])
        self._first += ((max(ys) - low_y) // shape.fetch[1] + 1 - lines) * shape.line_pitch
        self._first += (min(xs) - low_x) // shape.fetch[2] * shape.pitch
        columns = (shape.tile_columns - 1) * shape.step_x + (max(xs) - min(xs)) // shape.fetch[2] * shape.pitch
        size = (lines - 1) * shape.line_pitch + columns + self._channels
        self._each = -(-size // (self.taps * self._channels))
        self._right, self._down = shape.tile_columns * shape.step_x, tiling.tile_lines * shape.step_line

    def of_tile(self, at: Any, column: Any, tile: Any, tiles: Any) -> Any:
        """Where the lines of the tile after this one begin.

        Args:
            at: of the tile's first pixel; column: how many elements of its line are before it.
            tile: its number in the line; tiles: of a line.
        """
        following = at + self._right
        if self._down:
            following = choose(expr(tile + 1) < tiles, following, at - column + self._down)
        return self.loops.let(expr(following + self._first), "ahead")

    def step(self, panel: Any, at: Any, tap: Any, c: Any) -> None:
        """Ask for a step's share: tap of the phase, and from there on channels of it and of taps that follow."""
        plane = quotient(tap, self.taps)
        at = at + plane * self.plane + ((tap - plane * self.taps) * self._channels + c) * self._each
        for i in range(0, self._each, self._line):
            self.loops.prefetch(panel, at + i)

    def channel(self, source: Any, at: Any) -> None:
        """Ask for the next tile's pixels of a channel."""
        for i in range(self._width, 2 * self._width, self._line):
            self.loops.prefetch(source, at + i)


def divided(loops: Loops, value: Any, by: int) -> tuple[Any, Any]:
    """Named quotient and remainder of value >= 0."""
    return loops.let(quotient(value, by), "q"), loops.let(remainder(value, by), "r")


__all__ = ["Ahead", "Slab", "SourcePanel", "TileAhead", "divided"]
