# SPDX-License-Identifier: Apache-2.0
"""The bias gradient in the same pass as wgrad: db[o] = sum over pixels of dY[pixel, o], while dY's slab is in cache.

The work items that read the same pixels share the channels in blocks. The sum of a block over a slab runs in four
chains of additions, with vectors over channels or over pixels, whichever is contiguous; where there are many channels
a block has several vectors of them, each with a chain of its own, so that whole cache lines are read. Lanes and parts
are added at the end, in their order.
"""

from __future__ import annotations

from tvm_convgrad.codegen.dot_product import HALF, as_number
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, expr, lanes_below, load, quotient, remainder, zero
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.spec import View
from tvm_convgrad.kernels.vectors import (
    GradientStore,
    accumulate,
    accumulators,
    load_vector,
    moves_vectors,
    store_vector,
)

CHAINS = 4
"""Accumulators of a block: as many as cycles of the adder's latency."""

MIN_BLOCKS = 4
"""Blocks of channels that remain at the least where a block has several vectors."""


class BiasGradient:
    """The sums of dY as [part][channel][lane], and their store.

    Args:
        frame: has dY, whose elements are converted to `dtype` as they are read, and the bias gradient.
        view: of dY.
        dtype: of sums.
        channels: of all groups.
    """

    def __init__(self, frame: KernelFrame, machine: Machine, view: View, dtype: str, channels: int) -> None:
        self.loops, self.view, self.buffer = frame.loops, view, frame.tensors[0]
        self.dtype, self.channels = dtype, channels
        self.result = GradientStore(frame.loops, frame.bias, dtype, frame.epilogue.bias_accumulate)
        plain = view.dtype != "bfloat16" or str(self.buffer.dtype) == HALF
        lanes = machine.lanes(dtype) if plain and moves_vectors(machine, view.dtype, dtype) else 1
        self.over_channels = lanes > 1 and view.channel == 1
        self.over_pixels = lanes > 1 and not self.over_channels and view.spatial[2] == 1
        self.lanes = lanes if self.over_channels or self.over_pixels else 1
        vectors = next(n for n in (4, 2, 1) if n == 1 or channels >= n * MIN_BLOCKS * lanes)
        self.vectors = vectors if self.over_channels else 1
        self.block = self.vectors * self.lanes if self.over_channels else 1  # channels that are summed at once
        self.blocks = -(-channels // self.block)
        self.size = channels * (self.lanes if self.over_pixels else 1)

    def allocate(self, parts: int) -> None:
        """Room for the sums of all parts; they begin as zeros, so that a part without pixels adds nothing."""
        loops = self.loops
        self.parts = parts
        self.sums = loops.buffer("bias_sums", parts * self.size, self.dtype)
        with loops.loop(parts * self.size, "i") as i:
            loops.store(self.sums, i, zero(self.dtype))

    def add(self, part: Index, share: Index, shares: int, slab: tuple[Index, ...], depth: int) -> None:
        """Add one of `shares` shares of the blocks of a slab: (first depth slice, slices, first row, rows) of dY.

        Args:
            depth: slices of an image; the first slice is numbered through all images.
        """
        loops, view, lanes = self.loops, self.view, self.lanes
        first_slice, slices, first_row, rows = slab
        with loops.loop(quotient(self.blocks - 1 - share + shares, shares), "block") as block:
            channel = loops.let((block * shares + share) * self.block, "channel")
            at = loops.let(part * self.size + channel * (lanes if self.over_pixels else 1), "bias_at")
            chains = list(accumulators(loops, range(CHAINS), lanes, self.dtype, "chain").values())
            with loops.loop(slices, "d") as d, loops.loop(rows, "h") as h:
                number = loops.let(first_slice + d, "number")
                base = quotient(number, depth) * view.batch + remainder(number, depth) * view.spatial[0]
                base = base + (first_row + h) * view.spatial[1] + channel * view.channel
                self._add_row(chains, loops.let(expr(base), "from"), channel)
            for vector in range(self.vectors):
                value = load(chains[vector], 0, lanes)
                for chain in chains[vector + self.vectors :: self.vectors]:
                    value = value + load(chain, 0, lanes)
                to = at + vector * lanes
                mask = self._mask(channel, vector) if self.over_channels else None
                store_vector(loops, self.sums, to, load_vector(self.sums, to, lanes, mask) + value, mask)

    def _mask(self, channel: Index, vector: int) -> Expr:
        """The mask of the channels that a vector of a block has."""
        return lanes_below(channel + vector * self.lanes, self.channels, self.lanes)

    def _add_row(self, chains: list[Buffer], base: Index, channel: Index) -> None:
        """Add a row's pixels to the chains in turn; consecutive vectors of a pixel go to consecutive chains."""
        loops, view, lanes = self.loops, self.view, self.lanes
        pixels = view.extents[2]
        step = lanes if self.over_pixels else view.spatial[2]
        count = -(-pixels // lanes) if self.over_pixels else pixels
        at_once = CHAINS // self.vectors

        def add(index: Index, turn: int) -> None:
            for vector in range(self.vectors):
                chain, at = chains[turn * self.vectors + vector], base + index * step + vector * lanes
                mask = None
                if self.over_channels:
                    mask = self._mask(channel, vector)
                elif self.over_pixels:
                    mask = lanes_below(index * lanes, pixels, lanes)
                accumulate(loops, chain, as_number(load_vector(self.buffer, at, lanes, mask), self.dtype))

        with loops.loop(count // at_once, "w") as w:
            for turn in range(at_once):
                add(w * at_once + turn, turn)
        for turn in range(count % at_once):
            add(count - count % at_once + turn, turn)

    def write(self) -> None:
        """Add lanes and parts in their order, and store the result."""
        loops = self.loops
        per_channel = self.size // self.channels
        with loops.loop(self.channels, "c") as c:
            total = loops.buffer("total", 1, self.dtype)
            loops.store(total, 0, zero(self.dtype))
            with loops.loop(self.parts, "part") as part, loops.loop(per_channel, "lane") as lane:
                at = part * self.size + c * per_channel + lane
                loops.store(total, 0, load(total, 0) + load(self.sums, at))
            self.result.store(c, load(total, 0))


def bias_gradient(frame: KernelFrame, machine: Machine, view: View, dtype: str, channels: int) -> BiasGradient | None:
    """What sums the bias gradient where it is fused; see `BiasGradient`."""
    return None if frame.bias is None else BiasGradient(frame, machine, view, dtype, channels)


__all__ = ["BiasGradient", "bias_gradient"]
