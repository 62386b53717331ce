# SPDX-License-Identifier: Apache-2.0
"""Running TVM's Gradient pass on a loss function, after naming every operator that has no gradient."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.errors import ModelError
from tvm_convgrad.training.graph import Environment, bindings_of, builder_with_tir, calls_of, operator_name, replay

_NO_GRADIENT_NEEDED = ("relax.grad.no_grad", "relax.shape_of", "relax.shape_to_tensor", "relax.one_hot")


def differentiate(module: Any, *, parameters: slice, source: str) -> Adjoint:
    """The adjoint of function `loss` of `module`, whose first result is differentiated.

    Args:
        parameters: which arguments to differentiate with respect to; one that the loss does not depend on gets zeros.
        source: how messages call the model.

    Raises:
        ModelError: operators between parameters and loss have no gradient; all of them are named with counts.
    """
    missing = _without_gradient(module["loss"], list(module["loss"].params[parameters]))
    if missing:
        listed = ", ".join(f"{name} ({count}x)" for name, count in sorted(missing.items()))
        raise ModelError(f"{source} uses operators that have no gradient: {listed}; replace them in the model.")
    arguments = len(module["loss"].params)
    module, shapes = _shapes_as_parameters(module)
    wanted = list(module["loss"].params[parameters])
    module = relax.transform.Gradient("loss", require_grads=wanted, target_index=0)(module)
    return Adjoint(module["loss_adjoint"], arguments, shapes)


@dataclass(frozen=True)
class Adjoint:
    """f(arguments, shapes) -> ((results...), (gradients...)): the Relax function and the shapes that it ends with."""

    function: Any
    arguments: int
    shapes: list[Any]

    @property
    def params(self) -> list[Any]:
        """The parameters without the shapes: those of the function that was differentiated."""
        return list(self.function.params[: self.arguments])

    def emit(self, builder: Any, arguments: list[Any]) -> tuple[list[Any], list[Any]]:
        """Emit the body into the builder's dataflow block; gives the results and the gradients."""
        environment = Environment()
        for param, value in zip(self.function.params, [*arguments, *self.shapes], strict=True):
            environment[param] = value
        results, gradients = replay(builder, self.function, environment).fields
        return list(results.fields), list(gradients.fields)


def _shapes_as_parameters(module: Any) -> tuple[Any, list[Any]]:
    """The module with each symbolic shape in `loss` as a further parameter, and these shapes.

    TVM 0.27's Gradient pass fails with a KeyError on every symbolic extent within the arguments of an operator,
    such as that of `reshape(x, [n, 256])`; a variable of shape type it takes.
    """
    function = module["loss"]
    symbolic: dict[str, tuple[Any, Any]] = {}
    for call in calls_of(function):
        for argument in call.args:
            if isinstance(argument, relax.ShapeExpr) and _is_symbolic(argument):
                variable = relax.Var(f"shape{len(symbolic)}", relax.ShapeType(list(argument.values)))
                symbolic.setdefault(str(argument), (argument, variable))
    if not symbolic:
        return module, []
    environment = Environment()
    fresh = [relax.Var(str(param.name), param.ty) for param in function.params]
    for param, var in zip(function.params, fresh, strict=True):
        environment[param] = var

    def by_variable(argument: Any) -> Any:
        if isinstance(argument, relax.ShapeExpr) and _is_symbolic(argument):
            return symbolic[str(argument)][1]
        return argument

    def rewrite(_builder: Any, call: Any, _environment: Environment) -> Any:
        return relax.Call(call.op, [by_variable(argument) for argument in call.args], call.attrs, list(call.ty_args))

    builder = builder_with_tir(module)
    operators = {operator_name(call) for call in calls_of(function)}
    with builder.function("loss", [*fresh, *(variable for _, variable in symbolic.values())]):
        with builder.dataflow():
            result = replay(builder, function, environment, dict.fromkeys(operators, rewrite))
            outputs = [builder.emit_output(field) for field in result.fields]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get(), [shape for shape, _ in symbolic.values()]


def _is_symbolic(shape: Any) -> bool:
    return not all(isinstance(extent, tvm.tirx.IntImm) for extent in shape.values)


def _without_gradient(function: Any, parameters: list[Any]) -> Counter[str]:
    """Operators on a path from a parameter to the loss for which TVM knows no gradient, counted."""
    dependent = set(parameters)
    producers: dict[Any, Any] = {}
    for binding in bindings_of(function):
        value = binding.value
        if any(variable in dependent for variable in _variables(value)) and not _stops(value):
            dependent.add(binding.var)
            producers[binding.var] = value
    missing: Counter[str] = Counter()
    reached: set[Any] = set()
    open_ends = [function.body.body.fields[0]]
    while open_ends:
        variable = open_ends.pop()
        if variable in reached or variable not in producers:
            continue
        reached.add(variable)
        value = producers[variable]
        if isinstance(value, tvm.ir.Call) and not _has_gradient(value):
            missing[operator_name(value)] += 1
        open_ends += [operand for operand in _variables(value) if operand in dependent]
    return missing


def _variables(value: Any) -> list[Any]:
    """The variables that an expression in A-normal form reads."""
    return list(relax.analysis.free_vars(value))


def _stops(value: Any) -> bool:
    """Whether no gradient flows through the expression."""
    return isinstance(value, tvm.ir.Call) and operator_name(value) in _NO_GRADIENT_NEEDED


def _has_gradient(call: Any) -> bool:
    return isinstance(call.op, tvm.ir.Op) and call.op.get_attr("FPrimalGradient") is not None
