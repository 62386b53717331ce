# SPDX-License-Identifier: Apache-2.0
"""Operators that TVM lowers badly, as others: group norms, instance norms, tensors filled with infinities, index_put.

TVM takes the variance of these norms as a difference of two means, which loses the digits of data far from zero
(`relax_ops.rules.norms`). As sums and products, forward and gradient share the centred data and the deviation.
Masks of attention are full of -inf; of relax.full and relax.full_like with such a value TVM 0.27 lowers nothing, as its
check of the element type fails. A constant that is broadcast is the same. An index_put that adds loses sums of places
that occur twice, as its threads add at the same time. A library with a constant that has no elements cannot be loaded;
concatenations, for which ONNX has such constants, do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.compat import Constant, array_of
from relax_ops.ir import constant_extents
from relax_ops.rules.indexing import index_put_written
from relax_ops.rules.norms import WRITTEN_OUT, written_out
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name, rewritten

_FULL, _FULL_LIKE = "relax.full", "relax.full_like"


def WriteOutOperators() -> tvm.transform.Pass:
    """The pass that replaces these operators, in all straight-line Relax functions that call one of them."""
    return tvm.transform.module_pass(_written_out, opt_level=0, name="ConvgradWriteOutOperators")


def _written_out(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    functions = [each for each in module.functions.values() if isinstance(each, relax.Function)]
    values = (getattr(binding, "value", None) for function in functions for binding in bindings_of(function))
    if not any(isinstance(value, tvm.ir.Call) and operator_name(value) in _WRITTEN for value in values):
        return module
    return rewritten(module, _Operators(module))


@mutator
class _Operators(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The operators of the table as others; all others as they are."""
        call = self.visit_expr_post_order(call)
        write = _WRITTEN.get(operator_name(call))
        return call if write is None else write(self.builder_, call)


def _filled(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """full and full_like of a constant that is not finite; others as they are."""
    value = array_of(call.args[1]) if isinstance(call.args[1], Constant) else None
    if value is None or value.dtype.kind not in "fV" or np.isfinite(value.astype("float32")).all():
        return call
    made = builder.normalize(call)
    number = relax.op.astype(relax.const(value.astype("float32"), "float32"), element_type(made))
    shape = call.args[0] if operator_name(call) == _FULL else made.ty.shape
    return relax.op.broadcast_to(builder.emit(number), shape)


def _without_empty(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A concatenation without tensors of no elements: constants, and zeros, which are folded to constants."""
    given = call.args[0]
    given = builder.lookup_binding(given) if isinstance(given, relax.Var) else given
    fields = given.fields if isinstance(given, relax.Tuple) else ()
    kept = [each for each in fields if 0 not in (constant_extents(each) or ())]
    axis = call.attrs.axis
    if not kept or len(kept) == len(fields) or axis is None:  # without an axis the fields are flattened
        return call
    return kept[0] if len(kept) == 1 else relax.op.concat(kept, int(axis))


_WRITTEN: Mapping[str, Callable[[relax.BlockBuilder, relax.Call], relax.Expr]] = MappingProxyType(
    {
        **dict.fromkeys(WRITTEN_OUT, written_out),
        **dict.fromkeys((_FULL, _FULL_LIKE), _filled),
        "relax.concat": _without_empty,
        "relax.index_put": index_put_written,
    }
)
"""What each operator is replaced by."""

__all__ = ["WriteOutOperators"]
