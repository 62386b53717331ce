# SPDX-License-Identifier: Apache-2.0
"""The bias gradient in the same pass as wgrad: db[o] = sum over pixels of dY[pixel, o], while dY's slab is in cache.

Channels are shared out in blocks among the work items that see the same pixels. A block's sum of a slab runs in four
chains of adders, over neighbouring channels or neighbouring pixels, whichever memory has: a vector of channels has a
chain of its own where there are many, so that whole lines of memory are read. Lanes and parts are added at the end, in
their order.
"""

from __future__ import annotations

from typing import Any

from tvm_convgrad.kernels.loops import Loops, convert, expr, lanes_below, load, load_masked, quotient, remainder, zero
from tvm_convgrad.kernels.spec import View
from tvm_convgrad.kernels.target import Machine

CHAINS = 4
"""Accumulators of a block: as many as cycles of the adder's latency."""

WIDE = 4
"""Blocks that are left at the least where a block has several vectors of channels."""


class BiasSum:
    """Sums of dY [part][channel][lane], and the result.

    Args:
        view, buffer: dY, whose elements are converted to `dtype` as they are read.
        channels: of all groups.
        result: the bias gradient, of `channels` elements.
        accumulate: whether the result holds a summand.
    """

    def __init__(
        self,
        loops: Loops,
        machine: Machine,
        view: View,
        buffer: Any,
        channels: int,
        dtype: str,
        result: Any,
        accumulate: bool,
    ) -> None:
        self.loops, self.view, self.buffer, self.dtype = loops, view, buffer, dtype
        self.channels, self.result, self.accumulate = channels, result, accumulate
        lanes = machine.lanes(dtype) if machine.has_masks and str(buffer.dtype) == dtype else 1
        self.over_channels = lanes > 1 and view.channel == 1
        self.over_pixels = lanes > 1 and not self.over_channels and view.spatial[2] == 1
        self.lanes = lanes if self.over_channels or self.over_pixels else 1
        vectors = next(n for n in (4, 2, 1) if n == 1 or channels >= n * WIDE * lanes)
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

    def add(self, part: Any, share: Any, shares: int, slab: tuple[Any, Any, Any, Any], depth: int) -> None:
        """The share-th of `shares` items adds its blocks of a slab: (plane, planes, line, lines)."""
        loops, view, lanes = self.loops, self.view, self.lanes
        plane, planes, line, lines = slab
        with loops.loop(quotient(self.blocks - 1 - share + shares, shares), "turn") as turn:
            channel = loops.let((turn * shares + share) * self.block, "channel")
            at = loops.let(part * self.size + channel * (lanes if self.over_pixels else 1), "bias_at")
            chains = [loops.buffer("chain", lanes, self.dtype) for _ in range(CHAINS)]
            for chain in chains:
                loops.store(chain, 0, zero(self.dtype, lanes))
            with loops.loop(planes, "p") as p, loops.loop(lines, "l") as line_number:
                number = loops.let(plane + p, "number")
                base = quotient(number, depth) * view.batch + remainder(number, depth) * view.spatial[0]
                base = base + (line + line_number) * view.spatial[1] + channel * view.channel
                self._chain(chains, loops.let(expr(base), "from"), channel)
            for vector in range(self.vectors):
                value = load(chains[vector], 0, lanes)
                for chain in chains[vector + self.vectors :: self.vectors]:
                    value = value + load(chain, 0, lanes)
                to = at + vector * lanes
                if self.over_channels:
                    mask = self._mask(channel, vector)
                    loops.store_masked(self.sums, to, load_masked(self.sums, to, mask, lanes) + value, mask)
                else:
                    loops.store(self.sums, to, load(self.sums, to, lanes) + value)

    def _mask(self, channel: Any, vector: int) -> Any:
        """Of the channels that a vector of a block has."""
        return lanes_below(channel + vector * self.lanes, self.channels, self.lanes)

    def _chain(self, chains: list[Any], base: Any, channel: Any) -> None:
        """Add a line's pixels to the chains in turn; neighbouring vectors of a pixel go to neighbouring chains."""
        loops, view, lanes = self.loops, self.view, self.lanes
        pixels = view.extents[2]
        step = lanes if self.over_pixels else view.spatial[2]
        count = -(-pixels // lanes) if self.over_pixels else pixels
        at_once = CHAINS // self.vectors

        def add(index: Any, number: int) -> None:
            for vector in range(self.vectors):
                chain, at = chains[number * self.vectors + vector], base + index * step + vector * lanes
                if self.over_channels:
                    value = load_masked(self.buffer, at, self._mask(channel, vector), lanes)
                elif self.over_pixels:
                    value = load_masked(self.buffer, at, lanes_below(index * lanes, pixels, lanes), lanes)
                else:
                    value = convert(load(self.buffer, at), self.dtype)
                loops.store(chain, 0, load(chain, 0, lanes) + value)

        with loops.loop(count // at_once, "x") as x:
            for number in range(at_once):
                add(x * at_once + number, number)
        for number in range(count % at_once):
            add(count - count % at_once + number, number)

    def write(self) -> None:
        """Lanes and parts added in their order."""
        loops = self.loops
        per_channel = self.size // self.channels
        with loops.loop(self.channels, "c") as c:
            total = loops.buffer("total", 1, self.dtype)
            loops.store(total, 0, zero(self.dtype))
            with loops.loop(self.parts, "part") as part, loops.loop(per_channel, "lane") as lane:
                at = part * self.size + c * per_channel + lane
                loops.store(total, 0, load(total, 0) + load(self.sums, at))
            value = load(total, 0)
            loops.store(self.result, c, convert(load(self.result, c), self.dtype) + value if self.accumulate else value)


__all__ = ["BiasSum"]
