# SPDX-License-Identifier: Apache-2.0
"""Indexing that accesses no memory out of bounds: an index out of range reads NaN, and makes what it writes to NaN.

TVM reads what lies where such an index points, writes there, or crashes. Indices are checked where they depend on an
input of the model, unless an operator such as argmax or clip bounds them. Negative indices count from the end, as in
ONNX. Inputs that are indices as they are have a range, by which their values are refused before (see `index_ranges`).
Indices that count along a free extent, such as arange(n) of positions, are checked as those of inputs are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tvm_convgrad.training.ir.counting import counted_extent, extent_of, scalar
from tvm_convgrad.training.ir.graph import Environment, Extent, Rewrite, element_type, operator_name, static_shape

_BOUNDED = frozenset(f"relax.{name}" for name in ("argmax", "argmin", "argsort", "clip", "floor_mod"))
"""Operators whose results are taken for indices in range, whatever their operands are."""

_COUNTING = frozenset(f"relax.{name}" for name in ("arange", "cumsum", "cumprod", "sum", "prod", "shape_to_tensor"))
"""Operators whose results have other values for other extents, whatever the values of their operands are."""


class CheckedIndices:
    """Rewrites of the operators that read or write by an index, for `replay`.

    Args:
        inputs: variables of the new function whose values nobody knows.
    """

    def __init__(self, inputs: Iterable[relax.Var]) -> None:
        self._inputs = list(inputs)
        self._unknown: dict[relax.Var, bool] = dict.fromkeys(self._inputs, True)
        self._extents: dict[tirx.Var, relax.Expr | None] = {}

    @property
    def rewrites(self) -> Mapping[str, Rewrite]:
        """By the operator's name."""
        return {
            "relax.take": self._take,
            "relax.gather_elements": self._gather_elements,
            "relax.gather_nd": self._gather_nd,
            "relax.scatter_elements": self._scatter_elements,
            "relax.scatter_nd": self._scatter_nd,
            "relax.index_put": self._index_put,
            "relax.nn.nll_loss": self._nll_loss,
        }

    def _take(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        data, indices = call.args
        shape = static_shape(data)
        if not isinstance(indices.ty, relax.TensorType):
            return call
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(shape)
        extent = shape[axis]
        if call.attrs.mode in ("clip", "wrap"):  # here, as the gradient knows no modes
            if not isinstance(extent, int):
                return call
            indices = _holding(builder, indices, (extent,))
            bound = relax.const(extent, element_type(indices))
            wraps = call.attrs.mode == "wrap"
            bounded = op.floor_mod(indices, bound) if wraps else op.clip(indices, 0, extent - 1)
            return op.take(data, builder.emit(bounded), call.attrs.axis)
        return self._read(builder, call, [axis], 0 if call.attrs.axis is None else len(shape) - 1 - axis)

    def _gather_elements(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        return self._read(builder, call, [int(call.attrs.axis)], 0)

    def _gather_nd(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        data, indices = call.args
        shape, first, count = static_shape(data), int(call.attrs.batch_dims), static_shape(indices)[-1]
        if not isinstance(count, int):
            return call
        return self._read(builder, call, range(first, first + count), len(shape) - first - count, vectors=True)

    def _scatter_elements(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        return self._write(builder, call, [int(call.attrs.axis)])

    def _scatter_nd(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        count = static_shape(call.args[1])[-1]
        return self._write(builder, call, range(count)) if isinstance(count, int) else call

    def _index_put(self, builder: relax.BlockBuilder, call: relax.Call, environment: Environment) -> relax.Expr:
        data, indices, values = call.args
        valid: list[relax.Expr] = []
        safe: list[relax.Expr] = []
        for axis, each in enumerate(indices.fields):
            if element_type(each) == "bool" or not self._is_checked(builder, each, data, [axis]):
                safe.append(each)
                continue
            in_range, bounded = self._in_range(builder, each, data, [axis])
            valid.append(in_range)
            safe.append(bounded)
        if not valid:
            return call
        arguments = [data, relax.Tuple(safe), values]
        return _all_valid(builder, valid, _again(builder, call, arguments))

    def _nll_loss(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        predictions, target, *weights = call.args
        shape = static_shape(predictions)
        classes, ignored_class = shape[1 if len(shape) > 1 else 0], int(call.attrs.ignore_index)
        if not isinstance(classes, int) or not self._is_unknown(builder, target):
            return call
        target = _holding(builder, target, (ignored_class, classes))
        dtype = element_type(target)
        valid = op.logical_and(
            op.greater_equal(target, relax.const(0, dtype)), op.less(target, relax.const(classes, dtype))
        )
        ignored = op.equal(target, relax.const(ignored_class, dtype))
        valid = builder.emit(op.logical_or(valid, ignored))
        safe = builder.emit(op.where(valid, target, relax.const(0, dtype)))
        return _all_valid(builder, [valid], _again(builder, call, [predictions, safe, *weights]))

    def _read(
        self,
        builder: relax.BlockBuilder,
        call: relax.Call,
        axes: Sequence[int],
        behind: int,
        *,
        vectors: bool = False,
    ) -> relax.Expr:
        """The call (data, indices) with its indices in range, and NaN where they were not.

        Args:
            axes: of the data that the indices are of.
            behind: how many axes the result has behind those of the indices.
            vectors: whether the last axis of the indices has one for each of the axes.
        """
        data, indices = call.args
        if not self._is_checked(builder, indices, data, axes):
            return call
        valid, safe = self._in_range(builder, indices, data, axes)
        found = _again(builder, call, [data, safe])
        if not element_type(found).startswith("float"):
            return found
        if vectors:
            valid = _every(builder, valid, [-1])
        if behind:
            valid = builder.emit(op.expand_dims(valid, [-1 - place for place in range(behind)]))
        return builder.emit(op.where(valid, found, scalar(np.nan, element_type(found))))

    def _write(self, builder: relax.BlockBuilder, call: relax.Call, axes: Sequence[int]) -> relax.Expr:
        """The call (data, indices, values) with its indices in range; all of the result is NaN if one was not."""
        data, indices, values = call.args
        if not self._is_checked(builder, indices, data, axes):
            return call
        valid, safe = self._in_range(builder, indices, data, axes)
        return _all_valid(builder, [valid], _again(builder, call, [data, safe, values]))

    def _is_checked(
        self, builder: relax.BlockBuilder, indices: relax.Expr, data: relax.Expr, axes: Sequence[int]
    ) -> bool:
        """Whether indices may be out of range: nobody knows their values, or the extent of an axis."""
        shape = static_shape(data)
        return self._is_unknown(builder, indices) or any(not isinstance(shape[axis], int) for axis in axes)

    def _in_range(
        self, builder: relax.BlockBuilder, indices: relax.Expr, data: relax.Expr, axes: Sequence[int]
    ) -> tuple[relax.Expr, relax.Expr]:
        """Whether each index is in range, and the indices from the front, with 0 for those that are not.

        Args:
            data: what is read or written.
            axes: the axis of it that the indices are of, or one for each element of a vector of indices.
        """
        extents = [static_shape(data)[axis] for axis in axes]
        known = [extent for extent in extents if isinstance(extent, int)]
        if len(known) == len(extents):
            indices = _holding(builder, indices, (-max(known), max(known)))
            dtype = element_type(indices)
            numbers = np.asarray(known if len(known) > 1 else known[0], dtype)
            low, high = relax.const(-numbers, dtype), relax.const(numbers, dtype)
        else:
            dtype = "int64"
            indices = indices if element_type(indices) == dtype else builder.emit(op.astype(indices, dtype))
            counts = [self._extent(builder, extents[place], data, axis) for place, axis in enumerate(axes)]
            high = counts[0]
            if len(counts) > 1:
                high = builder.emit(op.concat([builder.emit(op.reshape(count, (1,))) for count in counts]))
            low = builder.emit(op.negative(high))
        zero = relax.const(0, dtype)
        valid = builder.emit(op.logical_and(op.greater_equal(indices, low), op.less(indices, high)))
        wrapped = op.where(op.less(indices, zero), op.add(indices, high), indices)
        return valid, builder.emit(op.where(valid, wrapped, zero))

    def _extent(self, builder: relax.BlockBuilder, extent: Extent, data: relax.Expr, axis: int) -> relax.Expr:
        """The extent of an axis as a scalar of int64: of those of the inputs if it is a product, else counted."""
        found = self._product(builder, extent)
        return extent_of(builder, data, axis) if found is None else found

    def _product(self, builder: relax.BlockBuilder, extent: Extent) -> relax.Expr | None:
        """A product of extents of the inputs; None if it is something else."""
        if isinstance(extent, int | tirx.IntImm):
            return relax.const(int(extent), "int64")
        if isinstance(extent, tirx.Mul):
            factors = [self._product(builder, factor) for factor in (extent.a, extent.b)]
            return None if any(each is None for each in factors) else builder.emit(op.multiply(*factors))
        if not isinstance(extent, tirx.Var):
            return None
        if extent not in self._extents:
            self._extents[extent] = counted_extent(builder, self._inputs, extent)
        return self._extents[extent]

    def _is_unknown(self, builder: relax.BlockBuilder, expr: relax.Expr) -> bool:
        """Whether an expression depends on an input by other operators than those that bound it."""
        stack = [expr] if isinstance(expr, relax.Var) else []
        while stack:
            variable = stack[-1]
            operands = _operands(builder, variable)
            waiting = [operand for operand in operands if operand not in self._unknown]
            if waiting:
                stack += waiting
            else:
                unknown = any(self._unknown[operand] for operand in operands) or _counts(builder, variable)
                self._unknown.setdefault(variable, unknown)
                stack.pop()
        return self._unknown.get(expr, False)


def _operands(builder: relax.BlockBuilder, variable: relax.Var) -> list[relax.Var]:
    """The variables that what is bound to a variable reads, if they decide about its range."""
    value = builder.lookup_binding(variable)
    if value is None or (isinstance(value, tvm.ir.Call) and operator_name(value) in _BOUNDED):
        return []
    return list(relax.analysis.free_vars(value))


def _counts(builder: relax.BlockBuilder, variable: relax.Var) -> bool:
    """Whether what is bound to a variable counts along a free extent."""
    value = builder.lookup_binding(variable)
    if not isinstance(value, tvm.ir.Call) or operator_name(value) not in _COUNTING:
        return False
    tensors = [each for each in (value, *value.args) if isinstance(each.ty, relax.TensorType)]
    return any(not isinstance(extent, int) for tensor in tensors for extent in static_shape(tensor))


def _holding(builder: relax.BlockBuilder, indices: relax.Expr, values: Sequence[int]) -> relax.Expr:
    """The indices as integers of a type that has these values, too, such as int64 for -1 and uint8."""
    limits = np.iinfo(element_type(indices))
    fits = all(limits.min <= value <= limits.max for value in values)
    return indices if fits else builder.emit(op.astype(indices, "int64"))


def _again(builder: relax.BlockBuilder, call: relax.Call, arguments: Sequence[relax.Expr]) -> relax.Var:
    """The call with other arguments."""
    return builder.emit(relax.Call(call.op, list(arguments), call.attrs, list(call.ty_args)))


def _every(builder: relax.BlockBuilder, valid: relax.Expr, axes: list[int] | None) -> relax.Expr:
    """Whether all along some axes, or all for None, are true."""
    least = op.min(op.astype(valid, "float32"), axes)
    return builder.emit(op.greater(least, scalar(0.5, "float32")))


def _all_valid(builder: relax.BlockBuilder, valid: Sequence[relax.Expr], result: relax.Expr) -> relax.Expr:
    """The result, or NaN throughout where an index is not in range."""
    if not element_type(result).startswith("float"):
        return result
    for each in valid:
        result = builder.emit(op.where(_every(builder, each, None), result, scalar(np.nan, element_type(result))))
    return result


__all__ = ["CheckedIndices"]
