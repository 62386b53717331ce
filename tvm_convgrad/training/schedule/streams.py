# SPDX-License-Identifier: Apache-2.0
"""Reductions along an axis of a free extent: the axis is the inner loop, which LLVM turns into vectors.

A register tile needs a constant extent. Here a row of sums stays in the first cache, and each pass over it adds a few
products to each sum: for y[o, x] += w[o, r] * d[r, x] those of some outputs o, which share the loads of d, and of some
adjacent r. Where the free axis is reduced over, as in wgrad, there is a sum for each of its places; these are added
at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir

from tvm_convgrad.training.schedule.blocks import extents_of, kinds_of, parallelise, work_of
from tvm_convgrad.training.schedule.reductions import ROWS, largest_factor, operand_strides

MOST_UNROLLED = 16
"""Products that one iteration of the inner loop adds."""


@dataclass(frozen=True)
class Stream:
    """The inner loop of a reduction, by positions among its iterators.

    Attributes:
        axis: of the free extent; `is_reduced` if it is reduced over.
        rows: an axis of the result of which `factor` places share an operand's loads; -1: none.
        taps: a reduced axis that is unrolled; -1: none.
    """

    axis: int
    is_reduced: bool
    rows: int = -1
    factor: int = 1
    taps: int = -1


def choose_stream(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> Stream | None:
    """The inner loop of a reduction, or None where no axis of a free extent is contiguous.

    It is in the result, or in an operand where it is reduced over; another operand may be read with a stride.
    """
    kinds, extents = kinds_of(schedule, block), extents_of(schedule, block)
    found = operand_strides(schedule, block)
    if found is None or "S" not in kinds or "R" not in kinds or schedule.get(block).init is None:
        return None
    result, operands = found
    free = [axis for axis, extent in enumerate(extents) if extent is None]
    contiguous = [
        axis for axis in free if kinds[axis] == "S" and result[axis] == 1 and any(step[axis] != 0 for step in operands)
    ]
    if contiguous:
        return _with_unrolled(kinds, extents, operands, Stream(contiguous[-1], False))
    summed = [
        axis
        for axis in free
        if kinds[axis] == "R"
        and all(step[axis] != 0 for step in operands)
        and any(step[axis] == 1 for step in operands)
    ]
    if not summed or kinds.count("R") < 2:
        return None
    return Stream(summed[-1], True)


def _with_unrolled(kinds: str, extents: list[int | None], operands: list[list[int | None]], stream: Stream) -> Stream:
    """The stream with the axes whose places one iteration of the inner loop takes."""
    rows, factor, taps, room = -1, 1, -1, MOST_UNROLLED
    moving = [step for step in operands if step[stream.axis] != 0]
    for axis, extent in enumerate(extents):
        if kinds[axis] == "S" and extent and any(step[axis] == 0 for step in moving):
            largest = largest_factor(extent, ROWS)
            if largest is not None and largest > factor:
                rows, factor = axis, largest
    for axis, extent in enumerate(extents):
        if kinds[axis] == "R" and extent and 1 < extent <= room // factor and any(step[axis] != 0 for step in moving):
            taps = axis
    return Stream(stream.axis, False, rows, factor, taps)


def run_as_stream(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, kinds: str, stream: Stream) -> None:
    """Make the stream the inner loop, with threads over the other axes of the result."""
    work = work_of(schedule, block)
    loops = schedule.get_loops(block)
    spatial = [loop for axis, loop in enumerate(loops) if kinds[axis] == "S" and axis != stream.axis]
    if stream.is_reduced:
        partial = schedule.rfactor(loops[stream.axis], len(spatial))
        parallelise(schedule, schedule.get_loops(block)[: len(spatial)], work)
        around = schedule.get_loops(block)[:-1]  # more than one if an extent is a formula
        schedule.compute_at(partial, around[-1], preserve_unit_loops=True)
        inner = schedule.get_loops(partial)[len(around) :]
        by_kind = {
            kind: [loop for loop, its in zip(inner, kinds_of(schedule, partial), strict=True) if its == kind]
            for kind in "SR"
        }
        place, *others = by_kind["S"]  # the axis that rfactor makes comes first
        schedule.reorder(*others, *by_kind["R"], place)
        schedule.decompose_reduction(partial, by_kind["R"][0])
        return
    unrolled = []
    reduced = [loop for axis, loop in enumerate(loops) if kinds[axis] == "R" and axis != stream.taps]
    if stream.rows >= 0:
        outer, inner_rows = schedule.split(loops[stream.rows], [None, stream.factor])
        spatial[spatial.index(loops[stream.rows])] = outer
        unrolled.append(inner_rows)
    if stream.taps >= 0:
        unrolled.append(loops[stream.taps])
    schedule.reorder(*spatial, *reduced, loops[stream.axis], *unrolled)
    for loop in unrolled:
        schedule.unroll(loop)
    parallelise(schedule, spatial, work)
    schedule.decompose_reduction(block, reduced[0] if reduced else loops[stream.axis])


__all__ = ["Stream", "choose_stream", "run_as_stream"]
