# SPDX-License-Identifier: Apache-2.0
"""Implicit GEMM of forward and dgrad (a `Gather`): out[m, px] = sum over (tap, c) of W[m, (tap, c)] * S[(tap, c), px].

W is packed once per call, the source once per slab of result lines, into panels without borders (padding is zeros in
the panel). Two orientations of the register tile:

- "pixels": vectors run over pixels (results with contiguous pixels, NCHW): rows are result channels;
- "channels": vectors run over result channels (NHWC): rows are pixels.

Taps of the height axis with unit step share their lines ("shift"): the panel has a few more lines, and a tap starts
some lines further down. All other taps have copies of their own, so that pixels of neighbouring lines are neighbours in
the panel, and a vector may run over the end of a line.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.loops import (
    Loops,
    choose,
    convert,
    expr,
    lanes_below,
    lanes_within,
    load,
    load_masked,
    make_parameter,
    quotient,
    remainder,
    smaller,
    within,
    zero,
)
from tvm_convgrad.kernels.spec import AxisPhase, Gather
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile

PARALLEL_FROM = 50_000  # multiply-accumulates; less is not worth waking threads for


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
    views = (gather.source, gather.weight, gather.result)
    source, weight, result = (loops.flat(p, v.size) for p, v in zip(parameters, views, strict=True))
    for phases, tiling in zip(gather.phases, tilings, strict=True):
        _Class(loops, gather, phases, tiling, machine, source, weight, result).emit()
    return loops.finish(parameters, name)


class _Class:
    """The loops of one class of phases."""

    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        phases: tuple[AxisPhase, AxisPhase, AxisPhase],
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
        self.counts = tuple(p.count for p in phases)
        self.residues = math.prod(p.residues for p in phases)
        self.taps = list(itertools.product(*(p.taps for p in phases)))
        self.depth = len(self.taps) * gather.source_channels  # length of the reduction
        self.over_pixels = tiling.orientation == "pixels"
        macs = gather.batch * gather.groups * gather.result_channels * math.prod(self.counts) * self.residues
        self.kind = "parallel" if macs * max(1, self.depth) >= PARALLEL_FROM else "serial"
        channels = gather.result_channels
        if self.over_pixels:
            self.block, self.width = tiling.rows, tiling.columns * self.lanes
        else:
            self.block = self.width = tiling.columns * self.lanes
        self.blocks = -(-channels // self.block)
        self.pixels = tiling.lines * self.counts[2]

    # -- all ----------------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Pack W, then the work items."""
        gather, loops, tiling = self.gather, self.loops, self.tiling
        if not self.taps:
            self._clear()
            return
        panel_size = self.depth * self.block
        packed = loops.buffer("w_panels", self.residues * gather.groups * self.blocks * panel_size, self.dtype)
        with loops.loop(self.residues * gather.groups * self.blocks, "block", self.kind) as item:
            self._pack_weight(packed, item, panel_size)
        slabs = self._slabs()
        per_split = -(-self.blocks // tiling.splits)
        splits = -(-self.blocks // per_split)
        with loops.loop(self.residues * gather.groups * slabs * splits, "item", self.kind) as item:
            split, rest = remainder(item, splits), quotient(item, splits)
            slab, rest = loops.let(remainder(rest, slabs), "slab"), quotient(rest, slabs)
            group = loops.let(remainder(rest, gather.groups), "group")
            residue = loops.let(quotient(rest, gather.groups), "residue")
            panel, tap_offsets = self._pack_source(slab, group)
            first = loops.let(split * per_split, "first_block")
            count = loops.let(smaller(self.blocks - first, per_split), "blocks")
            panels = loops.let((residue * gather.groups + group) * (self.blocks * panel_size), "w_base")
            scratch = loops.buffer("scratch", tiling.rows * tiling.columns * self.lanes, self.dtype)
            with loops.loop(count, "b") as b:
                block = loops.let(first + b, "block")
                weights = loops.let(panels + block * panel_size, "w_at")
                step = self.width if self.over_pixels else tiling.rows
                with loops.loop(-(-self.pixels // step), "t") as t:
                    start = loops.let(smaller(t * step, max(0, self.pixels - step)), "px")
                    tile = self._sum(packed, weights, panel, tap_offsets, start)
                    self._store(tile, scratch, block, start, slab, group, residue)

    def _slabs(self) -> int:
        d, h, _ = self.counts
        n = self.gather.batch
        return n * d * (h // self.tiling.lines) if self.tiling.shift else n * d * h // self.tiling.lines

    def _clear(self) -> None:
        """Phases that no tap meets are zeros."""
        loops, gather = self.loops, self.gather
        lines = gather.batch * self.counts[0] * self.counts[1]
        with loops.loop(self.residues * gather.groups * lines, "line") as item:
            line, rest = remainder(item, lines), quotient(item, lines)
            group, residue = remainder(rest, gather.groups), quotient(rest, gather.groups)
            base = loops.let(self._line_address(line, group, residue), "base")
            with loops.loop(self.counts[2], "x") as x, loops.loop(gather.result_channels, "c") as c:
                at = base + x * (gather.result.spatial[2] * gather.out_step[2]) + c * gather.result.channel
                loops.store(self.result, at, zero(self.dtype))

    # -- panels -------------------------------------------------------------------------------------------------

    def _pack_weight(self, packed: Any, item: Any, panel_size: int) -> None:
        """One block of result channels: [tap, source channel][channel of the block], tails zero or overlapped."""
        loops, gather = self.loops, self.gather
        weight = gather.weight
        block, rest = remainder(item, self.blocks), quotient(item, self.blocks)
        group, residue = remainder(rest, gather.groups), quotient(rest, gather.groups)
        taps = loops.table(
            "w_taps", [sum(k * s for (k, _), s in zip(tap, weight.spatial, strict=True)) for tap in self.taps]
        )
        moved = sum(r * s for r, s in zip(self._residue_of(residue), weight.spatial, strict=True))
        first = self._first_channel(block)
        base = loops.let(group * gather.weight_group + moved + first * gather.weight_result, "w_from")
        into = loops.let(item * panel_size, "w_into")
        pads = not self.over_pixels and gather.result_channels % self.block != 0
        with loops.loop(len(self.taps), "tap") as tap:
            tap_base = loops.let(base + load(taps, tap), "w_tap")
            with loops.loop(gather.source_channels, "c") as c, loops.loop(self.block, "m") as m:
                at = tap_base + c * gather.weight_source + m * gather.weight_result
                value = convert(load(self.weight, at), self.dtype)
                if pads:
                    value = choose(_less(first + m, gather.result_channels), value, zero(self.dtype))
                loops.store(packed, into + (tap * gather.source_channels + c) * self.block + m, value)

    def _first_channel(self, block: Any) -> Any:
        """The first result channel of a block; with pixels as vectors, the last block overlaps the one before it."""
        if self.over_pixels:
            return smaller(block * self.block, self.gather.result_channels - self.block)
        return block * self.block

    def _pack_source(self, slab: Any, group: Any) -> tuple[Any, Any]:
        """The panel of a slab, and where each tap starts in it."""
        loops, gather, tiling = self.loops, self.gather, self.tiling
        offsets = [tuple(offset for _, offset in tap) for tap in self.taps]
        low = min(h for _, h, _ in offsets) if tiling.shift else 0
        extra = max(h for _, h, _ in offsets) - low if tiling.shift else 0
        keys = [(d, low if tiling.shift else h, w) for d, h, w in offsets]
        copies = sorted(set(keys))
        lines = tiling.lines + extra
        channels = gather.source_channels
        capacity = lines * self.counts[2] + (self.width if self.over_pixels else 0) + self.lanes
        pitch = 1 if self.over_pixels else -(-channels // self.lanes) * self.lanes
        copy_size = capacity * (channels if self.over_pixels else pitch)
        panel = loops.buffer("s_panel", len(copies) * copy_size, self.dtype)
        starts = [
            copies.index(key) * copy_size + (h - low if tiling.shift else 0) * self.counts[2] * pitch
            for key, (_, h, _) in zip(keys, offsets, strict=True)
        ]
        table = loops.table("tap_starts", starts)
        tables = [loops.table(f"copy_{axis}", [c[i] for c in copies]) for i, axis in enumerate("dhw")]
        with loops.loop(len(copies), "copy") as copy:
            od, oh, ow = (
                loops.let(load(t, copy) if len(copies) > 1 else copies[0][i], "o") for i, t in enumerate(tables)
            )
            with loops.loop(lines, "line") as line:
                n, qd, qh = self._line_of(slab, line)
                d, h = qd * gather.in_step[0] + od, qh * gather.in_step[1] + oh
                source = gather.source
                valid = loops.let(tirx.And(within(d, source.extents[0]), within(h, source.extents[1])), "valid")
                base = n * source.batch + d * source.spatial[0] + h * source.spatial[1]
                base = loops.let(base + group * channels * source.channel, "from")
                if self.over_pixels:
                    at = loops.let(copy * copy_size + line * self.counts[2], "into")
                    self._pack_pixels(panel, at, capacity, base, ow, valid)
                else:
                    at = loops.let(copy * copy_size + line * self.counts[2] * pitch, "into")
                    self._pack_channels(panel, at, pitch, base, ow, valid)
        return panel, table

    def _pack_pixels(self, panel: Any, at: Any, capacity: int, base: Any, ow: Any, valid: Any) -> None:
        """One line of each channel; vectors that run over its end are overwritten by the next line."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        source, width = gather.source, gather.source.extents[2]
        step = gather.in_step[2]
        vectors = source.spatial[2] * step == 1 and source.dtype == self.dtype and self.machine.has_masks
        limit = loops.let(choose(valid, width, 0), "limit")
        with loops.loop(gather.source_channels, "c") as c:
            row = loops.let(base + c * source.channel, "row")
            into = loops.let(at + c * capacity, "row_into")
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

    def _pack_channels(self, panel: Any, at: Any, pitch: int, base: Any, ow: Any, valid: Any) -> None:
        """One line, all channels of each pixel."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        source, channels = gather.source, gather.source_channels
        whole = channels - channels % lanes
        vectors = source.channel == 1 and source.dtype == self.dtype
        with loops.loop(self.counts[2], "x") as x:
            column = loops.let(x * gather.in_step[2] + ow, "column")
            inside = loops.let(tirx.And(valid, within(column, source.extents[2])), "inside")
            pixel = loops.let(base + column * source.spatial[2], "pixel")
            into = loops.let(at + x * pitch, "pixel_into")
            with loops.when(inside):
                if vectors and whole:
                    with loops.loop(whole // lanes, "c") as c:
                        loops.store(panel, into + c * lanes, load(self.source, pixel + c * lanes, lanes))
                rest = whole if vectors else 0
                if channels > rest:
                    with loops.loop(channels - rest, "c") as c:
                        value = convert(load(self.source, pixel + (rest + c) * source.channel), self.dtype)
                        loops.store(panel, into + rest + c, value)
            with loops.otherwise(inside), loops.loop(pitch // lanes, "c") as c:
                loops.store(panel, into + c * lanes, zero(self.dtype, lanes))

    # -- the sum ------------------------------------------------------------------------------------------------

    def _sum(self, packed: Any, weights: Any, panel: Any, tap_offsets: Any, start: Any) -> Tile:
        loops, gather, tiling, lanes = self.loops, self.gather, self.tiling, self.lanes
        tile = Tile(loops, tiling.rows, tiling.columns, lanes, self.dtype)
        channels = gather.source_channels
        capacity_step, pitch = self._panel_steps()
        with loops.loop(len(self.taps), "tap") as tap:
            s_at = loops.let(load(tap_offsets, tap) + start * pitch, "s_at")
            w_at = loops.let(weights + tap * (channels * self.block), "w_tap_at")
            with loops.loop(channels, "c") as c:
                s = loops.let(s_at + c * capacity_step, "s")
                w = loops.let(w_at + c * self.block, "w")
                if self.over_pixels:
                    tile.add(
                        lambda i, w=w: load(packed, w + i),
                        lambda j, s=s: load(panel, s + j * lanes, lanes),
                    )
                else:
                    tile.add(
                        lambda i, s=s: load(panel, s + i * pitch),
                        lambda j, w=w: load(packed, w + j * lanes, lanes),
                    )
        return tile

    def _panel_steps(self) -> tuple[int, int]:
        """Elements of the panel from one source channel to the next, and from one pixel to the next."""
        if not self.over_pixels:
            return 1, -(-self.gather.source_channels // self.lanes) * self.lanes
        heights = [h for _, (_, h), _ in self.taps]
        extra = max(heights) - min(heights) if self.tiling.shift else 0
        return (self.tiling.lines + extra) * self.counts[2] + self.width + self.lanes, 1

    # -- results ------------------------------------------------------------------------------------------------

    def _store(self, tile: Tile, scratch: Any, block: Any, start: Any, slab: Any, group: Any, residue: Any) -> None:
        loops, gather, tiling, lanes = self.loops, self.gather, self.tiling, self.lanes
        result = gather.result
        channel = loops.let(self._first_channel(block), "m0")
        unit = self._unit()
        same = result.dtype == self.dtype
        if self.over_pixels and unit == 1 and same and self.pixels >= self.width:
            base = loops.let(self._line_address(self._global_line(slab, 0), group, residue) + start, "out")
            for i in range(tiling.rows):
                for j in range(tiling.columns):
                    at = base + (channel + i) * result.channel + j * lanes
                    loops.store(self.result, at, tile.value(i, j))
            return
        ragged = gather.result_channels % self.block != 0
        if not self.over_pixels and result.channel == 1 and same and (not ragged or self.machine.has_masks):
            for i in range(tiling.rows):
                base = loops.let(self._pixel_address(slab, start + i, group, residue, unit) + channel, "out")
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
                base = loops.let(self._pixel_address(slab, start + lane, group, residue, unit), "out")
                with loops.loop(tiling.rows, "m") as m:
                    at = base + (channel + m) * result.channel
                    loops.store(self.result, at, load(scratch, m * width + lane))
            return
        count = loops.let(smaller(gather.result_channels - channel, width), "m_count")
        with loops.loop(tiling.rows, "p") as p:
            base = loops.let(self._pixel_address(slab, start + p, group, residue, unit), "out")
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

    def _line_address(self, number: Any, group: Any, residue: Any) -> Any:
        """Address in the result of the first pixel and channel of a line."""
        gather, (d, h, _) = self.gather, self.counts
        result = gather.result
        plane = quotient(number, h)
        q = (remainder(plane, d), remainder(number, h))
        at = quotient(plane, d) * result.batch + group * (gather.result_channels * result.channel)
        for axis in (0, 1):
            at = at + q[axis] * (result.spatial[axis] * gather.out_step[axis])
        for r, phase, stride in zip(self._residue_of(residue), self.phases, result.spatial, strict=True):
            at = at + (r + phase.base) * stride
        return at

    def _pixel_address(self, slab: Any, pixel: Any, group: Any, residue: Any, unit: int) -> Any:
        gather = self.gather
        if unit:
            return self._line_address(self._global_line(slab, 0), group, residue) + pixel * unit
        line, x = quotient(pixel, self.counts[2]), remainder(pixel, self.counts[2])
        base = self._line_address(self._global_line(slab, line), group, residue)
        return base + x * (gather.result.spatial[2] * gather.out_step[2])

    def _residue_of(self, residue: Any) -> tuple[Any, Any, Any]:
        d, h, w = (p.residues for p in self.phases)
        del d
        return quotient(residue, h * w), remainder(quotient(residue, w), h), remainder(residue, w)


def _less(value: Any, limit: int) -> Any:
    return value < limit if not isinstance(value, int) else tirx.IntImm("bool", int(value < limit))
