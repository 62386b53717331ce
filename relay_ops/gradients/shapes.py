# SPDX-License-Identifier: Apache-2.0
"""Gradients of operators that move, repeat or drop elements: each is the transpose of a 0-1 matrix."""

from __future__ import annotations

from tvm import relay

from relay_ops.gradients.contract import Rules, extents_of, field, known
from tvm_convgrad.core.errors import UnsupportedError


def split(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The parts' gradients put together."""
    count = len(call.checked_type.fields)
    return [relay.concatenate([field(output_grad, i) for i in range(count)], int(call.attrs.axis))]


def pad(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The part of the gradient that is not padding, and for the value that was padded with the sum of the rest.

    Raises:
        UnsupportedError: the padding repeats elements of the data, or that of an axis of extent Any.
    """
    if str(call.attrs.pad_mode) != "constant":
        raise UnsupportedError(
            f"gradient of nn.pad: pad_mode={call.attrs.pad_mode!r} is not served, only 'constant'; write the repeated "
            "elements with strided_slice and concatenate, which have gradients"
        )
    pairs = [(int(low), int(high)) for low, high in call.attrs.pad_width]
    sizes = [
        known(extent, call, f"the padded axis {axis} of the data") if low or high else -1
        for axis, ((low, high), extent) in enumerate(zip(pairs, extents_of(call.args[0]), strict=True))
    ]
    if all(size == -1 for size in sizes):
        inside = output_grad
    else:
        inside = relay.strided_slice(output_grad, [low for low, _ in pairs], sizes, slice_mode="size")
    if len(call.args) == 1:
        return [inside]
    filling = call.args[1]
    if filling.checked_type.dtype != call.checked_type.dtype:  # an integer, such as the default
        return [inside, relay.zeros_like(filling)]
    return [inside, relay.sum(output_grad) - relay.sum(inside)]


def tile(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The sum over the copies.

    Raises:
        UnsupportedError: an axis of extent Any is repeated.
    """
    extents, times = extents_of(call.args[0]), [int(rep) for rep in call.attrs.reps]
    own = [None] * (len(times) - len(extents)) + list(range(len(extents)))
    times = [1] * (len(extents) - len(times)) + times
    shape: list[int] = []
    copies: list[int] = []
    for axis, rep in zip(own, times, strict=True):
        if axis is None or rep > 1:
            copies.append(len(shape))
            shape.append(rep)
        if axis is not None:
            extent = extents[axis]
            shape.append(-1 if extent is None and rep == 1 else known(extent, call, f"the repeated axis {axis}"))
    if shape.count(-1) > 1:
        raise UnsupportedError("gradient of tile: more than one axis is Any; give all but one of them static types")
    apart = relay.reshape(output_grad, shape)
    return [relay.sum(apart, axis=copies) if copies else apart]


def reverse(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The gradient in the other direction."""
    return [relay.reverse(output_grad, int(call.attrs.axis))]


def dilate(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The elements that are not padding of a packed layout.

    Raises:
        UnsupportedError: an axis of extent Any is dilated.
    """
    axes, steps, ends = [], [], []
    for axis, (step, extent) in enumerate(zip(call.attrs.strides, extents_of(call), strict=True)):
        if int(step) > 1 or extent is not None:
            axes.append(axis)
            steps.append(int(step))
            ends.append(known(extent, call, f"the dilated axis {axis}"))
    every = len(axes) == len(call.attrs.strides)  # stock differentiates slices of all axes only
    return [relay.strided_slice(output_grad, [0] * len(axes), ends, steps, axes=None if every else axes)]


def layout_transform(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The gradient in the first layout."""
    return [relay.layout_transform(output_grad, str(call.attrs.dst_layout), str(call.attrs.src_layout))]


def broadcast_to_like(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The sum over what was repeated; the second argument gives the shape only."""
    return [relay.collapse_sum_like(output_grad, call.args[0]), relay.zeros_like(call.args[1])]


def broadcast_to(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The sum over what was repeated."""
    return [relay.collapse_sum_like(output_grad, call.args[0])]


RULES: Rules = {
    "split": split,
    "nn.pad": pad,
    "tile": tile,
    "reverse": reverse,
    "nn.dilate": dilate,
    "layout_transform": layout_transform,
    "broadcast_to_like": broadcast_to_like,
    "broadcast_to": broadcast_to,
}
