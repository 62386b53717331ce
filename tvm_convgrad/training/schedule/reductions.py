# SPDX-License-Identifier: Apache-2.0
"""Register tiles for reductions: which tile a reduction gets, and how it is scheduled with it.

Vectors run along an axis that is contiguous in every operand (an axis of the result or, for dot products, a reduction
axis that is split into lanes); a few rows of another axis of the result share the loads of one operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir, tirx

from relax_ops.compat import arithmetic, buffer_of
from tvm_convgrad.training.schedule.blocks import extents_of, kinds_of, parallelise, work_of

LANES = (16, 8, 4)
ROWS = (4, 2)
ACCUMULATORS = 128  # elements of a register tile


@dataclass(frozen=True)
class Tile:
    """The register tile of a reduction: positions among the iterators, and their extents in the tile."""

    lanes_axis: int
    lanes: int
    rows: dict[int, int]
    is_dot: bool


def _strides(region: tirx.BufferRegion, variables: list[tirx.Var]) -> list[int | None] | None:
    """For each variable how the address moves with it: 0 not at all, 1 by one element, None otherwise.

    None for the whole if the region is more than one element.
    """
    if any(not isinstance(part.extent, tirx.IntImm) or int(part.extent) != 1 for part in region.region):
        return None
    starts = [part.min for part in region.region]
    used = [set(tirx.analysis.undefined_vars(start)) for start in starts]
    strides: list[int | None] = []
    for variable in variables:
        axes = [axis for axis, names in enumerate(used) if variable in names]
        if not axes:
            strides.append(0)
            continue
        linear = arithmetic.detect_linear_equation(starts[-1], [variable]) if axes == [len(starts) - 1] else []
        is_one = len(linear) == 2 and isinstance(linear[0], tirx.IntImm) and int(linear[0]) == 1
        strides.append(1 if is_one else None)
    return strides


def choose_tile(
    schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, extents: Sequence[int | None] | None = None
) -> Tile | None:
    """The tile of a reduction, or None where no axis is contiguous in all operands.

    Args:
        extents: those of its iterators, if they were others than they are.
    """
    kinds, extents = kinds_of(schedule, block), extents or extents_of(schedule, block)
    found = operand_strides(schedule, block)
    if found is None or "S" not in kinds:
        return None
    result, strides = found
    candidates: list[tuple[int, int, bool]] = []
    for axis, kind in enumerate(kinds):
        steps = [operand[axis] for operand in strides]
        lanes = largest_factor(extents[axis], LANES)
        if lanes and None not in steps and any(steps):
            if kind == "S" and result[axis] == 1:
                candidates.append((lanes, axis, False))
            elif kind == "R" and all(steps):
                candidates.append((lanes, axis, True))
    if not candidates:
        candidates = _strided_candidates(kinds, extents, strides, result)
    if not candidates:
        return None
    lanes, axis, is_dot = max(candidates, key=lambda candidate: (candidate[0], not candidate[2]))
    return Tile(axis, lanes, _choose_rows(kinds, extents, strides, axis, lanes), is_dot)


def operand_strides(
    schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV
) -> tuple[list[int | None], list[list[int | None]]] | None:
    """How the result's address and those of the operands move with each iterator, as of `_strides`.

    None if there is more than one result, no operand, or an access to more than one element.
    """
    statement = schedule.get(block)
    if len(statement.writes) != 1:
        return None
    variables = [iterator.var for iterator in statement.iter_vars]
    result = _strides(statement.writes[0], variables)
    operands = [
        _strides(region, variables)
        for region in statement.reads
        if not buffer_of(region).same_as(buffer_of(statement.writes[0]))
    ]
    known = [operand for operand in operands if operand is not None]
    return (result, known) if result is not None and known and len(known) == len(operands) else None


def _choose_rows(
    kinds: str, extents: Sequence[int | None], operands: list[list[int | None]], lanes_axis: int, lanes: int
) -> dict[int, int]:
    """Up to two axes of the result to unroll, with factors: each lets the tile share the loads of another operand.

    An operand that moves along the lanes is shared first, since its loads are whole vectors.
    """
    rows: dict[int, int] = {}
    room = ACCUMULATORS // lanes
    for operand in sorted(operands, key=lambda operand: operand[lanes_axis] == 0)[:2]:
        best: tuple[int, int] | None = None
        for axis, kind in enumerate(kinds):
            factor = largest_factor(extents[axis], [rows for rows in ROWS if rows <= room])
            free = kind == "S" and axis != lanes_axis and axis not in rows and operand[axis] == 0
            if free and factor and (best is None or factor > best[1]):
                best = (axis, factor)
        if best is not None:
            rows[best[0]] = best[1]
            room //= best[1]
    return rows


def _strided_candidates(
    kinds: str, extents: Sequence[int | None], operands: list[list[int | None]], result: list[int | None]
) -> list[tuple[int, int, bool]]:
    """The contiguous axis of the result, where one operand is loaded with strides, if another operand does not move."""
    return [
        (lanes, axis, False)
        for axis, kind in enumerate(kinds)
        if kind == "S" and result[axis] == 1 and any(operand[axis] == 0 for operand in operands)
        if (lanes := largest_factor(extents[axis], LANES))
    ]


def largest_factor(extent: int | None, factors: Sequence[int]) -> int | None:
    """The first of these factors, the largest first, that divides an extent; None if there is none, or it is free."""
    return next((factor for factor in factors if extent and extent % factor == 0), None)


def tile_reduction(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, kinds: str, tile: Tile) -> None:
    """Split a reduction into register tiles.

    The sums of a tile live in a local buffer, filled by one block; another block (a copy, or for dot products the sum
    over lanes) brings them into the result.
    """
    work = work_of(schedule, block)
    if tile.is_dot:
        _, lane_loop = schedule.split(schedule.get_loops(block)[tile.lanes_axis], [None, tile.lanes])
        partial = schedule.rfactor(lane_loop, kinds.count("S"))
        final = block
        schedule.set_scope(partial, 0, "local")
    else:
        partial = block
        final = schedule.cache_write(block, 0, "local")
    spatial = [axis for axis, kind in enumerate(kinds) if kind == "S"]
    loops = schedule.get_loops(final)
    outer, rows, lanes = [], [], []
    for position, axis in enumerate(spatial):
        loop = loops[position]
        if axis in tile.rows:
            loop, inner = schedule.split(loop, [None, tile.rows[axis]])
            rows.append(inner)
        elif axis == tile.lanes_axis:
            loop, inner = schedule.split(loop, [None, tile.lanes])
            lanes.append(inner)
        outer.append(loop)
    lanes += loops[len(spatial) :]  # of a dot product: the sum over lanes
    schedule.reorder(*outer, *rows, *lanes)
    parallelise(schedule, outer, work)
    around = schedule.get_loops(final)[: -(len(rows) + len(lanes))]  # more than one if an extent is a formula
    schedule.compute_at(partial, around[-1], preserve_unit_loops=True)
    inner_kinds = kinds_of(schedule, partial)
    inner = schedule.get_loops(partial)[len(around) :]
    by_kind = {kind: [loop for loop, other in zip(inner, inner_kinds, strict=True) if other == kind] for kind in "SR"}
    # A dot product's lanes come first among the iterators of the block that rfactor makes.
    by_axis = dict(zip([-1, *spatial] if tile.is_dot else spatial, by_kind["S"], strict=True))
    lane_loop = by_axis.pop(-1 if tile.is_dot else tile.lanes_axis)
    row_loops = [by_axis.pop(axis) for axis in tile.rows]
    schedule.reorder(*by_axis.values(), *by_kind["R"], *row_loops, lane_loop)
    schedule.vectorize(lane_loop)
    for loop in row_loops:
        schedule.unroll(loop)
    schedule.decompose_reduction(partial, by_kind["R"][0])
    if not tile.is_dot:
        schedule.vectorize(schedule.get_loops(final)[-1])
