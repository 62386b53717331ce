# SPDX-License-Identifier: Apache-2.0
"""Following the samples through the bindings of a straight-line function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm
from tvm import relax

from relax_ops.samples import axis as own_axis
from relax_ops.samples import sums
from relax_ops.samples.state import Mixed, Own, State, Summed


def track(bindings: Iterable[tuple[Any, Any]], known: Mapping[Any, State]) -> dict[Any, State]:
    """The state of every variable that is bound.

    Args:
        bindings: variables and the typed expressions bound to them, in A-normal form and in order.
        known: states of the parameters; other variables and constants are the same for all samples.
    """
    states = dict(known)
    for variable, value in bindings:
        states[variable] = _state(value, states)
    return states


def state_of(value: Any, states: Mapping[Any, State]) -> State:
    """The state of a variable, a tuple of variables, a field of one, or a constant."""
    if isinstance(value, relax.Var):
        return states.get(value)
    if isinstance(value, relax.Tuple):
        return tuple(state_of(field, states) for field in value.fields)
    if isinstance(value, relax.TupleGetItem):
        whole = state_of(value.tuple_value, states)
        return whole[value.index] if isinstance(whole, tuple) else whole
    return None


def _state(value: Any, states: Mapping[Any, State]) -> State:
    if not isinstance(value, tvm.ir.Call):
        return state_of(value, states)
    arguments = [None if own_axis.is_shape(arg) else state_of(arg, states) for arg in value.args]
    flat = [state for argument in arguments for state in _leaves(argument)]
    if all(state is None for state in flat):
        return None
    for state in flat:
        if isinstance(state, Mixed):
            return state
    found = _through(value, arguments, flat)
    if isinstance(found, str):
        return Mixed(f"{_name(value)}: {found}")
    return tuple(found for _ in value.ty.fields) if isinstance(value.ty, relax.TupleType) else found


def _through(call: Any, arguments: list[State], flat: list[State]) -> State | str:
    if any(isinstance(state, Summed) for state in flat):
        if any(isinstance(state, Own) for state in flat):
            return "it takes a sum over the samples back to each of them"
        return sums.passed(call, arguments) if isinstance(call.op, tvm.ir.Op) else "it is not an operator"
    axes: list[int | None] = []
    for argument in arguments:
        places = {state.axis for state in _leaves(argument) if isinstance(state, Own)}
        if len(places) > 1:
            return "its tensors have the samples along different axes"
        axes.append(places.pop() if places else None)
    inner = {state.inner for state in flat if isinstance(state, Own)}
    if len(inner) > 1:
        return "its operands have different numbers of entries for each sample"
    (entries,) = inner
    if not isinstance(call.op, tvm.ir.Op):
        return "it is not an operator"
    summed = sums.made(call, axes, entries)
    if summed is not None:
        return summed
    if str(call.op.name) in own_axis.RESHAPES:
        return own_axis.reshape(call, Own(next(axis for axis in axes if axis is not None), entries))
    rule = own_axis.RULES.get(str(call.op.name))
    if rule is None:
        return "what it does to the samples is not known"
    found = rule(call, axes)
    return found if isinstance(found, str) else Own(found, entries)


def _leaves(state: State) -> list[State]:
    return [leaf for part in state for leaf in _leaves(part)] if isinstance(state, tuple) else [state]


def _name(call: Any) -> str:
    return str(call.op.name) if isinstance(call.op, tvm.ir.Op) else f"a call of {call.op}"
