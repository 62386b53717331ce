# SPDX-License-Identifier: Apache-2.0
"""A transposed convolution as the data gradient that it is: its arguments and shapes, for either IR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_convgrad.core.arguments import Ints, Padding, make_attributes
from tvm_convgrad.core.catalogue import BACKWARD_DATA, OpEntry
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.geometry import SPATIAL, Size, normalize_axes, swapped_kernel_layout, transposed_extent


@dataclass(frozen=True)
class TransposedCall:
    """The arguments of dgrad, `data_shape` included, that make it a transposed convolution."""

    data_shape: tuple[Size, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    grad_layout: str
    data_layout: str
    kernel_layout: str
    out_dtype: str | None


def transposed_call(
    rank: int,
    shapes: Callable[[], tuple[Sequence[Size], Sequence[Size]]],
    *,
    strides: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    data_layout: str | None = None,
    kernel_layout: str | None = None,
    out_layout: str | None = None,
    out_dtype: str | None = None,
) -> TransposedCall:
    """The data gradient that conv{rank}d_transpose of data by weight is.

    Extents of the result: `core.geometry.transposed_extent`.

    Args:
        rank: number of spatial axes.
        shapes: of data and weight, computed once the other arguments are right.
        strides, padding, dilation, groups: as everywhere; padding is numbers.
        output_padding: elements to add on the high side, below the stride.
        data_layout, kernel_layout, out_layout: None is NC…, IO… and `data_layout`. The weight's I are the data's
            channels, its O those of the result's group.

    Raises:
        ProblemError: an output padding that is not below its stride, or another argument that breaks a rule.
    """
    op = f"conv{rank}d_transpose"
    data_layout = data_layout or "NC" + SPATIAL[rank]
    swapped = swapped_kernel_layout(kernel_layout or "IO" + SPATIAL[rank])
    out_layout = out_layout or data_layout
    if isinstance(padding, str):
        raise ProblemError(f"{op}: padding={padding!r} by name has no meaning here; give numbers")
    made = make_attributes(
        OpEntry(BACKWARD_DATA, rank),
        data_shape=lambda: None,
        weight_shape=lambda: None,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        grad_layout=data_layout,
        data_layout=out_layout,
        kernel_layout=swapped,
        out_dtype=out_dtype,
    )
    extra = normalize_axes(output_padding, rank, "output_padding", least=0)
    for axis, more, stride in zip(SPATIAL[rank], extra, made.strides, strict=True):
        if more >= stride:
            raise ProblemError(
                f"{op}: output_padding {more} of axis {axis} is not below its stride {stride}; pad the result instead"
            )
    given = shapes()
    if [len(shape) for shape in given] != [rank + 2] * 2:
        raise ProblemError(f"{op}: data and weight must have {rank + 2} axes besides the batch's")
    x, w = (dict(zip(layout, shape, strict=True)) for layout, shape in zip((data_layout, swapped), given, strict=True))
    result: dict[str, Size] = {"N": x["N"], "C": w["I"] * groups}
    for axis, s, d, pair, more in zip(SPATIAL[rank], made.strides, made.dilation, made.padding, extra, strict=True):
        result[axis] = transposed_extent(x[axis], w[axis], s, d, *pair, more)
    return TransposedCall(
        data_shape=tuple(result[letter] for letter in out_layout),
        strides=made.strides,
        padding=made.padding,
        dilation=made.dilation,
        groups=groups,
        grad_layout=data_layout,
        data_layout=out_layout,
        kernel_layout=swapped,
        out_dtype=out_dtype,
    )
