# SPDX-License-Identifier: Apache-2.0
"""Sums over the samples that go through an operator term by term: the operator is linear in them (`OperatorRules`)."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from relax_ops.expressions import known_extents
from relax_ops.per_sample.states import State, Summed
from relax_ops.rules import rules_of
from relax_ops.vmap.calls import mapped_call
from relax_ops.vmap.emitter import Vmap


def passed_on(call: relax.Call, states: Sequence[State]) -> Summed | str:
    """The state of a call of which an argument is Summed and none has the samples: Summed, or why not.

    The terms of its value are the call under vmap over the terms of its arguments.
    """
    rules = rules_of(call)
    if rules is None:
        return "it is not linear in a sum over the samples"
    summed = {number: state for number, state in enumerate(states) if isinstance(state, Summed)}
    if tuple(summed) not in rules.linear:
        return rules.refusal_of_sums
    mapped = [number in summed for number in range(len(call.args))]

    def terms(builder: relax.BlockBuilder) -> relax.Expr:
        arguments, count = list(call.args), None
        for number, state in summed.items():
            arguments[number] = state.terms(builder)
            count = known_extents(arguments[number])[0]
        vmap = Vmap(builder, count)
        for number in summed:
            vmap.mark(arguments[number])
        return mapped_call(vmap, call, arguments, mapped)

    first = next(iter(summed.values()))
    return Summed(terms, first.norm if rules.isometric else None)
