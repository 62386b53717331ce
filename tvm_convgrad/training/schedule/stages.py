# SPDX-License-Identifier: Apache-2.0
"""The loop nests of a TIR function as stages: iterators, one store, a value, and the addresses of all accesses.

An address is linear: constant + sum of coefficient * iterator, in elements from the start of a contiguous tensor. What
is not of this kind (symbolic extents, padding, gathers) is not a stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
from tvm import tirx

from relax_ops.compat import SBlock, TensorLoad, arithmetic, buffer_of
from tvm_convgrad.codegen.loops import dtype_of

_BINARY = (
    tirx.Add,
    tirx.Sub,
    tirx.Mul,
    tirx.Div,
    tirx.Min,
    tirx.Max,
    tirx.EQ,
    tirx.NE,
    tirx.LT,
    tirx.LE,
    tirx.GT,
    tirx.GE,
    tirx.And,
    tirx.Or,
)
_PURE = frozenset(
    f"tirx.{name}"
    for name in ("exp", "sqrt", "rsqrt", "tanh", "erf", "log", "log1p", "sigmoid", "pow", "fabs", "floor")
)
_COMBINERS = {tirx.Add: "sum", tirx.Max: "max", tirx.Min: "min"}
KEEPING_NAN = {tirx.Max: "max or NaN", tirx.Min: "min or NaN"}
"""Combiners of kernels.extrema, by what they are but for NaN."""


@dataclass(frozen=True)
class Address:
    """Where an access goes: `coefficients` belong to the stage's iterators."""

    buffer: Any
    constant: int
    coefficients: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """One loop nest. `kinds` has S for an iterator of the result, R for one that is reduced over.

    `combiner` is "" for an elementwise stage, else "sum", "max" or "min", the latter two perhaps followed by " or NaN";
    `value` is then what is combined, and `start` what an empty reduction gives.
    """

    kinds: str
    extents: tuple[int, ...]
    store: Address
    value: Any
    loads: tuple[tuple[Any, Address], ...]
    combiner: str = ""
    start: Any = None

    @property
    def work(self) -> int:
        """The number of iterations."""
        return math.prod(self.extents)

    @cached_property
    def address_of(self) -> dict[Any, Address]:
        """The address of each of the loads in `value`."""
        return dict(self.loads)


def stage_of(block: SBlock, extents: list[int | None]) -> Stage | None:
    """The stage of a block (its iterators run over the loops around it, of these extents), or None."""
    letters = {tirx.IterVar.DataPar: "S", tirx.IterVar.CommReduce: "R"}
    kinds = "".join(letters.get(iterator.iter_type, "?") for iterator in block.iter_vars)
    fixed = tuple(extent for extent in extents if extent is not None)
    if "?" in kinds or len(fixed) != len(extents) or not isinstance(block.body, tirx.BufferStore):
        return None
    variables = dict(zip((iterator.var for iterator in block.iter_vars), fixed, strict=True))
    store = _address(block.body.buffer, block.body.indices, variables)
    value, combiner, start = block.body.value, "", None
    if "R" in kinds:
        combiners = _COMBINERS
        if isinstance(value, tirx.Select) and _is_nan(value.false_value):
            value, combiners = value.true_value, KEEPING_NAN
        combiner = combiners.get(type(value), "")
        if not combiner or not isinstance(block.init, tirx.BufferStore):
            return None
        own, value, start = value.a, value.b, block.init.value
        same = isinstance(own, TensorLoad) and buffer_of(own).same_as(block.body.buffer)
        if not same or _address(buffer_of(own), own.indices, variables) != store:
            return None
    loads: list[tuple[Any, Address]] = []
    if store is None or not _collect(value, variables, loads):
        return None
    if any(buffer_of(load).same_as(block.body.buffer) for load, _ in loads):
        return None
    return Stage(kinds, fixed, store, value, tuple(loads), combiner, start)


def _is_nan(value: tirx.Expr) -> bool:
    return isinstance(value, tirx.FloatImm) and math.isnan(float(value.value))


def _address(buffer: tirx.Buffer, indices: Any, variables: dict[Any, int]) -> Address | None:
    if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
        return None
    shape = [int(extent) for extent in buffer.shape]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    constant, coefficients = 0, [0] * len(variables)
    for index, stride in zip(indices, strides, strict=True):
        linear = _linear(index, variables)
        if linear is None:
            return _address_through_views(buffer, indices, strides, variables)
        for position, term in enumerate(linear[:-1]):
            coefficients[position] += term * stride
        constant += linear[-1] * stride
    return Address(buffer, constant, tuple(coefficients))


def _linear(index: tirx.Expr, variables: dict[Any, int]) -> list[int] | None:
    """The coefficients of the variables, and the constant."""
    terms = arithmetic.detect_linear_equation(index, list(variables))
    if len(terms) != len(variables) + 1 or not all(isinstance(term, tirx.IntImm) for term in terms):
        return None
    return [int(term) for term in terms]


def _address_through_views(
    buffer: tirx.Buffer, indices: Any, strides: list[int], variables: dict[Any, int]
) -> Address | None:
    """A reshape makes quotients and remainders of indices, which the address as a whole does not have."""
    analyzer = arithmetic.Analyzer()
    for variable, extent in variables.items():
        begin, count = (tirx.const(number, dtype_of(variable)) for number in (0, extent))
        analyzer.bind(variable, tvm.ir.Range.from_min_extent(begin, count))
    total = sum(index * stride for index, stride in zip(indices, strides, strict=True))
    linear = _linear(analyzer.simplify(total), variables)
    return None if linear is None else Address(buffer, linear[-1], tuple(linear[:-1]))


def _collect(value: tirx.Expr, variables: dict[Any, int], loads: list[tuple[Any, Address]]) -> bool:
    """Gather the loads of a value; False where it is made of more than arithmetic on linear loads."""
    if isinstance(value, TensorLoad):
        address = _address(buffer_of(value), value.indices, variables)
        if address is None:
            return False
        loads.append((value, address))
        return True
    parts = _parts(value)
    return parts is not None and all(_collect(part, variables, loads) for part in parts)


def _parts(value: tirx.Expr) -> list[Any] | None:
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return []
    if isinstance(value, _BINARY):
        return [value.a, value.b]
    if isinstance(value, tirx.Not):
        return [value.a]
    if isinstance(value, tirx.Cast):
        return [value.value]
    if isinstance(value, tirx.Select):
        return [value.condition, value.true_value, value.false_value]
    if isinstance(value, tvm.ir.Call) and str(getattr(value.op, "name", "")) in _PURE:
        return list(value.args)
    return None


def rebuilt(value: tirx.Expr, load: Callable[[Any], Any]) -> Any:
    """The value with each of its loads replaced by what `load` gives for it."""
    if isinstance(value, TensorLoad):
        return load(value)
    parts = _parts(value)
    assert parts is not None  # stage_of has looked
    if not parts:
        return value
    new = [rebuilt(part, load) for part in parts]
    if isinstance(value, _BINARY):
        return type(value)(new[0], new[1])
    if isinstance(value, tirx.Not):
        return tirx.Not(new[0])
    if isinstance(value, tirx.Cast):
        return tirx.Cast(dtype_of(value), new[0])
    if isinstance(value, tirx.Select):
        return tirx.Select(new[0], new[1], new[2])
    return tvm.ir.Call(value.op, new, value.attrs, list(value.ty_args), ret_ty=value.ty)
