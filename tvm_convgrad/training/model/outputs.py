# SPDX-License-Identifier: Apache-2.0
"""The outputs of a model: which of them are predictions and terms of the loss, and which are removed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import (
    Environment,
    bindings_of,
    builder_with_tir,
    element_type,
    fresh_parameters,
    function_scope,
    replay,
    static_shape,
    type_text,
)
from tvm_convgrad.training.model.own_loss import OwnLoss

Outputs = Mapping[str, float]
"""The chosen outputs, each with the weight of its loss, by name or by position; the first one is the predictions."""


@dataclass(frozen=True)
class Selected:
    """A module whose function returns the state outputs and then the chosen outputs, with their names and weights.

    Attributes:
        target: of a model that returns its loss itself, the position of the input that is the target. `outputs` are
            then its losses alone, which come first.
        predicted: the name of the predictions behind such losses; "" if there are none.
    """

    module: Any
    state_outputs: tuple[str, ...]
    outputs: dict[str, float]
    target: int | None = None
    predicted: str = ""


@dataclass(frozen=True)
class _Results:
    """What a function of a module returns: new values of states, then outputs with their names."""

    module: Any
    function: str
    source: str
    state_outputs: tuple[str, ...]
    definitions: dict[relax.Var, relax.Expr]
    states: list[relax.Expr]
    outputs: list[relax.Expr]
    names: list[str]

    @classmethod
    def of(
        cls, module: tvm.IRModule, function: str, state_outputs: Sequence[str], names: Sequence[str] | None, source: str
    ) -> _Results:
        """Those of a function; arguments as `select_outputs`."""
        original = module[function]
        definitions = {
            binding.var: binding.value for binding in bindings_of(original) if isinstance(binding, relax.VarBinding)
        }
        results = _leaves(original.body.body, definitions)
        states, outputs = results[: len(state_outputs)], results[len(state_outputs) :]
        known = _names(outputs, names)
        return cls(module, function, source, tuple(state_outputs), definitions, states, outputs, known)

    @property
    def listed(self) -> str:
        """Names and types of the outputs."""
        return self.list_of(range(len(self.outputs)))

    def list_of(self, places: Iterable[int]) -> str:
        """Names and types of some outputs."""
        return ", ".join(f"{self.names[place]} {type_text(self.outputs[place].ty)}" for place in places) or "none"

    def reads(self, place: int, variable: relax.Var) -> bool:
        """Whether an output is computed from a variable."""
        return variable in _read_by(self.outputs[place], self.definitions)

    def selected(self, places: Sequence[int]) -> tuple[Any, tuple[str, ...]]:
        """A module that returns these outputs behind the states that are computed without the others; their names."""
        chosen = [self.outputs[place] for place in places]
        for place, result in zip(places, chosen, strict=True):
            if not isinstance(result.ty, relax.TensorType):
                raise ModelError(
                    f"{self.source}: output {self.names[place]!r} is not a tensor, so it cannot be trained."
                )
        if list(places) == list(range(len(self.outputs))):
            return self.module, self.state_outputs
        kept = _states_of(self.states, chosen, self.definitions, self.module[self.function].params)
        pruned = _returning(self.module, self.function, [self.states[place] for place in kept] + chosen)
        return pruned, tuple(self.state_outputs[place] for place in kept)


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
            given twice, a weight that is not a positive number, or an output that is not a tensor.
    """
    found = _Results.of(module, function, state_outputs, names, source)
    if wanted is None:
        if len(found.outputs) != 1:
            raise ModelError(
                f"{source} has {len(found.outputs)} outputs: {found.listed}; choose the predictions with "
                "--model-output NAME (load_model: outputs={name: weight}), and add --model-output NAME=WEIGHT for each "
                "other output whose weighted loss is to be added, or build with --loss model if one is the loss."
            )
        wanted = {found.names[0]: 1.0}
    places = _places(wanted, found)
    pruned, kept = found.selected(places)
    weights = {found.names[place]: float(weight) for place, weight in zip(places, wanted.values(), strict=True)}
    return Selected(pruned, kept, weights)


def select_losses(
    module: tvm.IRModule,
    function: str,
    count: int,
    *,
    state_outputs: Sequence[str] = (),
    names: Sequence[str] | None = None,
    choice: OwnLoss,
    source: str,
) -> Selected:
    """Select the losses that a function of `count` inputs returns, the predictions, if there are some, and the target.

    Other arguments as `select_outputs`.

    Raises:
        ModelError: there is no scalar, or several outputs and no choice (they are listed); the predictions depend on
            the target; there is no input besides the target, or none of its name.
    """
    inputs = list(module[function].params[:count])
    target = _target_of(inputs, choice.target, source)
    found = _Results.of(module, function, state_outputs, names, source)
    scalars = [place for place, output in enumerate(found.outputs) if _is_loss(output, inputs)]
    if choice.outputs is None:
        losses = scalars
        others = [place for place in range(len(found.outputs)) if place not in scalars]
        if len(losses) > 1:
            raise ModelError(
                f"{source} has {len(losses)} scalar outputs: {found.list_of(losses)}; choose the loss with "
                "--model-output NAME (OwnLoss: outputs={name: weight}), several for their weighted sum."
            )
        others = [place for place in others if not found.reads(place, inputs[target])]
        weights = dict.fromkeys((found.names[place] for place in losses), 1.0)
    else:
        places = _places(choice.outputs, found)
        losses = [place for place in places if place in scalars]
        others = [place for place in places if place not in scalars]
        numbers = dict(zip(places, choice.outputs.values(), strict=True))
        weights = {found.names[place]: float(numbers[place]) for place in losses}
    if not losses:
        raise ModelError(
            f"{source} returns no loss: of its outputs {found.listed} none that is chosen is a floating-point scalar, "
            "as --loss model needs; return the mean of the losses of the batch."
        )
    if len(others) > 1:
        raise ModelError(
            f"{source} has {len(others)} outputs that may be the predictions: {found.list_of(others)}; choose them "
            f"with --model-output NAME, and the loss with --model-output {found.names[losses[0]]}."
        )
    for place in others:
        if found.reads(place, inputs[target]):
            raise ModelError(
                f"{source}: output {found.names[place]!r} depends on {inputs[target].name!r}, the target, so it cannot "
                "be predicted; choose an output that does not, or the loss alone."
            )
    pruned, kept = found.selected([*losses, *others])
    return Selected(pruned, kept, weights, target, found.names[others[0]] if others else "")


def _target_of(inputs: Sequence[relax.Var], name: str | None, source: str) -> int:
    """The position of the input that is the target."""
    known = [str(var.name) for var in inputs]
    if len(inputs) < 2:
        raise ModelError(
            f"{source} has the input {', '.join(known)} alone, but a model that returns its loss takes its target, too "
            "(--loss model); export it with another input, the last one."
        )
    if name is None:
        return len(inputs) - 1
    if name not in known:
        raise ModelError(f"{source} has no input {name!r} (--model-target); it has {', '.join(known)}.")
    return known.index(name)


def _is_loss(output: relax.Expr, inputs: Sequence[relax.Var]) -> bool:
    """Whether this is one floating-point number that is not the row of one sample."""
    if not isinstance(output.ty, relax.TensorType) or not element_type(output).startswith("float"):
        return False
    shape = static_shape(output)
    return not shape or (set(shape) == {1} and static_shape(inputs[0])[:1] != (1,))


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


def _places(wanted: Outputs, found: _Results) -> list[int]:
    """The positions of the chosen outputs, in the order of the choice."""
    source, names = found.source, found.names
    if not wanted:
        raise ModelError(f"{source}: no output is chosen; it has {found.listed}.")
    places: list[int] = []
    for name, weight in wanted.items():
        if name in names:
            place = names.index(name)
        elif name.isdecimal() and int(name) < len(names):
            place = int(name)
        else:
            raise ModelError(f"{source} has no output {name!r}; it has {found.listed}.")
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
