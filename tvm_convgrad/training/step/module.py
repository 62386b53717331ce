# SPDX-License-Identifier: Apache-2.0
"""A training step as an IRModule, its state, and the parts of its functions that every step has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import tvm
from tvm import relax

from tvm_convgrad.core.flat import FlatLayout
from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.graph import element_type, function_scope, static_shape
from tvm_convgrad.training.model.model import Array, Model, TensorSchema
from tvm_convgrad.training.model.program import TrainingProgram
from tvm_convgrad.training.step import scaling
from tvm_convgrad.training.step.clipping import clip_by_norm, clip_by_value
from tvm_convgrad.training.step.optimizers import Optimizer, Update
from tvm_convgrad.training.step.options import StepOptions
from tvm_convgrad.training.step.storage import may_be_mask

Role = Literal["parameter", "frozen", "running_stat", "optimizer", "average", "counter"]
AVERAGE = "ema"
"""What the name of a parameter's moving average ends in, after a full stop."""
STEP_COUNTER = "step"
FUNCTIONS = ("step", "predict", "init")
SPLIT_FUNCTIONS = ("gradients", "apply", "evaluate")
"""The functions of a split step, besides those of every one (see `split`)."""


@dataclass(frozen=True)
class StateSchema:
    """Name, extents, element type and role of one tensor of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role


@dataclass(frozen=True)
class StepModule:
    """A training step before compilation, as `build_step` returns it.

    Attributes:
        module: IRModule with the functions step, predict and init, and, of a split step, gradients, apply and evaluate
            (signatures: docs/ARTIFACT.md). Before compilation, `gradients` returns a tuple instead of one flat buffer.
        inputs, target, prediction: name, shape and element type of inputs, target and predictions.
        state: name, shape, element type and role of each tensor of the state, in order.
        initial_state: the initial values of these tensors.
        options: the options that the step was built with, as JSON values.
        gradients: operator name and problem descriptor of each backward convolution of the step, in order.
        flat: the layout of the flat gradient buffer of a split step, otherwise None.
    """

    module: tvm.IRModule
    inputs: tuple[TensorSchema, ...]
    target: TensorSchema
    prediction: TensorSchema
    state: tuple[StateSchema, ...]
    initial_state: list[Array]
    options: dict[str, Any]
    gradients: list[tuple[str, str]] = field(default_factory=list)
    flat: FlatLayout | None = None


@dataclass(frozen=True)
class State:
    """The state of a step: parameters, then statistics and frozen weights, slots of the optimizer, moving averages of
    the parameters, those of a loss scale that adapts, the step counter.

    Attributes:
        schemas, values: of every tensor, in the order of the state tuple.
        parameters, statistics: how many there are of these.
        counted: whether the last tensor counts the steps done.
        averaged: whether there are averages, one for each parameter.
        scaled: whether there are the tensors of a loss scale that adapts.
        untrained: numbers of the parameters that no gradient reaches; they and their slots stay as they are.
    """

    schemas: tuple[StateSchema, ...]
    values: list[Array]
    parameters: int
    statistics: int
    counted: bool
    averaged: bool = False
    scaled: bool = False
    untrained: frozenset[int] = frozenset()

    @cached_property
    def type(self) -> relax.TupleType:
        """The type of the state tuple."""
        return relax.TupleType([relax.TensorType(schema.shape, schema.dtype) for schema in self.schemas])

    def fields(self, builder: relax.BlockBuilder, state: relax.Var, count: int | None = None) -> list[relax.Var]:
        """Bind the first `count` fields of the state tuple, or all of them."""
        count = len(self.schemas) if count is None else count
        return [builder.emit(relax.TupleGetItem(state, index)) for index in range(count)]

    def slots(self, fields: Sequence[relax.Var]) -> list[relax.Var]:
        """The fields that the optimizer keeps."""
        behind = self._scaling + self.counted + (self.parameters if self.averaged else 0)
        return list(fields[self.parameters + self.statistics : len(fields) - behind])

    def masks(self, dtype: str) -> list[int]:
        """Numbers of the frozen fields that may be masks of attention, in a step of a 16-bit type; none in float32."""
        if dtype == "float32":
            return []
        pairs = enumerate(zip(self.schemas, self.values, strict=True))
        return [n for n, (schema, value) in pairs if schema.role == "frozen" and may_be_mask(value, dtype)]

    @property
    def _scaling(self) -> int:
        return len(scaling.NAMES) if self.scaled else 0

    def averages(self, fields: Sequence[relax.Var]) -> list[relax.Var]:
        """The fields with moving averages of the parameters."""
        end = len(fields) - self.counted - self._scaling
        return list(fields[end - self.parameters : end]) if self.averaged else []

    def scale(self, fields: Sequence[relax.Var]) -> list[relax.Var]:
        """The fields of a loss scale that adapts, as `scaling.NAMES`; none without one."""
        end = len(fields) - self.counted
        return list(fields[end - self._scaling : end])


def initial_state(
    model: Model | TrainingProgram, optimizer: Optimizer, counted: bool, *, averaged: bool = False, scaled: bool = False
) -> State:
    """The state of a model's step with the initial values."""

    def entry(name: str, value: Array, role: Role) -> tuple[StateSchema, Array]:
        return StateSchema(name, tuple(int(extent) for extent in value.shape), str(value.dtype), role), value

    entries = [entry(name, value, "parameter") for name, value in model.parameters.items()]
    frozen = model.frozen if isinstance(model, Model) else ()
    entries += [
        entry(name, value, "frozen" if name in frozen else "running_stat") for name, value in model.states.items()
    ]
    for name, value in model.parameters.items():
        entries += [entry(f"{name}.{slot}", np.zeros_like(value), "optimizer") for slot in optimizer.slots]
    if averaged:
        entries += [entry(f"{name}.{AVERAGE}", value, "average") for name, value in model.parameters.items()]
    if scaled:
        pairs = zip(scaling.NAMES, scaling.initial_values(), strict=True)
        entries += [entry(name, value, "optimizer") for name, value in pairs]
    if counted:
        entries.append(entry(STEP_COUNTER, np.zeros((), "int64"), "counter"))
    return State(
        tuple(schema for schema, _ in entries),
        [value for _, value in entries],
        len(model.parameters),
        len(model.states),
        counted,
        averaged,
        scaled,
    )


def emit_init(builder: relax.BlockBuilder, state: State) -> None:
    """init() -> the initial state."""
    with function_scope(builder, "init", []):
        with builder.dataflow():
            pairs = zip(state.values, state.schemas, strict=True)
            output = builder.emit_output(relax.Tuple([relax.const(value, schema.dtype) for value, schema in pairs]))
        builder.emit_func_output(output)


def emit_updates(
    builder: relax.BlockBuilder,
    optimizer: Optimizer,
    state: State,
    fields: Sequence[relax.Var],
    gradients: Sequence[relax.Expr],
    new_statistics: Sequence[relax.Expr],
    rate: relax.Var,
    options: StepOptions,
) -> relax.Tuple:
    """Emit the optimizer's update of every parameter; gives the new state.

    Args:
        fields: the fields of the old state.
        gradients: one for each parameter, of the loss itself (see `unscaled`).
        rate: the learning rate, a float32 scalar.
        options: of the step; they say how gradients are bounded, and which parameters decay.
    """
    finite = scaling.all_finite(builder, gradients) if state.scaled else None
    gradients = _bounded(builder, gradients, options)
    step = next_step = None
    if state.counted:
        next_step = builder.emit(relax.op.add(fields[-1], relax.const(1, "int64")))
        step = builder.emit(relax.op.astype(next_step, "float64"))
    slots, each = state.slots(fields), len(optimizer.slots)
    new_parameters: list[relax.Expr] = []
    new_slots: list[relax.Expr] = []
    for index, (parameter, gradient) in enumerate(zip(fields[: state.parameters], gradients, strict=True)):
        dtype = element_type(parameter)
        own_rate = rate if dtype == "float32" else builder.emit(relax.op.astype(rate, dtype))
        own_slots = slots[index * each : (index + 1) * each]
        if index in state.untrained:  # as in PyTorch, where their gradient is None: neither decay nor momentum
            new_parameters.append(parameter)
            new_slots += own_slots
            continue
        decays = options.decayed == "all" or len(static_shape(parameter)) > 1
        updated, kept = optimizer.update(builder, Update(parameter, gradient, own_slots, own_rate, step), decays)
        new_parameters.append(updated)
        new_slots += kept
    counter: list[relax.Expr] = [next_step] if next_step is not None else []
    averages: list[relax.Expr] = [
        _averaged(builder, old, new, options)
        for old, new in zip(state.averages(fields), new_parameters, strict=False)  # none, or one for each
    ]
    scale: list[relax.Expr] = []
    if finite is not None:
        new_parameters = scaling.kept(builder, finite, new_parameters, fields[: state.parameters])
        new_slots = scaling.kept(builder, finite, new_slots, slots)
        averages = scaling.kept(builder, finite, averages, state.averages(fields))
        counter = scaling.kept(builder, finite, counter, fields[len(fields) - state.counted :])
        scale = scaling.next_values(builder, finite, state.scale(fields))
    return relax.Tuple([*new_parameters, *new_statistics, *new_slots, *averages, *scale, *counter])


def _averaged(
    builder: relax.BlockBuilder, average: relax.Expr, parameter: relax.Expr, options: StepOptions
) -> relax.Expr:
    """average + (1 - ema) * (parameter - average), which does not move an average that is the parameter."""
    assert options.ema is not None  # as there is an average
    moved = relax.op.multiply(relax.op.subtract(parameter, average), scalar(1.0 - options.ema, element_type(average)))
    return builder.emit(relax.op.add(average, moved))


def unscaled(
    builder: relax.BlockBuilder, gradients: Sequence[relax.Expr], options: StepOptions, scale: Sequence[relax.Expr]
) -> Sequence[relax.Expr]:
    """The gradients of the loss, of those of the loss times the scale of the options, or of the state (see `scale`)."""
    if scale:
        return scaling.divided(builder, gradients, scale[0])
    if options.scale == 1.0:
        return gradients
    return [
        builder.emit(relax.op.multiply(gradient, scalar(1.0 / options.scale, element_type(gradient))))
        for gradient in gradients
    ]


def _bounded(
    builder: relax.BlockBuilder, gradients: Sequence[relax.Expr], options: StepOptions
) -> Sequence[relax.Expr]:
    """The gradients within the bounds of the options."""
    if options.clip_norm is not None:
        return clip_by_norm(builder, gradients, options.clip_norm)
    if options.clip_value is not None:
        return clip_by_value(builder, gradients, options.clip_value)
    return gradients
