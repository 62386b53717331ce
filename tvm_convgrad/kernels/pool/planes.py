# SPDX-License-Identifier: Apache-2.0
"""Max pools of NC... data and their gradient: one plane, a channel of an image, at a time, shared by threads.

The results of one row are computed at once, in one pass over the row for each tap of the window. A pass skips the
results whose window has that tap in the padding. Backward, the gradient of a result is added to the element that is its
window's first maximum in scan order; every element belongs to one plane, so the order of sums is fixed. A window with a
NaN gives NaN, and its gradient goes to its last NaN, as in PyTorch. Gradients of 16 bits are summed in float32, and
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.extrema import exceeds, maximum
from tvm_convgrad.codegen.hardware import PARALLEL_FROM
from tvm_convgrad.codegen.loops import (
    INDEX,
    Index,
    Loops,
    convert,
    expr,
    larger,
    load,
    make_parameter,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.codegen.tir import Buffer, Expr, PrimFunc
from tvm_convgrad.kernels.borders import valid_range

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class MaxPool:
    """A max pool without dilation; extents over depth, height, width, 1 where an axis does not exist.

    Attributes:
        planes: channels of all images.
        extents, results: of a plane of the data and of the result.
        kernel, strides: of the window; low: the padding before.
        dtype: of data and result; 16-bit ones are compared and summed in float32.
    """

    planes: int
    extents: Triple
    results: Triple
    kernel: Triple
    strides: Triple
    low: Triple
    dtype: str

    @property
    def is_narrow(self) -> bool:
        """Whether data and result have 16 bits."""
        return self.dtype in ("float16", "bfloat16")

    @property
    def wide(self) -> str:
        """The type to compute in."""
        return "float32" if self.is_narrow else self.dtype

    @property
    def refusal(self) -> str:
        """Why there is no kernel, or ""."""
        if not self.planes or not all(self.results) or not all(self.extents):
            return "there are no elements"
        for extent, count, kernel, stride, low in zip(
            self.extents, self.results, self.kernel, self.strides, self.low, strict=True
        ):
            if low >= kernel or (count - 1) * stride - low >= extent:
                return "a window lies in the padding"
        return ""

    def columns(self, tap: int) -> tuple[int, int]:
        """The results of a row, (first, after the last), whose window has column `tap` in bounds."""
        return valid_range(tap - self.low[2], self.strides[2], self.results[2], self.extents[2])


def max_pool_kernel(pool: MaxPool, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
    """The PrimFunc (data, result), tensors of these shapes."""
    return _Emitter(pool).forward(shapes, name)


def max_pool_backward_kernel(pool: MaxPool, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
    """The PrimFunc (grad, data, gradient of data), tensors of these shapes."""
    return _Emitter(pool).backward(shapes, name)


def parameters_of(
    loops: Loops, dtype: str, names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[list[Buffer], list[Buffer]]:
    """The parameters of a PrimFunc and flat views of them."""
    parameters = [make_parameter(name, shape, dtype) for name, shape in zip(names, shapes, strict=True)]
    return parameters, [loops.flat(p, math.prod(shape)) for p, shape in zip(parameters, shapes, strict=True)]


class _Emitter:
    def __init__(self, pool: MaxPool) -> None:
        self.pool, self.loops = pool, Loops()
        self.plane_size, self.result_size = math.prod(pool.extents), math.prod(pool.results)
        work = pool.planes * self.result_size * math.prod(pool.kernel)
        self.kind = "parallel" if work >= PARALLEL_FROM else "serial"

    def forward(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        """Each row of the result holds the largest values so far."""
        loops, pool = self.loops, self.pool
        parameters, (data, result) = parameters_of(loops, pool.dtype, ("data", "result"), shapes)
        rows, columns = pool.results[0] * pool.results[1], pool.results[2]
        with loops.loop(pool.planes, "plane", self.kind) as plane, loops.loop(rows, "row") as number:
            row = loops.let(plane * self.result_size + number * columns, "row_at")
            largest, base = (loops.buffer("largest", columns, pool.wide), 0) if pool.is_narrow else (result, row)
            with loops.loop(columns, "x") as x:
                loops.store(largest, base + x, tir.const(-math.inf, pool.wide))

            def keep_larger(place: Index, x: Index) -> None:
                value = convert(load(data, plane * self.plane_size + place), pool.wide)
                loops.store(largest, base + x, maximum(load(largest, base + x), value))

            self._each_place(number, keep_larger)
            if pool.is_narrow:
                self._copy(result, row, largest, columns)
        return loops.finish(parameters, name)

    def backward(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        """A row of largest values with their places in the plane, to which their gradients are then added."""
        loops, pool = self.loops, self.pool
        parameters, (grad, data, result) = parameters_of(loops, pool.dtype, ("grad", "data", "result"), shapes)
        columns = pool.results[2]
        with loops.loop(pool.planes, "plane", self.kind) as plane:
            largest = loops.buffer("largest", columns, pool.wide)
            places = loops.buffer("places", columns, INDEX)
            base = loops.let(plane * self.plane_size, "base")
            sums, start_of_sums = (result, base)
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
                    value, best = convert(load(data, base + place), pool.wide), load(largest, x)
                    loops.store(places, x, tir.Select(exceeds(value, best), place, load(places, x)))
                    loops.store(largest, x, tir.Select(exceeds(value, best), value, best))

                self._each_place(number, keep_larger)
                row = loops.let(plane * self.result_size + number * columns, "row_at")
                with loops.loop(columns, "x") as x:
                    at = loops.let(start_of_sums + load(places, x), "at")
                    loops.store(sums, at, load(sums, at) + convert(load(grad, row + x), pool.wide))
            if pool.is_narrow:
                self._copy(result, base, sums, self.plane_size)
        return loops.finish(parameters, name)

    def _copy(self, to: Buffer, first: Index, source: Buffer, count: int) -> None:
        """Store a buffer from `first` on, rounded."""
        with self.loops.loop(count, "i") as i:
            self.loops.store(to, first + i, load(source, i))

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

    def _each_place(self, number: Index, use: Callable[[Index, Index], None]) -> None:
        """Call use(place in the plane, column of the result) for every tap of a row's windows, in scan order."""
        loops, pool = self.loops, self.pool
        (d, d_first, d_last), (h, h_first, h_last) = (self._bounds(number, axis) for axis in (0, 1))
        with loops.loop(d_last - d_first, "kd") as kd, loops.loop(h_last - h_first, "kh") as kh:
            row = ((d + d_first + kd) * pool.extents[1] + h + h_first + kh) * pool.extents[2]
            row = loops.let(row, "row")
            for tap in range(pool.kernel[2]):
                first, last = pool.columns(tap)
                if first < last:
                    with loops.loop(last - first, "x") as i:
                        x = expr(i + first)
                        use(row + x * pool.strides[2] + (tap - pool.low[2]), x)
