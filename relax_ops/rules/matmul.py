# SPDX-License-Identifier: Apache-2.0
"""matmul, with operands and result of different dtypes (mixed precision), batches broadcast."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents, ndim_of
from relax_ops.gradients.common import cast, dtype_of, fit, shape_of
from relax_ops.per_sample.gram import pays, sum_of_gram_products
from relax_ops.per_sample.states import Summed, apart, sum_of_squares
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes
from relax_ops.vmap.unfolded import UnfoldingBuilder
from tvm_convgrad.core.errors import UnsupportedError


def matmul_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
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


def _transposed(ctx: relax.BlockBuilder, matrix: relax.Expr) -> relax.Expr:
    ndim = len(shape_of(matrix))
    return ctx.emit(op.permute_dims(matrix, [*range(ndim - 2), ndim - 1, ndim - 2]))


def matmul_axis(call: relax.Call, axes: Axes) -> int | str:
    """A product in which the samples are rows, columns or entries of a batch. Sums over them have their own rule."""
    ndim, found = ndim_of(call), set()
    for position, (arg, axis) in enumerate(zip(call.args, axes, strict=True)):
        if axis is None:
            continue
        own = ndim_of(arg)
        kept = own - 2 if position == 0 else own - 1
        if own == 1 or axis not in (*range(own - 2), kept):
            return "it sums over the samples with what is the same for all of them"
        found.add(ndim - own + axis if ndim_of(call.args[1 - position]) > 1 else axis)
    return found.pop() if len(found) == 1 else "it multiplies each sample by every other"


def matmul_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """A product for each index: the mapped axis is one more axis of the batch."""
    ndims = [m.own_ndim(arg, b) for arg, b in zip(args, mapped, strict=True)]
    if min(ndims) < 2:
        raise UnsupportedError("ensemble: relax.matmul of a vector has no rule for vmap; give it a second axis")
    operands = [m.aligned(arg, b, max(ndims)) for arg, b in zip(args, mapped, strict=True)]
    return m.call(call, operands)


def _terms_of_product(call: relax.Call, axes: Axes) -> Summed | None:
    """A (m, n) @ B (n, k) over samples n: a term is a column times a row, or the product of a sample's own entries.

    One of the two may be a constant, such as a first hidden state of zeros: a term has the sample's part of it.
    """
    left, right = call.args
    if ndim_of(left) != 2 or ndim_of(right) != 2 or axes.places not in ((1, 0), (1, None), (None, 0)):
        return None
    entries = axes.each

    def columns(builder: relax.BlockBuilder) -> relax.Expr:
        return builder.emit(relax.op.permute_dims(apart(builder, left, axes.at(1)), [1, 0, 2]))

    def terms(builder: relax.BlockBuilder) -> relax.Expr:
        rows = apart(builder, right, axes.at(0))
        multiply = relax.op.multiply if entries == 1 else relax.op.matmul
        return builder.emit(relax.op.astype(builder.emit(multiply(columns(builder), rows)), call.ty.dtype))

    def norm(builder: relax.BlockBuilder) -> relax.Expr:
        rows = builder.emit(relax.op.permute_dims(apart(builder, right, axes.at(0)), [0, 2, 1]))
        if entries > 1:
            return sum_of_gram_products(UnfoldingBuilder(builder), columns(builder), rows, [1, 2])
        squares = (sum_of_squares(builder, left, axis=1), sum_of_squares(builder, right, axis=0))
        return builder.emit(relax.op.multiply(*squares))

    (height, width) = known_extents(call)
    known = isinstance(height, int) and isinstance(width, int)
    return Summed(terms, norm if entries == 1 or (known and pays(entries, height, width)) else None)


def _types_differ(call: relax.Call) -> str:
    types = [dtype_of(expr) for expr in (*call.args, call)]
    return "" if len(set(types)) == 1 else f"TVM's rule multiplies operands of different types ({', '.join(types)})"


RULES = (
    OperatorRules(
        named("matmul"),
        gradient=matmul_gradient,
        stock_fails=_types_differ,
        mapped_axis=matmul_axis,
        vmap=matmul_vmap,
        linear=((0,), (1,)),
        sums=_terms_of_product,
    ),
)
