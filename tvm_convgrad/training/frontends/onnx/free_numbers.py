# SPDX-License-Identifier: Apache-2.0
"""Free extents that a graph computes with: the last place of an axis, a sum divided by the length.

TVM's importer leaves the shape as a tensor, or an expression as an operand; neither can be compiled for a CPU in TVM
0.27, nor has a gradient. They become scalars that are counted at run time (see `counting.extent_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax, tirx
from tvm.relax import op

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.ir.counting import counted_extent, extent_of
from tvm_convgrad.training.ir.graph import Environment, Rewrite, element_type, is_call, static_shape

_BINARY = ("add", "subtract", "multiply", "divide")


class FreeNumbers:
    """Rewrites for `replay` of a function.

    Args:
        inputs: variables of the new function; each free extent is that of an axis of one of them.
    """

    def __init__(self, inputs: Sequence[relax.Var]) -> None:
        self._inputs = list(inputs)

    @property
    def rewrites(self) -> Mapping[str, Rewrite]:
        """By the operator's name."""
        return {"relax.shape_to_tensor": self._shape, **{f"relax.{name}": self._operands for name in _BINARY}}

    def _shape(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
        """The extents of a tensor as a tensor."""
        values = call.args[0].ty.values
        if values is not None and all(isinstance(value, tirx.IntImm) for value in values):
            return relax.const([int(value) for value in values], "int64")
        shape = call.args[0]
        bound = builder.lookup_binding(shape) if isinstance(shape, relax.Var) else None
        if bound is None or not is_call(bound, "relax.shape_of"):
            return None
        tensor = bound.args[0]
        extents = [extent_of(builder, tensor, axis) for axis in range(len(static_shape(tensor)))]
        return op.concat([builder.emit(op.reshape(extent, relax.ShapeExpr([1]))) for extent in extents], 0)

    def _operands(self, builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
        """An operator whose operands are tensors."""
        tensors = [each for each in call.args if isinstance(each.ty, relax.TensorType)]
        if len(tensors) == len(call.args) or not tensors:
            return None
        dtype = element_type(tensors[0])
        operands = [
            each if isinstance(each.ty, relax.TensorType) else self._number(builder, each, dtype) for each in call.args
        ]
        return relax.Call(call.op, operands, call.attrs, list(call.ty_args))

    def _number(self, builder: relax.BlockBuilder, value: tvm.ir.PrimExpr, dtype: str) -> relax.Expr:
        """A number that is an extent, as a scalar of this element type."""
        extent = value.value if isinstance(value, tirx.Cast) else value
        counted = counted_extent(builder, self._inputs, extent) if isinstance(extent, tirx.Var) else None
        if counted is not None:
            return builder.emit(op.astype(counted, dtype))
        if isinstance(extent, (tirx.IntImm, tirx.FloatImm)):
            return relax.const(extent.value, dtype)
        raise UnsupportedError(
            "the graph computes with a formula of free extents, and only an extent alone can be a number"
        )


__all__ = ["FreeNumbers"]
