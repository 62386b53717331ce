# SPDX-License-Identifier: Apache-2.0
"""Models and training programs from Relay (TVM up to 0.19); see tvm_convgrad.importer for the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tvm
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import import_relay
from tvm_convgrad.training.frontends.batch import bind_batch
from tvm_convgrad.training.model.initialise import initial_value, roles_of
from tvm_convgrad.training.model.model import Array, Model, from_module, schema_of
from tvm_convgrad.training.model.outputs import Outputs
from tvm_convgrad.training.model.own_loss import OwnLoss
from tvm_convgrad.training.model.program import TARGETS, TrainingProgram, recognise


def load_relay(
    path: Path, batch: int | str | None, params: Path | None = None, outputs: Outputs | OwnLoss | None = None
) -> Model | TrainingProgram:
    """Read a Relay program; a function that returns a loss and gradients becomes a training program.

    Args:
        path: the program.
        batch: of the inputs, where the program leaves it open (Any).
        params: a file of relay.save_param_dict; default: the file of the same stem that ends in .params, if there is
            one. Parameters of main without a value are inputs (and the target); without any values the first is the
            input and the rest is initialised.
        outputs: as `load_model`; a program with gradients has none to choose.

    Raises:
        ModelError: it cannot be imported, or is not a model.
    """
    beside = path.with_suffix(".params")
    imported = import_relay(path, params or (beside if beside.is_file() else None))
    source = str(path)
    module, values = imported.module, dict(imported.params)
    if not values:
        values = _initialised(module)
    program = recognise(module, values, source)  # before parameters are moved: gradients come in their order
    if program is not None:
        if batch is not None and any(schema.shape[:1] != (batch,) for schema in program.inputs):
            raise ModelError(f"{source}: the batch of a program with gradients is fixed; leave --batch out.")
        if outputs is not None:
            raise ModelError(
                f"{source} returns a loss and its gradients, so there is no output to choose; leave --model-output and "
                "--loss model out."
            )
        return program
    function = _inputs_first(module["main"], values)
    count = sum(str(param.name) not in values for param in function.params)
    if imported.params:
        _refuse_weights_as_inputs(function.params[:count], source)
    module = type(module)({"main": function})
    if not 0 < count <= len(function.params):
        raise ModelError(f"{source} has no input: values were given for all of its parameters.")
    remedy = "save the Relay program with that batch, or with Any"
    module = bind_batch(module, "main", count, batch, remedy, source)
    return from_module(module, num_inputs=count, parameters=values, outputs=outputs, source=source)


def _initialised(module: tvm.IRModule) -> dict[str, Array]:
    """Values for all parameters but the first, and but those that are called as targets are."""
    roles, values = roles_of(module["main"]), {}
    for param in module["main"].params[1:]:
        schema = schema_of(param)
        shape = tuple(extent for extent in schema.shape if isinstance(extent, int))
        if schema.name.lower() not in TARGETS and len(shape) == len(schema.shape):
            values[schema.name] = initial_value(schema.name, shape, schema.dtype, roles.get(param, "weight"), 0)
    return values


def _refuse_weights_as_inputs(inputs: Sequence[relax.Var], source: str) -> None:
    """Say whose values are missing where what has none cannot be inputs, which have the batch in front."""
    rows = {schema.name: schema.shape[0] for schema in map(schema_of, inputs) if schema.shape}
    numbers = {name: extent for name, extent in rows.items() if isinstance(extent, int)}
    if len(set(numbers.values())) > 1:
        listed = ", ".join(f"{name} {extent}" for name, extent in numbers.items())
        raise ModelError(
            f"{source}: parameters without a value are inputs, but axis 0 of these has different extents ({listed}) "
            "and must be the batch of each; give the values of all weights, by --params."
        )


def _inputs_first(function: relax.Function, values: dict[str, Array]) -> relax.Function:
    """The function with the parameters that have no value in front."""
    inputs = [param for param in function.params if str(param.name) not in values]
    weights = [param for param in function.params if str(param.name) in values]
    attributes = {"global_symbol": "main", "num_input": len(inputs)}
    made = relax.Function([*inputs, *weights], function.body, function.ret_ty, function.is_pure)
    for key, value in attributes.items():
        made = made.with_attr(key, value)
    return made
