# SPDX-License-Identifier: Apache-2.0
"""States of a tensor: None (the same for all samples), ZEROS, MappedAxis, Summed or Mixed; of a tuple, a tuple."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from tvm import relax

from relax_ops.compat import arithmetic
from relax_ops.expressions import known_extents, ndim_of
from relax_ops.ir import dtype_of
from relax_ops.vmap.mapped_axis import MappedAxis

Emit = Callable[[relax.BlockBuilder], relax.Expr]
"""Emits an expression through a block builder."""


@dataclass(frozen=True)
class Summed:
    """The tensor is a sum over the samples.

    Attributes:
        terms: emits the terms, (samples, *shape of the tensor).
        norm: emits the sum of squares of each term, a vector, where that is cheaper than by `terms`.
    """

    terms: Emit
    norm: Emit | None = None

    def squares(self, builder: relax.BlockBuilder) -> relax.Expr:
        """Emit the sum of squares of each term, in float32 at least: a vector over the samples."""
        if self.norm is not None:
            return self.norm(builder)
        return sum_of_squares(builder, self.terms(builder))


@dataclass(frozen=True)
class Mixed:
    """The samples are mixed in a way that cannot be taken apart; `reason` is a clause for messages.

    Attributes:
        is_known: False where an operator's rule does not know whether it mixes them.
    """

    reason: str
    is_known: bool = True


@dataclass(frozen=True)
class Zeros:
    """The tensor is zeros: the same for all samples, and also a sum over them, of terms that are zeros."""


ZEROS = Zeros()

State = Union[None, Zeros, MappedAxis, Summed, Mixed, tuple["State", ...]]


def leaves(state: State) -> list[State]:
    """The states of the tensors in a tensor or tuple."""
    return [leaf for part in state for leaf in leaves(part)] if isinstance(state, tuple) else [state]


def sum_of_squares(builder: relax.BlockBuilder, value: relax.Expr, axis: int = 0) -> relax.Expr:
    """The sum of squares over all axes but one, summed in float32 at least."""
    value = builder.normalize(value)
    if dtype_of(value.ty) not in ("float32", "float64"):
        value = builder.emit(relax.op.astype(value, "float32"))
    squares = builder.emit(relax.op.multiply(value, value))
    others = [other for other in range(ndim_of(value)) if other != axis]
    return builder.emit(relax.op.sum(squares, others)) if others else squares


def apart(builder: relax.BlockBuilder, value: relax.Expr, own: MappedAxis) -> relax.Expr:
    """The tensor with the axis of the samples as two: the samples, and the entries of one."""
    if own.each == 1:
        return builder.emit(relax.op.expand_dims(value, own.axis + 1))
    shape = known_extents(value)
    count = shape[own.axis] // own.each
    if not isinstance(count, int):
        count = arithmetic.Analyzer().simplify(count)
    before, behind = shape[: own.axis], shape[own.axis + 1 :]
    if own.blocks > 1:
        split = [*before, own.blocks, count, own.entries, *behind]
        value = builder.emit(relax.op.reshape(value, relax.ShapeExpr(split)))
        order = [*range(own.axis), own.axis + 1, own.axis, *range(own.axis + 2, len(split))]
        value = builder.emit(relax.op.permute_dims(value, order))
    return builder.emit(relax.op.reshape(value, relax.ShapeExpr([*before, count, own.each, *behind])))
