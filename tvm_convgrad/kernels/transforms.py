# SPDX-License-Identifier: Apache-2.0
"""`allow_transforms`: the context in which the chooser considers Winograd's transform.

With the transform an element's rounding depends on the other elements of its tile, and an infinite element makes the
others of its tile NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TRANSFORMS = "transforms"
"""The contender of `convgrad bench` that is measured with transforms allowed."""

_allowed: ContextVar[bool] = ContextVar("tvm_convgrad_transforms", default=False)


@contextmanager
def allow_transforms(allowed: bool = True) -> Iterator[None]:
    """A context in which 3x3 kernels may compute by Winograd's transform, where that is estimated to be faster.

    The transform needs fewer multiplications and rounds more: an element's rounding depends on the other elements of
    its tile, and an infinite element makes all of its tile NaN. So it is off unless a program is compiled in here.

    Args:
        allowed: False forbids it again inside an outer block.

    Returns:
        A context manager; it holds for what this thread (or asyncio task) compiles inside the block.

    Example:
        >>> import numpy as np
        >>> import tvm_convgrad
        >>> grad, data = np.ones((1, 1, 4, 4), "float32"), np.ones((1, 1, 6, 6), "float32")
        >>> with tvm_convgrad.allow_transforms():
        ...     tvm_convgrad.evaluate("conv2d_backward_weight", grad, data, kernel_size=3)[0, 0, 0]
        array([16., 16., 16.], dtype=float32)
    """
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def transforms_allowed() -> bool:
    """Whether the chooser considers transforms here."""
    return _allowed.get()


__all__ = ["TRANSFORMS", "allow_transforms", "transforms_allowed"]
