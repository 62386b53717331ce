# SPDX-License-Identifier: Apache-2.0
"""`served`: the parameters of JAX's convolution as a direction of a problem, or why no kernel computes it.

JAX has one operator for all: a convolution with a dilated lhs is the dgrad of another, whose kernel is its own one
reversed, and whose data is its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import jax
import numpy as np

from tvm_convgrad.core.catalogue import BACKWARD_DATA, FORWARD
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.geometry import (
    SPATIAL,
    data_layout_of,
    effective_kernel,
    kernel_layout_of,
    swapped_kernel_layout,
)
from tvm_convgrad.core.problem import ConvProblem

DTYPES = ("float32", "bfloat16", "float16")
"""The element types that kernels are tried for. In float64 gradients are checked, and speed does not matter."""

Pairs = tuple[tuple[int, int], ...]


class Parameters(TypedDict):
    """The parameters of JAX's primitive `conv_general_dilated`, canonical."""

    window_strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: jax.lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    precision: object
    preferred_element_type: np.dtype[np.generic] | None
    out_sharding: object


@dataclass(frozen=True)
class Served:
    """A convolution of JAX as one of the family.

    Attributes:
        problem: the family's convolution.
        direction: FORWARD(lhs, rhs), or BACKWARD_DATA(lhs, weight) where the weight is the rhs reversed along its
            spatial axes, its channels those of the problem.
        rhs_layout: letters of the rhs's axes, O being the channels of the result.
    """

    problem: ConvProblem
    direction: str
    rhs_layout: str

    @property
    def transposed(self) -> bool:
        """Whether it is a dgrad."""
        return self.direction == BACKWARD_DATA.name


def served(lhs: jax.core.ShapedArray, rhs: jax.core.ShapedArray, parameters: Parameters) -> Served | str:
    """The direction and problem of a convolution, or why no kernel is tried for it.

    Args:
        lhs, rhs: types of the operands.
        parameters: of JAX's primitive.
    """
    reason = _refusal(lhs, rhs, parameters)
    if reason:
        return reason
    try:
        if any(dilation != 1 for dilation in parameters["lhs_dilation"]):
            return _transposed(lhs, rhs, parameters)
        return _forward(lhs, rhs, parameters)
    except ConvGradError as error:  # such as a negative padding; what does not exist, JAX refuses in its own words
        return str(error)


def describe(lhs: jax.core.ShapedArray, rhs: jax.core.ShapedArray, parameters: Parameters) -> str:
    """A convolution that has no problem, in words: types, and what is not its default."""
    words = [f"{each.dtype}[{','.join(map(str, each.shape))}]" for each in (lhs, rhs)]
    for name in ("window_strides", "lhs_dilation", "rhs_dilation"):
        values = parameters[name]
        words += [f"{name}={values}"] if any(value != 1 for value in values) else []
    words += [f"padding={parameters['padding']}"] if any(map(any, parameters["padding"])) else []
    for name in ("feature_group_count", "batch_group_count"):
        words += [f"{name}={parameters[name]}"] if parameters[name] != 1 else []  # type: ignore[literal-required]
    return "conv_general_dilated " + " ".join(words)


def _refusal(lhs: jax.core.ShapedArray, rhs: jax.core.ShapedArray, parameters: Parameters) -> str:
    if lhs.ndim - 2 not in SPATIAL or rhs.ndim != lhs.ndim:
        return "the operands have not both 3, 4 or 5 axes"
    lengths = {len(parameters[name]) for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")}
    if lengths != {lhs.ndim - 2}:
        return "strides, padding and dilations have not all an entry for each spatial axis"
    if lhs.dtype != rhs.dtype:
        return f"the element types differ: {lhs.dtype}, {rhs.dtype}"
    if lhs.dtype.name not in DTYPES:
        return f"kernels are used for {', '.join(DTYPES)}, not for {lhs.dtype}"
    if parameters["preferred_element_type"] not in (None, lhs.dtype):
        return f"preferred_element_type is {parameters['preferred_element_type']}, not {lhs.dtype}"
    if parameters["batch_group_count"] != 1:
        return f"batch_group_count is {parameters['batch_group_count']}"
    if not all(isinstance(extent, int) for extent in (*lhs.shape, *rhs.shape)):
        return "an extent is symbolic"
    if 0 in (*lhs.shape, *rhs.shape):
        return "an operand has no elements"
    for each in (lhs, rhs):
        if each.manual_axis_type.varying or not each.sharding.mesh.empty:
            return "it is inside of shard_map, or an operand is on a mesh of devices"
    if parameters["out_sharding"] is not None:
        return "out_sharding is given"
    return ""


def _layout(spec: Sequence[int], canonical: str) -> str:
    """A tensor's layout: where the batch or output axis, the channel axis and the spatial ones are."""
    letters = dict(zip(spec, canonical, strict=True))
    return "".join(letters[place] for place in range(len(spec)))


def _layouts(parameters: Parameters, rank: int) -> tuple[str, str, str]:
    """Of lhs, rhs and the result."""
    numbers = parameters["dimension_numbers"]
    data = data_layout_of(rank)
    return (
        _layout(numbers.lhs_spec, data),
        _layout(numbers.rhs_spec, kernel_layout_of(rank)),
        _layout(numbers.out_spec, data),
    )


def _forward(lhs: jax.core.ShapedArray, rhs: jax.core.ShapedArray, parameters: Parameters) -> Served | str:
    data, kernel, grad = _layouts(parameters, lhs.ndim - 2)
    problem = ConvProblem.from_shapes(
        lhs.shape,
        rhs.shape,
        strides=parameters["window_strides"],
        padding=parameters["padding"],
        dilation=parameters["rhs_dilation"],
        groups=parameters["feature_group_count"],
        data_layout=data,
        kernel_layout=kernel,
        grad_layout=grad,
        dtypes=(lhs.dtype.name,) * 3,
    )
    return "the result has no elements" if problem.is_empty else Served(problem, FORWARD.name, kernel)


def _transposed(lhs: jax.core.ShapedArray, rhs: jax.core.ShapedArray, parameters: Parameters) -> Served | str:
    rank, groups = lhs.ndim - 2, parameters["feature_group_count"]
    if any(stride != 1 for stride in parameters["window_strides"]):
        return "both lhs_dilation and window_strides are not 1"
    lhs_layout, rhs_layout, out_layout = _layouts(parameters, rank)
    dy, w = dict(zip(lhs_layout, lhs.shape, strict=True)), dict(zip(rhs_layout, rhs.shape, strict=True))
    if w["I"] * groups != dy["C"]:
        return f"{dy['C']} channels in {groups} groups do not fit the kernel's I axis, {w['I']}"
    extents, padding = [], []
    columns = (SPATIAL[rank], parameters["padding"], parameters["lhs_dilation"], parameters["rhs_dilation"])
    for axis, (low, high), stride, dilation in zip(*columns, strict=True):
        covered = int(effective_kernel(w[axis], dilation))
        extents.append((dy[axis] - 1) * stride + 1 + low + high - covered + 1)
        # The padding of the convolution whose dgrad this is; a high one beyond the kernel are rows that it did not see.
        if low >= covered or high - covered >= stride - 1:
            return f"axis {axis} is padded by {(low, high)}, beyond a kernel of {covered}"
        padding.append((covered - 1 - low, max(covered - 1 - high, 0)))
    if min(extents) < 1:
        return "the result has no elements"
    problem = ConvProblem(
        batch=dy["N"],
        in_channels=w["O"],
        out_channels=dy["C"],
        data_extents=tuple(extents),
        kernel=tuple(w[axis] for axis in SPATIAL[rank]),
        strides=parameters["lhs_dilation"],
        padding=tuple(padding),
        dilation=parameters["rhs_dilation"],
        groups=groups,
        data_layout=out_layout,
        kernel_layout=swapped_kernel_layout(rhs_layout) if groups == 1 else kernel_layout_of(rank),
        grad_layout=lhs_layout,
        data_dtype=lhs.dtype.name,
        kernel_dtype=lhs.dtype.name,
        grad_dtype=lhs.dtype.name,
    )
    if problem.grad_shape != lhs.shape:
        return f"it is not the dgrad of {problem}, whose result has the shape {problem.grad_shape}"
    return Served(problem, BACKWARD_DATA.name, rhs_layout)


__all__ = ["DTYPES", "Parameters", "Served", "describe", "served"]
