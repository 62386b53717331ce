# SPDX-License-Identifier: Apache-2.0
"""Following the samples through the bindings of a straight-line function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm
from tvm import relax

from relax_ops.compat import Constant, array_of
from relax_ops.expressions import ndim_of
from relax_ops.per_sample.states import ZEROS, Mixed, State, Summed, Zeros, leaves
from relax_ops.per_sample.sums import passed_on
from relax_ops.rules import mapped_axis, rules_of
from relax_ops.vmap.mapped_axis import Axes, MappedAxis, Unknown

_TENSORS = (relax.TensorType, relax.TupleType)
_ZEROS = ("relax.zeros", "relax.zeros_like")


def track(bindings: Iterable[tuple[Any, Any]], known: Mapping[Any, State]) -> dict[Any, State]:
    """The state of every variable that is bound.

    Args:
        bindings: variables and the typed expressions bound to them, in A-normal form and in order.
        known: states of the parameters; other variables and constants are the same for all samples.
    """
    states = dict(known)
    for variable, value in bindings:
        states[variable] = state_after(value, states)
    return states


def state_of(value: relax.Expr, states: Mapping[Any, State]) -> State:
    """The state of a variable, a tuple of variables, a field of one, or a constant."""
    if isinstance(value, relax.Var):
        return states.get(value)
    if isinstance(value, relax.Tuple):
        return tuple(state_of(field, states) for field in value.fields)
    if isinstance(value, relax.TupleGetItem):
        whole = state_of(value.tuple_value, states)
        return whole[value.index] if isinstance(whole, tuple) else whole
    if isinstance(value, Constant) and ndim_of(value) == 0:
        return None if array_of(value).any() else ZEROS
    return None


def state_after(value: relax.Expr, states: Mapping[Any, State]) -> State:
    """The state of a typed expression that is bound to a variable."""
    if not isinstance(value, tvm.ir.Call):
        return state_of(value, states)
    arguments = [state_of(arg, states) if isinstance(arg.ty, _TENSORS) else None for arg in value.args]
    flat = [state for argument in arguments for state in leaves(argument)]
    if all(state is None or isinstance(state, Zeros) for state in flat):
        return ZEROS if _name(value) in _ZEROS else None
    for state in flat:
        if isinstance(state, Mixed):
            return state
    found = _through(value, arguments, flat)
    if isinstance(found, str):
        return Mixed(f"{_name(value)}: {found}", not isinstance(found, Unknown))
    if isinstance(value.ty, relax.TupleType) and not isinstance(found, tuple):
        return tuple(found for _ in value.ty.fields)
    return found


def _through(call: relax.Call, arguments: list[State], flat: list[State]) -> State | str:
    """The state of a call's value, or why there is none; `flat` are the states of tensors in `arguments`."""
    if any(isinstance(state, Summed) for state in flat):
        if any(isinstance(state, MappedAxis) for state in flat):
            return "it takes a sum over the samples back to each of them"
        return passed_on(call, arguments)
    places: list[int | None] = []
    for argument in arguments:
        found = {state.axis for state in leaves(argument) if isinstance(state, MappedAxis)}
        if len(found) > 1:
            return "its tensors have the samples along different axes"
        places.append(found.pop() if found else None)
    entries = {(state.entries, state.blocks) for state in flat if isinstance(state, MappedAxis)}
    if len(entries) > 1:
        return Unknown("its operands have different numbers of entries for each sample")
    if not isinstance(call.op, tvm.ir.Op):
        return Unknown("it is not an operator")
    axes, rules = Axes(tuple(places), *entries.pop()), rules_of(call)
    summed = rules.sums(call, axes) if rules is not None and rules.sums is not None else None
    return mapped_axis(call, axes) if summed is None else summed


def _name(call: relax.Call) -> str:
    return str(call.op.name) if isinstance(call.op, tvm.ir.Op) else f"a call of {call.op}"
