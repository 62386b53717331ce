# SPDX-License-Identifier: Apache-2.0
"""Means over axes whose extents may be symbolic, with gradients that need no static extent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tvm import relax, tirx

from tvm_convgrad.training.ir.graph import element_type, static_shape


def scalar(value: float, dtype: str) -> relax.Expr:
    """A constant scalar of the given dtype."""
    return relax.const(value, dtype)


def count_of(builder: relax.BlockBuilder, tensor: relax.Expr, axes: Sequence[int]) -> int | relax.Expr:
    """The product of the extents along `axes`: an int, or a float scalar tensor computed at run time.

    A symbolic extent is counted by adding a one for each row of a slice of the tensor (exact below 2^24 in
    float32): TVM 0.27 fails to compile kernels that take a symbolic extent without a tensor that has it, as
    `shape_to_tensor` and `full` do. The result is wrapped in `no_grad`, since extents have no gradient.
    """
    shape, dtype = static_shape(tensor), element_type(tensor)
    fixed = math.prod(shape[axis] for axis in axes if isinstance(shape[axis], int))
    symbolic = [axis for axis in axes if not isinstance(shape[axis], int)]
    if not symbolic:
        return fixed
    count = scalar(float(fixed), dtype)
    for axis in symbolic:
        extent = builder.emit(relax.op.sum(_ones_along(builder, tensor, axis)))
        count = builder.emit(relax.op.multiply(extent, count))
    return builder.emit(relax.op.grad.no_grad(count))


def extent_of(builder: relax.BlockBuilder, tensor: relax.Expr, axis: int) -> relax.Expr:
    """The extent of an axis as a scalar of int64, computed at run time where it is symbolic (see `count_of`)."""
    extent = static_shape(tensor)[axis]
    if isinstance(extent, int):
        return relax.const(extent, "int64")
    ones = builder.emit(relax.op.astype(_ones_along(builder, tensor, axis), "int64"))
    return builder.emit(relax.op.grad.no_grad(builder.emit(relax.op.sum(ones))))


def counted_extent(builder: relax.BlockBuilder, tensors: Iterable[relax.Var], extent: tirx.Var) -> relax.Expr | None:
    """A symbolic extent as a scalar of int64, counted along an axis of one of the tensors; None if none has it."""
    for tensor in tensors:
        if not isinstance(tensor.ty, relax.TensorType):
            continue
        for axis, own in enumerate(static_shape(tensor)):
            if isinstance(own, tirx.Var) and own.same_as(extent):
                return extent_of(builder, tensor, axis)
    return None


def _ones_along(builder: relax.BlockBuilder, tensor: relax.Expr, axis: int) -> relax.Expr:
    """A one for each place of an axis, in the tensor's element type."""
    others = [other for other in range(len(static_shape(tensor))) if other != axis]
    row = tensor
    if others:
        begin, end = [0] * len(others), [1] * len(others)
        row = builder.emit(relax.op.strided_slice(tensor, axes=others, begin=begin, end=end, assume_inbound=True))
    return builder.emit(relax.op.ones_like(row))


def mean(builder: relax.BlockBuilder, tensor: relax.Expr, axes: Sequence[int], *, keepdims: bool = False) -> relax.Expr:
    """The mean over `axes`, as a sum times the reciprocal of the count."""
    return scaled_sum(builder, tensor, axes, count_of(builder, tensor, axes), keepdims=keepdims)


def scaled_sum(
    builder: relax.BlockBuilder,
    tensor: relax.Expr,
    axes: Sequence[int],
    count: int | relax.Expr,
    *,
    keepdims: bool = False,
) -> relax.Expr:
    """The sum over `axes` divided by `count`, which `count_of` gave."""
    total = builder.emit(relax.op.sum(tensor, axis=list(axes), keepdims=keepdims))
    if isinstance(count, int):
        return builder.emit(relax.op.multiply(total, scalar(1.0 / count, element_type(tensor))))
    return builder.emit(relax.op.divide(total, count))
