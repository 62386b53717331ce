# SPDX-License-Identifier: Apache-2.0
"""Programs that compute their own gradients: what is recognised in a Relax function that returns (loss, gradients…).

Gradient graphs (Relay's first_order) return the gradients of some parameters, in the parameters' order. Steps of SGD
return new parameters, each parameter - constant · gradient; the constant becomes the default learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relax_ops.compat import Constant, array_of
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name, static_shape
from tvm_convgrad.training.model.index_ranges import index_ranges
from tvm_convgrad.training.model.model import FLOATS, Array, TensorSchema, schema_of

_STATISTICS = ("moving_mean", "moving_var", "running_mean", "running_var", "moving_variance", "running_variance")
TARGETS = ("label", "labels", "target", "targets", "y")
_LOSS = "relax.nn.cross_entropy_with_logits"


@dataclass(frozen=True)
class TrainingProgram:
    """A Relax function that computes a loss and its gradients.

    Attributes:
        function: takes everything in any order; its body is straight-line code.
        inputs, target: schemas of the data and of what the loss compares with.
        target_name: what the function calls the latter.
        parameters: initial values of what is trained, by name, in the order of `gradients`.
        constants: values of the other parameters.
        loss, prediction: variables of the function's body.
        gradients: a variable for each parameter.
        rate: the learning rate that the program itself used, or None.
    """

    function: Any
    inputs: tuple[TensorSchema, ...]
    target: TensorSchema
    target_name: str
    parameters: dict[str, Array]
    constants: dict[str, Array]
    loss: Any
    prediction: Any
    gradients: tuple[Any, ...]
    rate: float | None
    source: str

    @property
    def states(self) -> dict[str, Array]:
        """None: running statistics do not change in such programs."""
        return {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """None: such programs are read as they are."""
        return ()


def recognise(module: tvm.IRModule, parameters: Mapping[str, Array], source: str) -> TrainingProgram | None:
    """The training program in `main`, or None if it returns no loss with gradients behind it.

    Parameters without a value are inputs and the target; the target is what the loss compares with.

    Raises:
        ModelError: it is a training program, but its results are not recognised.
    """
    function = module["main"]
    definitions = {
        binding.var: binding.value for binding in bindings_of(function) if isinstance(binding, relax.VarBinding)
    }
    results = _flat(function.body.body, definitions)
    if len(results) < 2 or not _is_loss(results[0]):
        return None
    loss, outputs = results[0], results[1:]
    data = [param for param in function.params if str(param.name) not in parameters]
    target, prediction = _target(loss, data, definitions, source)
    inputs = [param for param in data if str(param.name) != str(target.name)]
    weights = [param for param in function.params if str(param.name) in parameters]
    updated = [_update(output, definitions) for output in outputs]
    rate: float | None = None
    if all(found is not None and found[0] in weights for found in updated):
        trained = [found[0] for found in updated if found is not None]
        gradients = [found[1] for found in updated if found is not None]
        rates = {found[2] for found in updated if found is not None}
        if len(rates) != 1:
            raise ModelError(f"{source} updates its parameters with several rates, {sorted(rates)}; export gradients.")
        rate = rates.pop()
    else:
        trained, gradients = _pairs(outputs, function.params, weights, inputs, target, source)
    ranges = index_ranges(function, [*inputs, target])
    return TrainingProgram(
        function=function,
        inputs=tuple(replace(schema_of(param), range=ranges.get(param)) for param in inputs),
        target=replace(schema_of(target, "target"), range=ranges.get(target)),
        target_name=str(target.name),
        parameters={str(param.name): np.array(parameters[str(param.name)], order="C") for param in trained},
        constants={str(param.name): parameters[str(param.name)] for param in weights if param not in trained},
        loss=loss,
        prediction=prediction,
        gradients=tuple(gradients),
        rate=rate,
        source=source,
    )


def _flat(result: relax.Expr, definitions: Mapping[relax.Var, relax.Expr]) -> list[relax.Expr]:
    """The results as variables, nested tuples spread."""
    made = definitions.get(result) if isinstance(result, relax.Var) else result
    if isinstance(made, relax.Tuple):
        return [item for field in made.fields for item in _flat(field, definitions)]
    if isinstance(made, relax.Var):
        return _flat(made, definitions)
    return [result]


def _is_loss(value: relax.Expr) -> bool:
    return isinstance(value.ty, relax.TensorType) and not static_shape(value) and element_type(value) in FLOATS


def _call(value: relax.Expr, definitions: Mapping[relax.Var, relax.Expr]) -> relax.Call | None:
    made = definitions.get(value) if isinstance(value, relax.Var) else None
    return made if isinstance(made, tvm.ir.Call) else None


def _target(
    loss: relax.Expr, data: Sequence[relax.Var], definitions: Mapping[relax.Var, relax.Expr], source: str
) -> tuple[relax.Var, relax.Expr]:
    """The parameter that the loss compares with, and what it compares: the operands of the call nearest to the loss."""
    seen: set[Any] = set()
    queue = [loss]
    while queue:
        value = queue.pop(0)
        call = _call(value, definitions)
        if value in seen or call is None:
            continue
        seen.add(value)
        operands = [arg for arg in call.args if isinstance(arg, relax.Var) and isinstance(arg.ty, relax.TensorType)]
        given = [arg for arg in operands if arg in data]
        others = [arg for arg in operands if arg not in data]
        named = [arg for arg in given if str(arg.name).lower() in TARGETS or operator_name(call) == _LOSS]
        if len(operands) == 2 and named and others and same_shape(named[-1], others[0]):
            return named[-1], others[0]
        queue += operands
    names = ", ".join(str(param.name) for param in data) or "none"
    raise ModelError(
        f"{source} returns a loss and gradients, but its target is not to be seen: no parameter without a value "
        f"({names}) is compared with a prediction. Give the weights' values (--params), and call the target label."
    )


def same_shape(first: relax.Expr, second: relax.Expr) -> bool:
    """Whether two tensors have the same rank and known extents."""
    a, b = static_shape(first), static_shape(second)
    return len(a) == len(b) and all(
        x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int)
    )


def _update(
    output: relax.Expr, definitions: Mapping[relax.Var, relax.Expr]
) -> tuple[relax.Var, relax.Var, float] | None:
    """(parameter, gradient, rate) of parameter - rate · gradient, or None."""
    call = _call(output, definitions)
    if call is None or operator_name(call) != "relax.subtract" or not isinstance(call.args[0], relax.Var):
        return None
    product = _call(call.args[1], definitions)
    if call.args[0] in definitions or product is None or operator_name(product) != "relax.multiply":
        return None
    for factor, gradient in (product.args, reversed(list(product.args))):
        if isinstance(factor, Constant) and array_of(factor).size == 1 and isinstance(gradient, relax.Var):
            return call.args[0], gradient, float(array_of(factor).item())
    return None


def _pairs(
    outputs: list[relax.Expr],
    params: Sequence[relax.Var],
    weights: list[relax.Var],
    inputs: list[relax.Var],
    target: relax.Var,
    source: str,
) -> tuple[list[relax.Var], list[relax.Expr]]:
    """Which output is whose gradient: gradients come in the order of the parameters, and some have none."""
    moving = {param for param in weights if str(param.name).lower().endswith(_STATISTICS)}
    without: list[set[Any]] = [set(), {target}, moving, {target} | moving]
    without += [absent | set(inputs) for absent in without]
    for absent in without:
        owners = [param for param in params if param not in absent]
        if len(owners) == len(outputs) and all(
            static_shape(owner) == static_shape(output) and element_type(owner) == element_type(output)
            for owner, output in zip(owners, outputs, strict=True)
        ):
            pairs = [(o, g) for o, g in zip(owners, outputs, strict=True) if o in weights and o not in moving]
            if pairs:
                return [owner for owner, _ in pairs], [gradient for _, gradient in pairs]
    raise ModelError(
        f"{source} returns a loss and {len(outputs)} tensors that are the gradients of no evident selection of its "
        f"{len(params)} parameters, {len(weights)} of which have values; give the parameters (--params), and return "
        "gradients in the order of the parameters."
    )
