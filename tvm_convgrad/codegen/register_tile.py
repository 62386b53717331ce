# SPDX-License-Identifier: Apache-2.0
"""The register tile of a GEMM: m x n accumulators that stay in vector registers over a whole reduction.

    C[i, j] += sum over k of  A[k, i] (a scalar, broadcast) * B[k, j] (a vector),   i < m (rows), j < n (columns)

Where A and B hold words of two bfloat16 (`dot_product`), a product is the dot product of two words.

Each accumulator is a buffer on the stack that is indexed by constants only, so LLVM promotes it to a register.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import dot_product
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Buffer, Expr, Index, Loops, lanes_of, load, splat, zero


class Sums(Protocol):
    """The finished sums of a tile, which a kernel takes vector after vector or stores to a buffer as a whole.

    Attributes:
        columns: vectors of a row.
    """

    columns: int

    def complete(self) -> None:
        """Emit what has to come before the first `value`."""

    def value(self, row: int, column: int) -> Expr:
        """A vector of sums, by its row and its number in the row; after `complete`."""

    def store(self, buffer: Buffer, at: Index, offsets: Sequence[int]) -> None:
        """Store all vectors; those of row i are contiguous from `at + offsets[i]` on."""


class Tile:
    """`rows` x `columns` accumulators of one vector each; making a tile emits code that sets them to zero."""

    def __init__(self, loops: Loops, rows: int, columns: int, lanes: int, dtype: str, *, dots: bool = False) -> None:
        self.rows, self.columns, self.lanes, self.dtype = rows, columns, lanes, dtype
        self._loops, self._dots = loops, dots
        self._sums = [[loops.buffer("sum", lanes, dtype) for _ in range(columns)] for _ in range(rows)]
        for row in self._sums:
            for register in row:
                loops.store(register, 0, zero(dtype, lanes))

    def add(
        self, scalar: Callable[[int], Expr], vector: Callable[[int], Expr], rows: Collection[int] | None = None
    ) -> None:
        """One step of the reduction: scalar(i) and vector(j) are A[k, i] and B[k, j].

        Args:
            scalar: may also give a vector, which is then multiplied lane by lane.
            vector: gives a vector of B.
            rows: those that are summed; all by default.
        """
        loops = self._loops
        vectors = [loops.let(vector(j), "b") for j in range(self.columns)]
        for i, row in enumerate(self._sums):
            if rows is not None and i not in rows:
                continue
            factor = scalar(i)
            broadcast = loops.let(factor if lanes_of(factor) > 1 else splat(factor, self.lanes), "a")
            for register, value in zip(row, vectors, strict=True):
                total = load(register, 0, self.lanes)
                if self._dots:
                    loops.store(register, 0, dot_product(loops, total, broadcast, value))
                else:
                    loops.store(register, 0, total + tir.product(broadcast, value))

    def load(self, buffer: Buffer, at: Index, offsets: Sequence[int]) -> None:
        """Begin with sums that `store` stored."""
        for i, offset in enumerate(offsets):
            for j, register in enumerate(self._sums[i]):
                self._loops.store(register, 0, load(buffer, at + offset + j * self.lanes, self.lanes))

    def complete(self) -> None:
        """It emits nothing, as accumulators can be read at any time."""

    def value(self, row: int, column: int) -> Expr:
        """An accumulator, as a vector."""
        return load(self._sums[row][column], 0, self.lanes)

    def store(self, buffer: Buffer, at: Index, offsets: Sequence[int]) -> None:
        """Store all accumulators; those of row i are contiguous from `at + offsets[i]` on."""
        for i, offset in enumerate(offsets):
            for j in range(self.columns):
                self._loops.store(buffer, at + offset + j * self.lanes, self.value(i, j))


def tile_rows(machine: Machine, columns: int) -> int:
    """The most rows of a tile with `columns` columns: accumulators, one broadcast and a row of B fill the registers.

    With 32 registers that is 24x1, 14x2, 9x3; 24 rows, rather than 30, are enough to hide the latency of the adders.
    """
    return min(24, (machine.registers - 1 - columns) // columns)


def fits(machine: Machine, rows: int, columns: int) -> bool:
    """Whether the accumulators, a row of B and one broadcast fit the registers."""
    return rows * columns + columns + 1 <= machine.registers


def balanced(total: int, limit: int) -> int:
    """The size of equal pieces of at most `limit`: 39 in pieces of up to 14 is 13 + 13 + 13."""
    pieces = -(-total // min(total, limit))
    return -(-total // pieces)
