# SPDX-License-Identifier: Apache-2.0
"""Storing register tiles to the result, with the epilogue.

Vectors are stored directly where their elements are contiguous in the result. Where vectors run over channels but the
result's pixels are contiguous, tiles go to a staging buffer [pixel][channel of the block] first, which is
transposed in registers on the way to the result when it is complete. If the phases of a strided dgrad interleave to
whole rows of the result, the staging buffer holds all of them interleaved. With `channel_parts` it also keeps the sums
of a spatial block from part to part, whatever the layout of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import words_of_pair
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    convert,
    expr,
    lanes_below,
    lanes_of,
    load,
    ramp,
    smaller,
    splat,
    zero,
)
from tvm_convgrad.codegen.packing import transpose
from tvm_convgrad.codegen.register_tile import Sums
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.epilogue import finished
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.gemm.prefetch import LINE_BYTES
from tvm_convgrad.kernels.gemm.source import SpatialBlock
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling
from tvm_convgrad.kernels.spec import ConvSpec, Phase
from tvm_convgrad.kernels.vectors import converts_halves, where

PREFETCH_STEPS, FAR = 128, 4
"""Steps of a sum long enough for a prefetched cache line to arrive; and how many times the L2 a result has to be for
prefetching it to gain after shorter sums, and for vectors of pixels."""

STAGING_BYTES = 1 << 15
"""The most bytes of a staging buffer, unless it keeps sums from part to part of the channels: a part of the L1."""


@dataclass(frozen=True)
class TilePlace:
    """Where a tile is stored.

    Attributes:
        block, phase: its spatial block and phase.
        channel: its first result channel in the group.
        overlap_channels: its first channels that the block of channels before it stores as well.
        row, staging_row: its first row in the spatial block and in the staging buffer.
        column: its first column of the result, without out_step and base.
        overlap_w: its first columns that the tile before it stores as well.
    """

    block: SpatialBlock
    phase: Index
    channel: Index
    overlap_channels: Index
    row: Index
    staging_row: Index
    column: Index
    overlap_w: Index


class ResultStore:
    """Emits the stores of tiles.

    Attributes:
        uses_staging: whether tiles go through the staging buffer.
        interleaves: whether it holds whole rows of the result, of all phases.
        staging_h: rows of a spatial block that are computed before the staging buffer is stored; all if there is none.
    """

    def __init__(
        self,
        frame: KernelFrame,
        spec: ConvSpec,
        phases: tuple[Phase, ...],
        tiling: GemmTiling,
        blocking: Blocking,
        machine: Machine,
    ) -> None:
        loops = self.loops = frame.loops
        self.spec, self.tiling, self.blocking, self.machine = spec, tiling, blocking, machine
        self.result, self.bias, self.epilogue = frame.tensors[2], frame.bias, frame.epilogue
        self.lanes, self.dtype = machine.lanes(spec.dtype), spec.dtype
        self._numbers = frame.numbers("result", self.result, spec.dtype, machine)
        self._biases = frame.numbers("bias", self.bias, spec.dtype, machine)
        self._width = phases[0][2].count
        view, steps = spec.result, spec.out_step
        converts = view.dtype == "float16" and converts_halves(machine, view.dtype, self.dtype)
        self._vectors = view.dtype == self.dtype or self._numbers.halves is not None or converts
        self._ragged = spec.result_channels % blocking.channel_block != 0
        self._channel_vectors = (
            not tiling.over_pixels and view.channel == 1 and self._vectors and (machine.has_masks or not self._ragged)
        )
        self._channel_vectors &= tiling.channel_parts == 1
        self.uses_staging = not tiling.over_pixels and not self._channel_vectors
        bases = [sum(a.base * s for a, s in zip(phase, view.spatial, strict=True)) for phase in phases]
        # A group of phases with all residues makes whole rows of the result, and may reach beyond its last ones.
        beyond = [a.count * s - extent for a, s, extent in zip(phases[0], steps, view.extents, strict=True)]
        covered = all(0 <= more < s for more, s in zip(beyond, steps, strict=True))
        self.interleaves = self.uses_staging and covered and len(phases) == steps[0] * steps[1] * steps[2]
        self._beyond = beyond if self.interleaves else [0, 0, 0]
        self._steps = steps if self.interleaves else (1, 1, 1)
        self._base = LookupTable(loops, "phase_base", [0] if self.interleaves else bases)
        self.staging_h = self._rows_of_staging()
        self._staging_w = blocking.block_w * self._steps[2]
        residues = [tuple(axis.base for axis in phase) for phase in phases]
        self._staging_base = LookupTable(
            loops,
            "staging_base",
            [(d * self._steps[1] * self.staging_h + h) * self._staging_w + w for d, h, w in residues]
            if self.interleaves
            else [0] * len(phases),
        )
        long = not tiling.over_pixels and blocking.tap_count * spec.source_channels >= PREFETCH_STEPS * len(phases)
        self._prefetches = tiling.channel_parts == 1
        self._prefetches &= long or view.size * DTYPE_BYTES[view.dtype] > FAR * machine.l2_bytes
        pixels = self._steps[0] * self._steps[1] * self.staging_h * self._staging_w
        self._transposes_words = view.spatial[2] * (1 if self.interleaves else steps[2]) == 1
        self._transposes_words &= self._numbers.stores_pairs and not self.epilogue.accumulate
        behind = self.lanes * (2 if self._transposes_words else 1)
        self._staging_size = (pixels + behind) * blocking.channel_block if self.uses_staging else 0
        self._scratch: Buffer = None

    def _rows_of_staging(self) -> int:
        """Rows of a spatial block that the staging buffer holds: all if it keeps sums, else what fits STAGING_BYTES."""
        steps, tile_h, block_h = self._steps, self.tiling.tile_h, self.tiling.block_h
        row = self.blocking.block_w * self.blocking.channel_block * steps[0] * steps[1] * steps[2] * 4
        dividing = [n for n in range(tile_h, block_h + 1) if block_h % n == 0 and n % tile_h == 0]
        if not self.uses_staging or self.tiling.channel_parts > 1:
            return block_h
        return max((n for n in dividing if n * row <= STAGING_BYTES), default=tile_h)

    def allocate(self) -> None:
        """Allocate the memory of a work item."""
        size = self._staging_size if self.uses_staging else self.tiling.tile_m * self.tiling.tile_n * self.lanes
        self._scratch = self.loops.buffer("scratch", size, self.dtype)

    # -- addresses and the epilogue -------------------------------------------------------------------------------

    def _address(self, block: SpatialBlock, row: Index, column: Index, phase: Index) -> Expr:
        """The index of the group's first channel at a position of the phase."""
        spec, view = self.spec, self.spec.result
        at = block.image * view.batch + block.group * (spec.result_channels * view.channel)
        for q, step, stride in zip((block.d, block.h + row, column), spec.out_step, view.spatial, strict=True):
            at = at + q * (step * stride)
        return expr(at + self._base.at(phase))

    def _finished(
        self,
        total: Expr,
        group: Index,
        channel: Index,
        at: Index,
        mask: Expr | None = None,
        *,
        over_channels: bool = False,
    ) -> Expr:
        """The sum with the epilogue, to be stored at `at`, under `mask` if there is one.

        Lanes are of pixels, or, with `over_channels`, of channels from `channel` on.
        """
        lanes = lanes_of(total)

        def bias() -> Expr:
            index = expr(group * self.spec.result_channels + channel)
            if over_channels:
                return self._biases.load(index, lanes, mask)
            return splat(convert(load(self.bias, index), self.dtype), lanes)

        return finished(self.epilogue, total, self.dtype, bias, lambda: self._numbers.load(at, lanes, mask))

    def prefetch(self, block: SpatialBlock, phase: Index, channel: Index, row: Index, column: Index) -> None:
        """Prefetch the cache lines that a tile will be stored to, into the L1: they arrive while it is summed.

        Not for small results with short sums or vectors of pixels: there prefetches cost more than they gain.
        """
        if not self._prefetches:
            return
        loops, view, lanes, blocking = self.loops, self.spec.result, self.lanes, self.blocking
        step_w, step_h = (self.spec.out_step[a] * view.spatial[a] for a in (2, 1))
        if self._channel_vectors:
            streams, length, stride = blocking.tile_w, self.tiling.tile_n * lanes, step_w
            start = channel
        elif view.spatial[2] == 1 and (streams := min(blocking.channel_block, self.spec.result_channels)):
            length, stride = blocking.tile_w * step_w, view.channel
            start = channel * view.channel
        else:
            return
        at = loops.let(self._address(block, row, column, phase) + start, "prefetch_at")
        with loops.loop(self.tiling.tile_h, "row") as number, loops.loop(streams, "stream") as stream:
            for j in range(0, length, LINE_BYTES // DTYPE_BYTES[view.dtype]):
                loops.prefetch(self.result, at + number * step_h + stream * stride + j, write=True, near=True)

    # -- tiles ------------------------------------------------------------------------------------------------------

    def tile(self, tile: Sums, place: TilePlace) -> None:
        """Store a tile to the result or to the staging buffer."""
        if self.uses_staging:
            tile.store(*self.kept_sums(place))
            return
        tile.complete()
        if self.tiling.over_pixels:
            self._pixel_tile(tile, place)
        else:
            self._channel_tile(tile, place)

    def _offset(self, number: int, stride_h: int, stride_w: int) -> int:
        """The offset of a pixel by its number in a tile whose vectors run over channels."""
        row, column = divmod(number, self.blocking.tile_w)
        return row * stride_h + column * stride_w

    def _channel_tile(self, tile: Sums, place: TilePlace) -> None:
        """Vectors of channels that are contiguous in the result."""
        loops, spec, lanes, view = self.loops, self.spec, self.lanes, self.spec.result
        at = loops.let(self._address(place.block, place.row, place.column, place.phase) + place.channel, "out")
        step_h, step_w = spec.out_step[1] * view.spatial[1], spec.out_step[2] * view.spatial[2]
        overlaps = self.epilogue.accumulate and self._width % self.blocking.tile_w != 0
        width = 2 if self._numbers.stores_pairs and not self._ragged else 1
        groups = [range(j, min(j + width, tile.columns)) for j in range(0, tile.columns, width)]
        for i in range(self.tiling.tile_m):
            with self._unless_stored(overlaps, i % self.blocking.tile_w, place.overlap_w):
                row = at + self._offset(i, step_h, step_w)
                for columns in groups:
                    to, channel = row + columns[0] * lanes, expr(place.channel + columns[0] * lanes)
                    mask = lanes_below(channel, spec.result_channels, lanes) if self._ragged else None
                    values = [
                        self._finished(
                            tile.value(i, j),
                            place.block.group,
                            place.channel + j * lanes,
                            row + j * lanes,
                            mask,
                            over_channels=True,
                        )
                        for j in columns
                    ]
                    if len(values) == 1:
                        self._numbers.store(to, values[0], mask)
                    else:
                        self._numbers.store_pair(to, values[0], values[1])

    def _unless_stored(self, overlaps: bool, number: int, overlap: Index) -> AbstractContextManager[None]:
        """Statements that run only from the number `overlap` on: others are accumulated by the tile before."""
        return where(self.loops, expr(overlap) <= number if overlaps else None)

    def _pixel_tile(self, tile: Sums, place: TilePlace) -> None:
        """Vectors of pixels; where these are not contiguous in the result, elements go through a scratch buffer."""
        loops, spec, lanes, view = self.loops, self.spec, self.lanes, self.spec.result
        at = loops.let(self._address(place.block, place.row, place.column, place.phase), "out")
        step_w = view.spatial[2] * spec.out_step[2]
        narrow = self._width < self.blocking.tile_w
        overlaps = self.epilogue.accumulate and self._width % self.blocking.tile_w != 0
        channels_overlap = self.epilogue.accumulate and self._ragged
        if step_w == 1 and self._vectors and (self.machine.has_masks or not (narrow or overlaps)):
            for i in range(self.tiling.tile_m):
                with self._unless_stored(channels_overlap, i, place.overlap_channels):
                    for j in range(self.tiling.tile_n):
                        to = at + (place.channel + i) * view.channel + j * lanes
                        mask = None
                        if narrow:
                            mask = lanes_below(j * lanes, self._width, lanes)
                        elif overlaps:
                            mask = _lanes_from(j * lanes, place.overlap_w, lanes)
                        value = self._finished(tile.value(i, j), place.block.group, place.channel + i, to, mask)
                        self._numbers.store(to, value, mask)
            return
        width = self.tiling.tile_n * lanes
        for i in range(self.tiling.tile_m):
            for j in range(self.tiling.tile_n):
                loops.store(self._scratch, (i * self.tiling.tile_n + j) * lanes, tile.value(i, j))
        first = place.overlap_w if overlaps else 0
        with loops.loop(min(self._width, width) - first, "l") as step:
            lane = loops.let(expr(first + step), "lane")
            with loops.loop(self.tiling.tile_m - (place.overlap_channels if channels_overlap else 0), "m") as number:
                i = expr(number + place.overlap_channels) if channels_overlap else number
                to = loops.let(expr(at + lane * step_w + (place.channel + i) * view.channel), "to")
                value = load(self._scratch, i * width + lane)
                loops.store(self.result, to, self._finished(value, place.block.group, place.channel + i, to))

    # -- the staging buffer -----------------------------------------------------------------------------------------

    def clear_staging(self) -> None:
        """Set the sums in the staging buffer to zero, before the first part of the channels."""
        loops, lanes = self.loops, self.lanes
        with loops.loop(self._staging_size // lanes, "sum") as number:
            loops.store(self._scratch, loops.let(expr(number * lanes), "at"), zero(self.dtype, lanes))

    def kept_sums(self, place: TilePlace) -> tuple[Buffer, Index, list[int]]:
        """The staging buffer, where a tile begins in it, and the offset of each of its pixels."""
        loops, channels = self.loops, self.blocking.channel_block
        stride_h = self._steps[1] * self._staging_w
        x = place.column - place.block.w
        at = (self._staging_base.at(place.phase) + place.staging_row * stride_h + x * self._steps[2]) * channels
        at = loops.let(expr(at), "staging_at")
        return (
            self._scratch,
            at,
            [self._offset(i, stride_h, self._steps[2]) * channels for i in range(self.tiling.tile_m)],
        )

    def store_staging(self, block: SpatialBlock, channel: Index, row: Index, phase: Index) -> None:
        """Store the complete staging buffer to the result.

        Args:
            channel: the first result channel; row: the buffer's first row in the spatial block.
            phase: 0 where the phases are interleaved.
        """
        loops, spec, view = self.loops, self.spec, self.spec.result
        base = loops.let(self._address(block, row, block.w, phase), "staging_out")
        count = loops.let(smaller(spec.result_channels - channel, self.blocking.channel_block), "channels")
        step_w = view.spatial[2] * (1 if self.interleaves else spec.out_step[2])
        step_h = view.spatial[1] * (1 if self.interleaves else spec.out_step[1])
        first = loops.let(block.overlap_w * self._steps[2], "first")
        slices, rows, width = self._stored(block, row)
        if self.blocking.blocks_w == 1 and step_h == self._staging_w * step_w and not any(self._beyond):
            rows, width = 1, self._staging_w * rows  # rows are contiguous in the result
        with loops.loop(slices, "slice") as d, loops.loop(rows, "row") as h:
            out = loops.let(expr(base + d * view.spatial[0] + h * step_h), "out")
            pixel = d * (self._steps[1] * self.staging_h * self._staging_w) + h * self._staging_w
            start = loops.let(expr(pixel * self.blocking.channel_block), "start")
            if self._transposes_words:
                self._transposed_words(block.group, channel, count, start, out, first, width)
            elif step_w == 1 and self._vectors and self.machine.has_masks:
                self._transposed(block.group, channel, count, start, out, first, width)
            else:
                with loops.loop(width - first, "x") as step, loops.loop(count, "o") as o:
                    x = expr(first + step)
                    to = loops.let(expr(out + x * step_w + (channel + o) * view.channel), "to")
                    value = load(self._scratch, start + x * self.blocking.channel_block + o)
                    loops.store(self.result, to, self._finished(value, block.group, channel + o, to))

    def _stored(self, block: SpatialBlock, row: Index) -> tuple[Index, Index, Index]:
        """The slices, rows and columns of the staging buffer that are in the result."""
        loops, steps, extents = self.loops, self._steps, self.spec.result.extents
        slices: Index = steps[0]
        rows: Index = steps[1] * self.staging_h
        width: Index = self._staging_w
        if self._beyond[0]:
            slices = loops.let(smaller(extents[0] - block.d * steps[0], steps[0]), "slices")
        if self._beyond[1]:
            rows = loops.let(smaller(extents[1] - (block.h + row) * steps[1], rows), "rows")
        if self._beyond[2]:
            width = loops.let(smaller(extents[2] - block.w * steps[2], width), "width")
        return slices, rows, width

    def _transposed(
        self, group: Index, channel: Index, count: Index, start: Index, out: Index, first: Index, width: Index
    ) -> None:
        """A row of the staging buffer, columns from `first` on: squares of pixels x channels, transposed."""
        loops, lanes, view, channels = self.loops, self.lanes, self.spec.result, self.blocking.channel_block
        with self._squares(first, width, lanes) as (x, j, mask):
            at = loops.let(expr(start + x * channels + j * lanes), "at")
            rows = [loops.let(load(self._scratch, at + i * channels, lanes), "row") for i in range(lanes)]
            for i, value in enumerate(transpose(loops, rows)):
                o = expr(j * lanes + i)
                with where(loops, o < count if self._ragged else None):
                    to = loops.let(expr(out + (channel + o) * view.channel + x), "to")
                    value = self._finished(value, group, channel + o, to, mask)
                    self._numbers.store(to, value, mask)

    def _transposed_words(
        self, group: Index, channel: Index, count: Index, start: Index, out: Index, first: Index, width: Index
    ) -> None:
        """The same to a result of bfloat16: squares of words of two pixels, transposed as those of pixels are."""
        loops, lanes, view, channels = self.loops, self.lanes, self.spec.result, self.blocking.channel_block
        with self._squares(first, width, 2 * lanes) as (x, j, mask):
            at = loops.let(expr(start + x * channels + j * lanes), "at")
            o = loops.let(expr(channel + j * lanes), "o")
            within = lanes_below(o, self.spec.result_channels, lanes) if self._ragged else None
            sums = [
                self._finished(load(self._scratch, at + i * channels, lanes), group, o, 0, within, over_channels=True)
                for i in range(2 * lanes)
            ]
            rows = [
                loops.let(words_of_pair(loops, even, odd), "row")
                for even, odd in zip(sums[::2], sums[1::2], strict=True)
            ]
            for i, value in enumerate(transpose(loops, rows)):
                number = expr(j * lanes + i)
                with where(loops, number < count if self._ragged else None):
                    to = loops.let(expr(out + (channel + number) * view.channel + x), "to")
                    self._numbers.store_words(to, value, mask)

    @contextmanager
    def _squares(self, first: Index, width: Index, pixels: int) -> Iterator[tuple[Index, Index, Expr | None]]:
        """Loops over the squares of a row; gives the first column, the number of the vector, the mask of columns."""
        loops = self.loops
        if isinstance(first, int) and isinstance(width, int):
            chunks: Index = -(-(width - first) // pixels)
            masked = (width - first) % pixels != 0
        else:
            chunks, masked = tir.truncdiv(width - first + (pixels - 1), pixels), True
        with (
            loops.loop(chunks, "chunk") as chunk,
            loops.loop(self.blocking.channel_block // self.lanes, "j") as j,
        ):
            x = loops.let(expr(first + chunk * pixels), "x")
            yield x, j, lanes_below(x, width, pixels) if masked else None


def _lanes_from(first: int, limit: Index, lanes: int) -> Expr:
    """The mask of the lanes l with first + l >= limit."""
    return ramp(first, lanes) >= splat(expr(limit), lanes)


__all__ = ["ResultStore", "TilePlace"]
