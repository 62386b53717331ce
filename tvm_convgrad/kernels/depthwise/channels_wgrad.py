# SPDX-License-Identifier: Apache-2.0
"""Depthwise wgrad over channels: dW[tap, c] = sum over pixels of dY[p, c] * X[p * stride + tap * dilation - low, c].

Vectors run over channels of X, read in place (NHWC) or from panels of a slab of rows (NCHW, transposed). The sums of a
kernel row stay in registers over the slab's rows where it is in bounds, in some copies each, so that no addition waits
for the one before. Nothing is padded: rows outside are skipped by the bounds of a loop, columns outside by the code of
border pieces.

Where channel c of X is multiplied with several of dY, those are its multiples m, with a panel of dY each: of a
depthwise convolution channel c * multiplier + m. In small groups, of as many output as input channels, a vector spans
the channels of one group or several, and multiple m of channel c is channel m of c's group, which a shuffle repeats for
each channel of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import as_number
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    ceiling,
    expr,
    lanes_below,
    load,
    load_sum,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.codegen.packing import transpose
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Tiling
from tvm_convgrad.kernels.depthwise.base import DepthwiseWgrad
from tvm_convgrad.kernels.depthwise.channel_panels import PanelMover, repeat_member
from tvm_convgrad.kernels.depthwise.channel_words import add_pixel_pairs
from tvm_convgrad.kernels.depthwise.column_terms import has_wgrad_dots
from tvm_convgrad.kernels.depthwise.taps import border_pieces, rows_in_bounds
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.vectors import Numbers, accumulate, accumulators, load_vector, moves_vectors
from tvm_convgrad.kernels.wgrad.bias import bias_gradient
from tvm_convgrad.kernels.wgrad.spec import tap_offsets


@dataclass(frozen=True)
class ChannelsWgradTiling(Tiling):
    """How depthwise wgrad over channels is tiled; h and w are rows and columns of dY.

    Attributes:
        in_place: whether X and dY are read in place; else through panels.
        tile_w: pixels of a piece of a row; its code has no loop.
        copies: of each tap's sum in registers, which take turns.
        multiples: output channels of an input channel whose sums are in registers at once and share the vectors of X.
        slab_h: rows of a slab, the unit that is packed.
        split_k: parts of the slabs that are summed apart, then added in their order.
        channel_splits: parts of the blocks of channels that are work items of their own.
        prefetch: whether the next slab is prefetched (in place only).
    """

    in_place: bool
    tile_w: int
    copies: int
    multiples: int
    slab_h: int
    split_k: int
    channel_splits: int
    prefetch: bool


@dataclass(frozen=True)
class _Panels:
    """The panels of a work item, and what packs them; `tap_size`: elements of a depth tap of X's panel."""

    x: PanelMover
    x_panel: Buffer
    tap_size: int
    dy: PanelMover
    dy_panel: Buffer


@dataclass(frozen=True)
class _Slab:
    """A slab: image, depth slice, first row, rows; `first` channel of the block, and the mask of those that exist."""

    n: Index
    d: Index
    row: Index
    rows: Index
    block: Index
    mask: Expr | None


@dataclass(frozen=True)
class _Operand:
    """Where the rows of a slab of X or dY are: in the tensor or in a panel; elements to the next row and column.

    `multiple`: elements from a multiple's panel to the next one's.
    """

    buffer: Buffer
    origin: Index
    row: int
    column: int
    multiple: int = 0


class ChannelsWgrad(DepthwiseWgrad):
    """The loops of one kernel.

    A vector spans groups of `each` contiguous channels that have the same multiples, 1 unless they are small groups.
    """

    tiling: ChannelsWgradTiling

    def __init__(self, frame: KernelFrame, problem: ConvProblem, tiling: Tiling, machine: Machine) -> None:
        super().__init__(frame, problem, tiling, machine)
        self.channels = problem.in_channels
        self.multiplier = problem.out_channels // problem.groups
        self.each = problem.in_channels // problem.groups
        self.dots = self.tiling.in_place and has_wgrad_dots(problem, machine)
        self.blocks = -(-self.channels // self.lanes)
        self.block_size = self.multiplier * self.taps * self.lanes
        self.bias = bias_gradient(frame, machine, self.dy_view, self.dtype, problem.out_channels)

    # -- work items ---------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """All work items, then the last pass."""
        loops, tiling, bias = self.loops, self.tiling, self.bias
        depth, height, _ = self.dy_view.extents
        slabs_of_slice = -(-height // tiling.slab_h)
        slabs = loops.let(self.frame.batch * (depth * slabs_of_slice), "slabs")
        per_part = loops.let(ceiling(slabs, tiling.split_k), "per_part")
        per_split = -(-self.blocks // tiling.channel_splits)
        splits = -(-self.blocks // per_split)  # those that have a block
        if bias is not None:
            bias.allocate(tiling.split_k)
        size = self.blocks * self.block_size
        sums = loops.panel("sums", tiling.split_k * size + self.lanes * self.lanes, self.dtype)
        with loops.loop(tiling.split_k * splits, "item", self.kind) as item:
            split, part = loops.let(remainder(item, splits), "split"), quotient(item, splits)
            part = loops.let(part, "part")
            first = loops.let(expr(split * per_split), "first_block")
            count = loops.let(smaller(self.blocks - first, per_split), "blocks")
            base = loops.let(expr(part * size), "sums_of_part")
            with loops.loop(count * (self.multiplier * self.taps), "v") as v:
                start = base + first * self.block_size
                loops.store(sums, start + v * self.lanes, zero(self.dtype, self.lanes))
            panels = None if tiling.in_place else self._panels()
            with loops.loop(smaller(slabs - part * per_part, per_part), "s") as s:
                slab = loops.let(expr(part * per_part + s), "slab")
                number, row = quotient(slab, slabs_of_slice), remainder(slab, slabs_of_slice) * tiling.slab_h
                n, d = loops.let(quotient(number, depth), "n"), loops.let(remainder(number, depth), "d")
                row = loops.let(row, "row")
                rows = loops.let(smaller(height - row, tiling.slab_h), "rows")
                if bias is not None:
                    bias.add(part, split, splits, (loops.let(expr(number), "number"), 1, row, rows), depth)
                self._blocks(sums, base, first, count, (n, d, row, rows), panels)
        passes = "parallel" if size * tiling.split_k >= self.machine.parallel_from else "serial"
        with loops.loop(self.blocks * self.multiplier, "written", passes) as number:
            block, m = quotient(number, self.multiplier), remainder(number, self.multiplier)
            self._write(sums, loops.let(block, "block"), loops.let(m, "m"), size)
        if bias is not None:
            bias.write()

    def _blocks(
        self,
        sums: Buffer,
        base: Index,
        first: Index,
        count: Index,
        pixels: tuple[Index, Index, Index, Index],
        panels: _Panels | None,
    ) -> None:
        """A slab's blocks of channels; in place, the last of a ragged number with masks."""
        loops, lanes, ragged = self.loops, self.lanes, self.channels % self.lanes
        if panels is not None or not ragged:
            with loops.loop(count, "b") as b:
                block = loops.let(first + b, "block")
                self._sum_slab(sums, base + block * self.block_size, _Slab(*pixels, block, None), panels)
            return
        whole = self.blocks - 1
        with loops.loop(smaller(whole - first, count), "b") as b:
            block = loops.let(first + b, "block")
            self._sum_slab(sums, base + block * self.block_size, _Slab(*pixels, block, None), None)
        with loops.when(expr(first + count) > whole):
            mask = lanes_below(0, ragged, lanes)
            self._sum_slab(sums, base + whole * self.block_size, _Slab(*pixels, whole, mask), None)

    def _panels(self) -> _Panels:
        """Allocate the panels."""
        loops, tiling, x, dy = self.loops, self.tiling, self.x_view, self.dy_view
        of_x, of_dy = (Numbers(loops, tensor, self.dtype) for tensor in (self.x, self.dy))
        read_x = PanelMover(loops, self.machine, of_x, x, self.channels, x.channel)
        step = dy.channel * (self.multiplier if self.each == 1 else 1)
        read_dy = PanelMover(loops, self.machine, of_dy, dy, self.channels, step)
        size = read_x.room(min(self._reach(), x.extents[1]))
        x_panel = loops.panel("x_panel", self.kernel[0] * size, self.dtype)
        grads = 1 if self.each > 1 else tiling.multiples
        dy_panel = loops.panel("grad_panel", grads * read_dy.room(tiling.slab_h), self.dtype)
        return _Panels(read_x, x_panel, size, read_dy, dy_panel)

    def _reach(self) -> int:
        """Rows of X that a slab reads."""
        return (self.tiling.slab_h - 1) * self.strides[1] + (self.kernel[1] - 1) * self.dilation[1] + 1

    def _sum_slab(self, sums: Buffer, at: Index, slab: _Slab, panels: _Panels | None) -> None:
        """One slab and block: for each multiple and kernel row, the sums over the pixels where it is in bounds."""
        loops, lanes, x, dy = self.loops, self.lanes, self.x_view, self.dy_view
        first = loops.let(expr(slab.block * lanes), "c0")
        at = loops.let(expr(at), "sums_at")
        kd_extent, kh_extent, kw_extent = self.kernel
        x_base, dy_base = slab.n * x.batch, slab.n * dy.batch + slab.d * dy.spatial[0]
        if panels is None:
            data = _Operand(self.x, loops.let(expr(x_base + first), "x_origin"), *x.spatial[1:])
            grad = _Operand(self.dy, loops.let(expr(dy_base + first), "dy_origin"), *dy.spatial[1:])
            if self.tiling.prefetch:
                newest = slab.d * self.strides[0] + (kd_extent - 1) * self.dilation[0] - self.low[0]
                self._prefetch(dy_base, x_base + newest * x.spatial[0], slab)
        else:
            start = expr(slab.row * self.strides[1] - self.low[1])
            row, rows = rows_in_bounds(loops, start, self._reach(), x.extents[1])
            x_row, dy_row = x.extents[2] * lanes, dy.extents[2] * lanes
            dy_origin = loops.opaque(expr(-(slab.row * dy_row)), "dy_origin")
            x_origin = loops.opaque(expr(-(row * x_row)), "x_origin")
            data = _Operand(panels.x_panel, x_origin, x_row, lanes)
            grad = _Operand(panels.dy_panel, dy_origin, dy_row, lanes, panels.dy.room(self.tiling.slab_h))
            if kd_extent == 1:
                z_base = x_base + (slab.d * self.strides[0] - self.low[0]) * x.spatial[0]
                panels.x.prefetch(z_base, first, row, rows)
                panels.dy.prefetch(dy_base, first, slab.row, slab.rows)
            with loops.loop(kd_extent, "kd") as kd:
                z = self._x_slice(slab.d, kd)
                with loops.when(tir.And(z >= 0, z < x.extents[0])):
                    panels.x.pack(x_base + z * x.spatial[0], first, row, rows, data.buffer, kd * panels.tap_size)
            if self.each > 1:
                panels.dy.pack(dy_base, first, slab.row, slab.rows, grad.buffer, 0)
        for m in self._multiples():
            if panels is not None and self.each == 1:
                with loops.loop(self.tiling.multiples, "k") as k:
                    base = dy_base + (m + k) * dy.channel
                    panels.dy.pack(base, first, slab.row, slab.rows, grad.buffer, k * grad.multiple)
            with loops.loop(kd_extent, "kd") as kd:
                z = self._x_slice(slab.d, kd)
                with loops.when(tir.And(z >= 0, z < x.extents[0])), loops.loop(kh_extent, "kh") as kh:
                    tap = (m * self.taps + (kd * kh_extent + kh) * kw_extent) * lanes
                    offset = loops.let(expr(kh * self.dilation[1] - self.low[1]), "offset")
                    of_slice = z * x.spatial[0] if panels is None else kd * panels.tap_size
                    origin = loops.let(expr(data.origin + of_slice + offset * data.row), "x_from")
                    shifted = _Operand(data.buffer, origin, data.row, data.column)
                    self._sum_kernel_row(sums, at + tap, m, shifted, grad, slab, offset)

    def _x_slice(self, d: Index, kd: Index) -> Index:
        """The depth slice of X that a depth tap reads for slice d of dY."""
        return self.loops.let(expr(d * self.strides[0] + kd * self.dilation[0] - self.low[0]), "z")

    def _multiples(self) -> Iterator[Index]:
        """The first of each block of multiples: in a loop, or one after the other where each has its own shuffles."""
        if self.each > 1:
            yield from range(0, self.multiplier, self.tiling.multiples)
            return
        with self.loops.loop(self.multiplier // self.tiling.multiples, "block_of_multiples") as number:
            yield self.loops.let(number * self.tiling.multiples, "m")

    def _prefetch(self, dy_origin: Index, x_origin: Index, slab: _Slab) -> None:
        """Prefetch this block's part of the next slab's rows: contiguous lines, as memory serves these best.

        The origins are those of channel 0, in the last depth slice that is read.
        """
        loops, following = self.loops, slab.row + self.tiling.slab_h
        for buffer, origin, view, step in (
            (self.dy, dy_origin, self.dy_view, 1),
            (self.x, x_origin, self.x_view, self.strides[1]),
        ):
            row_step, width = view.spatial[1], view.extents[2]
            part = slab.block * (width * self.lanes)
            at = loops.let(expr(origin + following * (step * row_step) + part), "next")
            with loops.loop(self.tiling.slab_h * step, "h") as number, loops.loop(width, "x") as x:
                loops.prefetch(buffer, at + number * row_step + x * self.lanes)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _sum_kernel_row(
        self, sums: Buffer, at: Index, first: Index, data: _Operand, grad: _Operand, slab: _Slab, offset: Index
    ) -> None:
        """Add the sums of one (d, h) of the kernel over the slab's rows q with 0 <= q * stride + offset < H."""
        loops, lanes, stride, step = self.loops, self.lanes, self.strides[1], self.strides[2]
        kernel_w, copies, multiples = self.kernel[2], self.tiling.copies, self.tiling.multiples
        begin = tir.max(expr(slab.row), quotient(tir.max(expr(stride - 1) - offset, expr(0)), stride))
        begin = loops.opaque(begin, "begin")
        limit = quotient(tir.max(expr(self.x_view.extents[1] + stride - 1) - offset, expr(0)), stride)
        count = loops.opaque(tir.min(expr(slab.row + slab.rows), limit) - begin, "count")
        of_copy = list(itertools.product(range(multiples), range(kernel_w)))
        tile = accumulators(loops, [(copy, m, k) for copy in range(copies) for m, k in of_copy], lanes, self.dtype)
        taps = tuple((k, k * self.dilation[2] - self.low[2]) for k in range(kernel_w))
        pieces = border_pieces(self.dy_view.extents[2], self.tiling.tile_w, taps, step, self.x_view.extents[2])
        with loops.loop(count, "h") as number:
            y = loops.let(expr(begin + number), "y")
            x_at = loops.let(expr(data.origin + y * (stride * data.row)), "x_row")
            dy_at = loops.let(expr(grad.origin + y * grad.row), "dy_row")
            for start, size, repeats, valid in pieces:
                with loops.loop(repeats, "piece") as piece:
                    place = loops.let(expr(x_at + (start + piece * size) * (step * data.column)), "x_at")
                    grad_place = loops.let(expr(dy_at + (start + piece * size) * grad.column), "dy_at")
                    if self.dots:
                        self._add_pairs(tile, data, grad, (place, grad_place), size, valid, (first, slab.mask))
                        continue
                    for i in range(size):
                        in_bounds = [k for k in range(kernel_w) if i in valid[k]]
                        if not in_bounds:
                            continue
                        grads = self._grads(grad, grad_place + i * grad.column, first, slab.mask)
                        for k in in_bounds:
                            value = self._read(data.buffer, place + (i * step + taps[k][1]) * data.column, slab.mask)
                            value = value if multiples == 1 else loops.let(value, "x")
                            for m in range(multiples):
                                accumulate(loops, tile[i % copies, m, k], value * grads[m])
        for m, k in of_copy:
            sum_at = at + (m * self.taps + k) * lanes
            total = load(sums, sum_at, lanes)
            for copy in range(copies):
                total = total + load(tile[copy, m, k], 0, lanes)
            loops.store(sums, sum_at, total)

    def _add_pairs(
        self,
        tile: dict[tuple[int, int, int], Buffer],
        data: _Operand,
        grad: _Operand,
        places: tuple[Index, Index],
        size: int,
        valid: list[list[int]],
        block: tuple[Index, Expr | None],
    ) -> None:
        """Add a piece's products by dot products.

        `places` are those of its first pixel in X and dY, `block` the first multiple and the mask of channels.
        """
        (x_place, dy_place), (first, mask) = places, block
        step, dilation, low = self.strides[2], self.dilation[2], self.low[2]
        add_pixel_pairs(
            self.loops,
            [
                {(m, k): buffer for (of, m, k), buffer in tile.items() if of == copy}
                for copy in range(self.tiling.copies)
            ],
            size,
            valid,
            lambda i, k: i * step + k * dilation - low,
            (
                lambda i: load_vector(grad.buffer, dy_place + i * grad.column, self.lanes, mask),
                lambda column: load_vector(data.buffer, x_place + column * data.column, self.lanes, mask),
            ),
            lambda value: self._members(value, first),
        )

    def _read(self, buffer: Buffer, place: Index, mask: Expr | None) -> Expr:
        """A vector of contiguous channels in the type of sums."""
        return as_number(load_vector(buffer, place, self.lanes, mask), self.dtype)

    def _grads(self, grad: _Operand, at: Index, first: Index, mask: Expr | None) -> list[Expr]:
        """dY's vector for each multiple from `first` on: from its own panel, or shuffled."""
        loops, multiples = self.loops, self.tiling.multiples
        if self.each == 1:
            places = [at + m * grad.multiple for m in range(multiples)]
            return [loops.let(self._read(grad.buffer, place, mask), "grad") for place in places]
        value = loops.let(self._read(grad.buffer, at, mask), "grad")
        return [loops.let(member, "member") for member in self._members(value, first)]

    def _members(self, value: Expr, first: Index) -> list[Expr]:
        """A vector of dY, or of words of two pixels, for each multiple from `first` on: shuffled in small groups."""
        if self.each == 1:
            return [value]
        return [repeat_member(value, first + m, self.each, self.lanes) for m in range(self.tiling.multiples)]

    # -- the result ---------------------------------------------------------------------------------------------

    def _write(self, sums: Buffer, block: Index, m: Index, part_size: int) -> None:
        """One block and multiple: parts added in their order, into dW's own layout."""
        loops, lanes, dw = self.loops, self.lanes, self.dw_view
        offsets = tap_offsets(self.kernel, dw)
        base = loops.let(expr((block * self.multiplier + m) * (self.taps * lanes)), "sums_at")
        # Channel c's filter of multiple m; c's place in its group is an input channel of the filter.
        each, step = self.each, self.multiplier * dw.out
        to = loops.let(expr(block * (lanes // each) * step + m * dw.out), "to")

        def filter_at(c: Index) -> Index:
            return to + quotient(c, each) * step + remainder(c, each) * dw.into

        def total(index: Index, lanes: int) -> Expr:
            return load_sum(sums, index, lanes, self.tiling.split_k, part_size)

        if moves_vectors(self.machine, dw.dtype, self.dtype) and offsets == list(range(self.taps)):
            with loops.loop(-(-self.taps // lanes), "square") as square:
                at = loops.let(expr(base + square * (lanes * lanes)), "at")
                rows = [loops.let(total(at + i * lanes, lanes), "row") for i in range(lanes)]
                mask = lanes_below(square * lanes, self.taps, lanes)
                for c, value in enumerate(transpose(loops, rows)):
                    with loops.when(expr(block * lanes + c) < self.channels):
                        self.dw.store(filter_at(c) + square * lanes, value, mask)
            return
        table = loops.table("dw_taps", offsets)
        with (
            loops.loop(smaller(self.channels - block * lanes, lanes), "c") as c,
            loops.loop(self.taps, "tap") as tap,
        ):
            place = loops.let(expr(filter_at(c) + load(table, tap)), "place")
            self.dw.store(place, total(base + tap * lanes + c, 1))


__all__ = ["ChannelsWgrad", "ChannelsWgradTiling"]
