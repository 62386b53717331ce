# SPDX-License-Identifier: Apache-2.0
"""Implicit GEMM of wgrad: dW[o, tap, i] = sum over pixels of dY[pixel, o] * X[pixel * stride + tap * dilation, i].

Vectors run over input channels: X is packed, a slab of lines at a time, into a panel [line][column][channel] with
borders of zeros, from which every tap reads at its own offset. Output channels are the rows of the register tile; dY is
read where it is. A work item is a block of input channels (and a part of the pixels, where there are too few blocks);
its sums stay in a buffer of its own until all slabs are done. A last pass adds the parts in their order and writes dW.
"""

from __future__ import annotations

import itertools
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
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.spec import Three, View, WeightView
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile
from tvm_convgrad.problem import ConvProblem


@dataclass(frozen=True)
class WeightSpec:
    """wgrad in the terms of the kernel; extents over depth, height, width.

    Attributes:
        x, dy, dw: the tensors.
        batch, groups, out_channels, in_channels: the last two per group.
        kernel, strides, dilation, low: of the convolution; low is the padding before.
        dtype: of sums.
    """

    x: View
    dy: View
    dw: WeightView
    batch: int
    groups: int
    out_channels: int
    in_channels: int
    kernel: Three
    strides: Three
    dilation: Three
    low: Three
    dtype: str


@dataclass(frozen=True)
class WeightTiling:
    """How wgrad is cut.

    Attributes:
        rows, columns: of the register tile.
        lines: of dY in a slab; divides the height.
        planes: of dY in a slab; divides batch * depth, and is 1 unless a slab holds whole planes.
        parts: pieces of the pixels that are summed apart.
        splits: pieces of the output channels that are separate work items.
        parallel: whether threads pay.
    """

    rows: int
    columns: int
    lines: int
    planes: int
    parts: int
    splits: int
    parallel: bool


def weight_kernel(problem: ConvProblem, detail: tuple[WeightSpec, WeightTiling], machine: Machine, name: str) -> Any:
    """The PrimFunc (grad, data, weight's gradient)."""
    spec, tiling = detail
    loops = Loops()
    parameters = [make_parameter(key, *problem.tensors[key]) for key in ("grad", "data", "weight")]
    sizes = (spec.dy.size, spec.x.size, spec.dw.size)
    dy, x, dw = (loops.flat(p, size) for p, size in zip(parameters, sizes, strict=True))
    _Weight(loops, spec, tiling, machine, dy, x, dw).emit()
    return loops.finish(parameters, name)


class _Weight:
    def __init__(
        self, loops: Loops, spec: WeightSpec, tiling: WeightTiling, machine: Machine, dy: Any, x: Any, dw: Any
    ) -> None:
        self.loops, self.spec, self.tiling, self.machine = loops, spec, tiling, machine
        self.dy, self.x, self.dw = dy, x, dw
        self.lanes = machine.lanes(spec.dtype)
        self.width = tiling.columns * self.lanes
        self.in_blocks = -(-spec.in_channels // self.width)
        self.out_blocks = -(-spec.out_channels // tiling.rows)
        self.taps = list(itertools.product(*(range(k) for k in spec.kernel)))
        self.kind = "parallel" if tiling.parallel else "serial"
        _, kh, kw = spec.kernel
        # Without taps along an axis the panel holds only the lines or columns that are met.
        self.line_step = spec.strides[1] if kh > 1 else 1
        self.column_step = spec.strides[2] if kw > 1 else 1
        self.panel_lines = (tiling.lines - 1) * self.line_step + (kh - 1) * spec.dilation[1] + 1
        self.panel_columns = (spec.dy.extents[2] - 1) * self.column_step + (kw - 1) * spec.dilation[2] + 1
        self.pitch = -(-self.panel_columns // self.lanes) * self.lanes if self._transposes() else self.panel_columns
        self.tile_size = tiling.rows * self.width

    def _transposes(self) -> bool:
        """Whether X is packed by transposing registers: its columns are neighbours in memory, its channels not."""
        spec = self.spec
        step = spec.strides[2] if spec.kernel[2] == 1 else 1
        plain = spec.x.spatial[2] == 1 and spec.x.channel != 1 and spec.x.dtype == spec.dtype and step == 1
        return plain and self.machine.has_masks

    def emit(self) -> None:
        """All work items, then the last pass."""
        loops, spec, tiling = self.loops, self.spec, self.tiling
        self._convert_grad()
        planes, height = spec.batch * spec.dy.extents[0], spec.dy.extents[1]
        line_slabs = height // tiling.lines
        slabs = planes // tiling.planes * line_slabs
        per_part = -(-slabs // tiling.parts)
        parts = -(-slabs // per_part)
        per_split = -(-self.out_blocks // tiling.splits)
        splits = -(-self.out_blocks // per_split)
        blocks = spec.groups * self.in_blocks
        sums_size = self.out_blocks * len(self.taps) * self.tile_size  # of one block of input channels
        sums = loops.buffer("sums", parts * blocks * sums_size, spec.dtype)
        with loops.loop(blocks * parts * splits, "item", self.kind) as item:
            split, rest = loops.let(remainder(item, splits), "split"), quotient(item, splits)
            part, block = loops.let(remainder(rest, parts), "part"), loops.let(quotient(rest, parts), "block")
            group, in_block = loops.let(quotient(block, self.in_blocks), "g"), remainder(block, self.in_blocks)
            first_in = loops.let(in_block * self.width, "i0")
            panel_size = tiling.planes * spec.kernel[0] * self.panel_lines * self.pitch * self.width
            panel = loops.buffer("x_panel", panel_size, spec.dtype)
            tables = self._tables()
            base = loops.let((part * blocks + block) * sums_size, "sums_at")
            first_out = loops.let(split * per_split, "first_out")
            out_count = loops.let(smaller(self.out_blocks - first_out, per_split), "out_count")
            with loops.loop(smaller(slabs - part * per_part, per_part), "s") as s:
                slab = loops.let(part * per_part + s, "slab")
                plane = loops.let(quotient(slab, line_slabs) * tiling.planes, "plane")
                line = loops.let(remainder(slab, line_slabs) * tiling.lines, "line0")
                self._pack(panel, plane, line, group, first_in)
                with loops.loop(out_count, "o") as o:
                    out_block = loops.let(first_out + o, "out_block")
                    with loops.loop(len(self.taps), "tap") as tap:
                        at = loops.let(base + (out_block * len(self.taps) + tap) * self.tile_size, "tile_at")
                        tile = self._sum(panel, loops.let(load(tables, tap), "shift"), plane, line, group, out_block)
                        self._keep(tile, sums, at, s)
        with loops.loop(blocks * self.out_blocks, "tile", self.kind) as item:
            self._write(sums, item, parts, blocks * sums_size)

    def _convert_grad(self) -> None:
        """dY of another type is converted once, as its elements are read many times."""
        loops, spec = self.loops, self.spec
        if spec.dy.dtype == spec.dtype:
            return
        size, pieces = spec.dy.size, min(spec.dy.size, 64)
        piece = -(-size // pieces)
        converted = loops.buffer("grad_sums", size, spec.dtype)
        with loops.loop(-(-size // piece), "piece", self.kind) as number:
            first = loops.let(number * piece, "first")
            with loops.loop(smaller(size - first, piece), "e") as e:
                loops.store(converted, first + e, load(self.dy, first + e))
        self.dy = converted

    def _tables(self) -> Any:
        spec = self.spec
        shifts = [
            ((kd * self.panel_lines + kh * spec.dilation[1]) * self.pitch + kw * spec.dilation[2]) * self.width
            for kd, kh, kw in self.taps
        ]
        return self.loops.table("tap_shifts", shifts)

    # -- the panel of X -----------------------------------------------------------------------------------------

    def _pack(self, panel: Any, plane: Any, line: Any, group: Any, first_in: Any) -> None:
        """The panel of a slab: [plane][depth tap][line][column][channel of the block]."""
        loops, spec, tiling = self.loops, self.spec, self.tiling
        x, depth = spec.x, spec.dy.extents[0]
        channel = loops.let(group * spec.in_channels + first_in, "channel")
        line_scale = spec.strides[1]
        fetched = spec.strides[1] if spec.kernel[1] == 1 else 1
        with loops.loop(tiling.planes, "p") as p, loops.loop(spec.kernel[0], "kd") as kd:
            number = loops.let(plane + p, "number")
            d = remainder(number, depth) * spec.strides[0] + kd * spec.dilation[0] - spec.low[0]
            n = quotient(number, depth)
            with loops.loop(self.panel_lines, "r") as r:
                h = line * line_scale + r * fetched - spec.low[1]
                valid = loops.let(tirx.And(within(d, x.extents[0]), within(h, x.extents[1])), "valid")
                base = n * x.batch + d * x.spatial[0] + h * x.spatial[1] + channel * x.channel
                base = loops.let(expr(base), "from")
                into = ((p * spec.kernel[0] + kd) * self.panel_lines + r) * (self.pitch * self.width)
                into = loops.let(into, "into")
                if self._transposes():
                    self._pack_transposed(panel, into, base, valid, first_in)
                else:
                    self._pack_columns(panel, into, base, valid, first_in)

    def _pack_transposed(self, panel: Any, into: Any, base: Any, valid: Any, first_in: Any) -> None:
        """One line, `lanes` columns of `lanes` channels at a time, by transposing a square of registers."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        limit = loops.let(choose(valid, spec.x.extents[2], 0), "limit")
        ragged = spec.in_channels % self.width != 0
        with loops.loop(self.pitch // lanes, "c") as chunk:
            column = loops.let(chunk * lanes - spec.low[2], "column")
            with loops.loop(self.tiling.columns, "j") as j:
                rows = []
                for c in range(lanes):
                    within_block = limit
                    if ragged:
                        exists = expr(first_in + j * lanes + c) < spec.in_channels
                        within_block = choose(exists, limit, 0)
                    mask = lanes_within(column, within_block, lanes)
                    at = base + (j * lanes + c) * spec.x.channel + column
                    rows.append(loops.let(load_masked(self.x, at, mask, lanes), "row"))
                start = loops.let(into + chunk * lanes * self.width + j * lanes, "start")
                for c, value in enumerate(transpose(loops, rows)):
                    loops.store(panel, start + c * self.width, value)

    def _pack_columns(self, panel: Any, into: Any, base: Any, valid: Any, first_in: Any) -> None:
        """One line, the channels of a column at a time."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        x = spec.x
        step = spec.strides[2] if spec.kernel[2] == 1 else 1
        vectors = x.channel == 1 and x.dtype == spec.dtype
        ragged = spec.in_channels % self.width != 0
        with loops.loop(self.panel_columns, "c") as c:
            column = loops.let(expr(c * step - spec.low[2]), "column")
            inside = loops.let(tirx.And(valid, within(column, x.extents[2])), "inside")
            at = loops.let(base + column * x.spatial[2], "pixel")
            start = loops.let(into + c * self.width, "start")
            with loops.when(inside):
                if vectors and (not ragged or self.machine.has_masks):
                    for j in range(self.tiling.columns):
                        value = load(self.x, at + j * lanes, lanes)
                        if ragged:
                            mask = lanes_below(first_in + j * lanes, spec.in_channels, lanes)
                            value = load_masked(self.x, at + j * lanes, mask, lanes)
                        loops.store(panel, start + j * lanes, value)
                else:
                    with loops.loop(self.width, "i") as i:
                        value = convert(load(self.x, at + i * x.channel), spec.dtype)
                        if ragged:
                            value = choose(expr(first_in + i) < spec.in_channels, value, zero(spec.dtype))
                        loops.store(panel, start + i, value)
            with loops.otherwise(inside):
                for j in range(self.tiling.columns):
                    loops.store(panel, start + j * lanes, zero(spec.dtype, lanes))

    # -- sums ---------------------------------------------------------------------------------------------------

    def _sum(self, panel: Any, shift: Any, plane: Any, line: Any, group: Any, out_block: Any) -> Tile:
        """The tile of one tap and block of output channels over the pixels of a slab."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        dy, (depth, _, columns) = spec.dy, spec.dy.extents
        tile = Tile(loops, tiling.rows, tiling.columns, lanes, spec.dtype)
        channel = group * spec.out_channels + self._first_out(out_block)
        rows_joined = (
            spec.kernel[1:] == (1, 1)
            and self.pitch == columns
            and (tiling.lines == 1 or dy.spatial[1] == columns * dy.spatial[2])
        )
        line_count, pixel_count = (1, tiling.lines * columns) if rows_joined else (tiling.lines, columns)
        with loops.loop(tiling.planes, "p") as p:
            number = loops.let(plane + p, "number")
            grad = quotient(number, depth) * dy.batch + remainder(number, depth) * dy.spatial[0]
            grad = loops.let(grad + line * dy.spatial[1] + channel * dy.channel, "grad_plane")
            into = loops.let(shift + p * (spec.kernel[0] * self.panel_lines * self.pitch * self.width), "x_plane")
            with loops.loop(line_count, "l") as line_number:
                grad_line = loops.let(grad + line_number * dy.spatial[1], "grad_line")
                x_line = loops.let(into + line_number * (self.line_step * self.pitch * self.width), "x_line")
                with loops.loop(pixel_count, "x") as x:
                    a = loops.let(grad_line + x * dy.spatial[2], "a_at")
                    b = loops.let(x_line + x * (self.column_step * self.width), "b_at")
                    tile.add(
                        lambda i: load(self.dy, a + i * dy.channel),
                        lambda j: load(panel, b + j * lanes, lanes),
                    )
        return tile

    def _first_out(self, out_block: Any) -> Any:
        """The first output channel of a block; the last block overlaps the one before it."""
        return smaller(out_block * self.tiling.rows, self.spec.out_channels - self.tiling.rows)

    def _keep(self, tile: Tile, sums: Any, at: Any, slab_number: Any) -> None:
        """Add the tile to the item's sums; the first slab sets them."""
        loops, lanes = self.loops, self.lanes
        positions = [(i, j) for i in range(tile.rows) for j in range(tile.columns)]
        if isinstance(slab_number, int):
            for i, j in positions:
                loops.store(sums, at + (i * tile.columns + j) * lanes, tile.value(i, j))
            return
        first = slab_number < 1
        with loops.when(first):
            for i, j in positions:
                loops.store(sums, at + (i * tile.columns + j) * lanes, tile.value(i, j))
        with loops.otherwise(first):
            for i, j in positions:
                index = at + (i * tile.columns + j) * lanes
                loops.store(sums, index, load(sums, index, lanes) + tile.value(i, j))

    # -- the result ---------------------------------------------------------------------------------------------

    def _write(self, sums: Any, item: Any, parts: int, part_size: int) -> None:
        """One tile of all taps: parts added in order, into dW's own layout."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        dw, taps = spec.dw, len(self.taps)
        out_block, block = remainder(item, self.out_blocks), quotient(item, self.out_blocks)
        group, in_block = quotient(block, self.in_blocks), remainder(block, self.in_blocks)
        first_out = loops.let(expr(self._first_out(out_block)), "o0")
        first_in = loops.let(expr(in_block * self.width), "i0")
        base = loops.let(expr(item * (taps * self.tile_size)), "sums_at")
        table = loops.table("dw_taps", [sum(k * s for k, s in zip(tap, dw.spatial, strict=True)) for tap in self.taps])
        to = (group * spec.out_channels + first_out) * dw.out + first_in * dw.into
        to = loops.let(expr(to), "to")
        ragged = spec.in_channels % self.width != 0
        vectors = dw.into == 1 and dw.dtype == spec.dtype and (not ragged or self.machine.has_masks)

        def total(index: Any, lanes: int) -> Any:
            value = load(sums, index, lanes)
            for part in range(1, parts):
                value = value + load(sums, index + part * part_size, lanes)
            return value

        with loops.loop(tiling.rows, "o") as o:
            if vectors:
                with loops.loop(taps, "tap") as tap:
                    at = loops.let(base + tap * self.tile_size + o * self.width, "at")
                    into = loops.let(to + o * dw.out + load(table, tap), "into")
                    for j in range(tiling.columns):
                        value = total(at + j * lanes, lanes)
                        if ragged:
                            mask = lanes_below(first_in + j * lanes, spec.in_channels, lanes)
                            loops.store_masked(self.dw, into + j * lanes, value, mask)
                        else:
                            loops.store(self.dw, into + j * lanes, value)
                return
            count = loops.let(smaller(spec.in_channels - first_in, self.width), "count")
            with loops.loop(count, "i") as i, loops.loop(taps, "tap") as tap:
                value = total(base + tap * self.tile_size + o * self.width + i, 1)
                loops.store(self.dw, to + o * dw.out + i * dw.into + load(table, tap), value)


__all__ = ["WeightSpec", "WeightTiling", "weight_kernel"]
