# SPDX-License-Identifier: Apache-2.0
"""The training step of a model: its loss is differentiated here, and the optimizer and the state are added."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from tvm import relax

from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.core.flat import FlatLayout
from tvm_convgrad.training.autodiff.differentiate import Composite, emit_with_gradients, without_gradient
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
from tvm_convgrad.training.step import batch_norm, dropout, mode
from tvm_convgrad.training.step.layout import convert_layout
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
    SPLIT_FUNCTIONS,
    STEP_COUNTER,
    State,
    StepModule,
    emit_init,
    initial_state,
    unscaled,
)
from tvm_convgrad.training.step.names import DYNAMIC
from tvm_convgrad.training.step.objective import Objective, objective_of
from tvm_convgrad.training.step.optimizers import Optimizer, make_optimizer
from tvm_convgrad.training.step.options import StepOptions
from tvm_convgrad.training.step.precision import narrow
from tvm_convgrad.training.step.split import (
    Computed,
    Fields,
    emit_apply,
    emit_gradients,
    emit_step,
    flat_layout,
)

COMPOSITES = {batch_norm.OP: Composite(batch_norm.training, batch_norm.training_gradient)}
"""Operators whose gradient is that of the whole, not of the basic operators that they are written out as."""

_INFERENCE = {batch_norm.OP: batch_norm.inference, dropout.OP: dropout.identity, mode.OP: mode.predicting}


@dataclass(frozen=True)
class _Parts:
    """What the functions of a step are made of. `forward` is the function of `_loss_function`."""

    model: Model
    options: StepOptions
    optimizer: Optimizer
    state: State
    forward: relax.Function
    objective: Objective


def step_of_model(model: Model, options: StepOptions) -> StepModule:
    """The step of a model.

    Raises:
        UnsupportedError: micro-batches of a batch that is not one fixed number for all inputs; an option that an
            ensemble does not take.
        ModelError: operators without gradient (all of them are named), or a shape that the loss does not fit.
    """
    accumulate = options.accumulate
    check_batches(accumulate, [*model.inputs, *([] if model.target is None else [model.target])])
    optimizer = make_optimizer(options.optimizer, options.given_settings)
    if model.members is not None:
        if options.clip_norm is not None or options.decayed != "all":
            raise UnsupportedError(
                "build_step: an ensemble takes neither clip_norm, which would join its members' gradients, nor "
                "decayed, as its biases have an axis of members; leave them out."
            )
        if options.optimizer == "lamb":
            raise UnsupportedError(
                "build_step: lamb takes the norm of a parameter, which would join the members of an ensemble; choose "
                "adamw."
            )
        if options.is_scale_dynamic:
            raise UnsupportedError(
                "build_step: an ensemble takes no loss_scale that adapts, which would join its members' gradients; "
                "give a number."
            )
    objective = objective_of(model, options)
    drops = options.dropout_mode == "train" and dropout.OP in operator_counts(model.relax_function)
    counted = optimizer.needs_step or drops
    forward = _loss_function(objective, options, drops=drops, counted=counted)
    state = initial_state(model, optimizer, counted, averaged=options.ema is not None, scaled=options.is_scale_dynamic)
    first = len(model.inputs) + 1
    untrained = without_gradient(forward, range(first, first + state.parameters))
    if len(untrained) == state.parameters:
        raise ModelError(
            f"{model.source}: no gradient of the loss reaches any of its parameters ({state.parameters}): it does not "
            "depend on them, or behind detach() or torch.no_grad() only. torch.export writes what follows a "
            "torch.utils.checkpoint(..., use_reentrant=True) under no_grad: export with use_reentrant=False."
        )
    state = replace(state, untrained=untrained)
    parts = _Parts(model, options, optimizer, state, forward, objective)
    builder = builder_with_tir(model.module)
    _emit_step(builder, parts)
    if objective.predicts:
        _emit_predict(builder, parts)
    emit_init(builder, parts.state)
    names = [name for name in FUNCTIONS if name != "predict" or objective.predicts]
    if options.split or objective.loss is None:  # validations have no other way to a loss of the model's own
        _emit_evaluate(builder, parts)
        names.append("evaluate")
    flat = flat_layout(parts.state, model.source) if options.split else None
    if flat is not None:
        _emit_split(builder, parts, flat)
        names += [name for name in SPLIT_FUNCTIONS if name not in names]
    module = relax.transform.DeadCodeElimination(names)(builder.get())
    module = narrow(module, options.dtype, options.results, parts.state.masks(options.dtype))
    module = convert_layout(module, options.layout)
    least = batch_norm.least_batch(forward, len(model.inputs))
    target = replace(schema_of(forward.params[len(model.inputs)], "target"), range=objective.target_range())
    prediction = module["predict"].ret_ty if objective.predicts else module["step"].ret_ty.fields[1]
    return StepModule(
        module=module,
        inputs=tuple(replace(whole_schema(schema, accumulate), least=least) for schema in model.inputs),
        target=whole_schema(target, accumulate),
        prediction=schema_of(relax.Var("prediction", prediction), "prediction"),
        state=parts.state.schemas,
        initial_state=parts.state.values,
        options={
            "loss": options.loss,
            **{name: value for name, value in asdict(options.loss_settings).items() if value is not None},
            "optimizer": options.optimizer,
            **optimizer.plain_settings,
            "decayed": options.decayed,
            **{name: getattr(options, name) for name in ("clip_norm", "clip_value", "ema") if getattr(options, name)},
            "dtype": options.dtype,
            "results": options.results,
            "loss_scale": DYNAMIC if options.is_scale_dynamic else options.scale,
            "layout": options.layout,
            "bn": options.bn,
            "dropout": options.dropout_mode,
            "accumulate": accumulate,
            "seed": options.seed,
            **options.normalisation,
            "outputs": dict(model.outputs),
            **_named_results(model),
            "source": model.source,
        },
        gradients=gradient_descriptors(module["step"]),
        flat=flat,
    )


def _named_results(model: Model) -> dict[str, str]:
    """The names that the outputs alone do not tell: of a loss of its own, and of several, whose order JSON loses."""
    if model.target is not None:
        return {"model_target": model.target.name, "predicted": model.predicted}
    return {"predicted": next(iter(model.outputs))} if len(model.outputs) > 1 else {}


def _loss_function(objective: Objective, options: StepOptions, *, drops: bool, counted: bool) -> relax.Function:
    """f(inputs, target, parameters, states, [step], [scale]) -> (scaled loss, loss, predictions, new states...).

    The predictions of a model that returns its loss alone are the loss.
    """
    model, original = objective.model, objective.model.relax_function
    rewrites: dict[str, Rewrite] = {dropout.OP: dropout.identity}
    rewrites[mode.OP] = mode.predicting if options.bn == "frozen" else mode.training
    fresh = fresh_parameters(original)
    inputs, rest = fresh[: len(model.inputs)], fresh[model.leading :]
    states = dict(zip(model.states, rest[len(model.parameters) :], strict=True))
    rewrites |= batch_norm.rewrites(options.bn, {states[name] for name in model.frozen})
    target = objective.target()
    environment = Environment(original.params, objective.arguments(inputs, target, rest))
    counter = [relax.Var(STEP_COUNTER, relax.TensorType((), "int64"))] if counted else []
    if drops:
        rewrites[dropout.OP] = dropout.seeded(options.seed, counter[0])
    factor = [relax.Var("scale", relax.TensorType((), "float32"))] if options.is_scale_dynamic else []
    builder = builder_with_tir(model.module)
    with function_scope(builder, "loss", [*inputs, target, *rest, *counter, *factor]):
        with builder.dataflow():
            result = replay(builder, original, environment, rewrites)
            results, new_states = result.fields[: model.returned], list(result.fields[model.returned :])
            for number, (name, old) in enumerate(states.items()):
                if batch_norm.is_kept_counter(name, options.bn, model.frozen):
                    new_states[number] = old
            value = objective.value(builder, results, target)
            predictions = objective.predictions(results) if objective.predicts else value
            # A share of the mean of the micro-batches' losses: no gradient has to be divided afterwards.
            share = options.scale / options.accumulate
            scaled = builder.emit(relax.op.multiply(value, scalar(share, element_type(value))))
            for each in factor:
                scaled = builder.emit(relax.op.multiply(scaled, relax.op.astype(each, element_type(value))))
            outputs = [builder.emit_output(output) for output in (scaled, value, predictions, *new_states)]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get()["loss"]


def _leading(parts: _Parts) -> list[relax.Var]:
    """New variables for the inputs and the target of all micro-batches."""
    return [whole(param, parts.options.accumulate) for param in parts.forward.params[: len(parts.model.inputs) + 1]]


def _attributes(parts: _Parts) -> dict[str, int] | None:
    return {MICRO_BATCHES: parts.options.accumulate} if parts.options.accumulate > 1 else None


def _emit_gradients(builder: relax.BlockBuilder, parts: _Parts, leading: list[relax.Var], fields: Fields) -> Computed:
    """The loss and its gradients, from the inputs, the target and the fields of the state."""
    model, layout, count = parts.model, parts.state, parts.options.accumulate
    parameters = fields[: layout.parameters]
    statistics: list[relax.Expr] = list(fields[layout.parameters : layout.parameters + layout.statistics])
    wanted = range(len(leading), len(leading) + layout.parameters)
    losses: list[relax.Expr] = []
    predictions: list[relax.Expr] = []
    gradients: list[relax.Expr] = []
    for number in range(count):
        samples = [part(builder, tensor, number, count) for tensor in leading]
        done = [number_of(builder, fields[-1], number, count)] if layout.counted else []
        results, more = emit_with_gradients(
            builder,
            parts.forward,
            [*samples, *parameters, *statistics, *done, *layout.scale(fields)[:1]],
            wanted,
            model.source,
            COMPOSITES,
            model.origins,
        )
        _, own_loss, own_predictions, *statistics = results
        losses.append(own_loss)
        if parts.objective.predicts:
            predictions.append(own_predictions)
        gradients = added(builder, gradients, more)
    loss = mean(builder, losses)
    return Computed(
        loss,
        joined(builder, predictions) if predictions else loss,
        unscaled(builder, gradients, parts.options, layout.scale(fields)),
        statistics,
    )


def _emit_step(builder: relax.BlockBuilder, parts: _Parts) -> None:
    """step(inputs, target, lr, state) -> (loss, predictions, new state)."""
    leading = _leading(parts)

    def computed(fields: Fields) -> Computed:
        return _emit_gradients(builder, parts, leading, fields)

    emit_step(builder, leading, computed, parts.optimizer, parts.state, parts.options, _attributes(parts))


def _emit_split(builder: relax.BlockBuilder, parts: _Parts, flat: FlatLayout) -> None:
    """The functions of the step in two: gradients, apply, evaluate."""
    leading = _leading(parts)

    def computed(fields: Fields) -> Computed:
        return _emit_gradients(builder, parts, leading, fields)

    emit_gradients(builder, leading, computed, parts.state, _attributes(parts))
    emit_apply(builder, flat, parts.optimizer, parts.state, parts.options)


def _emit_evaluate(builder: relax.BlockBuilder, parts: _Parts) -> None:
    """evaluate(inputs, target, state) -> (loss, predictions), as `predict` computes them, with the loss of `step`."""
    model, layout, count, objective = parts.model, parts.state, parts.options.accumulate, parts.objective
    original, leading = model.relax_function, _leading(parts)
    state = relax.Var("state", layout.type)
    with function_scope(builder, "evaluate", [*leading, state]):
        with builder.dataflow():
            fields = layout.fields(builder, state, layout.parameters + layout.statistics)
            losses: list[relax.Expr] = []
            predictions: list[relax.Expr] = []
            for number in range(count):
                *samples, target = (part(builder, tensor, number, count) for tensor in leading)
                environment = Environment(original.params, objective.arguments(samples, target, fields))
                results = replay(builder, original, environment, _INFERENCE).fields
                losses.append(objective.value(builder, results, target))
                found = objective.predictions(results)
                predictions += [] if found is None else [found]
            loss = mean(builder, losses)
            joined_predictions = joined(builder, predictions) if predictions else loss
            output = builder.emit_output(relax.Tuple([loss, joined_predictions]))
        builder.emit_func_output(output)


def _emit_predict(builder: relax.BlockBuilder, parts: _Parts) -> None:
    """predict(inputs, state) -> predictions, with running statistics and without dropout."""
    original, layout, count = parts.model.relax_function, parts.state, parts.options.accumulate
    objective = parts.objective
    inputs = [whole(param, count) for param in original.params[: len(parts.model.inputs)]]
    state = relax.Var("state", layout.type)
    with function_scope(builder, "predict", [*inputs, state]):
        with builder.dataflow():
            fields = layout.fields(builder, state, layout.parameters + layout.statistics)
            predictions = []
            for number in range(count):
                samples = [part(builder, tensor, number, count) for tensor in inputs]
                arguments = objective.without_target(builder, samples, fields)
                results = replay(builder, original, Environment(original.params, arguments), _INFERENCE).fields
                predictions.append(objective.predictions(results))
            output = builder.emit_output(joined(builder, predictions))
        builder.emit_func_output(output)
