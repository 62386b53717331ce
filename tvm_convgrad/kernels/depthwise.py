# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions: one input channel a group, so nothing is shared between channels: vectors run over them.

wgrad:   dW[tap, c] = sum over pixels of dY[pixel, c] * X[pixel * stride + tap * dilation, c]
         X and dY are packed by slabs into panels [line][column][lanes of channels] (transposed from NCHW); the register
         tile holds one vector for each tap.
gather:  out[pixel, c] = sum over taps of source[pixel * step + offset, c] * W[tap, c], for channels that are neighbours
         in memory (NHWC); the register tile holds one vector for each of some pixels of a line.
"""

from __future__ import annotations

import itertools
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
from tvm_convgrad.kernels.tile import Tile, balanced
from tvm_convgrad.kernels.weight_panels import WeightPanels
from tvm_convgrad.kernels.weight_spec import WeightSpec, WeightTiling
from tvm_convgrad.problem import ConvProblem


def depthwise_weight_kernel(
    problem: ConvProblem, detail: tuple[WeightSpec, WeightTiling, int], machine: Machine, name: str
) -> Any:
    """The PrimFunc (grad, data, weight's gradient); the spec sees all channels as one group, beside the multiplier."""
    spec, tiling, multiplier = detail
    loops = Loops()
    parameters = [make_parameter(key, *problem.tensors[key]) for key in ("grad", "data", "weight")]
    sizes = (spec.dy.size, spec.x.size, spec.dw.size)
    dy, x, dw = (loops.flat(p, size) for p, size in zip(parameters, sizes, strict=True))
    _DepthwiseWeight(loops, spec, tiling, machine, dy, x, dw, multiplier).emit()
    return loops.finish(parameters, name)


class _DepthwiseWeight(WeightPanels):
    def __init__(self, *arguments: Any) -> None:
        *base, self.multiplier = arguments
        super().__init__(*base)
        self.chunk = balanced(len(self.taps), min(len(self.taps), self.machine.registers * 3 // 4))
        plain = self.spec.dy.spatial[2] == 1 and self.multiplier * self.spec.dy.channel != 1
        self.grad_transposes = plain and self.spec.dy.dtype == self.spec.dtype and self.machine.has_masks
        columns = self.spec.dy.extents[2]
        self.grad_pitch = -(-columns // self.lanes) * self.lanes if self.grad_transposes else columns

    def emit(self) -> None:
        """All work items, then the last pass."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        planes, height = spec.batch * spec.dy.extents[0], spec.dy.extents[1]
        line_slabs = height // tiling.lines
        slabs = planes // tiling.planes * line_slabs
        per_part = -(-slabs // tiling.parts)
        parts = -(-slabs // per_part)
        blocks, taps = self.in_blocks, len(self.taps)
        block_size = self.multiplier * taps * lanes
        sums = loops.buffer("sums", parts * blocks * block_size, spec.dtype)
        # Where channels are neighbours, a line of memory has those of several blocks: all blocks of a slab in turn.
        outer, inner = (1, blocks) if spec.x.channel == 1 else (blocks, 1)
        with loops.loop(outer * parts, "item", self.kind) as item:
            part, outer_block = loops.let(remainder(item, parts), "part"), loops.let(quotient(item, parts), "outer")
            panel_size = tiling.planes * spec.kernel[0] * self.panel_lines * self.pitch * lanes
            panel = loops.buffer("x_panel", panel_size, spec.dtype)
            grads = loops.buffer("grad_panel", tiling.planes * tiling.lines * self.grad_pitch * lanes, spec.dtype)
            with loops.loop(smaller(slabs - part * per_part, per_part), "s") as s, loops.loop(inner, "inner") as b:
                block = loops.let(outer_block + b, "block")
                first = loops.let(expr(block * lanes), "c0")
                base = loops.let(expr((part * blocks + block) * block_size), "sums_at")
                slab = loops.let(expr(part * per_part + s), "slab")
                plane = loops.let(quotient(slab, line_slabs) * tiling.planes, "plane")
                line = loops.let(remainder(slab, line_slabs) * tiling.lines, "line0")
                self._pack(panel, plane, line, 0, first)
                with loops.loop(self.multiplier, "m") as m:
                    self._pack_grad(grads, plane, line, first, m)
                    at = loops.let(expr(base + m * (taps * lanes)), "at")
                    for tap in range(0, taps, self.chunk):
                        tile = self._sum_taps(panel, grads, self.taps[tap : tap + self.chunk])
                        self.keep(tile, sums, at + tap * lanes, s)
        with loops.loop(blocks, "block") as block, loops.loop(self.multiplier, "m") as m:
            self._write_block(sums, block, m, parts, blocks * block_size)

    def _pack_grad(self, grads: Any, plane: Any, line: Any, first: Any, m: Any) -> None:
        """dY of a slab, of the channels c * multiplier + m."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        dy, (depth, _, columns) = spec.dy, spec.dy.extents
        step = self.multiplier * dy.channel
        with loops.loop(tiling.planes, "p") as p, loops.loop(tiling.lines, "l") as line_number:
            number = loops.let(plane + p, "number")
            at = quotient(number, depth) * dy.batch + remainder(number, depth) * dy.spatial[0]
            at = loops.let(at + (line + line_number) * dy.spatial[1] + first * step + m * dy.channel, "from")
            into = loops.let((p * tiling.lines + line_number) * (self.grad_pitch * lanes), "into")
            if self.grad_transposes:
                with loops.loop(self.grad_pitch // lanes, "chunk") as chunk:
                    rows = []
                    for c in range(lanes):
                        limit = choose(expr(first + c) < spec.in_channels, columns, 0)
                        mask = lanes_below(chunk * lanes, limit, lanes)
                        rows.append(loops.let(load_masked(self.dy, at + c * step + chunk * lanes, mask, lanes), "row"))
                    for i, value in enumerate(transpose(loops, rows)):
                        loops.store(grads, into + (chunk * lanes + i) * lanes, value)
                return
            with loops.loop(columns, "x") as x:
                pixel = loops.let(at + x * dy.spatial[2], "pixel")
                if step == 1 and dy.dtype == spec.dtype and self.machine.has_masks:
                    value = load_masked(self.dy, pixel, lanes_below(first, spec.in_channels, lanes), lanes)
                    loops.store(grads, into + x * lanes, value)
                    return
                with loops.loop(lanes, "c") as c:
                    value = convert(load(self.dy, pixel + c * step), spec.dtype)
                    inside = expr(first + c) < spec.in_channels
                    loops.store(grads, into + x * lanes + c, choose(inside, value, zero(spec.dtype)))

    def _sum_taps(self, panel: Any, grads: Any, taps: list[tuple[int, ...]]) -> Tile:
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        tile = Tile(loops, len(taps), 1, lanes, spec.dtype)
        shifts = [
            ((kd * self.panel_lines + kh * spec.dilation[1]) * self.pitch + kw * spec.dilation[2]) * lanes
            for kd, kh, kw in taps
        ]
        with loops.loop(tiling.planes, "p") as p, loops.loop(tiling.lines, "l") as line_number:
            plane = p * (spec.kernel[0] * self.panel_lines)
            x_line = loops.let((plane + line_number * self.line_step) * (self.pitch * lanes), "x_line")
            grad_line = loops.let((p * tiling.lines + line_number) * (self.grad_pitch * lanes), "grad_line")
            with loops.loop(spec.dy.extents[2], "x") as x:
                at = loops.let(x_line + x * (self.column_step * lanes), "at")
                grad = loops.let(grad_line + x * lanes, "grad_at")
                tile.add(
                    lambda i: load(panel, at + shifts[i], lanes),
                    lambda j: load(grads, grad, lanes),
                )
        return tile

    def _write_block(self, sums: Any, block: Any, m: Any, parts: int, part_size: int) -> None:
        loops, spec, lanes, dw = self.loops, self.spec, self.lanes, self.spec.dw
        taps = len(self.taps)
        table = Numbers(
            loops, "dw_taps", [sum(k * s for k, s in zip(tap, dw.spatial, strict=True)) for tap in self.taps]
        )
        first = loops.let(expr(block * lanes), "c0")
        with loops.loop(smaller(spec.in_channels - first, lanes), "c") as c, loops.loop(taps, "tap") as tap:
            at = ((block * self.multiplier + m) * taps + tap) * lanes + c
            value = load(sums, at)
            for part in range(1, parts):
                value = value + load(sums, at + part * part_size)
            channel = (first + c) * self.multiplier + m
            loops.store(self.dw, channel * dw.out + table.at(tap), value)


# ------------------------------------------------------------------------------------------------- gathers


def depthwise_gather_kernel(
    gather: Gather, lines: int, machine: Machine, name: str, shapes: dict[str, tuple[tuple[Any, ...], str]]
) -> Any:
    """The PrimFunc (source, weight, result) of a depthwise gather with multiplier 1 and neighbouring channels."""
    loops = Loops()
    parameters = [make_parameter(key, *shapes[key]) for key in ("source", "weight", "result")]
    sizes = (gather.source.size, gather.weight.size, gather.result.size)
    source, weight, result = (loops.flat(p, size) for p, size in zip(parameters, sizes, strict=True))
    for phases in gather.phases:
        for phase in phases:
            _DepthwisePhase(loops, gather, phase, lines, machine).emit(source, weight, result)
    return loops.finish(parameters, name)


class _DepthwisePhase:
    def __init__(self, loops: Loops, gather: Gather, phase: Phase, lines: int, machine: Machine) -> None:
        self.loops, self.gather, self.phase, self.machine = loops, gather, phase, machine
        self.lanes = machine.lanes(gather.dtype)
        self.counts = tuple(axis.count for axis in phase)
        self.lines = max(n for n in range(1, min(lines, self.counts[1]) + 1) if self.counts[1] % n == 0)
        self.taps = list(itertools.product(*(axis.taps for axis in phase)))
        offsets = [[offset for _, offset in axis.taps] or [0] for axis in phase]
        self.low = [min(o) for o in offsets]
        self.depths = sorted(set(offsets[0]))
        self.panel_lines = (self.lines - 1) * gather.in_step[1] + max(offsets[1]) - self.low[1] + 1
        self.panel_columns = (self.counts[2] - 1) * gather.in_step[2] + max(offsets[2]) - self.low[2] + 1

    def emit(self, source: Any, weight: Any, result: Any) -> None:
        """Panels of W and of slabs of the source, and the sums."""
        loops, gather, lanes = self.loops, self.gather, self.lanes
        dtype, channels = gather.dtype, gather.groups
        blocks = -(-channels // lanes)
        (d, h, w), taps = self.counts, len(self.taps)
        macs = gather.batch * channels * d * h * w * max(1, taps)
        kind = "parallel" if macs >= PARALLEL_FROM else "serial"
        strides = gather.weight.spatial
        offsets = [sum(k * s for (k, _), s in zip(tap, strides, strict=True)) for tap in self.taps]
        w_taps = Numbers(loops, "w_taps", offsets)
        starts = Numbers(
            loops,
            "starts",
            [
                ((self.depths.index(od) * self.panel_lines + oh - self.low[1]) * self.panel_columns + ow - self.low[2])
                * lanes
                for (_, od), (_, oh), (_, ow) in self.taps
            ],
        )
        packed = loops.buffer("w_panel", blocks * max(1, taps) * lanes, dtype)
        with loops.loop(blocks, "b") as b, loops.loop(taps, "tap") as tap, loops.loop(lanes, "c") as c:
            channel = b * lanes + c
            value = convert(load(weight, channel * gather.weight_group + w_taps.at(tap)), dtype)
            loops.store(packed, (b * taps + tap) * lanes + c, choose(expr(channel) < channels, value, zero(dtype)))
        slabs = h // self.lines
        panel_size = len(self.depths) * self.panel_lines * self.panel_columns * lanes
        with loops.loop(gather.batch * d * slabs * blocks, "item", kind) as item:
            b, rest = loops.let(remainder(item, blocks), "b"), quotient(item, blocks)
            line, rest = loops.let(remainder(rest, slabs) * self.lines, "line"), quotient(rest, slabs)
            qd, n = loops.let(remainder(rest, d), "qd"), loops.let(quotient(rest, d), "n")
            first = loops.let(expr(b * lanes), "c0")
            panel = loops.buffer("panel", panel_size, dtype)
            self._pack(source, panel, n, qd, line, first)
            pixels = balanced(w, min(w, 12))
            out = n * gather.result.batch + qd * (gather.result.spatial[0] * gather.out_step[0]) + first
            out = out + sum(axis.base * s for axis, s in zip(self.phase, gather.result.spatial, strict=True))
            out = loops.let(out + line * (gather.result.spatial[1] * gather.out_step[1]), "out")
            with loops.loop(self.lines, "l") as line_number, loops.loop(-(-w // pixels), "t") as t:
                x = loops.let(smaller(t * pixels, w - pixels), "x")
                at = (line_number * gather.in_step[1]) * self.panel_columns + x * gather.in_step[2]
                at = loops.let(expr(at * lanes), "at")
                tile = Tile(loops, pixels, 1, lanes, dtype)
                with loops.loop(taps, "tap") as tap:
                    place = loops.let(expr(at + starts.at(tap)), "place")
                    tile.add(
                        lambda i: load(panel, place + i * gather.in_step[2] * lanes, lanes),
                        lambda j: load(packed, (b * taps + tap) * lanes, lanes),
                    )
                step = gather.result.spatial[2] * gather.out_step[2]
                to = loops.let(out + line_number * (gather.result.spatial[1] * gather.out_step[1]) + x * step, "to")
                mask = lanes_below(first, channels, lanes)
                for i in range(pixels):
                    loops.store_masked(result, to + i * step, tile.value(i, 0), mask)

    def _pack(self, source: Any, panel: Any, n: Any, qd: Any, line: Any, first: Any) -> None:
        """The panel [depth offset][line][column][lanes of channels], zero outside the source."""
        loops, gather, lanes, view = self.loops, self.gather, self.lanes, self.gather.source
        depths = Numbers(loops, "depths", self.depths)
        mask = lanes_below(first, gather.groups, lanes)
        with loops.loop(len(self.depths), "k") as k, loops.loop(self.panel_lines, "r") as r:
            d = loops.let(expr(qd * gather.in_step[0] + depths.at(k)), "d")
            h = loops.let(expr(line * gather.in_step[1] + r + self.low[1]), "h")
            valid = loops.let(tirx.And(within(d, view.extents[0]), within(h, view.extents[1])), "valid")
            base = loops.let(n * view.batch + d * view.spatial[0] + h * view.spatial[1] + first, "from")
            into = loops.let(expr((k * self.panel_lines + r) * (self.panel_columns * lanes)), "into")
            with loops.loop(self.panel_columns, "x") as x:
                column = loops.let(expr(x + self.low[2]), "column")
                inside = loops.let(tirx.And(valid, within(column, view.extents[2])), "inside")
                with loops.when(inside):
                    value = load_masked(source, base + column * view.spatial[2], mask, lanes)
                    loops.store(panel, into + x * lanes, value)
                with loops.otherwise(inside):
                    loops.store(panel, into + x * lanes, zero(gather.dtype, lanes))


__all__ = ["depthwise_gather_kernel", "depthwise_weight_kernel"]
