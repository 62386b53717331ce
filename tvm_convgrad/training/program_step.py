# SPDX-License-Identifier: Apache-2.0
"""A training step from a program that computes its own gradients: the optimizer and the state are added."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.training import precision
from tvm_convgrad.training.gradient_ops import gradient_descriptors
from tvm_convgrad.training.graph import Environment, element_type, function_scope, replay
from tvm_convgrad.training.layout import convert_layout
from tvm_convgrad.training.model import schema_of
from tvm_convgrad.training.optimizers import Optimizer
from tvm_convgrad.training.program import TrainingProgram
from tvm_convgrad.training.step import FUNCTIONS, StepModule, emit_init, state_of


def step_of_program(
    program: TrainingProgram,
    optimizer: Optimizer,
    *,
    dtype: str,
    results: str,
    loss_scale: float | None,
    layout: str,
    seed: int,
) -> StepModule:
    """The step: the program's loss and gradients, then the optimizer. Its loss function is the program's own.

    Raises:
        UnsupportedError: a loss scale, which a program that is already differentiated cannot take.
    """
    if loss_scale is not None:
        raise UnsupportedError("the loss is scaled before differentiating, and this program is differentiated already")
    counted = optimizer.needs_step
    state = state_of(program, optimizer, counted)
    builder = relax.BlockBuilder()
    state_type = relax.TupleType([relax.TensorType(schema.shape, schema.dtype) for schema, _ in state])
    _emit_step(builder, program, optimizer, counted, state_type, len(state))
    _emit_predict(builder, program, state_type)
    emit_init(builder, state)
    module = relax.transform.DeadCodeElimination(list(FUNCTIONS))(builder.get())
    module = convert_layout(precision.narrow(module, dtype, results), layout)
    return StepModule(
        module=module,
        inputs=program.inputs,
        target=program.target,
        prediction=schema_of(relax.Var("prediction", module["predict"].ret_ty), "prediction"),
        state=tuple(schema for schema, _ in state),
        initial_state=[value for _, value in state],
        options={
            "loss": "program",
            "optimizer": optimizer.name,
            **{key: list(value) if isinstance(value, tuple) else value for key, value in optimizer.settings.items()},
            "dtype": dtype,
            "results": results,
            "loss_scale": 1.0,
            "layout": layout,
            "bn": "program",
            "dropout": "program",
            "seed": seed,
            "source": program.source,
        },
        gradients=gradient_descriptors(module["step"]),
    )


def _environment(program: TrainingProgram, given: dict[str, Any]) -> Environment:
    """What each parameter of the function stands for: an argument of the step, or a constant."""
    environment = Environment()
    for param in program.function.params:
        name = str(param.name)
        if name in program.constants:
            environment[param] = relax.const(program.constants[name], element_type(param))
        elif name in given:
            environment[param] = given[name]
    return environment


def _arguments(program: TrainingProgram) -> dict[str, Any]:
    names = {schema.name for schema in program.inputs}
    return {
        str(param.name): relax.Var(str(param.name), param.ty)
        for param in program.function.params
        if str(param.name) in names
    }


def _emit_step(
    builder: Any, program: TrainingProgram, optimizer: Optimizer, counted: bool, state_type: Any, slots_end: int
) -> None:
    """step(inputs, target, lr, state) -> (loss, predictions, new state)."""
    inputs = _arguments(program)
    (original,) = [param for param in program.function.params if str(param.name) == program.target_name]
    target = relax.Var("target", original.ty)
    rate = relax.Var("lr", relax.TensorType((), "float32"))
    state = relax.Var("state", state_type)
    with function_scope(builder, "step", [*inputs.values(), target, rate, state]):
        with builder.dataflow():
            items = [builder.emit(relax.TupleGetItem(state, index)) for index in range(slots_end)]
            count = len(program.parameters)
            parameters = dict(zip(program.parameters, items, strict=False))
            environment = _environment(program, {**inputs, str(original.name): target, **parameters})
            replay(builder, program.function, environment)
            step = next_step = None
            if counted:
                next_step = builder.emit(relax.op.add(items[-1], relax.const(1, "int64")))
                step = builder.emit(relax.op.astype(next_step, "float64"))
            slots, each = items[count : len(items) - counted], len(optimizer.slots)
            updated, kept = [], []
            for index, (parameter, gradient) in enumerate(zip(items[:count], program.gradients, strict=True)):
                dtype = element_type(parameter)
                own_rate = rate if dtype == "float32" else builder.emit(relax.op.astype(rate, dtype))
                found = environment.substitute(gradient)
                mine = slots[index * each : (index + 1) * each]
                value, left = optimizer.update(builder, parameter, found, mine, own_rate, step)
                updated.append(value)
                kept += left
            loss, prediction = environment.substitute(program.loss), environment.substitute(program.prediction)
            new_state = relax.Tuple([*updated, *kept, *([next_step] if counted else [])])
            output = builder.emit_output(relax.Tuple([loss, prediction, new_state]))
        builder.emit_func_output(output)


def _emit_predict(builder: Any, program: TrainingProgram, state_type: Any) -> None:
    """predict(inputs, state) -> predictions. What only the loss and the gradients need is dropped afterwards."""
    inputs = _arguments(program)
    state = relax.Var("state", state_type)
    with function_scope(builder, "predict", [*inputs.values(), state]):
        with builder.dataflow():
            items = [builder.emit(relax.TupleGetItem(state, i)) for i in range(len(program.parameters))]
            environment = _environment(program, {**inputs, **dict(zip(program.parameters, items, strict=True))})
            (original,) = [param for param in program.function.params if str(param.name) == program.target_name]
            shape = relax.ShapeExpr(list(original.ty.shape.values))
            environment[original] = builder.emit(relax.op.zeros(shape, element_type(original)))
            replay(builder, program.function, environment)
            output = builder.emit_output(environment.substitute(program.prediction))
        builder.emit_func_output(output)
