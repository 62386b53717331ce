# SPDX-License-Identifier: Apache-2.0
"""Max pools of N...C data and their gradient: vectors of channels; threads share images and blocks of channels.

Forward, the largest values of a window are kept in registers. Backward, the numbers of their taps in the window are
kept, too: of the first maximum in scan order, or of the last NaN, as in PyTorch. The elements at these taps then gather
the gradient, or, with many taps or over three axes, it is added to them. Every element belongs to one image and one
block of channels, so the order of sums is fixed.
Gradients of 16 bits are summed in float32, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import HALF
from tvm_convgrad.codegen.extrema import exceeds, maximum
from tvm_convgrad.codegen.hardware import PARALLEL_FROM
from tvm_convgrad.codegen.loops import (
    Index,
    Loops,
    convert,
    expr,
    larger,
    load,
    quotient,
    remainder,
    smaller,
    splat,
    zero,
)
from tvm_convgrad.codegen.tir import Buffer, Expr, PrimFunc
from tvm_convgrad.kernels.pool.gather import WindowRows, gathers
from tvm_convgrad.kernels.pool.geometry import MaxPool, parameters_of
from tvm_convgrad.kernels.vectors import Numbers, accumulators

BLOCK = 4
"""Vectors of channels of a work item: some contiguous cache lines."""

Visit = Callable[[Index, Index], None]
"""Takes the place of a tap of a window, and its number in scan order."""

Places = Callable[[Visit], None]
"""Calls a visit for each tap of a window that is in bounds."""

ITEMS = 16
"""Work items below which a work item has fewer channels."""


def channels_last_kernel(pool: MaxPool, shapes: Sequence[Sequence[int]], lanes: int, name: str) -> PrimFunc:
    """The PrimFunc (data, result), tensors of these shapes; `pool.planes` counts channels of images."""
    emitter = _Emitter(pool, shapes[0], lanes)
    return emitter.forward(shapes, name)


def channels_last_backward_kernel(pool: MaxPool, shapes: Sequence[Sequence[int]], lanes: int, name: str) -> PrimFunc:
    """The PrimFunc (grad, data, gradient of data), tensors of these shapes."""
    emitter = _Emitter(pool, shapes[1], lanes)
    return emitter.gathered(shapes, name) if gathers(pool) else emitter.scattered(shapes, name)


class _Emitter:
    def __init__(self, pool: MaxPool, data: Sequence[int], lanes: int) -> None:
        self.pool, self.loops = pool, Loops()
        self.images, self.channels = data[0], data[-1]
        self.lanes = math.gcd(lanes, self.channels)  # the widest vector that fills the channels evenly
        vectors = self.channels // self.lanes
        fitting = [n for n in range(min(BLOCK, vectors), 0, -1) if vectors % n == 0]
        self.vectors = next((n for n in fitting if self.images * vectors // n >= ITEMS), fitting[-1])
        work = pool.planes * math.prod(pool.results) * math.prod(pool.kernel)
        self.kind = "parallel" if work >= PARALLEL_FROM else "serial"
        self.number = "int64" if pool.dtype == "float64" else "int32"
        self.lowest = splat(tir.const(-math.inf, pool.wide), self.lanes)

    def forward(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        loops = self.loops
        parameters, (data, result) = parameters_of(loops, self.pool.dtype, ("data", "result"), shapes)

        def window(source: Index, target: Index, places: Places) -> None:
            largest = self._largest(data, source, places)
            for i, register in enumerate(largest):
                if self.pool.is_narrow:
                    self._narrow(result, target + i * self.lanes, register, 0)
                else:
                    loops.store(result, target + i * self.lanes, load(register, 0, self.lanes))

        self._each_window(window)
        return loops.finish(parameters, name)

    def gathered(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        """Rows of winners, from which the gradients of the rows of the data are gathered that they complete."""
        loops, lanes, pool, channels = self.loops, self.lanes, self.pool, self.channels
        parameters, (grad, data, result) = parameters_of(loops, pool.dtype, ("grad", "data", "result"), shapes)
        halves = loops.flat(result, math.prod(shapes[1]), HALF) if pool.dtype == "bfloat16" else None
        store = Numbers(loops, result, pool.wide, halves=halves).store
        (_, height, width), (_, rows, columns), stride = pool.extents, pool.results, pool.strides[2]
        unit = self.vectors * lanes
        with loops.loop(self.images * (channels // unit), "item", self.kind) as item:
            image, block = loops.divmod(item, channels // unit)
            source, target = (
                loops.let(expr(image * (pixels * channels) + block * unit), "begin")
                for pixels in (height * width, rows * columns)
            )
            windows = WindowRows(loops, pool, unit, lanes, self.number)

            def window_row(number: Index, start: Index) -> None:
                begin = loops.let(expr(target + number * (columns * channels)), "begin")
                for x, winners in self._each_winner(data, source, number):
                    for i, winner in enumerate(winners):
                        to = start + (x * unit + i * lanes)
                        value = load(grad, begin + (x * channels + i * lanes), lanes)
                        loops.store(windows.winners, to, load(winner, 0, lanes))
                        loops.store(windows.grads, to, convert(value, pool.wide))

            for row, phase in windows.each_step(window_row):
                begin = loops.let(expr(source + row * (width * channels)), "begin")
                # Groups of columns that differ by the stride, and the rest.
                for first, groups, count in ((0, width // stride, stride), (width // stride, 1, width % stride)):
                    with loops.loop(groups, "group") as number:
                        group = first + number
                        for column in range(count):
                            for i in range(self.vectors):
                                value = windows.gathered(phase, column, group * unit + i * lanes)
                                at = begin + ((group * stride + column) * channels + i * lanes)
                                store(at, loops.let(value, "value"))
        return loops.finish(parameters, name)

    def _each_winner(self, data: Buffer, source: Index, number: Index) -> Iterator[tuple[Index, list[Buffer]]]:
        """Yield each window of a row of them, and registers with the numbers of the taps that win it.

        Taps are numbered as if all were in bounds. Those of the windows whose columns are in bounds are unrolled.
        """
        loops, pool = self.loops, self.pool
        columns, stride, low, taps = pool.results[2], pool.strides[2], pool.low[2], pool.kernel[2]
        inner = min(columns, -(-low // stride))
        right = max(inner, min(columns, (pool.extents[2] + low - taps) // stride + 1))
        first_row, rows = self._bounds(number, 1)
        tap_row = loops.let(expr(first_row - (number * pool.strides[1] - pool.low[1])), "tap_row")
        for begin, end in ((0, inner), (inner, right), (right, columns)):
            with loops.loop(end - begin, "x") as place:
                x = expr(begin + place)
                start = loops.let(x * stride - low, "column")
                is_inside = begin == inner and end == right
                first, count = (start, taps) if is_inside else self._bounds(x, 2)
                winners = self._registers("winner", self.number, self._number(tap_row * taps + (first - start)))
                largest = self._registers("largest", pool.wide, self.lowest)
                with loops.loop(rows, "kh") as kh:
                    row = loops.let(expr((first_row + kh) * pool.extents[2] + first), "row")
                    tap = loops.let(expr((tap_row + kh) * taps + (first - start)), "tap")
                    for kw in self._unrolled(taps) if is_inside else self._looped(count):
                        at = loops.let(source + (row + kw) * self.channels, "at")
                        self._keep_larger(data, at, self._number(tap + kw), largest, winners)
                yield x, winners

    @staticmethod
    def _unrolled(count: int) -> Iterator[Index]:
        yield from range(count)

    def _looped(self, count: Index) -> Iterator[Index]:
        with self.loops.loop(count, "kw") as kw:
            yield kw

    def _keep_larger(self, data: Buffer, at: Index, number: Expr, largest: list[Buffer], winners: list[Buffer]) -> None:
        """Put a tap of a window into registers where it is larger, or NaN."""
        loops, lanes = self.loops, self.lanes
        for i, (register, winner) in enumerate(zip(largest, winners, strict=True)):
            value = convert(load(data, at + i * lanes, lanes), self.pool.wide)
            best = load(register, 0, lanes)
            better = exceeds(value, best)
            loops.store(winner, 0, tir.Select(better, number, load(winner, 0, lanes)))
            loops.store(register, 0, tir.Select(better, value, best))

    def scattered(self, shapes: Sequence[Sequence[int]], name: str) -> PrimFunc:
        loops, lanes, pool = self.loops, self.lanes, self.pool
        parameters, (grad, data, result) = parameters_of(loops, pool.dtype, ("grad", "data", "result"), shapes)
        pixels, block = math.prod(pool.extents), self.vectors * lanes
        sums, step = (result, self.channels)  # of this work item, and elements from pixel to pixel

        def clear(source: Index) -> None:
            nonlocal sums, step
            if pool.is_narrow:
                sums, step = loops.buffer("sums", pixels * block, pool.wide), block
            begin = 0 if pool.is_narrow else source
            with loops.loop(pixels, "pixel") as pixel:
                for i in range(self.vectors):
                    loops.store(sums, begin + pixel * step + i * lanes, zero(pool.wide, lanes))

        def window(source: Index, target: Index, places: Places) -> None:
            winners = self._winners(data, source, places)

            def give(place: Index, number: Index) -> None:
                for i, winner in enumerate(winners):
                    begin = quotient(place, self.channels) * block if pool.is_narrow else source + place
                    at = loops.let(expr(begin + i * lanes), "at")
                    wins = tir.EQ(load(winner, 0, lanes), self._number(number))
                    value = convert(load(grad, target + i * lanes, lanes), pool.wide)
                    sent = tir.Select(wins, value, zero(pool.wide, lanes))
                    loops.store(sums, at, load(sums, at, lanes) + sent)

            places(give)

        def finish(source: Index) -> None:
            with loops.loop(pixels, "pixel") as pixel:
                for i in range(self.vectors):
                    self._narrow(result, source + pixel * self.channels + i * lanes, sums, pixel * block + i * lanes)

        self._each_window(window, clear, finish if pool.is_narrow else None)
        return loops.finish(parameters, name)

    def _narrow(self, to: Buffer, first: Index, source: Buffer, begin: Index) -> None:
        """Store a vector of a buffer, rounded."""
        with self.loops.loop(self.lanes, "l", "vectorized") as lane:
            self.loops.store(to, first + lane, load(source, begin + lane))

    def _largest(self, data: Buffer, source: Index, places: Places) -> list[Buffer]:
        """Registers with the largest values of a window."""
        loops, lanes = self.loops, self.lanes
        largest = self._registers("largest", self.pool.wide, self.lowest)

        def keep_larger(place: Index, _number: Index) -> None:
            for i, register in enumerate(largest):
                value = convert(load(data, source + place + i * lanes, lanes), self.pool.wide)
                best = load(register, 0, lanes)
                loops.store(register, 0, maximum(best, value))

        places(keep_larger)
        return largest

    def _winners(self, data: Buffer, source: Index, places: Places) -> list[Buffer]:
        """Registers with the numbers of the taps that have the largest values of a window."""
        largest = self._registers("largest", self.pool.wide, self.lowest)
        winners = self._registers("winner", self.number, self._number(0))

        def keep_larger(place: Index, number: Index) -> None:
            self._keep_larger(data, source + place, self._number(number), largest, winners)

        places(keep_larger)
        return winners

    def _registers(self, name: str, dtype: str, start: Expr) -> list[Buffer]:
        """A vector for each of a work item's blocks of channels."""
        return list(accumulators(self.loops, range(self.vectors), self.lanes, dtype, name, start).values())

    def _number(self, number: Index) -> Expr:
        """The number of a tap, in all lanes; as wide as the data, so that both are compared alike."""
        return splat(tir.Cast(self.number, expr(number)), self.lanes)

    def _each_window(
        self,
        use: Callable[..., None],
        before: Callable[[Index], None] | None = None,
        after: Callable[[Index], None] | None = None,
    ) -> None:
        """Call use(start in data, start in the result, loop over the window's taps) for every window.

        `before` and `after` are called with the start in data of each work item.
        """
        loops, pool = self.loops, self.pool
        blocks = self.channels // (self.vectors * self.lanes)
        pixels, results = math.prod(pool.extents), math.prod(pool.results)
        with loops.loop(self.images * blocks, "item", self.kind) as item:
            image = loops.let(quotient(item, blocks), "image")
            channel = loops.let(remainder(item, blocks) * (self.vectors * self.lanes), "channel")
            source = loops.let(expr(image * (pixels * self.channels) + channel), "source")
            if before is not None:
                before(source)
            with loops.loop(results, "pixel") as number:
                x = remainder(number, pool.results[2])
                rest = quotient(number, pool.results[2])
                places = [quotient(rest, pool.results[1]), remainder(rest, pool.results[1]), x]
                bounds = [self._bounds(place, axis) for axis, place in enumerate(places)]
                target = loops.let(expr((image * results + number) * self.channels + channel), "target")
                use(source, target, lambda visit, bounds=bounds: self._each_place(bounds, visit))
            if after is not None:
                after(source)

    def _bounds(self, along: Index, axis: int) -> tuple[Index, Index]:
        """(the first element of a window that is in bounds along an axis, how many are)."""
        pool, loops = self.pool, self.loops
        start = loops.let(expr(along * pool.strides[axis] - pool.low[axis]), "start")
        first = loops.let(larger(start, 0), "from")
        return first, loops.let(smaller(start + pool.kernel[axis], pool.extents[axis]) - first, "count")

    def _each_place(self, bounds: list[tuple[Index, Index]], visit: Visit) -> None:
        """Call visit(place, number) for every tap of a window in scan order, numbered from 0."""
        loops, (_, height, width) = self.loops, self.pool.extents
        (d, d_count), (h, h_count), (w, w_count) = bounds
        with loops.loop(d_count, "kd") as kd, loops.loop(h_count, "kh") as kh:
            row = loops.let(expr((((d + kd) * height + h + kh) * width + w) * self.channels), "row")
            before = loops.let(expr((kd * h_count + kh) * w_count), "before")
            with loops.loop(w_count, "kw") as kw:
                visit(loops.let(expr(row + kw * self.channels), "place"), before + kw)


__all__ = ["channels_last_backward_kernel", "channels_last_kernel"]
