# SPDX-License-Identifier: Apache-2.0
"""Adjoints of linear maps along one axis: Y = A·X on that axis, so dX = Aᵀ·dY (resizing, adaptive pooling).

A is known at compile time where the extents are. Where its columns have few entries, Aᵀ is applied as that many
gathers with constant indices, which fuse into one loop; otherwise, and where A is computed at run time, by matmul.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from relax_ops.gradients.common import cast, dtype_of, shape_of

MAX_GATHERS = 8
"""With more entries than this in a column, matmul is taken."""


def apply_transposed(ctx: relax.BlockBuilder, grad: relax.Expr, axis: int, matrix: NDArray[np.float64]) -> relax.Expr:
    """Aᵀ·grad along `axis`, for a constant A of shape (result extent, source extent)."""
    rows, columns = matrix.shape
    if rows == columns and np.array_equal(matrix, np.eye(rows)):
        return grad
    ndim = len(shape_of(ctx.normalize(grad)))
    most = int((matrix != 0).sum(axis=0).max(initial=0))
    if most > MAX_GATHERS:
        return multiply_transposed(ctx, grad, axis, relax.const(matrix.astype(dtype_of(grad)), dtype_of(grad)))
    places = np.zeros((most, columns), "int64")
    weights = np.zeros((most, columns))
    for column in range(columns):
        (entries,) = np.nonzero(matrix[:, column])
        places[: len(entries), column] = entries
        weights[: len(entries), column] = matrix[entries, column]
    total = None
    for place, weight in zip(places, weights, strict=True):
        part = op.take(grad, relax.const(place, "int64"), axis=axis)
        if not np.all(weight == 1):
            spread = weight.reshape([columns if i == axis else 1 for i in range(ndim)])
            part = op.multiply(part, relax.const(spread.astype(dtype_of(grad)), dtype_of(grad)))
        part = ctx.emit(part)
        total = part if total is None else ctx.emit(op.add(total, part))
    return op.zeros_like(grad) if total is None else total


def multiply_transposed(ctx: relax.BlockBuilder, grad: relax.Expr, axis: int, matrix: relax.Expr) -> relax.Expr:
    """Aᵀ·grad along `axis` by matmul, for A an expression of shape (result extent, source extent)."""
    grad = ctx.normalize(grad)
    ndim = len(shape_of(grad))
    matrix = cast(matrix, dtype_of(grad), ctx)
    order = [i for i in range(ndim) if i != axis] + [axis]
    moved = grad if axis == ndim - 1 else ctx.emit(op.permute_dims(grad, order))
    product = ctx.emit(op.matmul(moved, matrix))
    if axis == ndim - 1:
        return product
    return ctx.emit(op.permute_dims(product, [order.index(i) for i in range(ndim)]))


def identity(ctx: relax.BlockBuilder, tensor: relax.Expr, axis: int) -> relax.Expr:
    """The float32 unit matrix of the extent of `tensor` along `axis`, which may be symbolic.

    Made from a line of the tensor: TVM 0.27 does not compile a kernel whose symbolic extent occurs in none of its
    tensors.
    """
    ndim, extent = len(shape_of(tensor)), shape_of(tensor)[axis]
    others = [i for i in range(ndim) if i != axis]
    line = tensor
    if others:
        zeros, units = [0] * len(others), [1] * len(others)
        line = ctx.emit(op.strided_slice(tensor, axes=others, begin=zeros, end=units, assume_inbound=True))
        line = ctx.emit(op.squeeze(line, others))
    ones = cast(ctx.emit(op.ones_like(line)), "float32", ctx)
    column, row = op.expand_dims(ones, 1), op.expand_dims(ones, 0)
    square = ctx.emit(op.broadcast_to(op.multiply(column, row), relax.ShapeExpr([extent, extent])))
    return ctx.emit(op.eye_like(square))
