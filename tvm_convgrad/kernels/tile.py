# SPDX-License-Identifier: Apache-2.0
"""The register tile: rows x columns accumulators that stay in vector registers over a whole reduction.

    C[i, j] += sum over k of  A[k, i] (a scalar, broadcast) * B[k, j] (a vector)

Each accumulator is a buffer of its own, small enough for the stack, and is indexed by constants: LLVM then keeps it in
a register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_convgrad.kernels.loops import Loops, lanes_of, load, splat, zero
from tvm_convgrad.kernels.target import Machine


class Tile:
    """Accumulators of `rows` x `columns` vectors, cleared when made."""

    def __init__(self, loops: Loops, rows: int, columns: int, lanes: int, dtype: str) -> None:
        self.rows, self.columns, self.lanes, self.dtype = rows, columns, lanes, dtype
        self._loops = loops
        self._sums = [[loops.buffer("sum", lanes, dtype) for _ in range(columns)] for _ in range(rows)]
        for row in self._sums:
            for register in row:
                loops.store(register, 0, zero(dtype, lanes))

    def add(self, scalar: Callable[[int], Any], vector: Callable[[int], Any]) -> None:
        """One step of the reduction: scalar(i) and vector(j) are A[k, i] and B[k, j].

        scalar(i) may be a vector as well, which is then multiplied lane by lane.
        """
        loops = self._loops
        vectors = [loops.let(vector(j), "b") for j in range(self.columns)]
        for i, row in enumerate(self._sums):
            factor = scalar(i)
            broadcast = loops.let(factor if lanes_of(factor) > 1 else splat(factor, self.lanes), "a")
            for register, value in zip(row, vectors, strict=True):
                loops.store(register, 0, load(register, 0, self.lanes) + broadcast * value)

    def value(self, row: int, column: int) -> Any:
        """An accumulator, as a vector."""
        return load(self._sums[row][column], 0, self.lanes)


def tile_rows(machine: Machine, columns: int) -> int:
    """The most rows with `columns` vectors: accumulators, one broadcast and the vectors of B fill the registers.

    With 32 registers that is 24x1, 14x2, 9x3; 24 rather than 30 rows are enough to hide the latency of the adders.
    """
    return min(24, (machine.registers - 1 - columns) // columns)


def fits(machine: Machine, rows: int, columns: int) -> bool:
    """Whether accumulators, a row of vectors and one broadcast are no more than there are registers."""
    return rows * columns + columns + 1 <= machine.registers


def balanced(total: int, limit: int) -> int:
    """The size of equal pieces of at most `limit`: 39 in pieces of up to 14 is 13 + 13 + 13."""
    pieces = -(-total // min(total, limit))
    return -(-total // pieces)
