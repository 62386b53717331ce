# SPDX-License-Identifier: Apache-2.0
"""Bounds on gradients before the optimizer takes them, with the formulas of torch.nn.utils."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.graph import element_type

_TINY = 1e-6  # added to the norm, as PyTorch does


def clip_by_norm(builder: relax.BlockBuilder, gradients: Sequence[relax.Expr], bound: float) -> list[relax.Expr]:
    """All gradients times min(1, bound / (norm + 1e-6)), where the norm is that of all their numbers together.

    It is NaN if one of them is.
    """
    total = None
    for gradient in gradients:
        wide = builder.emit(op.astype(gradient, "float32")) if element_type(gradient) != "float32" else gradient
        square = builder.emit(op.sum(builder.emit(op.multiply(wide, wide))))
        total = square if total is None else builder.emit(op.add(total, square))
    if total is None:
        return []
    norm = builder.emit(op.add(builder.emit(op.sqrt(total)), scalar(_TINY, "float32")))
    factor = builder.emit(op.divide(scalar(bound, "float32"), norm))
    one = scalar(1.0, "float32")
    factor = builder.emit(op.where(builder.emit(op.greater(factor, one)), one, factor))  # a minimum would drop NaN
    found = []
    for gradient in gradients:
        dtype = element_type(gradient)
        own = factor if dtype == "float32" else builder.emit(op.astype(factor, dtype))
        found.append(builder.emit(op.multiply(gradient, own)))
    return found


def clip_by_value(builder: relax.BlockBuilder, gradients: Sequence[relax.Expr], bound: float) -> list[relax.Expr]:
    """Each number of the gradients, or ±bound if it is larger."""
    return [builder.emit(op.clip(gradient, -bound, bound)) for gradient in gradients]
