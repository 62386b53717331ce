# SPDX-License-Identifier: Apache-2.0
"""The catalogue of the operator family: names, operands, attributes, type relation, gradients. Knows no IR.

A convolution is bilinear, so it has three faces, each the gradient of the other two; every rule of the family follows
from that and is written here once, for all ranks and for every IR that binds it (relax_ops, relay_ops).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm_convgrad.errors import DTypeError, ProblemError
from tvm_convgrad.geometry import (
    FLOAT_DTYPES,
    SPATIAL,
    check_channels,
    check_dtype,
    check_layout,
    check_size,
    data_layout_of,
    effective_kernel,
    kernel_layout_of,
    normalize_axes,
    output_extent,
)

# ---------------------------------------------------------------------------------------------------- names


@dataclass(frozen=True)
class Face:
    """One face of the convolution.

    Attributes:
        name: as in the operator's name, after `conv2d_`; empty for the forward face.
        operands: the two tensors it takes, in order.
        result: the tensor it gives. The three of them are always data, weight and grad.
        gradients: for each operand, the face that computes its gradient and that face's two operands, where `result`
            stands for the gradient that comes in. This table is the closure of the family.
    """

    name: str
    operands: tuple[str, str]
    result: str
    gradients: tuple[tuple[str, tuple[str, str]], tuple[str, tuple[str, str]]]


CLOSURE = {
    "grad = forward(data, weight)": ("data = backward_data(result, weight)", "weight = backward_weight(result, data)"),
    "weight = backward_weight(grad, data)": ("grad = forward(data, result)", "data = backward_data(grad, result)"),
    "data = backward_data(grad, weight)": ("grad = forward(result, weight)", "weight = backward_weight(grad, result)"),
}
"""Each face, and the gradients of its operands in order, where `result` stands for the gradient that comes in."""


def _equation(text: str) -> tuple[str, str, tuple[str, str]]:
    """ "weight = backward_weight(grad, data)" as ("weight", "backward_weight", ("grad", "data"))."""
    result, _, call = text.partition(" = ")
    name, _, operands = call.rstrip(")").partition("(")
    first, second = operands.split(", ")
    return result, name, (first, second)


def _face(text: str) -> Face:
    result, name, operands = _equation(text)
    first, second = (_equation(gradient) for gradient in CLOSURE[text])
    assert (first[0], second[0]) == operands  # each gradient is that of its operand
    return Face(name, operands, result, (first[1:], second[1:]))


FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA = map(_face, CLOSURE)
FACES = {face.name: face for face in (FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA)}


@dataclass(frozen=True)
class OpEntry:
    """One operator: a face at a rank."""

    face: Face
    rank: int

    @property
    def name(self) -> str:
        """Such as `conv2d_backward_weight`; the forward one is the stock `conv2d`."""
        return f"conv{self.rank}d" + ("" if self.face is FORWARD else f"_{self.face.name}")

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attribute names in order; the result's own extents come first where the operands do not determine them."""
        own = {"backward_weight": ("kernel_size",)}.get(self.face.name, ())
        layouts = ("grad_layout", "data_layout", "kernel_layout")
        return (*own, "strides", "padding", "dilation", "groups", *layouts, "out_dtype")


NEW_OPS = tuple(OpEntry(face, rank) for rank in SPATIAL for face in (BACKWARD_WEIGHT, BACKWARD_DATA))
"""The six operators that TVM lacks."""

BY_NAME = {entry.name: entry for entry in (*NEW_OPS, *(OpEntry(FORWARD, rank) for rank in SPATIAL))}
"""Operators by name, the three forward ones included."""


# ------------------------------------------------------------------------------------------- type relation


class Prover(Protocol):
    """What an IR knows of its extents: whether two of them are equal."""

    def equal(self, a: Any, b: Any) -> bool | None:
        """True or False if it can be proven, None if it depends on values known at run time."""

    def show(self, extent: Any) -> str:
        """An extent as text, for messages."""


class NumberProver:
    """The prover for plain ints."""

    def equal(self, a: Any, b: Any) -> bool | None:
        """Whether two ints are equal."""
        return bool(a == b)

    def show(self, extent: Any) -> str:
        """The int's digits."""
        return str(extent)


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor: `shape` (None if unknown), number of axes (None if unknown), dtype (None likewise)."""

    shape: tuple[Any, ...] | None
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
        kernel_size: wgrad's argument, None for the other faces.
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
        with _speaking_for(self.op):
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
    with _speaking_for(attributes.op):
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
    data_shape: Sequence[Any] | None,
    prover: Prover,
) -> TensorSpec:
    """Type relation of dgrad: from dY, W and the shape of X (None if not known yet), the type of dX.

    Raises:
        ProblemError, DTypeError: the operands do not belong to one convolution; names operand, rule, values, remedy.
    """
    with _speaking_for(attributes.op):
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
    attributes: ConvAttributes, grad: Sequence[Any], data: Sequence[Any], kernel: Sequence[int], prover: Prover
) -> tuple[str, ...]:
    """Axes of dY whose extent is neither proven nor disproven: a binding checks them when the program runs."""
    expected = expected_grad_shape(attributes, grad, data, kernel)
    return tuple(
        letter
        for letter, have, want in zip(attributes.grad_layout, grad, expected, strict=True)
        if prover.equal(have, want) is not True
    )


def expected_grad_shape(
    attributes: ConvAttributes, grad: Sequence[Any], data: Sequence[Any], kernel: Sequence[int]
) -> tuple[Any, ...]:
    """The shape that dY must have for X of shape `data`: its own channels, X's batch, the forward extents."""
    x = dict(zip(attributes.data_layout, data, strict=True))
    dy = dict(zip(attributes.grad_layout, grad, strict=True))
    want = {"N": x["N"], "C": dy["C"], **_forward_extents(attributes, x, kernel)}
    return tuple(want[letter] for letter in attributes.grad_layout)


def canonical_layouts(rank: int) -> tuple[str, str, str]:
    """Layouts of grad, data and kernel if nothing else is said."""
    return data_layout_of(rank), data_layout_of(rank), kernel_layout_of(rank)


# ------------------------------------------------------------------------------------------------- checks


class _speaking_for:
    """Put the operator's name before the sentence of any error raised inside."""

    def __init__(self, op: str) -> None:
        self.op = op

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (ProblemError, DTypeError)) and not str(error).startswith(self.op):
            raise type(error)(f"{self.op}: {error}") from None


def _check_operand(spec: TensorSpec, name: str, attributes: ConvAttributes) -> None:
    if spec.dtype is not None:
        check_dtype(spec.dtype, name)
    if spec.ndim is not None and spec.ndim != attributes.rank + 2:
        raise ProblemError(
            f"{name} has {spec.ndim} axes; layout {attributes.layout(name)} has {attributes.rank + 2}: "
            f"add the missing axis, or use the operator of another rank"
        )


def _check_batch(grad: Any, data: Any, prover: Prover) -> None:
    if prover.equal(grad, data) is False:
        raise ProblemError(
            f"grad's batch is {prover.show(grad)}, the data's is {prover.show(data)}; they must be equal"
        )


def _forward_extents(attributes: ConvAttributes, x: dict[str, Any], kernel: Sequence[int]) -> dict[str, Any]:
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
    x: dict[str, Any],
    dy: dict[str, Any],
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


def _check_sizes(attributes: ConvAttributes, **shapes: Sequence[Any] | None) -> None:
    for name, shape in shapes.items():
        if shape is not None:
            check_size(shape, name)


def _is_number(extent: Any) -> bool:
    return isinstance(extent, int)


def _number(extent: Any, name: str, what: str = "channels") -> int:
    if not isinstance(extent, int):
        raise ProblemError(
            f"the {what} of {name} are symbolic ({extent}); only batch and data extents may be: bind them first"
        )
    return extent


def _show(shape: Sequence[Any]) -> str:
    return "(" + ", ".join(str(e) for e in shape) + ")"
