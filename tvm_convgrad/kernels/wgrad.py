# SPDX-License-Identifier: Apache-2.0
"""Implicit GEMM of wgrad: dW[o, tap, i] = sum over pixels of dY[pixel, o] * X[pixel * stride + tap * dilation, i].

Vectors run over input channels: X is packed, a slab of lines at a time, into a panel [plane][line][column][channel],
from which every tap reads at its own offset, only the planes, lines and columns where it meets X: products with padding
are left out, and borders need no zeros. Output channels are the rows of the register tile. A
work item is some blocks of input channels and a piece of the output channels (and of the pixels, where there is too
little else to share); its sums stay in a buffer of its own. The last slab writes dW; where pixels are cut into parts, a
last pass adds them in their order.

Where pixels of X and dY meet one to one (1x1), both may change places, and neighbouring channels of X need no panel.
Other convolutions change places if the rows are X's channels at all taps, as few-channel ones have it: then vectors run
over dY's channels, and the rows' scalars come from a panel of X with borders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.loops import (
    Loops,
    ceiling,
    choose,
    expr,
    lanes_below,
    larger,
    less,
    load,
    load_masked,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile
from tvm_convgrad.kernels.weight_frame import WeightFrame
from tvm_convgrad.kernels.weight_panels import WeightPanels
from tvm_convgrad.kernels.weight_rows import Rows, rows_of
from tvm_convgrad.kernels.weight_spec import WeightSpec, WeightTiling
from tvm_convgrad.kernels.weight_write import WeightWriter
from tvm_convgrad.problem import ConvProblem


def weight_kernel(
    problem: ConvProblem,
    detail: tuple[WeightSpec, WeightTiling],
    machine: Machine,
    name: str,
    epilogue: Epilogue,
) -> Any:
    """The PrimFunc (grad, data, weight's gradient[, bias gradient]).

    Args:
        detail: the spec's batch is what the tiling is made for; the kernel loops over another one if the problem's is
            a name, which becomes a variable in the shapes of grad and data.
        epilogue: accumulate adds to what the weight's gradient holds; bias_grad adds the last parameter.
    """
    spec, tiling = detail
    loops = Loops()
    frame = WeightFrame(loops, problem, spec, epilogue)
    x, dy = frame.x, frame.dy
    if tiling.swapped:
        spec, dy, x = spec.swapped, x, dy
    _Weight(loops, spec, tiling, machine, dy, x, frame.dw, frame).emit()
    return loops.finish(frame.parameters, name)


@dataclass(frozen=True)
class _Slab:
    """A slab of a work item: its planes and lines; the group; the panel that holds its vectors, or None."""

    plane: Any
    planes: Any
    line: Any
    lines: Any
    group: Any
    panel: Any
    ahead: tuple[Any, Any] | None  # from dY's and X's elements to those of the next slab


class _Weight(WeightPanels):
    def __init__(self, loops: Loops, spec: WeightSpec, tiling: WeightTiling, machine: Machine, *rest: Any) -> None:
        *tensors, self.frame = rest
        super().__init__(loops, spec, tiling, machine, *tensors)
        if self.frame.is_symbolic:
            self.grad_size = self.frame.batch * spec.dy.batch

    def emit(self) -> None:
        """All work items, then the last pass."""
        loops, spec, tiling, frame = self.loops, self.spec, self.tiling, self.frame
        self.convert_grad()
        if not spec.is_whole and not frame.epilogue.accumulate:
            self.clear()
        total = frame.batch * spec.dy.extents[0]
        line_slabs = -(-spec.dy.extents[1] // tiling.lines)
        slabs = loops.let(ceiling(total, tiling.planes) * line_slabs, "all_slabs")
        per_part = loops.let(ceiling(slabs, tiling.parts), "per_part")
        parts = tiling.parts if frame.is_symbolic else -(-slabs // per_part)
        per_split = -(-self.out_blocks // tiling.splits)
        splits = -(-self.out_blocks // per_split)
        blocks, in_items = spec.groups * self.in_blocks, -(-self.in_blocks // tiling.inner)
        block_size = len(self.taps) * self.tile_size  # of a block of input and one of output channels
        part_size = blocks * self.out_blocks * block_size
        rows = rows_of(self)
        writer = WeightWriter(self, frame.epilogue.accumulate)
        bias = frame.bias_sum(self.machine)
        if bias is not None:
            bias.allocate(parts)
        shared = loops.buffer("sums", parts * part_size, spec.dtype) if parts > 1 else None
        with loops.loop(spec.groups * in_items * parts * splits, "item", self.kind) as item:
            split, rest = loops.let(remainder(item, splits), "split"), quotient(item, splits)
            part, rest = loops.let(remainder(rest, parts), "part"), loops.let(quotient(rest, parts), "rest")
            group = loops.let(quotient(rest, in_items), "g")
            first_block = loops.let(remainder(rest, in_items) * tiling.inner, "first_block")
            block_count = loops.let(smaller(self.in_blocks - first_block, tiling.inner), "block_count")
            first_out = loops.let(split * per_split, "first_out")
            out_count = loops.let(smaller(self.out_blocks - first_out, per_split), "out_count")
            panel = None if tiling.direct else loops.buffer("x_panel", self.panel.size, spec.dtype)
            rows.allocate(per_split)
            once = isinstance(slabs, int) and slabs == 1
            kept = 1 if once else tiling.inner * per_split
            sums = loops.buffer("sums", kept * block_size, spec.dtype) if shared is None else shared
            count = loops.let(smaller(slabs - part * per_part, per_part), "slabs")

            def place(b: Any, o: Any) -> Any:
                if shared is None:
                    return 0 if once else (b * per_split + o) * block_size
                block = (part * spec.groups + group) * self.in_blocks + first_block + b
                return (block * self.out_blocks + first_out + o) * block_size

            with loops.loop(count, "s") as s:
                slab = self._slab(part * per_part + s, total, slabs, line_slabs, group, panel)
                if bias is not None:
                    piece = (slab.plane, slab.planes, slab.line, slab.lines)
                    share = loops.let(rest * splits + split, "share")
                    bias.add(part, share, spec.groups * in_items * splits, piece, spec.dy.extents[0])
                rows.pack(slab, out_count, first_out)
                with loops.loop(block_count, "b") as b:
                    first_in = loops.let((first_block + b) * self.width, "i0")
                    if panel is not None:
                        self._pack(panel, slab.plane, slab.line, group, first_in, slab.planes, slab.lines)
                    for blocks_alike, numbers, offsets in rows.kinds(out_count):
                        with loops.loop(blocks_alike, "o") as index:
                            o = index if numbers is None else loops.let(numbers.at(index), "o")
                            base = loops.let(place(b, o), "sums_at")
                            with loops.loop(len(self.taps), "tap") as tap:
                                out_block = loops.let(first_out + o, "out_block")
                                tile = self._sum(slab, rows, offsets, tap, first_in, out_block, o)
                                self.keep(tile, sums, loops.let(base + tap * self.tile_size, "tile_at"), s)
                            if shared is None:
                                with loops.when(less(count - 1 - s, 1)):
                                    writer.write(sums, base, 1, 0, group, first_out + o, first_in)
            if frame.is_symbolic:
                with loops.when(less(count, 1)), loops.loop(block_count, "b") as b, loops.loop(out_count, "o") as o:
                    base = loops.let(place(b, o), "sums_at")
                    with loops.loop(block_size // self.lanes, "v") as v:
                        loops.store(sums, base + v * self.lanes, zero(spec.dtype, self.lanes))
                    if shared is None:
                        writer.write(sums, base, 1, 0, group, first_out + o, (first_block + b) * self.width)
        if shared is not None:
            with loops.loop(blocks * self.out_blocks, "tile", self.kind) as item:
                out_block, block = remainder(item, self.out_blocks), quotient(item, self.out_blocks)
                group, first_in = quotient(block, self.in_blocks), remainder(block, self.in_blocks) * self.width
                base = loops.let(expr(item * block_size), "sums_at")
                writer.write(shared, base, parts, part_size, group, out_block, first_in)
        if bias is not None:
            bias.write()

    def _slab(self, number: Any, total: Any, slabs: Any, line_slabs: int, group: Any, panel: Any) -> _Slab:
        loops, spec, tiling = self.loops, self.spec, self.tiling

        def begin(slab: Any) -> tuple[Any, Any]:
            return quotient(slab, line_slabs) * tiling.planes, remainder(slab, line_slabs) * tiling.lines

        number = loops.let(number, "slab")
        plane, line = (loops.let(v, name) for v, name in zip(begin(number), ("plane", "line0"), strict=True))
        whole = tiling.planes == 1 or (isinstance(total, int) and total % tiling.planes == 0)
        count = tiling.planes if whole else smaller(total - plane, tiling.planes)
        ahead = None
        if tiling.prefetched:
            following = begin(loops.let(expr(smaller(number + 1, slabs - 1)), "next"))
            ahead_dy, ahead_x = (
                loops.let(expr(self.at(view, *following, scale) - self.at(view, plane, line, scale)), "ahead")
                for view, scale in ((spec.dy, 1), (spec.x, spec.strides[1]))
            )
            ahead = (ahead_dy, ahead_x)
        height = spec.dy.extents[1]
        lines = tiling.lines if height % tiling.lines == 0 else smaller(height - line, tiling.lines)
        lines = loops.let(lines, "lines")
        return _Slab(plane, loops.let(count, "planes"), line, lines, group, panel, ahead)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _sum(
        self, slab: _Slab, rows: Rows, offsets: list[int], tap: Any, first_in: Any, out_block: Any, local_block: Any
    ) -> Tile:
        """The tile of one tap and block of output channels over the pixels of a slab."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        columns = spec.dy.extents[2]
        tile = Tile(loops, tiling.rows, tiling.columns, lanes, spec.dtype)
        source = self.x if slab.panel is None else slab.panel
        (first_depth, end_depth), (first_line, end_line), (first_column, end_column) = (
            [bound.at(tap if spec.gathered is None else out_block) for bound in bounds] for bounds in self.bounds
        )
        start, lines = 0, slab.lines
        if not self.meets_all[1]:  # opaque, as these are minima in sums
            start = loops.opaque(larger(expr(first_line - slab.line), 0), "start")
            lines = loops.opaque(larger(smaller(end_line - slab.line, slab.lines) - start, 0), "met_lines")
        pixels = loops.let(end_column - first_column, "met_columns")
        with loops.loop(slab.planes, "p") as p:
            number = loops.let(slab.plane + p, "number")
            a_plane, a_line, a_pixel = rows.at(slab, number, p, out_block, local_block)
            b_plane, b_line, b_pixel = self._vectors_at(slab, number, p, first_in, tap)
            alike = a_line == a_pixel * columns and b_line == b_pixel * columns and self.meets_all[2]
            joined = tiling.lines == 1 or alike
            line_count, pixel_count = (1, lines * pixels) if joined else (lines, pixels)
            a_plane = loops.let(expr(a_plane + start * a_line + first_column * a_pixel), "a_plane")
            b_plane = loops.let(expr(b_plane + start * b_line + first_column * b_pixel), "b_plane")
            if not self.meets_all[0]:
                depth = loops.let(remainder(number, spec.dy.extents[0]), "depth")
                met = tirx.And(depth >= first_depth, depth < end_depth)
                line_count = loops.let(choose(met, line_count, 0), "plane_lines")
            with loops.loop(line_count, "l") as line_number:
                a_from = loops.let(a_plane + line_number * a_line, "a_line")
                b_from = loops.let(b_plane + line_number * b_line, "b_line")
                with loops.loop(pixel_count, "x") as x:
                    a = loops.let(a_from + x * a_pixel, "a_at")
                    b = loops.let(b_from + x * b_pixel, "b_at")
                    if slab.ahead is not None:
                        self._prefetch(slab, number, line_number, x, first_in, out_block)
                    tile.add(
                        lambda i: load(rows.buffer, a + offsets[i]),
                        lambda j: self._vector(source, b, first_in, j, slab.panel is None),
                    )
        return tile

    def _prefetch(self, slab: _Slab, number: Any, line_number: Any, x: Any, first_in: Any, out_block: Any) -> None:
        """The lines of the next slab where this one's pixel is, of both operands.

        Where pixels are neighbours in memory, a line has as many of them as lanes: each asks for another channel's.
        """
        loops, spec, lanes = self.loops, self.spec, self.lanes
        ahead_dy, ahead_x = slab.ahead or (0, 0)
        sides = []
        if spec.gathered is None:
            first_out = self.first_out(out_block) + slab.group * spec.out_channels
            sides.append((self.dy, spec.dy, first_out, self.tiling.rows, ahead_dy))
        if spec.is_pointwise:
            sides.append((self.x, spec.x, first_in + slab.group * spec.in_channels, self.width, ahead_x))
        for buffer, view, channel, count, ahead in sides:
            at = self.at(view, number, slab.line + line_number) + channel * view.channel + ahead
            for first in range(0, count, lanes):
                if view.channel == 1:
                    loops.prefetch(buffer, at + x * view.spatial[2] + first)
                elif view.spatial[2] == 1:
                    lane = remainder(x, lanes)
                    loops.prefetch(buffer, at + (x - lane) + (first + lane) * view.channel)

    def _vector(self, source: Any, at: Any, first_in: Any, column: int, direct: bool) -> Any:
        lanes = self.lanes
        if direct and self.ragged:
            mask = lanes_below(first_in + column * lanes, self.spec.in_channels, lanes)
            return load_masked(source, at + column * lanes, mask, lanes)
        return load(source, at + column * lanes, lanes)

    def _vectors_at(self, slab: _Slab, number: Any, p: Any, first_in: Any, tap: Any) -> tuple[Any, int, int]:
        """Where the vectors of a plane begin, and their steps: a line, a pixel."""
        loops, spec, panel = self.loops, self.spec, self.panel
        if slab.panel is None:
            x = spec.x
            at = self.at(x, number, slab.line) + slab.group * spec.in_channels + first_in
            return at, x.spatial[1], x.spatial[2]
        plane = p * spec.kernel[0]
        if panel.shares_planes:
            depth, extent = spec.dy.extents[0], spec.x.extents[0]
            first, _ = spec.planes_met(slab.plane, 1)
            plane = quotient(number, depth) * extent + remainder(number, depth) * spec.strides[0] - spec.low[0] - first
        at = loops.let(self.shifts.at(tap), "shift") + plane * panel.plane_size
        return loops.let(expr(at), "vectors"), spec.line_step * panel.line_size, spec.column_step * self.width


__all__ = ["WeightSpec", "WeightTiling", "weight_kernel"]
