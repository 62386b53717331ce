# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call, as a user writes or an IR stores them, to ConvAttributes and to the ConvProblem of the call.

Both bindings (relax_ops, relay_ops) make their calls and read them through these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, Union

from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, Direction, OpEntry
from tvm_convgrad.core.errors import ProblemError, UnsupportedError, attributed_to
from tvm_convgrad.core.geometry import (
    SPATIAL,
    Extent,
    Size,
    canonical_layouts,
    check_layout,
    normalize_axes,
    normalize_padding,
    swapped_kernel_layout,
)
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import ConvAttributes, TensorSpec, result_dtype

Ints = Union[int, Sequence[int]]
Padding = Union[str, int, Sequence[int], Sequence[Sequence[int]]]
Shape = Callable[[], "tuple[Size, ...] | None"]
"""Computes the shape of a tensor where it is needed; None if it is not known."""


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
        data_shape, weight_shape: called only for a padding by name; wgrad's kernel is `kernel_size`.
        kernel_size: wgrad only.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see tvm_convgrad.op.

    Raises:
        ProblemError, DTypeError: an argument breaks a rule; those of the operands are checked when types are inferred.
    """
    rank = entry.rank
    given = {"grad_layout": grad_layout, "data_layout": data_layout, "kernel_layout": kernel_layout}
    layouts = canonical_layouts(rank) | {name: layout for name, layout in given.items() if layout is not None}
    by_name = isinstance(padding, str)
    with attributed_to(entry.name):
        for name, layout in layouts.items():
            check_layout(layout, rank, "kernel" if name == "kernel_layout" else "data", name)
        strides = normalize_axes(strides, rank, "strides")
        dilation = normalize_axes(dilation, rank, "dilation")
        kernel: Sequence[int] = (1,) * rank
        if entry.direction is BACKWARD_WEIGHT:
            if kernel_size is None:
                raise missing(entry, "kernel_size")
            kernel = normalize_axes(kernel_size, rank, "kernel_size")
        elif by_name:
            kernel = [int(k) for k in _spatial(weight_shape(), "weight", layouts["kernel_layout"], rank)]
        extents: Sequence[Extent] = [0] * rank
        if by_name:
            found = _spatial(data_shape(), "data", layouts["data_layout"], rank)
            extents = [e if isinstance(e, int) else str(e) for e in found]
        pairs = normalize_padding(padding, data_extents=extents, kernel=kernel, strides=strides, dilation=dilation)
    return ConvAttributes(
        op=entry.name,
        rank=rank,
        strides=strides,
        padding=pairs,
        dilation=dilation,
        groups=int(groups),
        out_dtype=str(out_dtype or "") or None,
        kernel_size=tuple(kernel) if entry.direction is BACKWARD_WEIGHT else None,
        **layouts,
    )


def stored_attributes(
    entry: OpEntry,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    grad_layout: str,
    data_layout: str,
    kernel_layout: str,
    out_dtype: str,
    kernel_size: Iterable[int] | None = None,
) -> ConvAttributes:
    """The attributes of a call that an IR stores: integers of the IR, flat padding, "" for a type that is not given.

    Raises:
        ProblemError, DTypeError: an attribute breaks a rule.
    """
    rank = entry.rank
    with attributed_to(entry.name):
        for name, values in (("strides", strides), ("dilation", dilation)):
            if len(values) != rank:
                raise ProblemError(f"{name} needs {rank} entries, but has {len(values)}")
        kernel = None
        if entry.direction is BACKWARD_WEIGHT:
            if kernel_size is None:
                raise missing(entry, "kernel_size")
            kernel = integers(kernel_size)
        own = {"strides": integers(strides), "dilation": integers(dilation)}
        pairs = normalize_padding(integers(padding), data_extents=[0] * rank, kernel=[1] * rank, **own)
    return ConvAttributes(
        op=entry.name,
        rank=rank,
        strides=own["strides"],
        padding=pairs,
        dilation=own["dilation"],
        groups=int(groups),
        grad_layout=str(grad_layout),
        data_layout=str(data_layout),
        kernel_layout=str(kernel_layout),
        out_dtype=str(out_dtype) or None,
        kernel_size=kernel,
    )


_REQUIRED = {
    "kernel_size": "grad and data do not determine it",
    "data_shape": "grad and weight do not determine it where strides exceed 1",
}


def missing(entry: OpEntry, name: str) -> ProblemError:
    """The error of a call without its `kernel_size` or `data_shape`."""
    return ProblemError(f"{entry.name}: {name} is missing; {_REQUIRED[name]}")


def integers(values: Iterable[int]) -> tuple[int, ...]:
    """Integers of an IR as Python's."""
    return tuple(int(value) for value in values)


def problem_of_call(
    direction: Direction,
    attributes: ConvAttributes,
    shapes: Mapping[str, Sequence[Size]],
    dtypes: Mapping[str, str],
    name: Callable[[Size], Extent] = lambda extent: extent,
) -> ConvProblem:
    """The ConvProblem of a well-typed call to wgrad or dgrad.

    Args:
        direction: BACKWARD_WEIGHT or BACKWARD_DATA.
        attributes: of the call.
        shapes: of its operands by tensor name, and for dgrad of "data"; in the call's layouts.
        dtypes: of its operands by tensor name.
        name: converts an extent of the IR to an int or a name.
    """
    out_dtype = result_dtype(attributes, [TensorSpec(None, None, dtype) for dtype in dtypes.values()])
    assert out_dtype is not None  # both operands' types are known
    dtypes = {**dtypes, direction.result: out_dtype}
    axes = SPATIAL[attributes.rank]
    if direction is BACKWARD_DATA:
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


class StockAttributes(Protocol):
    """The attributes, in any IR, of a stock convolution or transposed convolution."""

    strides: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    data_layout: str
    kernel_layout: str
    out_layout: str


def problem_of_stock_call(
    op: str,
    rank: int,
    attributes: StockAttributes,
    shapes: Mapping[str, Sequence[Extent]],
    dtypes: Mapping[str, str],
    *,
    transposed: bool = False,
    kernel_layout: str | None = None,
) -> ConvProblem:
    """The ConvProblem of a stock convolution, or of the convolution whose dgrad a stock transposed convolution is.

    A transposed convolution takes the problem's grad and gives its data. What it calls I and O of the weight are the
    problem's O and I.

    Args:
        op: the operator's name, for messages.
        rank: number of spatial axes.
        attributes: of the call.
        shapes: of the problem's "data" and "weight", of a transposed convolution also of "grad".
        dtypes: of the problem's "data", "weight" and "grad".
        transposed: whether it is a transposed convolution.
        kernel_layout: of the problem's weight; None is the call's.

    Raises:
        ProblemError, DTypeError: no such convolution exists.
        UnsupportedError: a layout is packed, or output padding gives more data than the problem's grad can come from.
    """
    first = str(attributes.data_layout)
    last = str(attributes.out_layout) or first
    if kernel_layout is None:
        kernel_layout = str(attributes.kernel_layout)
        kernel_layout = swapped_kernel_layout(kernel_layout) if transposed else kernel_layout
    data_layout, grad_layout = (last, first) if transposed else (first, last)
    refuse_packed(op, rank, (data_layout, kernel_layout, grad_layout))
    problem = ConvProblem.from_shapes(
        shapes["data"],
        [int(extent) for extent in shapes["weight"]],
        strides=integers(attributes.strides),
        padding=integers(attributes.padding),
        dilation=integers(attributes.dilation),
        groups=int(attributes.groups),
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        grad_layout=grad_layout,
        dtypes=(dtypes["data"], dtypes["weight"], dtypes["grad"]),
    )
    if transposed and problem.is_static and problem.grad_shape != tuple(shapes["grad"]):
        raise UnsupportedError(
            f"{op}: output_padding is not below the strides {list(problem.strides)}; pad the result instead"
        )
    return problem


def refuse_packed(op: str, rank: int, layouts: Iterable[str]) -> None:
    """Raise UnsupportedError if a layout, such as NCHW4c, has more axes than the convolution."""
    for layout in layouts:
        if len(layout) != rank + 2:
            raise UnsupportedError(
                f"{op}: packed layouts such as {layout!r} are not served; take the gradient in a plain layout and "
                f"convert afterwards with ConvertLayout"
            )


def desired_layouts(
    op: str, rank: int, desired: Sequence[str], present: Sequence[str] | None = None
) -> tuple[str, str, str]:
    """The layouts of data, kernel and grad that an entry of ConvertLayout's argument gives a call of the family.

    Args:
        op: the operator's full name, for messages.
        rank: number of spatial axes.
        desired: of data (and of grad, if nothing else is given), of the kernel, and optionally of grad.
        present: what the word "default" stands for, in the order of the result; None where there is no such word.

    Raises:
        UnsupportedError: the layouts are too few or too many, or packed.
        ProblemError: they are not permutations of the tensors' axes.
    """
    if len(desired) not in (2, 3):
        raise UnsupportedError(
            f"ConvertLayout: {op} takes 2 or 3 layouts (data, kernel, and grad if it differs), "
            f"but {len(desired)} are given: {', '.join(desired)}"
        )
    data, kernel, grad = (*desired, desired[0])[:3]
    if present is not None:
        data, kernel, grad = (
            have if want == "default" else want for have, want in zip(present, (data, kernel, grad), strict=True)
        )
    for layout, kind in ((data, "data"), (kernel, "kernel"), (grad, "data")):
        if len(layout) != rank + 2:
            raise UnsupportedError(
                f"ConvertLayout: {op} has no packed layouts, but {kind} layout {layout!r} is wanted; "
                f"give a permutation of its {rank + 2} axes"
            )
        check_layout(layout, rank, kind, f"ConvertLayout: {kind} layout of {op}")
    return data, kernel, grad


def _spatial(shape: tuple[Size, ...] | None, name: str, layout: str, rank: int) -> list[Size]:
    """The spatial extents that a padding by name depends on."""
    if shape is None:
        raise ProblemError(
            f"padding by name needs the shape of {name}, which is not known; give the padding as numbers"
        )
    if len(shape) != len(layout):
        raise ProblemError(f"{name} has {len(shape)} axes; layout {layout} has {len(layout)}: add the missing axis")
    return [shape[layout.index(axis)] for axis in SPATIAL[rank]]
