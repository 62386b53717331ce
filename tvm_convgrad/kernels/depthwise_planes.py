# SPDX-License-Identifier: Apache-2.0
"""Depthwise forward and dgrad where columns are neighbours (NCHW): vectors run over the columns of a plane's lines.

    out[q, x] = sum over taps of source[q * step + line(tap), x * step + column(tap)] * W[tap]

Both tensors are read and written in place. The register tile is one vector of columns of some result lines; each vector
of the source is read once for each column tap and serves all lines of the tile that it meets. Lines outside are left
out by the code of border tiles, columns outside are zeros of masked loads. Strides of two take even and odd lanes
apart in forward, and bring those of two phases together in dgrad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.gather_frame import GatherFrame
from tvm_convgrad.kernels.lanes import pieces_of, run_of_taps, valid_taps
from tvm_convgrad.kernels.lines import FoldedReader, LineReader, interleaved, prefetch_ahead
from tvm_convgrad.kernels.loops import (
    Loops,
    convert,
    expr,
    lanes_below,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
    splat,
    zero,
)
from tvm_convgrad.kernels.spec import AxisPhase, Gather, Three
from tvm_convgrad.kernels.target import Machine

UNROLLED_TAPS = 16
"""Taps of a plane's kernel up to which the code has each of them; more column taps are a loop."""


@dataclass(frozen=True)
class PlaneTiling:
    """How a depthwise gather over planes is cut.

    Attributes:
        lines: result lines of a register tile, of one phase.
        slabs: pieces of a plane that are separate work items.
        folded: lines that one vector has; more than one only where all of a plane is one tile.
    """

    lines: int
    slabs: int
    folded: int


class Planes:
    """The loops of one kernel."""

    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        tiling: PlaneTiling,
        kernel: Three,
        machine: Machine,
        frame: GatherFrame,
    ) -> None:
        self.loops, self.gather, self.tiling, self.kernel, self.machine = loops, gather, tiling, kernel, machine
        self.source, self.weight, self.result, self.bias = frame.source, frame.weight, frame.result, frame.bias
        self.batch, self.epilogue, self.dtype = frame.batch, frame.epilogue, gather.dtype
        self.lanes = machine.lanes(self.dtype)
        self.inputs, self.outputs = gather.source_channels, gather.result_channels
        self.phases = [phase for phases in gather.phases for phase in phases]

    def emit(self) -> None:
        """All work items: slabs of planes of the result, in their order in memory."""
        loops, gather, slabs = self.loops, self.gather, self.tiling.slabs
        depths = -(-gather.result.extents[0] // gather.out_step[0])
        channels = gather.groups * self.outputs
        macs = gather.batch * channels * self.inputs * math.prod(self.kernel) * math.prod(gather.result.extents)
        kind = "parallel" if macs >= self.machine.parallel_from else "serial"
        with loops.loop(self.batch * (channels * depths * slabs), "item", kind) as item:
            slab, rest = loops.let(remainder(item, slabs), "slab"), quotient(item, slabs)
            qd, rest = loops.let(remainder(rest, depths), "qd"), loops.let(quotient(rest, depths), "rest")
            channel, n = loops.let(remainder(rest, channels), "channel"), quotient(rest, channels)
            g, m = quotient(channel, self.outputs), remainder(channel, self.outputs)
            n, g = loops.let(n, "n"), loops.let(g, "g")
            source = n * gather.source.batch + g * (self.inputs * gather.source.channel)
            result = n * gather.result.batch + channel * gather.result.channel
            weight = g * gather.weight_group + m * gather.weight_result
            self._plane(slab, qd, channel, *(loops.let(expr(v), "at") for v in (source, result, weight)))

    def _plane(self, slab: Any, qd: Any, channel: Any, source: Any, result: Any, weight: Any) -> None:
        loops, gather = self.loops, self.gather
        bias = None
        if self.epilogue.bias:
            bias = loops.let(splat(convert(load(self.bias, channel), self.dtype), self.lanes), "bias")
        for depth in dict.fromkeys(phase[0] for phase in self.phases):
            with loops.when(expr(qd) < depth.count):
                at = result + (qd * gather.out_step[0] + depth.base) * gather.result.spatial[0]
                at = loops.let(expr(at), "to_plane")
                taps = valid_taps(loops, depth.taps, depth.count, gather.in_step[0], gather.source.extents[0], qd)
                for line in dict.fromkeys(phase[1] for phase in self.phases if phase[0] == depth):
                    columns = [phase[2] for phase in self.phases if phase[:2] == (depth, line)]
                    _Lines(self, depth, line, columns).emit(slab, qd, taps, source, at, weight, bias)


class _Lines:
    """The lines of one phase of a plane, with all its phases of columns."""

    def __init__(self, planes: Planes, depth: AxisPhase, line: AxisPhase, columns: list[AxisPhase]) -> None:
        self.p, self.loops, self.gather = planes, planes.loops, planes.gather
        self.depth, self.line, self.columns = depth, line, columns
        gather = self.gather
        self.lanes, self.dtype = planes.lanes, planes.dtype
        self.count = max(column.count for column in columns)
        self.offsets = sorted({offset for column in columns for _, offset in column.taps})
        taps = len(line.taps) * sum(len(column.taps) for column in columns)
        self.is_rolled = is_rolled(gather, taps)
        self.folded = planes.tiling.folded
        self.reader = LineReader(self.loops, self.lanes, gather.in_step[2], self.count, gather.source.extents[2])
        self.is_single = planes.inputs == 1 and len(depth.taps) == 1  # one pass: weights are read once for a plane
        self.is_empty = not (depth.taps and line.taps and self.offsets)

    def emit(self, slab: Any, qd: Any, taps: Any, source: Any, result: Any, weight: Any, bias: Any) -> None:
        """Tiles of lines, in groups whose lines meet their taps alike."""
        loops = self.loops
        pieces = line_pieces(self.gather, self.line, self.p.tiling.lines, self.folded)
        tiles = sum(repeats for _, _, repeats, _ in pieces)
        per_slab = -(-tiles // self.p.tiling.slabs)
        before = 0
        factors = None
        if self.is_single and not self.is_rolled and not self.is_empty:
            factors = self._factors(self._weights_at(weight, 0, taps[0]))
        for begin, size, repeats, met in pieces:
            first, count = 0, repeats
            if self.p.tiling.slabs > 1:
                first = loops.let(tirx.max(expr(slab * per_slab - before), expr(0)), "first_tile")
                count = loops.let(smaller((slab + 1) * per_slab - before, repeats) - first, "tiles")
            with loops.loop(count, "tile") as tile:
                q = loops.let(expr(begin + (first + tile) * size), "q")
                vectors = -(-self.count // self.lanes)
                with loops.loop(vectors, "v") as v:
                    x = loops.let(expr(v * self.lanes), "x") if vectors > 1 else 0
                    self._tile(q, x, size, met, qd, taps, source, result, weight, bias, factors)
            before += repeats

    def _tile(
        self,
        q: Any,
        x: Any,
        size: int,
        met: list[list[int]],
        qd: Any,
        taps: Any,
        source: Any,
        result: Any,
        weight: Any,
        bias: Any,
        factors: Any,
    ) -> None:
        loops, gather, lanes = self.loops, self.gather, self.lanes
        tile = [[loops.buffer("sum", lanes, self.dtype) for _ in self.columns] for _ in range(size)]
        for registers in tile:
            for register in registers:
                loops.store(register, 0, zero(self.dtype, lanes))
        if not self.is_empty:
            first_d, count_d = taps
            _, _, low_d, pace_d = run_of_taps(self.depth.taps)
            with loops.loop(self.p.inputs, "j") as j, loops.loop(count_d, "kd") as kd:
                z = qd * gather.in_step[0] + low_d + (first_d + kd) * pace_d
                at = source + j * gather.source.channel + z * gather.source.spatial[0]
                at = loops.let(expr(at + q * (gather.in_step[1] * gather.source.spatial[1])), "from")
                if self.line.base == 0:
                    met_lines, vectors = size * gather.in_step[1], gather.in_step[2]
                    pitch = self.folded * gather.source.spatial[1]
                    prefetch_ahead(loops, self.p.source, at + x * vectors, pitch, met_lines, vectors, lanes)
                self._sum(tile, met, at, x, self._weights_at(weight, j, first_d + kd), factors)
        step = self.folded * gather.out_step[1] * gather.result.spatial[1]
        to = loops.let(expr(result + q * step + self.line.base * gather.result.spatial[1]), "to")
        prefetch_ahead(
            loops, self.p.result, to + x * gather.out_step[2], step, size, gather.out_step[2], lanes, write=True
        )
        for i, registers in enumerate(tile):
            width = gather.result.extents[2]
            if self.folded > 1:
                width *= min(self.folded, self.line.count - i * self.folded)
            self._store(registers, to + i * step, x, width, bias)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _weights_at(self, weight: Any, j: Any, td: Any) -> Any:
        """Where the weights of an input and a depth tap begin."""
        gather = self.gather
        k_d, step_d, _, _ = run_of_taps(self.depth.taps)
        return self.loops.let(
            expr(weight + j * gather.weight_source + (k_d + td * step_d) * gather.weight.spatial[0]), "weights"
        )

    def _factor(self, at: Any, k_h: int, k_w: Any) -> Any:
        _, height, width = self.gather.weight.spatial
        value = convert(load(self.p.weight, at + k_h * height + k_w * width), self.dtype)
        return self.loops.let(splat(value, self.lanes), "factor")

    def _factors(self, at: Any) -> dict[tuple[int, int], Any]:
        """All weights of the phase, by the kernel's line and column."""
        return {
            (k_h, k_w): self._factor(at, k_h, k_w)
            for k_h, _ in self.line.taps
            for column in self.columns
            for k_w, _ in column.taps
        }

    def _sum(self, tile: list[list[Any]], met: list[list[int]], at: Any, x: Any, weights: Any, factors: Any) -> None:
        loops, gather, lanes = self.loops, self.gather, self.lanes
        ordered = sorted(self.line.taps, key=lambda tap: tap[1])
        lines: dict[int, list[tuple[int, int]]] = {}  # a source line, from the tile's first: (result line, kernel line)
        for (k_h, offset), positions in zip(ordered, met, strict=True):
            for i in positions:
                lines.setdefault(i * self.folded * gather.in_step[1] + offset, []).append((i, k_h))
        pitch = gather.source.spatial[1]

        def add(register: Any, value: Any, factor: Any) -> None:
            loops.store(register, 0, load(register, 0, lanes) + value * factor)

        if self.is_rolled:
            (column,) = self.columns
            k_w, step_w, low_w, pace_w = run_of_taps(column.taps)
            with loops.loop(len(column.taps), "kw") as kw:
                number = k_w + kw * step_w
                rows = {k_h: self._factor(weights, k_h, number) for k_h, _ in self.line.taps}
                offset = loops.let(expr(low_w + kw * pace_w), "offset")
                for s in sorted(lines):
                    (value,) = self._read(s, at + s * pitch, x, [offset])
                    value = loops.let(value, "line")
                    for i, k_h in lines[s]:
                        add(tile[i][0], value, rows[k_h])
            return
        factors = self._factors(weights) if factors is None else factors
        for s in sorted(lines):
            values = self._read(s, at + s * pitch, x, self.offsets)
            for wanted, value in zip(self.offsets, values, strict=True):
                value = loops.let(value, "line")
                for number, column in enumerate(self.columns):
                    for k_w, offset in column.taps:
                        if offset == wanted:
                            for i, k_h in lines[s]:
                                add(tile[i][number], value, factors[k_h, k_w])

    def _read(self, line: int, at: Any, x: Any, offsets: list[Any]) -> list[Any]:
        """A line of the source, or those of a vector, for each offset of columns."""
        if self.folded == 1:
            return self.reader.read(self.p.source, at, x, offsets)
        _, height, width = self.gather.source.extents
        reader = FoldedReader(self.lanes, self.folded, height, width)
        return [reader.read(self.p.source, at, line, offset) for offset in offsets]

    # -- the result ---------------------------------------------------------------------------------------------

    def _store(self, registers: list[Any], to: Any, x: Any, width: int, bias: Any) -> None:
        loops, lanes = self.loops, self.lanes
        values = [loops.let(load(register, 0, lanes), "total") for register in registers]
        if len(values) == 2:
            values = list(interleaved(loops, values[0], values[1], lanes))
        whole = width % (lanes * len(values)) == 0
        for number, value in enumerate(values):
            first = x * len(values) + number * lanes
            mask = lanes_below(first, width, lanes)
            place = to + first
            total = self.p.epilogue.apply(
                value, self.dtype, lambda: bias, lambda p=place, m=mask: load_masked(self.p.result, p, m, lanes)
            )
            if whole:
                loops.store(self.p.result, place, total)
            else:
                loops.store_masked(self.p.result, place, total, mask)


def line_pieces(
    gather: Gather, line: AxisPhase, lines: int, folded: int
) -> list[tuple[int, int, int, list[list[int]]]]:
    """The tiles of a phase's lines, or of vectors of them, as `pieces_of` has them."""
    height = gather.source.extents[1]
    if folded == 1:
        return pieces_of(line.count, lines, line.taps, gather.in_step[1], height)
    vectors = -(-line.count // folded)
    ordered = sorted(offset for _, offset in line.taps)
    met = [[i for i in range(vectors) if -folded < i * folded + offset < height] for offset in ordered]
    return [(0, vectors, 1, met)]


def lines_of_a_vector(gather: Gather, lanes: int) -> int:
    """How many lines of a plane fit into a vector: more than one only where both tensors have them side by side."""
    width = gather.result.extents[2]
    same = gather.source.extents[2] == width and gather.in_step[1:] == gather.out_step[1:] == (1, 1)
    joined = gather.source.spatial[1] == gather.result.spatial[1] == width
    return max(1, min(lanes // width, gather.result.extents[1])) if same and joined else 1


def plane_products(gather: Gather, lines: int, folded: int) -> tuple[int, int]:
    """(multiply-adds that the code has, those of a vector of columns through all of a plane) of a depth tap."""
    emitted = run = 0
    for phase in (phase for phases in gather.phases for phase in phases):
        _, line, column = phase
        columns = len(column.taps)
        for _, _, repeats, met in line_pieces(gather, line, lines, folded):
            products = sum(map(len, met))
            emitted += products * (1 if is_rolled(gather, len(line.taps) * columns) else columns)
            run += products * repeats * columns
    return emitted, run


def is_rolled(gather: Gather, taps: int) -> bool:
    """Whether column taps are a loop."""
    return taps > UNROLLED_TAPS and gather.in_step[2] == gather.out_step[2] == 1


__all__ = ["PlaneTiling", "Planes", "lines_of_a_vector", "plane_products"]
