# SPDX-License-Identifier: Apache-2.0
"""The type relation of wgrad and dgrad: checked attributes, and from the operands' types that of the result.

It is written once for every IR: a binding gives its types as TensorSpec, whose extents are ints or expressions of the
IR, and a Prover that compares extents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm_convgrad.core.errors import DTypeError, ProblemError, attributed_to
from tvm_convgrad.core.geometry import (
    FLOAT_DTYPES,
    SPATIAL,
    Size,
    check_channels,
    check_dtype,
    check_layout,
    check_size,
    effective_kernel,
    normalize_axes,
    output_extent,
)


class Prover(Protocol):
    """What an IR proves of its extents: whether two of them are equal."""

    def equal(self, a: Size, b: Size) -> bool | None:
        """True or False if it can be proven, None if it depends on values known at run time."""

    def show(self, extent: Size) -> str:
        """An extent as text, for messages."""


class NumberProver:
    """The prover for plain ints."""

    def equal(self, a: Size, b: Size) -> bool | None:
        """Whether two ints are equal."""
        return bool(a == b)

    def show(self, extent: Size) -> str:
        """The int's digits."""
        return str(extent)


@dataclass(frozen=True)
class TensorSpec:
    """The type of a tensor, as far as it is known at compile time; None stands for what is not known."""

    shape: tuple[Size, ...] | None
    ndim: int | None
    dtype: str | None


@dataclass(frozen=True)
class ConvAttributes:
    """The attributes of one call of the family, checked against each other; operands are checked by `infer`.

    Attributes:
        op: the operator's name, for messages.
        rank: 1 to 3.
        strides, dilation: an int an axis.
        padding: (low, high) an axis.
        groups: at least 1.
        grad_layout, data_layout, kernel_layout: permutations.
        out_dtype: None is the type that the operands suggest.
        kernel_size: wgrad's argument, None for the other directions.
    """

    op: str
    rank: int
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    grad_layout: str
    data_layout: str
    kernel_layout: str
    out_dtype: str | None = None
    kernel_size: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        with attributed_to(self.op):
            normalize_axes(self.strides, self.rank, "strides")
            normalize_axes(self.dilation, self.rank, "dilation")
            if self.kernel_size is not None:
                normalize_axes(self.kernel_size, self.rank, "kernel_size")
            for axis, pair in zip(SPATIAL[self.rank], self.padding, strict=True):
                if min(pair) < 0:
                    raise ProblemError(
                        f"padding {pair} of axis {axis} is negative; slice the data before the convolution instead"
                    )
            if self.groups < 1:
                raise ProblemError(f"groups={self.groups}; it must be at least 1")
            check_layout(self.grad_layout, self.rank, "data", "grad_layout")
            check_layout(self.data_layout, self.rank, "data", "data_layout")
            check_layout(self.kernel_layout, self.rank, "kernel", "kernel_layout")
            if self.out_dtype is not None and self.out_dtype not in FLOAT_DTYPES:
                raise DTypeError(f"out_dtype={self.out_dtype!r} is unknown; give one of {', '.join(FLOAT_DTYPES)}")

    def layout(self, operand: str) -> str:
        """The layout of operand "grad", "data" or "weight"."""
        return {"grad": self.grad_layout, "data": self.data_layout, "weight": self.kernel_layout}[operand]


def common_dtype(operands: Sequence[TensorSpec]) -> str | None:
    """The operands' common type, else the wider of the two (f16 with bf16 gives f32); None if one is not known."""
    dtypes = {spec.dtype for spec in operands}
    if None in dtypes:
        return None
    if len(dtypes) == 1:
        return operands[0].dtype
    return "float64" if "float64" in dtypes else "float32"


def result_dtype(attributes: ConvAttributes, operands: Sequence[TensorSpec]) -> str | None:
    """`out_dtype` if given, else the operands' common type."""
    return attributes.out_dtype or common_dtype(operands)


def infer_backward_weight(attributes: ConvAttributes, grad: TensorSpec, data: TensorSpec, prover: Prover) -> TensorSpec:
    """Type relation of wgrad: from dY and X, the type of dW.

    Raises:
        ProblemError, DTypeError: the operands do not belong to one convolution; names operand, rule, values, remedy.
    """
    with attributed_to(attributes.op):
        assert attributes.kernel_size is not None
        _check_operand(grad, "grad", attributes)
        _check_operand(data, "data", attributes)
        dtype = result_dtype(attributes, (grad, data))
        ndim = attributes.rank + 2
        if grad.shape is None or data.shape is None:
            return TensorSpec(None, ndim, dtype)
        dy = dict(zip(attributes.grad_layout, grad.shape, strict=True))
        x = dict(zip(attributes.data_layout, data.shape, strict=True))
        in_channels, out_channels = _number(x["C"], "data"), _number(dy["C"], "grad")
        check_channels(in_channels, out_channels, attributes.groups)
        _check_batch(dy["N"], x["N"], prover)
        _check_extents(attributes, x, dy, attributes.kernel_size, prover, "kernel_size")
        w = {"O": out_channels, "I": in_channels // attributes.groups}
        w.update(zip(SPATIAL[attributes.rank], attributes.kernel_size, strict=True))
        shape = tuple(w[letter] for letter in attributes.kernel_layout)
        _check_sizes(attributes, grad=grad.shape, data=data.shape, weight=shape)
        return TensorSpec(shape, ndim, dtype)


def infer_backward_data(
    attributes: ConvAttributes,
    grad: TensorSpec,
    weight: TensorSpec,
    data_shape: Sequence[Size] | None,
    prover: Prover,
) -> TensorSpec:
    """Type relation of dgrad: from dY, W and the shape of X (None if not known yet), the type of dX.

    Raises:
        ProblemError, DTypeError: the operands do not belong to one convolution; names operand, rule, values, remedy.
    """
    with attributed_to(attributes.op):
        _check_operand(grad, "grad", attributes)
        _check_operand(weight, "weight", attributes)
        dtype = result_dtype(attributes, (grad, weight))
        ndim = attributes.rank + 2
        if data_shape is None:
            return TensorSpec(None, ndim, dtype)
        if len(data_shape) != ndim:
            raise ProblemError(
                f"data_shape={_show(data_shape)} has {len(data_shape)} entries; layout "
                f"{attributes.data_layout} has {ndim}: give the full shape of the data, batch and channels included"
            )
        shape = tuple(data_shape)
        x = dict(zip(attributes.data_layout, shape, strict=True))
        in_channels = _number(x["C"], "data_shape")
        for letter, extent in x.items():
            if _is_number(extent) and extent < 0:
                raise ProblemError(f"data_shape={_show(shape)}: axis {letter} is {extent}; it cannot be negative")
        if weight.shape is not None:
            w = dict(zip(attributes.kernel_layout, weight.shape, strict=True))
            kernel = tuple(_number(w[a], "weight", "kernel extents") for a in SPATIAL[attributes.rank])
            out_channels, per_group = _number(w["O"], "weight"), _number(w["I"], "weight")
            check_channels(in_channels, out_channels, attributes.groups)
            if per_group * attributes.groups != in_channels:
                raise ProblemError(
                    f"the weight's I axis is {per_group}, but data_shape={_show(shape)} has {in_channels} channels in "
                    f"groups={attributes.groups}, that is {in_channels // attributes.groups} each; check data_shape, "
                    f"groups and kernel_layout={attributes.kernel_layout!r}"
                )
            if grad.shape is not None:
                dy = dict(zip(attributes.grad_layout, grad.shape, strict=True))
                if prover.equal(dy["C"], out_channels) is False:
                    raise ProblemError(
                        f"grad has {prover.show(dy['C'])} channels, but the weight's O axis is {out_channels}; check "
                        f"grad_layout={attributes.grad_layout!r} and kernel_layout={attributes.kernel_layout!r}"
                    )
                _check_batch(dy["N"], x["N"], prover)
                _check_extents(attributes, x, dy, kernel, prover, "data_shape")
        _check_sizes(attributes, data_shape=shape, grad=grad.shape, weight=weight.shape)
        return TensorSpec(shape, ndim, dtype)


def unproven_axes(
    attributes: ConvAttributes, grad: Sequence[Size], data: Sequence[Size], kernel: Sequence[int], prover: Prover
) -> tuple[str, ...]:
    """Axes of dY whose extent is neither proven nor disproven: a binding checks them when the program runs."""
    expected = expected_grad_shape(attributes, grad, data, kernel)
    return tuple(
        letter
        for letter, have, want in zip(attributes.grad_layout, grad, expected, strict=True)
        if prover.equal(have, want) is not True
    )


def expected_grad_shape(
    attributes: ConvAttributes, grad: Sequence[Size], data: Sequence[Size], kernel: Sequence[int]
) -> tuple[Size, ...]:
    """The shape that dY must have for X of shape `data`: its own channels, X's batch, the forward extents."""
    x = dict(zip(attributes.data_layout, data, strict=True))
    dy = dict(zip(attributes.grad_layout, grad, strict=True))
    want = {"N": x["N"], "C": dy["C"], **_forward_extents(attributes, x, kernel)}
    return tuple(want[letter] for letter in attributes.grad_layout)


def _check_operand(spec: TensorSpec, name: str, attributes: ConvAttributes) -> None:
    if spec.dtype is not None:
        check_dtype(spec.dtype, name)
    if spec.ndim is not None and spec.ndim != attributes.rank + 2:
        raise ProblemError(
            f"{name} has {spec.ndim} axes; layout {attributes.layout(name)} has {attributes.rank + 2}: "
            f"add the missing axis, or use the operator of another rank"
        )


def _check_batch(grad: Size, data: Size, prover: Prover) -> None:
    if prover.equal(grad, data) is False:
        raise ProblemError(
            f"grad's batch is {prover.show(grad)}, the data's is {prover.show(data)}; they must be equal"
        )


def _forward_extents(attributes: ConvAttributes, x: Mapping[str, Size], kernel: Sequence[int]) -> dict[str, Size]:
    return {
        axis: output_extent(x[axis], k, s, d, low, high)
        for axis, k, s, d, (low, high) in zip(
            SPATIAL[attributes.rank],
            kernel,
            attributes.strides,
            attributes.dilation,
            attributes.padding,
            strict=True,
        )
    }


def _check_extents(
    attributes: ConvAttributes,
    x: Mapping[str, Size],
    dy: Mapping[str, Size],
    kernel: Sequence[int],
    prover: Prover,
    argument: str,
) -> None:
    computed = _forward_extents(attributes, x, kernel)
    for i, axis in enumerate(SPATIAL[attributes.rank]):
        differs = prover.equal(computed[axis], dy[axis]) is False
        if differs and _is_number(computed[axis]) and computed[axis] == 0:
            raise ProblemError(
                f"axis {axis}: kernel {kernel[i]} with dilation {attributes.dilation[i]} covers "
                f"{effective_kernel(kernel[i], attributes.dilation[i])} elements, more than the padded data has "
                f"({x[axis]} + {sum(attributes.padding[i])}); check {argument} and padding"
            )
        if differs:
            raise ProblemError(
                f"axis {axis}: a forward convolution of data extent {prover.show(x[axis])} with kernel {kernel[i]}, "
                f"stride {attributes.strides[i]}, dilation {attributes.dilation[i]} and padding "
                f"{attributes.padding[i]} gives {prover.show(computed[axis])}, but grad has "
                f"{prover.show(dy[axis])}; check {argument}, strides, dilation and padding"
            )


def _check_sizes(attributes: ConvAttributes, **shapes: Sequence[Size] | None) -> None:
    for name, shape in shapes.items():
        if shape is not None:
            check_size(shape, name)


def _is_number(extent: Size) -> bool:
    return isinstance(extent, int)


def _number(extent: Size, name: str, what: str = "channels") -> int:
    if not isinstance(extent, int):
        raise ProblemError(
            f"the {what} of {name} are symbolic ({extent}); only batch and data extents may be: bind them first"
        )
    return extent


def _show(shape: Sequence[Size]) -> str:
    return "(" + ", ".join(str(e) for e in shape) + ")"
