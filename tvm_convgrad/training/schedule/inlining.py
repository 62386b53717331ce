# SPDX-License-Identifier: Apache-2.0
"""Elementwise stages that are written into the stages that read them: fewer temporaries, no work done twice.

A stage is inlined where it is cheap (a copy, or one addition or multiplication), or where one stage alone reads it, and
no more elements of it than it has. LLVM computes once what one expression has twice, but has to be given all of it: a
power of a power, as in the gradient of digamma, would be written out some ten thousand times, and a sum of shifted
blocks of shifted blocks (fold after unfold) with a condition for each pair. Expressions are limited in size therefore.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from relax_ops.compat import SBlock, TensorLoad, buffer_of
from tvm_convgrad.training.schedule.blocks import kinds_of, work_of

MOST_NODES = 1000
"""Operations, loads and constants of an expression, at most. The gradient of GELU has 675, as vectors."""

CHOICE = 16
"""How many of these a condition with its two values counts for.

TVM's simplifier takes half a minute for the 254 of a running maximum of seven values.
"""

Element: TypeAlias = tuple[tvm_ffi.StructuralKey, ...]
"""Which element of a buffer is read, by its indices."""


def inline(schedule: s_tir.Schedule, blocks: list[s_tir.schedule.SBlockRV]) -> None:
    """Inline what may be of the blocks.

    What two stages read that end in the same third one can follow once these are inlined: so it goes on until nothing
    changes.
    """
    left = list(blocks)
    while True:
        inlined = [block for block in left if _inline_one(schedule, block)]
        if not inlined:
            return
        left = [block for block in left if not any(block.same_as(other) for other in inlined)]


def _inline_one(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> bool:
    """Inline a block into its consumers where that pays; whether it was done."""
    statement = schedule.get(block)
    if set(kinds_of(schedule, block)) - {"S"} or len(statement.writes) != 1:
        return False
    result = buffer_of(statement.writes[0])
    temporaries = schedule.mod["main"].body.block.alloc_buffers
    if not isinstance(statement.body, tirx.BufferStore) or not any(result.same_as(b) for b in temporaries):
        return False
    consumers = schedule.get_consumers(block)
    if not consumers or not (_is_cheap(statement.body.value) or _is_read_once(schedule, block, consumers)):
        return False
    if any(_nodes_with(schedule.get(consumer), statement.body) > MOST_NODES for consumer in consumers):
        return False
    schedule.compute_inline(block)
    return True


def _is_cheap(value: tirx.Expr) -> bool:
    """Whether the value is a load, or one addition, subtraction or multiplication of loads and constants."""
    simple = (TensorLoad, tirx.FloatImm, tirx.IntImm)
    if isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul)):
        return isinstance(value.a, simple) and isinstance(value.b, simple)
    return isinstance(value, simple)


def _is_read_once(
    schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, consumers: list[s_tir.schedule.SBlockRV]
) -> bool:
    """Whether one stage alone reads a block, no more of its elements than there are."""
    if len(consumers) > 1:
        return False
    consumer, work = schedule.get(consumers[0]), work_of(schedule, block)
    if work_of(schedule, consumers[0]) > work:
        return False
    if not isinstance(consumer.body, tirx.BufferStore):
        return True
    elements = _elements(consumer.body.value, schedule.get(block).body.buffer)
    return max(len(elements), 1) * work_of(schedule, consumers[0]) <= work


def _elements(value: tirx.Expr, buffer: tirx.Buffer) -> set[Element]:
    """The elements of a buffer that one evaluation of a value reads; of two branches, those of the one with more."""
    if isinstance(value, TensorLoad):
        same = buffer_of(value).same_as(buffer)
        return {tuple(tvm_ffi.StructuralKey(index) for index in value.indices)} if same else set()
    parts = [_elements(part, buffer) for part in _operands(value)]
    if _is_branch(value):
        parts = [parts[0], max(parts[1:], key=len)]
    return set().union(*parts)


def _is_branch(value: tirx.Expr) -> bool:
    """Whether a value is a condition of which one branch is evaluated, under the name that this TVM has for it."""
    return isinstance(value, tvm.ir.Call) and str(getattr(value.op, "name", "")).endswith(".if_then_else")


def _nodes_with(consumer: SBlock, inlined: tirx.BufferStore) -> int:
    """The nodes of what a block stores once a value that it reads more than once is written out; 0 if it is not."""
    if not isinstance(consumer.body, tirx.BufferStore):
        return 0
    nodes = reads = 0
    for node in nodes_of(consumer.body.value):
        nodes += _weight(node)
        reads += isinstance(node, TensorLoad) and buffer_of(node).same_as(inlined.buffer)
    return nodes + reads * sum(map(_weight, nodes_of(inlined.value))) if reads > 1 else 0


def _weight(node: tirx.Expr) -> int:
    """What a node counts for."""
    return CHOICE if isinstance(node, tirx.Select) else 1


def nodes_of(value: tirx.Expr) -> Iterator[tirx.Expr]:
    """The nodes of an expression as it is written out, without the indices of its loads."""
    yield value
    for part in _operands(value):
        yield from nodes_of(part)


def _operands(value: tirx.Expr) -> list[Any]:
    if isinstance(value, (TensorLoad, tirx.IntImm, tirx.FloatImm, tirx.Var)):
        return []
    if isinstance(value, tvm.ir.Call):
        return list(value.args)
    if isinstance(value, tirx.Select):
        return [value.condition, value.true_value, value.false_value]
    if isinstance(value, tirx.Cast):
        return [value.value]
    return [getattr(value, name) for name in ("a", "b") if hasattr(value, name)]


__all__ = ["MOST_NODES", "inline", "nodes_of"]
