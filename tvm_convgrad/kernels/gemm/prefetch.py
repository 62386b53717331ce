# SPDX-License-Identifier: Apache-2.0
"""Prefetching the source while a tile is summed: for the next spatial block, and for the next tile of this one."""

from __future__ import annotations

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, Loops, choose, expr, quotient
from tvm_convgrad.codegen.tir import Buffer
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.gemm.source import SpatialBlock
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling
from tvm_convgrad.kernels.spec import ConvSpec

FAR_CHANNELS, FAR_PIXELS = 2, 4
"""How many times the L2 a source has to be for prefetching the next tile to gain, where vectors run over channels and
where they run over pixels."""

LINE_BYTES = Machine.line_bytes
"""Bytes of a cache line."""


class BlockPrefetch:
    """Prefetches the source of the next spatial block while this one is summed, one cache line a step.

    Only for sources with contiguous pixels: there the channels lie far apart, and the hardware's prefetchers do not
    predict the step from one to the next.

    Attributes:
        useful: whether it is done.
    """

    def __init__(self, loops: Loops, spec: ConvSpec, blocking: Blocking, tiling: GemmTiling, source: Buffer) -> None:
        self.loops, self.spec, self.source = loops, spec, source
        offsets = [offset for of_phase in blocking.taps for _, offset in of_phase] or [(0, 0, 0)]
        low, high = (tuple(pick(o[a] for o in offsets) for a in range(3)) for pick in (min, max))
        step = spec.in_step
        # The rows that the block before does not read; of a kernel with one row of taps, only those that are read.
        self._row_step = step[1] if low[1] == high[1] else 1
        self._rows = tiling.block_h * step[1] // self._row_step
        self._first = (0, high[1] - (step[1] - self._row_step), low[2])
        self._line = LINE_BYTES // DTYPE_BYTES[spec.source.dtype]
        columns = (blocking.block_w - 1) * step[2] + high[2] - low[2] + 1
        self._lines_of_row = -(-min(columns, spec.source.extents[2]) // self._line)
        self._tile_h, self._block_tiles = tiling.tile_h, min(tiling.block_tiles, blocking.tiles_w)
        self._tiles = tiling.block_h // tiling.tile_h * self._block_tiles
        # Where vectors run over pixels a tile reads whole cache lines at once, and prefetches cost more than they gain,
        # unless words are made in a panel.
        words = spec.pairs is not None and spec.pairs.source != 0
        self.useful = (
            (not tiling.over_pixels or words)
            and (tiling.unpacked or tiling.order == "source")
            and spec.source.channel != 1
            and (spec.source_channels if spec.pairs is None else spec.pairs.channels) >= self._line
        )
        self._base: Index = 0
        self._parts = 0

    def begin(self, block: SpatialBlock, channel_blocks: int) -> None:
        """Set the block to prefetch, and over how many blocks of result channels the prefetches are distributed."""
        view = self.spec.source
        at = block.image * view.batch + block.group * (self.spec.source_channels * view.channel)
        for first, position, step, stride in zip(
            self._first, (block.d, block.h, block.w), self.spec.in_step, view.spatial, strict=True
        ):
            at = at + (position * step + first) * stride
        self._base, self._parts = self.loops.let(expr(at), "next_block"), channel_blocks * self._tiles

    def of_tile(self, channel_block: Index, row: Index, tile: Index) -> list[Index]:
        """The cache lines of the first channel that a tile prefetches: its part of the block's. None if not useful.

        Args:
            channel_block: its number among those that the prefetches are distributed over.
            row: of the tile in the block; tile: its number in the row.
        """
        if not self.useful:
            return []
        tile = quotient(row, self._tile_h) * self._block_tiles + tile
        view, total = self.spec.source, self._rows * self._lines_of_row
        each = -(-total // self._parts)
        number = self.loops.let(expr(quotient((channel_block * self._tiles + tile) * total, self._parts)), "prefetched")
        places = []
        for i in range(each):
            row, line = self.loops.divmod(number + i, self._lines_of_row)
            at = self._base + row * (self._row_step * view.spatial[1]) + line * (self._line * view.spatial[2])
            places.append(self.loops.let(expr(at), "prefetch_at"))
        return places

    def channel(self, places: list[Index], c: Index) -> None:
        """Prefetch the cache lines of a channel."""
        pair = self.spec.pairs.source if self.spec.pairs is not None else 0
        for at in places:
            self.loops.prefetch(self.source, at + c * self.spec.source.channel)
            if pair:
                self.loops.prefetch(self.source, at + (c * self.spec.source.channel + pair))


class TilePrefetch:
    """Prefetches what the next tile is the first to read, while this one is summed.

    A tile reads many pixels, or channels, at once, each a stream of its own: more than the hardware's prefetchers
    follow. Only for sources, and for panels of all images, that do not fit the L2.

    Attributes:
        of_channels: whether the next pixels of each channel are prefetched: vectors of pixels of an unpacked source.
        of_rows: whether the next tile's rows are prefetched: vectors of channels.
        taps, stride_d: for the latter, the taps of a depth slice of the first phase, and elements from one depth slice
            to the next.
    """

    def __init__(
        self, loops: Loops, spec: ConvSpec, phases: int, blocking: Blocking, tiling: GemmTiling, machine: Machine
    ) -> None:
        self.loops, self._line = loops, LINE_BYTES // DTYPE_BYTES[spec.dtype]
        bytes_, taps = spec.source.size * DTYPE_BYTES[spec.source.dtype], blocking.taps[0]
        depths = sorted({offset[0] for _, offset in taps})
        slices = len(depths)
        far = bytes_ > (FAR_PIXELS if tiling.over_pixels else FAR_CHANNELS) * machine.l2_bytes
        self.of_channels = far and tiling.over_pixels and tiling.unpacked and phases == blocking.tap_count == 1
        self._width = blocking.tile_w
        # Consecutive pixels: the last rows that the taps of each depth slice reach, of the first phase.
        rows_follow = slices == 1 and spec.source.channel == 1 if tiling.unpacked else tiling.order == "weights"
        self.of_rows = far and rows_follow and not tiling.over_pixels and bool(taps) and len(taps) % slices == 0
        if not self.of_rows:
            return
        self._channels, self.taps, self.stride_d = spec.source_channels, len(taps) // slices, blocking.stride_d
        self._first = 0
        if blocking.whole_depth:  # the panel has each depth slice of the source in its own place
            self._first = depths[0] * blocking.stride_d
            self.stride_d *= depths[1] - depths[0] if slices > 1 else 1
        _, hs, ws = zip(*(offset for of_phase in blocking.taps for _, offset in of_phase), strict=True)
        first_h, first_w = (0, 0) if tiling.unpacked else blocking.panel_first[1:]
        rows = max(1, spec.in_step[1] * tiling.tile_h // blocking.panel_step[1])
        self._first += ((max(hs) - first_h) // blocking.panel_step[1] + 1 - rows) * blocking.stride_h
        self._first += (min(ws) - first_w) // blocking.panel_step[2] * blocking.stride_w
        reach_w = (max(ws) - min(ws)) // blocking.panel_step[2] * blocking.stride_w
        size = (rows - 1) * blocking.stride_h + (blocking.tile_w - 1) * blocking.step_w + reach_w + self._channels
        self._each = -(-size // (self.taps * self._channels))
        self._right, self._down = blocking.tile_w * blocking.step_w, tiling.tile_h * blocking.step_h

    def of_tile(self, at: Index, column: Index, tile: Index, tiles: Index) -> Index:
        """Where the rows of the next tile begin.

        Args:
            at: of this tile's first pixel; column: how many elements of its row are before it.
            tile: its number in the row; tiles: of a row.
        """
        following = at + self._right
        if self._down:
            following = choose(expr(tile + 1) < tiles, following, at - column + self._down)
        return self.loops.let(expr(following + self._first), "next_tile")

    def step(self, panel: Buffer, at: Index, tap: Index, c: Index) -> None:
        """Prefetch the part of a step: of a tap of the phase and a channel, counted on into the taps that follow."""
        d = quotient(tap, self.taps)
        at = at + d * self.stride_d + ((tap - d * self.taps) * self._channels + c) * self._each
        for i in range(0, self._each, self._line):
            self.loops.prefetch(panel, at + i)

    def channel(self, source: Buffer, at: Index) -> None:
        """Prefetch the next tile's pixels of a channel."""
        for i in range(self._width, 2 * self._width, self._line):
            self.loops.prefetch(source, at + i)


__all__ = ["LINE_BYTES", "BlockPrefetch", "TilePrefetch"]
