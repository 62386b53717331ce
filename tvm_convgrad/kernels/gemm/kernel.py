# SPDX-License-Identifier: Apache-2.0
"""The loop nest of the implicit GEMM: work items, spatial blocks, tiles, and the sum of a tile.

There are two orders of the loops (`GemmTiling.order`):

    "source":  pack W                                     "weights":  pack the source
               for each spatial block, in parallel:                   for each block of channels, in parallel:
                   pack its source                                        pack its W
                   for each block of channels:                            for each spatial block:
                       for each tile: sum, store                              for each tile: sum, store

The first is for large images, the second for many channels: what an item packs stays in its core's L2. A spatial block
is computed in pieces of `ResultStore.staging_h` rows, and each piece phase by phase; with `channel_parts` all tiles of
a phase sum one part of the source's channels before the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import as_number
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    ceiling,
    expr,
    larger,
    load,
    quotient,
    remainder,
    smaller,
)
from tvm_convgrad.codegen.register_tile import Sums, Tile
from tvm_convgrad.codegen.tir import Buffer
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.gemm.pairs import operands_of
from tvm_convgrad.kernels.gemm.prefetch import LINE_BYTES, BlockPrefetch, TilePrefetch
from tvm_convgrad.kernels.gemm.result import ResultStore, TilePlace
from tvm_convgrad.kernels.gemm.source import SourcePanel, SpatialBlock
from tvm_convgrad.kernels.gemm.taps import Ranges, TapLoops, TilePosition
from tvm_convgrad.kernels.gemm.tiling import GemmTiling, blocking_of
from tvm_convgrad.kernels.gemm.weight import WeightPanel
from tvm_convgrad.kernels.spec import ConvSpec, Phase

WEIGHT_PREFETCH_STEPS = 16
"""How many steps ahead W is prefetched, where all of its panels together do not fit the L2."""


def largest_panel(spec: ConvSpec, tilings: tuple[GemmTiling, ...], machine: Machine) -> int:
    """Elements per image of the largest panel that holds all images; 0 if there is none."""
    sizes = [0]
    for phases, tiling in zip(spec.phases, tilings, strict=True):
        if tiling.order == "weights" and not tiling.unpacked:
            blocking = blocking_of(spec, phases, tiling, machine)
            sizes.append(spec.groups * blocking.panels(phases[0][0].count) * blocking.panel_size)
    return max(sizes)


@dataclass(frozen=True)
class Panels:
    """The operands of a tile: W's panel and the source's (or the source itself), and where each begins.

    Attributes:
        part: the number of the part of the channels that is summed.
        kept: where the sums of the parts before it are: the buffer, the tile's place, and the offset of each pixel;
            None if all channels are summed at once.
    """

    weights: Buffer
    weights_at: Index
    source: Buffer
    source_at: Index
    part: Index = 0
    kept: tuple[Buffer, Index, list[int]] | None = None


class PhaseGroup:
    """The loop nest of a group of phases; what differs from phase to phase is in lookup tables.

    Attributes:
        tap_first, start: the number of a phase's first run of taps, and where each run begins in the panel.
    """

    def __init__(
        self,
        frame: KernelFrame,
        spec: ConvSpec,
        phases: tuple[Phase, ...],
        tiling: GemmTiling,
        machine: Machine,
        packed_at: int | None = None,
    ) -> None:
        """Plan the loop nest.

        Args:
            packed_at: where this nest's panels of W begin in the frame's W, if it was packed ahead (`gemm.ahead`).
        """
        loops = self.loops = frame.loops
        self.spec, self.phases, self.tiling, self.packed_at = spec, phases, tiling, packed_at
        self.panels_of_weights = frame.tensors[1]
        self.batch, self.dtype, self.source = frame.batch, spec.dtype, frame.tensors[0]
        source, weight = operands_of(spec, frame.tensors[0], frame.tensors[1], machine)
        self.lanes, self.counts = machine.lanes(spec.dtype), tuple(axis.count for axis in phases[0])
        self.over_pixels = tiling.over_pixels
        blocking = self.blocking = blocking_of(spec, phases, tiling, machine)
        macs = spec.batch * spec.groups * spec.result_channels * spec.source_channels * math.prod(self.counts)
        self.kind = "parallel" if macs * blocking.tap_count >= machine.parallel_from else "serial"
        self.weights = WeightPanel(loops, spec, blocking, machine, self.over_pixels, weight)
        self.panels = SourcePanel(loops, spec, blocking, machine, self.over_pixels, source)
        self.block_prefetch = BlockPrefetch(loops, spec, blocking, tiling, self.source)
        self.tile_prefetch = TilePrefetch(loops, spec, len(phases), blocking, tiling, machine)
        if tiling.channel_parts > 1:  # the steps of these prefetches are those of all channels
            self.block_prefetch.useful = self.tile_prefetch.of_rows = False
        self.results = ResultStore(frame, spec, phases, tiling, blocking, machine)
        run = blocking.run
        self.taps = TapLoops(loops, phases, blocking.ranges, run)
        starts = [start for of_phase in blocking.tap_starts for start in of_phase[::run]]
        firsts = [0, *itertools.accumulate(len(taps) // run for taps in blocking.taps)]
        weight_bytes = spec.groups * blocking.channel_blocks * self.weights.size * DTYPE_BYTES[self.dtype]
        from_memory = tiling.order == "source" or packed_at is not None
        self._prefetches_weights = from_memory and weight_bytes > machine.l2_bytes
        self.tap_first = LookupTable(loops, "tap_first", firsts[:-1])
        self.start = LookupTable(loops, "s_start", starts)

    def emit(self) -> None:
        """Emit the loop nest."""
        if self.tiling.order == "source":
            self._source_order()
        else:
            self._weights_order()

    def begin_item(self) -> None:
        """What a work item needs before its first tile."""
        self.results.allocate()

    def end_item(self) -> None:
        """What a work item does after its last tile: nothing."""

    # -- work items ---------------------------------------------------------------------------------------------------

    def _source_order(self) -> None:
        """Work items are spatial blocks, or a part of the result channels of one."""
        loops, spec, blocking, tiling = self.loops, self.spec, self.blocking, self.tiling
        channel_blocks = blocking.channel_blocks
        packed, packed_at = self.panels_of_weights, self.packed_at or 0
        if self.packed_at is None:
            packed = loops.buffer("w_panels", max(1, spec.groups * channel_blocks * self.weights.size), self.dtype)
            with loops.loop(spec.groups * channel_blocks, "block", self.kind) as item:
                group, channel_block = loops.divmod(item, channel_blocks)
                self.weights.pack(packed, loops.let(expr(item * self.weights.size), "w_into"), group, channel_block)
        per_split = -(-channel_blocks // tiling.splits)
        splits = -(-channel_blocks // per_split)
        blocks = self.batch * (self.counts[0] * blocking.spatial_blocks)
        with loops.loop(blocks * (spec.groups * splits), "item", self.kind) as item:
            rest, split = loops.divmod(item, splits)
            rest, group = loops.divmod(rest, spec.groups)
            block = self._spatial_block(rest, group, self.counts[0])
            panel, panel_at = self.source, self.panels.base(block)
            if not tiling.unpacked:
                panel, panel_at = loops.buffer("s_panel", blocking.panel_size, self.dtype), 0
                with loops.loop(self.panels.rows, "number") as number:
                    self.panels.pack_row(panel, 0, block, number)
            panel_at = loops.let(expr(panel_at), "panel_at")
            first = loops.let(expr(split * per_split), "first_block")
            self.begin_item()
            if self.block_prefetch.useful:
                following = loops.let(expr(rest + 1), "next")
                self.block_prefetch.begin(self._spatial_block(following, group, self.counts[0]), per_split)
            with loops.loop(smaller(channel_blocks - first, per_split), "b") as b:
                channel_block = loops.let(first + b, "block")
                w_at = (group * channel_blocks + channel_block) * self.weights.size + packed_at
                w_at = loops.let(expr(w_at), "w_at")
                self._channel_block(Panels(packed, w_at, panel, panel_at), block, channel_block, b)
            self.end_item()

    def _weights_order(self) -> None:
        """Work items are blocks of result channels, or a part of the spatial blocks for one."""
        loops, spec, blocking, tiling = self.loops, self.spec, self.blocking, self.tiling
        depth = self.counts[0]
        blocks = self.batch * (depth * blocking.spatial_blocks)
        panel = self.source
        if not tiling.unpacked:
            panels = self.batch * (blocking.panels(depth) * spec.groups)
            panel = loops.buffer("s_panels", panels * blocking.panel_size, self.dtype)
            with loops.loop(panels * self.panels.rows, "row", self.kind) as item:
                rest, number = loops.divmod(item, self.panels.rows)
                panel_number, group = loops.divmod(rest, spec.groups)
                block = self._spatial_block(panel_number, group, 1 if blocking.whole_depth else depth)
                self.panels.pack_row(panel, loops.let(expr(rest * blocking.panel_size), "panel_at"), block, number)
        per_item = loops.let(ceiling(blocks, tiling.splits), "blocks_of_item")
        with loops.loop(spec.groups * blocking.channel_blocks * tiling.splits, "item", self.kind) as item:
            rest, split = loops.divmod(item, tiling.splits)
            group, channel_block = loops.divmod(rest, blocking.channel_blocks)
            packed, packed_at = self.panels_of_weights, 0
            if self.packed_at is None:
                packed = loops.buffer("w_panel", max(1, self.weights.size), self.dtype)
                self.weights.pack(packed, 0, group, channel_block)
            else:
                packed_at = loops.let(expr(rest * self.weights.size + self.packed_at), "w_at")
            self.begin_item()
            first = loops.let(expr(split * per_item), "first_block")
            with loops.loop(larger(smaller(blocks - first, per_item), 0), "block") as step:
                number = loops.let(expr(first + step), "number")
                block = self._spatial_block(number, group, depth)
                if tiling.unpacked:
                    at = self.panels.base(block)
                elif blocking.whole_depth:
                    panel_number = block.image * blocking.spatial_blocks + remainder(number, blocking.spatial_blocks)
                    at = (panel_number * spec.groups + group) * blocking.panel_size
                    at = at + block.d * (spec.in_step[0] * blocking.stride_d)
                else:
                    at = (number * spec.groups + group) * blocking.panel_size
                if self.block_prefetch.useful:
                    following = loops.let(expr(number + 1), "next")
                    self.block_prefetch.begin(self._spatial_block(following, group, depth), 1)
                panels = Panels(packed, packed_at, panel, loops.let(expr(at), "panel_at"))
                self._channel_block(panels, block, channel_block, 0)
            self.end_item()

    def _spatial_block(self, number: Index, group: Index, depth: int) -> SpatialBlock:
        """A spatial block by its number among those of all images, which have `depth` slices each."""
        loops, blocking = self.loops, self.blocking
        rest, block_w = loops.divmod(number, blocking.blocks_w)
        rest, block_h = loops.divmod(rest, blocking.blocks_h)
        image, d = loops.divmod(rest, depth)
        block_tiles = min(self.tiling.block_tiles, blocking.tiles_w)
        w: Index = 0
        overlap: Index = 0
        tiles: Index = block_tiles
        if blocking.blocks_w > 1:
            begin = block_w * (block_tiles * blocking.tile_w)
            w = loops.let(smaller(begin, self.counts[2] - blocking.block_w), "column")
            overlap = loops.let(begin - w, "overlap")
            if blocking.tiles_w % block_tiles:
                tiles = loops.let(smaller(blocking.tiles_w - block_w * block_tiles, block_tiles), "tiles")
        h = loops.let(expr(block_h * self.tiling.block_h), "row")
        return SpatialBlock(image, group, d, h, w, overlap, tiles)

    # -- tiles --------------------------------------------------------------------------------------------------------

    def _channel_block(self, panels: Panels, block: SpatialBlock, channel_block: Index, number: Index) -> None:
        """One block of result channels for a spatial block, piece after piece, phase after phase.

        `number` is that of the block of channels among those of the work item.
        """
        loops, rows = self.loops, self.results.staging_h
        channel = loops.let(expr(self.weights.first_channel(channel_block)), "first_channel")
        with loops.loop(self.tiling.block_h // rows, "piece") as piece:
            first = loops.let(expr(piece * rows), "first_row")
            interleaves = self.results.interleaves
            if self.tiling.channel_parts > 1 and interleaves:
                self.results.clear_staging()
            with loops.loop(len(self.phases), "phase") as phase:
                if self.tiling.channel_parts > 1 and not interleaves:
                    self.results.clear_staging()
                with loops.loop(self.tiling.channel_parts, "part") as part:
                    self._tiles(replace(panels, part=part), block, channel_block, channel, first, phase, number)
                if self.results.uses_staging and not self.results.interleaves:
                    self.results.store_staging(block, channel, first, phase)
            if self.results.uses_staging and self.results.interleaves:
                self.results.store_staging(block, channel, first, 0)

    def _tiles(
        self,
        panels: Panels,
        block: SpatialBlock,
        channel_block: Index,
        channel: Index,
        first_row: Index,
        phase: Index,
        number: Index,
    ) -> None:
        """The tiles of one phase of a piece."""
        loops, blocking, tiling = self.loops, self.blocking, self.tiling
        weights = loops.let(expr(panels.weights_at + self.weights.of_phase(phase)), "w_phase")
        overlap_channels: Index = 0
        if self.over_pixels:
            overlap_channels = loops.let(expr(channel_block * blocking.channel_block - channel), "channel_overlap")
        with (
            loops.loop(self.results.staging_h // tiling.tile_h, "l") as step,
            loops.loop(block.tiles, "t") as t,
        ):
            staging_row = step * tiling.tile_h
            row = loops.let(expr(first_row + staging_row), "row")
            # The last tile of a row overlaps the one before, so that it ends with the row.
            begin = block.w + block.overlap_w + t * blocking.tile_w
            column = loops.let(smaller(begin, max(0, self.counts[2] - blocking.tile_w)), "column")
            at = panels.source_at + row * blocking.step_h + (column - block.w) * blocking.step_w
            self.results.prefetch(block, phase, channel, row, column)
            next_block = self.block_prefetch.of_tile(number, row, t)
            at = loops.let(expr(at), "s_tile")
            next_tile: Index | None = None
            if self.tile_prefetch.of_rows:
                next_tile = self.tile_prefetch.of_tile(at, (column - block.w) * blocking.step_w, t, block.tiles)
            tile_row, tile_column = quotient(block.h + row, tiling.tile_h), quotient(column, blocking.tile_w)
            position = TilePosition(phase, block.d, tile_row, tile_column, column)
            overlap = loops.let(expr(begin - column), "column_overlap")
            place = TilePlace(block, phase, channel, overlap_channels, row, staging_row, column, overlap)
            kept = self.results.kept_sums(place) if tiling.channel_parts > 1 else None
            here = replace(panels, weights_at=weights, source_at=at, kept=kept)
            for columns in self.widths(channel_block):
                self.results.tile(self.sum(here, position, next_block, next_tile, columns), place)

    def widths(self, channel_block: Index) -> Iterator[int]:
        """The number of vectors of a tile, within a condition on the block where that of the last one is smaller."""
        loops, blocking, tile_n = self.loops, self.blocking, self.tiling.tile_n
        last = blocking.last_vectors
        if last == tile_n or blocking.channel_blocks == 1:
            yield last
            return
        whole = expr(channel_block) < blocking.channel_blocks - 1
        with loops.when(whole):
            yield tile_n
        with loops.otherwise(whole):
            yield last

    def sum(
        self,
        panels: Panels,
        position: TilePosition,
        next_block: list[Index],
        next_tile: Index | None,
        columns: int,
    ) -> Sums:
        """The sum of a tile over taps and channels, from where `panels` have the phase's W and the first pixel.

        `next_block` and `next_tile` are where to prefetch; `columns` is the number of vectors that are summed.
        """
        packed, weights, panel, at = panels.weights, panels.weights_at, panels.source, panels.source_at
        loops, blocking, tiling, lanes = self.loops, self.blocking, self.tiling, self.lanes
        dots = self.spec.pairs is not None
        tile = Tile(loops, tiling.tile_m, columns, lanes, self.dtype, dots=dots)
        channels, block = self.spec.source_channels, blocking.channel_block
        if panels.kept is not None:
            tile.load(*panels.kept)
        summed = channels // tiling.channel_parts
        first = loops.let(expr(self.tap_first.at(position.phase)), "first_tap")
        if self.over_pixels:
            taps = loops.let(expr(self.taps.count(position.phase)), "taps")
            with loops.loop(channels, "c") as c:
                self.block_prefetch.channel(next_block, c)
                with self.taps.each(position) as tap:
                    s = loops.let(expr(at + c * blocking.stride_c + self.start.at(first + tap)), "s")
                    w = loops.let(expr(weights + (c * taps + tap) * block), "w")
                    if self.tile_prefetch.of_channels:
                        self.tile_prefetch.channel(panel, s)
                    tile.add(
                        lambda i: load(packed, w + i),
                        lambda j: as_number(load(panel, s + j * lanes, lanes), self.dtype),
                    )
            return tile
        offsets = [
            i // blocking.tile_w * blocking.step_h + i % blocking.tile_w * blocking.step_w for i in range(tiling.tile_m)
        ]

        def add_tap(tap: Index, rows: Collection[int] | None = None) -> None:
            s_at = expr(at + self.start.at(first + tap))
            w_at = expr(weights + tap * (channels * blocking.run * block))
            if tiling.channel_parts > 1:
                s_at += panels.part * (summed * blocking.stride_c)
                w_at += panels.part * (summed * block)
            s_at, w_at = loops.let(s_at, "s_at"), loops.let(w_at, "w_at")
            with loops.loop(summed * blocking.run, "c") as c:
                s = loops.let(expr(s_at + c * blocking.stride_c), "s")
                w = loops.let(expr(w_at + c * block), "w")
                self.block_prefetch.channel(next_block, c)
                if self._prefetches_weights:
                    for j in range(0, block, LINE_BYTES // DTYPE_BYTES[self.dtype]):
                        loops.prefetch(packed, w + (WEIGHT_PREFETCH_STEPS * block + j))
                if next_tile is not None:
                    self.tile_prefetch.step(panel, next_tile, tap * blocking.run, c)
                tile.add(lambda i: load(panel, s + offsets[i]), lambda j: load(packed, w + j * lanes, lanes), rows)

        if blocking.ranges.pixels is None:
            with self.taps.each(position) as tap:
                add_tap(tap)
            return tile
        with self.taps.each_row(position) as first_of_row:
            self._exact_row(position, first_of_row, add_tap)
        return tile

    def _exact_row(
        self, position: TilePosition, first: Index, add_tap: Callable[[Index, Collection[int] | None], None]
    ) -> None:
        """Add the taps of a row, from the number `first` on: for the tiles at its ends only the pixels in bounds."""
        loops, blocking = self.loops, self.blocking
        ends = blocking.ranges.pixels or ()

        def add_end(taps: Ranges) -> None:
            for number, (begin, end) in enumerate(taps):
                if begin < end:
                    rows = [i for i in range(self.tiling.tile_m) if begin <= i % blocking.tile_w < end]
                    add_tap(expr(first + number), rows if len(rows) < self.tiling.tile_m else None)

        if len(ends) == 1:
            add_end(ends[0])
            return
        at_first = expr(position.first_column) <= 0
        at_last = expr(position.first_column) >= self.counts[2] - blocking.tile_w
        with loops.when(at_first):
            add_end(ends[0])
        with loops.when(at_last):
            add_end(ends[-1])
        if blocking.tiles_w > len(ends):
            with loops.otherwise(tir.Or(at_first, at_last)), loops.loop(len(ends[0]), "tap") as number:
                add_tap(expr(first + number), None)


__all__ = ["Panels", "PhaseGroup", "largest_panel"]
