# SPDX-License-Identifier: Apache-2.0
"""Replaying a straight-line Relax function into a block builder, with substitutions and per-operator rewrites."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

from relax_ops.compat import Constant
from relax_ops.ir import constant_shape, dtype_of
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ModelError

Extent: TypeAlias = int | relax.Expr
"""A number, or a symbolic expression."""
Shape: TypeAlias = tuple[Extent, ...]

Rewrite = Callable[[Any, Any, "Environment"], Any]
"""rewrite(builder, call with its arguments already substituted, environment) -> expression, or None for "as it is"."""


class Environment:
    """What each variable of the replayed function stands for in the new one.

    It begins with the values of some variables, such as the parameters, or of constants, told apart by identity.
    """

    def __init__(self, variables: Sequence[relax.Var] = (), values: Sequence[relax.Expr] = ()) -> None:
        self._values: dict[relax.Var, relax.Expr] = dict(zip(variables, values, strict=True))

    def __setitem__(self, var: relax.Var, value: relax.Expr) -> None:
        self._values[var] = value

    def __getitem__(self, var: relax.Var) -> relax.Expr:
        return self._values.get(var, var)

    def __contains__(self, var: relax.Var) -> bool:
        return var in self._values

    def substitute(self, expr: relax.Expr) -> relax.Expr:
        """`expr` (in A-normal form) with each variable replaced by what it stands for."""
        if isinstance(expr, (relax.Var, Constant)):
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


def fresh_parameters(function: relax.Function) -> list[relax.Var]:
    """New variables of the names and types of a function's parameters."""
    return [relax.Var(str(param.name), param.ty) for param in function.params]


@contextmanager
def function_scope(
    builder: relax.BlockBuilder, name: str, params: list[relax.Var], attributes: dict[str, Any] | None = None
) -> Iterator[None]:
    """`builder.function(...)` that leaves no open block behind an error, of which TVM would warn on stderr."""
    with builder.function(name, params, attributes):
        try:
            yield
        except BaseException:
            builder._end_block()
            raise


def bindings_of(function: relax.Function) -> Iterator[relax.Binding]:
    """Every binding of a straight-line function, in order, over all its blocks."""
    for block in function.body.blocks:
        yield from block.bindings


def rewritten(module: tvm.IRModule, rewriter: PyExprMutator) -> tvm.IRModule:
    """The module with all its Relax functions as a mutator, which was made for it, gives them."""
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


def has_single_blocks(module: tvm.IRModule) -> bool:
    """Whether each Relax function is one block, in all of which its variables may be used."""
    functions = (function for function in module.functions.values() if isinstance(function, relax.Function))
    return all(len(function.body.blocks) <= 1 for function in functions)


def calls_of(function: relax.Function, name: str | None = None) -> Iterator[relax.Call]:
    """Every call of a straight-line function, in order, or only those of the operator `name`."""
    for binding in bindings_of(function):
        value = getattr(binding, "value", None)
        if isinstance(value, tvm.ir.Call) and (name is None or operator_name(value) == name):
            yield value


def operator_name(call: relax.Call) -> str:
    """The registered name of a call's operator, or a description of what is called instead."""
    operator = call.op
    return str(operator.name) if isinstance(operator, tvm.ir.Op) else f"call of {type(operator).__name__}"


def is_call(value: relax.Expr, name: str) -> bool:
    """Whether the value is a call of the operator of this name."""
    return isinstance(value, tvm.ir.Call) and operator_name(value) == name


def operator_counts(function: relax.Function) -> Counter[str]:
    """How many calls of each operator the function makes."""
    return Counter(operator_name(call) for call in calls_of(function))


def replay(
    builder: relax.BlockBuilder,
    function: relax.Function,
    environment: Environment,
    rewrites: Mapping[str, Rewrite] | None = None,
) -> relax.Expr:
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


def static_shape(expr: relax.Expr) -> Shape:
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
    return tuple(_number(extent) for extent in shape.values)


def _number(extent: relax.Expr) -> Extent:
    return int(extent) if isinstance(extent, tvm.tirx.IntImm) else extent


def element_type(expr: relax.Expr) -> str:
    """The dtype of a tensor expression as a string, such as "float32"."""
    dtype = expr.ty.dtype
    return str(getattr(dtype, "dtype", dtype))


def fixed_bytes(type_: relax.Type) -> int:
    """Bytes of a tensor of a type; 0 if it is not a tensor's, or an extent is symbolic."""
    extents = constant_shape(type_)
    return 0 if extents is None else math.prod(extents) * numpy_dtype(str(dtype_of(type_))).itemsize


def type_text(type_: relax.Type) -> str:
    """A tensor type for messages, such as `float32[n, 3]`."""
    if not isinstance(type_, relax.TensorType):
        return "(no tensor)"
    extents = getattr(type_.shape, "values", None)
    shown = "unknown" if extents is None else ", ".join(str(_number(extent)) for extent in extents)
    return f"{getattr(type_.dtype, 'dtype', type_.dtype)}[{shown}]"


def builder_with_tir(module: tvm.IRModule) -> relax.BlockBuilder:
    """A block builder that already holds the module's TIR functions, so that call_tir keeps working."""
    builder = relax.BlockBuilder()
    for variable in module.get_global_vars():
        if isinstance(module[variable], tvm.tirx.PrimFunc):
            builder.add_func(module[variable], variable.name_hint)
    return builder
