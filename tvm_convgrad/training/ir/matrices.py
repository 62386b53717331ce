# SPDX-License-Identifier: Apache-2.0
"""Matrix products in Relax functions: their extents, and transposes of their operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.core.problem import REPRESENTATIVE_BATCH
from tvm_convgrad.training.ir.graph import is_call

SMALL = 1 << 16
"""Multiply-accumulates of a product that is worth a kernel's call."""


_LONGEST = 64
"""The most pixels of a row of an image that is made of a matrix's rows."""


def row_length(rows: int) -> int:
    """The largest divisor of a number of rows that is at most 64: a row of the image that they become."""
    return max(each for each in range(1, _LONGEST + 1) if rows % each == 0)


def is_transpose(value: relax.Expr) -> bool:
    """Whether the value is the transpose of a matrix."""
    if not is_call(value, "relax.permute_dims"):
        return False
    axes = value.attrs.axes
    return matrix(value.args[0]) is not None and (axes is None or [int(a) % 2 for a in axes] == [1, 0])


def matrix(expr: relax.Expr) -> tuple[Any, Any] | None:
    """The extents of a matrix: integers, or expressions of symbolic ones."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or len(shape.values) != 2:
        return None
    first, second = (int(e) if isinstance(e, tvm.tirx.IntImm) else e for e in shape.values)
    return first, second


def source(values: Mapping[Any, Any], operand: relax.Expr) -> tuple[Any, bool]:
    """The matrix that an operand is, or is the transpose of, and whether it is that.

    Args:
        values: what variables are bound to.
    """
    transposed = False
    while is_transpose(values.get(operand)):
        operand, transposed = values[operand].args[0], not transposed
    return operand, transposed


@dataclass(frozen=True)
class Rows:
    """The rows of a matrix: `each` for every sample of a symbolic `batch`, or in all if that is None."""

    each: int
    batch: Any = None

    @classmethod
    def of(cls, extent: Any) -> Rows | None:
        """From an extent: a number, a symbolic one, or a multiple of it; None if it is anything else."""
        if isinstance(extent, int):
            return cls(extent)
        if isinstance(extent, tvm.tirx.Var):
            return cls(1, extent)
        if isinstance(extent, tvm.tirx.Mul):
            for factor, batch in ((extent.a, extent.b), (extent.b, extent.a)):
                if isinstance(factor, tvm.tirx.IntImm) and isinstance(batch, tvm.tirx.Var):
                    return cls(int(factor), batch)
        return None

    @property
    def representative(self) -> int:
        """How many there are, of a batch of the size that code is planned for if it is symbolic."""
        return self.each * (1 if self.batch is None else REPRESENTATIVE_BATCH)


__all__ = ["SMALL", "Rows", "is_transpose", "matrix", "row_length", "source"]
