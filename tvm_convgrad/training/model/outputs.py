# SPDX-License-Identifier: Apache-2.0
"""The outputs of a model: which of them are the predictions and the other terms of the loss, and which are removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import (
    Environment,
    bindings_of,
    builder_with_tir,
    fresh_parameters,
    function_scope,
    replay,
    type_text,
)

Outputs = Mapping[str, float]
"""The chosen outputs, each with the weight of its loss, by name or by position; the first one is the predictions."""


@dataclass(frozen=True)
class Selected:
    """A module whose function returns the state outputs and then the chosen outputs, with their names and weights."""

    module: Any
    state_outputs: tuple[str, ...]
    outputs: dict[str, float]


def select_outputs(
    module: tvm.IRModule,
    function: str,
    *,
    state_outputs: Sequence[str] = (),
    names: Sequence[str] | None = None,
    wanted: Outputs | None = None,
    source: str,
) -> Selected:
    """Select outputs of a function, and remove what only the others need.

    Args:
        state_outputs: names of the parameters whose new values the function returns first.
        names: names of the outputs behind these; default: the names of the returned variables.
        wanted: the choice; None takes the only output.

    Raises:
        ModelError: several outputs and no choice (their names and shapes are listed), a name that is unknown or
            given twice, a weight that is not a positive number, or an output that is no tensor.
    """
    original = module[function]
    definitions = {
        binding.var: binding.value for binding in bindings_of(original) if isinstance(binding, relax.VarBinding)
    }
    results = _leaves(original.body.body, definitions)
    states, results = results[: len(state_outputs)], results[len(state_outputs) :]
    known = _names(results, names)
    if wanted is None:
        if len(results) != 1:
            raise ModelError(
                f"{source} has {len(results)} outputs: {_listed(known, results)}; choose the predictions with "
                "--model-output NAME (load_model: outputs={name: weight}), and add --model-output NAME=WEIGHT for each "
                "other output whose weighted loss is to be added."
            )
        wanted = {known[0]: 1.0}
    places = _places(wanted, known, results, source)
    chosen = [results[place] for place in places]
    for place, result in zip(places, chosen, strict=True):
        if not isinstance(result.ty, relax.TensorType):
            raise ModelError(f"{source}: output {known[place]!r} is no tensor, so it cannot be trained.")
    weights = {known[place]: float(weight) for place, weight in zip(places, wanted.values(), strict=True)}
    if places == list(range(len(results))):
        return Selected(module, tuple(state_outputs), weights)
    kept = _states_of(states, chosen, definitions, original.params)
    pruned = _returning(module, function, [states[place] for place in kept] + chosen)
    return Selected(pruned, tuple(state_outputs[place] for place in kept), weights)


def _leaves(value: relax.Expr, definitions: Mapping[relax.Var, relax.Expr]) -> list[relax.Expr]:
    """The tensors of a result, which may be nested tuples, as expressions of the function."""
    made = definitions.get(value) if isinstance(value, relax.Var) else value
    if isinstance(made, relax.Var):
        return _leaves(made, definitions)
    if isinstance(made, relax.Tuple):
        return [leaf for field in made.fields for leaf in _leaves(field, definitions)]
    if isinstance(value.ty, relax.TupleType):
        count = len(value.ty.fields)
        return [leaf for place in range(count) for leaf in _leaves(relax.TupleGetItem(value, place), definitions)]
    return [value]


def _names(results: Sequence[relax.Expr], names: Sequence[str] | None) -> list[str]:
    """A name for each output: the given one, else its variable's; its position where these are not distinct."""
    found = list(names or ())
    if len(found) != len(results):
        found = [str(result.name) if isinstance(result, relax.Var) else "" for result in results]
    return [
        name if name and found.count(name) == 1 and not name.isdecimal() else str(place)
        for place, name in enumerate(found)
    ]


def _listed(names: Sequence[str], results: Sequence[relax.Expr]) -> str:
    return ", ".join(f"{name} {type_text(result.ty)}" for name, result in zip(names, results, strict=True)) or "none"


def _places(wanted: Outputs, names: Sequence[str], results: Sequence[relax.Expr], source: str) -> list[int]:
    """The positions of the chosen outputs, in the order of the choice."""
    if not wanted:
        raise ModelError(f"{source}: no output is chosen; it has {_listed(names, results)}.")
    places: list[int] = []
    for name, weight in wanted.items():
        if name in names:
            place = names.index(name)
        elif name.isdecimal() and int(name) < len(names):
            place = int(name)
        else:
            raise ModelError(f"{source} has no output {name!r}; it has {_listed(names, results)}.")
        if place in places:
            raise ModelError(f"{source}: output {names[place]!r} is chosen twice; give each output once.")
        if not (math.isfinite(weight) and weight > 0):
            raise ModelError(f"{source}: the weight of output {name!r} is {weight:g}; give a positive number.")
        places.append(place)
    return places


def _states_of(
    states: Sequence[relax.Expr],
    chosen: Sequence[relax.Expr],
    definitions: Mapping[relax.Var, relax.Expr],
    params: Sequence[relax.Var],
) -> list[int]:
    """The positions of the states to keep: those computed from nothing that only removed outputs read.

    The running statistics of a removed head read the weights of that head. A counter of steps reads itself alone.
    """
    weights = set(params)
    needed = set().union(*(_read_by(result, definitions) for result in chosen))
    kept = []
    for place, state in enumerate(states):
        read = _read_by(state, definitions) & weights
        if read <= needed or len(read) == 1:
            kept.append(place)
    return kept


def _read_by(value: relax.Expr, definitions: Mapping[relax.Var, relax.Expr]) -> set[relax.Var]:
    """The variables that a value is computed from."""
    seen: set[Any] = set()
    queue = list(relax.analysis.free_vars(value))
    while queue:
        variable = queue.pop()
        if variable in seen:
            continue
        seen.add(variable)
        if variable in definitions:
            queue.extend(relax.analysis.free_vars(definitions[variable]))
    return seen


def _returning(module: tvm.IRModule, function: str, fields: Sequence[relax.Expr]) -> tvm.IRModule:
    """The module with a function that returns these fields of the old one, and computes nothing else."""
    original = module[function]
    builder = builder_with_tir(module)
    params = fresh_parameters(original)
    environment = Environment(original.params, params)
    attributes = {key: value for key, value in (original.attrs or {}).items() if key == "num_input"}
    with function_scope(builder, function, params, attributes or None):
        with builder.dataflow():
            replay(builder, original, environment)
            results = [environment.substitute(field) for field in fields]
            outputs = [builder.emit_output(result) for result in results]
        builder.emit_func_output(relax.Tuple(outputs))
    return relax.transform.DeadCodeElimination([function])(builder.get())
