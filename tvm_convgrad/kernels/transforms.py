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
    """A context manager that allows Winograd's transform for 3x3 kernels, where it is estimated to be faster.

    The transform needs fewer multiplications, but rounds more: the rounding error of an element depends on the other
    elements of its tile, and an infinite element makes the whole tile NaN. It is therefore disabled by default.

    Args:
        allowed: False disables it inside an outer block that allows it.

    Returns:
        A context manager; it applies to what the current thread (or asyncio task) compiles inside the block.

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
