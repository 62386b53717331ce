# SPDX-License-Identifier: Apache-2.0
"""legalize.Builder on numpy arrays: runs a composition as it stands, in float64, without any compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_convgrad.core import reference
from tvm_convgrad.core.geometry import effective_kernel
from tvm_convgrad.core.problem import ConvProblem

Array = np.ndarray[Any, Any]


class NumpyBuilder:
    """Every operation of the protocol, by its documented meaning; convolutions by the float64 reference."""

    def shape(self, value: Array) -> tuple[int, ...]:
        return value.shape

    def zeros(self, shape: Any, dtype: str) -> Any:
        return np.zeros(shape, dtype)

    def cast(self, value: Array, dtype: str) -> Array:
        return value

    def transpose(self, value: Array, permutation: Sequence[int]) -> Array:
        return value.transpose(permutation)

    def reshape(self, value: Array, shape: Sequence[int]) -> Array:
        return value.reshape(shape)

    def tile(self, value: Array, times: Sequence[int]) -> Array:
        return np.tile(value, times)

    def pad(self, value: Array, pairs: Sequence[tuple[int, int]]) -> Array:
        return np.pad(value, pairs)

    def slice(self, value: Array, begin: Sequence[int], end: Sequence[int]) -> Array:
        for b, e, extent in zip(begin, end, value.shape, strict=True):
            assert 0 <= b <= e <= extent, "a slice must lie inside: TVM is told so"
        return value[tuple(map(slice, begin, end))]

    def flip(self, value: Array, axes: Sequence[int]) -> Array:
        return np.flip(value, tuple(axes))

    def sum(self, value: Array, axis: int) -> Array:
        return value.sum(axis)

    def convolution(
        self,
        data: Array,
        weight: Array,
        *,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int,
        out_dtype: str,
    ) -> Array:
        problem = ConvProblem.from_shapes(
            data.shape, weight.shape, strides=strides, padding=padding, dilation=dilation, groups=groups
        )
        return reference.forward(problem, data, weight)

    def transposed_convolution(
        self,
        data: Array,
        weight: Array,
        *,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        output_padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        out_dtype: str,
    ) -> Array:
        assert all(0 <= o < s for o, s in zip(output_padding, strides, strict=True)), "TVM refuses others"
        extents = [
            (x - 1) * s + effective_kernel(k, d) - low - high + o
            for x, s, k, d, (low, high), o in zip(
                data.shape[2:], strides, weight.shape[2:], dilation, padding, output_padding, strict=True
            )
        ]
        problem = ConvProblem.from_shapes(
            (data.shape[0], groups * weight.shape[1], *extents),
            weight.shape,
            strides=strides,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
        return reference.backward_data(problem, data, weight)
