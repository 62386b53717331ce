# SPDX-License-Identifier: Apache-2.0
"""Depthwise wgrad over columns, where these are contiguous (NCHW): vectors run over a row's columns.

    dW[tap] = sum over pixels of dY[y, x] * X[y * stride + offset_h(tap), x * stride + offset_w(tap)]

Both tensors are read in place. One vector of columns of some rows of dY stays in registers; each vector of X is read
once for each column tap and is multiplied with all of them where it is in bounds. Large kernels are summed in groups
of their rows. Lanes are added at the end of a channel's depth slices, for all taps at once.

Where the CPU has dot products of bfloat16 and columns have no stride, lanes are words of two adjacent columns. A vector
may have several short rows: then each tap reads X again, and fewer lanes are empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm_convgrad.codegen.dot_product import as_number, contiguous_words
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
from tvm_convgrad.codegen.packing import shuffle
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.contract import Tiling
from tvm_convgrad.kernels.depthwise.base import DepthwiseWgrad
from tvm_convgrad.kernels.depthwise.column_terms import uses_wgrad_dots
from tvm_convgrad.kernels.depthwise.row_vectors import (
    CONVERTED_BYTES,
    PREFETCH_BYTES,
    MultiRowReader,
    RowReader,
    convert_run,
    prefetch_rows,
)
from tvm_convgrad.kernels.depthwise.taps import Piece, Taps, border_pieces, valid_taps, vector_piece
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.spec import DHW, View
from tvm_convgrad.kernels.vectors import accumulate, accumulate_words, accumulators, load_vector


@dataclass(frozen=True)
class ColumnsWgradTiling(Tiling):
    """How depthwise wgrad over columns is tiled; h are rows of dY.

    Attributes:
        tile_h: vectors of rows of a register tile, which is one vector of columns wide; a vector has one row, or
            `rows_per_vector`.
        block_channels: contiguous channels of dY in a work item, which goes through all of an image, then the next.
        split_k: parts of the batch that are summed apart, then added in their order.
        rows_per_vector: rows in one vector; more than one only where all of a depth slice is one tile.
        converted: whether channels of X, of 16 bits, are converted into a panel before their rows are read.
    """

    tile_h: int
    block_channels: int
    split_k: int
    rows_per_vector: int
    converted: bool = False


class ColumnsWgrad(DepthwiseWgrad):
    """The loops of one kernel; the frame has the parameters, the problem the batch that it is planned for."""

    tiling: ColumnsWgradTiling

    def __init__(self, frame: KernelFrame, problem: ConvProblem, tiling: Tiling, machine: Machine) -> None:
        super().__init__(frame, problem, tiling, machine)
        self.channels = problem.out_channels
        self.bias = None
        if frame.bias is not None:
            adds = frame.epilogue.bias_accumulate
            self.bias = frame.gradient("bias_grad", frame.bias, self.dtype, machine, adds=adds)
        self.multiplier = problem.out_channels // problem.in_channels
        self.dots = uses_wgrad_dots(problem, machine)
        self.columns = self.lanes * (1 + self.dots)  # of a vector
        self.per_vector = self.tiling.rows_per_vector
        self.sums = self.taps + (self.bias is not None)  # of a channel; the last is the bias gradient's
        widths = self.dy_view.extents[2], self.x_view.extents[2]
        self.reader = RowReader(self.loops, self.lanes, self.dtype, self.strides[2], *widths)
        self.rows = self.x
        slice_bytes = self.x_view.channel * DTYPE_BYTES[self.dtype]
        self.at_once = max(1, min(self.tiling.block_channels, CONVERTED_BYTES // slice_bytes))

    # -- work items ---------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """All work items, then parts are added."""
        loops, batch, block, parts = self.loops, self.frame.batch, self.tiling.block_channels, self.tiling.split_k
        blocks = -(-self.channels // block)
        apart = loops.panel("parts", parts * self.channels * self.sums, self.dtype) if parts > 1 else None
        with loops.loop(blocks * parts, "item", self.kind) as item:
            part, number = loops.let(quotient(item, blocks), "part"), remainder(item, blocks)
            first = loops.let(expr(number * block), "c0")
            count = loops.let(smaller(self.channels - first, block), "channels")
            sums = loops.panel("sums", block * self.sums * self.lanes, self.dtype)
            with loops.loop(count * self.sums, "v") as v:
                loops.store(sums, v * self.lanes, zero(self.dtype, self.lanes))
            per_part = loops.let(ceiling(batch, parts), "per_part")
            images = loops.let(smaller(batch - part * per_part, per_part), "images")
            if self.tiling.converted:
                room = round_up(self.at_once * self.x_view.channel, self.lanes)
                self.rows = loops.panel("numbers", room, self.dtype)
            with loops.loop(images, "image") as image:
                n = loops.let(part * per_part + image, "n")
                with self._channels(n, first, count) as (c, data):
                    channel = loops.let(first + c, "channel")
                    self._sum_channel(sums, loops.let(expr(c * (self.sums * self.lanes)), "sums_at"), n, channel, data)
            with loops.loop(count, "c") as c:
                at = loops.let(expr(c * (self.sums * self.lanes)), "sums_at")
                channel = loops.let(first + c, "channel")
                self._reduce(sums, at, channel, None if apart is None else (apart, part))
        if apart is not None:
            with loops.loop(self.channels, "channel") as channel, loops.loop(self.sums, "tap") as tap:
                at = loops.let(expr(channel * self.sums + tap), "at")
                total = load_sum(apart, at, 1, parts, self.channels * self.sums)
                self._put(loops.let(total, "total"), channel, tap)

    @contextmanager
    def _channels(self, n: Index, first: Index, count: Index) -> Iterator[tuple[Index, Index]]:
        """A loop over a work item's channels of an image: the channel, from `first` on, and where its X begins."""
        loops, x = self.loops, self.x_view
        if not self.tiling.converted:
            with loops.loop(count, "c") as c:
                data = n * x.batch + quotient(first + c, self.multiplier) * x.channel
                yield c, loops.let(expr(data), "data_channel")
            return
        with loops.loop(ceiling(count, self.at_once), "run") as run:
            before = loops.let(expr(run * self.at_once), "before")
            channels = loops.let(smaller(count - before, self.at_once), "in_run")
            begin, elements = n * x.batch + (first + before) * x.channel, loops.let(channels * x.channel, "elements")
            ahead = self._prefetch_distance(x) or PREFETCH_BYTES // DTYPE_BYTES[x.dtype]
            convert_run(loops, self.x, begin, elements, self.rows, self.dtype, self.lanes, ahead)
            with loops.loop(channels, "c") as c:
                yield loops.let(before + c, "number"), loops.let(expr(c * x.channel), "data_channel")

    def _sum_channel(self, sums: Buffer, at: Index, n: Index, channel: Index, data: Index) -> None:
        """Add an image's depth slices of a channel, whose X begins at index `data`."""
        loops, x, dy = self.loops, self.x_view, self.dy_view
        grad = loops.let(expr(n * dy.batch + channel * dy.channel), "grad_channel")
        taps_d, taps_h = (
            tuple((k, k * self.dilation[axis] - self.low[axis]) for k in range(self.kernel[axis])) for axis in (0, 1)
        )
        groups = row_groups(self.kernel, self.machine)
        with loops.loop(dy.extents[0], "d") as d:
            first, count = valid_taps(loops, taps_d, dy.extents[0], self.strides[0], x.extents[0], d)
            if self.bias is not None:
                self._sum_bias(sums, at, grad + d * dy.spatial[0])
            with loops.loop(count, "kd") as number:
                kd = loops.let(expr(first + number), "kd")
                z = d * self.strides[0] + kd * self.dilation[0] - self.low[0]
                into = loops.let(expr(at + kd * (self.kernel[1] * self.kernel[2] * self.lanes)), "into")
                for number, rows in enumerate(groups):
                    taps = taps_h[rows.start : rows.stop]
                    for piece in self._pieces(taps):
                        valid = dict(zip(taps, piece.valid, strict=True))
                        kernel_rows = [k_h for (k_h, _), positions in valid.items() if positions]
                        keys = itertools.product(kernel_rows, range(self.kernel[2]))
                        registers = accumulators(loops, keys, self.lanes, self.dtype)
                        with loops.loop(piece.repeats, "tile") as tile:
                            y = loops.let(expr(piece.first + tile * piece.size), "y")
                            grad_at = loops.let(expr(grad + d * dy.spatial[0] + y * dy.spatial[1]), "grad_from")
                            first_row = data + z * x.spatial[0] + y * (self.strides[1] * x.spatial[1])
                            data_at = loops.let(expr(first_row), "data_from")
                            self._tile(registers, (grad_at, data_at), piece.size, valid, prefetches=number == 0)
                        self._add_to_sums(sums, into, registers)

    def _pieces(self, taps: Taps) -> list[Piece]:
        """The tiles of a depth slice, for some rows of the kernel."""
        height, of_x = self.dy_view.extents[1], self.x_view.extents[1]
        if self.per_vector > 1:
            return [vector_piece(height, self.per_vector, taps, of_x)]
        return border_pieces(height, self.tiling.tile_h, taps, self.strides[1], of_x)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _tile(
        self,
        tile: dict[tuple[int, int], Buffer],
        origins: tuple[Index, Index],
        size: int,
        valid: dict[tuple[int, int], list[int]],
        *,
        prefetches: bool,
    ) -> None:
        """Add a tile's products to the sums of (kernel row, column).

        Args:
            origins: where the tile's rows of dY and of X begin.
            size: vectors of rows of dY.
            valid: the vectors where each (kernel row, offset) is in bounds.
            prefetches: whether the next tiles are prefetched.
        """
        loops, (grad, data), pitch = self.loops, origins, self.per_vector
        rows: dict[
            tuple[int, int], list[tuple[int, int]]
        ] = {}  # of X, from the tile's first, and how many: (i, kernel row)
        for (k_h, offset), positions in valid.items():
            for i in positions:
                count = min(pitch, self.dy_view.extents[1] - i * pitch) if pitch > 1 else 1
                rows.setdefault((i * pitch * self.strides[1] + offset, count), []).append((i, k_h))
        vectors = -(-self.dy_view.extents[2] // self.columns)
        with loops.loop(vectors, "v") as v:
            x = loops.let(expr(v * self.columns), "x") if vectors > 1 else 0
            x_row, step = self.x_view.spatial[1], self.strides[2]
            dy_row, x_rows = self.dy_view.spatial[1], size * self.strides[1]
            if prefetches:
                of_dy, of_x = (self._prefetch_distance(view) for view in (self.dy_view, self.x_view))
                prefetch_rows(loops, self.dy, grad + x, pitch * dy_row, size, 1, self.columns, distance=of_dy)
                at = data + x * step
                if not self.tiling.converted:
                    prefetch_rows(loops, self.x, at, pitch * x_row, x_rows, step, self.columns, distance=of_x)
            grads = [self._grad(grad, i, x) for i in range(size)]
            for row, count in sorted(rows):
                for k_w, value in enumerate(self._read(data + row * x_row, row, count, x)):
                    value = loops.let(value, "row")
                    for i, k_h in rows[row, count]:
                        self._add_product(tile[k_h, k_w], value, grads[i])

    def _read(self, at: Index, row: int, count: int, x: Index) -> list[Expr]:
        """Rows `row` to `row + count` of X, whose first element is at index `at`, for each column tap."""
        offsets = [k * self.dilation[2] - self.low[2] for k in range(self.kernel[2])]
        if self.per_vector > 1:
            _, height, width = self.x_view.extents
            rows = MultiRowReader(self.lanes, self.dtype, count, height, width)
            read = rows.pixel_pairs if self.dots else rows.read
            return [read(self.rows, at, row, offset) for offset in offsets]
        if self.dots:
            return [self.reader.pixel_pairs(self.rows, at, x, offset) for offset in offsets]
        return self.reader.read(self.rows, at, x, offsets)

    def _add_product(self, register: Buffer, value: Expr, grad: Expr) -> None:
        loops = self.loops
        if self.dots:
            accumulate_words(loops, register, value, grad)
        else:
            accumulate(loops, register, value * grad)

    def _prefetch_distance(self, view: View) -> int | None:
        """Elements from an image to the next one, where a work item has few bytes of each; else the default."""
        run = self.tiling.block_channels * view.channel * DTYPE_BYTES[view.dtype]
        return view.batch if run < 2 * PREFETCH_BYTES else None

    def _add_to_sums(self, sums: Buffer, into: Index, tile: dict[tuple[int, int], Buffer]) -> None:
        """Add accumulators to the sums of their taps."""
        for (k_h, k_w), register in tile.items():
            at = into + (k_h * self.kernel[2] + k_w) * self.lanes
            self.loops.store(sums, at, load(sums, at, self.lanes) + load(register, 0, self.lanes))

    def _grad(self, at: Index, i: int, x: Index) -> Expr:
        """Vector i of rows of dY from index `at` on, zeros behind their end: numbers, or words of two columns."""
        _, height, width = self.dy_view.extents
        if self.per_vector > 1:
            width *= min(self.per_vector, height - i * self.per_vector)
        value = self._columns(at + i * self.per_vector * self.dy_view.spatial[1], x, width, self.columns)
        return self.loops.let(contiguous_words(value) if self.dots else as_number(value, self.dtype), "grad")

    def _columns(self, at: Index, x: Index, width: int, lanes: int) -> Expr:
        """Elements of dY from x on of the `width` at index `at`, and zeros."""
        return load_vector(self.dy, at + x, lanes, lanes_below(x, width, lanes) if width % lanes else None)

    def _sum_bias(self, sums: Buffer, at: Index, grad: Index) -> None:
        """Add a depth slice of dY to the channel's last sum."""
        loops, lanes, (_, height, width) = self.loops, self.lanes, self.dy_view.extents
        tile = accumulators(loops, [(0, 0)], lanes, self.dtype, "bias_sum")
        with loops.loop(height, "y") as y, loops.loop(-(-width // lanes), "v") as v:
            value = self._columns(grad + y * self.dy_view.spatial[1], v * lanes, width, lanes)
            accumulate(loops, tile[0, 0], loops.let(as_number(value, self.dtype), "grad"))
        self._add_to_sums(sums, at + self.taps * lanes, tile)

    # -- the result ---------------------------------------------------------------------------------------------

    def _reduce(self, sums: Buffer, at: Index, channel: Index, apart: tuple[Buffer, Index] | None) -> None:
        """Add the lanes of each sum, for as many sums at once as a vector has lanes."""
        loops, lanes = self.loops, self.lanes
        for first in range(0, self.sums, lanes):
            count = min(lanes, self.sums - first)
            rows = [loops.let(load(sums, at + (first + i) * lanes, lanes), "row") for i in range(count)]
            total = self._lane_sums(rows)
            if apart is not None:
                buffer, part = apart
                to = (part * self.channels + channel) * self.sums + first
                loops.store_masked(buffer, to, total, lanes_below(0, count, lanes))
                continue
            cell = loops.buffer("totals", lanes, self.dtype)
            loops.store(cell, 0, total)
            for i in range(count):
                self._put(load(cell, i), channel, first + i)

    def _lane_sums(self, rows: list[Expr]) -> Expr:
        """A vector whose lane i is the sum of row i's lanes: half of a transpose, with additions."""
        loops, lanes = self.loops, self.lanes
        values: list[Expr | None] = [*rows, *[None] * (lanes - len(rows))]
        distance = lanes // 2
        while distance:
            keep_low = [i if not i & distance else lanes + i - distance for i in range(lanes)]
            keep_high = [i + distance if not i & distance else lanes + i for i in range(lanes)]
            paired: list[Expr | None] = []
            for r in range(distance):
                a, b = values[r], values[r + distance]
                if a is None:
                    paired.append(None)
                    continue
                b = zero(self.dtype, lanes) if b is None else b
                paired.append(loops.let(shuffle(a, b, keep_low) + shuffle(a, b, keep_high), "sum"))
            values, distance = paired, distance // 2
        return values[0]

    def _put(self, value: Expr, channel: Index, tap: Index) -> None:
        """Store a sum of a channel, of a tap or of the bias gradient."""
        loops = self.loops
        if isinstance(tap, int):
            if self.bias is not None and tap == self.taps:
                self.bias.store(channel, value)
            else:
                self._put_weight(value, channel, tap)
        elif self.bias is None:
            self._put_weight(value, channel, tap)
        else:
            with loops.when(expr(tap) >= self.taps):
                self.bias.store(channel, value)
            with loops.when(expr(tap) < self.taps):
                self._put_weight(value, channel, tap)

    def _put_weight(self, value: Expr, channel: Index, tap: Index) -> None:
        dw, (_, height, width) = self.dw_view, self.kernel
        d, rest = quotient(tap, height * width), remainder(tap, height * width)
        h, w = quotient(rest, width), remainder(rest, width)
        to = channel * dw.out + d * dw.spatial[0] + h * dw.spatial[1] + w * dw.spatial[2]
        self.dw.store(self.loops.let(expr(to), "to"), value)


def row_groups(kernel: DHW, machine: Machine) -> list[range]:
    """The kernel's rows whose sums are in registers at once; none if one row is too many."""
    _, height, width = kernel
    most = min(height, machine.registers // 2 // width)
    if not most:
        return []
    size = -(-height // -(-height // most))
    return [range(first, min(first + size, height)) for first in range(0, height, size)]


__all__ = ["ColumnsWgrad", "ColumnsWgradTiling", "row_groups"]
