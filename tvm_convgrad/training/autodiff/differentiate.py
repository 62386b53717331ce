# SPDX-License-Identifier: Apache-2.0
"""Reverse-mode differentiation of a straight-line function by the registered gradient rules (FPrimalGradient).

The training step does not use TVM's Gradient pass, because that pass (0.27) fails with a KeyError on any symbolic
extent in an operator's arguments (`reshape(x, [n, 256])`), computes the whole forward function a second time where
extents are symbolic, and computes gradients of inputs that are not used. The rules are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from relax_ops.active import rules
from relax_ops.builder import checked_view
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import Environment, bindings_of, element_type, is_call, operator_name, static_shape

NO_GRAD = "relax.grad.no_grad"
RULE = "FPrimalGradient"


@dataclass(frozen=True)
class Composite:
    """An operator that is written out as others, with a gradient of its own that is cheaper than theirs.

    `forward(builder, call)` gives the results as a literal tuple, and what `backward(builder, saved, grad)` needs to
    give a partial for each argument from the gradient of the first result. No gradient passes the others, such as new
    running statistics that the model reads: PyTorch, too, updates these without gradients.
    """

    forward: Callable[[Any, Any], tuple[Any, Any]]
    backward: Callable[[Any, Any, Any], list[Any]]


@rules()
def emit_with_gradients(
    builder: relax.BlockBuilder,
    function: relax.Function,
    arguments: Sequence[relax.Expr],
    wanted: Sequence[int],
    source: str,
    composites: Mapping[str, Composite] | None = None,
    origins: Mapping[str, str] | None = None,
) -> tuple[list[relax.Expr], list[relax.Expr]]:
    """Emit a function and the gradients of its first result into the builder's open dataflow block.

    Args:
        function: a Relax function that returns a tuple, a floating-point scalar first.
        arguments: what its parameters stand for.
        wanted: positions of the parameters to differentiate with respect to; one that the first result does not
            depend on gets zeros.
        source: how messages call the model.
        composites: operators to write out, by name.
        origins: for messages, what in the user's file an operator was made of, by its name.

    Returns:
        The results of the function, and the gradients, as expressions.

    Raises:
        ModelError: operators on the way have no gradient rule (all of them are named, with counts), or a rule fails.
    """
    parameters = [function.params[position] for position in wanted]
    target = function.body.body.fields[0]
    trace = _trace_of(function)
    dependent = _dependents(trace, parameters)
    _refuse_missing_rules(_reached(trace, dependent, target), source, origins or {})

    environment = Environment()
    for param, argument in zip(function.params, arguments, strict=True):
        environment[param] = argument
    table = composites or {}
    saved = _emit_forward(builder, function, environment, table)
    results = [environment.substitute(field) for field in function.body.body.fields]

    adjoints = _Adjoints(builder, dependent)
    adjoints.add(target, relax.op.ones(relax.ShapeExpr([]), element_type(target)))
    for binding in reversed(trace):
        if binding.var not in dependent or not adjoints.known(binding.var):
            continue
        if binding.var in saved:
            gradient = adjoints.field(binding.var, 0)
            if gradient is not None:
                backward = table[operator_name(binding.value)].backward
                adjoints.add_all(binding.value.args, backward(builder, saved[binding.var], gradient))
        else:
            _propagate(builder, binding, environment, adjoints, source, origins or {})
    gradients = []
    for parameter in parameters:
        gradient = adjoints.value(parameter)
        if gradient is None:
            shape = relax.ShapeExpr(list(static_shape(parameter)))
            gradient = builder.emit(relax.op.zeros(shape, element_type(parameter)))
        gradients.append(gradient)
    return results, gradients


def without_gradient(function: relax.Function, wanted: Sequence[int]) -> frozenset[int]:
    """Which of the parameters at the positions `wanted` get no gradient, as numbers from 0.

    The first result reads them only behind `no_grad`, or not at all.
    """
    parameters = [function.params[position] for position in wanted]
    trace = _trace_of(function)
    needed = _needed(trace, _dependents(trace, parameters), function.body.body.fields[0])
    return frozenset(number for number, parameter in enumerate(parameters) if parameter not in needed)


def _operands(value: relax.Expr) -> list[relax.Var]:
    """The variables that an expression in A-normal form reads as tensors or tuples."""
    if isinstance(value, relax.Var):
        return [value]
    if isinstance(value, tvm.ir.Call):
        return [variable for argument in value.args for variable in _operands(argument)]
    if isinstance(value, relax.Tuple):
        return [variable for field in value.fields for variable in _operands(field)]
    return _operands(value.tuple_value) if isinstance(value, relax.TupleGetItem) else []


def _trace_of(function: relax.Function) -> list[relax.Binding]:
    """The bindings that compute something, or that gradients pass through."""
    return [b for b in bindings_of(function) if not isinstance(b, relax.MatchCast) or _casts_tensor(b)]


def _casts_tensor(binding: relax.Binding) -> bool:
    """Whether this is a match_cast of a tensor, through which the gradient passes as it is."""
    return isinstance(binding, relax.MatchCast) and isinstance(binding.ty, relax.TensorType)


def _dependents(trace: list[relax.Binding], parameters: list[relax.Var]) -> set[relax.Var]:
    """The parameters and all variables that depend on them other than through `no_grad`."""
    dependent = set(parameters)
    for binding in trace:
        if not is_call(binding.value, NO_GRAD) and any(operand in dependent for operand in _operands(binding.value)):
            dependent.add(binding.var)
    return dependent


def _needed(trace: list[relax.Binding], dependent: set[relax.Var], target: relax.Expr) -> set[relax.Expr]:
    """The target, and the variables through which it depends on the parameters."""
    needed = {target}
    for binding in reversed(trace):
        if binding.var in needed and binding.var in dependent:
            needed.update(_operands(binding.value))
    return needed


def _reached(trace: list[relax.Binding], dependent: set[relax.Var], target: relax.Expr) -> list[relax.Call]:
    """The calls between parameters and target, the last one first."""
    needed = _needed(trace, dependent, target) & dependent
    return [b.value for b in reversed(trace) if b.var in needed and isinstance(b.value, tvm.ir.Call)]


def _refuse_missing_rules(calls: list[relax.Call], source: str, origins: Mapping[str, str]) -> None:
    missing = Counter(
        operator_name(call) for call in calls if not isinstance(call.op, tvm.ir.Op) or call.op.get_attr(RULE) is None
    )
    if missing:
        listed = ", ".join(f"{name} ({count}x{_origin(origins, name)})" for name, count in sorted(missing.items()))
        raise ModelError(f"{source} uses operators that have no gradient: {listed}; replace them in the model.")


def _origin(origins: Mapping[str, str], name: str) -> str:
    """`: ScatterND 'node_3', net.py:7: y[:, 0] = 1`, or "" where the model's file does not say."""
    return f": {origins[name]}" if name in origins else ""


def _emit_forward(
    builder: relax.BlockBuilder, function: relax.Function, environment: Environment, composites: Mapping[str, Composite]
) -> dict[Any, Any]:
    """Emit the function; gives what its composites saved, by the variables that they are bound to."""
    saved: dict[Any, Any] = {}
    for binding in bindings_of(function):
        value = environment.substitute(binding.value)
        if _casts_tensor(binding):
            environment[binding.var] = checked_view(builder, value, static_shape(binding.var))
        elif isinstance(binding, relax.MatchCast):
            environment[binding.var] = builder.match_cast(value, binding.ty)
        elif is_call(value, NO_GRAD):
            environment[binding.var] = value.args[0]
        elif isinstance(value, tvm.ir.Call) and operator_name(value) in composites:
            composite = composites[operator_name(value)]
            environment[binding.var], saved[binding.var] = composite.forward(builder, value)
        elif isinstance(value, (tvm.ir.Call, relax.TupleGetItem)):
            environment[binding.var] = builder.emit(value, binding.var.name)
        else:
            environment[binding.var] = value
    return saved


def _propagate(
    builder: relax.BlockBuilder,
    binding: relax.Binding,
    environment: Environment,
    adjoints: _Adjoints,
    source: str,
    origins: Mapping[str, str],
) -> None:
    """Add to the adjoints of what one binding reads, given the adjoint of what it binds."""
    value = binding.value
    if isinstance(value, tvm.ir.Call):
        emitted = environment[binding.var]
        call = builder.lookup_binding(emitted)
        rule = value.op.get_attr(RULE)
        try:
            partials = rule(emitted, call, adjoints.value(binding.var), builder)
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            name = operator_name(value)
            where = f" ({origins[name]})" if name in origins else ""
            raise ModelError(f"{source}: the gradient of {name}{where} fails: {reason}") from error
        adjoints.add_all(value.args, partials)
    else:
        adjoints.add(value, adjoints.value(binding.var))


class _Adjoints:
    """The sums of partial gradients that have arrived so far, field by field for tuples."""

    def __init__(self, builder: relax.BlockBuilder, dependent: set[relax.Var]) -> None:
        self._builder = builder
        self._dependent = dependent
        self._sums: dict[Any, Any] = {}
        self._fields: dict[Any, dict[int, Any]] = {}

    def known(self, variable: relax.Var) -> bool:
        """Whether any gradient has arrived."""
        return variable in self._sums or variable in self._fields

    def value(self, variable: relax.Var) -> relax.Expr | None:
        """The sum, None if nothing has arrived; fields of a tuple to which nothing came are zeros."""
        if variable not in self._fields:
            return self._sums.get(variable)
        fields = []
        for index, type_ in enumerate(variable.ty.fields):
            field = self._fields[variable].get(index)
            if field is None:
                field = self._builder.emit(relax.op.zeros(type_.shape, str(type_.dtype)))
            fields.append(field)
        return self._builder.emit(relax.Tuple(fields))

    def field(self, variable: relax.Var, index: int) -> relax.Expr | None:
        """The sum for one field of a tuple, None if nothing has arrived there."""
        return self._fields.get(variable, {}).get(index)

    def add_all(self, operands: Sequence[relax.Expr], partials: Sequence[relax.Expr]) -> None:
        """Add a partial to each operand, but none where it is `no_grad`."""
        for operand, partial in zip(operands, partials, strict=True):
            if not is_call(partial, NO_GRAD):
                self.add(operand, partial)

    def add(self, operand: relax.Expr, partial: relax.Expr) -> None:
        """Add a partial gradient to an operand: a variable, a tuple of them, or a field of a tuple variable.

        Operands that no parameter flows into are passed over, so that their partials are never emitted.
        """
        if not any(variable in self._dependent for variable in _operands(operand)):
            return
        if isinstance(operand, relax.Tuple):
            bound = self._builder.emit(partial)
            for index, field in enumerate(operand.fields):
                self.add(field, relax.TupleGetItem(bound, index))
        elif isinstance(operand, relax.TupleGetItem):
            fields = self._fields.setdefault(operand.tuple_value, {})
            fields[operand.index] = self._sum(fields.get(operand.index), partial)
        elif isinstance(operand.ty, relax.TupleType):
            bound = self._builder.emit(partial)
            for index in range(len(operand.ty.fields)):
                self.add(relax.TupleGetItem(operand, index), relax.TupleGetItem(bound, index))
        else:
            self._sums[operand] = self._sum(self._sums.get(operand), partial)

    def _sum(self, before: relax.Expr | None, partial: relax.Expr) -> relax.Expr:
        bound = self._builder.emit(partial)
        return bound if before is None else self._builder.emit(relax.op.add(before, bound))
