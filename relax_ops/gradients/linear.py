# SPDX-License-Identifier: Apache-2.0
"""Gradient of matmul, with operands and result of different dtypes (mixed precision), batches broadcast."""

from __future__ import annotations

from typing import Any

from tvm.relax import op

from relax_ops.gradients.common import cast, dtype_of, fit, shape_of


def matmul(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """C = A·B: dA = dC·Bᵀ, dB = Aᵀ·dC; a vector is a matrix of one row (A) or one column (B).

    Where dC has another dtype than A and B (out_dtype), the products are taken in dC's and cast back.
    """
    a, b = orig_call.args
    a_ndim, b_ndim = len(shape_of(a, "relax.matmul")), len(shape_of(b, "relax.matmul"))
    dtype = dtype_of(output_grad)
    left, right = cast(a, dtype, ctx), cast(b, dtype, ctx)
    grad = output_grad
    if a_ndim == 1 and b_ndim == 1:
        return [cast(op.multiply(grad, right), dtype_of(a), ctx), cast(op.multiply(grad, left), dtype_of(b), ctx)]
    if a_ndim == 1:
        left, grad = ctx.emit(op.expand_dims(left, 0)), ctx.emit(op.expand_dims(grad, -2))
    if b_ndim == 1:
        right, grad = ctx.emit(op.expand_dims(right, 1)), ctx.emit(op.expand_dims(grad, -1))
    da = ctx.emit(op.matmul(grad, _transposed(ctx, right)))
    db = ctx.emit(op.matmul(_transposed(ctx, left), grad))
    if a_ndim == 1:
        da = ctx.emit(op.squeeze(da, [-2]))
    if b_ndim == 1:
        db = ctx.emit(op.squeeze(db, [-1]))
    return [fit(ctx, da, a), fit(ctx, db, b)]


def _transposed(ctx: Any, matrix: Any) -> Any:
    ndim = len(shape_of(matrix))
    return ctx.emit(op.permute_dims(matrix, [*range(ndim - 2), ndim - 1, ndim - 2]))


GRADIENTS = {"relax.matmul": matmul}
"""Gradient rules by operator."""
