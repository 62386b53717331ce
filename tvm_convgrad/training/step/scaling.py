# SPDX-License-Identifier: Apache-2.0
"""A scale of the loss that adapts: it falls when gradients overflow, and grows when they have not for long.

The rule is that of torch.amp.GradScaler: an update whose gradients are not all finite is skipped and halves the scale;
INTERVAL updates in a row that are not skipped double it. What it needs is three scalars of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from tvm import relax

from tvm_convgrad.core.state_names import GOOD_UPDATES, LEFT_OUT_UPDATES, LOSS_SCALE
from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.graph import element_type

NAMES = (LOSS_SCALE, GOOD_UPDATES, LEFT_OUT_UPDATES)
"""Its tensors: the scale (float32), updates since it changed or one was skipped, skipped updates (int64)."""

INITIAL, INTERVAL = 65536.0, 2000
_LEAST, _MOST = 2.0**-24, 2.0**40


def initial_values() -> list[np.ndarray]:
    """The values of NAMES before the first step."""
    return [np.array(INITIAL, "float32"), np.array(0, "int64"), np.array(0, "int64")]


def all_finite(builder: relax.BlockBuilder, gradients: Sequence[relax.Expr]) -> relax.Var:
    """Whether no number in the gradients is NaN or infinite; a bool scalar."""
    each = [
        builder.emit(relax.op.min(relax.op.astype(relax.op.isfinite(gradient), "float32"))) for gradient in gradients
    ]
    return builder.emit(relax.op.greater(reduce(relax.op.minimum, each), scalar(0.5, "float32")))


def kept(
    builder: relax.BlockBuilder, finite: relax.Expr, new: Sequence[relax.Expr], old: Sequence[relax.Expr]
) -> list[relax.Expr]:
    """The new values if the gradients were finite, else the old ones."""
    return [builder.emit(relax.op.where(finite, *pair)) for pair in zip(new, old, strict=True)]


def next_values(builder: relax.BlockBuilder, finite: relax.Expr, values: Sequence[relax.Expr]) -> list[relax.Expr]:
    """The values of NAMES after an update whose gradients were finite, or not."""
    scale, good, skipped = values
    one, none = relax.const(1, "int64"), relax.const(0, "int64")
    lasting = builder.emit(relax.op.where(finite, relax.op.add(good, one), none))
    is_long = builder.emit(relax.op.greater_equal(lasting, relax.const(INTERVAL, "int64")))
    grown = relax.op.minimum(relax.op.multiply(scale, scalar(2.0, "float32")), scalar(_MOST, "float32"))
    shrunk = relax.op.maximum(relax.op.multiply(scale, scalar(0.5, "float32")), scalar(_LEAST, "float32"))
    kept_scale = relax.op.where(is_long, grown, scale)
    return [
        builder.emit(relax.op.where(finite, kept_scale, shrunk)),
        builder.emit(relax.op.where(is_long, none, lasting)),
        builder.emit(relax.op.where(finite, skipped, relax.op.add(skipped, one))),
    ]


def divided(builder: relax.BlockBuilder, gradients: Sequence[relax.Expr], scale: relax.Expr) -> list[relax.Expr]:
    """Gradients of the loss, of those of the loss times the scale, which is a power of two."""
    inverse = builder.emit(relax.op.divide(scalar(1.0, "float32"), scale))
    return [
        builder.emit(relax.op.multiply(gradient, relax.op.astype(inverse, element_type(gradient))))
        for gradient in gradients
    ]


__all__ = ["INITIAL", "INTERVAL", "NAMES", "all_finite", "divided", "initial_values", "kept", "next_values"]
