# SPDX-License-Identifier: Apache-2.0
"""The store of wgrad: sums of blocks into dW's own layout, parts added in their order, transposed in registers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    Loops,
    choose,
    expr,
    lanes_below,
    lanes_within,
    load_sum,
    smaller,
    zero,
)
from tvm_convgrad.codegen.packing import transpose
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.vectors import GradientStore
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, tap_offsets


@dataclass(frozen=True)
class DwBlocks:
    """dW in blocks of `tile_m` output channels by `tile_n` vectors of input channels, each with all its taps.

    The sums of a block are [tap][output channel][input channel]. The last block of output channels overlaps the one
    before it; the last one of input channels is padded.
    """

    spec: WgradSpec
    tile_m: int
    tile_n: int
    lanes: int

    @property
    def width(self) -> int:
        """Input channels of a block."""
        return self.tile_n * self.lanes

    @property
    def tile_size(self) -> int:
        """Sums of a tap of a block."""
        return self.tile_m * self.width

    @cached_property
    def taps(self) -> list[tuple[int, ...]]:
        """(d, h, w) of each tap."""
        return list(itertools.product(*(range(k) for k in self.spec.kernel)))

    @property
    def in_blocks(self) -> int:
        """Blocks of a group's input channels."""
        return -(-self.spec.in_channels // self.width)

    @property
    def out_blocks(self) -> int:
        """Blocks of a group's output channels."""
        return -(-self.spec.out_channels // self.tile_m)

    @property
    def ragged(self) -> bool:
        """Whether the last block of input channels is padded."""
        return self.spec.in_channels % self.width != 0

    def first_out(self, block: Index) -> Index:
        """The first output channel of a block."""
        return smaller(block * self.tile_m, self.spec.out_channels - self.tile_m)


class DwStore:
    """Stores the sums of a block to dW.

    DHW orders of dW are written by vectors: input channels innermost (OHWI, and 1x1 of OIHW), taps innermost (OIHW),
    and output channels innermost (HWIO); the last two by transposing squares of registers. Others go one by one.
    """

    def __init__(
        self,
        loops: Loops,
        blocks: DwBlocks,
        machine: Machine,
        dw: Buffer,
        adds: bool,
        halves: Buffer | None = None,
    ) -> None:
        """Describe dW; `halves` is its view as HALF, by which vectors of bfloat16 are stored."""
        spec = blocks.spec
        self.loops, self.blocks, self.dw = loops, blocks, GradientStore(loops, dw, spec.dtype, adds, machine, halves)
        offsets = tap_offsets(spec.kernel, spec.dw)
        self.offsets = LookupTable(loops, "dw_taps", offsets)
        columns = spec.column_offsets
        # Where n are pairs of tap and channel, they may have no constant step.
        even = columns == [n * spec.dw.into for n in range(len(columns))]
        self.columns = None if even else LookupTable(loops, "dw_columns", columns)
        is_float16 = spec.converts(spec.dw) and spec.dw.dtype == "float16"
        vectors, masks = (
            even and (spec.dw.dtype == spec.dtype or halves is not None or is_float16),
            machine.has_masks,
        )
        self.in_innermost = vectors and spec.dw.into == 1 and (masks or not blocks.ragged)
        self.taps_innermost = vectors and masks and offsets == list(range(len(offsets)))
        self.out_innermost = vectors and masks and spec.dw.out == 1

    def write(
        self, sums: Buffer, base: Index, parts: int, part_size: int, group: Index, out_block: Index, first_in: Index
    ) -> None:
        """Store all taps of a block, from `base` on in each of the parts, which lie `part_size` elements apart."""
        loops, blocks, spec = self.loops, self.blocks, self.blocks.spec
        dw, taps, width, lanes, tile_m = spec.dw, len(blocks.taps), blocks.width, blocks.lanes, blocks.tile_m
        first_in = loops.let(expr(first_in), "i0")
        first_out = loops.let(expr(blocks.first_out(out_block)), "o0")
        # Output channels that the block before has too are stored twice, with the same value, but not added twice.
        overlaps = self.dw.adds and spec.out_channels % tile_m != 0
        skip = loops.let(expr(out_block * tile_m - first_out), "skip") if overlaps else 0
        column = first_in * dw.into if self.columns is None else 0
        to = (group * spec.out_channels + first_out) * dw.out + column + spec.first
        to = loops.let(expr(to), "to")

        def total(index: Index, lanes: int) -> Expr:
            return load_sum(sums, index, lanes, parts, part_size)

        if self.in_innermost:
            with loops.loop(taps, "tap") as tap, loops.loop(tile_m - skip, "m") as later:
                m = later + skip
                at = loops.let(base + (tap * tile_m + m) * width, "at")
                into = loops.let(to + m * dw.out + self.offsets.at(tap), "into")
                for j in range(blocks.tile_n):
                    mask = lanes_below(first_in + j * lanes, spec.in_channels, lanes) if blocks.ragged else None
                    self._store(into + j * lanes, total(at + j * lanes, lanes), mask)
        elif self.taps_innermost:
            with loops.loop(tile_m - skip, "m") as later, loops.loop(blocks.tile_n, "j") as j:
                m = later + skip
                at = loops.let(base + m * width + j * lanes, "at")
                into = loops.let(to + m * dw.out + j * lanes * dw.into, "into")
                values = [lambda k=k: total(at + k * blocks.tile_size, lanes) for k in range(taps)]
                self._store_transposed(into, first_in + j * lanes, values, 0)
        elif self.out_innermost:
            with loops.loop(taps, "tap") as tap, loops.loop(blocks.tile_n, "j") as j:
                at = loops.let(base + tap * blocks.tile_size + j * lanes, "at")
                into = loops.let(to + self.offsets.at(tap) + j * lanes * dw.into, "into")
                values = [lambda k=k: total(at + k * width, lanes) for k in range(tile_m)]
                self._store_transposed(into, first_in + j * lanes, values, skip)
        else:
            count = loops.let(smaller(spec.in_channels - first_in, width), "count")
            with loops.loop(tile_m - skip, "m") as later, loops.loop(count, "i") as i, loops.loop(taps, "tap") as tap:
                m = later + skip
                value = total(base + (tap * tile_m + m) * width + i, 1)
                column = i * dw.into if self.columns is None else self.columns.at(first_in + i)
                at = loops.let(expr(to + m * dw.out + column + self.offsets.at(tap)), "into")
                self.dw.store(at, value)

    def _store_transposed(
        self, into: Index, first_in: Index, values: Sequence[Callable[[], Expr]], skip: Index
    ) -> None:
        """Store lane l of value k to into + l * (step of input channels) + k, from k = skip on."""
        loops, spec, lanes = self.loops, self.blocks.spec, self.blocks.lanes
        for first in range(0, len(values), lanes):
            square = [loops.let(value(), "row") for value in values[first : first + lanes]]
            count = len(square)
            square += [zero(spec.dtype, lanes)] * (lanes - count)
            for lane, value in enumerate(transpose(loops, square)):
                at = into + lane * spec.dw.into + first
                limit: Index = count
                if self.blocks.ragged:
                    limit = choose(expr(first_in + lane) < spec.in_channels, count, 0)
                if not isinstance(skip, int):
                    # The lanes from `skip` on: counted from there, those before it are negative.
                    mask = lanes_within(first - skip, limit + (first - skip), lanes)
                elif isinstance(limit, int) and limit == lanes:
                    mask = None
                else:
                    mask = lanes_below(0, limit, lanes)
                self._store(at, value, mask)

    def _store(self, at: Index, value: Expr, mask: Expr | None) -> None:
        self.dw.store(self.loops.let(expr(at), "to"), value, mask)


__all__ = ["DwBlocks", "DwStore"]
