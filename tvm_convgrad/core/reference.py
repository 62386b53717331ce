# SPDX-License-Identifier: Apache-2.0
"""The reference: forward, wgrad and dgrad of any ConvProblem in numpy, summed in float64.

All three functions loop over the taps of the kernel and compute one matrix product for each. The formula,

    Y[n, o, y] = sum over i, k of  X[n, i, y * stride + k * dilation - low] * W[o, i, k]      (per group),

is implemented once (`_windows`), and the gradients are its transposes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.geometry import Extent, data_layout_of, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem

Array = npt.NDArray[Any]
Index = tuple[Union[EllipsisType, int, slice], ...]


def forward(problem: ConvProblem, data: npt.ArrayLike, weight: npt.ArrayLike) -> Array:
    """Y = conv(X, W) in numpy, summed in float64: the formula of this module.

    Args:
        problem: the convolution; its extents must be static.
        data: X, with the shape `problem.data_shape`: (N, C, H, W) in the layout NCHW.
        weight: W, with the shape `problem.weight_shape`: (O, C / groups, H, W) in the layout OIHW.

    Returns:
        Y in float64, of `problem.grad_shape`.

    Raises:
        ProblemError: an array's shape is not the problem's, or the problem has symbolic extents.

    Example:
        >>> from tvm_convgrad import ConvProblem, reference
        >>> problem = ConvProblem.from_shapes((1, 1, 4), (1, 1, 2))
        >>> reference.forward(problem, [[[1, 2, 3, 4]]], [[[1, 10]]])
        array([[[21., 32., 43.]]])
    """
    x = _grouped_data(problem, data, "data")
    w = _grouped_weight(problem, weight)
    padded = np.pad(x, _pad_widths(problem))
    y = np.zeros(_canonical_grad(problem))
    for tap, window in _windows(problem):
        y += np.einsum("ngi...,goi->ngo...", padded[window], w[tap], optimize=True)
    return _from_grouped(y, problem.grad_layout)


def backward_weight(problem: ConvProblem, grad: npt.ArrayLike, data: npt.ArrayLike) -> Array:
    """dW = wgrad(dY, X) in numpy, summed in float64: the transpose of `forward` with respect to W.

    Args:
        problem: with static extents.
        grad: dY, of `problem.grad_shape`.
        data: X, of `problem.data_shape`.

    Returns:
        dW in float64, of `problem.weight_shape`.

    Raises:
        ProblemError: an array's shape is not the problem's, or the problem has symbolic extents.

    Example:
        >>> from tvm_convgrad import ConvProblem, reference
        >>> problem = ConvProblem.from_shapes((1, 1, 4), (1, 1, 2))
        >>> reference.backward_weight(problem, [[[1, 1, 1]]], [[[1, 2, 3, 4]]])
        array([[[6., 9.]]])
    """
    dy = _grouped_data(problem, grad, "grad")
    padded = np.pad(_grouped_data(problem, data, "data"), _pad_widths(problem))
    groups = problem.groups
    dw = np.zeros((groups, problem.out_channels // groups, problem.in_channels // groups, *problem.kernel))
    pixels = math.prod(dy.shape[3:])
    flat_dy = dy.reshape(*dy.shape[:3], pixels)
    for tap, window in _windows(problem):
        x = padded[window]
        dw[tap] = np.einsum("ngoy,ngiy->goi", flat_dy, x.reshape(*x.shape[:3], pixels), optimize=True)
    ungrouped = dw.reshape(problem.out_channels, problem.in_channels // groups, *problem.kernel)
    return _permute(ungrouped, kernel_layout_of(problem.rank), problem.kernel_layout)


def backward_data(problem: ConvProblem, grad: npt.ArrayLike, weight: npt.ArrayLike) -> Array:
    """dX = dgrad(dY, W) in numpy, summed in float64: the transpose of `forward` with respect to X.

    Args:
        problem: with static extents.
        grad: dY, of `problem.grad_shape`.
        weight: W, of `problem.weight_shape`.

    Returns:
        dX in float64, of `problem.data_shape`.

    Raises:
        ProblemError: an array's shape is not the problem's, or the problem has symbolic extents.

    Example:
        >>> from tvm_convgrad import ConvProblem, reference
        >>> problem = ConvProblem.from_shapes((1, 1, 4), (1, 1, 2))
        >>> reference.backward_data(problem, [[[1, 1, 1]]], [[[1, 10]]])
        array([[[ 1., 11., 11., 10.]]])
    """
    dy = _grouped_data(problem, grad, "grad")
    w = _grouped_weight(problem, weight)
    groups, spatial = problem.groups, [int(e) for e in problem.data_extents]
    widths = _pad_widths(problem)[3:]
    padded = np.zeros(
        (
            dy.shape[0],
            groups,
            problem.in_channels // groups,
            *(e + sum(p) for e, p in zip(spatial, widths, strict=True)),
        )
    )
    for tap, window in _windows(problem):
        padded[window] += np.einsum("ngo...,goi->ngi...", dy, w[tap], optimize=True)
    crop: Index = (..., *(slice(low, low + e) for e, (low, _) in zip(spatial, widths, strict=True)))
    return _from_grouped(padded[crop], problem.data_layout)


DIRECTIONS = {"forward": forward, "backward_weight": backward_weight, "backward_data": backward_data}
"""The oracle of each direction, by its name in the catalogue."""


def _windows(problem: ConvProblem) -> Iterator[tuple[Index, Index]]:
    """For each tap of the kernel: its index, and that of the padded data that it multiplies, an element an output."""
    axes = list(zip(problem.dilation, problem.strides, problem.grad_extents, strict=True))
    for tap in itertools.product(*(range(k) for k in problem.kernel)):
        window = (
            slice(t * d, t * d + (int(y) - 1) * s + 1, s) if y else slice(0, 0)
            for t, (d, s, y) in zip(tap, axes, strict=True)
        )
        yield (..., *tap), (..., *window)


def _pad_widths(problem: ConvProblem) -> list[tuple[int, int]]:
    return [(0, 0)] * 3 + list(problem.padding)


def _canonical_grad(problem: ConvProblem) -> tuple[int, ...]:
    groups = problem.groups
    return (int(problem.batch), groups, problem.out_channels // groups, *(int(y) for y in problem.grad_extents))


def _permute(array: Array, source: str, target: str) -> Array:
    return np.ascontiguousarray(array.transpose([source.index(letter) for letter in target]))


def _grouped_data(problem: ConvProblem, array: npt.ArrayLike, name: str) -> Array:
    """X or dY as (N, G, C/G, spatial…) in float64."""
    problem.require_static("the reference")
    shape, layout = (
        (problem.data_shape, problem.data_layout) if name == "data" else (problem.grad_shape, problem.grad_layout)
    )
    canonical = _permute(_checked(array, shape, name, problem), layout, data_layout_of(problem.rank))
    n, c, *spatial = canonical.shape
    return canonical.reshape(n, problem.groups, c // problem.groups, *spatial)


def _grouped_weight(problem: ConvProblem, array: npt.ArrayLike) -> Array:
    """W as (G, O/G, I/G, kernel…) in float64."""
    w = _checked(array, problem.weight_shape, "weight", problem)
    canonical = _permute(w, problem.kernel_layout, kernel_layout_of(problem.rank))
    o, i, *kernel = canonical.shape
    return canonical.reshape(problem.groups, o // problem.groups, i, *kernel)


def _from_grouped(array: Array, layout: str) -> Array:
    n, g, c, *spatial = array.shape
    return _permute(array.reshape(n, g * c, *spatial), data_layout_of(len(spatial)), layout)


def _checked(given: npt.ArrayLike, shape: Sequence[Extent], name: str, problem: ConvProblem) -> Array:
    """An operand in float64."""
    array = np.asarray(given, np.float64)
    if array.shape != tuple(shape):
        raise ProblemError(
            f"{name} has shape {array.shape}, but {problem.descriptor} needs {tuple(shape)}; "
            f"check the layout and the extents"
        )
    return array
