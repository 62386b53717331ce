# SPDX-License-Identifier: Apache-2.0
"""What a gradient rule is, and what several of them need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relay

from tvm_convgrad.core.errors import UnsupportedError

Rule = Callable[[relay.Call, Any], list[Any]]
"""FPrimalGradient: the call and the gradient of its result to the gradients of its arguments, tuples as relay.Tuple.

The types of the call and of its arguments are known; those of the gradient are not.
"""

Rules = Mapping[str, Rule]
"""Gradient rules by operator."""


def field(value: relay.Expr, index: int) -> relay.Expr:
    """One value of an expression that is a tuple."""
    return value.fields[index] if isinstance(value, relay.Tuple) else relay.TupleGetItem(value, index)


def extents_of(value: relay.Expr) -> list[int | None]:
    """The extents of a tensor; None is Any."""
    return [int(extent) if isinstance(extent, tvm.tir.IntImm) else None for extent in value.checked_type.shape]


def known(extent: int | None, call: relay.Call, what: str) -> int:
    """`extent`, where a gradient cannot be made without its number.

    Raises:
        UnsupportedError: it is Any.
    """
    if extent is None:
        raise UnsupportedError(
            f"gradient of {call.op.name}: {what} is Any, and the gradient needs its number; give the program's "
            "variables static types there (only the batch may be Any)"
        )
    return extent
