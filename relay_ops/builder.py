# SPDX-License-Identifier: Apache-2.0
"""The legalize.Builder on Relay: every operation is a stock Relay op; shapes and types are kept beside the expressions.

A composition is emitted before its types are inferred, and its next step needs the shape of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relay

from legalize.builder import Extent, Value
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import (
    SPATIAL,
    data_layout_of,
    flat_padding,
    kernel_layout_of,
    output_extent,
    transposed_extent,
)

_CONVOLUTIONS = {1: relay.nn.conv1d, 2: relay.nn.conv2d, 3: relay.nn.conv3d}
_TRANSPOSED = {1: relay.nn.conv1d_transpose, 2: relay.nn.conv2d_transpose, 3: relay.nn.conv3d_transpose}


@dataclass(frozen=True)
class Tensor:
    """A Relay expression with its static shape and its element type."""

    expr: Any
    shape: tuple[int, ...]
    dtype: str


class RelayBuilder:
    """Makes stock Relay operations of Tensors."""

    def shape(self, value: Value) -> tuple[Extent, ...]:
        """Extents of `value`."""
        extents: tuple[int, ...] = value.shape
        return extents

    def zeros(self, shape: Sequence[Extent], dtype: str) -> Value:
        """relay.zeros."""
        return Tensor(relay.zeros(tuple(shape), dtype), tuple(shape), dtype)

    def cast(self, value: Value, dtype: str) -> Value:
        """relay.cast, unless it changes nothing."""
        return value if value.dtype == dtype else Tensor(relay.cast(value.expr, dtype), value.shape, dtype)

    def transpose(self, value: Value, permutation: Sequence[int]) -> Value:
        """relay.transpose, unless it changes nothing."""
        order = list(permutation)
        if order == list(range(len(order))):
            return value
        return Tensor(relay.transpose(value.expr, order), tuple(value.shape[i] for i in order), value.dtype)

    def reshape(self, value: Value, shape: Sequence[Extent]) -> Value:
        """relay.reshape, whose extent 0 stands for the operand's; a tensor without elements is one of zeros."""
        if 0 in shape:
            return self.zeros(shape, value.dtype)
        return Tensor(relay.reshape(value.expr, tuple(shape)), tuple(shape), value.dtype)

    def tile(self, value: Value, times: Sequence[int]) -> Value:
        """relay.tile."""
        if all(t == 1 for t in times):
            return value
        shape = tuple(e * t for e, t in zip(value.shape, times, strict=True))
        return Tensor(relay.tile(value.expr, tuple(times)), shape, value.dtype)

    def pad(self, value: Value, pairs: Sequence[tuple[int, int]]) -> Value:
        """relay.nn.pad with zeros."""
        if not any(any(pair) for pair in pairs):
            return value
        shape = tuple(e + low + high for e, (low, high) in zip(value.shape, pairs, strict=True))
        return Tensor(relay.nn.pad(value.expr, tuple(tuple(p) for p in pairs)), shape, value.dtype)

    def slice(self, value: Value, begin: Sequence[Extent], end: Sequence[Extent]) -> Value:
        """relay.strided_slice, unless it keeps everything."""
        shape = tuple(e - b for b, e in zip(begin, end, strict=True))
        if shape == value.shape:
            return value
        return Tensor(relay.strided_slice(value.expr, list(begin), list(end)), shape, value.dtype)

    def flip(self, value: Value, axes: Sequence[int]) -> Value:
        """relay.reverse, an axis at a time, where there is more than one element."""
        for axis in axes:
            if value.shape[axis] != 1:
                value = Tensor(relay.reverse(value.expr, axis), value.shape, value.dtype)
        return value

    def sum(self, value: Value, axis: int) -> Value:
        """relay.sum over one axis."""
        shape = value.shape[:axis] + value.shape[axis + 1 :]
        return Tensor(relay.sum(value.expr, axis=axis), shape, value.dtype)

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
        """relay.nn.conv{1,2,3}d of operands in `out_dtype`: schedules of Relay sum in the operands' type."""
        rank = len(strides)
        data, weight = self.cast(data, out_dtype), self.cast(weight, out_dtype)
        extents = (
            output_extent(x, k, s, d, low, high)
            for x, k, s, d, (low, high) in zip(
                data.shape[2:], weight.shape[2:], strides, dilation, padding, strict=True
            )
        )
        expr = _CONVOLUTIONS[rank](
            data.expr,
            weight.expr,
            channels=weight.shape[0],
            kernel_size=weight.shape[2:],
            strides=tuple(strides),
            padding=flat_padding(padding),
            dilation=tuple(dilation),
            groups=groups,
            data_layout=data_layout_of(rank),
            kernel_layout=kernel_layout_of(rank),
        )
        return Tensor(expr, (data.shape[0], weight.shape[0], *extents), out_dtype)

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
        """relay.nn.conv{1,2,3}d_transpose of operands in `out_dtype`.

        Raises:
            UnsupportedError: dilation, which Relay's own schedules ignore, or groups other than in two dimensions.
        """
        rank = len(strides)
        if any(d != 1 for d in dilation) or (groups > 1 and rank != 2):
            raise UnsupportedError(
                "Relay's transposed convolutions serve neither dilation nor, but for conv2d, groups; "
                "take the form 'dilated'"
            )
        data, weight = self.cast(data, out_dtype), self.cast(weight, out_dtype)
        channels = weight.shape[1] * groups
        extents = (
            transposed_extent(x, k, s, d, low, high, o)
            for x, s, k, d, (low, high), o in zip(
                data.shape[2:], strides, weight.shape[2:], dilation, padding, output_padding, strict=True
            )
        )
        expr = _TRANSPOSED[rank](
            data.expr,
            weight.expr,
            channels=channels,
            kernel_size=weight.shape[2:],
            strides=tuple(strides),
            padding=flat_padding(padding),
            output_padding=tuple(output_padding),
            groups=groups,
            data_layout=data_layout_of(rank),
            kernel_layout="IO" + SPATIAL[rank],
        )
        return Tensor(expr, (data.shape[0], channels, *extents), out_dtype)
