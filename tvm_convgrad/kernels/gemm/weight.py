# SPDX-License-Identifier: Apache-2.0
"""Packing W: one panel for each block of result channels, [phase][tap][source channel][channel of the block].

Where vectors run over pixels the order is [phase][source channel][tap][channel of the block]: the cache lines of the
source that the taps of a channel share are then read one after the other.
"""

from __future__ import annotations

import itertools

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    LookupTable,
    Loops,
    choose,
    expr,
    lanes_below,
    less,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.codegen.packing import transpose
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.gemm.pairs import Operand
from tvm_convgrad.kernels.gemm.tiling import Blocking
from tvm_convgrad.kernels.spec import ConvSpec
from tvm_convgrad.kernels.vectors import where


class WeightPanel:
    """Emits the packing of a block of result channels.

    Attributes:
        size: elements of a panel.
    """

    def __init__(
        self, loops: Loops, spec: ConvSpec, blocking: Blocking, machine: Machine, over_pixels: bool, operand: Operand
    ) -> None:
        self.loops, self.spec, self.blocking, self.machine, self._operand = loops, spec, blocking, machine, operand
        self.over_pixels, self.lanes = over_pixels, machine.lanes(spec.dtype)
        self.block, channels = blocking.channel_block, spec.source_channels
        self.size = blocking.tap_count * channels * self.block
        counts = [len(taps) for taps in blocking.taps]
        firsts = [0, *itertools.accumulate(counts)]
        self._phase_first = LookupTable(loops, "w_first", [first * channels * self.block for first in firsts[:-1]])
        strides = spec.weight.spatial
        kernel_indices = [kernel for taps in blocking.taps for kernel, _ in taps]
        self._offsets = [sum(k * s for k, s in zip(kernel, strides, strict=True)) for kernel in kernel_indices]
        self._offset = LookupTable(loops, "w_offset", self._offsets)
        taps = len(self._offsets)
        # (tap, channel) goes to start(tap) + channel * step(tap), in units of a block.
        if over_pixels:
            starts = [first * channels + i for first, count in zip(firsts, counts, strict=False) for i in range(count)]
            steps = [count for count in counts for _ in range(count)]
        else:
            starts, steps = [i * channels for i in range(taps)], [1] * taps
        # The same by the tap's place in memory, where the kernel's taps are contiguous.
        self._dense = sorted(self._offsets) == list(range(taps)) and bool(taps)
        order = [self._offsets.index(i) for i in range(taps)] if self._dense else []
        self._start, self._step = LookupTable(loops, "w_to", starts), LookupTable(loops, "w_step", steps)
        self._dense_start = LookupTable(loops, "w_to_dense", [starts[i] for i in order])
        self._dense_step = LookupTable(loops, "w_step_dense", [steps[i] for i in order])

    def of_phase(self, phase: Index) -> Index:
        """Where a phase's part of a panel begins."""
        return self._phase_first.at(phase)

    def first_channel(self, block: Index) -> Index:
        """The first result channel of a block; where m runs over channels, the last block overlaps the one before."""
        if self.over_pixels:
            return smaller(block * self.block, self.spec.result_channels - self.block)
        return block * self.block

    def pack(self, packed: Buffer, into: Index, group: Index, block: Index) -> None:
        """Pack one block; channels beyond the last result channel become zeros."""
        loops, spec = self.loops, self.spec
        if not self._offsets:
            return
        first = loops.let(expr(self.first_channel(block)), "first_channel")
        base = loops.let(expr(group * spec.weight_group_stride + first * spec.weight_result_stride), "w_from")
        contiguous = self._contiguous()
        if contiguous == "o":
            self._copied(packed, into, base, first)
        elif contiguous:
            self._transposed(packed, contiguous, into, base, first)
        else:
            self._elements(packed, into, base, first)

    def _contiguous(self) -> str:
        """What is contiguous in W's memory: result channels "o", source channels "c", "taps", or both "c, taps".

        It is "" where W has to be packed element by element.
        """
        spec = self.spec
        if not self._operand.vectors or not self.machine.has_masks:
            return ""
        if spec.weight_result_stride == 1:
            return "o"
        if spec.weight_source_stride == 1:
            return "c"
        taps = len(self._offsets)
        of_words = spec.pairs is not None and spec.pairs.weight != 0
        if self._dense and spec.weight_source_stride == taps and not of_words:
            return "c, taps"
        return "taps" if self._dense and taps >= self.lanes // 4 else ""

    def _place(self, tap: Index, channel: Index) -> Index:
        """Where the block of a (tap, channel) pair begins in the panel."""
        return (self._start.at(tap) + channel * self._step.at(tap)) * self.block

    def _copied(self, packed: Buffer, into: Index, base: Index, first: Index) -> None:
        """Vectors of result channels, which are contiguous in W too."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        whole = spec.result_channels % self.block == 0 or self.over_pixels
        with loops.loop(len(self._offsets), "tap") as tap, loops.loop(spec.source_channels, "c") as c:
            start = loops.let(expr(base + self._offset.at(tap) + c * spec.weight_source_stride), "start")
            to = loops.let(expr(into + self._place(tap, c)), "to")
            for j in range(0, self.block, lanes):
                if whole and self.block - j >= lanes:
                    value = self._operand.vector(start + j, lanes, c)
                elif self.over_pixels:
                    value = self._operand.vector(start + j, lanes, c, lanes_below(j, self.block, lanes))
                else:
                    mask = lanes_below(first + j, spec.result_channels, lanes)
                    value = self._operand.vector(start + j, lanes, c, mask)
                self._store(packed, to + j, value, self.block - j)

    def _transposed(self, packed: Buffer, contiguous: str, into: Index, base: Index, first: Index) -> None:
        """Squares of `lanes` result channels x `lanes` elements that are contiguous in W, transposed in registers."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        channels, taps = spec.source_channels, len(self._offsets)
        outer, length = {"c": (taps, channels), "taps": (channels, taps), "c, taps": (1, channels * taps)}[contiguous]
        ragged = spec.result_channels % self.block != 0 and not self.over_pixels
        with loops.loop(outer, "outer") as i, loops.loop(-(-length // lanes), "chunk") as chunk:
            start = base + (self._offset.at(i) if contiguous == "c" else i * spec.weight_source_stride) + chunk * lanes
            start = loops.let(expr(start), "start")
            for j in range(0, self.block, lanes):
                rows = []
                for o in range(j, j + lanes):
                    if o >= self.block:
                        rows.append(zero(spec.dtype, lanes))
                        continue
                    limit: Index = choose(expr(first + o) < spec.result_channels, length, 0) if ragged else length
                    at = start + o * spec.weight_result_stride
                    if not ragged and length % lanes == 0:
                        rows.append(loops.let(self._operand.vector(at, lanes, i), "row"))
                    else:
                        mask = lanes_below(chunk * lanes, limit, lanes)
                        rows.append(loops.let(self._operand.vector(at, lanes, i, mask), "row"))
                for lane, value in enumerate(transpose(loops, rows)):
                    e = loops.let(expr(chunk * lanes + lane), "e")
                    places = {"c": (i, e), "taps": (e, i), "c, taps": (remainder(e, taps), quotient(e, taps))}
                    tap, channel = places[contiguous]
                    if contiguous == "c":
                        place = self._place(tap, channel)
                    else:
                        place = (self._dense_start.at(tap) + channel * self._dense_step.at(tap)) * self.block
                    with where(loops, e < length if length % lanes else None):
                        self._store(packed, into + place + j, value, self.block - j)

    def _store(self, packed: Buffer, at: Index, value: Expr, room: int) -> None:
        """Store a vector, or as many of its lanes as the block has room for."""
        if room >= self.lanes:
            self.loops.store(packed, at, value)
        else:
            self.loops.store_masked(packed, at, value, lanes_below(0, room, self.lanes))

    def _elements(self, packed: Buffer, into: Index, base: Index, first: Index) -> None:
        """Element by element, converted to the type of the sums."""
        loops, spec = self.loops, self.spec
        pads = not self.over_pixels and spec.result_channels % self.block != 0
        with loops.loop(spec.source_channels, "c") as c, loops.loop(len(self._offsets), "tap") as tap:
            start = loops.let(expr(base + self._offset.at(tap) + c * spec.weight_source_stride), "start")
            to = loops.let(expr(into + self._place(tap, c)), "to")
            with loops.loop(self.block, "o") as o:
                value = self._operand.element(start + o * spec.weight_result_stride, c)
                if pads:
                    value = choose(less(first + o, spec.result_channels), value, zero(spec.dtype))
                loops.store(packed, to + o, value)


__all__ = ["WeightPanel"]
