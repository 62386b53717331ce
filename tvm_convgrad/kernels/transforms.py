# SPDX-License-Identifier: Apache-2.0
"""Whether the plan may take Winograd's transform: only inside `with allow_transforms()`.

An element's rounding then depends on its neighbours in the tile, and what is infinite makes neighbours NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TRANSFORMS = "transforms"
"""What a bench is asked for to measure kernels with this allowed."""

_allowed: ContextVar[bool] = ContextVar("tvm_convgrad_transforms", default=False)


@contextmanager
def allow_transforms(allowed: bool = True) -> Iterator[None]:
    """Let kernels of 3x3 compute by Winograd's transform inside the block, where that is estimated to be faster."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def transforms_allowed() -> bool:
    """Whether they may."""
    return _allowed.get()


__all__ = ["TRANSFORMS", "allow_transforms", "transforms_allowed"]
