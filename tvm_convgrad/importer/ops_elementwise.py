# SPDX-License-Identifier: Apache-2.0
"""Elementwise operators, casts, comparisons, constants by shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.attributes import integers
from tvm_convgrad.importer.context import Context
from tvm_convgrad.importer.table import Converter, op

_UNARY = {
    **{
        name: name
        for name in [
            "abs",
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "ceil",
            "cos",
            "cosh",
            "erf",
            "exp",
            "floor",
            "isfinite",
            "isinf",
        ]
    },
    **{
        name: name
        for name in [
            "isnan",
            "log",
            "negative",
            "round",
            "rsqrt",
            "sigmoid",
            "sign",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
            "trunc",
        ]
    },
    **{name: name for name in ("logical_not", "bitwise_not")},
    "fast_exp": "exp",
    "fast_tanh": "tanh",
    "fast_erf": "erf",
}
_BINARY = {
    **{
        name: name
        for name in [
            "add",
            "subtract",
            "multiply",
            "divide",
            "power",
            "floor_divide",
            "floor_mod",
            "maximum",
            "minimum",
        ]
    },
    **{name: name for name in ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]},
    **{name: name for name in ["logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"]},
    **{name: name for name in ("left_shift", "right_shift")},
}


def _unary(function: Callable[[Any], Any], note: bool) -> Converter:
    def convert(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
        value = args[0]
        if note and not context.is_float(value):
            raise ModelError(f"the operand is {context.dtype(value)}, not floating-point")
        return context.emit(function(value))

    return convert


def _binary(function: Callable[[Any, Any], Any], kind: str) -> Converter:
    def convert(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
        first, second = args
        if context.dtype(first) != context.dtype(second):
            raise ModelError(f"the operands are {context.dtype(first)} and {context.dtype(second)}")
        if kind in ("floor_divide", "floor_mod", "divide") and not context.is_float(first):
            divisor = context.constant(second)
            if divisor is not None and not np.all(divisor):
                raise ModelError("an integer is divided by zero")
        return context.emit(function(first, second))

    return convert


_NOTES = dict.fromkeys(("fast_exp", "fast_tanh", "fast_erf"), "computed exactly")
_INTEGERS = ("abs", "negative", "sign", "logical_not", "bitwise_not", "ceil", "floor", "round", "trunc")
for _name, _relax in _UNARY.items():
    op(_name, note=_NOTES.get(_name, ""))(_unary(getattr(relax.op, _relax), _relax not in _INTEGERS))
for _name, _relax in _BINARY.items():
    op(_name, operands=2)(_binary(getattr(relax.op, _relax), _name))


@op("mod", "trunc_mod", operands=2, note="the remainder has the sign of the dividend")
def _trunc_mod(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    first, second = args
    quotient = _trunc_divide(context, args, _attrs)
    return context.emit(relax.op.subtract(first, context.emit(relax.op.multiply(quotient, second))))


@op("trunc_divide", operands=2)
def _trunc_divide(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    first, second = args
    if context.dtype(first) != context.dtype(second):
        raise ModelError(f"the operands are {context.dtype(first)} and {context.dtype(second)}")
    if context.is_float(first):
        return context.emit(relax.op.trunc(context.emit(relax.op.divide(first, second))))
    if context.dtype(first).startswith("uint"):
        return context.emit(relax.op.floor_divide(first, second))
    quotient = context.emit(
        relax.op.floor_divide(context.emit(relax.op.abs(first)), context.emit(relax.op.abs(second)))
    )
    signs = context.emit(relax.op.multiply(context.emit(relax.op.sign(first)), context.emit(relax.op.sign(second))))
    return context.emit(relax.op.multiply(quotient, signs))


@op("log2", "log10", note="computed as log divided by a constant")
def _other_log(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    value = args[0]
    if not context.is_float(value):
        raise ModelError(f"the operand is {context.dtype(value)}, not floating-point")
    factor = 1.0 / math.log(2.0 if attrs.op_name == "log2" else 10.0)
    return context.emit(relax.op.multiply(context.emit(relax.op.log(value)), context.scalar_like(factor, value)))


@op("copy", "annotation.stop_fusion", "annotation.checkpoint", note="removed: the result is the operand")
@op("on_device", attributes="OnDeviceAttrs", note="ignored: devices are chosen at compile time")
@op("device_copy", attributes="DeviceCopyAttrs", note="ignored: devices are chosen at compile time")
@op("annotation.compiler_begin", "annotation.compiler_end", attributes="CompilerAttrs", note="regions are inlined")
def _same(_context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    return args[0]


@op("cast", attributes="CastAttrs")
def _cast(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    return context.cast(args[0], attrs.dtype)


@op("cast_like", operands=2)
def _cast_like(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    return context.cast(args[0], context.dtype(args[1]))


@op("clip", attributes="ClipAttrs")
def _clip(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    return clipped(context, args[0], attrs.a_min, attrs.a_max)


def clipped(context: Context, value: relax.Expr, low: float, high: float) -> relax.Expr:
    """`value` kept within bounds; for integers the bounds are rounded to whole numbers of their type."""
    if math.isnan(low) or math.isnan(high):
        raise ModelError(f"the bounds are {low} and {high}")
    dtype = context.dtype(value)
    if context.is_float(value):
        return context.emit(relax.op.clip(value, low, high))
    limits = np.iinfo(np.dtype(dtype)) if dtype != "bool" else None
    if limits is None:
        raise ModelError("truth values cannot be clipped")
    whole = [int(min(max(bound, float(limits.min)), float(limits.max))) for bound in (low, high)]
    bounds = [context.const(min(max(bound, limits.min), limits.max), dtype) for bound in whole]
    return context.emit(relax.op.minimum(context.emit(relax.op.maximum(value, bounds[0])), bounds[1]))


@op("where", operands=3)
def _where(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    condition, first, second = args
    if context.dtype(condition) != "bool":
        condition = context.emit(relax.op.not_equal(condition, context.scalar_like(0, condition)))
    if context.dtype(first) != context.dtype(second):
        raise ModelError(f"the operands are {context.dtype(first)} and {context.dtype(second)}")
    return context.emit(relax.op.where(condition, first, second))


def filled(context: Context, shape: Any, value: relax.Expr, dtype: str) -> relax.Expr:
    """A tensor of one value, a Relax scalar."""
    value = context.cast(value, dtype)
    if context.shape(value) != ():
        raise ModelError(f"the value to fill with has the extents {list(context.shape(value))}, and is not a scalar")
    return context.emit(relax.op.full(relax.ShapeExpr(list(shape)), value))


def checked_shape(context: Context, what: str, shape: Any) -> tuple[int, ...]:
    """A shape given by an attribute, a constant operand, or the annotated type.

    Raises:
        ModelError: it is given by none of them, or is not a shape.
    """
    if shape is None and context.annotation is not None and None not in getattr(context.annotation, "shape", (None,)):
        shape = context.annotation.shape
    if shape is None:
        raise ModelError(f"{what} is not known")
    return integers(what, tuple(shape), lowest=0)


@op("zeros", "ones", attributes="InitOpAttrs", operands=(0, 1))
def _zeros_ones(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    given = context.constant(args[0]) if args else None
    shape = attrs.shape if given is None else tuple(given.ravel().tolist())
    value = 1 if attrs.op_name == "ones" else 0
    dtype = attrs.dtype or "float32"
    return filled(context, checked_shape(context, "the shape", shape), context.const(value, dtype), dtype)


@op("full", attributes="InitOpAttrs", operands=(1, 2))
def _full(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    given = context.constant(args[1]) if len(args) == 2 else None
    shape = attrs.shape if given is None else tuple(given.ravel().tolist())
    return filled(context, checked_shape(context, "the shape", shape), args[0], attrs.dtype)


@op("full_like", operands=2)
def _full_like(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    return filled(context, context.shape(args[0]), args[1], context.dtype(args[0]))


@op("zeros_like", "ones_like")
def _like(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    value = context.scalar_like(1 if attrs.op_name == "ones_like" else 0, args[0])
    return filled(context, context.shape(args[0]), value, "")


MAX_RANGE = 1 << 24


@op("arange", attributes="ArangeAttrs", operands=(0, 3), note="the operands must be constants")
def _arange(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    bounds = [context.constant(value) for value in args]
    if len(bounds) != 3 or any(bound is None or bound.size != 1 for bound in bounds):
        raise ModelError("start, stop and step must be constants")
    start, stop, step = (float(bound.item()) for bound in bounds if bound is not None)
    if not all(map(math.isfinite, (start, stop, step))) or step == 0 or (stop - start) / step > MAX_RANGE:
        raise ModelError(f"from {start} to {stop} by {step} is not a range")
    return context.const(np.arange(start, stop, step), attrs.dtype or "int32")
