# SPDX-License-Identifier: Apache-2.0
"""The losses: nll_loss (any reduction, weights, ignore_index) and cross_entropy_with_logits."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op
from tvm.relax.op.grad import no_grad

from relax_ops.gradients.common import cast, divide_by_count, dtype_of, shape_of, widened
from relax_ops.rules.contract import OperatorRules, named
from tvm_convgrad.core.errors import UnsupportedError


def cross_entropy_with_logits(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = −Σ x·y/N, N the extent of axis 0, or 1 for vectors: dx = −dz·y/N, dy = −dz·x/N."""
    x, y = orig_call.args
    (grad,) = widened(ctx, output_grad)
    if len(shape_of(x, "relax.nn.cross_entropy_with_logits")) > 1:
        grad = divide_by_count(ctx, grad, x, [0])
    grad = ctx.emit(op.negative(grad))
    wide_x, wide_y = widened(ctx, x, y)
    return [
        cast(op.multiply(grad, wide_y), dtype_of(x), ctx),
        cast(op.multiply(grad, wide_x), dtype_of(y), ctx),
    ]


def nll_loss(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = −w[t]·p[t], reduced: dp = −w·dz at the target's class and 0 elsewhere, over Σ w[t] for reduction "mean".

    A target equal to ignore_index, or outside the classes, is one-hot nowhere and so takes no part; the stock rule
    reads weights[target] outside the tensor then. The weights have a gradient too.

    Raises:
        UnsupportedError: the number of classes is not known at compile time.
    """
    predictions, targets = orig_call.args[:2]
    attrs, shape = orig_call.attrs, shape_of(predictions, "relax.nn.nll_loss")
    axis = 1 if len(shape) > 1 else 0
    classes = shape[axis]
    if not isinstance(classes, int):
        raise UnsupportedError(f"relax.nn.nll_loss: the gradient needs a fixed number of classes, not {classes}")
    grad, p, loss = widened(ctx, output_grad, predictions, orig_var)
    dtype = dtype_of(p)
    hot = op.one_hot(targets, relax.prim_value(1), relax.prim_value(0), classes, axis)
    hot = ctx.emit(op.astype(hot, dtype))
    counts = op.not_equal(targets, relax.const(int(attrs.ignore_index), dtype_of(targets)))
    hot = ctx.emit(op.multiply(hot, op.expand_dims(op.astype(counts, dtype), axis)))
    weights = orig_call.args[2] if len(orig_call.args) == 3 else None
    weighted = hot
    if weights is not None:
        (wide_weights,) = widened(ctx, weights)
        spread = relax.ShapeExpr([classes if i == axis else 1 for i in range(len(shape))])
        weighted = ctx.emit(op.multiply(hot, op.reshape(wide_weights, spread)))
    reduction = str(attrs.reduction)
    if reduction == "none":
        grad = ctx.emit(op.expand_dims(grad, axis))
    elif reduction == "mean":
        grad = ctx.emit(op.divide(grad, op.sum(weighted)))
    dp = cast(op.negative(op.multiply(weighted, grad)), dtype_of(predictions), ctx)
    if weights is None:
        return [dp, no_grad(targets)]
    # z = −Σ w_c·s_c (over Σ w_c·n_c): dw_c = −s_c (− z·n_c, both over that sum).
    others = [i for i in range(len(shape)) if i != axis]
    each = op.multiply(hot, p)
    if reduction == "mean":
        each = op.add(each, op.multiply(hot, loss))
    dw = op.negative(op.multiply(each, grad))
    return [dp, no_grad(targets), cast(op.sum(dw, axis=others) if others else dw, dtype_of(weights), ctx)]


def _batch_is_symbolic(call: relax.Call) -> str:
    shape = shape_of(call.args[0], "relax.nn.cross_entropy_with_logits")
    return "" if isinstance(shape[0], int) else "TVM's rule needs the batch, which is symbolic"


def _weights_are_given(call: relax.Call) -> str:
    if len(call.args) < 3:
        return ""
    return "TVM's rule reads weights[target] outside the weights for targets to ignore, and gives them no gradient"


RULES = (
    OperatorRules(
        named("nn.cross_entropy_with_logits"), gradient=cross_entropy_with_logits, stock_fails=_batch_is_symbolic
    ),
    OperatorRules(named("nn.nll_loss"), gradient=nll_loss, stock_fails=_weights_are_given),
)
