# SPDX-License-Identifier: Apache-2.0
"""What a loss function is to a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from tvm_convgrad.core.index_range import IndexRange

Computation: TypeAlias = Callable[[relax.BlockBuilder, relax.Expr, relax.Expr], relax.Expr]
"""Emits a loss of predictions and a target."""


def any_value(_predictions: relax.Expr) -> IndexRange | None:
    """The range of targets of which no value is out of range."""
    return None


@dataclass(frozen=True)
class Loss:
    """How to name and type the target of some predictions, the loss of both, and the loss of each sample, a vector.

    Attributes:
        of_samples: whether the loss of a batch is the mean of its samples'; a weighted mean is not.
        target_range: the class numbers that the target of some predictions may have; None for targets that are values.
    """

    name: str
    target_type: Callable[[relax.Expr], relax.TensorType]
    value: Computation
    each: Computation
    of_samples: bool = True
    target_range: Callable[[relax.Expr], IndexRange | None] = any_value
