# SPDX-License-Identifier: Apache-2.0
"""Depthwise wgrad: dW[tap, c] = sum over pixels of dY[pixel, c] * X[pixel * stride + tap * dilation - padding, c].

Vectors run over channels of X, read in place (NHWC) or from panels of a slab of lines (NCHW, turned). A kernel line's
sums stay in registers over the slab's lines that meet it, in some copies each, so that no addition waits for the one
before. Nothing is padded: lines outside are left out by the bounds of a loop, columns outside by the code of border
pieces.

Where X's channel c meets several of dY's, those are its multiples m, with a panel of dY each: of a depthwise
convolution channel c * multiplier + m. In small groups, of as many output as input channels, a vector spans the
channels of one group or several, and multiple m of channel c is channel m of c's group, which a shuffle repeats for
each channel of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.depthwise_planes_weight import PlanesWeight, PlaneWeightTiling
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.lanes import Mover, channels_at, pieces_of, repeated
from tvm_convgrad.kernels.loops import (
    Loops,
    ceiling,
    convert,
    expr,
    lanes_below,
    load,
    load_masked,
    load_sum,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.plan import REPRESENTATIVE_BATCH
from tvm_convgrad.kernels.spec import Three, axes_of, views
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.weight_frame import WeightFrame
from tvm_convgrad.kernels.weight_spec import weight_spec
from tvm_convgrad.problem import ConvProblem


@dataclass(frozen=True)
class DepthwiseWeightTiling:
    """How a depthwise wgrad is cut.

    Attributes:
        direct: whether X and dY are read in place; else through panels.
        pixels: of a piece of a line; its code has no loop.
        copies: of each tap's sum.
        multiples: whose sums are in registers together, so that they share the vectors of X.
        lines: of dY in a slab.
        parts: pieces of the slabs that are summed apart, in their order.
        chunks: pieces of the blocks of channels that are separate work items.
        prefetched: whether the next slab is asked for (direct only).
    """

    direct: bool
    pixels: int
    copies: int
    multiples: int
    lines: int
    parts: int
    chunks: int
    prefetched: bool


def depthwise_weight_kernel(
    problem: ConvProblem,
    tiling: DepthwiseWeightTiling | PlaneWeightTiling,
    machine: Machine,
    name: str,
    epilogue: Epilogue,
) -> Any:
    """The PrimFunc (grad, data, weight's gradient[, bias gradient]); the problem's batch may be a name."""
    loops = Loops()
    planned = problem if isinstance(problem.batch, int) else replace(problem, batch=REPRESENTATIVE_BATCH)
    x, _, dy = views(planned)
    frame = WeightFrame(loops, problem, replace(weight_spec(planned), x=x, dy=dy), epilogue)
    kernel = PlanesWeight if isinstance(tiling, PlaneWeightTiling) else _DepthwiseWeight
    kernel(loops, planned, tiling, machine, frame).emit()  # type: ignore[arg-type]
    return loops.finish(frame.parameters, name)


class _DepthwiseWeight:
    def __init__(
        self,
        loops: Loops,
        problem: ConvProblem,
        tiling: DepthwiseWeightTiling,
        machine: Machine,
        frame: WeightFrame,
    ) -> None:
        self.loops, self.tiling, self.machine, self.frame = loops, tiling, machine, frame
        self.dy, self.x, self.dw = frame.dy, frame.x, frame.dw
        self.x_view, self.dw_view, self.dy_view = views(problem)
        self.kernel, self.strides, self.dilation, padding = axes_of(problem)
        self.low: Three = tuple(low for low, _ in padding)  # type: ignore[assignment]
        self.dtype = problem.accumulator
        self.lanes = machine.lanes(self.dtype)
        self.batch, self.channels = frame.batch, problem.in_channels
        self.multiplier = problem.out_channels // problem.groups
        self.together = problem.in_channels // problem.groups  # neighbouring channels with the same multiples
        self.blocks = -(-self.channels // self.lanes)
        self.taps = self.kernel[0] * self.kernel[1] * self.kernel[2]
        self.block_size = self.multiplier * self.taps * self.lanes
        self.kind = "parallel" if problem.macs >= machine.parallel_from else "serial"

    # -- work items ---------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """All work items, then the last pass."""
        loops, tiling = self.loops, self.tiling
        depth, height, _ = self.dy_view.extents
        line_slabs = -(-height // tiling.lines)
        slabs = loops.let(self.batch * (depth * line_slabs), "slabs")
        per_part, per_chunk = loops.let(ceiling(slabs, tiling.parts), "per_part"), -(-self.blocks // tiling.chunks)
        bias = self.frame.bias_sum(self.machine)
        if bias is not None:
            bias.allocate(tiling.parts)
        size = self.blocks * self.block_size
        sums = loops.panel("sums", tiling.parts * size + self.lanes * self.lanes, self.dtype)
        with loops.loop(tiling.parts * tiling.chunks, "item", self.kind) as item:
            chunk, part = loops.let(remainder(item, tiling.chunks), "chunk"), quotient(item, tiling.chunks)
            part = loops.let(part, "part")
            first = loops.let(expr(chunk * per_chunk), "first_block")
            count = loops.let(smaller(self.blocks - first, per_chunk), "blocks")
            base = loops.let(expr(part * size), "sums_of_part")
            with loops.loop(count * (self.multiplier * self.taps), "v") as v:
                start = base + first * self.block_size
                loops.store(sums, start + v * self.lanes, zero(self.dtype, self.lanes))
            panels = None if tiling.direct else self._panels()
            with loops.loop(smaller(slabs - part * per_part, per_part), "s") as s:
                slab = loops.let(expr(part * per_part + s), "slab")
                plane, line = quotient(slab, line_slabs), remainder(slab, line_slabs) * tiling.lines
                n, d = loops.let(quotient(plane, depth), "n"), loops.let(remainder(plane, depth), "d")
                line = loops.let(line, "line")
                lines = loops.let(smaller(height - line, tiling.lines), "lines")
                if bias is not None:
                    bias.add(part, chunk, tiling.chunks, (loops.let(expr(plane), "plane"), 1, line, lines), depth)
                self._blocks(sums, base, first, count, n, d, line, lines, panels)
        passes = "parallel" if size * tiling.parts >= self.machine.parallel_from else "serial"
        with loops.loop(self.blocks * self.multiplier, "written", passes) as number:
            block, m = quotient(number, self.multiplier), remainder(number, self.multiplier)
            self._write(sums, loops.let(block, "block"), loops.let(m, "m"), size)
        if bias is not None:
            bias.write()

    def _blocks(
        self, sums: Any, base: Any, first: Any, count: Any, n: Any, d: Any, line: Any, lines: Any, panels: Any
    ) -> None:
        """A slab's blocks of channels; in place, the last of a ragged number with masks."""
        loops, lanes, ragged = self.loops, self.lanes, self.channels % self.lanes
        if panels is not None or not ragged:
            with loops.loop(count, "b") as b:
                block = loops.let(first + b, "block")
                self._slab(sums, base + block * self.block_size, block, n, d, line, lines, panels, None)
            return
        whole = self.blocks - 1
        with loops.loop(smaller(whole - first, count), "b") as b:
            block = loops.let(first + b, "block")
            self._slab(sums, base + block * self.block_size, block, n, d, line, lines, None, None)
        with loops.when(expr(first + count) > whole):
            mask = lanes_below(0, ragged, lanes)
            self._slab(sums, base + whole * self.block_size, whole, n, d, line, lines, None, mask)

    def _panels(self) -> Any:
        """(reader of X, its panel, elements of a depth tap, reader of dY, its panel)."""
        loops, tiling = self.loops, self.tiling
        x, dy = self.x_view, self.dy_view
        read_x = Mover(loops, self.machine, self.x, x, self.dtype, self.channels, x.channel)
        step = dy.channel * (self.multiplier if self.together == 1 else 1)
        read_dy = Mover(loops, self.machine, self.dy, dy, self.dtype, self.channels, step)
        size = read_x.room(min(self._reach(), x.extents[1]))
        panel = loops.panel("x_panel", self.kernel[0] * size, self.dtype)
        grads = 1 if self.together > 1 else tiling.multiples
        return read_x, panel, size, read_dy, loops.panel("grad_panel", grads * read_dy.room(tiling.lines), self.dtype)

    def _reach(self) -> int:
        """Lines of X that a slab meets."""
        return (self.tiling.lines - 1) * self.strides[1] + (self.kernel[1] - 1) * self.dilation[1] + 1

    def _slab(
        self, sums: Any, at: Any, block: Any, n: Any, d: Any, line: Any, lines: Any, panels: Any, mask: Any
    ) -> None:
        """One slab and block: for each multiple and each line of taps, the sums over the pixels that meet it."""
        loops, lanes, x, dy = self.loops, self.lanes, self.x_view, self.dy_view
        first = loops.let(expr(block * lanes), "c0")
        at = loops.let(expr(at), "sums_at")
        kd_extent, kh_extent, kw_extent = self.kernel
        x_base, dy_base = n * x.batch, n * dy.batch + d * dy.spatial[0]
        if panels is None:
            source, x_origin = self.x, loops.let(expr(x_base + first), "x_origin")
            x_depth, x_line, x_column = x.spatial
            grads, dy_origin, room = self.dy, loops.let(expr(dy_base + first), "dy_origin"), 0
            _, dy_line, dy_column = dy.spatial
            if self.tiling.prefetched:
                self._prefetch(dy_origin, x_origin, line)
        else:
            read_x, source, size, read_dy, grads = panels
            room = read_dy.room(self.tiling.lines)
            start = expr(line * self.strides[1] - self.low[1])
            row = loops.opaque(tirx.min(tirx.max(start, expr(0)), expr(x.extents[1])), "row")
            end = tirx.max(tirx.min(start + self._reach(), expr(x.extents[1])), row)
            rows = loops.opaque(end - row, "rows")
            x_line, x_column = x.extents[2] * lanes, lanes
            dy_line, dy_column = dy.extents[2] * lanes, lanes
            dy_origin = loops.opaque(expr(-(line * dy_line)), "dy_origin")
            x_origin, x_depth = loops.opaque(expr(-(row * x_line)), "x_origin"), 0
            if kd_extent == 1:
                read_x.prefetch(x_base + (d * self.strides[0] - self.low[0]) * x.spatial[0], first, row, rows)
                read_dy.prefetch(dy_base, first, line, lines)
            with loops.loop(kd_extent, "kd") as kd:
                z = loops.let(expr(d * self.strides[0] + kd * self.dilation[0] - self.low[0]), "z")
                with loops.when(tirx.And(z >= 0, z < x.extents[0])):
                    read_x.pack(x_base + z * x.spatial[0], first, row, rows, source, kd * size)
            if self.together > 1:
                read_dy.pack(dy_base, first, line, lines, grads, 0)
        for m in self._multiples():
            if panels is not None and self.together == 1:
                with loops.loop(self.tiling.multiples, "k") as k:
                    read_dy.pack(dy_base + (m + k) * dy.channel, first, line, lines, grads, k * room)
            with loops.loop(kd_extent, "kd") as kd:
                z = loops.let(expr(d * self.strides[0] + kd * self.dilation[0] - self.low[0]), "z")
                with loops.when(tirx.And(z >= 0, z < x.extents[0])), loops.loop(kh_extent, "kh") as kh:
                    tap = (m * self.taps + (kd * kh_extent + kh) * kw_extent) * lanes
                    offset = loops.let(expr(kh * self.dilation[1] - self.low[1]), "offset")
                    plane = z * x_depth if panels is None else kd * size
                    origin = loops.let(expr(x_origin + plane + offset * x_line), "x_from")
                    places = (source, origin, x_line, x_column), (grads, dy_origin, room, dy_line, dy_column)
                    self._line_of_taps(sums, at + tap, m, places, line, lines, offset, mask)

    def _multiples(self) -> Iterator[Any]:
        """The first of each block of multiples: in a loop, or one after the other where each has its own shuffles."""
        count = self.multiplier // self.tiling.multiples
        if self.together > 1:
            yield from range(0, self.multiplier, self.tiling.multiples)
            return
        with self.loops.loop(count, "block_of_multiples") as number:
            yield self.loops.let(number * self.tiling.multiples, "m")

    def _prefetch(self, dy_origin: Any, x_origin: Any, line: Any) -> None:
        """Ask for the lines of the next slab, of the same block of channels."""
        loops, ahead = self.loops, line + self.tiling.lines

        for buffer, origin, view, step in (
            (self.dy, dy_origin, self.dy_view, 1),
            (self.x, x_origin, self.x_view, self.strides[1]),
        ):
            _, line_step, column = view.spatial
            at = loops.let(expr(origin + ahead * (step * line_step)), "next")
            with loops.loop(self.tiling.lines * step, "l") as number, loops.loop(view.extents[2], "x") as x:
                loops.prefetch(buffer, at + number * line_step + x * column, near=True)

    def _line_of_taps(
        self,
        sums: Any,
        at: Any,
        first_multiple: Any,
        places: tuple[Any, Any],
        line: Any,
        lines: Any,
        offset: Any,
        mask: Any,
    ) -> None:
        """The sums of one (depth, height) of the kernel over the slab's lines l with 0 <= l * stride + offset < H."""
        loops, lanes, stride = self.loops, self.lanes, self.strides[1]
        (source, origin, x_line, x_column), (grads, dy_origin, room, dy_line, dy_column) = places
        width_taps, copies, multiples = self.kernel[2], self.tiling.copies, self.tiling.multiples
        begin = tirx.max(expr(line), quotient(tirx.max(expr(stride - 1) - offset, expr(0)), stride))
        begin = loops.opaque(begin, "begin")
        limit = quotient(tirx.max(expr(self.x_view.extents[1] + stride - 1) - offset, expr(0)), stride)
        count = loops.opaque(tirx.min(expr(line + lines), limit) - begin, "count")
        sums_of = list(itertools.product(range(multiples), range(width_taps)))
        tile = [{pair: loops.buffer("sum", lanes, self.dtype) for pair in sums_of} for _ in range(copies)]
        for register in itertools.chain(*(copy.values() for copy in tile)):
            loops.store(register, 0, zero(self.dtype, lanes))
        taps = tuple((k, k * self.dilation[2] - self.low[2]) for k in range(width_taps))
        step = self.strides[2]
        pieces = pieces_of(self.dy_view.extents[2], self.tiling.pixels, taps, step, self.x_view.extents[2])
        with loops.loop(count, "l") as number:
            y = loops.let(expr(begin + number), "y")
            x_at = loops.let(expr(origin + y * (stride * x_line)), "x_line")
            dy_at = loops.let(expr(dy_origin + y * dy_line), "dy_line")
            for first, size, repeats, met in pieces:
                with loops.loop(repeats, "piece") as piece:
                    place = loops.let(expr(x_at + (first + piece * size) * (step * x_column)), "x_at")
                    grad_place = loops.let(expr(dy_at + (first + piece * size) * dy_column), "dy_at")
                    for i in range(size):
                        taken = [k for k in range(width_taps) if i in met[k]]
                        if not taken:
                            continue
                        grad = self._grads(grads, grad_place + i * dy_column, room, first_multiple, mask)
                        for k in taken:
                            value = channels_at(
                                source, place + (i * step + taps[k][1]) * x_column, mask, lanes, self.dtype
                            )
                            value = value if multiples == 1 else loops.let(value, "x")
                            for m in range(multiples):
                                register = tile[i % copies][m, k]
                                loops.store(register, 0, load(register, 0, lanes) + value * grad[m])
        for m, k in sums_of:
            sum_at = at + (m * self.taps + k) * lanes
            total = load(sums, sum_at, lanes)
            for copy in tile:
                total = total + load(copy[m, k], 0, lanes)
            loops.store(sums, sum_at, total)

    def _grads(self, grads: Any, at: Any, room: int, first: Any, mask: Any) -> list[Any]:
        """dY's vector for each multiple from `first` on: from its own panel, or shuffled."""
        loops, lanes, multiples = self.loops, self.lanes, self.tiling.multiples

        def read(place: Any) -> Any:
            return loops.let(channels_at(grads, place, mask, lanes, self.dtype), "grad")

        if self.together == 1:
            return [read(at + m * room) for m in range(multiples)]
        value = read(at)
        return [loops.let(repeated(value, first + m, self.together, lanes), "member") for m in range(multiples)]

    # -- the result ---------------------------------------------------------------------------------------------

    def _write(self, sums: Any, block: Any, m: Any, part_size: int) -> None:
        """One block and multiple: parts added in their order, into dW's own layout."""
        loops, lanes, dw = self.loops, self.lanes, self.dw_view
        offsets = [
            sum(k * s for k, s in zip(tap, dw.spatial, strict=True))
            for tap in itertools.product(*map(range, self.kernel))
        ]
        base = loops.let(expr((block * self.multiplier + m) * (self.taps * lanes)), "sums_at")
        # Channel c's filter of multiple m; c's place in its group is an input channel of the filter.
        each, step = self.together, self.multiplier * dw.out
        to = loops.let(expr(block * (lanes // each) * step + m * dw.out), "to")

        def place_of(c: Any) -> Any:
            return to + quotient(c, each) * step + remainder(c, each) * dw.into

        def total(index: Any, lanes: int) -> Any:
            return load_sum(sums, index, lanes, self.tiling.parts, part_size)

        if self.machine.has_masks and dw.dtype == self.dtype and offsets == list(range(self.taps)):
            with loops.loop(-(-self.taps // lanes), "chunk") as chunk:
                at = loops.let(expr(base + chunk * (lanes * lanes)), "at")
                rows = [loops.let(total(at + i * lanes, lanes), "row") for i in range(lanes)]
                mask = lanes_below(chunk * lanes, self.taps, lanes)
                for c, value in enumerate(transpose(loops, rows)):
                    place = place_of(c) + chunk * lanes
                    with loops.when(expr(block * lanes + c) < self.channels):
                        before = load_masked(self.dw, place, mask, lanes) if self.frame.epilogue.accumulate else None
                        loops.store_masked(self.dw, place, value if before is None else before + value, mask)
            return
        table = loops.table("dw_taps", offsets)
        with (
            loops.loop(smaller(self.channels - block * lanes, lanes), "c") as c,
            loops.loop(self.taps, "tap") as tap,
        ):
            place = loops.let(expr(place_of(c) + load(table, tap)), "place")
            value = total(base + tap * lanes + c, 1)
            if self.frame.epilogue.accumulate:
                value = convert(load(self.dw, place), self.dtype) + value
            loops.store(self.dw, place, value)


__all__ = ["DepthwiseWeightTiling", "depthwise_weight_kernel"]
