# SPDX-License-Identifier: Apache-2.0
"""Ensembles: models of one architecture as one model, whose training step is one program of grouped convolutions.

Each member's parameters go the way that they would go alone: the loss is the sum of the members' losses, and optimizers
work element by element. Convolutions follow the batching table (tvm_convgrad.core.batch_rules).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax

from relax_ops.vmap.parameters import vmap_over_parameters
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.ir.graph import builder_with_tir, element_type, function_scope, static_shape
from tvm_convgrad.training.model.model import Array, Model, schema_of


def ensemble(models: Sequence[Model], *, own_data: bool = False) -> Model:
    """Combine models of one architecture into one model, whose step trains all of them.

    Args:
        models: the members, which may differ only in the values of parameters and states.
        own_data: if True, each member has its own samples: inputs and targets are (samples, members, ...). If False,
            all members are trained on the same samples.

    Returns:
        A model for `build_step`. Axis 0 of its parameters and states is the member (see `member`), axis 1 of its
        predictions likewise.

    Raises:
        ModelError: `models` is empty, or their architectures differ.
        UnsupportedError: an operator has no vmap rule; the message names it.

    Example:
        models = [from_module(module, seed=k) for k in range(5)]
        step = build_step(ensemble(models), optimizer="adam", lr=1e-3)
    """
    if not models:
        raise ModelError("ensemble: no models were given; give at least one.")
    first = models[0]
    if first.target is not None:
        raise UnsupportedError(
            f"ensemble: {first.source} returns its loss itself, which would be one loss of all members; give models "
            "that return predictions, and choose the loss of the step."
        )
    for number, other in enumerate(models):
        if other.members is not None:
            raise ModelError(f"ensemble: model {number} is an ensemble itself; give its members one by one.")
        same = other.inputs == first.inputs and other.outputs == first.outputs
        if not same or not tvm_ffi.structural_equal(other.relax_function, first.relax_function):
            raise ModelError(
                f"ensemble: model {number} ({other.source}) has another architecture than model 0 ({first.source}); "
                "members differ in the values of their parameters only."
            )
    count, original = len(models), first.relax_function
    builder = builder_with_tir(first.module)
    inputs = [_input(param, count if own_data else None) for param in original.params[: len(first.inputs)]]
    rest = [
        relax.Var(str(param.name), relax.TensorType([count, *static_shape(param)], element_type(param)))
        for param in original.params[len(inputs) :]
    ]
    with function_scope(builder, first.function, [*inputs, *rest]):
        with builder.dataflow():
            values = {param: (var, True) for param, var in zip(original.params[len(inputs) :], rest, strict=True)}
            for param, var in zip(original.params, inputs, strict=False):
                values[param] = (_swapped(builder, var) if own_data else var, own_data)
            results = vmap_over_parameters(builder, original, values, count)
            outputs = [builder.emit_output(_swapped(builder, result)) for result in results[: len(first.outputs)]]
            outputs += [builder.emit_output(state) for state in results[len(first.outputs) :]]
        builder.emit_func_output(relax.Tuple(outputs))
    return replace(
        first,
        module=builder.get(),
        inputs=tuple(
            replace(schema_of(var, schema.name), range=schema.range)
            for var, schema in zip(inputs, first.inputs, strict=True)
        ),
        parameters=_stacked([model.parameters for model in models]),
        states=_stacked([model.states for model in models]),
        source=f"ensemble of {count}: {first.source}",
        members=count,
        own_data=own_data,
    )


def member(values: Mapping[str, Array], number: int) -> dict[str, Array]:
    """Select the parameters or states of one member of an ensemble.

    Args:
        values: parameters or states of the ensemble by name, such as `Session.state`.
        number: the member, from 0.

    Returns:
        Views of the member's arrays by name; scalars (counters), which all members share, as they are.
    """
    return {name: value[number] if value.ndim else value for name, value in values.items()}


def _stacked(values: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.stack([one[name] for one in values]) for name in values[0]}


def _input(param: relax.Var, count: int | None) -> Any:
    if count is None:
        return relax.Var(str(param.name), param.ty)
    samples, *rest = static_shape(param)
    return relax.Var(str(param.name), relax.TensorType([samples, count, *rest], element_type(param)))


def _swapped(builder: relax.BlockBuilder, var: relax.Var) -> Any:
    """Members and samples, the first two axes, in the other order."""
    ndim = int(var.ty.ndim)
    return builder.emit(relax.op.permute_dims(var, [1, 0, *range(2, ndim)]))
