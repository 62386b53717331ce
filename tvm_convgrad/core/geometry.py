# SPDX-License-Identifier: Apache-2.0
"""Geometry of convolutions: rules for layouts, extents, padding and channels, as small pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Union

from tvm_convgrad.core.errors import DTypeError, ProblemError

Extent = Union[int, str]
"""A number of elements, or the name (or expression) of one that is known only at run time."""

Size = Any
"""An int, or an IR's expression of an extent, which has + - * // with ints. Names (see `Extent`) are none."""

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
"""Spatial letters of each rank, outermost first."""

FLOAT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
"""Accepted element types and their short names in descriptors."""

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of one element."""

_INT64_MAX = 2**63 - 1


def data_layout_of(rank: int) -> str:
    """The canonical layout of data and grad: `NCW`, `NCHW` or `NCDHW`."""
    return "NC" + SPATIAL[rank]


def swapped_kernel_layout(layout: str) -> str:
    """A transposed convolution's kernel layout with the family's meaning of I and O, which it exchanges; and back."""
    return layout.translate(str.maketrans("IO", "OI"))


def kernel_layout_of(rank: int) -> str:
    """The canonical layout of the weight: `OIW`, `OIHW` or `OIDHW`."""
    return "OI" + SPATIAL[rank]


def canonical_layouts(rank: int) -> dict[str, str]:
    """The layouts of a call that states none, by attribute name."""
    data = data_layout_of(rank)
    return {"grad_layout": data, "data_layout": data, "kernel_layout": kernel_layout_of(rank)}


def channel_multiplier(
    rank: int, data_channels: Size, weight_o: Size, weight_i: Size, groups: int, channels: int | None
) -> int:
    """The channel multiplier that Relay reads from the I axis of a depthwise weight; 1 where I has its usual meaning.

    Relay recognises such a call by its extents: groups, the channels of the data and the weight's O axis are equal, and
    the attributes state the kernel's size and `channels`, the output channels, which are groups * I. With I = 1 both
    readings agree. nn.conv1d has no such weights.

    Args:
        rank: number of spatial axes.
        data_channels, weight_o, weight_i: extents.
        groups: of the call.
        channels: of the call; None unless the call also states kernel_size.
    """
    depthwise = rank > 1 and 1 < groups == data_channels == weight_o
    return int(weight_i) if depthwise and isinstance(weight_i, int) and channels == groups * weight_i else 1


def multiplied_kernel_layout(layout: str) -> str:
    """A kernel layout with its I right behind its O, so that (O, I) can be reshaped to (O * I, 1)."""
    return layout.replace("I", "").replace("O", "OI")


def check_layout(layout: str, rank: int, kind: str, name: str) -> str:
    """Return `layout` if it is a permutation of the letters that a `kind` tensor of this rank has.

    Args:
        layout: such as "NHWC".
        rank: number of spatial axes, 1 to 3.
        kind: "data" (letters N, C and the spatial ones) or "kernel" (O, I and the spatial ones).
        name: the parameter's name, for the message.

    Raises:
        ProblemError: a letter is missing, repeated or unknown.
    """
    canonical = data_layout_of(rank) if kind == "data" else kernel_layout_of(rank)
    if sorted(layout) != sorted(canonical):
        raise ProblemError(
            f"{name}={layout!r} is not a permutation of the letters {canonical!r}; "
            f"give one such as {canonical!r} or "
            f"{(canonical[0] + canonical[2:] + canonical[1]) if kind == 'data' else canonical[2:] + 'IO'!r}"
        )
    return layout


def check_dtype(dtype: str, name: str) -> str:
    """Return `dtype` if it is a floating type of this package, else raise DTypeError."""
    if dtype not in FLOAT_DTYPES:
        raise DTypeError(f"{name} has dtype {dtype!r}; accepted are {', '.join(FLOAT_DTYPES)}: cast it first")
    return dtype


def normalize_axes(value: int | Sequence[int], rank: int, name: str, *, least: int = 1) -> tuple[int, ...]:
    """Spread an int over the spatial axes, or check that a sequence has one int for each.

    Raises:
        ProblemError: wrong length, or an entry below `least`.
    """
    if isinstance(value, int):
        result: tuple[int, ...] = (value,) * rank
    else:
        result = tuple(int(v) for v in value)
        if len(result) == 1:
            result *= rank
    if len(result) != rank:
        raise ProblemError(
            f"{name}={tuple(result)} has {len(result)} entries; a {rank}-d convolution takes one int or {rank}"
        )
    for axis, v in zip(SPATIAL[rank], result, strict=True):
        if v < least:
            raise ProblemError(f"{name}={result}: the entry of axis {axis} is {v}; it must be at least {least}")
    return result


def effective_kernel(kernel: Size, dilation: int) -> Size:
    """Extent that a dilated kernel covers, for ints and IR expressions: `dilation * (kernel - 1) + 1`."""
    return dilation * (kernel - 1) + 1


def output_extent(data: Size, kernel: int, stride: int, dilation: int, low: int, high: int) -> Size:
    """Extent of Y on one axis: `(X + low + high - effective kernel) // stride + 1`.

    Works for ints and for IR expressions alike; the formula is the one of every framework with floor rounding. A kernel
    that covers more than the padded data leaves no element, 0 (TensorFlow's reading).
    """
    extent = (data + (low + high - effective_kernel(kernel, dilation))) // stride + 1
    return max(extent, 0) if isinstance(extent, int) else extent


def transposed_extent(
    grad: Size, kernel: Size, stride: int, dilation: int, low: int, high: int, output_padding: int = 0
) -> Size:
    """Extent of X on one axis from that of Y, for ints and IR expressions: what a transposed convolution makes.

    `(Y - 1) * stride + effective kernel - low - high + output padding` (torch.nn.ConvTranspose2d, "Shape"), with the
    constants together, so that a symbolic Y gives the short expression `Y * stride + constant`. Without output padding
    it is the least X whose convolution has the extent Y; `hidden_extent` gives the output padding of a larger one.
    """
    return grad * stride + (effective_kernel(kernel, dilation) - low - high + output_padding - stride)


def hidden_extent(data: int, kernel: int, stride: int, dilation: int, low: int, high: int) -> int:
    """Elements of the padded data, on one axis, behind the last one that Y saw: what floor division hides.

    A transposed convolution calls it output padding.
    """
    return (data + low + high - effective_kernel(kernel, dilation)) % stride


def same_padding(data: Extent, kernel: int, stride: int, dilation: int, axis: str) -> tuple[int, int]:
    """TensorFlow's SAME: Y = ceil(X / stride), the odd element of padding goes to the high side.

    Source of the formula: tf.nn.convolution, "Notes on padding".

    Raises:
        ProblemError: the padding depends on a symbolic extent (stride > 1).
    """
    if isinstance(data, int):
        out = -(-data // stride)
        total = max(transposed_extent(out, kernel, stride, dilation, 0, 0) - data, 0)
    elif stride == 1:
        total = effective_kernel(kernel, dilation) - 1
    else:
        raise ProblemError(
            f'padding="SAME" with stride {stride} depends on the extent of axis {axis}, which is symbolic ({data}); '
            f"give the padding as numbers"
        )
    return total // 2, total - total // 2


def normalize_padding(
    padding: str | int | Sequence[int] | Sequence[Sequence[int]],
    *,
    data_extents: Sequence[Extent],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Every accepted form of padding as ((low, high), …), one pair a spatial axis.

    Args:
        padding: an int; one int an axis; `2*rank` ints, all lows then all highs (top, left, bottom, right);
            pairs (low, high), one an axis; "SAME" (TensorFlow's formula) or "VALID" (none).
        data_extents: the spatial extents of X; used by "SAME" only.
        kernel, strides, dilation: one int an axis.

    Raises:
        ProblemError: unknown name, wrong length, or a negative entry (crop the data instead).
    """
    rank = len(kernel)
    if isinstance(padding, str):
        upper = padding.upper()
        if upper == "VALID":
            return ((0, 0),) * rank
        if upper == "SAME":
            return tuple(
                same_padding(x, k, s, d, axis)
                for x, k, s, d, axis in zip(data_extents, kernel, strides, dilation, SPATIAL[rank], strict=True)
            )
        raise ProblemError(f'padding={padding!r} is unknown; names are "SAME" and "VALID"')
    if isinstance(padding, int):
        pairs = [(padding, padding)] * rank
    else:
        entries: list[Any] = list(padding)
        if entries and all(hasattr(e, "__len__") for e in entries):
            pairs = [(int(low), int(high)) for low, high in entries]
        else:
            flat = [int(p) for p in entries]
            if len(flat) == 1:
                flat *= rank
            if len(flat) == rank:
                pairs = [(p, p) for p in flat]
            elif len(flat) == 2 * rank:
                pairs = list(zip(flat[:rank], flat[rank:], strict=True))
            else:
                raise ProblemError(
                    f"padding={tuple(flat)} has {len(flat)} entries; a {rank}-d convolution takes one int, {rank} "
                    f'or {2 * rank} (all lows, then all highs), "SAME" or "VALID"'
                )
    if len(pairs) != rank:
        raise ProblemError(f"padding={tuple(pairs)} has {len(pairs)} pairs; a {rank}-d convolution takes {rank}")
    for axis, (low, high) in zip(SPATIAL[rank], pairs, strict=True):
        if low < 0 or high < 0:
            raise ProblemError(
                f"padding ({low}, {high}) of axis {axis} is negative; slice the data before the convolution instead"
            )
    return tuple(pairs)


def flat_padding(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """((low, high), …) in TVM's order: all lows, then all highs."""
    pairs = tuple(pairs)
    return tuple(low for low, _ in pairs) + tuple(high for _, high in pairs)


def symbolic_output(data: str, kernel: int, stride: int, dilation: int, low: int, high: int) -> str:
    """`output_extent` in text, for an extent that is a name."""
    slack = low + high - effective_kernel(kernel, dilation)
    inner = data if slack == 0 else f"{data}{slack:+d}"
    if stride == 1:
        return data if slack == -1 else f"{data}{slack + 1:+d}"
    return f"({inner})//{stride}+1"


def check_channels(in_channels: int, out_channels: int, groups: int) -> None:
    """Raise ProblemError unless `groups` is at least 1 and divides both channel counts."""
    if groups < 1:
        raise ProblemError(f"groups={groups}; it must be at least 1")
    for name, channels in (("input", in_channels), ("output", out_channels)):
        if channels < 0:
            raise ProblemError(f"{channels} {name} channels; there cannot be less than 0")
        if channels % groups:
            raise ProblemError(f"{channels} {name} channels are not divisible by groups={groups}")


def strides_of(layout: str, shape: Sequence[Extent]) -> dict[str, int]:
    """Elements from one entry of each axis to the next, in a compact tensor of constant extents."""
    return {letter: math.prod(int(e) for e in shape[i + 1 :]) for i, letter in enumerate(layout)}


def check_size(shape: Sequence[Extent], name: str) -> None:
    """Raise ProblemError if the static extents multiply to more than an int64 counts."""
    if math.prod(e for e in shape if isinstance(e, int)) > _INT64_MAX:
        raise ProblemError(
            f"{name} of shape {tuple(shape)} has more than 2**63 - 1 elements; no TVM tensor can hold it"
        )
