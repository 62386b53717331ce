# SPDX-License-Identifier: Apache-2.0
"""Large tensors of a step in one piece of memory (an arena), each at an offset of its own.

TVM plans storages that hold one tensor at a time: a tensor of 2 MB that follows one of 8 MB holds all 8. Tensors of a
training step have many sizes, and live from the forward to the backward pass, so that a third of the memory may be lost
in this way. Here offsets are chosen greedily (as by Pisarchyk and Lee, "Efficient memory management for deep neural net
inference", 2020): each in the narrowest gap between those that live at the same time. Small tensors, and what a
function returns, stay with TVM's plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tvm
from tvm import relax

from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.training.ir.graph import bindings_of, element_type, fixed_bytes, operator_name
from tvm_convgrad.training.passes.flat_gradients import GRADIENTS
from tvm_convgrad.training.passes.in_place import STEP

LARGE = 1 << 14
"""Bytes from which on a tensor has its place in the arena, which costs one more call of the virtual machine."""
ALIGNMENT = 64
"""Of offsets; kernels rely on it."""
_ALLOC = "relax.builtin.alloc_tensor"


class Span(NamedTuple):
    """The bytes of a tensor, and the first and the last place where it is needed."""

    bytes: int
    first: int
    last: int


def PlaceInArena() -> tvm.transform.Pass:
    """The pass that gives large tensors of `step` and `gradients` their places, before TVM plans the others'."""
    return tvm.transform.module_pass(_placed, opt_level=0, name="ConvgradArena")


def _placed(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    for variable in module.get_global_vars():
        function = module[variable]
        if str(variable.name_hint) in (STEP, GRADIENTS):
            spans = _spans_of(function)
            if len(spans) > 1:
                module[variable] = _with_arena(function, list(spans), offsets_of(list(spans.values())))
    return module


def offsets_of(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Offsets at which tensors that live at the same time do not overlap, and the bytes of all of it."""
    return min((_offsets(spans, order) for order in _ORDERS), key=lambda found: found[1])


_ORDERS: tuple[Callable[[Span], tuple[int, int]], ...] = (
    lambda span: (-span.bytes, span.first),
    lambda span: (-span.bytes, -span.last),
    lambda span: (span.first - span.last, -span.bytes),
    lambda span: (-span.bytes * (span.last - span.first + 1), span.first),
    lambda span: (span.first, -span.last),
)
"""The orders in which tensors are placed, of which the best is taken: the largest or those that live longest first, or
as they come."""


def _offsets(spans: Sequence[Span], order: Callable[[Span], tuple[int, int]]) -> tuple[list[int], int]:
    offsets = [0] * len(spans)
    done: list[int] = []
    for number in sorted(range(len(spans)), key=lambda each: (order(spans[each]), each)):
        size, first, last = spans[number]
        beside = sorted(
            (offsets[other], offsets[other] + spans[other].bytes)
            for other in done
            if spans[other].first <= last and first <= spans[other].last
        )
        end, best, narrowest = 0, None, math.inf
        for begin, behind in beside:
            start = round_up(end, ALIGNMENT)
            if size <= begin - start < narrowest:
                best, narrowest = start, begin - start
            end = max(end, behind)
        offsets[number] = round_up(end, ALIGNMENT) if best is None else best
        done.append(number)
    return offsets, max(offset + span.bytes for offset, span in zip(offsets, spans, strict=True))


def _spans_of(function: relax.Function) -> dict[Any, Span]:
    """The large tensors that a function allocates and does not return, by the variables that they are bound to."""
    found: dict[Any, Span] = {}
    memory: dict[Any, frozenset[Any]] = {}  # the tensors that a variable may hold, or a view of
    for place, binding in enumerate(bindings_of(function)):
        var, value = binding.var, binding.value
        read = frozenset().union(*(memory.get(each, ()) for each in relax.analysis.free_vars(value)))
        for each in read:
            found[each] = found[each]._replace(last=place)
        size = _allocated(value)
        if size >= LARGE:
            found[var] = Span(size, place, place)
            memory[var] = frozenset((var,))
        elif not _is_nothing(var.ty):
            memory[var] = read
    for each in relax.analysis.free_vars(function.body.body):
        for returned in memory.get(each, ()):
            found.pop(returned, None)
    return found


def _allocated(value: relax.Expr) -> int:
    """The bytes that a value allocates; 0 if it is something else, or its extents are symbolic."""
    if not isinstance(value, tvm.ir.Call) or operator_name(value) != _ALLOC:
        return 0
    return fixed_bytes(value.ty)


def _is_nothing(type_: relax.Type) -> bool:
    return isinstance(type_, relax.TupleType) and not type_.fields


def _with_arena(function: relax.Function, tensors: Sequence[Any], places: tuple[list[int], int]) -> relax.Function:
    """The function whose tensors lie at their offsets."""
    offsets, total = dict(zip(tensors, places[0], strict=True)), places[1]
    builder, arena = relax.BlockBuilder(), None
    blocks = []
    for block in function.body.blocks:
        bindings: list[relax.Binding] = []

        def bound(value: relax.Expr, name: str, bindings: list[relax.Binding] = bindings) -> relax.Var:
            value = builder.normalize(value)
            var = relax.Var(name, value.ty)
            bindings.append(relax.VarBinding(var, value))
            return var

        for binding in block.bindings:
            if binding.var not in offsets:
                bindings.append(binding)
                continue
            if arena is None:
                arena = bound(relax.op.memory.alloc_storage(relax.ShapeExpr([total]), 0, "global", "uint8"), "arena")
            call = binding.value
            shape = relax.ShapeExpr(list(call.ty.shape.values))
            tensor = relax.op.memory.alloc_tensor(arena, offsets[binding.var], shape, element_type(call))
            # Kernels take the address alone, which this call makes that of the tensor.
            place = relax.op.memory.ensure_zero_offset(bound(tensor, "place"))
            bindings.append(relax.VarBinding(binding.var, builder.normalize(place)))
        blocks.append(type(block)(bindings))
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


__all__ = ["ALIGNMENT", "LARGE", "PlaceInArena", "Span", "offsets_of"]
