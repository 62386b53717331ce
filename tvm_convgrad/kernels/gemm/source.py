# SPDX-License-Identifier: Apache-2.0
"""Packing the source: the panel of a spatial block has the rows and columns that its taps read, with zeros for padding.

A panel is [depth slice][row][column][channel] where vectors run over result channels, and
[channel][depth slice][row][column] where they run over pixels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    Loops,
    choose,
    expr,
    lanes_below,
    lanes_within,
    within,
    zero,
)
from tvm_convgrad.codegen.packing import strided_lanes, transpose
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.gemm.pairs import Operand
from tvm_convgrad.kernels.gemm.tiling import Blocking
from tvm_convgrad.kernels.spec import ConvSpec
from tvm_convgrad.kernels.vectors import where


@dataclass(frozen=True)
class SpatialBlock:
    """Where a spatial block is.

    Attributes:
        image, group: their numbers.
        d, h, w: its first position in the result, without out_step and base.
        overlap_w: its first columns that also belong to the block before it: the last block of a row ends with the row.
        tiles: its tiles along w, beyond the overlap.
    """

    image: Index
    group: Index
    d: Index
    h: Index
    w: Index
    overlap_w: Index
    tiles: Index


class SourcePanel:
    """Emits the packing of panels, row by row.

    Attributes:
        rows: of a panel, in all of its depth slices.
    """

    def __init__(
        self, loops: Loops, spec: ConvSpec, blocking: Blocking, machine: Machine, over_pixels: bool, operand: Operand
    ) -> None:
        self.loops, self.spec, self.blocking = loops, spec, blocking
        self.source, self._operand = operand.buffer, operand
        self.over_pixels, self.lanes = over_pixels, machine.lanes(spec.dtype)
        self.rows = len(blocking.panel_slices) * blocking.panel_h
        self._slices = LookupTable(loops, "slices", list(blocking.panel_slices))
        self._vectors = operand.vectors and machine.has_masks

    def base(self, block: SpatialBlock) -> Index:
        """Index in the source of what a tap with offset 0 reads for a block's first pixel."""
        spec, source = self.spec, self.spec.source
        at = block.image * source.batch + block.group * (spec.source_channels * source.channel)
        for position, step, stride in zip((block.d, block.h, block.w), spec.in_step, source.spatial, strict=True):
            at = at + position * (step * stride)
        return at

    def pack_row(self, panel: Buffer, panel_at: Index, block: SpatialBlock, number: Index) -> None:
        """Pack row `number` of all slices of a block's panel, which begins at `panel_at`."""
        loops, spec, blocking, source = self.loops, self.spec, self.blocking, self.spec.source
        slice_, row = (number, 0) if blocking.panel_h == 1 else loops.divmod(number, blocking.panel_h)
        d = block.d * spec.in_step[0] + self._slices.at(slice_)
        h = block.h * spec.in_step[1] + blocking.panel_first[1] + row * blocking.panel_step[1]
        # A row of padding is not packed at all if no tap reads it, else it is filled with zeros.
        packed_if: list[Expr] = []
        data_if: list[Expr] = []
        (packed_if if blocking.ranges.along_d is not None else data_if).append(within(d, source.extents[0]))
        (packed_if if blocking.ranges.skips_rows else data_if).append(within(h, source.extents[1]))
        with where(loops, functools.reduce(tir.And, packed_if) if packed_if else None):
            limit: Index = source.extents[2]
            if data_if:
                limit = loops.let(choose(functools.reduce(tir.And, data_if), limit, 0), "limit")
            self._pack_valid_row(panel, panel_at, block, (slice_, row), (d, h), limit)

    def _pack_valid_row(
        self,
        panel: Buffer,
        panel_at: Index,
        block: SpatialBlock,
        into: tuple[Index, Index],
        position: tuple[Index, Index],
        limit: Index,
    ) -> None:
        """Pack the row (d, h) of the source to (slice, row) of the panel; columns from `limit` on become zeros."""
        loops, spec, blocking, source = self.loops, self.spec, self.blocking, self.spec.source
        (slice_, row), (d, h) = into, position
        base = block.image * source.batch + block.group * (spec.source_channels * source.channel)
        base = loops.let(expr(base + d * source.spatial[0] + h * source.spatial[1]), "from")
        to = loops.let(expr(panel_at + slice_ * blocking.stride_d + row * blocking.stride_h), "into")
        first = loops.let(expr(block.w * spec.in_step[2] + blocking.panel_first[2]), "column0")
        if self.over_pixels:
            if source.channel == 1 and self._vectors:
                self._transposed_to_pixels(panel, to, base, first, limit)
            else:
                self._pixels(panel, to, base, first, limit)
        elif source.spatial[2] == 1 and source.channel != 1 and self._vectors:
            # Of one channel both strides are 1: then a row of the panel has no room for whole squares.
            self._transposed_to_channels(panel, to, base, first, limit)
        else:
            self._channels(panel, to, base, first, limit)

    def _channels(self, panel: Buffer, into: Index, base: Index, first: Index, limit: Index) -> None:
        """Pixel by pixel, all channels of each: by vectors where channels are contiguous in the source."""
        loops, spec, blocking, lanes = self.loops, self.spec, self.blocking, self.lanes
        source, channels = spec.source, spec.source_channels
        vectors = source.channel == 1 and self._operand.has_numbers
        whole = channels - channels % lanes if vectors else 0
        with loops.loop(blocking.panel_w, "x") as x:
            column = loops.let(expr(first + x * blocking.panel_step[2]), "column")
            inside = loops.let(tir.And(column >= 0, column < limit), "inside")
            pixel = loops.let(base + column * source.spatial[2], "pixel")
            to = loops.let(expr(into + x * blocking.stride_w), "to")
            with loops.when(inside):
                if whole:
                    with loops.loop(whole // lanes, "c") as c:
                        loops.store(panel, to + c * lanes, self._operand.vector(pixel + c * lanes, lanes, c * lanes))
                if channels > whole:
                    with loops.loop(channels - whole, "c") as c:
                        value = self._operand.element(pixel + (whole + c) * source.channel, whole + c)
                        loops.store(panel, to + whole + c, value)
            with loops.otherwise(inside):
                rounded = channels - channels % lanes
                if rounded:
                    with loops.loop(rounded // lanes, "c") as c:
                        loops.store(panel, to + c * lanes, zero(spec.dtype, lanes))
                if channels > rounded:
                    with loops.loop(channels - rounded, "c") as c:
                        loops.store(panel, to + rounded + c, zero(spec.dtype))

    def _transposed_to_channels(self, panel: Buffer, into: Index, base: Index, first: Index, limit: Index) -> None:
        """Squares of channels x pixels, transposed in registers: pixels are contiguous in the source, channels here."""
        loops, spec, blocking, lanes = self.loops, self.spec, self.blocking, self.lanes
        channels = spec.source_channels
        few = channels < lanes
        padded_w = round_up(blocking.panel_w, lanes)
        assert blocking.stride_h >= padded_w * blocking.stride_w, "a row of the panel has room for whole squares"
        with (
            loops.loop(-(-channels // lanes), "c") as c,
            loops.loop(-(-blocking.panel_w // lanes), "x") as x,
        ):
            column = loops.let(expr(first + x * lanes), "column")
            mask = lanes_within(column, limit, lanes)
            row0 = loops.let(expr(base + c * (lanes * spec.source.channel) + column), "row0")
            rows = []
            for i in range(lanes):
                if few and i >= channels:
                    rows.append(zero(spec.dtype, lanes))
                    continue
                here = mask
                if not few and channels % lanes:
                    inside = choose(expr(c * lanes + i) < channels, limit, 0)
                    here = lanes_within(column, inside, lanes)
                at = row0 + i * spec.source.channel
                rows.append(loops.let(self._operand.vector(at, lanes, c * lanes + i, here), "row"))
            to = loops.let(expr(into + x * (lanes * blocking.stride_w) + c * lanes), "to")
            for i, value in enumerate(transpose(loops, rows)):
                if few:
                    loops.store_masked(panel, to + i * blocking.stride_w, value, lanes_below(0, channels, lanes))
                else:
                    loops.store(panel, to + i * blocking.stride_w, value)

    def _pixels(self, panel: Buffer, into: Index, base: Index, first: Index, limit: Index) -> None:
        """Channel by channel, the pixels of the row: by vectors where pixels are contiguous in the source."""
        loops, spec, blocking, lanes = self.loops, self.spec, self.blocking, self.lanes
        source = spec.source
        with loops.loop(spec.source_channels, "c") as c:
            row = loops.let(expr(base + c * source.channel), "row")
            to = loops.let(expr(into + c * blocking.stride_c), "to")
            apart, residues = blocking.interleaved, list(enumerate(blocking.residues))
            if source.spatial[2] == 1 and blocking.panel_step[2] == 1 and self._vectors:
                with loops.loop(-(-blocking.panel_w // (apart * lanes)), "x") as x:
                    column = loops.let(expr(first + x * (apart * lanes)), "column")
                    values = []
                    for i in range(0, apart * lanes, lanes):
                        mask = lanes_within(expr(column + i), limit, lanes)
                        values.append(loops.let(self._operand.vector(row + column + i, lanes, c, mask), "pixels"))
                    for number, residue in residues:
                        value = strided_lanes(values, residue, apart)
                        loops.store(panel, to + number * blocking.residue_w + x * lanes, value)
            else:
                with loops.loop(-(-blocking.panel_w // apart), "x") as x:
                    for number, residue in residues:
                        column = loops.let(expr(first + (x * apart + residue) * blocking.panel_step[2]), "column")
                        value = self._operand.element(row + column * source.spatial[2], c)
                        inside = tir.And(column >= 0, column < limit)
                        value = choose(inside, value, zero(spec.dtype))
                        loops.store(panel, to + number * blocking.residue_w + x, value)

    def _transposed_to_pixels(self, panel: Buffer, into: Index, base: Index, first: Index, limit: Index) -> None:
        """Squares of pixels x channels, transposed in registers: channels are contiguous in the source, pixels here."""
        loops, spec, blocking, lanes = self.loops, self.spec, self.blocking, self.lanes
        channels = spec.source_channels
        with (
            loops.loop(-(-blocking.panel_w // lanes), "x") as x,
            loops.loop(-(-channels // lanes), "c") as c,
        ):
            rows = []
            for i in range(lanes):
                column = loops.let(expr(first + (x * lanes + i) * blocking.panel_step[2]), "column")
                inside = tir.And(column >= 0, column < limit)
                mask = lanes_below(c * lanes, choose(inside, channels, 0), lanes)
                pixel = base + column * spec.source.spatial[2] + c * lanes
                rows.append(loops.let(self._operand.vector(pixel, lanes, c * lanes, mask), "row"))
            to = loops.let(expr(into + c * (lanes * blocking.stride_c) + x * lanes), "to")
            for i, value in enumerate(transpose(loops, rows)):
                with where(loops, expr(c * lanes + i) < channels if channels % lanes else None):
                    loops.store(panel, to + i * blocking.stride_c, value)


__all__ = ["SourcePanel", "SpatialBlock"]
