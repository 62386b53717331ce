# SPDX-License-Identifier: Apache-2.0
"""Activations and bounds that several formats have, with PyTorch's derivatives at their kinks."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.rules.near_zero import expm1
from tvm_convgrad.training.ir.graph import element_type

_LOWEST = -60000.0
"""Below all arguments for which exp is not 0, in any float type."""


def elu(
    builder: relax.BlockBuilder, x: relax.Expr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> relax.Expr:
    """scale·x above 0, scale·alpha·(exp(input_scale·x) − 1) below: elu, celu (input_scale = 1/alpha) and selu.

    At 0 the derivative is that from below, scale·alpha·input_scale, as in PyTorch. exp is not computed of what would
    overflow: 0 times infinity would be the gradient of the branch that is not taken.
    """
    emit, dtype = builder.emit, element_type(x)
    low = x if input_scale == 1 else emit(op.multiply(x, relax.const(input_scale, dtype)))
    low = emit(expm1(emit(op.clip(low, _LOWEST, 0.0))))
    low = emit(op.multiply(low, relax.const(alpha * scale, dtype)))
    high = x if scale == 1 else emit(op.multiply(x, relax.const(scale, dtype)))
    return emit(op.where(emit(op.greater(x, relax.const(0.0, dtype))), high, low))


def bounded(builder: relax.BlockBuilder, x: relax.Expr, low: float, high: float) -> relax.Expr:
    """x between two numbers, with no gradient on them: hardtanh, relu6 and hardsigmoid, not clamp."""
    emit, dtype = builder.emit, element_type(x)
    inside = emit(op.clip(x, low, high))
    if (low, high) == (0.0, 6.0):  # ReLU6, as the gradient of clip knows it
        return inside
    outside = op.logical_or(op.less_equal(x, relax.const(low, dtype)), op.greater_equal(x, relax.const(high, dtype)))
    return emit(op.where(emit(outside), emit(op.grad.no_grad(inside)), x))


def clamped(builder: relax.BlockBuilder, x: relax.Expr, low: relax.Expr | None, high: relax.Expr | None) -> relax.Expr:
    """x between bounds that are tensors. Where x equals one, x is taken, and so is its gradient."""
    emit = builder.emit
    for bound, is_inside in ((low, op.greater_equal), (high, op.less_equal)):
        if bound is None:
            continue
        kept = emit(is_inside(x, bound))
        if "float" in element_type(x):
            kept = emit(op.logical_or(kept, emit(op.isnan(x))))
        x = emit(op.where(kept, x, bound))
    return x


__all__ = ["bounded", "clamped", "elu"]
