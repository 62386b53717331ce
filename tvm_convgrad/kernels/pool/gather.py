# SPDX-License-Identifier: Apache-2.0
"""The gradient of a max pool of two axes, gathered: each element adds the gradients of the windows that it has won.

For each row of windows the number of the tap that wins and the gradient are stored in a ring of rows. An element of the
data is in the bounds of few windows, at taps that depend only on its row and column modulo the strides. Its gradient is
the sum, in scan order, of the gradients of those windows whose winner has the number of that tap. No element is read
back, and every element is stored once. Windows that do not exist have no winner, so that borders need no conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.loops import Index, Loops, expr, load, remainder, splat, within, zero
from tvm_convgrad.codegen.tir import Expr
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.pool.geometry import MaxPool

MAX_TAPS = 32
"""Taps of a window up to which the gradient is gathered: each is a term in the code."""

NONE = -1
"""The winner of a window that does not exist."""


def gathers(pool: MaxPool) -> bool:
    """Whether the gradient of this pool is gathered."""
    flat = (pool.extents[0], pool.kernel[0], pool.strides[0]) == (1, 1, 1)
    return flat and pool.kernel[1] * pool.kernel[2] <= MAX_TAPS


class WindowRows:
    """The winners and gradients of the rows of windows that the rows of data at hand are in."""

    def __init__(self, loops: Loops, pool: MaxPool, unit: int, lanes: int, number: str) -> None:
        """Allocate the rows, without a winner.

        Args:
            loops: at the beginning of a work item.
            pool: a pool that `gathers`.
            unit: elements of a window: 1, or the channels of a work item.
            lanes: of the vectors that are gathered; along the row if `unit` is 1.
            number: the type of winners, as wide as `pool.wide`.
        """
        self._loops, self._pool, self._unit, self._lanes, self._number = loops, pool, unit, lanes, number
        self._slots = -(-pool.kernel[1] // pool.strides[1])
        reach = [move for phase in range(pool.strides[2]) for _, move in self._columns(phase)]
        groups = self._rounded(-(-pool.extents[2] // pool.strides[2]))
        self._before = max(0, -min(reach))
        self._width = self._before + max(self._rounded(pool.results[2]), groups + max(0, *reach))
        size = self._slots * self._width * unit
        self.winners = loops.buffer("winners", size, number)
        self.grads = loops.buffer("grads", size, pool.wide)
        self._rows: list[Index] = []
        self._clear(0, size)
        with loops.loop(size, "i") as i:
            loops.store(self.grads, i, zero(pool.wide))

    def each_step(self, window_row: Callable[[Index, Index], None]) -> Iterator[tuple[Index, int]]:
        """Yield (a row of the data, its number modulo the stride) in code that has all windows of that row.

        Args:
            window_row: emits the winners and gradients of the row of windows with the first number, from the second,
                an index of `winners` and `grads`, on.
        """
        loops, (_, rows, _), stride = self._loops, self._pool.results, self._pool.strides[1]
        height, low = self._pool.extents[1], self._pool.low[1]
        with loops.loop(-(-(height + low) // stride), "step") as step:
            self._rows = [self._row(step, earlier) for earlier in range(self._slots)]
            start = self._rows[0]
            exists = expr(step) < rows
            with loops.when(exists):
                window_row(step, loops.let(start + self._before * self._unit, "start"))
            with loops.otherwise(exists):
                self._clear(start, self._width * self._unit)
            for phase in range(stride):
                row = loops.let(expr(step) * stride + (phase - low), "data_row")
                with loops.when(within(row, height)):
                    yield row, phase

    def gathered(self, row_phase: int, column_phase: int, group: Index) -> Expr:
        """The gradients of elements of a row of `each_step`.

        Args:
            row_phase: the row modulo the stride, of `each_step`.
            column_phase: the columns modulo the stride.
            group: the columns over the stride: of the first lane if `unit` is 1; else an index of elements is added.
        """
        pool, lanes = self._pool, self._lanes
        total = zero(pool.wide, lanes)
        for earlier in range(self._slots - 1, -1, -1):
            tap_row = row_phase + earlier * pool.strides[1]
            if tap_row >= pool.kernel[1]:
                continue
            for tap, move in self._columns(column_phase):
                at = self._rows[earlier] + (group + (self._before + move) * self._unit)
                wanted = splat(tir.const(tap_row * pool.kernel[2] + tap, self._number), lanes)
                wins = tir.EQ(load(self.winners, at, lanes), wanted)
                total = total + tir.Select(wins, load(self.grads, at, lanes), zero(pool.wide, lanes))
        return total

    def _columns(self, phase: int) -> list[tuple[int, int]]:
        """(tap, window less group) of the windows that columns of a phase are in, in scan order of windows."""
        pool = self._pool
        place, stride = phase + pool.low[2], pool.strides[2]
        taps = [tap for tap in range(pool.kernel[2] - 1, -1, -1) if (place - tap) % stride == 0]
        return [(tap, (place - tap) // stride) for tap in taps]

    def _row(self, step: Index, earlier: int) -> Index:
        """Where the row of windows so many rows earlier than a step begins."""
        slot = remainder(expr(step) + (self._slots - earlier), self._slots)
        return self._loops.let(expr(slot) * (self._width * self._unit), "row")

    def _rounded(self, count: int) -> int:
        """Windows or groups rounded up to those of whole vectors."""
        return count if self._unit > 1 else round_up(count, self._lanes)

    def _clear(self, first: Index, count: int) -> None:
        with self._loops.loop(count, "i") as i:
            self._loops.store(self.winners, first + i, tir.const(NONE, self._number))


__all__ = ["NONE", "WindowRows", "gathers"]
