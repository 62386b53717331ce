# SPDX-License-Identifier: Apache-2.0
"""The emitter that vmap rules work with: it has the block builder and the number of indices of the vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from legalize.builder import Extent
from legalize.rearrange import rearrange
from relax_ops.builder import RelaxBuilder
from relax_ops.expressions import changed_attributes, ndim_of


class Vmap:
    """One vmap at work: mapped tensors have the mapped axis, of `count` indices, in front."""

    def __init__(self, builder: relax.BlockBuilder, count: Extent) -> None:
        self.builder, self.count = builder, count
        self._ops = RelaxBuilder(builder)
        self._mapped: set[relax.Var] = set()

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression."""
        return self.builder.emit(expr)

    def mark(self, value: relax.Expr) -> relax.Expr:
        """The value, recorded as one that has the mapped axis in front; of a tuple all fields have it."""
        for field in value.fields if isinstance(value, relax.Tuple) else [value]:
            self._mapped.add(field)
        return value

    def is_mapped(self, value: relax.Expr) -> bool:
        """Whether a value, or a field of a tuple, has the mapped axis."""
        if isinstance(value, relax.Tuple):
            return any(map(self.is_mapped, value.fields))
        if isinstance(value, relax.TupleGetItem):
            return value in self._mapped or self.is_mapped(value.tuple_value)
        return isinstance(value, relax.Var) and value in self._mapped

    def shape(self, value: relax.Expr) -> tuple[Extent, ...]:
        """Extents of a tensor."""
        return self._ops.shape(value)

    def rearrange(self, value: relax.Expr, pattern: str) -> relax.Expr:
        """Rearrange axes, where k is the mapped axis (see legalize.rearrange)."""
        return rearrange(self._ops, value, pattern, k=self.count)

    def reshaped(self, value: relax.Expr, shape: Sequence[Extent]) -> relax.Call:
        """The call that gives a mapped tensor another shape; `shape` is that of one index."""
        return relax.op.reshape(value, relax.ShapeExpr([self.count, *shape]))

    def own_ndim(self, value: relax.Expr, mapped: bool) -> int:
        """Number of axes of the tensor of one index."""
        return ndim_of(value) - mapped

    def aligned(self, value: relax.Expr, mapped: bool, ndim: int) -> relax.Expr:
        """The tensor so that it broadcasts against mapped ones of `ndim` axes an index."""
        missing = ndim - self.own_ndim(value, mapped)
        if not mapped or missing == 0:
            return value
        return self.mark(self.emit(relax.op.expand_dims(value, list(range(1, 1 + missing)))))

    def everywhere(self, value: relax.Expr, mapped: bool) -> relax.Expr:
        """The tensor mapped, if need be by copies."""
        if mapped:
            return value
        shape = relax.ShapeExpr([self.count, *self.shape(value)])
        return self.mark(self.emit(relax.op.broadcast_to(self.emit(relax.op.expand_dims(value, 0)), shape)))

    def call(self, call: relax.Call, arguments: Sequence[relax.Expr], **changes: Any) -> relax.Call:
        """The call with other arguments and attributes, not yet bound."""
        return relax.Call(call.op, list(arguments), changed_attributes(call.attrs, **changes), list(call.ty_args))
