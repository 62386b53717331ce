# SPDX-License-Identifier: Apache-2.0
"""Convolutions, transposed convolutions and their gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm import relax

from relax_ops.ops import make_call
from tvm_convgrad.core.catalogue import BY_NAME
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.core.geometry import (
    SPATIAL,
    channel_multiplier,
    multiplied_kernel_layout,
    swapped_kernel_layout,
    transposed_extent,
)
from tvm_convgrad.importer.attributes import integers
from tvm_convgrad.importer.context import FLOATS, Context
from tvm_convgrad.importer.table import Converter, op

_FORWARD = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}
_TRANSPOSE = {1: relax.op.nn.conv1d_transpose, 2: relax.op.nn.conv2d_transpose, 3: relax.op.nn.conv3d_transpose}


def flat_pads(padding: Any, rank: int) -> tuple[int, ...]:
    """Relay's padding (one for all, one an axis, or lows then highs) as lows then highs."""
    values = integers("padding", padding, lowest=0, count=(1, rank, 2 * rank))
    if len(values) == 2 * rank:
        return values
    return (values * rank if len(values) == 1 else values) * 2


def per_axis(what: str, value: relax.Expr, rank: int, lowest: int = 1, default: int = 1) -> tuple[int, ...]:
    """An attribute with one value an axis; an empty list stands for the default."""
    values = integers(what, value, lowest=lowest, count=(0, 1, rank))
    if not values:
        return (default,) * rank
    return values * rank if len(values) == 1 else values


def layout_of(what: str, text: str, letters: str, default: str) -> str:
    """A layout that is an order of `letters`.

    Raises:
        ModelError: it is another one, such as a packed layout.
    """
    text = text or default
    if sorted(text) != sorted(letters):
        raise ModelError(f"{what} {text!r} is not an order of {letters}; packed layouts are not imported")
    return text


def _geometry(attrs: SimpleNamespace, rank: int) -> dict[str, Any]:
    groups = attrs.groups
    if not 1 <= groups <= 2**31:
        raise ModelError(f"groups = {groups}")
    return {
        "strides": per_axis("strides", attrs.strides, rank),
        "padding": flat_pads(attrs.padding, rank),
        "dilation": per_axis("dilation", attrs.dilation, rank),
        "groups": groups,
    }


def _by_letter(context: Context, value: relax.Expr, layout: str, what: str) -> dict[str, Any]:
    shape = context.shape(value)
    if len(shape) != len(layout):
        raise ModelError(f"{what} has {len(shape)} axes, which {layout} does not fit")
    return dict(zip(layout, shape, strict=True))


def _check_kernel(context: Context, weight: dict[str, Any], attrs: SimpleNamespace, out: relax.Expr, rank: int) -> None:
    """Refuse channels and kernel sizes of the attributes that are not those of the weight."""
    if attrs.kernel_size is not None:
        kernel = integers("kernel_size", attrs.kernel_size, lowest=1, count=(rank,))
        if list(kernel) != [weight[letter] for letter in SPATIAL[rank]]:
            raise ModelError(f"kernel_size {list(kernel)} is not that of the weight, {weight}")
    if attrs.channels is not None and attrs.channels != out:
        raise ModelError(f"channels {attrs.channels} are not those of the weight, {out}")
    if any(isinstance(extent, int) and extent < 1 for extent in weight.values()):
        raise ModelError(f"the weight has the extents {weight}")


def _one_channel_a_group(context: Context, weight: relax.Expr, layout: str) -> tuple[relax.Expr, str]:
    """A depthwise weight with the channel multiplier on its I axis as one with O = channels and I = 1."""
    order = multiplied_kernel_layout(layout)
    value = context.permute(weight, [layout.index(letter) for letter in order])
    extents = dict(zip(order, context.shape(value), strict=True))
    extents |= {"O": extents["O"] * extents["I"], "I": 1}
    return context.reshape(value, [extents[letter] for letter in order]), order


def _convolution(rank: int) -> Converter:
    letters = SPATIAL[rank]

    def convert(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
        data_layout = layout_of("data_layout", attrs.data_layout, "NC" + letters, "NC" + letters)
        kernel_layout = layout_of("kernel_layout", attrs.kernel_layout, "OI" + letters, "OI" + letters)
        out_layout = layout_of("out_layout", attrs.out_layout, "NC" + letters, data_layout)
        geometry = _geometry(attrs, rank)
        data = _by_letter(context, args[0], data_layout, "the data")
        weight = _by_letter(context, args[1], kernel_layout, "the weight")
        groups = geometry["groups"]
        channels = None if attrs.kernel_size is None else attrs.channels
        kernel = args[1]
        if channel_multiplier(rank, data["C"], weight["O"], weight["I"], groups, channels) > 1:
            kernel, kernel_layout = _one_channel_a_group(context, kernel, kernel_layout)
            weight = _by_letter(context, kernel, kernel_layout, "the weight")
        if isinstance(data["C"], int) and weight["I"] * groups != data["C"]:
            raise ModelError(f"{weight['I']} input channels of the weight by {groups} groups are not {data['C']}")
        if isinstance(weight["O"], int) and weight["O"] % geometry["groups"]:
            raise ModelError(f"{weight['O']} output channels do not divide into {geometry['groups']} groups")
        _check_kernel(context, weight, attrs, weight["O"], rank)
        for place, letter in enumerate(letters):
            low, high = geometry["padding"][place], geometry["padding"][rank + place]
            spread = geometry["dilation"][place] * (weight[letter] - 1) + 1
            if isinstance(data[letter], int) and data[letter] + low + high < spread:
                raise ModelError(f"the kernel spans {spread} along {letter}, more than the padded data")
        result = context.emit(
            _FORWARD[rank](
                args[0],
                kernel,
                data_layout=data_layout,
                kernel_layout=kernel_layout,
                out_dtype=attrs.out_dtype or None,
                **geometry,
            )
        )
        return context.permute(result, [data_layout.index(letter) for letter in out_layout])

    return convert


def _transposed(rank: int) -> Converter:
    letters = SPATIAL[rank]

    def convert(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
        data_layout = layout_of("data_layout", attrs.data_layout, "NC" + letters, "NC" + letters)
        kernel_layout = layout_of("kernel_layout", attrs.kernel_layout, "IO" + letters, "IO" + letters)
        if layout_of("out_layout", attrs.out_layout, "NC" + letters, data_layout) != data_layout:
            raise ModelError(f"out_layout {attrs.out_layout} differs from data_layout {data_layout}")
        geometry = _geometry(attrs, rank)
        extra = per_axis("output_padding", attrs.output_padding, rank, lowest=0, default=0)
        data = _by_letter(context, args[0], data_layout, "the data")
        weight = _by_letter(context, args[1], kernel_layout, "the weight")
        if weight["I"] != data["C"] and isinstance(data["C"], int):
            raise ModelError(f"{weight['I']} input channels of the weight are not {data['C']}")
        if isinstance(weight["I"], int) and weight["I"] % geometry["groups"]:
            raise ModelError(f"{weight['I']} input channels do not divide into {geometry['groups']} groups")
        _check_kernel(context, weight, attrs, None if attrs.channels is None else _channels(weight, geometry), rank)
        dtype = context.dtype(args[0])
        exact = all(more < stride for more, stride in zip(extra, geometry["strides"], strict=True))
        if exact and dtype in FLOATS:
            swapped = swapped_kernel_layout(kernel_layout)
            result = backward_data(context, args, geometry, extra, data_layout, swapped, attrs.out_dtype)
            context.lifted.append(f"{attrs.op_name} is the data gradient conv{rank}d_backward_data")
            return result
        return context.emit(
            _TRANSPOSE[rank](
                args[0],
                args[1],
                output_padding=extra,
                data_layout=data_layout,
                kernel_layout=kernel_layout,
                out_dtype=attrs.out_dtype or None,
                **geometry,
            )
        )

    return convert


def _channels(weight: dict[str, Any], geometry: dict[str, Any]) -> Any:
    return weight["O"] * geometry["groups"]


def backward_data(
    context: Context,
    args: list[relax.Expr],
    geometry: dict[str, Any],
    extra: tuple[int, ...],
    data_layout: str,
    kernel_layout: str,
    out_dtype: str,
) -> relax.Expr:
    """dX of the convolution whose gradient is args[0] and whose weight is args[1], in `kernel_layout`.

    Extents of X: `core.geometry.transposed_extent` with the output padding `extra`.
    """
    rank = len(extra)
    grad = _by_letter(context, args[0], data_layout, "the gradient")
    weight = _by_letter(context, args[1], kernel_layout, "the weight")
    shape = {"N": grad["N"], "C": weight["I"] * geometry["groups"]}
    for place, letter in enumerate(SPATIAL[rank]):
        stride, dilation = geometry["strides"][place], geometry["dilation"][place]
        low, high = geometry["padding"][place], geometry["padding"][rank + place]
        shape[letter] = transposed_extent(grad[letter], weight[letter], stride, dilation, low, high, extra[place])
        if isinstance(shape[letter], int) and shape[letter] < 1:
            raise ModelError(f"the result would have the extent {shape[letter]} along {letter}")
    return context.emit(
        make_call(
            BY_NAME[f"conv{rank}d_backward_data"],
            args[0],
            args[1],
            data_shape=[shape[letter] for letter in data_layout],
            grad_layout=data_layout,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_dtype=out_dtype or None,
            **geometry,
        )
    )


for _rank in (1, 2, 3):
    op(f"nn.conv{_rank}d", attributes=f"Conv{_rank}DAttrs", operands=2, note="unpacked layouts only")(
        _convolution(_rank)
    )
    op(
        f"nn.conv{_rank}d_transpose",
        attributes=f"Conv{_rank}DTransposeAttrs",
        operands=2,
        note=f"becomes conv{_rank}d_backward_data where it is the data gradient of a convolution",
    )(_transposed(_rank))


@op("nn.conv2d_backward_data", attributes="Conv2DTransposeAttrs", operands=2, note="an operator of this project")
def _backward_data(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    layout = layout_of("data_layout", attrs.data_layout, "NCHW", "NCHW")
    kernel_layout = layout_of("kernel_layout", attrs.kernel_layout, "OIHW", "OIHW")
    geometry = _geometry(attrs, 2)
    extra = per_axis("output_padding", attrs.output_padding, 2, lowest=0, default=0)
    return backward_data(context, args, geometry, extra, layout, kernel_layout, attrs.out_dtype)


@op("nn.conv2d_backward_weight", attributes="Conv2DAttrs", operands=2)
def _backward_weight(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    """Relay reuses the attributes of nn.conv2d: data_layout is dY's, kernel_layout is X's, out_layout is dW's."""
    grad_layout = layout_of("data_layout", attrs.data_layout, "NCHW", "NCHW")
    given = "" if set(attrs.kernel_layout) & set("OI") else attrs.kernel_layout
    data_layout = layout_of("kernel_layout", given, "NCHW", "NCHW")
    kernel_layout = layout_of("out_layout", attrs.out_layout, "OIHW", "OIHW")
    if attrs.kernel_size is None:
        raise ModelError("kernel_size is missing, and nothing else determines it")
    return context.emit(
        make_call(
            BY_NAME["conv2d_backward_weight"],
            args[0],
            args[1],
            kernel_size=integers("kernel_size", attrs.kernel_size, lowest=1, count=(2,)),
            grad_layout=grad_layout,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_dtype=attrs.out_dtype or None,
            **_geometry(attrs, 2),
        )
    )
