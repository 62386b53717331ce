# SPDX-License-Identifier: Apache-2.0
"""Max pools of NC... data and their gradient: one plane, a channel of an image, at a time, shared by threads.

The results of one row are computed at once, in vectors, in one pass for each row of the window. A row of the data is
first copied with its columns apart by their numbers modulo the stride, and with lowest values as padding, so that the
columns that vectors of results read are contiguous. Backward, the gradient of a result is sent to the element that is
its window's first maximum in scan order; every element belongs to one plane, so the order of sums is fixed. A window
with a NaN gives NaN, and its gradient goes to its last NaN, as in PyTorch. Gradients of 16 bits are summed in float32,
and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import HALF, halves_apart
from tvm_convgrad.codegen.extrema import exceeds, maximum
from tvm_convgrad.codegen.hardware import PARALLEL_FROM
from tvm_convgrad.codegen.loops import (
    INDEX,
    Index,
    Loops,
    ceiling,
    expr,
    larger,
    load,
    quotient,
    ramp,
    remainder,
    smaller,
    splat,
    zero,
)
from tvm_convgrad.codegen.packing import shuffle
from tvm_convgrad.codegen.tir import Buffer, Expr, PrimFunc
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.borders import valid_range
from tvm_convgrad.kernels.depthwise.row_vectors import interleave
from tvm_convgrad.kernels.pool.gather import NONE, WindowRows, gathers
from tvm_convgrad.kernels.pool.geometry import MaxPool, parameters_of
from tvm_convgrad.kernels.vectors import Numbers


def max_pool_kernel(pool: MaxPool, shapes: Sequence[Sequence[int]], lanes: int, name: str) -> PrimFunc:
    """The PrimFunc (data, result), tensors of these shapes."""
    return _Emitter(pool, lanes).forward(shapes, name)


def max_pool_backward_kernel(pool: MaxPool, shapes: Sequence[Sequence[int]], lanes: int, name: str) -> PrimFunc:
    """The PrimFunc (grad, data, gradient of data), tensors of these shapes."""
    emitter = _Emitter(pool, lanes)
    return emitter.gathered(shapes, name) if gathers(pool) else emitter.scattered(shapes, name)


class _SplitRow:
    """A row of the data, its columns apart by their numbers modulo the stride, with lowest values around it."""

    def __init__(self, loops: Loops, pool: MaxPool, lanes: int) -> None:
        """Allocate the row at the beginning of a work item."""
        self._loops, self._pool, self._lanes = loops, pool, lanes
        stride, low, width = pool.strides[2], pool.low[2], pool.extents[2]
        self._before = -(-low // stride)
        windows = round_up(pool.results[2], lanes)
        self._pitch = self._before + max(windows + (pool.kernel[2] - 1 - low) // stride, -(-width // stride)) + lanes
        self._buffer = loops.buffer("columns", stride * self._pitch, pool.wide)
        with loops.loop(stride * self._pitch, "i") as i:
            loops.store(self._buffer, i, tir.const(-math.inf, pool.wide))

    def fill(self, data: Numbers, first: Index) -> None:
        """Copy the row of the data that begins at an index."""
        loops, lanes, stride, width = self._loops, self._lanes, self._pool.strides[2], self._pool.extents[2]
        block = lanes * stride
        done = 0
        if stride <= 2 and width >= block:
            with loops.loop(width // block, "block") as number:
                self._copy_block(data, first, number * block, number * lanes)
            last = (width - block) // stride * stride
            if width % block:
                self._copy_block(data, first, last, last // stride)
            done = last + block
        for phase in range(stride):
            begin = done // stride
            count = -(-(width - phase) // stride) - begin
            if count > 0:
                with loops.loop(count, "group") as group:
                    value = data.load(first + (begin + group) * stride + phase)
                    loops.store(self._buffer, self._at(phase, begin + group), value)

    def tap(self, number: int, window: Index) -> Expr:
        """What a column of the window reads, for a vector of windows of a row from one on."""
        place, stride = number - self._pool.low[2], self._pool.strides[2]
        return load(self._buffer, self._at(place % stride, window + place // stride), self._lanes)

    def _at(self, phase: int, group: Index) -> Index:
        return group + (phase * self._pitch + self._before)

    def _copy_block(self, data: Numbers, first: Index, column: Index, group: Index) -> None:
        loops, lanes = self._loops, self._lanes
        if self._pool.strides[2] == 1:
            loops.store(self._buffer, self._at(0, group), data.load(first + column, lanes))
            return
        if data.halves is not None:
            both = loops.let(load(data.halves, first + column, 2 * lanes), "both")
            parts = halves_apart(both)
        else:
            low, high = (loops.let(data.load(first + column + half, lanes), "half") for half in (0, lanes))
            parts = tuple(shuffle(low, high, range(phase, 2 * lanes, 2)) for phase in (0, 1))
        for phase, part in enumerate(parts):
            loops.store(self._buffer, self._at(phase, group), part)


class _Emitter:
    def __init__(self, pool: MaxPool, lanes: int) -> None:
        self.pool, self.lanes, self.loops = pool, lanes, Loops()
        self.plane_size, self.result_size = math.prod(pool.extents), math.prod(pool.results)
        self.windows = round_up(pool.results[2], lanes)  # of a row, in whole vectors
        work = pool.planes * self.result_size * math.prod(pool.kernel)
        self.kind = "parallel" if work >= PARALLEL_FROM else "serial"

    def forward(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        """Each row of the result holds the largest values so far."""
        loops, pool, lanes = self.loops, self.pool, self.lanes
        parameters, (data, result) = self._parameters(("data", "result"), shapes)
        with loops.loop(pool.planes, "plane", self.kind) as plane:
            columns = _SplitRow(loops, pool, lanes)
            largest = loops.buffer("largest", self.windows, pool.wide)
            with loops.loop(pool.results[0] * pool.results[1], "row") as number:
                self._fill(largest, splat(tir.const(-math.inf, pool.wide), lanes))

                def keep_larger(row: Index, _number: Index, plane: Index = plane) -> None:
                    columns.fill(data, loops.let(plane * self.plane_size + row, "row_at"))
                    with loops.loop(self.windows // lanes, "vector") as vector:
                        x = vector * lanes
                        best = load(largest, x, lanes)
                        for tap in range(pool.kernel[2]):
                            best = loops.let(maximum(best, columns.tap(tap, x)), "best")
                        loops.store(largest, x, best)

                self._each_row(number, keep_larger)
                self._copy(result, plane * self.result_size + number * pool.results[2], largest, pool.results[2])
        return loops.finish(parameters, name)

    def gathered(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        """Rows of winners, from which the gradients of the rows of the data are gathered that they complete."""
        loops, pool, lanes = self.loops, self.pool, self.lanes
        parameters, (grad, data, result) = self._parameters(("grad", "data", "result"), shapes)
        stride = pool.strides[2]
        groups = ceiling(ceiling(pool.extents[2], stride), lanes)
        with loops.loop(pool.planes, "plane", self.kind) as plane:
            columns = _SplitRow(loops, pool, lanes)
            largest = loops.buffer("largest", self.windows, pool.wide)
            rows = WindowRows(loops, pool, 1, lanes, self.number)
            sums = loops.buffer("sums", stride * groups * lanes, pool.wide)

            def window_row(number: Index, start: Index) -> None:
                self._winners(number, plane * self.plane_size, data, columns, largest, rows.winners, start)
                first = loops.let(plane * self.result_size + number * pool.results[2], "first")
                self._each_vector(
                    pool.results[2], lambda x, n: loops.store(rows.grads, start + x, grad.load(first + x, n))
                )

            for row, phase in rows.each_step(window_row):
                with loops.loop(groups, "vector") as vector:
                    group = vector * lanes
                    parts = [loops.let(rows.gathered(phase, of, group), "part") for of in range(stride)]
                    if stride == 2:
                        even, odd = parts
                        parts = list(interleave(loops, even, odd, lanes))
                    for of, part in enumerate(parts):
                        at = (group * stride + of * lanes) if stride <= 2 else of * groups * lanes + group
                        loops.store(sums, at, part)
                to = loops.let(plane * self.plane_size + row * pool.extents[2], "to")
                if stride <= 2:
                    self._copy(result, to, sums, pool.extents[2])
                    continue
                with loops.loop(pool.extents[2], "column") as column:
                    at = remainder(column, stride) * (groups * lanes) + quotient(column, stride)
                    result.store(to + column, load(sums, at))
        return loops.finish(parameters, name)

    def _winners(
        self,
        number: Index,
        plane: Index,
        data: Numbers,
        columns: _SplitRow,
        largest: Buffer,
        winners: Buffer,
        start: Index,
    ) -> None:
        """Store the numbers of the taps that win the windows of a row; vectors end with windows that do not exist."""
        loops, pool, lanes = self.loops, self.pool, self.lanes
        self._fill(largest, splat(tir.const(-math.inf, pool.wide), lanes))
        _, first, _ = self._bounds(number, 1)

        def numbers(row: Index) -> Expr:
            return splat(tir.Cast(self.number, expr(row * pool.kernel[2])), lanes)

        with loops.loop(self.windows // lanes, "vector") as vector:
            outside = splat(expr(pool.low[2]), lanes) - ramp(vector * lanes, lanes) * splat(
                expr(pool.strides[2]), lanes
            )
            tap = tir.Cast(f"{self.number}x{lanes}", tir.Max(outside, splat(expr(0), lanes)))
            loops.store(winners, start + vector * lanes, numbers(first) + tap)

        def keep_larger(row: Index, tap_row: Index) -> None:
            columns.fill(data, loops.let(plane + row, "row_at"))
            with loops.loop(self.windows // lanes, "vector") as vector:
                x = vector * lanes
                best, winner = load(largest, x, lanes), load(winners, start + x, lanes)
                for tap in range(pool.kernel[2]):
                    value = loops.let(columns.tap(tap, x), "value")
                    better = exceeds(value, best)
                    this = numbers(tap_row) + splat(tir.const(tap, self.number), lanes)
                    winner = loops.let(tir.Select(better, this, winner), "winner")
                    best = loops.let(tir.Select(better, value, best), "best")
                loops.store(largest, x, best)
                loops.store(winners, start + x, winner)

        self._each_row(number, keep_larger)
        missing = self.windows - pool.results[2]
        with loops.loop(missing, "i") as i:
            loops.store(winners, start + pool.results[2] + i, tir.const(NONE, self.number))

    def scattered(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        """A row of largest values with their places in the plane, to which their gradients are then added."""
        loops, pool = self.loops, self.pool
        parameters, (grad, data, result) = self._parameters(("grad", "data", "result"), shapes)
        columns = pool.results[2]
        with loops.loop(pool.planes, "plane", self.kind) as plane:
            largest = loops.buffer("largest", columns, pool.wide)
            places = loops.buffer("places", columns, INDEX)
            base = loops.let(plane * self.plane_size, "base")
            sums, start_of_sums = (result.buffer, base)
            if pool.is_narrow:
                sums, start_of_sums = loops.buffer("sums", self.plane_size, pool.wide), 0
            with loops.loop(self.plane_size, "i") as i:
                loops.store(sums, start_of_sums + i, zero(pool.wide))
            with loops.loop(pool.results[0] * pool.results[1], "row") as number:
                first = loops.let(self._first_row(number), "first_row")
                with loops.loop(columns, "x") as x:
                    loops.store(largest, x, tir.const(-math.inf, pool.wide))
                    start = larger(x * pool.strides[2] - pool.low[2], 0)
                    loops.store(places, x, first + start)

                def keep_larger(place: Index, x: Index) -> None:
                    value, best = data.load(base + place), load(largest, x)
                    loops.store(places, x, tir.Select(exceeds(value, best), place, load(places, x)))
                    loops.store(largest, x, tir.Select(exceeds(value, best), value, best))

                self._each_place(number, keep_larger)
                row = loops.let(plane * self.result_size + number * columns, "row_at")
                with loops.loop(columns, "x") as x:
                    at = loops.let(start_of_sums + load(places, x), "at")
                    loops.store(sums, at, load(sums, at) + grad.load(row + x))
            if pool.is_narrow:
                self._copy(result, base, sums, self.plane_size)
        return loops.finish(parameters, name)

    @property
    def number(self) -> str:
        """The type of taps' numbers, as wide as what they are compared with."""
        return "int64" if self.pool.dtype == "float64" else INDEX

    def _parameters(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[list[Buffer], list[Numbers]]:
        """The parameters, and what loads and stores their elements."""
        loops, pool = self.loops, self.pool
        parameters, views = parameters_of(loops, pool.dtype, names, shapes)
        tensors = []
        for view, shape in zip(views, shapes, strict=True):
            halves = loops.flat(view, math.prod(shape), HALF) if pool.dtype == "bfloat16" else None
            tensors.append(Numbers(loops, view, pool.wide, halves=halves))
        return parameters, tensors

    def _fill(self, row: Buffer, value: Expr) -> None:
        """Store a vector in all places of a row of windows."""
        with self.loops.loop(self.windows // self.lanes, "vector") as vector:
            self.loops.store(row, vector * self.lanes, value)

    def _each_vector(self, count: int, use: Callable[[Index, int], None]) -> None:
        """Call use(first, lanes) for the vectors of a row, then for each element of the rest."""
        with self.loops.loop(count // self.lanes, "vector") as vector:
            use(vector * self.lanes, self.lanes)
        done = count // self.lanes * self.lanes
        with self.loops.loop(count - done, "x") as x:
            use(done + x, 1)

    def _copy(self, to: Numbers, first: Index, source: Buffer, count: int) -> None:
        """Store a buffer from `first` on, rounded."""
        first = self.loops.let(first, "first")
        self._each_vector(count, lambda x, lanes: to.store(first + x, load(source, x, lanes)))

    def _bounds(self, number: Index, axis: int) -> tuple[Index, Index, Index]:
        """(where the window begins along an axis, its first tap in bounds, the one after the last) of a result row."""
        pool, loops = self.pool, self.loops
        along = quotient(number, pool.results[1]) if axis == 0 else remainder(number, pool.results[1])
        start = loops.let(expr(along * pool.strides[axis] - pool.low[axis]), "start")
        first = loops.let(larger(0 - start, 0), "from")
        return start, first, loops.let(smaller(pool.extents[axis] - start, pool.kernel[axis]), "to")

    def _first_row(self, number: Index) -> Expr:
        """Where the first row of the window that is in bounds begins in the plane."""
        (d, d_first, _), (h, h_first, _) = (self._bounds(number, axis) for axis in (0, 1))
        return ((d + d_first) * self.pool.extents[1] + h + h_first) * self.pool.extents[2]

    def _each_row(self, number: Index, use: Callable[[Index, Index], None]) -> None:
        """Call use(start in the plane, number) for every row of the windows of a row of results, in scan order."""
        loops, pool = self.loops, self.pool
        (d, d_first, d_last), (h, h_first, h_last) = (self._bounds(number, axis) for axis in (0, 1))
        with loops.loop(d_last - d_first, "kd") as kd, loops.loop(h_last - h_first, "kh") as kh:
            row = ((d + d_first + kd) * pool.extents[1] + h + h_first + kh) * pool.extents[2]
            tap_row = loops.let((d_first + kd) * pool.kernel[1] + h_first + kh, "tap_row")
            use(loops.let(row, "row"), tap_row)

    def _each_place(self, number: Index, use: Callable[[Index, Index], None]) -> None:
        """Call use(place in the plane, column of the result) for every tap of a row's windows, in scan order."""
        loops, pool = self.loops, self.pool

        def places(row: Index, _number: Index) -> None:
            for tap in range(pool.kernel[2]):
                offset, stride = tap - pool.low[2], pool.strides[2]
                first, last = valid_range(offset, stride, pool.results[2], pool.extents[2])
                if first < last:
                    with loops.loop(last - first, "x") as i:
                        x = expr(i + first)
                        use(row + x * stride + offset, x)

        self._each_row(number, places)


__all__ = ["max_pool_backward_kernel", "max_pool_kernel"]
