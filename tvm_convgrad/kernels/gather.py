# SPDX-License-Identifier: Apache-2.0
"""Implicit GEMM of forward and dgrad (a `Gather`): out[m, px] = sum over (tap, c) of W[m, (tap, c)] * S[px + tap, c].

Two orders of work:

- "source": W is packed once, all of it; each work item packs the source of a slab, and passes over all of W;
- "weights": the source is packed once, all of it; each work item packs a block of W, and passes over all slabs.

The first is for large images, the second for many channels: what an item packs stays in its core's own cache.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gather_frame import GatherFrame
from tvm_convgrad.kernels.gather_result import Place, ResultStore
from tvm_convgrad.kernels.gather_shape import GatherTiling, shape_of
from tvm_convgrad.kernels.gather_source import Ahead, Slab, SourcePanel, TileAhead, divided
from tvm_convgrad.kernels.gather_taps import Taps, Which
from tvm_convgrad.kernels.gather_weight import WeightPanel
from tvm_convgrad.kernels.loops import (
    Loops,
    Numbers,
    Shapes,
    ceiling,
    expr,
    larger,
    load,
    quotient,
    remainder,
    smaller,
)
from tvm_convgrad.kernels.spec import Gather, Phase
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile

WEIGHTS_AHEAD = 16
"""Steps before its turn that W is asked for, where all of its blocks are more than the core's own cache holds."""


def gather_kernel(
    gather: Gather,
    tilings: tuple[GatherTiling, ...],
    machine: Machine,
    name: str,
    shapes: Shapes,
    epilogue: Epilogue,
) -> Any:
    """The PrimFunc (source, weight, [bias,] result).

    Args:
        gather: its batch is what the tilings are made for.
        shapes: the parameters' own shapes and types, by "source", "weight" and "result"; a batch known only at run
            time is a name in the first and the last.
    """
    loops = Loops()
    frame = GatherFrame(loops, gather, shapes, epilogue, _largest_panel(gather, tilings, machine))
    for phases, tiling in zip(gather.phases, tilings, strict=True):
        _Group(loops, gather, phases, tiling, machine, frame).emit()
    return loops.finish(frame.parameters, name)


def _largest_panel(gather: Gather, tilings: tuple[GatherTiling, ...], machine: Machine) -> int:
    """Elements for each image of the largest panel that holds all images; 0 if there is none."""
    sizes = [0]
    for phases, tiling in zip(gather.phases, tilings, strict=True):
        if tiling.order == "weights" and not tiling.direct:
            shape = shape_of(gather, phases, tiling, machine)
            sizes.append(gather.groups * shape.panels(phases[0][0].count) * shape.panel_size)
    return max(sizes)


class _Group:
    """The loops of one group of phases; what differs among its phases is looked up in tables."""

    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        phases: tuple[Phase, ...],
        tiling: GatherTiling,
        machine: Machine,
        frame: GatherFrame,
    ) -> None:
        self.loops, self.gather, self.phases, self.tiling = loops, gather, phases, tiling
        self.batch, self.source, self.dtype = frame.batch, frame.source, gather.dtype
        self.lanes, self.counts = machine.lanes(gather.dtype), tuple(axis.count for axis in phases[0])
        self.over_pixels = tiling.over_pixels
        shape = self.shape = shape_of(gather, phases, tiling, machine)
        macs = gather.batch * gather.groups * gather.result_channels * gather.source_channels * math.prod(self.counts)
        self.kind = "parallel" if macs * shape.tap_count >= machine.parallel_from else "serial"
        self.weights = WeightPanel(loops, gather, shape, machine, self.over_pixels, frame.weight)
        self.panels = SourcePanel(loops, gather, shape, machine, self.over_pixels, frame.source)
        self.ahead = Ahead(loops, gather, shape, tiling, frame.source)
        self.tile_ahead = TileAhead(loops, gather, len(phases), shape, tiling, machine)
        self.results = ResultStore(
            loops, gather, phases, tiling, shape, machine, frame.result, frame.bias, frame.epilogue
        )
        run = shape.run
        self.taps = Taps(loops, phases, shape.met, run)
        starts = [start for of_phase in shape.starts for start in of_phase[::run]]
        firsts = [0, *itertools.accumulate(len(taps) // run for taps in shape.taps)]
        every = gather.groups * shape.blocks * self.weights.size * DTYPE_BYTES[self.dtype]
        self.asks_for_weights = tiling.order == "source" and every > machine.l2_bytes
        self._tap_first = Numbers(loops, "tap_first", firsts[:-1])
        self._start = Numbers(loops, "s_start", starts)

    def emit(self) -> None:
        """All of the group's work."""
        if self.tiling.order == "source":
            self._by_slabs()
        else:
            self._by_blocks()

    def _by_slabs(self) -> None:
        loops, gather, shape, tiling = self.loops, self.gather, self.shape, self.tiling
        packed = loops.buffer("w_panels", max(1, gather.groups * shape.blocks * self.weights.size), self.dtype)
        with loops.loop(gather.groups * shape.blocks, "block", self.kind) as item:
            group, block = divided(loops, item, shape.blocks)
            self.weights.pack(packed, loops.let(expr(item * self.weights.size), "w_into"), group, block)
        per_split = -(-shape.blocks // tiling.splits)
        splits = -(-shape.blocks // per_split)
        slabs = self.batch * (self.counts[0] * shape.slabs)
        with loops.loop(slabs * (gather.groups * splits), "item", self.kind) as item:
            rest, split = divided(loops, item, splits)
            rest, group = divided(loops, rest, gather.groups)
            slab = self._slab(rest, group, self.counts[0])
            panel, panel_at = self.source, self.panels.base(slab)
            if not tiling.direct:
                panel, panel_at = loops.buffer("s_panel", shape.panel_size, self.dtype), 0
                with loops.loop(self.panels.lines, "number") as number:
                    self.panels.pack_line(panel, 0, slab, number)
            panel_at = loops.let(expr(panel_at), "panel_at")
            first = loops.let(expr(split * per_split), "first_block")
            self.results.allocate()
            if self.ahead.useful:
                following = loops.let(expr(rest + 1), "next")
                self.ahead.begin(self._slab(following, group, self.counts[0]), per_split)
            with loops.loop(smaller(shape.blocks - first, per_split), "b") as b:
                block = loops.let(first + b, "block")
                w_at = loops.let(expr((group * shape.blocks + block) * self.weights.size), "w_at")
                self._block(packed, w_at, panel, panel_at, slab, block, b)

    def _by_blocks(self) -> None:
        loops, gather, shape, tiling = self.loops, self.gather, self.shape, self.tiling
        depth = self.counts[0]
        slabs = self.batch * (depth * shape.slabs)
        panel = self.source
        if not tiling.direct:
            panels = self.batch * (shape.panels(depth) * gather.groups)
            panel = loops.buffer("s_panels", panels * shape.panel_size, self.dtype)
            with loops.loop(panels * self.panels.lines, "line", self.kind) as item:
                rest, number = divided(loops, item, self.panels.lines)
                panel_number, group = divided(loops, rest, gather.groups)
                slab = self._slab(panel_number, group, 1 if shape.joint else depth)
                self.panels.pack_line(panel, loops.let(expr(rest * shape.panel_size), "panel_at"), slab, number)
        piece = loops.let(ceiling(slabs, tiling.splits), "slabs_of_item")
        with loops.loop(gather.groups * shape.blocks * tiling.splits, "item", self.kind) as item:
            rest, split = divided(loops, item, tiling.splits)
            group, block = divided(loops, rest, shape.blocks)
            packed = loops.buffer("w_panel", max(1, self.weights.size), self.dtype)
            self.weights.pack(packed, 0, group, block)
            self.results.allocate()
            first = loops.let(expr(split * piece), "first_slab")
            with loops.loop(larger(smaller(slabs - first, piece), 0), "slab") as step:
                number = loops.let(expr(first + step), "number")
                slab = self._slab(number, group, depth)
                if tiling.direct:
                    at = self.panels.base(slab)
                elif shape.joint:
                    panel_number = slab.image * shape.slabs + remainder(number, shape.slabs)
                    at = (panel_number * gather.groups + group) * shape.panel_size
                    at = at + slab.depth * (gather.in_step[0] * shape.plane_pitch)
                else:
                    at = (number * gather.groups + group) * shape.panel_size
                if self.ahead.useful:
                    self.ahead.begin(self._slab(loops.let(expr(number + 1), "next"), group, depth), 1)
                self._block(packed, 0, panel, loops.let(expr(at), "panel_at"), slab, block, 0)

    def _slab(self, number: Any, group: Any, planes: int) -> Slab:
        """A slab by its number among those of so many planes of each image."""
        loops, shape = self.loops, self.shape
        rest, strip = divided(loops, number, shape.strips)
        rest, line = divided(loops, rest, shape.line_slabs)
        image, depth = divided(loops, rest, planes)
        strip_tiles = min(self.tiling.strip, shape.tiles)
        column: Any = 0
        fresh: Any = 0
        tiles: Any = strip_tiles
        if shape.strips > 1:
            wanted = strip * (strip_tiles * shape.tile_columns)
            column = loops.let(smaller(wanted, self.counts[2] - shape.span), "column")
            fresh = loops.let(wanted - column, "fresh")
            if shape.tiles % strip_tiles:
                tiles = loops.let(smaller(shape.tiles - strip * strip_tiles, strip_tiles), "tiles")
        line = loops.let(expr(line * self.tiling.lines), "line")
        return Slab(image, group, depth, line, column, fresh, tiles)

    def _block(self, packed: Any, w_at: Any, panel: Any, panel_at: Any, slab: Slab, block: Any, number: Any) -> None:
        """One block of result channels of a slab, strip after strip."""
        loops, lines = self.loops, self.results.strip_lines
        channel = loops.let(expr(self.weights.first_channel(block)), "m0")
        with loops.loop(self.tiling.lines // lines, "strip") as strip:
            first = loops.let(expr(strip * lines), "first_line")
            with loops.loop(len(self.phases), "phase") as phase:
                self._strip(packed, w_at, panel, panel_at, slab, block, channel, first, phase, number)
                if self.results.uses_strip and not self.results.whole:
                    self.results.strip(slab, channel, first, phase, slab.fresh)
            if self.results.uses_strip and self.results.whole:
                self.results.strip(slab, channel, first, 0, slab.fresh)

    def _strip(
        self,
        packed: Any,
        w_at: Any,
        panel: Any,
        panel_at: Any,
        slab: Slab,
        block: Any,
        channel: Any,
        first: Any,
        phase: Any,
        number: Any,
    ) -> None:
        loops, shape, tiling = self.loops, self.shape, self.tiling
        weights = loops.let(expr(w_at + self.weights.of_phase(phase)), "w_phase")
        channel_fresh = loops.let(expr(block * shape.block - channel), "m_fresh") if self.over_pixels else 0
        with (
            loops.loop(self.results.strip_lines // tiling.tile_lines, "l") as step,
            loops.loop(slab.tiles, "t") as t,
        ):
            strip_line = step * tiling.tile_lines
            line = loops.let(expr(first + strip_line), "row")
            # The last tile of a line begins early, so that it ends with the line.
            wanted = slab.column + slab.fresh + t * shape.tile_columns
            column = loops.let(smaller(wanted, max(0, self.counts[2] - shape.tile_columns)), "column")
            at = panel_at + line * shape.step_line + (column - slab.column) * shape.step_x
            self.results.ask(slab, phase, channel, line, column)
            asked = self.ahead.of_tile(number, line, t)
            at = loops.let(expr(at), "s_tile")
            following: Any = None
            if self.tile_ahead.of_lines:
                following = self.tile_ahead.of_tile(at, (column - slab.column) * shape.step_x, t, slab.tiles)
            rows = quotient(slab.line + line, tiling.tile_lines)
            tile = self._sum(packed, weights, panel, at, Which(phase, slab.depth, rows), asked, following)
            fresh = loops.let(expr(wanted - column), "column_fresh")
            self.results.tile(tile, Place(slab, phase, channel, channel_fresh, line, strip_line, column, fresh))

    def _sum(
        self, packed: Any, weights: Any, panel: Any, at: Any, which: Which, asked: list[Any], following: Any
    ) -> Tile:
        loops, shape, tiling, lanes = self.loops, self.shape, self.tiling, self.lanes
        tile = Tile(loops, tiling.rows, tiling.columns, lanes, self.dtype)
        channels, block = self.gather.source_channels, shape.block
        first = loops.let(expr(self._tap_first.at(which.phase)), "first_tap")
        if self.over_pixels:
            taps = loops.let(expr(self.taps.count(which.phase)), "taps")
            with loops.loop(channels, "c") as c, self.taps.each(which) as tap:
                s = loops.let(expr(at + c * shape.channel_step + self._start.at(first + tap)), "s")
                w = loops.let(expr(weights + (c * taps + tap) * block), "w")
                if self.tile_ahead.of_channels:
                    self.tile_ahead.channel(panel, s)
                tile.add(lambda i: load(packed, w + i), lambda j: load(panel, s + j * lanes, lanes))
            return tile
        offsets = [
            i // shape.tile_columns * shape.step_line + i % shape.tile_columns * shape.step_x
            for i in range(tiling.rows)
        ]
        with self.taps.each(which) as tap:
            s_at = loops.let(expr(at + self._start.at(first + tap)), "s_at")
            w_at = loops.let(expr(weights + tap * (channels * shape.run * block)), "w_at")
            with loops.loop(channels * shape.run, "c") as c:
                s = loops.let(expr(s_at + c * shape.channel_step), "s")
                w = loops.let(expr(w_at + c * block), "w")
                self.ahead.channel(asked, c)
                if self.asks_for_weights:
                    for j in range(0, block, 64 // DTYPE_BYTES[self.dtype]):
                        loops.prefetch(packed, w + (WEIGHTS_AHEAD * block + j))
                if following is not None:
                    self.tile_ahead.step(panel, following, tap * shape.run, c)
                tile.add(lambda i: load(panel, s + offsets[i]), lambda j: load(packed, w + j * lanes, lanes))
        return tile


__all__ = ["GatherTiling", "gather_kernel"]
