# SPDX-License-Identifier: Apache-2.0
"""From a model to the IRModule of one training step: loss, gradients, optimizer, new state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from tvm import relax

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.training import batch_norm, dropout, precision
from tvm_convgrad.training.counting import scalar
from tvm_convgrad.training.differentiate import Composite, emit_with_gradients
from tvm_convgrad.training.gradient_ops import gradient_descriptors
from tvm_convgrad.training.graph import (
    Environment,
    Rewrite,
    builder_with_tir,
    element_type,
    function_scope,
    operator_counts,
    replay,
)
from tvm_convgrad.training.layout import LAYOUTS, convert_layout
from tvm_convgrad.training.losses import Loss, find_loss, of_members, target_of, weighted_sum
from tvm_convgrad.training.micro_batches import (
    MICRO_BATCHES,
    added,
    check_accumulate,
    joined,
    mean,
    number_of,
    part,
    whole,
    whole_schema,
)
from tvm_convgrad.training.model import Model, TensorSchema, schema_of
from tvm_convgrad.training.optimizers import Optimizer, make_optimizer
from tvm_convgrad.training.program import TrainingProgram

Role = Literal["parameter", "frozen", "running_stat", "optimizer", "counter"]
Array = np.ndarray[Any, Any]
STEP_COUNTER = "step"
FUNCTIONS = ("step", "predict", "init")
COMPOSITES = {batch_norm.OP: Composite(batch_norm.training, batch_norm.training_gradient)}
"""Operators whose gradient is that of the whole, not of the basic operators that they are written out as."""


@dataclass(frozen=True)
class StateSchema:
    """One tensor of the state: what it is called, its fixed extents, its dtype and what it is for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role


@dataclass(frozen=True)
class StepModule:
    """A training step: `module` has the functions step, predict and init (see `tvm_convgrad.training`).

    `gradients` lists every backward convolution of the step in order: operator name and problem descriptor.
    `options` are those that the step was built with, plain enough for JSON.
    """

    module: Any
    inputs: tuple[TensorSchema, ...]
    target: TensorSchema
    prediction: TensorSchema
    state: tuple[StateSchema, ...]
    initial_state: list[Array]
    options: dict[str, Any]
    gradients: list[tuple[str, str]] = field(default_factory=list)


def build_step(
    model: Model | TrainingProgram,
    *,
    loss: str = "cross_entropy",
    optimizer: str = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    nesterov: bool | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    dtype: str = "float32",
    results: str = "float32",
    loss_scale: float | None = None,
    layout: str = "NCHW",
    bn: str = "train",
    dropout_mode: str = "train",
    accumulate: int = 1,
    seed: int = 0,
) -> StepModule:
    """The training step of a model, or of a program that computes its own gradients (whose loss, bn and dropout stay).

    Args:
        loss: "cross_entropy" (int64 class labels) or "mse".
        optimizer: "sgd", "adam" or "adamw", with torch.optim's meaning of `lr`, `momentum`, `weight_decay`,
            `nesterov`, `betas`, `eps`; None takes the optimizer's default.
        dtype: "float32", or "float16"/"bfloat16" for the operands of convolutions and matrix products, which
            accumulate in float32; weights and everything else stay float32.
        results: what these are stored in: "float32", or "operands" for the type of their operands, as PyTorch's
            autocast does and cuDNN demands.
        loss_scale: factor on the loss during the backward pass, undone before the optimizer (default: 1024 for
            float16, else 1).
        layout: "NCHW"; "NHWC" to convert the data of convolutions to it; "NHWC:OHWI" for their kernels too.
        bn: "train" normalises with batch statistics, whatever mode the model was exported in, but layers whose scale
            and shift are frozen with their running statistics, which stay; "train-all" those with batch statistics,
            too; "frozen" none.
        dropout_mode: "train" makes every dropout real (seeded by `seed` and the step counter); "off" drops nothing.
        accumulate: micro-batches of the model's batch in one step, which then takes that many times the samples and
            updates once, by the gradient of the mean loss (see `micro_batches`).

    Raises:
        UnsupportedError: an option that does not exist.
        ModelError: operators without gradient (all of them are named), or a shape that the loss does not fit.
    """
    program = model if isinstance(model, TrainingProgram) else None
    chosen = make_optimizer(
        optimizer,
        {
            "lr": program.rate if program is not None and lr is None and optimizer == "sgd" else lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
        },
    )
    criterion = find_loss(loss)
    if isinstance(model, Model) and model.members is not None:
        criterion = of_members(criterion, model.members, model.own_data)
    _one_of("bn", bn, batch_norm.MODES)
    _one_of("dropout_mode", dropout_mode, ("train", "off"))
    _one_of("layout", layout, LAYOUTS)
    _one_of("dtype", dtype, precision.DTYPES)
    _one_of("results", results, precision.RESULTS)
    check_accumulate(accumulate, model.inputs)
    if isinstance(model, TrainingProgram):
        if accumulate != 1:
            raise UnsupportedError(
                f"build_step: accumulate = {accumulate}, but {model.source} computes its own gradients; give the model "
                f"without them."
            )
        from tvm_convgrad.training.program_step import step_of_program

        return step_of_program(
            model, chosen, dtype=dtype, results=results, loss_scale=loss_scale, layout=layout, seed=seed
        )
    scale = precision.loss_scale(dtype, loss_scale)

    drops = dropout_mode == "train" and dropout.OP in operator_counts(model.relax_function)
    counted = chosen.needs_step or drops
    forward = _loss_function(model, criterion, scale, bn=bn, drop=drops, counted=counted, seed=seed)
    state = state_of(model, chosen, counted)
    module = _assemble(model, forward, chosen, scale, counted, state, accumulate)
    module = relax.transform.DeadCodeElimination(list(FUNCTIONS))(module)
    module = precision.narrow(module, dtype, results)
    module = convert_layout(module, layout)
    predict_type = module["predict"].ret_ty
    target = schema_of(forward.params[len(model.inputs)], "target")
    return StepModule(
        module=module,
        inputs=tuple(whole_schema(schema, accumulate) for schema in model.inputs),
        target=whole_schema(target, accumulate),
        prediction=schema_of(relax.Var("prediction", predict_type), "prediction"),
        state=tuple(schema for schema, _ in state),
        initial_state=[value for _, value in state],
        options={
            "loss": loss,
            "optimizer": optimizer,
            **{key: list(value) if isinstance(value, tuple) else value for key, value in chosen.settings.items()},
            "dtype": dtype,
            "results": results,
            "loss_scale": scale,
            "layout": layout,
            "bn": bn,
            "dropout": dropout_mode,
            "accumulate": accumulate,
            "seed": seed,
            "outputs": dict(model.outputs),
            "source": model.source,
        },
        gradients=gradient_descriptors(module["step"]),
    )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedError(f"build_step: {option} = {value!r} is unknown; choose one of {', '.join(allowed)}.")


def state_of(model: Model | TrainingProgram, optimizer: Optimizer, counted: bool) -> list[tuple[StateSchema, Array]]:
    """Every tensor of the state with its initial value, in the order of the state tuple."""

    def entry(name: str, value: Array, role: Role) -> tuple[StateSchema, Array]:
        return StateSchema(name, tuple(int(extent) for extent in value.shape), str(value.dtype), role), value

    entries = [entry(name, value, "parameter") for name, value in model.parameters.items()]
    frozen = model.frozen if isinstance(model, Model) else ()
    entries += [
        entry(name, value, "frozen" if name in frozen else "running_stat") for name, value in model.states.items()
    ]
    for name, value in model.parameters.items():
        entries += [entry(f"{name}.{slot}", np.zeros_like(value), "optimizer") for slot in optimizer.slots]
    if counted:
        entries.append(entry(STEP_COUNTER, np.zeros((), "int64"), "counter"))
    return entries


def _loss_function(model: Model, loss: Loss, scale: float, *, bn: str, drop: bool, counted: bool, seed: int) -> Any:
    """f(inputs, target, parameters, states, [step]) -> (scaled loss, loss, predictions, new states...)."""
    original = model.relax_function
    rewrites: dict[str, Rewrite] = {dropout.OP: dropout.identity}
    environment = Environment()
    fresh = [relax.Var(str(param.name), param.ty) for param in original.params]
    for param, var in zip(original.params, fresh, strict=True):
        environment[param] = var
    inputs, rest = fresh[: len(model.inputs)], fresh[len(model.inputs) :]
    states = dict(zip(model.states, rest[len(model.parameters) :], strict=True))
    rewrites |= batch_norm.rewrites(bn, {states[name] for name in model.frozen})
    count = len(model.outputs)
    target = relax.Var("target", target_of(loss, original.ret_ty.fields[:count], model.outputs, model.source))
    counter = [relax.Var(STEP_COUNTER, relax.TensorType((), "int64"))] if counted else []
    if drop:
        rewrites[dropout.OP] = dropout.seeded(seed, counter[0])
    builder = builder_with_tir(model.module)
    with function_scope(builder, "loss", [*inputs, target, *rest, *counter]):
        with builder.dataflow():
            result = replay(builder, original, environment, rewrites)
            results, new_states = list(result.fields[:count]), list(result.fields[count:])
            predictions = results[0]
            for number, (name, old) in enumerate(states.items()):
                if batch_norm.is_kept_counter(name, bn, model.frozen):
                    new_states[number] = old
            value = weighted_sum(builder, (loss.value(builder, result, target) for result in results), model.outputs)
            scaled = builder.emit(relax.op.multiply(value, scalar(scale, element_type(value))))
            outputs = [builder.emit_output(output) for output in (scaled, value, predictions, *new_states)]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get()["loss"]


def _assemble(
    model: Model,
    forward: Any,
    optimizer: Optimizer,
    scale: float,
    counted: bool,
    state: list[tuple[StateSchema, Array]],
    accumulate: int,
) -> Any:
    """The module with step, predict and init."""
    builder = builder_with_tir(model.module)
    state_type = relax.TupleType([relax.TensorType(schema.shape, schema.dtype) for schema, _ in state])
    _emit_step(builder, model, forward, optimizer, scale, counted, state_type, accumulate)
    _emit_predict(builder, model, state_type, accumulate)
    emit_init(builder, state)
    return builder.get()


def emit_init(builder: Any, state: list[tuple[StateSchema, Array]]) -> None:
    """init() -> the initial state."""
    with function_scope(builder, "init", []):
        with builder.dataflow():
            values = [relax.const(value, schema.dtype) for schema, value in state]
            output = builder.emit_output(relax.Tuple(values))
        builder.emit_func_output(output)


def _emit_step(
    builder: Any,
    model: Model,
    forward: Any,
    optimizer: Optimizer,
    scale: float,
    counted: bool,
    state_type: Any,
    accumulate: int,
) -> None:
    """step(inputs, target, lr, state) -> (loss, predictions, new state)."""
    leading = [whole(param, accumulate) for param in forward.params[: len(model.inputs) + 1]]
    rate = relax.Var("lr", relax.TensorType((), "float32"))
    state = relax.Var("state", state_type)
    attributes = {MICRO_BATCHES: accumulate} if accumulate > 1 else None
    with function_scope(builder, "step", [*leading, rate, state], attributes):
        with builder.dataflow():
            items = [builder.emit(relax.TupleGetItem(state, i)) for i in range(len(state_type.fields))]
            count, states = len(model.parameters), len(model.states)
            parameters = items[:count]
            slots = items[count + states : len(items) - counted]
            wanted = range(len(leading), len(leading) + count)
            new_states = items[count : count + states]
            losses: list[Any] = []
            parts: list[Any] = []
            gradients: list[Any] = []
            for number in range(accumulate):
                samples = [part(builder, tensor, number, accumulate) for tensor in leading]
                done = [number_of(builder, items[-1], number, accumulate)] if counted else []
                arguments = [*samples, *parameters, *new_states, *done]
                results, more = emit_with_gradients(builder, forward, arguments, wanted, model.source, COMPOSITES)
                _, own_loss, own_predictions, *new_states = results
                losses.append(own_loss)
                parts.append(own_predictions)
                gradients = added(builder, gradients, more)
            loss, predictions = mean(builder, losses), joined(builder, parts)

            step = next_step = None
            if counted:
                next_step = builder.emit(relax.op.add(items[-1], relax.const(1, "int64")))
                step = builder.emit(relax.op.astype(next_step, "float64"))
            new_parameters, new_slots = [], []
            each = len(optimizer.slots)
            for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                dtype = element_type(parameter)
                if scale * accumulate != 1.0:
                    gradient = builder.emit(relax.op.multiply(gradient, scalar(1.0 / (scale * accumulate), dtype)))
                own_rate = rate if dtype == "float32" else builder.emit(relax.op.astype(rate, dtype))
                updated, kept = optimizer.update(
                    builder, parameter, gradient, slots[index * each : (index + 1) * each], own_rate, step
                )
                new_parameters.append(updated)
                new_slots += kept
            counter = [next_step] if counted else []
            new_state = relax.Tuple([*new_parameters, *new_states, *new_slots, *counter])
            output = builder.emit_output(relax.Tuple([loss, predictions, new_state]))
        builder.emit_func_output(output)


def _emit_predict(builder: Any, model: Model, state_type: Any, accumulate: int) -> None:
    """predict(inputs, state) -> predictions, with running statistics and without dropout."""
    original = model.relax_function
    inputs = [whole(param, accumulate) for param in original.params[: len(model.inputs)]]
    state = relax.Var("state", state_type)
    with function_scope(builder, "predict", [*inputs, state]):
        with builder.dataflow():
            items = [
                builder.emit(relax.TupleGetItem(state, i)) for i in range(len(model.parameters) + len(model.states))
            ]
            rewrites = {batch_norm.OP: batch_norm.inference, dropout.OP: dropout.identity}
            parts = []
            for number in range(accumulate):
                environment = Environment()
                samples = [part(builder, tensor, number, accumulate) for tensor in inputs]
                for param, argument in zip(original.params, [*samples, *items], strict=True):
                    environment[param] = argument
                parts.append(replay(builder, original, environment, rewrites).fields[0])
            output = builder.emit_output(joined(builder, parts))
        builder.emit_func_output(output)
