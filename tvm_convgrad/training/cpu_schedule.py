# SPDX-License-Identifier: Apache-2.0
"""A plain CPU schedule for any TIR function of a training step: threads, vectors and registers, no tuning.

TVM leaves functions on CPUs as one thread's loops with the reduction innermost. Here
- cheap elementwise stages are inlined where that repeats no work,
- elementwise stages run their outer loops on threads,
- reductions keep a tile of sums in registers: vectors along the axis that is contiguous in every operand (an axis of
  the result, or, for dot products, a reduction axis that is split into lanes), a few rows of another axis of the
  result that share the loads of one operand, threads over the rest.

A reduction is never split over threads, so results do not depend on their number. A function that does not have
the expected form (root block, one loop for each iterator, constant extents where tiles are cut) keeps its loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import ScheduleError

from relax_ops.compat import SBlock, SBlockRealize, TensorLoad, arithmetic, buffer_of
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.training.schedule.rows import emitted, may_overwrite
from tvm_convgrad.training.schedule.stages import itemsize, stage_of

LANES = (16, 8, 4)
ROWS = (4, 2)
ACCUMULATORS = 128  # elements of a register tile
PARALLEL_FROM = 8192  # scalar operations; less is not worth waking threads for


@tvm.transform.module_pass(opt_level=0, name="ConvgradCPUSchedule")
def cpu_schedule(module: Any, _context: Any) -> Any:
    """Schedule every TIR function of a module; those that are scheduled already stay as they are."""
    changed = {}
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, tirx.PrimFunc) and not _is_scheduled(function):
            changed[variable] = scheduled(function)
    for variable, function in changed.items():
        module[variable] = function
    return module


def _is_scheduled(function: Any) -> bool:
    attributes = function.attrs
    return bool(attributes) and bool(attributes.get("tirx.is_scheduled", False))


def scheduled(function: Any) -> Any:
    """The function with the schedule of this module, or as it is where that does not apply."""
    schedule = s_tir.Schedule(tvm.IRModule({"main": function}))
    try:
        blocks = _root_blocks(schedule)
        if blocks is None:
            return function
        _inline(schedule, blocks)
        lines = _as_lines(schedule)
        if lines is not None:
            return lines.with_attr(_kept_attributes(function))
        for block in _root_blocks(schedule) or []:
            _schedule_block(schedule, block)
    except ScheduleError:
        # A primitive's own precondition (such as a block that writes twice) is not met: the plain loops are right.
        return function
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


def scheduled_in_place(function: Any, onto: int) -> Any:
    """The function with its result (the last parameter) stored over its operand number `onto`, which alone remains.

    None where that is impossible: an element is read after its place is taken, or a stage is no loop over lines.
    """
    schedule = s_tir.Schedule(tvm.IRModule({"main": function}))
    try:
        blocks = _root_blocks(schedule)
        if blocks is None:
            return None
        _inline(schedule, blocks)
        return _as_lines(schedule, onto)
    except ScheduleError:
        return None  # as in `scheduled`


def sharing_memory(function: Any, onto: int) -> Any:
    """The function if its last parameter, the result, may be given the same memory as parameter number `onto`, or None.

    A reduction to which that operand is added begins with it, so that it needs no memory of its own either.
    """
    schedule = s_tir.Schedule(tvm.IRModule({"main": function}))
    try:
        blocks = _root_blocks(schedule)
        if blocks is None:
            return None
        _inline(schedule, blocks)
        blocks = _root_blocks(schedule) or []
        stages = [stage_of(schedule.get(block), _extents(schedule, block)) for block in blocks]
        known = [stage for stage in stages if stage is not None]
        buffers = schedule.mod["main"].params
        if not known or len(known) != len(stages) or not may_overwrite(known, buffers[onto], buffers[-1]):
            return None
        function = schedule.mod["main"]
        if [stage.combiner for stage in known] == ["sum", ""] and _is_sum(known[1]):
            schedule.fuse_reduction_epilogue(*blocks)
            function = _without_temporaries(schedule.mod["main"])
    except ScheduleError:
        return None  # as in `scheduled`
    return function.with_attr("tirx.noalias", False)


def _without_temporaries(function: Any) -> Any:
    """The function without its temporaries, which nothing reads or writes any more."""
    root = function.body.block
    block = SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, root.body, annotations=root.annotations)
    return function.with_body(SBlockRealize([], True, block))


def _as_lines(schedule: Any, onto: int | None = None) -> Any:
    """The function as loops over contiguous lines (see schedule.rows), or None if a stage of it is not of that kind."""
    function = schedule.mod["main"]
    blocks = _root_blocks(schedule) or []
    stages = [stage_of(schedule.get(block), _extents(schedule, block)) for block in blocks]
    buffers = list(function.params)
    if not stages or not all(hasattr(buffer, "shape") for buffer in buffers) or any(stage is None for stage in stages):
        return None
    temporaries = list(function.body.block.alloc_buffers)
    extents = [extent for buffer in buffers for extent in buffer.shape]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    machine = machine_of(tvm.target.Target.current(allow_none=True))
    width = max(itemsize(str(buffer.dtype)) for buffer in [*buffers, *temporaries])
    lanes = (machine.vector_bytes if machine else 16) // width
    return emitted(buffers, temporaries, [stage for stage in stages if stage is not None], lanes, onto)


def _kept_attributes(function: Any) -> dict[str, Any]:
    """What callers and later passes know a function by."""
    attributes = function.attrs or {}
    return {"tirx.is_scheduled": True, **{key: attributes[key] for key in ("global_symbol",) if key in attributes}}


def _root_blocks(schedule: Any) -> list[Any] | None:
    """The blocks under the root, or None if the function is no sequence of plain loop nests."""
    function = schedule.mod["main"]
    body = function.body
    if not isinstance(body, SBlockRealize):
        return None
    root = schedule.get_sblock(body.block.name_hint)
    blocks = schedule.get_child_blocks(root)
    for block in blocks:
        iterators = schedule.get(block).iter_vars
        if schedule.get_child_blocks(block) or len(schedule.get_loops(block)) != len(iterators):
            return None
    return list(blocks)


# ---------------------------------------------------------------------------------------------------- inlining


def _kinds(schedule: Any, block: Any) -> str:
    """One letter for each iterator: S for an axis of the result, R for a reduction, ? for others."""
    letters = {tirx.IterVar.DataPar: "S", tirx.IterVar.CommReduce: "R"}
    return "".join(letters.get(iterator.iter_type, "?") for iterator in schedule.get(block).iter_vars)


def _extents(schedule: Any, block: Any) -> list[int | None]:
    """The extent of each loop, None where symbolic."""
    extents = [schedule.get(loop).extent for loop in schedule.get_loops(block)]
    return [int(extent) if isinstance(extent, tirx.IntImm) else None for extent in extents]


def _work(schedule: Any, block: Any) -> int:
    """The number of iterations; a symbolic extent counts as 16."""
    return math.prod(extent or 16 for extent in _extents(schedule, block))


def _inline(schedule: Any, blocks: list[Any]) -> None:
    """Inline copies, and elementwise stages where that repeats no more than a single multiplication or addition.

    What two stages read that end in the same third one can follow once these are inlined: so it goes on until nothing
    changes. LLVM computes once what one expression has twice.
    """
    left = list(blocks)
    while True:
        inlined = [block for block in left if _inline_one(schedule, block)]
        if not inlined:
            return
        left = [block for block in left if not any(block.same_as(other) for other in inlined)]


def _inline_one(schedule: Any, block: Any) -> bool:
    """Inline a block into its consumers where that pays; whether it was done."""
    statement = schedule.get(block)
    if set(_kinds(schedule, block)) - {"S"} or len(statement.writes) != 1:
        return False
    result = buffer_of(statement.writes[0])
    temporaries = schedule.mod["main"].body.block.alloc_buffers
    if not isinstance(statement.body, tirx.BufferStore) or not any(result.same_as(b) for b in temporaries):
        return False
    consumers = schedule.get_consumers(block)
    alone = len(consumers) == 1 and _work(schedule, consumers[0]) <= _work(schedule, block)
    if not consumers or not (alone or _is_cheap(statement.body.value)):
        return False
    schedule.compute_inline(block)
    return True


def _is_cheap(value: Any) -> bool:
    """Whether the value is a load, or one addition, subtraction or multiplication of loads and constants."""
    simple = (TensorLoad, tirx.FloatImm, tirx.IntImm)
    if isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul)):
        return isinstance(value.a, simple) and isinstance(value.b, simple)
    return isinstance(value, simple)


def _is_sum(stage: Any) -> bool:
    """Whether a stage adds two tensors, element by element."""
    value, addresses = stage.value, [stage.store, *(address for _, address in stage.loads)]
    places = {(address.constant, address.coefficients) for address in addresses}
    return isinstance(value, tirx.Add) and len(places) == 1 and {type(value.a), type(value.b)} == {TensorLoad}


# ---------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True)
class _Tile:
    """How to cut a reduction: positions among the iterators, and extents of the pieces."""

    lanes_axis: int
    lanes: int
    rows: dict[int, int]
    is_dot: bool


def _strides(region: Any, variables: list[Any]) -> list[int | None] | None:
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


def _choose_tile(schedule: Any, block: Any) -> _Tile | None:
    """The tile of a reduction, or None where no axis is contiguous in all operands."""
    statement, kinds, extents = schedule.get(block), _kinds(schedule, block), _extents(schedule, block)
    if len(statement.writes) != 1 or "S" not in kinds:
        return None
    variables = [iterator.var for iterator in statement.iter_vars]
    result = _strides(statement.writes[0], variables)
    operands = [
        _strides(region, variables)
        for region in statement.reads
        if not buffer_of(region).same_as(buffer_of(statement.writes[0]))
    ]
    if result is None or not operands or any(operand is None for operand in operands):
        return None
    strides = [operand for operand in operands if operand is not None]

    candidates: list[tuple[int, int, bool]] = []
    for axis, kind in enumerate(kinds):
        steps = [operand[axis] for operand in strides]
        lanes = _largest_factor(extents[axis], LANES)
        if lanes and None not in steps and any(steps):
            if kind == "S" and result[axis] == 1:
                candidates.append((lanes, axis, False))
            elif kind == "R" and all(steps):
                candidates.append((lanes, axis, True))
    if not candidates:
        candidates = _gathering(kinds, extents, strides, result)
    if not candidates:
        return None
    lanes, axis, is_dot = max(candidates, key=lambda candidate: (candidate[0], not candidate[2]))
    return _Tile(axis, lanes, _choose_rows(kinds, extents, strides, axis, lanes), is_dot)


def _choose_rows(
    kinds: str, extents: list[int | None], operands: list[list[int | None]], lanes_axis: int, lanes: int
) -> dict[int, int]:
    """Up to two axes of the result to unroll, with factors: each lets the tile share the loads of another operand.

    An operand that moves along the lanes is shared first, since its loads are whole vectors.
    """
    rows: dict[int, int] = {}
    room = ACCUMULATORS // lanes
    for operand in sorted(operands, key=lambda operand: operand[lanes_axis] == 0)[:2]:
        best: tuple[int, int] | None = None
        for axis, kind in enumerate(kinds):
            factor = _largest_factor(extents[axis], [rows for rows in ROWS if rows <= room])
            free = kind == "S" and axis != lanes_axis and axis not in rows and operand[axis] == 0
            if free and factor and (best is None or factor > best[1]):
                best = (axis, factor)
        if best is not None:
            rows[best[0]] = best[1]
            room //= best[1]
    return rows


def _gathering(
    kinds: str, extents: list[int | None], operands: list[list[int | None]], result: list[int | None]
) -> list[tuple[int, int, bool]]:
    """The contiguous axis of the result, though an operand must be gathered (strides), if another does not move."""
    return [
        (lanes, axis, False)
        for axis, kind in enumerate(kinds)
        if kind == "S" and result[axis] == 1 and any(operand[axis] == 0 for operand in operands)
        if (lanes := _largest_factor(extents[axis], LANES))
    ]


def _largest_factor(extent: int | None, factors: Sequence[int]) -> int | None:
    return next((factor for factor in factors if extent and extent % factor == 0), None)


# ---------------------------------------------------------------------------------------------------- scheduling


def _schedule_block(schedule: Any, block: Any) -> None:
    kinds = _kinds(schedule, block)
    if not kinds or "?" in kinds:
        return
    if "R" not in kinds:
        _parallelise(schedule, schedule.get_loops(block)[:-1] or schedule.get_loops(block), _work(schedule, block))
        return
    tile = _choose_tile(schedule, block)
    if tile is not None and schedule.get(block).init is not None:
        _tile_reduction(schedule, block, kinds, tile)
        return
    loops = schedule.get_loops(block)
    leading = len(kinds) - len(kinds.lstrip("S"))
    _parallelise(schedule, loops[:leading], _work(schedule, block))


def _parallelise(schedule: Any, loops: list[Any], work: int) -> Any:
    """Fuse the loops, and run them on threads if the work pays for it; gives the fused loop."""
    if not loops:
        return None
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    if work >= PARALLEL_FROM:
        schedule.parallel(fused)
    return fused


def _tile_reduction(schedule: Any, block: Any, kinds: str, tile: _Tile) -> None:
    """Cut a reduction into register tiles.

    The sums of a tile live in a local buffer, filled by one block; another block (a copy, or for dot products the sum
    over lanes) brings them into the result.
    """
    work = _work(schedule, block)
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
    fused = _parallelise(schedule, outer, work)
    schedule.compute_at(partial, fused, preserve_unit_loops=True)
    inner_kinds = _kinds(schedule, partial)
    inner = schedule.get_loops(partial)[1:]
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
