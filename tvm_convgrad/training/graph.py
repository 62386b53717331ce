# SPDX-License-Identifier: Apache-2.0
"""Replaying a straight-line Relax function into a block builder, with substitutions and per-operator rewrites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import relax

from relax_ops.compat import Constant
from tvm_convgrad.errors import ModelError

Rewrite = Callable[[Any, Any, "Environment"], Any]
"""rewrite(builder, call with its arguments already substituted, environment) -> expression, or None for "as it is"."""


class Environment:
    """What each variable of the replayed function stands for in the new one."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def __setitem__(self, var: Any, value: Any) -> None:
        self._values[var] = value

    def __getitem__(self, var: Any) -> Any:
        return self._values.get(var, var)

    def __contains__(self, var: Any) -> bool:
        return var in self._values

    def substitute(self, expr: Any) -> Any:
        """`expr` (in A-normal form) with each variable replaced by what it stands for."""
        if isinstance(expr, relax.Var):
            return self[expr]
        if isinstance(expr, tvm.ir.Call):
            arguments = [self.substitute(argument) for argument in expr.args]
            return relax.Call(expr.op, arguments, expr.attrs, list(expr.ty_args))
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.substitute(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            source = self.substitute(expr.tuple_value)
            if isinstance(source, relax.Tuple):
                return source.fields[expr.index]
            return relax.TupleGetItem(source, expr.index)
        if isinstance(expr, (relax.If, relax.Function, relax.SeqExpr)):
            raise ModelError(
                f"The model contains an expression of type {type(expr).__name__}; a training step is built from "
                "straight-line code, so replace control flow and nested functions by operators."
            )
        return expr


@contextmanager
def function_scope(
    builder: Any, name: str, params: list[Any], attributes: dict[str, Any] | None = None
) -> Iterator[None]:
    """`builder.function(...)` that leaves no open block behind an error, of which TVM would warn on stderr."""
    with builder.function(name, params, attributes):
        try:
            yield
        except BaseException:
            builder._end_block()
            raise


def bindings_of(function: Any) -> Iterator[Any]:
    """Every binding of a straight-line function, in order, over all its blocks."""
    for block in function.body.blocks:
        yield from block.bindings


def calls_of(function: Any, name: str | None = None) -> Iterator[Any]:
    """Every call of a straight-line function, in order, or only those of the operator `name`."""
    for binding in bindings_of(function):
        value = getattr(binding, "value", None)
        if isinstance(value, tvm.ir.Call) and (name is None or operator_name(value) == name):
            yield value


def operator_name(call: Any) -> str:
    """The registered name of a call's operator, or a description of what is called instead."""
    operator = call.op
    return str(operator.name) if isinstance(operator, tvm.ir.Op) else f"call of {type(operator).__name__}"


def is_call(value: Any, name: str) -> bool:
    """Whether the value is a call of the operator of this name."""
    return isinstance(value, tvm.ir.Call) and operator_name(value) == name


def operator_counts(function: Any) -> Counter[str]:
    """How many calls of each operator the function makes."""
    return Counter(operator_name(call) for call in calls_of(function))


def replay(
    builder: Any,
    function: Any,
    environment: Environment,
    rewrites: Mapping[str, Rewrite] | None = None,
) -> Any:
    """Emit the body of `function` into the builder's open dataflow block and return its result expression.

    `environment` must hold a value for each parameter; it is left holding one for each variable. Literal tuples
    are not bound but substituted, so that `TupleGetItem` of one finds its field.

    Raises:
        ModelError: the body holds control flow or nested functions.
    """
    table = rewrites or {}
    for binding in bindings_of(function):
        if isinstance(binding, relax.MatchCast):
            value = environment.substitute(binding.value)
            value = builder.emit(value) if isinstance(value, tvm.ir.Call) else value
            environment[binding.var] = builder.match_cast(value, binding.ty)
            continue
        value = environment.substitute(binding.value)
        if isinstance(value, tvm.ir.Call):
            rewrite = table.get(operator_name(value))
            if rewrite is not None:
                replacement = rewrite(builder, value, environment)
                value = value if replacement is None else replacement
        trivial = isinstance(value, (relax.Var, relax.Tuple, relax.ShapeExpr, Constant))
        environment[binding.var] = value if trivial else builder.emit(value, binding.var.name)
    return environment.substitute(function.body.body)


def static_shape(expr: Any) -> tuple[Any, ...]:
    """The extents of a tensor expression: ints where constant, symbolic expressions elsewhere.

    Raises:
        ModelError: the rank is unknown.
    """
    shape = expr.ty.shape
    if shape is None or not hasattr(shape, "values"):
        raise ModelError(
            f"A tensor of the model has the type {expr.ty}, whose extents are unknown; give the inputs a known "
            "rank and extents (only the batch may be symbolic)."
        )
    return tuple(int(extent) if isinstance(extent, tvm.tirx.IntImm) else extent for extent in shape.values)


def element_type(expr: Any) -> str:
    """The dtype of a tensor expression as a string, such as "float32"."""
    dtype = expr.ty.dtype
    return str(getattr(dtype, "dtype", dtype))


def builder_with_tir(module: Any) -> Any:
    """A block builder that already holds the module's TIR functions, so that call_tir keeps working."""
    builder = relax.BlockBuilder()
    for variable in module.get_global_vars():
        if isinstance(module[variable], tvm.tirx.PrimFunc):
            builder.add_func(module[variable], variable.name_hint)
    return builder
