# SPDX-License-Identifier: Apache-2.0
"""Softmaxes of attention whose rows may be masked altogether, with zeros for the gradients of such rows.

All scores of such a row are -inf (all keys of a query are padding), and its softmax is NaN. ONNX files put zeros in
its place: PyTorch's exporters by `Where(IsNaN(softmax), 0, softmax)`, the operator Attention by a condition for each
row. The gradient of that selection is 0, but that of the softmax multiplies it by NaN. Here the softmax is taken of
zeros in such rows, and NaN is selected behind it: the same values, without a path for a gradient. Where Attention has
no mask, its condition is a constant that selects nothing, and the selection is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_ops.compat import Constant, array_of
from relax_ops.expressions import known_extents, same_shape
from tvm_convgrad.training.ir.graph import Environment, Rewrite, element_type, is_call

_SOFTMAX, _CAST = "relax.nn.softmax", "relax.astype"


def _where(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
    """A selection of values in the place of a softmax's, by rows or where they are NaN; all others stay."""
    condition, *branches = call.args
    only = _only(builder, call)
    if only is not None:
        return only
    for place, branch in enumerate(branches):
        softmax, casts = _softmax(builder, branch)
        if softmax is None or not _is_of_rows(builder, condition, branch, softmax):
            continue
        selected = _with_nan_selected(builder, softmax)
        for cast in reversed(casts):
            selected = builder.emit(relax.Call(cast.op, [selected], cast.attrs, list(cast.ty_args)))
        branches[place] = selected
        is_nan = _is_nan_of(builder, condition, branch)
        return op.where(builder.emit(op.isnan(selected)) if is_nan else condition, *branches)
    return None


def _only(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr | None:
    """The tensor of which a constant condition selects all elements, if it has the result's shape; else None."""
    condition, *branches = call.args
    if not isinstance(condition, Constant):
        return None
    selected = array_of(condition)
    if selected.any() != selected.all():
        return None
    only = branches[0] if selected.all() else branches[1]
    return only if same_shape(known_extents(only), known_extents(builder.normalize(call))) else None


def _softmax(builder: relax.BlockBuilder, tensor: relax.Expr) -> tuple[relax.Call | None, list[relax.Call]]:
    """The softmax that a tensor is, and the casts behind it, the last one first; None if it is another one."""
    casts = []
    value = builder.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None
    while value is not None and is_call(value, _CAST):
        casts.append(value)
        operand = value.args[0]
        value = builder.lookup_binding(operand) if isinstance(operand, relax.Var) else None
    return (value if value is not None and is_call(value, _SOFTMAX) else None), casts


def _is_nan_of(builder: relax.BlockBuilder, condition: relax.Expr, tensor: relax.Expr) -> bool:
    """Whether a condition is that a tensor's element is NaN."""
    value = builder.lookup_binding(condition) if isinstance(condition, relax.Var) else None
    return value is not None and is_call(value, "relax.isnan") and value.args[0].same_as(tensor)


def _is_of_rows(builder: relax.BlockBuilder, condition: relax.Expr, tensor: relax.Expr, softmax: relax.Call) -> bool:
    """Whether a condition is the same for all elements of a softmax's row, as where one of them is NaN."""
    if _is_nan_of(builder, condition, tensor):
        return True
    extents, own = known_extents(condition), known_extents(tensor)
    axis = int(softmax.attrs.axis) % len(own)
    along = axis - len(own) + len(extents)
    return own[axis] != 1 and (along < 0 or extents[along] == 1)


def _with_nan_selected(builder: relax.BlockBuilder, softmax: relax.Call) -> relax.Expr:
    """A softmax with NaN in rows whose elements are all -inf, of which its gradient is 0."""
    scores, axis = softmax.args[0], int(softmax.attrs.axis)
    dtype = element_type(scores)

    def number(value: float) -> relax.Expr:
        return relax.const(np.array(value, dtype), dtype)

    masked = builder.emit(op.equal(builder.emit(op.max(scores, axis, keepdims=True)), number(-np.inf)))
    finite = builder.emit(op.where(masked, number(0.0), scores))
    weights = builder.emit(relax.Call(softmax.op, [finite], softmax.attrs, list(softmax.ty_args)))
    return builder.emit(op.where(masked, number(np.nan), weights))


MASKED_SOFTMAXES: Mapping[str, Rewrite] = {"relax.where": _where}
"""Rewrites for `replay`."""

__all__ = ["MASKED_SOFTMAXES"]
