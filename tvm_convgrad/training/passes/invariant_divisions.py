# SPDX-License-Identifier: Apache-2.0
"""Divisions by symbolic extents that do not change within an innermost loop are computed before it.

LLVM's loop vectorizer takes the address of a guarded load as uniform if its index is such a division, and reads the
address in the first lane. But it computes the division only in lanes whose guard holds: where the first lane's does
not, the others load from anywhere (the bug is that of llvm-project#142957). A division by a number is none of those, as
LLVM may compute it in any lane.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from relax_ops.compat import TensorLoad, TirCall, nodes_within, replaced

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def with_invariant_divisions_first(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, with those divisions bound to variables before the innermost loops.

    A divisor of 0, which is that of a loop without iterations, is taken for 1.
    """
    if not _is_guarded(function.body) or not any(map(_is_symbolic, nodes_within(function.body, *_DIVISIONS))):
        return function
    return function.with_body(replaced(function.body, (tirx.For,), _hoisted))


def _is_symbolic(division: Any) -> bool:
    return not isinstance(division.b, tirx.IntImm)


def _is_guarded(body: tirx.Stmt) -> bool:
    """Whether statements or values are under a condition."""
    if nodes_within(body, tirx.IfThenElse, tirx.Select):
        return True
    return any(str(getattr(call.op, "name", "")).endswith("if_then_else") for call in nodes_within(body, TirCall))


def _hoisted(loop: tirx.For) -> tirx.Stmt:
    """An innermost loop behind the divisions in it that do not change; another loop as it is."""
    if nodes_within(loop.body, tirx.For, tirx.While):
        return loop
    changing = [loop.loop_var, *(each.var for each in nodes_within(loop.body, tirx.Bind, tirx.Let))]
    first: list[tuple[Any, tirx.Bind]] = []

    def variable_of(division: Any) -> Any:
        if not _is_symbolic(division) or nodes_within(division, TensorLoad, TirCall):
            return division
        if any(each.same_as(one) for each in nodes_within(division, type(loop.loop_var)) for one in changing):
            return division
        for known, binding in first:
            if tvm_ffi.structural_equal(known, division):
                return binding.var
        least = tirx.max(division.b, tirx.IntImm(str(division.b.ty.dtype), 1))
        binding = tirx.Bind(tirx.Var("invariant", str(division.ty.dtype)), type(division)(division.a, least))
        first.append((division, binding))
        return binding.var

    body = replaced(loop.body, _DIVISIONS, variable_of)
    if not first:
        return loop
    again = tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
    )
    return tirx.SeqStmt([*(binding for _, binding in first), again])


__all__ = ["with_invariant_divisions_first"]
