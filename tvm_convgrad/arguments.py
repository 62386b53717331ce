# SPDX-License-Identifier: Apache-2.0
"""From what a user or an IR says of a call to what the catalogue checks: ConvAttributes, and the ConvProblem of a call.

Every binding (relax_ops, relay_ops) makes its calls and reads them through these functions. They know no IR.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from tvm_convgrad.catalogue import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    ConvAttributes,
    Face,
    OpEntry,
    TensorSpec,
    canonical_layouts,
    result_dtype,
)
from tvm_convgrad.errors import DTypeError, ProblemError
from tvm_convgrad.geometry import SPATIAL, Extent, check_layout, normalize_axes, normalize_padding
from tvm_convgrad.problem import ConvProblem

Ints = Union[int, Sequence[int]]
Padding = Union[str, int, Sequence[int], Sequence[Sequence[int]]]
Shape = Callable[[], "tuple[Any, ...] | None"]
"""Gives the shape of a tensor when it is asked for, None if it is not known."""


def make_attributes(
    entry: OpEntry,
    *,
    data_shape: Shape,
    weight_shape: Shape,
    kernel_size: Ints | None = None,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str | None = None,
    data_layout: str | None = None,
    kernel_layout: str | None = None,
    out_dtype: str | None = None,
) -> ConvAttributes:
    """The attributes of a call, every accepted form of an argument made canonical.

    Args:
        entry: the operator.
        data_shape, weight_shape: asked for only by a padding by name; wgrad's kernel is `kernel_size`.
        kernel_size: wgrad only.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see tvm_convgrad.op.

    Raises:
        ProblemError, DTypeError: an argument breaks a rule; those of the operands are checked when types are inferred.
    """
    rank = entry.rank
    layouts = dict(zip(("grad_layout", "data_layout", "kernel_layout"), canonical_layouts(rank), strict=True))
    given = {"grad_layout": grad_layout, "data_layout": data_layout, "kernel_layout": kernel_layout}
    layouts.update({name: value for name, value in given.items() if value is not None})
    by_name = isinstance(padding, str)
    try:
        for name, layout in layouts.items():
            check_layout(layout, rank, "kernel" if name == "kernel_layout" else "data", name)
        strides = normalize_axes(strides, rank, "strides")
        dilation = normalize_axes(dilation, rank, "dilation")
        kernel: Sequence[int] = (1,) * rank
        if entry.face is BACKWARD_WEIGHT:
            if kernel_size is None:
                raise ProblemError("kernel_size is missing; grad and data do not determine it")
            kernel = normalize_axes(kernel_size, rank, "kernel_size")
        elif by_name:
            kernel = [int(k) for k in _spatial(weight_shape(), "weight", layouts["kernel_layout"], rank)]
        extents: Sequence[Extent] = [0] * rank
        if by_name:
            found = _spatial(data_shape(), "data", layouts["data_layout"], rank)
            extents = [e if isinstance(e, int) else str(e) for e in found]
        pairs = normalize_padding(padding, data_extents=extents, kernel=kernel, strides=strides, dilation=dilation)
    except (ProblemError, DTypeError) as error:
        raise type(error)(f"{entry.name}: {error}") from None
    return ConvAttributes(
        op=entry.name,
        rank=rank,
        strides=strides,
        padding=pairs,
        dilation=dilation,
        groups=int(groups),
        out_dtype=None if out_dtype in (None, "") else str(out_dtype),
        kernel_size=tuple(kernel) if entry.face is BACKWARD_WEIGHT else None,
        **layouts,
    )


def problem_of_call(
    face: Face,
    attributes: ConvAttributes,
    shapes: Mapping[str, Sequence[Any]],
    dtypes: Mapping[str, str],
    name: Callable[[Any], Extent] = lambda extent: extent,
) -> ConvProblem:
    """The ConvProblem of a well-typed call to wgrad or dgrad.

    Args:
        face: BACKWARD_WEIGHT or BACKWARD_DATA.
        attributes: of the call.
        shapes: of its operands by tensor name, and for dgrad of "data"; in the call's layouts.
        dtypes: of its operands by tensor name.
        name: turns an extent of the IR into an int or a name.
    """
    out_dtype = result_dtype(attributes, [TensorSpec(None, None, dtype) for dtype in dtypes.values()])
    assert out_dtype is not None  # both operands' types are known
    dtypes = {**dtypes, face.result: out_dtype}
    axes = SPATIAL[attributes.rank]
    if face is BACKWARD_DATA:
        w = dict(zip(attributes.kernel_layout, shapes["weight"], strict=True))
        kernel, out_channels = tuple(w[a] for a in axes), w["O"]
    else:
        assert attributes.kernel_size is not None
        kernel = attributes.kernel_size
        out_channels = shapes["grad"][attributes.grad_layout.index("C")]
    x = dict(zip(attributes.data_layout, shapes["data"], strict=True))
    return ConvProblem(
        batch=name(x["N"]),
        in_channels=x["C"],
        out_channels=out_channels,
        data_extents=tuple(name(x[a]) for a in axes),
        kernel=kernel,
        strides=attributes.strides,
        padding=attributes.padding,
        dilation=attributes.dilation,
        groups=attributes.groups,
        data_layout=attributes.data_layout,
        kernel_layout=attributes.kernel_layout,
        grad_layout=attributes.grad_layout,
        data_dtype=dtypes["data"],
        kernel_dtype=dtypes["weight"],
        grad_dtype=dtypes["grad"],
    )


def _spatial(shape: tuple[Any, ...] | None, name: str, layout: str, rank: int) -> list[Any]:
    """The spatial extents that a padding by name depends on."""
    if shape is None:
        raise ProblemError(
            f"padding by name needs the shape of {name}, which is not known; give the padding as numbers"
        )
    if len(shape) != len(layout):
        raise ProblemError(f"{name} has {len(shape)} axes; layout {layout} has {len(layout)}: add the missing axis")
    return [shape[layout.index(axis)] for axis in SPATIAL[rank]]
