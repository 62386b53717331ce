# SPDX-License-Identifier: Apache-2.0
"""wgrad with few input channels (the first layer of a network): vectors over output channels, taps as rows.

    dW[o, (tap, i)] = sum over pixels of X[pixel * stride + tap * dilation, i] * dY[pixel, o]

The rows of the register tile are (tap, input channel) pairs, read as scalars from a panel [line][column][channel] of X
with borders of zeros; dY is packed as [line][column][lanes of output channels].
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.loops import (
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
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile, balanced
from tvm_convgrad.kernels.weight_panels import WeightPanels
from tvm_convgrad.kernels.weight_spec import WeightSpec, WeightTiling
from tvm_convgrad.problem import ConvProblem


def stem_weight_kernel(
    problem: ConvProblem, detail: tuple[WeightSpec, WeightTiling, int], machine: Machine, name: str
) -> Any:
    """The PrimFunc (grad, data, weight's gradient); the spec's in_channels are those that lanes run over: dY's."""
    spec, tiling, channels = detail
    loops = Loops()
    parameters = [make_parameter(key, *problem.tensors[key]) for key in ("grad", "data", "weight")]
    sizes = (spec.dy.size, spec.x.size, spec.dw.size)
    dy, x, dw = (loops.flat(p, size) for p, size in zip(parameters, sizes, strict=True))
    _StemWeight(loops, spec, tiling, machine, dy, x, dw, channels).emit()
    return loops.finish(parameters, name)


class _StemWeight(WeightPanels):
    def __init__(self, *arguments: Any) -> None:
        *base, self.channels = arguments
        super().__init__(*base)
        dy = self.spec.dy
        plain = dy.spatial[2] == 1 and dy.channel != 1
        self.grad_transposes = plain and dy.dtype == self.spec.dtype and self.machine.has_masks
        columns = dy.extents[2]
        self.grad_pitch = -(-columns // self.lanes) * self.lanes if self.grad_transposes else columns
        self.pitch = self.panel_columns
        self.rows = [(tap, i) for tap in self.taps for i in range(self.channels)]
        # Many rows: code for one line of the kernel, run for each of its lines and planes.
        most = self.machine.registers * 3 // 4
        line = self.spec.kernel[2] * self.channels
        self.repeats = len(self.rows) // line if len(self.rows) > 3 * most and line >= 8 else 1
        self.unrolled = len(self.rows) // self.repeats
        self.chunk = balanced(self.unrolled, min(self.unrolled, most))

    def shift_of(self, repeat: Any) -> Any:
        """Where the repeat-th line of the kernel starts in the panel of X."""
        if self.repeats == 1:
            return 0
        height, spec = self.spec.kernel[1], self.spec
        line = quotient(repeat, height) * self.panel_lines + remainder(repeat, height) * spec.dilation[1]
        return line * (self.pitch * self.channels)

    def emit(self) -> None:
        """All work items, then the last pass."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        planes, height = spec.batch * spec.dy.extents[0], spec.dy.extents[1]
        line_slabs = height // tiling.lines
        slabs = planes // tiling.planes * line_slabs
        per_part = -(-slabs // tiling.parts)
        parts = -(-slabs // per_part)
        blocks = self.in_blocks
        block_size = len(self.rows) * lanes
        sums = loops.buffer("sums", parts * blocks * block_size, spec.dtype)
        with loops.loop(parts, "part", self.kind) as part:
            size = tiling.planes * spec.kernel[0] * self.panel_lines * self.pitch * self.channels
            panel = loops.buffer("x_panel", size, spec.dtype)
            grads = loops.buffer("grad_panel", tiling.planes * tiling.lines * self.grad_pitch * lanes, spec.dtype)
            with loops.loop(smaller(slabs - part * per_part, per_part), "s") as s:
                slab = loops.let(expr(part * per_part + s), "slab")
                plane = loops.let(quotient(slab, line_slabs) * tiling.planes, "plane")
                line = loops.let(remainder(slab, line_slabs) * tiling.lines, "line0")
                self._pack_data(panel, plane, line)
                with loops.loop(blocks, "block") as block:
                    self._pack_grad(grads, plane, line, loops.let(expr(block * lanes), "c0"))
                    base = loops.let(expr((part * blocks + block) * block_size), "sums_at")
                    with loops.loop(self.repeats, "repeat") as repeat:
                        moved = loops.let(expr(self.shift_of(repeat)), "moved")
                        at = loops.let(expr(base + repeat * (self.unrolled * lanes)), "at")
                        for row in range(0, self.unrolled, self.chunk):
                            rows = self.rows[row : min(row + self.chunk, self.unrolled)]
                            self.keep(self._sum_rows(panel, grads, rows, moved), sums, at + row * lanes, s)
        with loops.loop(blocks, "block") as block:
            self._write_rows(sums, block, parts, blocks * block_size)

    def _pack_data(self, panel: Any, plane: Any, line: Any) -> None:
        """X of a slab: [plane][depth tap][line][column][channel], zero outside X."""
        loops, spec, tiling, x = self.loops, self.spec, self.tiling, self.spec.x
        depth = spec.dy.extents[0]
        fetched = spec.strides[1] if spec.kernel[1] == 1 else 1
        step = spec.strides[2] if spec.kernel[2] == 1 else 1
        with loops.loop(tiling.planes, "p") as p, loops.loop(spec.kernel[0], "kd") as kd:
            number = loops.let(expr(plane + p), "number")
            d = remainder(number, depth) * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]
            n = quotient(number, depth)
            with loops.loop(self.panel_lines, "r") as r:
                h = line * spec.strides[1] + r * fetched - spec.low[1]
                valid = loops.let(tirx.And(within(d, x.extents[0]), within(h, x.extents[1])), "valid")
                limit = loops.let(choose(valid, x.extents[2], 0), "limit")
                base = loops.let(expr(n * x.batch + d * x.spatial[0] + h * x.spatial[1]), "from")
                into = ((p * spec.kernel[0] + kd) * self.panel_lines + r) * (self.pitch * self.channels)
                into = loops.let(expr(into), "into")
                with loops.loop(self.panel_columns, "x") as c, loops.loop(self.channels, "i") as i:
                    column = expr(c * step - spec.low[2])
                    value = convert(load(self.x, base + column * x.spatial[2] + i * x.channel), spec.dtype)
                    inside = tirx.And(column >= 0, column < limit)
                    loops.store(panel, into + c * self.channels + i, choose(inside, value, zero(spec.dtype)))

    def _pack_grad(self, grads: Any, plane: Any, line: Any, first: Any) -> None:
        """dY of a slab: [plane][line][column][lanes of output channels]."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        dy, (depth, _, columns) = spec.dy, spec.dy.extents
        step = dy.channel
        with loops.loop(tiling.planes, "p") as p, loops.loop(tiling.lines, "l") as line_number:
            number = loops.let(plane + p, "number")
            at = quotient(number, depth) * dy.batch + remainder(number, depth) * dy.spatial[0]
            at = loops.let(at + (line + line_number) * dy.spatial[1] + first * step, "from")
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

    def _sum_rows(self, panel: Any, grads: Any, rows: list[tuple[tuple[int, ...], int]], moved: Any) -> Tile:
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        tile = Tile(loops, len(rows), 1, lanes, spec.dtype)
        shifts = [
            ((kd * self.panel_lines + kh * spec.dilation[1]) * self.pitch + kw * spec.dilation[2]) * self.channels + i
            for (kd, kh, kw), i in rows
        ]
        with loops.loop(tiling.planes, "p") as p, loops.loop(tiling.lines, "line") as line:
            x_line = (p * (spec.kernel[0] * self.panel_lines) + line * self.line_step) * (self.pitch * self.channels)
            x_line = loops.let(expr(x_line + moved), "x_line")
            grad_line = loops.let(expr((p * tiling.lines + line) * (self.grad_pitch * lanes)), "grad_line")
            with loops.loop(spec.dy.extents[2], "x") as x:
                at = loops.let(x_line + x * (self.column_step * self.channels), "at")
                grad = loops.let(grad_line + x * lanes, "grad_at")
                tile.add(lambda i: load(panel, at + shifts[i]), lambda j: load(grads, grad, lanes))
        return tile

    def _write_rows(self, sums: Any, block: Any, parts: int, part_size: int) -> None:
        loops, spec, lanes, dw = self.loops, self.spec, self.lanes, self.spec.dw
        offsets = [sum(k * s for k, s in zip(tap, dw.spatial, strict=True)) + i * dw.into for tap, i in self.rows]
        table = Numbers(loops, "dw_rows", offsets)
        first = loops.let(expr(block * lanes), "c0")
        with loops.loop(len(self.rows), "row") as row, loops.loop(smaller(spec.in_channels - first, lanes), "c") as c:
            at = (block * len(self.rows) + row) * lanes + c
            value = load(sums, at)
            for part in range(1, parts):
                value = value + load(sums, at + part * part_size)
            loops.store(self.dw, (first + c) * dw.out + table.at(row), value)


__all__ = ["stem_weight_kernel"]
