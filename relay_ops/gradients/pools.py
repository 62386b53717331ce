# SPDX-License-Identifier: Apache-2.0
"""Gradients of nn.adaptive_avg_pool{1,2,3}d, and of the gradients of pools, so that those can be taken again."""

from __future__ import annotations

from itertools import product

import numpy as np
from tvm import relay

from relay_ops.gradients.contract import Rules, extents_of, known
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL


def _spatial(layout: str, rank: int, op: str) -> list[int]:
    """Where a layout has the spatial axes.

    Raises:
        UnsupportedError: it is packed.
    """
    if len(layout) != rank + 2:
        raise UnsupportedError(
            f"gradient of {op}: the packed layout {layout!r} is not served; take the gradient in a plain layout and "
            "convert afterwards with ConvertLayout"
        )
    return [layout.index(axis) for axis in SPATIAL[rank]]


def adaptive_avg_pool(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """Each element of the gradient, divided by its window's length, for each element of the window; axis by axis.

    An element of the result is the mean of the window from floor(i * X / Y) to ceil((i + 1) * X / Y). Of an axis all
    windows together are a matrix (Y, X), and the gradient is a product with its transpose.
    """
    axes = _spatial(str(call.attrs.layout), len(call.args[0].checked_type.shape) - 2, call.op.name)
    extents, grad = extents_of(call), output_grad
    dtype = call.args[0].checked_type.dtype
    for axis in axes:
        before = known(extents_of(call.args[0])[axis], call, f"axis {axis} of the data")
        after = known(extents[axis], call, f"axis {axis} of the result")
        if before == after:
            continue
        windows = np.zeros((before, after), dtype)
        for i in range(after):
            low, high = i * before // after, -(-(i + 1) * before // after)
            windows[low:high, i] = 1 / (high - low)
        order = [i for i in range(len(extents)) if i != axis] + [axis]
        rest = [extents[i] for i in order[:-1]]
        rows = relay.reshape(relay.transpose(grad, order), (-1, after))
        product = relay.nn.dense(rows, relay.const(windows, dtype), units=before)
        shape = [-1 if extent is None else extent for extent in rest]
        apart = relay.reshape(product, (*shape, before))
        grad = relay.transpose(apart, [order.index(i) for i in range(len(extents))])
        extents[axis] = before
    return [grad]


def avg_pool2d_grad(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """nn.avg_pool2d_grad is linear in its first argument, as nn.avg_pool2d's transpose; its second gives the shape."""
    attrs = call.attrs
    pooled = relay.nn.avg_pool2d(
        output_grad,
        pool_size=attrs.pool_size,
        strides=attrs.strides,
        padding=attrs.padding,
        layout=attrs.layout,
        ceil_mode=attrs.ceil_mode,
        count_include_pad=attrs.count_include_pad,
    )
    return [pooled, relay.zeros_like(call.args[1])]


def max_pool2d_grad(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """nn.max_pool2d_grad hands each element of its first argument to the first largest of its window.

    So the gradient of that element is the one of that place: for each place of a window, where it holds the first
    largest. The second argument only says which place.

    Raises:
        UnsupportedError: a packed layout, or a spatial extent that is Any.
    """
    pooled, data = call.args
    attrs = call.attrs
    axes = _spatial(str(attrs.layout), 2, call.op.name)
    size, strides = [int(k) for k in attrs.pool_size], [int(s) for s in attrs.strides]
    top, left, bottom, right = _sides([int(p) for p in attrs.padding])
    rank = len(data.checked_type.shape)
    dtype = data.checked_type.dtype
    results = [known(extents_of(pooled)[axis], call, f"axis {axis} of the pool") for axis in axes]
    extents = [known(extents_of(data)[axis], call, f"axis {axis} of the data") for axis in axes]
    # High enough that every window is whole, also where ceil_mode has one that starts inside and ends outside.
    pairs = [(0, 0)] * rank
    for i, (axis, low, high) in enumerate(zip(axes, (top, left), (bottom, right), strict=True)):
        reach = (results[i] - 1) * strides[i] + size[i]
        pairs[axis] = (low, max(high, reach - low - extents[i]))
    lowest = relay.const(np.finfo(dtype).min, dtype)
    values = relay.nn.pad(data, pairs, lowest)
    upstream = relay.nn.pad(output_grad, pairs)
    largest = relay.nn.max_pool2d(
        data,
        pool_size=attrs.pool_size,
        strides=attrs.strides,
        padding=attrs.padding,
        layout=attrs.layout,
        ceil_mode=attrs.ceil_mode,
    )
    free, found = relay.ones_like(largest), relay.zeros_like(largest)

    def at(value: relay.Expr, place: tuple[int, ...]) -> relay.Expr:
        ends = [begin + (n - 1) * step + 1 for begin, n, step in zip(place, results, strides, strict=True)]
        return relay.strided_slice(value, list(place), ends, strides, axes=axes)

    for place in product(*map(range, size)):
        here = relay.where(relay.equal(at(values, place), largest), free, relay.zeros_like(free))
        found = found + here * at(upstream, place)
        free = free - here
    return [found, relay.zeros_like(data)]


def _sides(padding: list[int]) -> list[int]:
    """Top, left, bottom, right of the forms that Relay's pools take: one number, two, or four."""
    return padding * 4 if len(padding) == 1 else padding * 2 if len(padding) == 2 else padding


RULES: Rules = {
    **{f"nn.adaptive_avg_pool{rank}d": adaptive_avg_pool for rank in SPATIAL},
    "nn.avg_pool2d_grad": avg_pool2d_grad,
    "nn.max_pool2d_grad": max_pool2d_grad,
}
