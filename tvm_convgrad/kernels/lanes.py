# SPDX-License-Identifier: Apache-2.0
"""Depthwise kernels run vectors over channels: moves pixels between tensors and panels [row][column][lanes]."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.kernels.loops import (
    Loops,
    convert,
    expr,
    lanes_below,
    larger,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
)
from tvm_convgrad.kernels.packing import shuffle, transpose
from tvm_convgrad.kernels.spec import View, WeightView
from tvm_convgrad.kernels.target import Machine

Taps = tuple[tuple[int, int], ...]


def run_of_taps(taps: Taps) -> tuple[int, int, int, int]:
    """(first kernel index, its step, first offset, its step) of taps in ascending order of their offsets."""
    ordered = sorted(taps, key=lambda tap: tap[1])
    (k, offset), (k_next, offset_next) = ordered[0], ordered[min(1, len(ordered) - 1)]
    return k, k_next - k, offset, max(1, offset_next - offset)


def valid_taps(loops: Loops, taps: Taps, positions: int, step: int, extent: int, q: Any) -> tuple[Any, Any]:
    """(first, count) of the taps, in ascending order, with 0 <= q * step + offset < extent."""
    if not taps:
        return 0, 0
    count = len(taps)
    _, _, low, pace = run_of_taps(taps)
    if low >= 0 and (positions - 1) * step + low + (count - 1) * pace < extent:
        return 0, count
    place = q * step + low
    if isinstance(place, int):
        inside = [t for t in range(count) if 0 <= place + t * pace < extent]
        return (inside[0], len(inside)) if inside else (0, 0)
    place = loops.let(expr(place), "place")
    first = loops.let(quotient(larger(pace - 1 - place, 0), pace), "first_tap")
    end = smaller(quotient(larger(extent + pace - 1 - place, 0), pace), count)
    return first, loops.let(larger(end - first, 0), "tap_count")


def channels_at(buffer: Any, place: Any, mask: Any, lanes: int, dtype: str) -> Any:
    """A vector of neighbouring channels as `dtype`; with a mask, only its lanes of a buffer of that type."""
    if mask is None:
        return convert(load(buffer, place, lanes), dtype)
    return load_masked(buffer, place, mask, lanes)


def pieces_of(
    count: int, limit: int, taps: Taps, step: int, extent: int
) -> list[tuple[int, int, int, list[list[int]]]]:
    """The positions of a line in pieces of at most `limit`: (first, size, repeats, pixels that meet each tap).

    Neighbouring pieces that meet their taps alike are one entry, with repeats > 1.
    """
    size = -(-count // -(-count // limit))
    ordered = sorted(taps, key=lambda tap: tap[1])
    pieces: list[tuple[int, int, int, list[list[int]]]] = []
    for first in range(0, count, size):
        width = min(size, count - first)
        met = [[i for i in range(width) if 0 <= (first + i) * step + offset < extent] for _, offset in ordered]
        if pieces and pieces[-1][1] == width and pieces[-1][3] == met:
            begin, _, repeats, _ = pieces[-1]
            pieces[-1] = (begin, width, repeats + 1, met)
        else:
            pieces.append((first, width, 1, met))
    return pieces


@dataclass(frozen=True)
class Spread:
    """Where W has the channels of the lanes, `each` neighbours a group, `step` elements from group to group.

    Channel c and multiple m are at c // each * step + c % each * within + m * inner.
    """

    channels: int
    multiple: int
    step: int
    inner: int
    each: int = 1
    within: int = 0

    def at(self, channel: Any) -> Any:
        """Where W has a channel's first multiple; the last channel's for those past it."""
        channel = smaller(channel, self.channels - 1)
        return quotient(channel, self.each) * self.step + remainder(channel, self.each) * self.within


def repeated(value: Any, member: int, each: int, lanes: int) -> Any:
    """A vector of whole groups' channels with a member of each group in the places of all of the group's `each`."""
    return shuffle(value, value, [lane // each * each + member for lane in range(lanes)])


class Mover:
    """Moves a run of whole lines of `lanes` channels between one plane of a tensor and a panel.

    Attributes:
        step: elements from a lane's channel to the next.
        kind: "turn" (squares of pixels x channels, transposed in registers), "vectors" (channels are neighbours) or
            "elements".
    """

    def __init__(
        self, loops: Loops, machine: Machine, buffer: Any, view: View, dtype: str, channels: int, step: int
    ) -> None:
        self.loops, self.buffer, self.view, self.dtype = loops, buffer, view, dtype
        self.channels, self.step, self.lanes = channels, step, machine.lanes(dtype)
        self.ragged = channels % self.lanes != 0
        _, height, width = view.extents
        joined = height == 1 or view.spatial[1] == width * view.spatial[2]
        self.kind = "elements"
        if machine.has_masks and view.dtype == dtype:
            if step == 1:
                self.kind = "vectors"
            elif view.spatial[2] == 1 and joined:
                self.kind = "turn"

    def room(self, rows: int) -> int:
        """Elements of a panel of `rows` lines; whole squares are written."""
        return (-(-rows * self.view.extents[2] // self.lanes) + 1) * self.lanes * self.lanes

    def prefetch(self, base: Any, first: Any, row: Any, rows: Any, write: bool = False) -> None:
        """Ask for what pack or unpack will touch: many streams at once are beyond what hardware foresees."""
        if self.kind != "turn":
            return
        loops, line = self.loops, self.lanes
        base = loops.let(expr(base + row * self.view.spatial[1] + first * self.step), "plane")
        with loops.loop(self.lanes, "c") as c:
            at = loops.let(expr(base + c * self.step), "ahead")
            with loops.loop(quotient(expr(rows * self.view.extents[2] + (line - 1)), line), "line") as number:
                loops.prefetch(self.buffer, at + number * line, write, near=True)

    def pack(self, base: Any, first: Any, row: Any, rows: Any, panel: Any, into: Any) -> None:
        """Lines row .. row + rows of the channels from `first` on; lanes past the last channel hold anything."""
        loops, lanes, width = self.loops, self.lanes, self.view.extents[2]
        base = loops.let(expr(base + row * self.view.spatial[1]), "plane")
        if self.kind == "turn":
            pixels = rows * width
            pixels = loops.let(expr(pixels), "pixels")
            with loops.loop(quotient(pixels + (lanes - 1), lanes), "chunk") as chunk:
                at = loops.let(expr(base + chunk * lanes), "at")
                mask = lanes_below(chunk * lanes, pixels, lanes)
                lines = [
                    loops.let(load_masked(self.buffer, at + self._channel(first, c) * self.step, mask, lanes), "row")
                    for c in range(lanes)
                ]
                to = loops.let(expr(into + chunk * (lanes * lanes)), "to")
                for i, value in enumerate(transpose(loops, lines)):
                    loops.store(panel, to + i * lanes, value)
            return
        with loops.loop(rows, "r") as r, loops.loop(width, "x") as x:
            at = loops.let(expr(base + r * self.view.spatial[1] + x * self.view.spatial[2]), "at")
            to = loops.let(expr(into + (r * width + x) * lanes), "to")
            if self.kind == "vectors":
                mask = lanes_below(first, self.channels, lanes)
                loops.store(panel, to, load_masked(self.buffer, at + first, mask, lanes))
                return
            with loops.loop(lanes, "c") as c:
                value = load(self.buffer, at + self._channel(first, c) * self.step)
                loops.store(panel, to + c, convert(value, self.dtype))

    def unpack(self, base: Any, first: Any, row: Any, rows: Any, panel: Any, finish: Any) -> None:
        """Lines row .. row + rows of the tensor from the panel's start; `finish` says what is stored.

        finish(values, before, channel, mask): `before` gives what the tensor holds; `channel` is that of all values, or
        of the first where they are of neighbouring channels: then there is a mask of those that exist.
        """
        loops, lanes, width = self.loops, self.lanes, self.view.extents[2]
        base = loops.let(expr(base + row * self.view.spatial[1]), "plane")
        if self.kind == "turn":
            pixels = loops.let(expr(rows * width), "pixels")
            with loops.loop(quotient(pixels + (lanes - 1), lanes), "chunk") as chunk:
                lines = [loops.let(load(panel, (chunk * lanes + i) * lanes, lanes), "row") for i in range(lanes)]
                at = loops.let(expr(base + chunk * lanes), "at")
                mask = lanes_below(chunk * lanes, pixels, lanes)
                for c, value in enumerate(transpose(loops, lines)):
                    to = at + (first + c) * self.step
                    value = finish(value, lambda to=to: load_masked(self.buffer, to, mask, lanes), first + c, None)
                    if not self.ragged:
                        loops.store_masked(self.buffer, to, value, mask)
                        continue
                    with loops.when(expr(first + c) < self.channels):
                        loops.store_masked(self.buffer, to, value, mask)
            return
        with loops.loop(rows, "r") as r, loops.loop(width, "x") as x:
            at = loops.let(expr(base + r * self.view.spatial[1] + x * self.view.spatial[2]), "at")
            source = loops.let(expr((r * width + x) * lanes), "source")
            if self.kind == "vectors":
                mask = lanes_below(first, self.channels, lanes)
                value = load(panel, source, lanes)
                value = finish(value, lambda: load_masked(self.buffer, at + first, mask, lanes), first, mask)
                loops.store_masked(self.buffer, at + first, value, mask)
                return
            with loops.loop(smaller(self.channels - first, lanes), "c") as c:
                to = at + (first + c) * self.step
                value = load(panel, source + c)
                value = finish(value, lambda: convert(load(self.buffer, to), self.dtype), first + c, None)
                loops.store(self.buffer, to, value)

    def _channel(self, first: Any, c: Any) -> Any:
        """A channel to read: the last one again in the place of those past it."""
        return smaller(first + c, self.channels - 1) if self.ragged else first + c


def pack_weights(
    loops: Loops, machine: Machine, weight: Any, view: WeightView, kernel: tuple[int, ...], dtype: str, spread: Spread
) -> Any:
    """W as [block][multiple][tap][lanes], taps in the order of the kernel's axes; lanes past the last hold anything."""
    lanes = machine.lanes(dtype)
    taps = [
        sum(k * s for k, s in zip(tap, view.spatial, strict=True)) for tap in itertools.product(*map(range, kernel))
    ]
    count = len(taps)
    blocks = -(-spread.channels // lanes)
    packed = loops.panel("w_panel", (blocks * spread.multiple * count + lanes) * lanes, dtype)
    turns = machine.has_masks and view.dtype == dtype and taps == list(range(count))
    table = None if turns else loops.table("w_taps", taps)
    with loops.loop(blocks, "b") as b, loops.loop(spread.multiple, "m") as m:
        into = loops.let(expr((b * spread.multiple + m) * (count * lanes)), "into")
        base = loops.let(expr(m * spread.inner), "w_from")
        if turns:
            with loops.loop(-(-count // lanes), "chunk") as chunk:
                mask = lanes_below(chunk * lanes, count, lanes)
                rows = [
                    loops.let(
                        load_masked(weight, base + spread.at(b * lanes + c) + chunk * lanes, mask, lanes),
                        "row",
                    )
                    for c in range(lanes)
                ]
                for i, value in enumerate(transpose(loops, rows)):
                    loops.store(packed, into + (chunk * lanes + i) * lanes, value)
        else:
            with loops.loop(count, "tap") as tap, loops.loop(lanes, "c") as c:
                value = load(weight, base + spread.at(b * lanes + c) + load(table, tap))
                loops.store(packed, into + tap * lanes + c, convert(value, dtype))
    return packed


__all__ = ["Mover", "Spread", "pack_weights", "pieces_of", "repeated", "run_of_taps", "valid_taps"]
