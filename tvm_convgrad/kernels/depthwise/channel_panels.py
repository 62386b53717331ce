# SPDX-License-Identifier: Apache-2.0
"""Packing for vectors of channels: pixels between tensors and panels [row][column][lane], and W into its panel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm_convgrad.codegen.dot_product import as_number
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    Loops,
    expr,
    lanes_below,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
)
from tvm_convgrad.codegen.packing import shuffle, transpose
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.spec import View, WeightView
from tvm_convgrad.kernels.vectors import Numbers, moves_vectors, where
from tvm_convgrad.kernels.wgrad.spec import tap_offsets

Finish: TypeAlias = "Callable[[Expr, Callable[[], Expr], Index, Expr | None], Expr]"
"""(values, before, channel, mask) to the values to store: `before` reads what the tensor holds; `channel` is that of
all values, or of the first where they are of contiguous channels: then there is a mask of those that exist."""


@dataclass(frozen=True)
class ChannelMap:
    """Where W has the channels of the lanes: in groups of `each` channels, `step` elements from one to the next.

    Channel c and multiple m are at c // each * step + c % each * within + m * inner.
    """

    channels: int
    multiple: int
    step: int
    inner: int
    each: int = 1
    within: int = 0

    def at(self, channel: Index) -> Index:
        """Where W has a channel's first multiple; the last channel's for those past it."""
        channel = smaller(channel, self.channels - 1)
        return quotient(channel, self.each) * self.step + remainder(channel, self.each) * self.within


def repeat_member(value: Expr, member: int, each: int, lanes: int) -> Expr:
    """A vector of groups of `each` channels, in which a member of each group stands in all places of its group."""
    return shuffle(value, value, [lane // each * each + member for lane in range(lanes)])


class PanelMover:
    """Moves whole rows of `lanes` channels between one depth slice of a tensor and a panel [row][column][lane].

    Attributes:
        step: elements from a lane's channel to the next.
        kind: "transposed" (squares of pixels x channels are transposed in registers), "vectors" (channels are
            contiguous) or "elements".
    """

    def __init__(self, loops: Loops, machine: Machine, tensor: Numbers, view: View, channels: int, step: int) -> None:
        self.loops, self.tensor, self.view, dtype = loops, tensor, view, tensor.dtype
        self.channels, self.step, self.lanes = channels, step, machine.lanes(dtype)
        self._line = self.lanes * DTYPE_BYTES[dtype] // DTYPE_BYTES[view.dtype]
        self.ragged = channels % self.lanes != 0
        _, height, width = view.extents
        joined = height == 1 or view.spatial[1] == width * view.spatial[2]
        self.kind = "elements"
        if moves_vectors(machine, view.dtype, dtype):
            if step == 1:
                self.kind = "vectors"
            elif view.spatial[2] == 1 and joined:
                self.kind = "transposed"

    def room(self, rows: int) -> int:
        """Elements of a panel of so many rows; whole squares are written."""
        return (-(-rows * self.view.extents[2] // self.lanes) + 1) * self.lanes * self.lanes

    def prefetch(self, base: Index, first: Index, row: Index, rows: Index, write: bool = False) -> None:
        """Prefetch what pack or unpack will touch: hardware prefetchers do not follow so many streams at once."""
        if self.kind != "transposed":
            return
        loops, line = self.loops, self._line
        base = loops.let(expr(base + row * self.view.spatial[1] + first * self.step), "slice")
        with loops.loop(self.lanes, "c") as c:
            at = loops.let(expr(base + c * self.step), "channel_at")
            with loops.loop(quotient(expr(rows * self.view.extents[2] + (line - 1)), line), "line") as number:
                loops.prefetch(self.tensor.buffer, at + number * line, write, near=True)

    def pack(self, base: Index, first: Index, row: Index, rows: Index, panel: Buffer, into: Index) -> None:
        """Pack rows `row` to `row + rows`, channels from `first` on; lanes past the last channel hold anything."""
        loops, lanes, width = self.loops, self.lanes, self.view.extents[2]
        base = loops.let(expr(base + row * self.view.spatial[1]), "slice")
        if self.kind == "transposed":
            pixels = loops.let(expr(rows * width), "pixels")
            with loops.loop(quotient(pixels + (lanes - 1), lanes), "square") as square:
                at = loops.let(expr(base + square * lanes), "at")
                mask = lanes_below(square * lanes, pixels, lanes)
                values = [
                    loops.let(self.tensor.load(at + self._channel(first, c) * self.step, lanes, mask), "row")
                    for c in range(lanes)
                ]
                to = loops.let(expr(into + square * (lanes * lanes)), "to")
                for i, value in enumerate(transpose(loops, values)):
                    loops.store(panel, to + i * lanes, value)
            return
        with loops.loop(rows, "h") as h, loops.loop(width, "w") as w:
            at = loops.let(expr(base + h * self.view.spatial[1] + w * self.view.spatial[2]), "at")
            to = loops.let(expr(into + (h * width + w) * lanes), "to")
            if self.kind == "vectors":
                mask = lanes_below(first, self.channels, lanes)
                loops.store(panel, to, self.tensor.load(at + first, lanes, mask))
                return
            with loops.loop(lanes, "c") as c:
                loops.store(panel, to + c, self.tensor.load(at + self._channel(first, c) * self.step))

    def unpack(self, base: Index, first: Index, row: Index, rows: Index, panel: Buffer, finish: Finish) -> None:
        """Store rows `row` to `row + rows` of the tensor from the panel's start, each value as `finish` returns it."""
        loops, lanes, width = self.loops, self.lanes, self.view.extents[2]
        base = loops.let(expr(base + row * self.view.spatial[1]), "slice")
        if self.kind == "transposed":
            pixels = loops.let(expr(rows * width), "pixels")
            with loops.loop(quotient(pixels + (lanes - 1), lanes), "square") as square:
                values = [loops.let(load(panel, (square * lanes + i) * lanes, lanes), "row") for i in range(lanes)]
                at = loops.let(expr(base + square * lanes), "at")
                mask = lanes_below(square * lanes, pixels, lanes)
                for c, value in enumerate(transpose(loops, values)):
                    to = at + (first + c) * self.step
                    before = functools.partial(self.tensor.load, to, lanes, mask)
                    value = finish(value, before, first + c, None)
                    with where(loops, expr(first + c) < self.channels if self.ragged else None):
                        self.tensor.store(to, value, mask)
            return
        with loops.loop(rows, "h") as h, loops.loop(width, "w") as w:
            at = loops.let(expr(base + h * self.view.spatial[1] + w * self.view.spatial[2]), "at")
            source = loops.let(expr((h * width + w) * lanes), "source")
            if self.kind == "vectors":
                mask = lanes_below(first, self.channels, lanes)
                value = load(panel, source, lanes)
                value = finish(value, lambda: self.tensor.load(at + first, lanes, mask), first, mask)
                self.tensor.store(at + first, value, mask)
                return
            with loops.loop(smaller(self.channels - first, lanes), "c") as c:
                to = at + (first + c) * self.step
                value = load(panel, source + c)
                value = finish(value, lambda: self.tensor.load(to), first + c, None)
                self.tensor.store(to, value)

    def _channel(self, first: Index, c: Index) -> Index:
        """A channel to read: the last one again in the place of those past it."""
        return smaller(first + c, self.channels - 1) if self.ragged else first + c


def pack_weights(
    loops: Loops,
    machine: Machine,
    weight: Buffer,
    view: WeightView,
    kernel: tuple[int, ...],
    dtype: str,
    channels: ChannelMap,
) -> Buffer:
    """W as [block][multiple][tap][lane], taps in the order of the kernel's axes; lanes past the last hold anything."""
    lanes = machine.lanes(dtype)
    taps = tap_offsets(kernel, view)
    count = len(taps)
    blocks = -(-channels.channels // lanes)
    packed = loops.panel("w_panel", (blocks * channels.multiple * count + lanes) * lanes, dtype)
    transposes = moves_vectors(machine, view.dtype, dtype) and taps == list(range(count))
    table = None if transposes else loops.table("w_taps", taps)
    with loops.loop(blocks, "b") as b, loops.loop(channels.multiple, "m") as m:
        into = loops.let(expr((b * channels.multiple + m) * (count * lanes)), "into")
        base = loops.let(expr(m * channels.inner), "w_from")
        if transposes:
            with loops.loop(-(-count // lanes), "square") as square:
                mask = lanes_below(square * lanes, count, lanes)
                starts = [base + channels.at(b * lanes + c) + square * lanes for c in range(lanes)]
                rows = [loops.let(as_number(load_masked(weight, start, mask, lanes), dtype), "row") for start in starts]
                for i, value in enumerate(transpose(loops, rows)):
                    loops.store(packed, into + (square * lanes + i) * lanes, value)
        else:
            with loops.loop(count, "tap") as tap, loops.loop(lanes, "c") as c:
                value = load(weight, base + channels.at(b * lanes + c) + load(table, tap))
                loops.store(packed, into + tap * lanes + c, as_number(value, dtype))
    return packed


__all__ = ["ChannelMap", "PanelMover", "pack_weights", "repeat_member"]
