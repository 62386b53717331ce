# SPDX-License-Identifier: Apache-2.0
"""A model in the one form that the step builder reads: inputs, parameters and states apart, states returned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relax_ops.compat import Constant, array_of
from tvm_convgrad.core.dtypes import SHORT_FLOATS
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.core.extent_limits import Limits
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.ir.graph import (
    Environment,
    builder_with_tir,
    calls_of,
    element_type,
    function_scope,
    replay,
    static_shape,
)
from tvm_convgrad.training.model.batch_axis import check_batch
from tvm_convgrad.training.model.checked_indices import CheckedIndices
from tvm_convgrad.training.model.flat_products import FLAT_PRODUCTS
from tvm_convgrad.training.model.identities import IDENTITIES
from tvm_convgrad.training.model.index_ranges import index_ranges
from tvm_convgrad.training.model.initialise import initial_value, roles_of
from tvm_convgrad.training.model.masked_softmax import MASKED_SOFTMAXES
from tvm_convgrad.training.model.outputs import Outputs, Selected, select_losses, select_outputs
from tvm_convgrad.training.model.own_loss import OwnLoss

Array = np.ndarray[Any, Any]
BATCH_NORM = "relax.nn.batch_norm"
FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class TensorSchema:
    """Name, extents (int, or the name of a symbolic extent) and element type of one tensor.

    Attributes:
        range: the values that are in range if the tensor is used as indices (see `index_ranges`), otherwise None.
        least: the least extent of the first axis that a training step takes.
        limits: the least and the largest value of symbolic extents, by name, where the model relies on them.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    range: IndexRange | None = None
    least: int = 1
    limits: Mapping[str, Limits] = field(default_factory=dict)

    def describe(self) -> str:
        """The schema as text, such as `x: float32[n, 3, 32, 32]`."""
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Model:
    """A differentiable model, as `load_model` and `from_module` return it.

    The function takes inputs, parameters and states, in this order, and returns a tuple: each of the `outputs`, then
    the new value of each state. The first output is the predictions; the loss is the sum of the losses of all outputs,
    times their weights.

    Attributes:
        module, function: the IRModule, and the name of the model's function in it.
        inputs: name, shape and element type of each input.
        parameters: initial values of the parameters that are trained, by name.
        states: initial values of tensors that the forward pass updates (running statistics of batch norms and other
            buffers) and of frozen weights, by name.
        source: the file, or another description, for messages.
        members: the number of members of an ensemble (see `ensemble`), otherwise None.
        own_data: whether each member of an ensemble has its own samples.
        outputs: the trained outputs with the weights of their losses, predictions first. If the model returns its loss
            itself (see `OwnLoss`), its scalar losses with their weights.
        warnings: sentences about the file for the user.
        frozen: names of states that are weights which are not trained.
        tied: the name of a weight by each further name that the user's model has for it.
        origins: for Relax operators, by name, the operator of the file that was converted to it.
        target: of a model that returns its loss itself: the target, a parameter that follows the inputs.
        predicted: of a model that returns its loss itself: the name of the predictions, which follow the losses, or "".
    """

    module: Any
    function: str
    inputs: tuple[TensorSchema, ...]
    parameters: dict[str, Array]
    states: dict[str, Array]
    source: str
    members: int | None = None
    own_data: bool = False
    outputs: dict[str, float] = field(default_factory=lambda: {"output": 1.0})
    warnings: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    target: TensorSchema | None = None
    predicted: str = ""

    @property
    def leading(self) -> int:
        """Number of parameters of the function that precede its weights."""
        return len(self.inputs) + (self.target is not None)

    @property
    def returned(self) -> int:
        """Number of results of the function that precede the new states."""
        return len(self.outputs) + bool(self.predicted)

    @property
    def relax_function(self) -> relax.Function:
        """The Relax function itself."""
        return self.module[self.function]


def schema_of(var: relax.Var, name: str | None = None) -> TensorSchema:
    """The schema of a Relax tensor variable."""
    extents = tuple(extent if isinstance(extent, int) else str(extent) for extent in static_shape(var))
    return TensorSchema(name or str(var.name), extents, element_type(var))


def from_module(
    module: tvm.IRModule,
    *,
    function: str = "main",
    num_inputs: int | None = None,
    parameters: Mapping[str, Array] | None = None,
    state_outputs: Sequence[str] = (),
    frozen: Collection[str] = (),
    constants: Collection[str] = (),
    train_scalars: bool | Collection[str] = False,
    names: Mapping[str, str] | None = None,
    output_names: Sequence[str] | None = None,
    outputs: Outputs | OwnLoss | None = None,
    source: str = "IRModule",
    seed: int = 0,
) -> Model:
    """Make a `Model` of a Relax function without control flow.

    Args:
        module: the module with the function, whose parameters are the inputs, followed by the weights.
        function: the name of the function.
        num_inputs: number of leading parameters that are inputs; None means the function attribute `num_input`, or 1.
        parameters: initial values by parameter name; all others are initialised at random from `seed`.
        state_outputs: names of the parameters whose new values the function returns before its predictions.
        frozen: names of parameters that are not trained; they become states that do not change.
        constants: names of parameters that become constants.
        train_scalars: whether parameters of rank 0 are trained, or the names of those; others become constants.
        names: new names of parameters by their names in the function, such as a framework's dotted names.
        output_names: names of the outputs that follow the new states; None means those of the returned variables.
        outputs: names of the outputs to train, with the weights of their losses; or how the model returns its loss
            itself (`OwnLoss`). None means the only output.
        source: a description of the module for messages.
        seed: of the random initial values.

    Returns:
        The model. Parameters (and constants) that a `relax.nn.batch_norm` reads as running mean or variance become
        states, as do those that `state_outputs` names. Integer parameters become constants; unused ones are dropped.

    Raises:
        ModelError: there is no such function; a result is not a tensor; there are several outputs and `outputs` is
            None; an extent is unknown; a value has a wrong shape or type; or axis 0 of the predictions is not the
            batch.
        BatchError: a shape fixes the batch of a model whose inputs have a symbolic batch.
    """
    count = input_count(_relax_function(module, function, source), num_inputs, source)
    selected = _selected(module, function, count, outputs, state_outputs, output_names, source)
    module, state_outputs = selected.module, selected.state_outputs
    original = module[function]
    inputs, weights = list(original.params[:count]), list(original.params[count:])
    ranges = index_ranges(original, inputs)
    values = _values_of(original, weights, dict(parameters or {}), source, seed)
    numbers = {str(weight.name) for weight in weights} if train_scalars is True else set(train_scalars or ())
    statistics, used = _running_statistics(original), set(relax.analysis.free_vars(original.body))

    environment = Environment()
    trained: dict[str, Any] = {}
    states: dict[str, Any] = {}
    kept: list[str] = []
    for weight in weights:
        name, dtype = str(weight.name), element_type(weight)
        if name in state_outputs or weight in statistics:
            states[name] = weight
        elif weight not in used:
            continue
        elif name in frozen and name not in constants and dtype in FLOATS:
            states[name] = weight
            kept.append(name)
        elif name in constants or dtype not in FLOATS or not (static_shape(weight) or name in numbers):
            if dtype in SHORT_FLOATS and name not in frozen and name not in constants:
                raise ModelError(
                    f"{source}: parameter {name!r} is {dtype}; weights are kept in float32 (dtype={dtype!r} of the "
                    "step computes in the narrow type), so export the model in float32."
                )
            environment[weight] = relax.const(values[name], dtype)
        else:
            trained[name] = weight
    if not trained:
        raise ModelError(
            f"{source} has no floating-point parameter to train; export it with its weights as inputs or initializers."
        )
    losses = 0 if selected.target is None else len(selected.outputs)
    check_batch(module, function, count, len(state_outputs) + losses, source)
    if selected.target is not None:
        inputs.append(inputs.pop(selected.target))
    baked = _baked_statistics(original)
    fresh = {param: relax.Var(str(param.name), param.ty) for param in [*inputs, *trained.values(), *states.values()]}
    for param, var in fresh.items():
        environment[param] = var
    state_vars = {name: fresh[param] for name, param in states.items()}
    state_vars |= {name: relax.Var(name, constant.ty) for name, constant in baked}
    values |= {name: array_of(constant) for name, constant in baked}

    flow = _StateFlow(list(state_vars.values()), [state_vars[name] for name, _ in baked])
    builder = builder_with_tir(module)
    with function_scope(builder, function, [*fresh.values(), *(state_vars[name] for name, _ in baked)]):
        with builder.dataflow():
            checked = CheckedIndices(fresh[param] for param in inputs)
            rewrites = {
                BATCH_NORM: flow.rewrite,
                **FLAT_PRODUCTS,
                **IDENTITIES,
                **MASKED_SOFTMAXES,
                **checked.rewrites,
            }
            results = _fields(builder, replay(builder, original, environment, rewrites))
            for name, result in zip(state_outputs, results, strict=False):
                if name in state_vars:
                    flow.newest[state_vars[name]] = result
            results = results[len(state_outputs) :]
            results[:losses] = [_scalar(builder, result) for result in results[:losses]]
            returned = [builder.emit_output(result) for result in results]
            returned += [builder.emit_output(flow.newest[var]) for var in state_vars.values()]
        builder.emit_func_output(relax.Tuple(returned))
    public = dict(names or {})
    schemas = [replace(schema_of(param), range=ranges.get(param)) for param in inputs]
    target = None if selected.target is None else schemas.pop()
    return Model(
        module=builder.get(),
        function=function,
        inputs=tuple(schemas),
        parameters={public.get(name, name): values[name] for name in trained},
        states={public.get(name, name): values[name] for name in state_vars},
        source=source,
        outputs=selected.outputs,
        frozen=frozenset(public.get(name, name) for name in kept),
        target=target,
        predicted=selected.predicted,
    )


def _selected(
    module: tvm.IRModule,
    function: str,
    count: int,
    outputs: Outputs | OwnLoss | None,
    state_outputs: Sequence[str],
    names: Sequence[str] | None,
    source: str,
) -> Selected:
    """The chosen outputs; arguments as `from_module`."""
    if isinstance(outputs, OwnLoss):
        return select_losses(
            module, function, count, state_outputs=state_outputs, names=names, choice=outputs, source=source
        )
    return select_outputs(module, function, state_outputs=state_outputs, names=names, wanted=outputs, source=source)


def _scalar(builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    """A tensor of one element as one of no axes."""
    return builder.emit(relax.op.reshape(value, relax.ShapeExpr([]))) if static_shape(value) else value


class _StateFlow:
    """Threads running statistics through the batch norms: each reads the newest and leaves its own."""

    def __init__(self, states: list[relax.Var], baked: list[relax.Expr]) -> None:
        self.newest: dict[Any, Any] = {state: state for state in states}
        self._owner: dict[Any, Any] = {state: state for state in states}
        self._baked = iter(baked)

    def rewrite(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        """Bind one batch norm; a constant statistic is replaced by the state that was made of it."""
        arguments = list(call.args)
        owners: list[tuple[Any, int]] = []
        for position in (3, 4):
            if isinstance(arguments[position], Constant):
                arguments[position] = next(self._baked)
            owner = self._owner.get(arguments[position])
            if owner is not None:
                arguments[position] = self.newest[owner]
                owners.append((owner, position - 2))
        bound = builder.emit(relax.Call(call.op, arguments, call.attrs, list(call.ty_args)), "batch_norm")
        for owner, item in owners:
            self.newest[owner] = builder.emit(relax.TupleGetItem(bound, item), f"{owner.name}_new")
            self._owner[self.newest[owner]] = owner
        return bound


def _relax_function(module: tvm.IRModule, function: str, source: str) -> relax.Function:
    names = sorted(str(variable.name_hint) for variable in module.get_global_vars())
    if function not in names:
        raise ModelError(f"{source} has no function {function!r}; it has {', '.join(names) or 'none'}.")
    found = module[function]
    if not isinstance(found, relax.Function):
        raise ModelError(f"{source}: {function!r} is a {type(found).__name__}, not a Relax function.")
    return found


def input_count(function: relax.Function, num_inputs: int | None, source: str) -> int:
    """How many leading parameters of a function are inputs: the number given, its attribute `num_input`, or 1.

    Raises:
        ModelError: the function has fewer parameters.
    """
    if num_inputs is None:
        attributes = function.attrs
        num_inputs = int(attributes["num_input"]) if attributes and "num_input" in attributes else 1
    if not 0 < num_inputs <= len(function.params):
        raise ModelError(
            f"{source} has a function of {len(function.params)} parameters, so {num_inputs} inputs are impossible; "
            "give the attribute num_input between 1 and the number of parameters."
        )
    return num_inputs


def _values_of(
    function: relax.Function, weights: list[relax.Var], given: dict[str, Array], source: str, seed: int
) -> dict[str, Array]:
    """The initial value of each weight: the given one, checked, or one of the initialiser."""
    unknown = sorted(set(given) - {str(weight.name) for weight in weights})
    if unknown:
        raise ModelError(f"{source}: values were given for {', '.join(unknown)}, which are not parameters of it.")
    roles = roles_of(function)
    values: dict[str, Array] = {}
    for weight in weights:
        name, shape, dtype = str(weight.name), static_shape(weight), element_type(weight)
        if not all(isinstance(extent, int) for extent in shape):
            raise ModelError(
                f"{source}: parameter {name!r} has the extents {list(map(str, shape))}; only inputs may be symbolic "
                "(with several inputs set the function attribute num_input)."
            )
        if name not in given:
            values[name] = initial_value(name, shape, dtype, roles.get(weight, "weight"), seed)
            continue
        values[name] = value = np.array(given[name], order="C")
        if value.shape != shape or str(value.dtype) != dtype:
            raise ModelError(
                f"{source}: parameter {name!r} is {dtype}{list(shape)}, but its value is "
                f"{value.dtype}{list(value.shape)}."
            )
    return values


def _fields(builder: relax.BlockBuilder, result: relax.Expr) -> list[relax.Expr]:
    """The results of a function as a list, whether it returns a tensor, nested tuples or a variable bound to one."""
    if isinstance(result, relax.Tuple):
        return [leaf for field in result.fields for leaf in _fields(builder, field)]
    if isinstance(result.ty, relax.TupleType):
        count = len(result.ty.fields)
        items = [builder.emit(relax.TupleGetItem(result, index)) for index in range(count)]
        return [leaf for item in items for leaf in _fields(builder, item)]
    return [result]


def _running_statistics(function: relax.Function) -> set[relax.Var]:
    """The parameters that a batch norm reads as running mean or variance."""
    params = set(function.params)
    return {call.args[i] for call in calls_of(function, BATCH_NORM) for i in (3, 4) if call.args[i] in params}


def _baked_statistics(function: relax.Function) -> list[tuple[str, relax.Expr]]:
    """Running statistics that a frontend made constants: a name and the constant for each, in call order."""
    return [
        (f"batch_norm{number}_{what}", call.args[position])
        for number, call in enumerate(calls_of(function, BATCH_NORM))
        for position, what in ((3, "running_mean"), (4, "running_var"))
        if isinstance(call.args[position], Constant)
    ]
