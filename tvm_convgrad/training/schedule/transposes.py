# SPDX-License-Identifier: Apache-2.0
"""Elementwise stages that read an operand across its contiguous axis, such as a change from NHWC to NCHW.

Each such operand is transposed in registers, a square of vectors at a time, into a buffer that stays in the first
cache: the stages then read it along the contiguous axis of their result. Without squares an iteration would use one
element of a cache line, and the next element only after as many lines as the inner loop has iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.codegen.loops import Loops, load, quotient, remainder, smaller
from tvm_convgrad.codegen.packing import transpose
from tvm_convgrad.training.schedule.accesses import Accesses, Bases, joined, repeats_bfloat16
from tvm_convgrad.training.schedule.loop_order import LoopOrder, size_of
from tvm_convgrad.training.schedule.stages import Address, Stage

COLUMNS = 32  # elements of the axis that is crossed: two cache lines of 32 bits, which CPUs fetch as a pair
FEWEST_VECTORS = 4  # of the inner loop; the cache lines that fewer iterations read stay in the first cache
PIECE = 256  # iterations of the inner loop that one thread takes at a time

_BITS = {"float32": "float32", "int32": "int32", "float16": "uint16", "bfloat16": "uint16"}
"""What elements of each type are transposed as: TVM shuffles no vectors of bfloat16."""


@dataclass(frozen=True)
class Crossing:
    """What is read across.

    Attributes:
        addresses: of the loads that are transposed.
        axis: the iterators along which they are contiguous, innermost first.
        rest: the iterators outside, but for `axis`.
    """

    addresses: tuple[Address, ...]
    axis: tuple[int, ...]
    rest: tuple[int, ...]


def crossing_of(group: Sequence[Stage], order: LoopOrder, lanes: int) -> Crossing | None:
    """The operands of elementwise stages to transpose; None if there are none, or too few elements of each."""
    if lanes < 2 or order.length < FEWEST_VECTORS * lanes or any(repeats_bfloat16(each, order.run) for each in group):
        return None
    inner = order.run[0]
    across = tuple(
        dict.fromkeys(
            address for stage in group for _, address in stage.loads if address.coefficients[inner] not in (0, 1)
        )
    )
    if not across or any(str(address.buffer.dtype) not in _BITS for address in across):
        return None
    for run in joined(order.outer, list(group)):
        if all(address.coefficients[run[0]] == 1 for address in across) and size_of(run, group[0].extents) >= lanes:
            return Crossing(across, run, tuple(p for p in order.outer if p not in run))
    return None


def emit_squares(accesses: Accesses, group: list[Stage], order: LoopOrder, crossing: Crossing, parallel: str) -> None:
    """The loops of stages, square by square."""
    loops, lanes, extents = accesses.loops, accesses.lanes, group[0].extents
    width = max(lanes, COLUMNS)
    across = size_of(crossing.axis, extents)
    blocks, pieces = -(-across // width), -(-order.length // PIECE)
    with loops.loop(math.prod(extents[p] for p in crossing.rest) * blocks * pieces, "item", parallel) as item:
        number = loops.let(quotient(item, pieces), "number")
        first = loops.let(remainder(item, pieces) * PIECE, "first")
        count = loops.let(smaller(order.length - first, PIECE), "count")
        begin = loops.let(remainder(number, blocks) * width, "begin")
        columns = loops.let(smaller(across - begin, width), "columns")
        places = accesses.split(loops.let(quotient(number, blocks), "outside"), crossing.rest, group)
        emitter = _Squares(accesses, group, order, crossing, places)
        squares = loops.let(quotient(columns, lanes), "squares")
        vectors = loops.let(quotient(count, lanes), "vectors")
        with loops.loop(vectors, "v") as v, loops.loop(squares, "square") as square:
            emitter.square(loops.let(first + v * lanes, "corner"), loops.let(begin + square * lanes, "column"))
        # Beside the squares and below them.
        done, right = loops.let(vectors * lanes, "done"), loops.let(squares * lanes, "right")
        emitter.one_by_one((begin + right, columns - right), (first, done))
        emitter.one_by_one((begin, columns), (first + done, count - done))


class _Squares:
    """The iterations of a work item, whose other iterators are at `places`; with a buffer for each square."""

    def __init__(
        self, accesses: Accesses, group: list[Stage], order: LoopOrder, crossing: Crossing, places: dict[int, Any]
    ) -> None:
        loops, size = accesses.loops, accesses.lanes * accesses.lanes
        self.accesses, self.group, self.order, self.places, self.axis = accesses, group, order, places, crossing.axis[0]
        self.transposed = {a: loops.buffer("transposed", size, _BITS[str(a.buffer.dtype)]) for a in crossing.addresses}
        self.read = {a: _as(loops, bits, str(a.buffer.dtype)) for a, bits in self.transposed.items()}

    def square(self, first: Any, column: Any) -> None:
        """`lanes` iterations of the inner loop for as many places of the axis that is crossed, from here on."""
        accesses, loops, lanes = self.accesses, self.accesses.loops, self.accesses.lanes
        start = {address: base for reads, _ in self._bases(column) for address, base in reads.items()}
        for address, square in self.transposed.items():
            step = address.coefficients[self.order.run[0]]
            view = _as(loops, accesses.view(address.buffer), str(square.dtype))
            rows = [load(view, start[address] + (first + row) * step, lanes) for row in range(lanes)]
            for number, vector in enumerate(transpose(loops, [loops.let(row, "row") for row in rows])):
                loops.store(square, number * lanes, vector)
        with loops.loop(lanes, "c") as c:
            bases = self._bases(column + c)
            with loops.loop(lanes, "l", "vectorized") as lane:
                held = {address: (buffer, c * lanes + lane) for address, buffer in self.read.items()}
                accesses.store(self.group, bases, self.order.run, first + lane, held)

    def one_by_one(self, columns: tuple[Any, Any], iterations: tuple[Any, Any]) -> None:
        """Iterations of the inner loop for places of the axis that is crossed; of each the first, and how many."""
        loops = self.accesses.loops
        with loops.loop(columns[1], "c") as c:
            bases = self._bases(columns[0] + c)
            with loops.loop(iterations[1], "t") as t:
                self.accesses.store(self.group, bases, self.order.run, iterations[0] + t)

    def _bases(self, column: Any) -> list[Bases]:
        return self.accesses.bases(self.group, {**self.places, self.axis: column})


def _as(loops: Loops, buffer: Any, dtype: str) -> Any:
    """A flat buffer as elements of another type of the same bits."""
    return buffer if str(buffer.dtype) == dtype else loops.flat(buffer, int(buffer.shape[0]), dtype)
