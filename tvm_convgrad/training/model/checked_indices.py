# SPDX-License-Identifier: Apache-2.0
"""Indexing that reads no memory out of bounds: an element by an index out of range is NaN.

A model that returns its loss itself looks up the scores of labels whose range nobody else knows. TVM reads what lies
where such an index points, or crashes. Negative indices count from the end, as in ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_ops.compat import Constant
from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.graph import Environment, Extent, Rewrite, element_type, static_shape


def _gather_elements(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
    extent = static_shape(call.args[0])[int(call.attrs.axis)]
    return _checked(builder, call, extent, 0)


def _take(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
    data, indices = call.args
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    shape = static_shape(data)
    behind = len(shape) - 1 - axis % len(shape)  # axes of the result behind those of the indices
    if not isinstance(indices.ty, relax.TensorType):
        return call
    return _checked(builder, call, shape[axis], behind)


def _nll_loss(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
    predictions, target, *_ = call.args
    shape = static_shape(predictions)
    classes, dtype = shape[1 if len(shape) > 1 else 0], element_type(target)
    if not isinstance(classes, int):
        return call
    valid = op.logical_and(
        op.greater_equal(target, relax.const(0, dtype)), op.less(target, relax.const(classes, dtype))
    )
    ignored = op.equal(target, relax.const(int(call.attrs.ignore_index), dtype))
    valid = builder.emit(op.logical_or(valid, ignored))
    safe = builder.emit(op.where(valid, target, relax.const(0, dtype)))
    loss = builder.emit(relax.Call(call.op, [predictions, safe, *call.args[2:]], call.attrs, list(call.ty_args)))
    all_valid = op.greater(op.min(op.astype(valid, "float32")), scalar(0.5, "float32"))
    return builder.emit(op.where(builder.emit(all_valid), loss, scalar(np.nan, element_type(loss))))


def _checked(builder: relax.BlockBuilder, call: relax.Call, extent: Extent, behind: int) -> relax.Expr:
    """The call with its indices in range, and NaN where they were not.

    Args:
        extent: of the axis that the indices are of.
        behind: how many axes the result has behind those of the indices.
    """
    data, indices = call.args
    if isinstance(indices, Constant) or not isinstance(extent, int):
        return call
    dtype = element_type(indices)
    low, high, zero = (relax.const(number, dtype) for number in (-extent, extent, 0))
    valid = builder.emit(op.logical_and(op.greater_equal(indices, low), op.less(indices, high)))
    wrapped = op.where(op.less(indices, zero), op.add(indices, high), indices)
    safe = builder.emit(op.where(valid, wrapped, zero))
    found = builder.emit(relax.Call(call.op, [data, safe], call.attrs, list(call.ty_args)))
    if not element_type(found).startswith("float"):
        return found
    if behind:
        valid = builder.emit(op.expand_dims(valid, [-1 - place for place in range(behind)]))
    return builder.emit(op.where(valid, found, scalar(np.nan, element_type(found))))


CHECKED_INDICES: Mapping[str, Rewrite] = {
    "relax.gather_elements": _gather_elements,
    "relax.take": _take,
    "relax.nn.nll_loss": _nll_loss,
}
"""Rewrites of the operators that read by an index, for `replay`."""

__all__ = ["CHECKED_INDICES"]
