# SPDX-License-Identifier: Apache-2.0
"""Directions of the convolution as batched matrix products of unfolded data (im2col), for batches that are not groups.

Operands have any number of batch axes in front of their own, which broadcast against each other and may be symbolic.
Used where vmap's batch is known only at run time and would have to become channels or groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tvm import relax

from legalize.batching import UnbatchedCall
from legalize.builder import Extent
from legalize.data import spread
from relax_ops.builder import RelaxBuilder
from relax_ops.ir import dtype_of
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, Direction
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, effective_kernel, kernel_layout_of, output_extent
from tvm_convgrad.core.type_relation import ConvAttributes


def product_call(
    block_builder: relax.BlockBuilder,
    direction: Direction,
    attributes: ConvAttributes,
    call: UnbatchedCall,
    dtype: str,
) -> relax.Expr:
    """The direction for operands with carried batch axes.

    Args:
        block_builder: emits the operations.
        direction: of the catalogue.
        attributes: geometry and layouts of the convolution.
        call: operands, groups, dgrad's data shape, and the extents of the carried axes.
        dtype: of the result; products of 16-bit operands are summed in float32.
    """
    builder = UnfoldingBuilder(block_builder)
    lead = len(call.carried)
    types = [dtype_of(value.ty) for value in call.operands]
    summed = "float64" if "float64" in types else "float32"
    operands = [
        builder.cast(
            _permuted(builder, value, lead, attributes.layout(name), _canonical(name, attributes.rank)), summed
        )
        for name, value in zip(direction.operands, call.operands, strict=True)
    ]
    product = _Product(builder, attributes, call)
    if direction is BACKWARD_WEIGHT:
        result = product.weight(*operands)
    elif direction is BACKWARD_DATA:
        result = product.data(*operands)
    else:
        result = product.forward(*operands)
    result = _permuted(
        builder, result, lead, _canonical(direction.result, attributes.rank), attributes.layout(direction.result)
    )
    return builder.cast(result, dtype)


class UnfoldingBuilder(RelaxBuilder):
    """A RelaxBuilder that also has what unfolding needs."""

    def strided(
        self, value: Any, axes: Sequence[int], begin: Sequence[int], end: Sequence[Extent], strides: Sequence[int]
    ) -> Any:
        """relax.strided_slice, inside the tensor."""
        arguments = {"begin": list(begin), "end": list(end), "strides": list(strides)}
        return self._emit(relax.op.strided_slice(value, axes=list(axes), assume_inbound=True, **arguments))

    def concat(self, values: Sequence[Any], axis: int) -> Any:
        """relax.concat, unless there is one value only."""
        return values[0] if len(values) == 1 else self._emit(relax.op.concat(list(values), axis))

    def matmul(self, left: relax.Expr, right: relax.Expr) -> relax.Expr:
        """relax.matmul; the axes before the last two broadcast."""
        return self._emit(relax.op.matmul(left, right))

    def add(self, left: relax.Expr, right: relax.Expr) -> relax.Expr:
        """relax.add."""
        return self._emit(relax.op.add(left, right))

    def sum_of_products(self, left: relax.Expr, right: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """The sum of left * right over `axes`."""
        return self._emit(relax.op.sum(self._emit(relax.op.multiply(left, right)), list(axes)))


def patches(
    builder: UnfoldingBuilder, attributes: ConvAttributes, kernel: Sequence[int], data: relax.Expr
) -> relax.Expr:
    """What each tap of the kernel reads: (n, c, …) to (n, c, taps, pixels of Y)."""
    padded = builder.pad(data, [(0, 0), (0, 0), *attributes.padding])
    n, c, *extents = builder.shape(padded)
    pixels = [
        output_extent(x, k, s, d, 0, 0)
        for x, k, s, d in zip(extents, kernel, attributes.strides, attributes.dilation, strict=True)
    ]
    axes = list(range(2, 2 + attributes.rank))
    taps = []
    for tap in itertools.product(*map(range, kernel)):
        begin = [k * d for k, d in zip(tap, attributes.dilation, strict=True)]
        end = [b + (y - 1) * s + 1 for b, y, s in zip(begin, pixels, attributes.strides, strict=True)]
        window = builder.strided(padded, axes, begin, end, attributes.strides)
        taps.append(builder.reshape(window, [n, c, 1, math.prod(pixels)]))
    return builder.concat(taps, 2)


class _Product:
    """The three directions in canonical layouts; operands have the carried axes first."""

    def __init__(self, builder: UnfoldingBuilder, attributes: ConvAttributes, call: UnbatchedCall) -> None:
        self._builder, self._attributes, self._call = builder, attributes, call
        self._lead = len(call.carried)

    def forward(self, data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        builder, lead = self._builder, self._lead
        kernel = builder.shape(weight)[lead + 2 :]
        unfolded = self._unfolded(data, kernel)  # … n g (i taps) pixels
        rows = self._rows(weight)  # … 1 g o (i taps)
        product = builder.matmul(rows, unfolded)
        shape = builder.shape(product)
        extents = builder.shape(data)[lead + 2 :]
        pixels = self._pixels(extents, kernel)
        return builder.reshape(product, [*shape[: lead + 1], shape[-3] * shape[-2], *pixels])

    def weight(self, grad: relax.Expr, data: relax.Expr) -> relax.Expr:
        builder, lead, groups = self._builder, self._lead, self._call.groups
        kernel = self._attributes.kernel_size
        assert kernel is not None
        unfolded = self._unfolded(data, kernel)
        n, _, columns, pixels = builder.shape(unfolded)[lead:]
        right = builder.transpose(unfolded, [*range(lead), lead + 1, lead, lead + 3, lead + 2])  # … g n pixels columns
        right = builder.reshape(right, [*builder.shape(unfolded)[:lead], groups, n * pixels, columns])
        own, channels = builder.shape(grad)[:lead], builder.shape(grad)[lead + 1]
        left = builder.reshape(grad, [*own, n, groups, channels // groups, pixels])
        left = builder.transpose(left, [*range(lead), lead + 1, lead + 2, lead, lead + 3])  # … g o n pixels
        left = builder.reshape(left, [*own, groups, channels // groups, n * pixels])
        product = builder.matmul(left, right)
        shape = builder.shape(product)
        per_group = columns // math.prod(kernel)
        return builder.reshape(product, [*shape[:lead], channels, per_group, *kernel])

    def data(self, grad: relax.Expr, weight: relax.Expr) -> relax.Expr:
        """W transposed times dY gives each tap's share of dX, which is put where the tap read."""
        builder, lead, groups, attributes = self._builder, self._lead, self._call.groups, self._attributes
        kernel = builder.shape(weight)[lead + 2 :]
        rows = self._rows(weight)
        columns = builder.transpose(rows, [*range(lead + 2), lead + 3, lead + 2])  # … 1 g (i taps) o
        own, (n, channels, *pixels) = builder.shape(grad)[:lead], builder.shape(grad)[lead:]
        flat = builder.reshape(grad, [*own, n, groups, channels // groups, math.prod(pixels)])
        product = builder.matmul(columns, flat)
        shape = builder.shape(product)[: lead + 1]
        in_channels = builder.shape(product)[lead + 2] // math.prod(kernel) * groups
        shares = builder.reshape(product, [math.prod(shape), in_channels, math.prod(kernel), *pixels])
        total = None
        for number, tap in enumerate(itertools.product(*map(range, kernel))):
            share = builder.strided(shares, [2], [number], [number + 1], [1])
            share = spread(
                builder, builder.reshape(share, [math.prod(shape), in_channels, *pixels]), attributes.strides
            )
            reach = [effective_kernel(k, d) - 1 for k, d in zip(kernel, attributes.dilation, strict=True)]
            lows = [k * d for k, d in zip(tap, attributes.dilation, strict=True)]
            placed = builder.pad(share, [(0, 0), (0, 0), *((at, r - at) for at, r in zip(lows, reach, strict=True))])
            total = placed if total is None else builder.add(total, placed)
        data_shape = self._call.data_shape
        assert data_shape is not None
        extents = [data_shape[attributes.data_layout.index(axis)] for axis in SPATIAL[attributes.rank]]
        begin = [0, 0, *(low for low, _ in attributes.padding)]
        end = [math.prod(shape), in_channels, *(x + low for x, low in zip(extents, begin[2:], strict=True))]
        return builder.reshape(builder.slice(total, begin, end), [*shape, in_channels, *extents])

    def _unfolded(self, data: relax.Expr, kernel: Sequence[int]) -> relax.Expr:
        """X as (…, n, g, channels of a group and taps, pixels of Y)."""
        builder, lead, groups = self._builder, self._lead, self._call.groups
        own, (n, channels, *extents) = builder.shape(data)[:lead], builder.shape(data)[lead:]
        flat = builder.reshape(data, [math.prod(own) * n, channels, *extents])
        found = patches(builder, self._attributes, kernel, flat)
        taps, pixels = builder.shape(found)[2:]
        return builder.reshape(found, [*own, n, groups, channels // groups * taps, pixels])

    def _rows(self, weight: relax.Expr) -> relax.Expr:
        """W as (…, 1, g, o, channels of a group and taps)."""
        builder, lead, groups = self._builder, self._lead, self._call.groups
        own, (channels, per_group, *kernel) = builder.shape(weight)[:lead], builder.shape(weight)[lead:]
        shape = [*own, 1, groups, channels // groups, per_group * math.prod(kernel)]
        return builder.reshape(weight, shape)

    def _pixels(self, extents: Sequence[Extent], kernel: Sequence[int]) -> list[Extent]:
        attributes = self._attributes
        return [
            output_extent(x, k, s, d, low, high)
            for x, k, s, d, (low, high) in zip(
                extents, kernel, attributes.strides, attributes.dilation, attributes.padding, strict=True
            )
        ]


def _canonical(name: str, rank: int) -> str:
    return kernel_layout_of(rank) if name == "weight" else data_layout_of(rank)


def _permuted(builder: RelaxBuilder, value: relax.Expr, lead: int, layout: str, wanted: str) -> relax.Expr:
    return builder.transpose(value, [*range(lead), *(lead + layout.index(letter) for letter in wanted)])
