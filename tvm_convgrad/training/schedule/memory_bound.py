# SPDX-License-Identifier: Apache-2.0
"""Loops for memory-bound stages: each reads its operands once, in vectors along their contiguous axes.

Iterators along which all operands are contiguous (H and W of NCHW data) are fused into one inner loop, the others into
one parallel loop.
- Consecutive elementwise stages with the same iterators share their loops.
- A reduction over the inner loop keeps vectors of partial sums; several reductions of the same data share the loops.
- A reduction over outer loops keeps one sum for each element of a piece of the inner loop. A long one is split into a
  fixed number of parts, which are summed in their order.
- Consecutive stages over the same rows run row by row (see `loop_order`).

The split of a sum and its order are fixed at compile time, so results do not depend on the number of threads.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.buffer import buffer_data, decl_buffer

from tvm_convgrad.codegen.extrema import maximum, minimum
from tvm_convgrad.codegen.loops import Loops, lanes_of, load, quotient, remainder, smaller, splat
from tvm_convgrad.codegen.packing import shuffle
from tvm_convgrad.training.schedule.accesses import Accesses, repeats_bfloat16
from tvm_convgrad.training.schedule.loop_order import LoopOrder, by_rows, loop_order_of
from tvm_convgrad.training.schedule.stages import KEEPING_NAN, Stage
from tvm_convgrad.training.schedule.transposes import crossing_of, emit_squares

PIECE = 4096  # iterations of the inner loop that one thread takes at a time
PARALLEL_FROM = 8192  # iterations; fewer are not worth waking threads for
CHAINS = 4  # vectors of partial sums, to hide the latency of additions
COLUMNS = 12  # vectors that are summed at once
ITEMS = 16  # pieces of work of a sum over outer loops, at least; more cores than that stay idle
PART = 64  # terms of a part of a sum over outer loops, at least


def emitted(
    parameters: Sequence[Any], temporaries: Sequence[Any], stages: Sequence[Stage], lanes: int, onto: int | None = None
) -> Any:
    """The PrimFunc that runs the stages in order, or None if one of them is not of the kinds above.

    Args:
        parameters: the buffers of the function's parameters; all extents constant.
        temporaries: the buffers that live within the function.
        lanes: elements of a vector.
        onto: number of the parameter that the last one, the result, replaces in its own memory; the function then
            has no parameter for the result.
    """
    if onto is not None and not may_overwrite(stages, parameters[onto], parameters[-1]):
        return None
    if any(
        stage.combiner
        and _is_flag(stage.store.buffer)
        and any(stage.store.buffer.same_as(each) for each in temporaries)
        for stage in stages
    ):
        return None
    groups: list[tuple[list[Stage], LoopOrder]] = []
    for group in _groups(stages):
        order = loop_order_of(group)
        if order is None:
            return None
        groups.append((group, order))
    loops = Loops()
    own = list(parameters) if onto is None else list(parameters[:-1])
    fresh = [decl_buffer(tuple(map(int, p.shape)), str(p.dtype), name=f"p{i}") for i, p in enumerate(own)]
    emitter = _Emitter(loops, lanes)
    for buffer, parameter in zip(own, fresh, strict=True):
        size = math.prod(map(int, buffer.shape))
        view = decl_buffer((size,), str(buffer.dtype), name=f"{parameter.name}_flat", data=buffer_data(parameter))
        loops.emit(tirx.DeclBuffer(view, data=buffer_data(parameter)))
        emitter.views.append((buffer, view))
    if onto is not None:
        emitter.views.append((parameters[-1], emitter.views[onto][1]))
    for buffer in temporaries:
        size = math.prod(map(int, buffer.shape))
        # TVM turns a buffer of bool that is read by vectors into integers of 8 bits, and refuses them as conditions.
        dtype = "int8" if _is_flag(buffer) else str(buffer.dtype)
        emitter.views.append((buffer, loops.buffer("kept", size, dtype)))
    for chain in by_rows(groups):
        emitter.emit(chain)
    return loops.finish(fresh, "")


def _is_flag(buffer: tirx.Buffer) -> bool:
    return str(buffer.dtype) == "bool"


def may_overwrite(stages: Sequence[Stage], operand: Any, result: Any) -> bool:
    """Whether each element of the operand is last read in the iteration that stores the same element of the result."""
    stores = [number for number, stage in enumerate(stages) if stage.store.buffer.same_as(result)]
    if len(stores) != 1 or stages[stores[0]].combiner:
        return False
    for number, stage in enumerate(stages):
        for _, address in stage.loads:
            if address.buffer.same_as(result):
                return False
            if address.buffer.same_as(operand):
                here = stages[stores[0]]
                same = (address.constant, address.coefficients) == (here.store.constant, here.store.coefficients)
                if number != stores[0] or not same:
                    return False
    return True


def _groups(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Consecutive stages that may share their loops: equal iterators, no reads of unfinished results."""
    groups: list[list[Stage]] = []
    for stage in stages:
        if groups and _may_join(groups[-1], stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _may_join(group: list[Stage], stage: Stage) -> bool:
    first = group[0]
    if (stage.kinds, stage.extents) != (first.kinds, first.extents):
        return False
    for other in group:
        reads = [address for _, address in stage.loads if address.buffer.same_as(other.store.buffer)]
        # An element that the same iteration has just stored may be read; a sum is not yet complete.
        if (other.combiner and reads) or any(address != other.store for address in reads):
            return False
        if any(address.buffer.same_as(stage.store.buffer) and address != stage.store for _, address in other.loads):
            return False
        if stage.store.buffer.same_as(other.store.buffer):
            return False
    return len(group) < 4


class _Emitter(Accesses):
    def emit(self, chain: list[tuple[list[Stage], LoopOrder]]) -> None:
        """The loops of one group, or of several row by row."""
        group, order = chain[0]
        if len(chain) > 1:
            parallel = "parallel" if max(g[0].work for g, _ in chain) >= PARALLEL_FROM else "serial"
            with self.loops.loop(order.rows, "row", parallel) as row:
                for group, order in chain:
                    self._row(group, order, {order.outer[0]: row})
        elif not group[0].combiner:
            self._elementwise(group, order)
        elif order.reduces_inner:
            self._sum_rows(group, order)
        else:
            self._sum_columns(group, order)

    # -- elementwise --------------------------------------------------------------------------------------------

    def _elementwise(self, group: list[Stage], order: LoopOrder) -> None:
        loops, extents = self.loops, group[0].extents
        parallel = "parallel" if group[0].work >= PARALLEL_FROM else "serial"
        crossing = crossing_of(group, order, self.lanes)
        if crossing is not None:
            emit_squares(self, group, order, crossing, parallel)
            return
        outer = math.prod(extents[p] for p in order.outer)
        pieces = -(-order.length // PIECE)
        length = order.length if pieces == 1 else PIECE
        with loops.loop(outer * pieces, "item", parallel) as item:
            places = self.split(quotient(item, pieces), order.outer, group)
            first = loops.let(remainder(item, pieces) * length, "first")
            bases = self.bases(group, places)
            count = length if order.length % length == 0 else loops.let(smaller(order.length - first, length), "count")
            self._inner_loop(group, bases, order, first, count)

    def _inner_loop(self, group: list[Stage], bases: Any, order: LoopOrder, first: Any, count: Any) -> None:
        """`count` iterations of the inner loop, in vectors where that is possible."""
        loops, vectors = self.loops, 0
        if order.is_contiguous and not any(repeats_bfloat16(stage, order.run) for stage in group):
            vectors = quotient(count, self.lanes)
            with loops.loop(vectors, "v") as v, loops.loop(self.lanes, "l", "vectorized") as lane:
                self.store(group, bases, order.run, first + v * self.lanes + lane)
        done = vectors * self.lanes
        if not isinstance(count, int) or done < count:
            with loops.loop(count - done, "t") as t:
                self.store(group, bases, order.run, first + done + t)

    def _row(self, group: list[Stage], order: LoopOrder, places: dict[int, Any]) -> None:
        """One row of a group in a chain."""
        if order.reduces_inner:
            self._sum_row(group, order, places)
        else:
            self._inner_loop(group, self.bases(group, places), order, 0, order.length)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _sum_rows(self, group: list[Stage], order: LoopOrder) -> None:
        extents = group[0].extents
        parallel = "parallel" if group[0].work >= PARALLEL_FROM else "serial"
        with self.loops.loop(math.prod(extents[p] for p in order.outer), "item", parallel) as item:
            self._sum_row(group, order, self.split(item, order.outer, group))

    def _sum_row(self, group: list[Stage], order: LoopOrder, places: dict[int, Any]) -> None:
        """The sums of one place of the result."""
        loops, extents, lanes = self.loops, group[0].extents, self.lanes
        chains = max(1, min(CHAINS, order.length // lanes))
        block = chains * lanes
        sums = [[self._register(stage, lanes) for _ in range(chains)] for stage in group]
        rests = [self._register(stage, 1) for stage in group]
        with loops.loop(math.prod(extents[p] for p in order.reduced), "r") as number:
            inner = self.split(number, order.reduced, group)
            bases = self.bases(group, {**places, **inner})
            if order.length >= lanes:
                with loops.loop(order.length // block, "b") as b:
                    self._add_vectors(group, bases, order, sums, b * block, chains, lanes)
                left = order.length % block // lanes
                self._add_vectors(group, bases, order, sums, order.length // block * block, left, lanes)
            if order.length % lanes:
                start = order.length // lanes * lanes
                with loops.loop(order.length % lanes, "t") as t:
                    self._add(group, bases, order, rests, start + t, 0)
        self._finish_rows(group, places, sums, rests)

    def _register(self, stage: Stage, lanes: int) -> Any:
        register = self.loops.buffer("sum", lanes, str(stage.store.buffer.dtype))
        self.loops.store(register, 0, splat(stage.start, lanes))
        return register

    def _add_vectors(
        self,
        group: list[Stage],
        bases: Any,
        order: LoopOrder,
        sums: list[list[Any]],
        start: Any,
        count: int,
        lanes: int,
    ) -> None:
        for chain in range(count):
            registers = [row[chain] for row in sums]
            if lanes == 1:
                self._add(group, bases, order, registers, start + chain, 0)
                continue
            with self.loops.loop(lanes, "l", "vectorized") as lane:
                self._add(group, bases, order, registers, start + chain * lanes + lane, lane)

    def _add(
        self, group: list[Stage], bases: Any, order: LoopOrder, registers: list[Any], place: Any, lane: Any
    ) -> None:
        for stage, (reads, _), register in zip(group, bases, registers, strict=True):
            value = self.value(stage, reads, order.run, place)
            self.loops.store(register, lane, _combined(stage, load(register, lane), value))

    def _finish_rows(self, group: list[Stage], places: dict[int, Any], sums: list[list[Any]], rests: list[Any]) -> None:
        loops = self.loops
        for stage, registers, rest, (_, write) in zip(group, sums, rests, self.bases(group, places), strict=True):
            vectors = [load(register, 0, self.lanes) for register in registers]
            while len(vectors) > 1:
                half = -(-len(vectors) // 2)
                pairs = zip(vectors, vectors[half:], strict=False)
                paired = [self._once(stage, _combined(stage, a, b)) for a, b in pairs]
                vectors = [*paired, *vectors[len(paired) : half]]
            width, value = self.lanes, loops.let(vectors[0], "sums")
            while width > 1:
                width //= 2
                low, high = (_half(value, width, part) for part in (0, 1))
                value = loops.let(self._once(stage, _combined(stage, low, high)), "half")
            loops.store(self.view(stage.store.buffer), write, _combined(stage, value, load(rest, 0)))

    def _once(self, stage: Stage, value: tirx.Expr) -> Any:
        """The value by way of memory, if it names its operands more than once.

        TVM writes a name out where it is used, so that a tree of such values would grow exponentially.
        """
        if stage.combiner not in KEEPING_NAN.values():
            return value
        lanes = lanes_of(value)
        kept = self.loops.buffer("best", lanes, str(stage.store.buffer.dtype))
        self.loops.store(kept, 0, value)
        return load(kept, 0, lanes)

    def _sum_columns(self, group: list[Stage], order: LoopOrder) -> None:
        loops, extents = self.loops, group[0].extents
        lanes = math.gcd(self.lanes, order.length)
        vectors = next(n for n in range(COLUMNS, 0, -1) if order.length // lanes % n == 0)
        width = vectors * lanes
        blocks, outer = order.length // width, math.prod(extents[p] for p in order.outer)
        terms = math.prod(extents[p] for p in order.reduced)
        parallel = "parallel" if group[0].work >= PARALLEL_FROM else "serial"
        parts = max(1, min(-(-ITEMS // (outer * blocks)), terms // PART)) if parallel == "parallel" else 1
        length = -(-terms // parts)
        parts = -(-terms // length)
        kept = [loops.buffer("parts", parts * blocks * outer * width, str(s.store.buffer.dtype)) for s in group]
        with loops.loop(outer * blocks * parts, "item", parallel) as item:
            place, part = loops.let(quotient(item, parts), "place"), loops.let(remainder(item, parts), "part")
            places, first = self._columns_at(group, order, place, blocks, width)
            sums = [[self._register(stage, lanes) for _ in range(vectors)] for stage in group]
            begin = loops.let(part * length, "begin")
            count = length if terms % length == 0 else loops.let(smaller(terms - begin, length), "count")
            with loops.loop(count, "r") as number:
                inner = self.split(loops.let(begin + number, "line"), order.reduced, group)
                self._add_vectors(group, self.bases(group, {**places, **inner}), order, sums, first, vectors, lanes)
            writes = [write for _, write in self.bases(group, places)]
            for stage, buffer, registers, write in zip(group, kept, sums, writes, strict=True):
                to, start = (self.view(stage.store.buffer), write + first) if parts == 1 else (buffer, item * width)
                for i, register in enumerate(registers):
                    loops.store(to, start + i * lanes, load(register, 0, lanes))
        if parts == 1:
            return
        with loops.loop(outer * blocks, "item") as item:
            places, first = self._columns_at(group, order, item, blocks, width)
            writes = [write for _, write in self.bases(group, places)]
            for stage, buffer, write in zip(group, kept, writes, strict=True):
                with loops.loop(vectors, "v") as v:
                    register = self._register(stage, lanes)
                    with loops.loop(parts, "part") as part:
                        value = load(buffer, (item * parts + part) * width + v * lanes, lanes)
                        loops.store(register, 0, _combined(stage, load(register, 0, lanes), value))
                    to = self.view(stage.store.buffer)
                    loops.store(to, write + first + v * lanes, load(register, 0, lanes))

    def _columns_at(
        self, group: list[Stage], order: LoopOrder, item: Any, blocks: int, width: int
    ) -> tuple[dict[int, Any], Any]:
        """Where a piece of the inner loop is: the places of the iterators around it, and its first element."""
        places = self.split(quotient(item, blocks), order.outer, group)
        return places, self.loops.let(remainder(item, blocks) * width, "first")


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "max": tirx.Max,
    "min": tirx.Min,
    KEEPING_NAN[tirx.Max]: maximum,
    KEEPING_NAN[tirx.Min]: minimum,
}
"""Two partial results of a reduction as one, by its combiner."""


def _combined(stage: Stage, a: Any, b: Any) -> Any:
    return _COMBINE[stage.combiner](a, b)


def _half(value: tirx.Expr, width: int, part: int) -> Any:
    return shuffle(value, value, range(part * width, (part + 1) * width))
