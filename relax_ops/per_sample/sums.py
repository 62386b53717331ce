# SPDX-License-Identifier: Apache-2.0
"""Sums over the samples that go through an operator term by term: the operator is linear in them (`OperatorRules`)."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from relax_ops.expressions import known_extents
from relax_ops.per_sample.states import Emit, State, Summed, Zeros, leaves
from relax_ops.rules import rules_of
from relax_ops.rules.contract import OperatorRules
from relax_ops.vmap.calls import mapped_call
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Unknown


def passed_on(call: relax.Call, states: Sequence[State]) -> Summed | tuple[Summed, ...] | str:
    """The state of a call of which an argument is Summed and none has the samples, or why it has none.

    The terms of its value are the call under vmap over the terms of its arguments. An operator that is linear in
    several arguments together, as concat is in its tensors, also takes zeros among them: their terms are zeros.
    """
    if not isinstance(call.op, tvm.ir.Op):
        return Unknown("it is not an operator")
    rules = rules_of(call)
    summed = [number for number, state in enumerate(states) if _has_terms(state)]
    if rules is None or not _is_linear(call, rules, states, summed):
        return "it is not linear in a sum over the samples"

    def terms(builder: relax.BlockBuilder) -> relax.Expr:
        sums = [leaf for number in summed for leaf in leaves(states[number]) if isinstance(leaf, Summed)]
        found: dict[State, relax.Expr] = {leaf: leaf.terms(builder) for leaf in sums}
        vmap = Vmap(builder, known_extents(found[sums[0]])[0])

        def mapped(value: relax.Expr, state: State) -> relax.Expr:
            return vmap.mark(found[state]) if state in found else vmap.everywhere(value, False)

        arguments = list(call.args)
        for number in summed:
            value, state = call.args[number], states[number]
            if isinstance(state, tuple):
                arguments[number] = relax.Tuple(list(map(mapped, _fields(value), state)))
            else:
                arguments[number] = mapped(value, state)
        return mapped_call(vmap, call, arguments, [number in summed for number in range(len(arguments))])

    if isinstance(call.ty, relax.TupleType):
        return tuple(_field_of(terms, index) for index in range(len(call.ty.fields)))
    first = states[summed[0]]
    return Summed(terms, first.norm if rules.isometric and isinstance(first, Summed) else None)


def _field_of(terms: Emit, index: int) -> Summed:
    """The terms of a field of a tuple, which each field emits again: common subexpressions are eliminated later."""

    def field(builder: relax.BlockBuilder) -> relax.Expr:
        whole = terms(builder)
        if isinstance(whole, relax.Tuple):
            return whole.fields[index]
        return builder.emit(relax.TupleGetItem(whole, index))

    return Summed(field)


def _is_linear(call: relax.Call, rules: OperatorRules, states: Sequence[State], summed: Sequence[int]) -> bool:
    """Whether the call is linear in the arguments that are summed, with zeros in those that belong to them."""
    if rules.linear_if is not None and not rules.linear_if(call):
        return False
    return any(set(summed) <= set(together) and _are_sums(states, together) for together in rules.linear)


def _has_terms(state: State) -> bool:
    return any(isinstance(leaf, Summed) for leaf in leaves(state))


def _are_sums(states: Sequence[State], arguments: Sequence[int]) -> bool:
    """Whether each of these arguments consists of sums over the samples and zeros."""
    return all(isinstance(leaf, (Summed, Zeros)) for number in arguments for leaf in leaves(states[number]))


def _fields(value: relax.Expr) -> list[relax.Expr]:
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    return [relax.TupleGetItem(value, index) for index in range(len(value.ty.fields))]
