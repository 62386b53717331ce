# SPDX-License-Identifier: Apache-2.0
"""The training step of a model: its loss is differentiated here, and the optimizer and the state are added."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tvm import relax

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.autodiff.differentiate import Composite, emit_with_gradients
from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.gradient_ops import gradient_descriptors
from tvm_convgrad.training.ir.graph import (
    Environment,
    Rewrite,
    builder_with_tir,
    element_type,
    fresh_parameters,
    function_scope,
    operator_counts,
    replay,
)
from tvm_convgrad.training.ir.micro_batches import MICRO_BATCHES
from tvm_convgrad.training.model.model import Model, schema_of
from tvm_convgrad.training.step import batch_norm, dropout
from tvm_convgrad.training.step.layout import convert_layout
from tvm_convgrad.training.step.losses.combined import ensemble_loss, target_of, weighted_sum
from tvm_convgrad.training.step.losses.loss import Loss
from tvm_convgrad.training.step.losses.table import find_loss
from tvm_convgrad.training.step.micro_batches import (
    added,
    check_batches,
    joined,
    mean,
    number_of,
    part,
    whole,
    whole_schema,
)
from tvm_convgrad.training.step.module import (
    FUNCTIONS,
    STEP_COUNTER,
    State,
    StepModule,
    emit_init,
    emit_updates,
    initial_state,
)
from tvm_convgrad.training.step.optimizers import Optimizer, make_optimizer
from tvm_convgrad.training.step.options import StepOptions
from tvm_convgrad.training.step.precision import narrow

COMPOSITES = {batch_norm.OP: Composite(batch_norm.training, batch_norm.training_gradient)}
"""Operators whose gradient is that of the whole, not of the basic operators that they are written out as."""


@dataclass(frozen=True)
class _Parts:
    """What the functions of a step are made of. `forward` is the function of `_loss_function`."""

    model: Model
    options: StepOptions
    optimizer: Optimizer
    state: State
    forward: relax.Function


def step_of_model(model: Model, options: StepOptions) -> StepModule:
    """The step of a model.

    Raises:
        UnsupportedError: micro-batches of a batch that is not one fixed number for all inputs; an option that an
            ensemble does not take.
        ModelError: operators without gradient (all of them are named), or a shape that the loss does not fit.
    """
    accumulate = options.accumulate
    check_batches(accumulate, model.inputs)
    optimizer = make_optimizer(options.optimizer, options.given_settings)
    loss = find_loss(options.loss, options.loss_settings)
    if model.members is not None:
        if options.clip_norm is not None or options.decayed != "all":
            raise UnsupportedError(
                "build_step: an ensemble takes neither clip_norm, which would join its members' gradients, nor "
                "decayed, as its biases have an axis of members; leave them out."
            )
        loss = ensemble_loss(loss, model.members, model.own_data)
    drops = options.dropout_mode == "train" and dropout.OP in operator_counts(model.relax_function)
    counted = optimizer.needs_step or drops
    forward = _loss_function(model, loss, options, drops=drops, counted=counted)
    parts = _Parts(model, options, optimizer, initial_state(model, optimizer, counted), forward)
    builder = builder_with_tir(model.module)
    _emit_step(builder, parts)
    _emit_predict(builder, parts)
    emit_init(builder, parts.state)
    module = relax.transform.DeadCodeElimination(list(FUNCTIONS))(builder.get())
    module = convert_layout(narrow(module, options.dtype, options.results), options.layout)
    target = schema_of(forward.params[len(model.inputs)], "target")
    return StepModule(
        module=module,
        inputs=tuple(whole_schema(schema, accumulate) for schema in model.inputs),
        target=whole_schema(target, accumulate),
        prediction=schema_of(relax.Var("prediction", module["predict"].ret_ty), "prediction"),
        state=parts.state.schemas,
        initial_state=parts.state.values,
        options={
            "loss": options.loss,
            **{name: value for name, value in asdict(options.loss_settings).items() if value is not None},
            "optimizer": options.optimizer,
            **optimizer.plain_settings,
            "decayed": options.decayed,
            **{name: getattr(options, name) for name in ("clip_norm", "clip_value") if getattr(options, name)},
            "dtype": options.dtype,
            "results": options.results,
            "loss_scale": options.scale,
            "layout": options.layout,
            "bn": options.bn,
            "dropout": options.dropout_mode,
            "accumulate": accumulate,
            "seed": options.seed,
            "outputs": dict(model.outputs),
            "source": model.source,
        },
        gradients=gradient_descriptors(module["step"]),
    )


def _loss_function(model: Model, loss: Loss, options: StepOptions, *, drops: bool, counted: bool) -> relax.Function:
    """f(inputs, target, parameters, states, [step]) -> (scaled loss, loss, predictions, new states...)."""
    original = model.relax_function
    rewrites: dict[str, Rewrite] = {dropout.OP: dropout.identity}
    fresh = fresh_parameters(original)
    environment = Environment(original.params, fresh)
    inputs, rest = fresh[: len(model.inputs)], fresh[len(model.inputs) :]
    states = dict(zip(model.states, rest[len(model.parameters) :], strict=True))
    rewrites |= batch_norm.rewrites(options.bn, {states[name] for name in model.frozen})
    count = len(model.outputs)
    target = relax.Var("target", target_of(loss, original.ret_ty.fields[:count], model.outputs, model.source))
    counter = [relax.Var(STEP_COUNTER, relax.TensorType((), "int64"))] if counted else []
    if drops:
        rewrites[dropout.OP] = dropout.seeded(options.seed, counter[0])
    builder = builder_with_tir(model.module)
    with function_scope(builder, "loss", [*inputs, target, *rest, *counter]):
        with builder.dataflow():
            result = replay(builder, original, environment, rewrites)
            results, new_states = list(result.fields[:count]), list(result.fields[count:])
            predictions = results[0]
            for number, (name, old) in enumerate(states.items()):
                if batch_norm.is_kept_counter(name, options.bn, model.frozen):
                    new_states[number] = old
            value = weighted_sum(builder, (loss.value(builder, result, target) for result in results), model.outputs)
            scaled = builder.emit(relax.op.multiply(value, scalar(options.scale, element_type(value))))
            outputs = [builder.emit_output(output) for output in (scaled, value, predictions, *new_states)]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get()["loss"]


def _emit_step(builder: relax.BlockBuilder, parts: _Parts) -> None:
    """step(inputs, target, lr, state) -> (loss, predictions, new state)."""
    model, forward, layout, count = parts.model, parts.forward, parts.state, parts.options.accumulate
    leading = [whole(param, count) for param in forward.params[: len(model.inputs) + 1]]
    rate = relax.Var("lr", relax.TensorType((), "float32"))
    state = relax.Var("state", layout.type)
    attributes = {MICRO_BATCHES: count} if count > 1 else None
    with function_scope(builder, "step", [*leading, rate, state], attributes):
        with builder.dataflow():
            fields = layout.fields(builder, state)
            parameters = fields[: layout.parameters]
            new_states: list[relax.Expr] = list(fields[layout.parameters : layout.parameters + layout.statistics])
            wanted = range(len(leading), len(leading) + layout.parameters)
            losses: list[relax.Expr] = []
            predictions: list[relax.Expr] = []
            gradients: list[relax.Expr] = []
            for number in range(count):
                samples = [part(builder, tensor, number, count) for tensor in leading]
                done = [number_of(builder, fields[-1], number, count)] if layout.counted else []
                arguments = [*samples, *parameters, *new_states, *done]
                results, more = emit_with_gradients(
                    builder, forward, arguments, wanted, model.source, COMPOSITES, model.origins
                )
                _, own_loss, own_predictions, *new_states = results
                losses.append(own_loss)
                predictions.append(own_predictions)
                gradients = added(builder, gradients, more)
            loss, prediction = mean(builder, losses), joined(builder, predictions)
            factor = 1.0 / (parts.options.scale * count)
            new_state = emit_updates(
                builder, parts.optimizer, layout, fields, gradients, new_states, rate, parts.options, factor
            )
            output = builder.emit_output(relax.Tuple([loss, prediction, new_state]))
        builder.emit_func_output(output)


def _emit_predict(builder: relax.BlockBuilder, parts: _Parts) -> None:
    """predict(inputs, state) -> predictions, with running statistics and without dropout."""
    original, layout, count = parts.model.relax_function, parts.state, parts.options.accumulate
    inputs = [whole(param, count) for param in original.params[: len(parts.model.inputs)]]
    state = relax.Var("state", layout.type)
    with function_scope(builder, "predict", [*inputs, state]):
        with builder.dataflow():
            fields = layout.fields(builder, state, layout.parameters + layout.statistics)
            rewrites = {batch_norm.OP: batch_norm.inference, dropout.OP: dropout.identity}
            predictions = []
            for number in range(count):
                samples = [part(builder, tensor, number, count) for tensor in inputs]
                environment = Environment(original.params, [*samples, *fields])
                predictions.append(replay(builder, original, environment, rewrites).fields[0])
            output = builder.emit_output(joined(builder, predictions))
        builder.emit_func_output(output)
