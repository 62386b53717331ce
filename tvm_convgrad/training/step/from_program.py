# SPDX-License-Identifier: Apache-2.0
"""The training step of a program that computes its own gradients: the optimizer and the state are added."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.flat import FlatLayout
from tvm_convgrad.training.ir.gradient_ops import gradient_descriptors
from tvm_convgrad.training.ir.graph import Environment, element_type, function_scope, replay
from tvm_convgrad.training.model.model import schema_of
from tvm_convgrad.training.model.program import TrainingProgram
from tvm_convgrad.training.step.layout import convert_layout
from tvm_convgrad.training.step.module import (
    FUNCTIONS,
    SPLIT_FUNCTIONS,
    State,
    StepModule,
    emit_init,
    initial_state,
)
from tvm_convgrad.training.step.optimizers import Optimizer, make_optimizer
from tvm_convgrad.training.step.options import StepOptions
from tvm_convgrad.training.step.precision import narrow
from tvm_convgrad.training.step.split import (
    Computation,
    Computed,
    Fields,
    emit_apply,
    emit_gradients,
    emit_step,
    flat_layout,
)


def step_of_program(program: TrainingProgram, options: StepOptions) -> StepModule:
    """The step: the program's loss and gradients, then the optimizer. Its loss function is the program's own.

    SGD without a learning rate takes the one that the program used.

    Raises:
        UnsupportedError: micro-batches or a loss scale, which come before differentiating, as is done already.
    """
    if options.accumulate != 1:
        raise UnsupportedError(
            f"build_step: accumulate = {options.accumulate}, but {program.source} computes its own gradients; give the "
            "model without them."
        )
    if options.loss_scale is not None:
        raise UnsupportedError(
            f"build_step: loss_scale = {options.loss_scale}, but a loss is scaled before differentiating, and "
            f"{program.source} is differentiated already; leave loss_scale out."
        )
    settings = options.given_settings
    if options.lr is None and options.optimizer == "sgd":
        settings["lr"] = program.rate
    optimizer = make_optimizer(options.optimizer, settings)
    state = initial_state(program, optimizer, optimizer.needs_step, averaged=options.ema is not None)
    builder = relax.BlockBuilder()
    flat = _emit_step(builder, program, options, optimizer, state)
    _emit_predict(builder, program, state)
    emit_init(builder, state)
    names = [*FUNCTIONS, *(SPLIT_FUNCTIONS if options.split else ())]
    module = relax.transform.DeadCodeElimination(names)(builder.get())
    module = narrow(module, options.dtype, options.results, state.masks(options.dtype))
    module = convert_layout(module, options.layout)
    return StepModule(
        module=module,
        inputs=program.inputs,
        target=program.target,
        prediction=schema_of(relax.Var("prediction", module["predict"].ret_ty), "prediction"),
        state=state.schemas,
        initial_state=state.values,
        options={
            "loss": "program",
            "optimizer": optimizer.name,
            **optimizer.plain_settings,
            **({} if options.ema is None else {"ema": options.ema}),
            "dtype": options.dtype,
            "results": options.results,
            "loss_scale": 1.0,
            "layout": options.layout,
            "bn": "program",
            "dropout": "program",
            "seed": options.seed,
            **options.normalisation,
            "source": program.source,
        },
        gradients=gradient_descriptors(module["step"]),
        flat=flat,
    )


def _environment(program: TrainingProgram, given: Mapping[str, relax.Expr]) -> Environment:
    """What each parameter of the function stands for: an argument of the step, or a constant."""
    environment = Environment()
    for param in program.function.params:
        name = str(param.name)
        if name in program.constants:
            environment[param] = relax.const(program.constants[name], element_type(param))
        elif name in given:
            environment[param] = given[name]
    return environment


def _arguments(program: TrainingProgram) -> dict[str, relax.Var]:
    names = {schema.name for schema in program.inputs}
    return {
        str(param.name): relax.Var(str(param.name), param.ty)
        for param in program.function.params
        if str(param.name) in names
    }


def _emit_step(
    builder: relax.BlockBuilder, program: TrainingProgram, options: StepOptions, optimizer: Optimizer, layout: State
) -> FlatLayout | None:
    """The step, and what a split one has besides; gives the layout of its gradients."""
    leading, computation = _computation(builder, program)
    emit_step(builder, leading, computation, optimizer, layout, options)
    if not options.split:
        return None
    flat = flat_layout(layout, program.source)
    leading, computation = _computation(builder, program)
    emit_gradients(builder, leading, computation, layout)
    emit_apply(builder, flat, optimizer, layout, options)
    leading, computation = _computation(builder, program)
    state = relax.Var("state", layout.type)
    with function_scope(builder, "evaluate", [*leading, state]):
        with builder.dataflow():
            found = computation(layout.fields(builder, state, layout.parameters))
            output = builder.emit_output(relax.Tuple([found.loss, found.prediction]))
        builder.emit_func_output(output)
    return flat


def _computation(builder: relax.BlockBuilder, program: TrainingProgram) -> tuple[list[relax.Var], Computation]:
    """New variables for the inputs and the target, and what emits the program of them."""
    inputs = _arguments(program)
    (original,) = [param for param in program.function.params if str(param.name) == program.target_name]
    target = relax.Var("target", original.ty)

    def computation(fields: Fields) -> Computed:
        parameters = dict(zip(program.parameters, fields, strict=False))
        environment = _environment(program, {**inputs, str(original.name): target, **parameters})
        replay(builder, program.function, environment)
        results = (program.loss, program.prediction, *program.gradients)
        loss, prediction, *gradients = map(environment.substitute, results)
        return Computed(loss, prediction, gradients, [])

    return [*inputs.values(), target], computation


def _emit_predict(builder: relax.BlockBuilder, program: TrainingProgram, layout: State) -> None:
    """predict(inputs, state) -> predictions. What only the loss and the gradients need is dropped afterwards."""
    inputs = _arguments(program)
    state = relax.Var("state", layout.type)
    with function_scope(builder, "predict", [*inputs.values(), state]):
        with builder.dataflow():
            fields = layout.fields(builder, state, layout.parameters)
            environment = _environment(program, {**inputs, **dict(zip(program.parameters, fields, strict=True))})
            (original,) = [param for param in program.function.params if str(param.name) == program.target_name]
            shape = relax.ShapeExpr(list(original.ty.shape.values))
            environment[original] = builder.emit(relax.op.zeros(shape, element_type(original)))
            replay(builder, program.function, environment)
            output = builder.emit_output(environment.substitute(program.prediction))
        builder.emit_func_output(output)
