# SPDX-License-Identifier: Apache-2.0
"""A plain CPU schedule for any TIR function of a training step: threads, vectors and registers, no tuning.

TVM leaves functions on CPUs as one thread's loops with the reduction innermost. Here
- cheap elementwise stages are inlined where that repeats no work (see `inlining`),
- elementwise stages run their outer loops on threads,
- memory-bound stages become loops over contiguous data (see `memory_bound`),
- other reductions keep a tile of sums in registers (see `reductions`), with threads over the rest,
- or, along a free extent, a row of sums in the first cache (see `streams`).

A reduction is never split over threads, so results do not depend on their number. A function that does not have
the expected form (root block, one loop for each iterator, constant extents where loops are tiled) keeps its loops.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import ScheduleError

from relax_ops.compat import SBlock, SBlockRealize, TensorLoad, nodes_of, replaced
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.codegen.loops import convert, dtype_of
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.training.schedule.blocks import (
    extents_of,
    kinds_of,
    opened,
    parallelise,
    root_blocks,
    without_scopes,
    work_of,
)
from tvm_convgrad.training.schedule.inlining import inline
from tvm_convgrad.training.schedule.memory_bound import emitted, may_overwrite
from tvm_convgrad.training.schedule.padding import pad_products
from tvm_convgrad.training.schedule.reductions import choose_tile, tile_reduction
from tvm_convgrad.training.schedule.stages import Stage, stage_of
from tvm_convgrad.training.schedule.streams import choose_stream, run_as_stream


def ScheduleForCpu() -> tvm.transform.Pass:
    """The pass that schedules every TIR function of a module; those that are scheduled already stay as they are."""
    return tvm.transform.module_pass(_cpu_schedule, opt_level=0, name="ConvgradCPUSchedule")


def _cpu_schedule(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    changed = {}
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, tirx.PrimFunc) and not _is_scheduled(function):
            changed[variable] = scheduled(without_scopes(function))
    for variable, function in changed.items():
        module[variable] = function
    return module


def _keeping_nan(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with casts of float32 to bfloat16 that keep every NaN, which TVM's do not (`bfloat16_bits`)."""
    if not any(map(_rounds, nodes_of(function, tirx.Cast))):
        return function
    body = replaced(
        function.body, (tirx.Cast,), lambda cast: convert(cast.value, "bfloat16") if _rounds(cast) else cast
    )
    return function.with_body(body)


def _rounds(cast: tirx.Cast) -> bool:
    return dtype_of(cast) == "bfloat16" and dtype_of(cast.value) == "float32"


def _is_scheduled(function: tirx.PrimFunc) -> bool:
    attributes = function.attrs
    return bool(attributes) and bool(attributes.get("tirx.is_scheduled", False))


def scheduled(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with the schedule of this module, or as it is where that does not apply."""
    return _keeping_nan(_with_loops(function))


def _with_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    schedule = opened(function)
    try:
        blocks = root_blocks(schedule)
        if blocks is None:
            return function
        inline(schedule, blocks)
        loops = _as_memory_bound(schedule)
        if loops is not None:
            return loops.with_attr(_kept_attributes(function))
        pad_products(schedule)
        for block in root_blocks(schedule) or []:
            _schedule_block(schedule, block)
    except ScheduleError:
        # A primitive's own precondition (such as a block that writes twice) does not hold: the plain loops are right.
        return function
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


def scheduled_in_place(function: tirx.PrimFunc, onto: int) -> tirx.PrimFunc | None:
    """The function with its result (the last parameter) stored over its operand number `onto`, which alone remains.

    None where that is impossible: an element is read after its place is taken, or a stage is not memory-bound.
    """
    schedule = opened(function)
    try:
        blocks = root_blocks(schedule)
        if blocks is None:
            return None
        inline(schedule, blocks)
        loops = _as_memory_bound(schedule, onto)
        return None if loops is None else _keeping_nan(loops)
    except ScheduleError:
        return None  # as in `scheduled`


def sharing_memory(function: tirx.PrimFunc, onto: int) -> tirx.PrimFunc | None:
    """The function if its last parameter, the result, may be given the same memory as parameter number `onto`, or None.

    A reduction to which that operand is added begins with it, so that it needs no memory of its own either.
    """
    schedule = opened(function)
    try:
        blocks = root_blocks(schedule)
        if blocks is None:
            return None
        inline(schedule, blocks)
        blocks = root_blocks(schedule) or []
        stages = [stage_of(schedule.get(block), extents_of(schedule, block)) for block in blocks]
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


def _without_temporaries(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without its temporaries, which nothing reads or writes any more."""
    root = function.body.block
    block = SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, root.body, annotations=root.annotations)
    return function.with_body(SBlockRealize([], True, block))


def _as_memory_bound(schedule: s_tir.Schedule, onto: int | None = None) -> tirx.PrimFunc | None:
    """The function as the loops of `memory_bound`, or None if one of its stages is not of that kind."""
    function = schedule.mod["main"]
    blocks = root_blocks(schedule) or []
    stages = [stage_of(schedule.get(block), extents_of(schedule, block)) for block in blocks]
    buffers = list(function.params)
    if not stages or not all(hasattr(buffer, "shape") for buffer in buffers) or any(stage is None for stage in stages):
        return None
    temporaries = list(function.body.block.alloc_buffers)
    extents = [extent for buffer in buffers for extent in buffer.shape]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    machine = machine_of(tvm.target.Target.current(allow_none=True))
    width = max(numpy_dtype(str(buffer.dtype)).itemsize for buffer in [*buffers, *temporaries])
    lanes = (machine.vector_bytes if machine else 16) // width
    return emitted(buffers, temporaries, [stage for stage in stages if stage is not None], lanes, onto)


def _kept_attributes(function: tirx.PrimFunc) -> dict[str, Any]:
    """The attributes by which callers and later passes find a function."""
    attributes = function.attrs or {}
    return {"tirx.is_scheduled": True, **{key: attributes[key] for key in ("global_symbol",) if key in attributes}}


def _is_sum(stage: Stage) -> bool:
    """Whether a stage adds two tensors, element by element."""
    value, addresses = stage.value, [stage.store, *(address for _, address in stage.loads)]
    places = {(address.constant, address.coefficients) for address in addresses}
    return isinstance(value, tirx.Add) and len(places) == 1 and {type(value.a), type(value.b)} == {TensorLoad}


def _schedule_block(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> None:
    kinds = kinds_of(schedule, block)
    if not kinds or "?" in kinds:
        return
    if "R" not in kinds:
        _parallelise(schedule, block, len(kinds) - 1 or 1)
        return
    tile = choose_tile(schedule, block)
    if tile is not None and schedule.get(block).init is not None:
        tile_reduction(schedule, block, kinds, tile)
        return
    stream = choose_stream(schedule, block)
    if stream is not None:
        run_as_stream(schedule, block, kinds, stream)
        return
    _parallelise(schedule, block, len(kinds) - len(kinds.lstrip("S")))


def _parallelise(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, count: int) -> None:
    """Run the outer `count` loops of a block on threads."""
    loops, inside = schedule.get_loops(block)[:count], extents_of(schedule, block)[count:]
    parallelise(schedule, loops, work_of(schedule, block), inside)
