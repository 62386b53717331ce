# SPDX-License-Identifier: Apache-2.0
"""What is known of a tensor: None (the same for all samples), Own, Summed or Mixed; of a tuple, a tuple of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

from tvm import relax

from relax_ops.compat import arithmetic
from relax_ops.ir import dtype_of, spec_of

Emit = Callable[[Any], Any]
"""Emits an expression through a block builder."""


@dataclass(frozen=True)
class Own:
    """The tensor has the samples along `axis`, `inner` entries each: entry i depends on sample i // inner only."""

    axis: int
    inner: int = 1


@dataclass(frozen=True)
class Summed:
    """The tensor is a sum over the samples.

    Attributes:
        terms: emits the terms, (samples, *shape of the tensor).
        norm: emits the sum of squares of each term, a vector, where that is cheaper than by `terms`.
    """

    terms: Emit
    norm: Emit | None = None

    def squares(self, builder: Any) -> Any:
        """Emit the sum of squares of each term, in float32 at least: a vector over the samples."""
        if self.norm is not None:
            return self.norm(builder)
        return sum_of_squares(builder, self.terms(builder))


@dataclass(frozen=True)
class Mixed:
    """The samples have met in a way that cannot be taken apart; `reason` is a clause for messages."""

    reason: str


State = Union[None, Own, Summed, Mixed, tuple["State", ...]]


def sum_of_squares(builder: Any, value: Any, axis: int = 0) -> Any:
    """The sum of squares over all axes but one, summed in float32 at least."""
    value = builder.normalize(value)
    if dtype_of(value.ty) not in ("float32", "float64"):
        value = builder.emit(relax.op.astype(value, "float32"))
    squares = builder.emit(relax.op.multiply(value, value))
    others = [other for other in range(ndim_of(value)) if other != axis]
    return builder.emit(relax.op.sum(squares, others)) if others else squares


def apart(builder: Any, value: Any, own: Own) -> Any:
    """The tensor with the axis of the samples as two: the samples, and the entries of one."""
    if own.inner == 1:
        return builder.emit(relax.op.expand_dims(value, own.axis + 1))
    shape = shape_of(value)
    count = shape[own.axis] // own.inner
    if not isinstance(count, int):
        count = arithmetic.Analyzer().simplify(count)
    split = [*shape[: own.axis], count, own.inner, *shape[own.axis + 1 :]]
    return builder.emit(relax.op.reshape(value, relax.ShapeExpr(split)))


def shape_of(value: Any) -> tuple[Any, ...]:
    """Extents of a tensor whose shape is known."""
    shape = spec_of(value, "operand", "per-sample gradients").shape
    assert shape is not None  # what has no known shape is Mixed
    return shape


def ndim_of(value: Any) -> int:
    """Number of axes of a tensor."""
    return int(value.ty.ndim)
