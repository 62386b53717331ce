# SPDX-License-Identifier: Apache-2.0
"""Means over axes whose extents may be symbolic, with gradients that need no static extent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax

from tvm_convgrad.training.graph import element_type, static_shape


def scalar(value: float, dtype: str) -> Any:
    """A constant scalar of the given dtype."""
    return relax.const(value, dtype)


def count_of(builder: Any, tensor: Any, axes: Sequence[int]) -> int | Any:
    """The product of the extents along `axes`: an int, or a float scalar tensor computed at run time.

    A symbolic extent is counted by adding ones, which is exact below 2^24 in float32. The result is wrapped in `no_grad`, since extents have no gradient.
    """
    shape, dtype = static_shape(tensor), element_type(tensor)
    extents = [shape[axis] for axis in axes]
    fixed = math.prod(extent for extent in extents if isinstance(extent, int))
    symbolic = [extent for extent in extents if not isinstance(extent, int)]
    if not symbolic:
        return fixed
    product = scalar(float(fixed), dtype)
    for extent in symbolic:
        ones = builder.emit(relax.op.full(relax.ShapeExpr([extent]), scalar(1.0, dtype), dtype))
        product = builder.emit(relax.op.multiply(builder.emit(relax.op.sum(ones)), product))
    return builder.emit(relax.op.grad.no_grad(product))


def mean(builder: Any, tensor: Any, axes: Sequence[int], *, keepdims: bool = False) -> Any:
    """The mean over `axes`, as a sum times the reciprocal of the count."""
    return scaled_sum(builder, tensor, axes, count_of(builder, tensor, axes), keepdims=keepdims)


def scaled_sum(builder: Any, tensor: Any, axes: Sequence[int], count: int | Any, *, keepdims: bool = False) -> Any:
    """The sum over `axes` divided by `count`, which `count_of` gave."""
    total = builder.emit(relax.op.sum(tensor, axis=list(axes), keepdims=keepdims))
    if isinstance(count, int):
        return builder.emit(relax.op.multiply(total, scalar(1.0 / count, element_type(tensor))))
    return builder.emit(relax.op.divide(total, count))
