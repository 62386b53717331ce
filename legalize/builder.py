# SPDX-License-Identifier: Apache-2.0
"""The Builder protocol: the dozen ordinary tensor operations that compositions are made of, whatever the IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Value = Any
"""A tensor expression of the IR."""

Extent = Any
"""An int, or a symbolic extent of the IR, which supports + - * // with ints."""


class Builder(Protocol):
    """Emits operations into a program. Convolutions take canonical layouts (NC…, OI…) only."""

    def shape(self, value: Value) -> tuple[Extent, ...]:
        """Extents of `value`, ints wherever they are known."""

    def zeros(self, shape: Sequence[Extent], dtype: str) -> Value:
        """A tensor of zeros."""

    def cast(self, value: Value, dtype: str) -> Value:
        """`value` as `dtype`; itself if it has that type already."""

    def transpose(self, value: Value, permutation: Sequence[int]) -> Value:
        """Axis i of the result is axis `permutation[i]` of `value`; itself if that changes nothing."""

    def reshape(self, value: Value, shape: Sequence[Extent]) -> Value:
        """The same elements in row-major order under another shape."""

    def tile(self, value: Value, times: Sequence[int]) -> Value:
        """Repeat the whole tensor `times[i]` times along axis i."""

    def pad(self, value: Value, pairs: Sequence[tuple[int, int]]) -> Value:
        """Zeros before and after, one pair an axis."""

    def slice(self, value: Value, begin: Sequence[Extent], end: Sequence[Extent]) -> Value:
        """The box from `begin` to `end` (exclusive), one entry an axis."""

    def flip(self, value: Value, axes: Sequence[int]) -> Value:
        """`value` reversed along `axes`."""

    def sum(self, value: Value, axis: int) -> Value:
        """Sum over one axis, which disappears."""

    def convolution(
        self,
        data: Value,
        weight: Value,
        *,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int,
        out_dtype: str,
    ) -> Value:
        """Forward convolution of data (N, C, …) by weight (O, C/groups, …), summed in `out_dtype`."""

    def transposed_convolution(
        self,
        data: Value,
        weight: Value,
        *,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        output_padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        out_dtype: str,
    ) -> Value:
        """Transposed convolution of data (N, C, …) by weight (C, O/groups, …), summed in `out_dtype`.

        Extents of the result: `core.geometry.transposed_extent`.
        """
