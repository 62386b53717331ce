# SPDX-License-Identifier: Apache-2.0
"""What a kernel may compute again from its operands instead of reading it: cheap operators, and who takes them in."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax

from relax_ops.ir import constant_extents

CHEAP = frozenset(
    f"relax.{name}"
    for name in (
        "add",
        "subtract",
        "multiply",
        "negative",
        "maximum",
        "minimum",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "logical_and",
        "where",
        "clip",
        "nn.relu",
    )
)
"""Operators that cost less than writing and reading their result."""

READERS = CHEAP | {"relax.sum", "relax.mean", "relax.max", "relax.divide", "relax.sqrt", "relax.exp"}
"""Operators into whose kernels a cheap operand is fused."""

SMALL = 4096  # elements; a smaller tensor costs nothing
SOURCES = 2  # large tensors that a copy may read


def is_large(expr: relax.Expr) -> bool:
    """Whether a tensor has many elements, their number known."""
    extents = constant_extents(expr)
    return extents is not None and math.prod(extents) > SMALL


def variables_of(value: relax.Expr) -> list[Any]:
    """The variables that an expression in A-normal form reads."""
    if isinstance(value, relax.Var):
        return [value]
    if isinstance(value, tvm.ir.Call):
        return [variable for argument in value.args for variable in variables_of(argument)]
    if isinstance(value, relax.Tuple):
        return [variable for field in value.fields for variable in variables_of(field)]
    if isinstance(value, relax.TupleGetItem):
        return variables_of(value.tuple_value)
    return []


__all__ = ["CHEAP", "READERS", "SOURCES", "is_large", "variables_of"]
