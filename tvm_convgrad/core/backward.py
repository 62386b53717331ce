# SPDX-License-Identifier: Apache-2.0
"""convolution_backward with PyTorch's contract: which direction of which convolution computes each gradient.

A transposed convolution is dgrad read forwards: it takes the tensor that the family calls grad and gives the one that
the family calls data. So the gradients of either come from a row of the catalogue's closure, that of `forward` or that
of `backward_data`, and this module adds only the geometry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm_convgrad.core.arguments import Ints, Padding
from tvm_convgrad.core.catalogue import BACKWARD_DATA, DIRECTIONS, FORWARD, Direction
from tvm_convgrad.core.errors import ProblemError, attributed_to
from tvm_convgrad.core.geometry import (
    SPATIAL,
    Size,
    check_channels,
    check_dtype,
    check_layout,
    data_layout_of,
    normalize_axes,
    normalize_padding,
    output_extent,
    swapped_kernel_layout,
    transposed_extent,
)
from tvm_convgrad.core.type_relation import Prover, TensorSpec

NAME = "convolution_backward"
OPERANDS = ("grad", "data", "weight")


@dataclass(frozen=True)
class BackwardCall:
    """A checked call, in the terms of the family.

    Attributes:
        transposed: whether the convolution was a transposed one; then the family's data is `grad`, its grad is `data`.
        mask: which of the gradients of data, weight and bias are wanted.
        strides, padding, dilation, groups: of the family's convolution.
        layouts: of the caller's grad and data, and of weight with the family's meaning of I and O.
        kernel: extents of the kernel.
        crop: elements at the end of each axis of grad that nothing reached (output padding beyond a stride).
    """

    transposed: bool
    mask: tuple[bool, bool, bool]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    layouts: tuple[str, str, str]
    kernel: tuple[int, ...]
    crop: tuple[int, ...]

    @property
    def roles(self) -> dict[str, str]:
        """The caller's tensor that has each role in the family's convolution."""
        return roles_of(self.transposed)

    @property
    def gradients(self) -> tuple[tuple[Direction, tuple[str, str]], ...]:
        """For data and for weight: the direction that gives its gradient, and the caller's tensors that it takes."""
        direction = BACKWARD_DATA if self.transposed else FORWARD
        named = {direction.operands[0]: "data", direction.operands[1]: "weight", "result": "grad"}
        return tuple((DIRECTIONS[name], (named[first], named[second])) for name, (first, second) in direction.gradients)


def roles_of(transposed: bool) -> dict[str, str]:
    """The caller's tensor that has each role in the family's convolution, and the role of each of the caller's tensors.

    Of a transposed convolution, which is dgrad, data and grad change places.
    """
    return {"grad": "data", "data": "grad", "weight": "weight"} if transposed else {name: name for name in OPERANDS}


def default_kernel_layout(rank: int, transposed: bool) -> str:
    """OI…, or IO… of a transposed convolution, which calls its data's channels I."""
    return ("IO" if transposed else "OI") + SPATIAL[rank]


def family_kernel_layout(layout: str, transposed: bool) -> str:
    """A kernel's layout with the family's meaning of I and O."""
    return swapped_kernel_layout(layout) if transposed else layout


def backward_call(
    specs: Mapping[str, TensorSpec],
    prover: Prover,
    *,
    bias_sizes: Sequence[int] | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
    output_mask: Sequence[bool] = (True, True, True),
    grad_layout: str | None = None,
    data_layout: str | None = None,
    kernel_layout: str | None = None,
) -> BackwardCall:
    """Check every argument of `tvm_convgrad.convolution_backward` (which describes them) against every other.

    Args:
        specs: shape and type of "grad", "data" and "weight"; the shapes are known, extents may be symbolic.
        prover: compares extents.

    Raises:
        ProblemError, DTypeError: the tensors do not belong to one convolution.
    """
    with attributed_to(NAME):
        rank = _rank(specs)
        canonical = data_layout_of(rank)
        layouts = {
            "grad": grad_layout or canonical,
            "data": data_layout or canonical,
            "weight": kernel_layout or default_kernel_layout(rank, transposed),
        }
        shapes = {}
        for name, spec in specs.items():
            check_dtype(str(spec.dtype), name)
            argument = "kernel_layout" if name == "weight" else f"{name}_layout"
            check_layout(layouts[name], rank, "kernel" if name == "weight" else "data", argument)
            shapes[name] = dict(zip(layouts[name], spec.shape or (), strict=True))
        strides, steps = normalize_axes(stride, rank, "stride"), normalize_axes(dilation, rank, "dilation")
        extra = normalize_axes(output_padding, rank, "output_padding", least=0)
        kernel = tuple(_number(shapes["weight"][axis], f"the kernel's extent of axis {axis}") for axis in SPATIAL[rank])
        pairs = _padding(padding, transposed, shapes["data"], kernel, strides, steps)
        _check_output_padding(extra, transposed, strides, steps)
        channels = _check_channels(shapes, transposed, groups, prover)
        _check_shapes(shapes, transposed, kernel, strides, pairs, steps, extra, prover)
        mask = _mask(output_mask)
        if mask[2] and bias_sizes is not None and tuple(bias_sizes) != (channels,):
            raise ProblemError(f"bias_sizes={tuple(bias_sizes)}, but grad has {channels} channels: give ({channels},)")
    high, crop = _unreached(extra, strides, pairs)
    return BackwardCall(
        transposed=bool(transposed),
        mask=mask,
        strides=strides,
        padding=tuple((low, left) for (low, _), left in zip(pairs, high, strict=True)),
        dilation=steps,
        groups=int(groups),
        layouts=(
            layouts["grad"],
            layouts["data"],
            family_kernel_layout(layouts["weight"], transposed),
        ),
        kernel=kernel,
        crop=crop,
    )


def _rank(specs: Mapping[str, TensorSpec]) -> int:
    axes = {name: len(spec.shape or ()) for name, spec in specs.items()}
    rank = axes["weight"] - 2
    if rank not in SPATIAL or len(set(axes.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in axes.items())
        if len(set(axes.values())) > 1:
            raise ProblemError(f"grad, data and weight must have equally many axes, but {counts}; add the missing axes")
        raise ProblemError(f"grad, data and weight must have 3, 4 or 5 axes, but {counts}; add the missing axes")
    return rank


def _padding(
    padding: Padding,
    transposed: bool,
    x: Mapping[str, Size],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str) and transposed:
        raise ProblemError(f"padding={padding!r} has no meaning for a transposed convolution; give it as numbers")
    extents = [e if isinstance(e, int) else str(e) for e in (x[axis] for axis in SPATIAL[len(kernel)])]
    return normalize_padding(padding, data_extents=extents, kernel=kernel, strides=strides, dilation=dilation)


def _check_output_padding(
    extra: Sequence[int], transposed: bool, strides: Sequence[int], dilation: Sequence[int]
) -> None:
    for axis, more, stride, step in zip(SPATIAL[len(extra)], extra, strides, dilation, strict=True):
        if more and not transposed:
            raise ProblemError(f"output_padding={tuple(extra)} belongs to transposed convolutions; leave it at 0")
        if more >= max(stride, step):
            raise ProblemError(
                f"output_padding {more} of axis {axis} must be smaller than the stride, {stride}, or the dilation, "
                f"{step}"
            )


def _check_channels(shapes: Mapping[str, Mapping[str, Size]], transposed: bool, groups: int, prover: Prover) -> int:
    """The channels of grad, which are the elements of the bias."""
    into, out = (_number(shapes[name]["C"], f"the channels of {name}") for name in ("data", "grad"))
    w_in, w_out = (_number(shapes["weight"][letter], f"the weight's {letter} axis") for letter in "IO")
    check_channels(into, out, groups)
    for name, have, axis, extent, want in (
        ("data", into, "I", w_in, w_in if transposed else w_in * groups),
        ("grad", out, "O", w_out, w_out * groups if transposed else w_out),
    ):
        if have != want:
            raise ProblemError(
                f"{name} has {have} channels, but the weight's {axis} axis is {extent}, which with groups={groups} "
                f"{'and transposed=True ' if transposed else ''}makes {want}; check groups and kernel_layout"
            )
    if prover.equal(shapes["grad"]["N"], shapes["data"]["N"]) is False:
        raise ProblemError(
            f"grad's batch is {prover.show(shapes['grad']['N'])}, the data's is {prover.show(shapes['data']['N'])}; "
            f"they must be equal"
        )
    return out


def _check_shapes(
    shapes: Mapping[str, Mapping[str, Size]],
    transposed: bool,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    extra: Sequence[int],
    prover: Prover,
) -> None:
    """The extents of grad must be those that the convolution gives for the data."""
    columns = zip(SPATIAL[len(kernel)], kernel, strides, padding, dilation, extra, strict=True)
    for axis, k, s, (low, high), d, more in columns:
        x, dy = shapes["data"][axis], shapes["grad"][axis]
        made = transposed_extent(x, k, s, d, low, high, more) if transposed else output_extent(x, k, s, d, low, high)
        if prover.equal(made, dy) is False:
            raise ProblemError(
                f"axis {axis}: a {'transposed ' if transposed else ''}convolution of data extent {prover.show(x)} with "
                f"kernel {k}, stride {s}, dilation {d}, padding {(low, high)}"
                + (f" and output_padding {more}" if transposed else "")
                + f" gives {prover.show(made)}, but grad has {prover.show(dy)}; check stride, padding and dilation"
            )


def _unreached(
    extra: Sequence[int], strides: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[list[int], tuple[int, ...]]:
    """The family's high padding of each axis, and how much of the family's data is then to be cropped.

    Output padding less than a stride is what the floor division hides. More of it (PyTorch allows it with dilation) is
    so much less padding; what is left when no padding is, no element of the kernel ever reached.
    """
    high, crop = [], []
    for more, stride, (_, before) in zip(extra, strides, padding, strict=True):
        taken = min(more, before) if more >= stride else 0
        high.append(before - taken)
        crop.append(more - taken if more - taken >= stride else 0)
    return high, tuple(crop)


def _mask(output_mask: Sequence[bool]) -> tuple[bool, bool, bool]:
    mask = tuple(bool(wanted) for wanted in output_mask)
    if len(mask) != 3:
        raise ProblemError(f"output_mask={mask} has {len(mask)} entries; give three, for data, weight and bias")
    return mask[0], mask[1], mask[2]


def _number(extent: Size, what: str) -> int:
    if not isinstance(extent, int):
        raise ProblemError(f"{what} is symbolic ({extent}); only batch and data extents may be: bind it first")
    return extent
