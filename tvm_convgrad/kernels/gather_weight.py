# SPDX-License-Identifier: Apache-2.0
"""The panels of W: for a block of result channels, [phase][tap][source channel][channel of the block].

With pixels as vectors, source channels are outside of taps: the lines that the taps of a channel share are then read
one after the other.
"""

from __future__ import annotations

import itertools
from typing import Any

from tvm_convgrad.kernels.gather_shape import Shape
from tvm_convgrad.kernels.loops import (
    Loops,
    Numbers,
    choose,
    convert,
    expr,
    lanes_below,
    less,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.spec import Gather
from tvm_convgrad.kernels.target import Machine


class WeightPanel:
    """Emits the packing of one block."""

    def __init__(
        self, loops: Loops, gather: Gather, shape: Shape, machine: Machine, over_pixels: bool, weight: Any
    ) -> None:
        self.loops, self.gather, self.shape, self.machine, self.weight = loops, gather, shape, machine, weight
        self.over_pixels, self.lanes = over_pixels, machine.lanes(gather.dtype)
        self.block, channels = shape.block, gather.source_channels
        self.size = shape.tap_count * channels * self.block
        counts = [len(taps) for taps in shape.taps]
        firsts = [0, *itertools.accumulate(counts)]
        self._phase_first = Numbers(loops, "w_first", [first * channels * self.block for first in firsts[:-1]])
        strides = gather.weight.spatial
        flat = [kernel for taps in shape.taps for kernel, _ in taps]
        self._offsets = [sum(k * s for k, s in zip(kernel, strides, strict=True)) for kernel in flat]
        self._offset = Numbers(loops, "w_offset", self._offsets)
        # Where tap and channel go: steps of the first, and of each channel, by the tap's number.
        if over_pixels:
            starts = [first * channels + i for first, count in zip(firsts, counts, strict=False) for i in range(count)]
            steps = [count for count in counts for _ in range(count)]
        else:
            starts, steps = [i * channels for i in range(len(flat))], [1] * len(flat)
        # The same by place in memory, where a kernel's taps lie without gaps.
        self._dense = sorted(self._offsets) == list(range(len(flat))) and bool(flat)
        order = [self._offsets.index(i) for i in range(len(flat))] if self._dense else []
        self._start, self._step = Numbers(loops, "w_to", starts), Numbers(loops, "w_step", steps)
        self._dense_start = Numbers(loops, "w_to_dense", [starts[i] for i in order])
        self._dense_step = Numbers(loops, "w_step_dense", [steps[i] for i in order])

    def of_phase(self, phase: Any) -> Any:
        """Where a phase's part of a block begins."""
        return self._phase_first.at(phase)

    def first_channel(self, block: Any) -> Any:
        """The first result channel of a block; with channels as rows, the last block overlaps the one before it."""
        if self.over_pixels:
            return smaller(block * self.block, self.gather.result_channels - self.block)
        return block * self.block

    def pack(self, packed: Any, into: Any, group: Any, block: Any) -> None:
        """One block; what it has beyond the last result channel is zeros."""
        loops, gather = self.loops, self.gather
        if not self._offsets:
            return
        first = loops.let(expr(self.first_channel(block)), "m0")
        base = loops.let(expr(group * gather.weight_group + first * gather.weight_result), "w_from")
        run = self._run()
        if run == "m":
            self._rows(packed, into, base, first)
        elif run:
            self._turned(packed, run, into, base, first)
        else:
            self._elements(packed, into, base, first)

    def _run(self) -> str:
        """Which of W's elements are neighbours in memory: result channels "m", source channels "c", "taps", or both
        of these "c, taps"; nothing where elements go one by one."""
        gather = self.gather
        if gather.weight.dtype != gather.dtype or not self.machine.has_masks:
            return ""
        if gather.weight_result == 1:
            return "m"
        if gather.weight_source == 1:
            return "c"
        taps = len(self._offsets)
        if self._dense and gather.weight_source == taps:
            return "c, taps"
        return "taps" if self._dense and taps >= self.lanes // 4 else ""

    def _place(self, tap: Any, channel: Any) -> Any:
        return (self._start.at(tap) + channel * self._step.at(tap)) * self.block

    def _rows(self, packed: Any, into: Any, base: Any, first: Any) -> None:
        loops, gather, lanes = self.loops, self.gather, self.lanes
        whole = gather.result_channels % self.block == 0 or self.over_pixels
        with loops.loop(len(self._offsets), "tap") as tap, loops.loop(gather.source_channels, "c") as c:
            start = loops.let(expr(base + self._offset.at(tap) + c * gather.weight_source), "start")
            to = loops.let(expr(into + self._place(tap, c)), "to")
            for j in range(0, self.block, lanes):
                if whole and self.block - j >= lanes:
                    value = load(self.weight, start + j, lanes)
                elif self.over_pixels:
                    value = load_masked(self.weight, start + j, lanes_below(j, self.block, lanes), lanes)
                else:
                    mask = lanes_below(first + j, gather.result_channels, lanes)
                    value = load_masked(self.weight, start + j, mask, lanes)
                self._store(packed, to + j, value, self.block - j)

    def _turned(self, packed: Any, run: str, into: Any, base: Any, first: Any) -> None:
        """Squares of `lanes` result channels x `lanes` neighbours in memory, turned in registers."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        channels, taps = gather.source_channels, len(self._offsets)
        outer, length = {"c": (taps, channels), "taps": (channels, taps), "c, taps": (1, channels * taps)}[run]
        ragged = gather.result_channels % self.block != 0 and not self.over_pixels
        with loops.loop(outer, "outer") as o, loops.loop(-(-length // lanes), "chunk") as chunk:
            start = base + (self._offset.at(o) if run == "c" else o * gather.weight_source) + chunk * lanes
            start = loops.let(expr(start), "start")
            for j in range(0, self.block, lanes):
                rows = []
                for m in range(j, j + lanes):
                    if m >= self.block:
                        rows.append(zero(gather.dtype, lanes))
                        continue
                    limit: Any = choose(expr(first + m) < gather.result_channels, length, 0) if ragged else length
                    at = start + m * gather.weight_result
                    if not ragged and length % lanes == 0:
                        rows.append(loops.let(load(self.weight, at, lanes), "row"))
                    else:
                        mask = lanes_below(chunk * lanes, limit, lanes)
                        rows.append(loops.let(load_masked(self.weight, at, mask, lanes), "row"))
                for i, value in enumerate(transpose(loops, rows)):
                    e = loops.let(expr(chunk * lanes + i), "e")
                    tap, channel = {"c": (o, e), "taps": (e, o), "c, taps": (remainder(e, taps), quotient(e, taps))}[
                        run
                    ]
                    if run == "c":
                        place = self._place(tap, channel)
                    else:
                        place = (self._dense_start.at(tap) + channel * self._dense_step.at(tap)) * self.block
                    if length % lanes == 0:
                        self._store(packed, into + place + j, value, self.block - j)
                        continue
                    with loops.when(e < length):
                        self._store(packed, into + place + j, value, self.block - j)

    def _store(self, packed: Any, at: Any, value: Any, room: int) -> None:
        """Store a vector, or as much of it as the block has room for."""
        if room >= self.lanes:
            self.loops.store(packed, at, value)
        else:
            self.loops.store_masked(packed, at, value, lanes_below(0, room, self.lanes))

    def _elements(self, packed: Any, into: Any, base: Any, first: Any) -> None:
        loops, gather = self.loops, self.gather
        pads = not self.over_pixels and gather.result_channels % self.block != 0
        with loops.loop(gather.source_channels, "c") as c, loops.loop(len(self._offsets), "tap") as tap:
            start = loops.let(expr(base + self._offset.at(tap) + c * gather.weight_source), "start")
            to = loops.let(expr(into + self._place(tap, c)), "to")
            with loops.loop(self.block, "m") as m:
                value = convert(load(self.weight, start + m * gather.weight_result), gather.dtype)
                if pads:
                    value = choose(less(first + m, gather.result_channels), value, zero(gather.dtype))
                loops.store(packed, to + m, value)


__all__ = ["WeightPanel"]
