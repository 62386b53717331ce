# SPDX-License-Identifier: Apache-2.0
"""The blocks of a TIR function under schedule: their iterators, extents and work; parallel loops."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import tvm
from tvm import s_tir, tirx

from relax_ops.compat import SBlock, SBlockRealize

PARALLEL_FROM = 8192  # scalar operations; less is not worth waking threads for

APART = 1024
"""Iterations inside one of a loop on threads, more than LLVM unrolls whole.

Of an unrolled body it would vectorise the loop around it, a thread's share of the iterations, of which the last ones
are scalar code, that may round otherwise: bits would depend on the number of threads.
"""


class _Unchecked(s_tir.Schedule):
    """TVM's schedule without the test of its arguments' Python types, which costs more than most primitives."""


for _name, _method in vars(s_tir.Schedule).items():
    if inspect.isfunction(_method):
        setattr(_Unchecked, _name, inspect.unwrap(_method))


def opened(function: tirx.PrimFunc) -> s_tir.Schedule:
    """The schedule of a function, which is `main` of its module."""
    return _Unchecked(tvm.IRModule({"main": function}))


def root_blocks(schedule: s_tir.Schedule) -> list[s_tir.schedule.SBlockRV] | None:
    """The blocks under the root, or None if the function is not a sequence of plain loop nests."""
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


def kinds_of(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> str:
    """One letter for each iterator: S for an axis of the result, R for a reduction, ? for others."""
    letters = {tirx.IterVar.DataPar: "S", tirx.IterVar.CommReduce: "R"}
    return "".join(letters.get(iterator.iter_type, "?") for iterator in schedule.get(block).iter_vars)


def extents_of(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> list[int | None]:
    """The extent of each loop, None where symbolic."""
    extents = [schedule.get(loop).extent for loop in schedule.get_loops(block)]
    return [int(extent) if isinstance(extent, tirx.IntImm) else None for extent in extents]


def work_of(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> int:
    """The number of iterations; a symbolic extent counts as 16."""
    return math.prod(extent or 16 for extent in extents_of(schedule, block))


def parallelise(
    schedule: s_tir.Schedule, loops: list[s_tir.schedule.LoopRV], work: int, inside: Sequence[int | None] = (None,)
) -> s_tir.schedule.LoopRV | None:
    """Fuse the loops, and run them on threads if the work pays for it; gives the fused loop.

    An inner loop whose extent is a formula stays as it is, and so do those inside it: the fused loop would be divided
    by that extent, and TVM's analysis of buffers fails for some of these divisions.

    Args:
        inside: the extents of the loops inside, None where symbolic; of few iterations several of the fused loop's are
            put together (see `APART`).
    """
    if not loops:
        return None
    formulas = [not isinstance(schedule.get(loop).extent, tirx.IntImm | tirx.Var) for loop in loops[1:]]
    loops = loops[: 1 + (formulas.index(True) if True in formulas else len(formulas))]
    extents = [schedule.get(loop).extent for loop in loops]
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    if work >= PARALLEL_FROM:
        together = _together(extents, inside)
        schedule.parallel(schedule.split(fused, [None, together])[0] if together > 1 else fused)
    return fused


def _together(extents: Sequence[tirx.PrimExpr], inside: Sequence[int | None]) -> int:
    """How many iterations of loops of these extents, fused, one of a thread has, for `APART` inside it.

    They divide the fused loop, whatever a free extent is, unless all are known and no such number is near.
    """
    if None in inside:
        return 1
    least = -(-APART // max(math.prod(extent for extent in inside if extent is not None), 1))
    numbers = [int(extent) for extent in extents if isinstance(extent, tirx.IntImm)]
    known = math.prod(numbers)
    near = (n for n in range(least, min(known, 16 * least) + 1) if known % n == 0)
    return next(near, min(least, known) if len(numbers) == len(extents) else known)


def without_scopes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without TVM's marks of a scope, which its scatters leave and its code generator warns of."""
    body = _without_scopes(function.body)
    return function if body.same_as(function.body) else function.with_body(body)


def _without_scopes(body: tirx.Stmt) -> tirx.Stmt:
    if isinstance(body, tirx.AttrStmt) and body.attr_key == "pragma_scope":
        return _without_scopes(body.body)
    if isinstance(body, tirx.SeqStmt):
        parts = [_without_scopes(part) for part in body.seq]
        return body if all(map(tirx.Stmt.same_as, parts, body.seq)) else tirx.SeqStmt(parts)
    if isinstance(body, SBlockRealize):
        block = body.block
        inner = _without_scopes(block.body)
        if inner.same_as(block.body):
            return body
        outside = (block.init, block.alloc_buffers, block.match_buffers, block.annotations)
        inside = SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, inner, *outside)
        return SBlockRealize(body.iter_values, body.predicate, inside)
    return body
