# SPDX-License-Identifier: Apache-2.0
"""Depthwise forward and dgrad: out[q, c] = sum over taps of source[q * step + offset(tap), c] * W[tap, c].

Vectors run over channels. Where channels are neighbours in memory (NHWC) pixels are read and written in place;
elsewhere (NCHW) a slab of lines is turned into a panel [line][column][lanes], and the result back. The register tile is
a piece of a result line; a kernel line's weights stay in registers. Nothing is padded: the taps that a line meets are
the bounds of a loop, and the code of pieces near the borders leaves out the products with what lies outside.

In small groups, of as many source as result channels, a vector spans the channels of several groups: each of a group's
source channels in turn is repeated, by a shuffle, in the places of all of the group's result channels.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.depthwise_planes import Planes, PlaneTiling
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gather_frame import GatherFrame
from tvm_convgrad.kernels.lanes import (
    Mover,
    Spread,
    channels_at,
    pack_weights,
    pieces_of,
    repeated,
    run_of_taps,
    valid_taps,
)
from tvm_convgrad.kernels.loops import (
    Loops,
    Shapes,
    convert,
    expr,
    lanes_below,
    lanes_of,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
    splat,
    zero,
)
from tvm_convgrad.kernels.spec import AxisPhase, Gather, Phase, Three
from tvm_convgrad.kernels.target import Machine

TILES_AHEAD = 8
"""Register tiles between what is computed with and what is asked for: some lines of a block of channels."""


@dataclass(frozen=True)
class DepthwiseTiling:
    """How a depthwise gather is cut.

    Attributes:
        direct: whether the tensors are read and written in place; else through panels.
        pixels: of the register tile.
        lines: result lines of a slab, a multiple of the step between a phase's lines.
        chunks: pieces of the blocks of channels that are separate work items (direct only).
        prefetched: whether what lies ahead is asked for (direct only).
    """

    direct: bool
    pixels: int
    lines: int
    chunks: int
    prefetched: bool


def depthwise_gather_kernel(
    detail: tuple[Gather, DepthwiseTiling | PlaneTiling, Three],
    machine: Machine,
    name: str,
    shapes: Shapes,
    epilogue: Epilogue,
) -> Any:
    """The PrimFunc (source, weight, [bias,] result) of a gather with one channel a group on one side, or both.

    Args:
        detail: its third are the taps of W along depth, height and width.
        shapes: as of `gather_kernel`: a batch known only at run time is a name.
    """
    gather, tiling, kernel = detail
    loops = Loops()
    frame = GatherFrame(loops, gather, shapes, epilogue)
    if isinstance(tiling, PlaneTiling):
        Planes(loops, gather, tiling, kernel, machine, frame).emit()
    else:
        _Depthwise(loops, gather, tiling, kernel, machine, frame).emit()
    return loops.finish(frame.parameters, name)


@dataclass(frozen=True)
class _Place:
    """Where lines of a tensor are: in itself or in a panel. Element steps; `origin` is line 0, column 0."""

    buffer: Any
    origin: Any
    multiple: int
    depth: int
    line: int
    column: int


class _Depthwise:
    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        tiling: DepthwiseTiling,
        kernel: Three,
        machine: Machine,
        frame: GatherFrame,
    ) -> None:
        self.loops, self.gather, self.tiling, self.kernel, self.machine = loops, gather, tiling, kernel, machine
        self.source, self.weight, self.result, self.bias = frame.source, frame.weight, frame.result, frame.bias
        self.batch, self.epilogue, self.dtype = frame.batch, frame.epilogue, gather.dtype
        self.lanes = machine.lanes(self.dtype)
        self.phases = [phase for phases in gather.phases for phase in phases]
        self.inputs, self.outputs = gather.source_channels, gather.result_channels
        self.together = min(self.inputs, self.outputs)  # neighbouring channels of a group
        if self.together > 1:
            self.outputs = 1
        self.channels = gather.groups * self.together
        self.blocks = -(-self.channels // self.lanes)
        self.taps = math.prod(kernel)
        self.turns = (gather.result.extents[1] + tiling.lines - 1) // tiling.lines

    # -- work items ---------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Pack W, then the work items: slabs of lines of an image, and in panels blocks of channels."""
        loops, gather, tiling = self.loops, self.gather, self.tiling
        multiple = max(self.inputs, self.outputs)
        within = gather.weight_result if self.together > 1 else 0
        spread = Spread(self.channels, multiple, gather.weight_group, self._inner(), self.together, within)
        self.packed = pack_weights(loops, self.machine, self.weight, gather.weight, self.kernel, self.dtype, spread)
        depths = -(-gather.result.extents[0] // gather.out_step[0])
        pieces = -(-self.blocks // self._per_piece()) if tiling.direct else self.blocks
        macs = gather.batch * self.channels * multiple * self.taps
        for extent in gather.result.extents:
            macs *= extent
        kind = "parallel" if macs >= self.machine.parallel_from else "serial"
        with loops.loop(self.batch * (depths * self.turns * pieces), "item", kind) as item:
            piece, rest = loops.let(remainder(item, pieces), "piece"), quotient(item, pieces)
            slab, rest = loops.let(remainder(rest, self.turns), "slab"), quotient(rest, self.turns)
            qd, n = loops.let(remainder(rest, depths), "qd"), loops.let(quotient(rest, depths), "n")
            if tiling.direct:
                self._direct(n, qd, slab, piece)
            else:
                self._through_panels(n, qd, slab, piece)

    def _per_piece(self) -> int:
        """Blocks of channels of a work item that reads and writes in place."""
        return -(-self.blocks // self.tiling.chunks)

    def _inner(self) -> int:
        return self.gather.weight_result if self.outputs > 1 else self.gather.weight_source

    def _direct(self, n: Any, qd: Any, slab: Any, piece: Any) -> None:
        loops, lanes = self.loops, self.lanes
        whole = self.channels // lanes
        per_piece = self._per_piece()
        first = loops.let(expr(piece * per_piece), "first_block")
        with loops.loop(smaller(whole - first, per_piece), "b") as b:
            self._direct_block(n, qd, slab, loops.let(first + b, "block"), None)
        if self.channels % lanes:
            last = expr(first + per_piece) > whole
            with loops.when(last):
                self._direct_block(n, qd, slab, whole, lanes_below(0, self.channels % lanes, lanes))

    def _direct_block(self, n: Any, qd: Any, slab: Any, block: Any, mask: Any) -> None:
        loops, gather = self.loops, self.gather
        origin = loops.let(expr(n * gather.source.batch + block * self.lanes), "from")
        to = loops.let(expr(n * gather.result.batch + block * self.lanes), "to")
        source = _Place(self.source, origin, 0, *gather.source.spatial)
        result = _Place(self.result, to, 0, *gather.result.spatial)
        weights = loops.let(expr(block * (self.inputs * self.taps * self.lanes)), "w")
        for phase in self.phases:
            with self._depth(phase, qd):
                self._lines(phase, qd, slab, source, result, weights, mask, block)

    def _depth(self, phase: Phase, qd: Any) -> Any:
        """Runs only if the phase has this depth."""
        return self.loops.when(expr(qd) < phase[0].count)

    def _through_panels(self, n: Any, qd: Any, slab: Any, block: Any) -> None:
        loops, gather, tiling, lanes = self.loops, self.gather, self.tiling, self.lanes
        view, width = gather.source, gather.source.extents[2]
        first = loops.let(expr(block * lanes), "c0")
        apart = self.inputs // self.together * view.channel
        reader = Mover(loops, self.machine, self.source, view, self.dtype, self.channels, apart)
        writer = Mover(
            loops,
            self.machine,
            self.result,
            gather.result,
            self.dtype,
            self.channels,
            self.outputs * gather.result.channel,
        )
        row, rows, most = self._source_lines(slab)
        plane = reader.room(most)
        depths = sorted({offset for phase in self.phases for _, offset in phase[0].taps})
        depths = list(range(depths[0], depths[-1] + 1)) if depths else []
        panels = self.inputs // self.together
        panel = loops.panel("panel", max(1, panels * len(depths)) * plane, self.dtype)
        out = loops.panel("out_panel", writer.room(tiling.lines), self.dtype)
        positions = -(-gather.result.extents[0] // gather.out_step[0])
        # Whether all results' taps are in bounds along the depth, as those of 2-D convolutions are.
        in_bounds = (
            bool(depths) and depths[0] >= 0 and (positions - 1) * gather.in_step[0] + depths[-1] < view.extents[0]
        )
        if len(depths) == 1 and in_bounds:
            for j in range(panels):
                depth = (qd * gather.in_step[0] + depths[0]) * view.spatial[0]
                reader.prefetch(n * view.batch + j * view.channel + depth, first, row, rows)
            for j in range(self.outputs):
                line = slab * tiling.lines
                room = smaller(gather.result.extents[1] - line, tiling.lines)
                writer.prefetch(n * gather.result.batch + j * gather.result.channel, first, line, room, write=True)
        for j in range(panels):
            for i, offset in enumerate(depths):
                depth = qd * gather.in_step[0] + offset
                base = loops.let(expr(n * view.batch + depth * view.spatial[0] + j * view.channel), "image")
                if in_bounds:
                    reader.pack(base, first, row, rows, panel, (j * len(depths) + i) * plane)
                    continue
                inside = loops.let(expr(depth) >= 0, "above") & loops.let(expr(depth) < view.extents[0], "below")
                with loops.when(inside):
                    reader.pack(base, first, row, rows, panel, (j * len(depths) + i) * plane)
        low = depths[0] if depths else 0
        # The panel's depth 0 is `low` below the position: lines then count depths from there.
        origin = loops.opaque(expr(-(row * (width * lanes)) - (qd * gather.in_step[0] + low) * plane), "origin")
        source = _Place(panel, origin, len(depths) * plane, plane, width * lanes, lanes)
        columns = gather.result.extents[2] * lanes
        line = loops.let(expr(slab * tiling.lines), "line")
        result = _Place(out, loops.opaque(expr(-(line * columns)), "out_origin"), 0, 0, columns, lanes)
        count = loops.let(smaller(gather.result.extents[1] - line, tiling.lines), "lines")
        for residue in sorted({phase[0].base for phase in self.phases}):
            depth = qd * gather.out_step[0] + residue
            phases = [phase for phase in self.phases if phase[0].base == residue]
            with self._depth(phases[0], qd), loops.loop(self.outputs, "m") as m:
                weights = loops.let(expr((block * max(self.inputs, self.outputs) + m) * (self.taps * lanes)), "w")
                for phase in phases:
                    self._lines(phase, qd, slab, source, result, weights, None, None)
                base = n * gather.result.batch + depth * gather.result.spatial[0] + m * gather.result.channel
                writer.unpack(loops.let(expr(base), "image"), first, line, count, out, self._finish(m))

    def _source_lines(self, slab: Any) -> tuple[Any, Any, int]:
        """(first, count, the most) of the source's lines that a slab's result lines meet."""
        loops, gather = self.loops, self.gather
        extent, step = gather.source.extents[1], gather.in_step[1]
        offsets = [offset for phase in self.phases for _, offset in phase[1].taps] or [0]
        if self.turns == 1:
            return 0, extent, extent
        per_slab = self.tiling.lines // gather.out_step[1]
        start = slab * (per_slab * step) + min(offsets)
        reach = (per_slab - 1) * step + max(offsets) - min(offsets) + 1
        row = loops.opaque(tirx.min(tirx.max(expr(start), expr(0)), expr(extent)), "row")
        end = tirx.max(tirx.min(expr(start + reach), expr(extent)), row)
        return row, loops.opaque(end - row, "rows"), min(reach, extent)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _lines(
        self, phase: Phase, qd: Any, slab: Any, source: _Place, result: _Place, weights: Any, mask: Any, block: Any
    ) -> None:
        """A phase's lines of a slab; the block of channels where they are stored in place, with the epilogue."""
        loops, gather = self.loops, self.gather
        per_slab = self.tiling.lines // gather.out_step[1]
        first = loops.let(expr(slab * per_slab), "q0")
        with loops.loop(smaller(phase[1].count - first, per_slab), "l") as number:
            q = loops.let(first + number, "q")
            at = result.origin + (qd * gather.out_step[0] + phase[0].base) * result.depth
            at = loops.let(expr(at + (q * gather.out_step[1] + phase[1].base) * result.line), "out")
            depth_taps = valid_taps(
                loops, phase[0].taps, phase[0].count, gather.in_step[0], gather.source.extents[0], qd
            )
            line_taps = valid_taps(loops, phase[1].taps, phase[1].count, gather.in_step[1], gather.source.extents[1], q)
            pieces = pieces_of(
                phase[2].count, self.tiling.pixels, phase[2].taps, gather.in_step[2], gather.source.extents[2]
            )
            for begin, size, repeats, met in pieces:
                with loops.loop(repeats, "piece") as number:
                    x = loops.let(begin + number * size, "x")
                    tile = [loops.buffer("sum", self.lanes, self.dtype) for _ in range(size)]
                    for register in tile:
                        loops.store(register, 0, zero(self.dtype, self.lanes))
                    if all(axis.taps for axis in phase):
                        self._sum(tile, phase, met, (qd, q, x), source, (depth_taps, line_taps), weights, mask)
                    step = gather.out_step[2] * result.column
                    to = loops.opaque(expr(at + x * step + phase[2].base * result.column), "to")
                    if block is not None and self.tiling.prefetched:
                        self._prefetch(phase, size, (q, x), source, to)
                    for i, register in enumerate(tile):
                        value = load(register, 0, self.lanes)
                        if block is not None:
                            value = self._finished(value, result.buffer, to + i * step, block * self.lanes, mask)
                        if mask is None:
                            loops.store(result.buffer, to + i * step, value)
                        else:
                            loops.store_masked(result.buffer, to + i * step, value, mask)

    def _prefetch(self, phase: Phase, size: int, position: tuple[Any, Any], source: _Place, to: Any) -> None:
        """Ask for what a later tile meets in place: its last source lines, and the result."""
        loops, gather, view = self.loops, self.gather, self.gather.result
        step = gather.out_step[2] * view.spatial[2]
        pixels = TILES_AHEAD * size
        for i in range(size):
            loops.prefetch(self.result, to + (i + pixels) * step, write=True, near=True)
        if phase is not self.phases[0] or not phase[1].taps:
            return
        q, x = position
        first = q * gather.in_step[1] + (max(offset for _, offset in phase[1].taps) - gather.in_step[1] + 1)
        at = source.origin + first * source.line + (x + pixels) * (gather.in_step[2] * source.column)
        at = loops.let(expr(at), "ahead")
        for line in range(gather.in_step[1]):
            for i in range(size * gather.in_step[2]):
                loops.prefetch(self.source, at + (line * source.line + i * source.column), near=True)

    def _finished(self, value: Any, buffer: Any, place: Any, channel: Any, mask: Any) -> Any:
        """The epilogue of neighbouring channels of a pixel."""
        return self.epilogue.apply(
            value,
            self.dtype,
            lambda: channels_at(self.bias, channel, mask, self.lanes, self.dtype),
            lambda: channels_at(buffer, place, mask, self.lanes, self.dtype),
        )

    def _finish(self, m: Any) -> Any:
        """The epilogue of the m-th multiple, for `Mover.unpack`."""

        def bias(channel: Any, mask: Any, lanes: int) -> Any:
            if mask is not None:
                return load_masked(self.bias, channel, mask, lanes)
            return splat(convert(load(self.bias, channel * self.outputs + m), self.dtype), lanes)

        def finish(value: Any, before: Any, channel: Any, mask: Any) -> Any:
            return self.epilogue.apply(value, self.dtype, lambda: bias(channel, mask, lanes_of(value)), before)

        return finish

    def _sum(
        self,
        tile: list[Any],
        phase: Phase,
        met: list[list[int]],
        position: tuple[Any, Any, Any],
        source: _Place,
        taps: tuple[tuple[Any, Any], tuple[Any, Any]],
        weights: Any,
        mask: Any,
    ) -> None:
        """Products of the taps that a piece meets; `met` has its pixels for each column tap."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        (first_d, count_d), (first_h, count_h) = taps
        _, kernel_h, kernel_w = self.kernel
        (k_d, step_d, low_d, pace_d), (k_h, step_h, low_h, pace_h), (k_w, step_w, low_w, pace_w) = (
            run_of_taps(axis.taps) for axis in phase
        )
        qd, q, x = position
        steps = gather.in_step[2] * source.column
        with contextlib.ExitStack() as stack:
            j = stack.enter_context(loops.loop(self.inputs, "j")) if self.together == 1 else 0
            kd, kh = (stack.enter_context(loops.loop(n, k)) for n, k in ((count_d, "kd"), (count_h, "kh")))
            td, th = first_d + kd, first_h + kh
            depth, line = qd * gather.in_step[0] + low_d + td * pace_d, q * gather.in_step[1] + low_h + th * pace_h
            at = source.origin + j * source.multiple + depth * source.depth + line * source.line
            at = loops.opaque(expr(at + x * steps), "at")
            w = j * self.taps + ((k_d + td * step_d) * kernel_h + k_h + th * step_h) * kernel_w
            w = loops.let(expr(weights + w * lanes), "w_line")

            def factor(tap: int, member: int = 0) -> Any:
                place = member * self.taps + k_w + tap * step_w
                return loops.let(load(self.packed, w + place * lanes, lanes), "factor")

            def read(column: int) -> Any:
                return channels_at(source.buffer, at + column * source.column, mask, lanes, self.dtype)

            def add(i: int, value: Any, by: Any) -> None:
                loops.store(tile[i], 0, load(tile[i], 0, lanes) + value * by)

            columns = {(tap, i): i * gather.in_step[2] + low_w + tap * pace_w for tap, p in enumerate(met) for i in p}
            if self.together == 1:
                for tap, pixels in enumerate(met):
                    by = factor(tap) if pixels else None
                    for i in pixels:
                        add(i, read(columns[tap, i]), by)
                return
            for member in range(self.inputs):
                factors = {tap: factor(tap, member) for tap, pixels in enumerate(met) if pixels}
                for column in sorted(set(columns.values())):
                    value = loops.let(repeated(read(column), member, self.together, lanes), "member")
                    for (tap, i), its in columns.items():
                        if its == column:
                            add(i, value, factors[tap])


def emitted_products(gather: Gather, pixels: int) -> int:
    """How many multiply-adds of the register tiles the code has."""
    total = 0
    for phase in (phase for phases in gather.phases for phase in phases):
        axis: AxisPhase = phase[2]
        for _, _, _, met in pieces_of(axis.count, pixels, axis.taps, gather.in_step[2], gather.source.extents[2]):
            total += sum(map(len, met))
    return total


__all__ = ["DepthwiseTiling", "depthwise_gather_kernel", "emitted_products"]
