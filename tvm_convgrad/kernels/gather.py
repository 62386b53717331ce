# SPDX-License-Identifier: Apache-2.0
"""Implicit GEMM of forward and dgrad (a `Gather`): out[m, px] = sum over (tap, c) of W[m, (tap, c)] * S[(tap, c), px].

W is packed once per call, the source once per slab of result lines, into panels without borders (padding is zeros in
the panel). Two orientations of the register tile:

- "pixels": vectors run over pixels (results with contiguous pixels, NCHW): rows are result channels;
- "channels": vectors run over result channels (NHWC): rows are pixels.

Taps of the height axis share lines ("shift") with those a multiple of the step away: the panel has a few more lines,
and a tap starts some lines further down. All other taps have copies of their own, so that pixels of neighbouring lines
are neighbours in the panel, and a vector may run over the end of a line.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.loops import (
    PARALLEL_FROM,
    Loops,
    Numbers,
    choose,
    convert,
    expr,
    lanes_below,
    lanes_within,
    less,
    load,
    load_masked,
    make_parameter,
    quotient,
    remainder,
    smaller,
    within,
    zero,
)
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.spec import Gather, Phase
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile


@dataclass(frozen=True)
class GatherTiling:
    """How a class of phases is cut.

    Attributes:
        orientation: "pixels" or "channels".
        rows, columns: of the register tile; columns count vectors.
        lines: result lines of a slab; divides the lines it is cut from.
        shift: whether the height axis shares lines.
        splits: pieces of the result channels that are separate work items.
    """

    orientation: str
    rows: int
    columns: int
    lines: int
    shift: bool
    splits: int


def gather_kernel(
    gather: Gather,
    tilings: tuple[GatherTiling, ...],
    machine: Machine,
    name: str,
    shapes: dict[str, tuple[tuple[Any, ...], str]],
) -> Any:
    """The PrimFunc (source, weight, result); `shapes` gives the parameters' own shapes and types by those names."""
    loops = Loops()
    parameters = [make_parameter(key, *shapes[key]) for key in ("source", "weight", "result")]
    sizes = (gather.source.size, gather.weight.size, gather.result.size)
    source, weight, result = (loops.flat(p, size) for p, size in zip(parameters, sizes, strict=True))
    for phases, tiling in zip(gather.phases, tilings, strict=True):
        _Group(loops, gather, phases, tiling, machine, source, weight, result).emit()
    return loops.finish(parameters, name)


class _Group:
    """The loops of one group of phases; what differs among its phases is looked up in tables."""

    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        phases: tuple[Phase, ...],
        tiling: GatherTiling,
        machine: Machine,
        source: Any,
        weight: Any,
        result: Any,
    ) -> None:
        self.loops, self.gather, self.phases, self.tiling, self.machine = loops, gather, phases, tiling, machine
        self.source, self.weight, self.result = source, weight, result
        self.dtype = gather.dtype
        self.lanes = machine.lanes(self.dtype)
        self.counts = tuple(axis.count for axis in phases[0])
        self.over_pixels = tiling.orientation == "pixels"
        self.taps = [list(itertools.product(*(axis.taps for axis in phase))) for phase in phases]
        macs = gather.batch * gather.groups * gather.result_channels * gather.source_channels * math.prod(self.counts)
        self.kind = "parallel" if macs * sum(map(len, self.taps)) >= PARALLEL_FROM else "serial"
        if self.over_pixels:
            self.block, self.width = tiling.rows, tiling.columns * self.lanes
        else:
            self.block = self.width = tiling.columns * self.lanes
        self.blocks = -(-gather.result_channels // self.block)
        self.pixels = tiling.lines * self.counts[2]
        self._lay_out_panel()

    def _lay_out_panel(self) -> None:
        """Where the source's panel has what: copies of the slab, and the place in them where each tap starts."""
        gather, tiling = self.gather, self.tiling
        channels = gather.source_channels
        step = gather.in_step[1]
        heights = [[offset // step for _, (_, offset), _ in taps] or [0] for taps in self.taps]
        self.extra = [max(h) - min(h) if tiling.shift else 0 for h in heights]
        lines = tiling.lines + max(self.extra)
        capacity = lines * self.counts[2] + (self.width if self.over_pixels else 0) + self.lanes
        padded = -(-channels // self.lanes) * self.lanes
        # elements from one pixel, and from one channel, to the next
        self.pitch, self.channel_step = (1, capacity) if self.over_pixels else (padded, 1)
        self.copy_size = capacity * (channels if self.over_pixels else padded)
        self.copies: list[list[tuple[int, int, int]]] = []
        self.starts: list[list[int]] = []
        for taps, height in zip(self.taps, heights, strict=True):
            offsets = [(d, h, w) for (_, d), (_, h), (_, w) in taps]
            low = min(height)
            # Taps a multiple of the step apart share lines: a copy for each residue.
            keys = [(d, low * step + h % step if tiling.shift else h, w) for d, h, w in offsets]
            copies = sorted(set(keys))
            moved = [(h // step - low if tiling.shift else 0) * self.counts[2] * self.pitch for _, h, _ in offsets]
            self.copies.append(copies)
            self.starts.append([copies.index(k) * self.copy_size + m for k, m in zip(keys, moved, strict=True)])
        self.panel_size = self.copy_size * max(1, max(map(len, self.copies)))

    # -- all ----------------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Pack W, then the work items."""
        gather, loops, tiling = self.gather, self.loops, self.tiling
        self._emit_tables()
        count = len(self.phases)
        step_size = gather.source_channels * self.block
        group_blocks = gather.groups * self.blocks
        packed = loops.buffer("w_panels", max(1, self.tap_first[-1] * step_size * group_blocks), self.dtype)
        with loops.loop(count * group_blocks, "block", self.kind) as item:
            phase, rest = loops.let(remainder(item, count), "phase"), loops.let(quotient(item, count), "rest")
            self._pack_weight(packed, phase, rest, self._panel_of(phase, rest))
        slabs = self._slabs()
        per_split = -(-self.blocks // tiling.splits)
        splits = -(-self.blocks // per_split)
        with loops.loop(count * gather.groups * slabs * splits, "item", self.kind) as item:
            split, rest = remainder(item, splits), quotient(item, splits)
            phase, rest = loops.let(remainder(rest, count), "phase"), quotient(rest, count)
            slab, group = loops.let(remainder(rest, slabs), "slab"), loops.let(quotient(rest, slabs), "group")
            panel = loops.buffer("s_panel", self.panel_size, self.dtype)
            self._pack_source(panel, slab, group, phase)
            first = loops.let(split * per_split, "first_block")
            blocks = loops.let(smaller(self.blocks - first, per_split), "blocks")
            scratch = loops.buffer("scratch", tiling.rows * tiling.columns * self.lanes, self.dtype)
            with loops.loop(blocks, "b") as b:
                block = loops.let(first + b, "block")
                weights = loops.let(self._panel_of(phase, group * self.blocks + block), "w_at")
                step = self.width if self.over_pixels else tiling.rows
                with loops.loop(-(-self.pixels // step), "t") as t:
                    start = loops.let(smaller(t * step, max(0, self.pixels - step)), "px")
                    tile = self._sum(packed, weights, panel, phase, start)
                    self._store(tile, scratch, block, start, slab, group, phase)

    def _emit_tables(self) -> None:
        """Numbers of each phase, tap and copy."""
        loops, strides = self.loops, self.gather.weight.spatial
        counts = [len(taps) for taps in self.taps]
        self.tap_first = [0, *itertools.accumulate(counts)]
        self._tap_count = Numbers(loops, "tap_count", counts)
        self._tap_first = Numbers(loops, "tap_first", self.tap_first[:-1])
        flat = [tap for taps in self.taps for tap in taps]
        self._w_offset = Numbers(
            loops, "w_offset", [sum(k * s for (k, _), s in zip(tap, strides, strict=True)) for tap in flat]
        )
        self._s_start = Numbers(loops, "s_start", [start for starts in self.starts for start in starts])
        firsts = [0, *itertools.accumulate(map(len, self.copies))]
        self._copy_count = Numbers(loops, "copy_count", [len(copies) for copies in self.copies])
        self._copy_first = Numbers(loops, "copy_first", firsts[:-1])
        every = [copy for copies in self.copies for copy in copies]
        self._copy_offset = [Numbers(loops, f"copy_{a}", [copy[i] for copy in every]) for i, a in enumerate("dhw")]
        self._panel_lines = Numbers(loops, "panel_lines", [self.tiling.lines + extra for extra in self.extra])
        bases = [
            sum(axis.base * s for axis, s in zip(phase, self.gather.result.spatial, strict=True))
            for phase in self.phases
        ]
        self._base = Numbers(loops, "phase_base", bases)

    def _panel_of(self, phase: Any, group_block: Any) -> Any:
        """Where a block's panel of W starts."""
        size = self.gather.source_channels * self.block
        blocks = self.gather.groups * self.blocks
        return (self._tap_first.at(phase) * blocks + group_block * self._tap_count.at(phase)) * size

    def _slabs(self) -> int:
        d, h, _ = self.counts
        n = self.gather.batch
        return n * d * (h // self.tiling.lines) if self.tiling.shift else n * d * h // self.tiling.lines

    # -- panels -------------------------------------------------------------------------------------------------

    def _pack_weight(self, packed: Any, phase: Any, rest: Any, into: Any) -> None:
        """One block of result channels: [tap, source channel][channel of the block], tails zero or overlapped."""
        loops, gather = self.loops, self.gather
        block, group = remainder(rest, self.blocks), quotient(rest, self.blocks)
        first = loops.let(self._first_channel(block), "m0")
        base = loops.let(group * gather.weight_group + first * gather.weight_result, "w_from")
        into = loops.let(into, "w_into")
        first_tap = loops.let(self._tap_first.at(phase), "first_tap")
        run = self._weight_run()
        if run == "m":
            self._pack_weight_rows(packed, phase, base, into, first_tap, first)
        elif run:
            self._pack_weight_transposed(packed, run, base, into, first)
        else:
            self._pack_weight_elements(packed, phase, base, into, first_tap, first)

    def _weight_run(self) -> str:
        """Which of W's elements are neighbours in memory: result channels "m", source channels "c", "taps", or both
        of these "c, taps"; nothing where elements go one by one."""
        gather, weight = self.gather, self.gather.weight
        if weight.dtype != self.dtype or not self.machine.has_masks:
            return ""
        if gather.weight_result == 1:
            return "m"
        if len(self.phases) > 1 or len(gather.phases) > 1:
            return ""
        taps = len(self.taps[0])
        offsets = [sum(k * s for (k, _), s in zip(tap, weight.spatial, strict=True)) for tap in self.taps[0]]
        dense = offsets == list(range(taps))
        if dense and gather.weight_source == taps:
            return "c, taps"
        if gather.weight_source == 1:
            return "c"
        return "taps" if dense and taps >= self.lanes // 2 else ""

    def _pack_weight_rows(self, packed: Any, phase: Any, base: Any, into: Any, first_tap: Any, first: Any) -> None:
        loops, gather, lanes = self.loops, self.gather, self.lanes
        channels = gather.source_channels
        with loops.loop(self._tap_count.at(phase), "tap") as tap:
            tap_base = loops.let(base + self._w_offset.at(first_tap + tap), "w_tap")
            with loops.loop(channels, "c") as c:
                for j in range(0, self.block, lanes):
                    mask = lanes_below(first + j, gather.result_channels, lanes)
                    value = load_masked(self.weight, tap_base + c * gather.weight_source + j, mask, lanes)
                    self._store_panel(packed, into + (tap * channels + c) * self.block + j, value, self.block - j)

    def _pack_weight_transposed(self, packed: Any, run: str, base: Any, into: Any, first: Any) -> None:
        """Squares of `lanes` result channels x `lanes` neighbours in memory, transposed in registers."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        channels, taps = gather.source_channels, len(self.taps[0])
        outer, length = {"c": (taps, channels), "taps": (channels, taps), "c, taps": (1, channels * taps)}[run]
        with loops.loop(outer, "outer") as o, loops.loop(-(-length // lanes), "chunk") as chunk:
            start = base + (self._w_offset.at(o) if run == "c" else o * gather.weight_source) + chunk * lanes
            start = loops.let(expr(start), "start")
            for j in range(0, self.block, lanes):
                rows = []
                for m in range(j, j + lanes):
                    limit: Any = length
                    if m >= self.block or gather.result_channels % self.block:
                        exists = tirx.And(expr(first + m) < gather.result_channels, expr(m) < self.block)
                        limit = choose(exists, length, 0)
                    mask = lanes_below(chunk * lanes, limit, lanes)
                    rows.append(
                        loops.let(load_masked(self.weight, start + m * gather.weight_result, mask, lanes), "row")
                    )
                for i, value in enumerate(transpose(loops, rows)):
                    e = loops.let(expr(chunk * lanes + i), "e")
                    step = {
                        "c": o * channels + e,
                        "taps": e * channels + o,
                        "c, taps": remainder(e, taps) * channels + quotient(e, taps),
                    }[run]
                    with loops.when(e < length):
                        self._store_panel(packed, into + step * self.block + j, value, self.block - j)

    def _store_panel(self, packed: Any, at: Any, value: Any, room: int) -> None:
        """Store a vector, or as much of it as the block has room for."""
        if room >= self.lanes:
            self.loops.store(packed, at, value)
        else:
            self.loops.store_masked(packed, at, value, lanes_below(0, room, self.lanes))

    def _pack_weight_elements(self, packed: Any, phase: Any, base: Any, into: Any, first_tap: Any, first: Any) -> None:
        loops, gather = self.loops, self.gather
        pads = not self.over_pixels and gather.result_channels % self.block != 0
        with loops.loop(gather.source_channels, "c") as c, loops.loop(self._tap_count.at(phase), "tap") as tap:
            tap_base = loops.let(base + self._w_offset.at(first_tap + tap) + c * gather.weight_source, "w_tap")
            to = loops.let(into + (tap * gather.source_channels + c) * self.block, "to")
            with loops.loop(self.block, "m") as m:
                value = convert(load(self.weight, tap_base + m * gather.weight_result), self.dtype)
                if pads:
                    value = choose(less(first + m, gather.result_channels), value, zero(self.dtype))
                loops.store(packed, to + m, value)

    def _first_channel(self, block: Any) -> Any:
        """The first result channel of a block; with pixels as vectors, the last block overlaps the one before it."""
        if self.over_pixels:
            return smaller(block * self.block, self.gather.result_channels - self.block)
        return block * self.block

    def _pack_source(self, panel: Any, slab: Any, group: Any, phase: Any) -> None:
        """The panel of a slab."""
        loops, gather = self.loops, self.gather
        source = gather.source
        with loops.loop(self._copy_count.at(phase), "copy") as copy:
            number = loops.let(self._copy_first.at(phase) + copy, "number")
            od, oh, ow = (loops.let(numbers.at(number), "o") for numbers in self._copy_offset)
            with loops.loop(self._panel_lines.at(phase), "line") as line:
                n, qd, qh = self._line_of(slab, line)
                d, h = qd * gather.in_step[0] + od, qh * gather.in_step[1] + oh
                valid = loops.let(tirx.And(within(d, source.extents[0]), within(h, source.extents[1])), "valid")
                base = n * source.batch + d * source.spatial[0] + h * source.spatial[1]
                base = loops.let(base + group * gather.source_channels * source.channel, "from")
                at = loops.let(copy * self.copy_size + line * self.counts[2] * self.pitch, "into")
                if self.over_pixels:
                    self._pack_pixels(panel, at, base, ow, valid)
                else:
                    self._pack_channels(panel, at, base, ow, valid)

    def _pack_pixels(self, panel: Any, at: Any, base: Any, ow: Any, valid: Any) -> None:
        """One line of each channel; vectors that run over its end are overwritten by the next line."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        source, width = gather.source, gather.source.extents[2]
        step = gather.in_step[2]
        vectors = source.spatial[2] * step == 1 and source.dtype == self.dtype and self.machine.has_masks
        limit = loops.let(choose(valid, width, 0), "limit")
        if source.channel == 1 and source.dtype == self.dtype and self.machine.has_masks:
            self._pack_pixels_transposed(panel, at, base, ow, limit)
            return
        with loops.loop(gather.source_channels, "c") as c:
            row = loops.let(base + c * source.channel, "row")
            into = loops.let(at + c * self.channel_step, "row_into")
            if vectors:
                with loops.loop(-(-self.counts[2] // lanes), "x") as x:
                    mask = lanes_within(x * lanes + ow, limit, lanes)
                    value = load_masked(self.source, row + x * lanes + ow, mask, lanes)
                    loops.store(panel, into + x * lanes, value)
                return
            with loops.loop(self.counts[2], "x") as x:
                column = x * step + ow
                value = convert(load(self.source, row + column * source.spatial[2]), self.dtype)
                inside = tirx.And(expr(column) >= 0, expr(column) < limit)
                loops.store(panel, into + x, choose(inside, value, zero(self.dtype)))

    def _pack_pixels_transposed(self, panel: Any, at: Any, base: Any, ow: Any, limit: Any) -> None:
        """One line of a source whose channels are neighbours: squares of pixels x channels turned in registers."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        channels, columns = gather.source_channels, self.counts[2]
        with loops.loop(-(-channels // lanes), "c") as c, loops.loop(-(-columns // lanes), "x") as x:
            rows = []
            for i in range(lanes):
                column = loops.let(expr((x * lanes + i) * gather.in_step[2] + ow), "column")
                inside = tirx.And(column >= 0, column < limit)
                mask = lanes_below(c * lanes, choose(inside, channels, 0), lanes)
                pixel = base + column * gather.source.spatial[2] + c * lanes
                rows.append(loops.let(load_masked(self.source, pixel, mask, lanes), "row"))
            for i, value in enumerate(transpose(loops, rows)):
                with loops.when(expr(c * lanes + i) < channels):
                    loops.store(panel, at + (c * lanes + i) * self.channel_step + x * lanes, value)

    def _pack_channels(self, panel: Any, at: Any, base: Any, ow: Any, valid: Any) -> None:
        """One line, all channels of each pixel."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        source, channels = gather.source, gather.source_channels
        whole = channels - channels % lanes
        vectors = source.channel == 1 and source.dtype == self.dtype
        with loops.loop(self.counts[2], "x") as x:
            column = loops.let(x * gather.in_step[2] + ow, "column")
            inside = loops.let(tirx.And(valid, within(column, source.extents[2])), "inside")
            pixel = loops.let(base + column * source.spatial[2], "pixel")
            into = loops.let(at + x * self.pitch, "pixel_into")
            with loops.when(inside):
                if vectors and whole:
                    with loops.loop(whole // lanes, "c") as c:
                        loops.store(panel, into + c * lanes, load(self.source, pixel + c * lanes, lanes))
                rest = whole if vectors else 0
                if channels > rest:
                    with loops.loop(channels - rest, "c") as c:
                        value = convert(load(self.source, pixel + (rest + c) * source.channel), self.dtype)
                        loops.store(panel, into + rest + c, value)
            with loops.otherwise(inside), loops.loop(self.pitch // lanes, "c") as c:
                loops.store(panel, into + c * lanes, zero(self.dtype, lanes))

    # -- the sum ------------------------------------------------------------------------------------------------

    def _sum(self, packed: Any, weights: Any, panel: Any, phase: Any, start: Any) -> Tile:
        loops, gather, tiling, lanes = self.loops, self.gather, self.tiling, self.lanes
        tile = Tile(loops, tiling.rows, tiling.columns, lanes, self.dtype)
        channels = gather.source_channels
        first_tap = loops.let(self._tap_first.at(phase), "first_tap")
        with loops.loop(self._tap_count.at(phase), "tap") as tap:
            s_at = loops.let(self._s_start.at(first_tap + tap) + start * self.pitch, "s_at")
            w_at = loops.let(weights + tap * (channels * self.block), "w_tap_at")
            with loops.loop(channels, "c") as c:
                s = loops.let(s_at + c * self.channel_step, "s")
                w = loops.let(w_at + c * self.block, "w")
                if self.over_pixels:
                    tile.add(
                        lambda i: load(packed, w + i),
                        lambda j: load(panel, s + j * lanes, lanes),
                    )
                else:
                    tile.add(
                        lambda i: load(panel, s + i * self.pitch),
                        lambda j: load(packed, w + j * lanes, lanes),
                    )
        return tile

    # -- results ------------------------------------------------------------------------------------------------

    def _store(self, tile: Tile, scratch: Any, block: Any, start: Any, slab: Any, group: Any, phase: Any) -> None:
        loops, gather, tiling, lanes = self.loops, self.gather, self.tiling, self.lanes
        result = gather.result
        channel = loops.let(self._first_channel(block), "m0")
        unit = self._unit()
        same = result.dtype == self.dtype
        if self.over_pixels and unit == 1 and same and self.pixels >= self.width:
            base = loops.let(self._line_address(self._global_line(slab, 0), group, phase) + start, "out")
            for i in range(tiling.rows):
                for j in range(tiling.columns):
                    at = base + (channel + i) * result.channel + j * lanes
                    loops.store(self.result, at, tile.value(i, j))
            return
        ragged = gather.result_channels % self.block != 0
        if not self.over_pixels and result.channel == 1 and same and (not ragged or self.machine.has_masks):
            for i in range(tiling.rows):
                base = loops.let(self._pixel_address(slab, start + i, group, phase, unit) + channel, "out")
                for j in range(tiling.columns):
                    if not ragged:
                        loops.store(self.result, base + j * lanes, tile.value(i, j))
                        continue
                    mask = lanes_below(channel + j * lanes, gather.result_channels, lanes)
                    loops.store_masked(self.result, base + j * lanes, tile.value(i, j), mask)
            return
        for i in range(tiling.rows):
            for j in range(tiling.columns):
                loops.store(scratch, (i * tiling.columns + j) * lanes, tile.value(i, j))
        width = tiling.columns * lanes
        if self.over_pixels:
            with loops.loop(smaller(self.pixels - start, width), "l") as lane:
                base = loops.let(self._pixel_address(slab, start + lane, group, phase, unit), "out")
                with loops.loop(tiling.rows, "m") as m:
                    at = base + (channel + m) * result.channel
                    loops.store(self.result, at, load(scratch, m * width + lane))
            return
        count = loops.let(smaller(gather.result_channels - channel, width), "m_count")
        with loops.loop(tiling.rows, "p") as p:
            base = loops.let(self._pixel_address(slab, start + p, group, phase, unit), "out")
            with loops.loop(count, "m") as m:
                loops.store(self.result, base + (channel + m) * result.channel, load(scratch, p * width + m))

    def _unit(self) -> int:
        """Elements between neighbouring pixels of a slab in the result; 0 if that is not one number."""
        gather, (d, h, w) = self.gather, self.counts
        steps = [s * o for s, o in zip(gather.result.spatial, gather.out_step, strict=True)]
        in_image = self.tiling.shift or (d * h) % self.tiling.lines == 0
        lines_join = h == 1 or self.tiling.lines == 1 or steps[1] == w * steps[2]
        planes_join = d == 1 or h % self.tiling.lines == 0 or steps[0] == h * w * steps[2]
        return steps[2] if in_image and lines_join and planes_join else 0

    def _global_line(self, slab: Any, line: Any) -> Any:
        """The number, over batch, depth and height, of a slab's line; the last two in shifted panels as well."""
        return slab * self.tiling.lines + line

    def _line_of(self, slab: Any, line: Any) -> tuple[Any, Any, Any]:
        """(batch, qd, qh) of a line of the slab's panel; in shifted panels qh may pass the end by the extra lines."""
        loops, (d, h, _) = self.loops, self.counts
        if self.tiling.shift:
            first = slab * self.tiling.lines
            plane = quotient(first, h)
            n, qd, qh = quotient(plane, d), remainder(plane, d), remainder(first, h) + line
        else:
            number = slab * self.tiling.lines + line
            plane = quotient(number, h)
            n, qd, qh = quotient(plane, d), remainder(plane, d), remainder(number, h)
        return loops.let(n, "n"), loops.let(qd, "qd"), loops.let(qh, "qh")

    def _line_address(self, number: Any, group: Any, phase: Any) -> Any:
        """Address in the result of the first pixel and channel of a line."""
        gather, (d, h, _) = self.gather, self.counts
        result = gather.result
        plane = quotient(number, h)
        q = (remainder(plane, d), remainder(number, h))
        at = quotient(plane, d) * result.batch + group * (gather.result_channels * result.channel)
        for axis in (0, 1):
            at = at + q[axis] * (result.spatial[axis] * gather.out_step[axis])
        return at + self._base.at(phase)

    def _pixel_address(self, slab: Any, pixel: Any, group: Any, phase: Any, unit: int) -> Any:
        gather = self.gather
        if unit:
            return self._line_address(self._global_line(slab, 0), group, phase) + pixel * unit
        line, x = quotient(pixel, self.counts[2]), remainder(pixel, self.counts[2])
        base = self._line_address(self._global_line(slab, line), group, phase)
        return base + x * (gather.result.spatial[2] * gather.out_step[2])
