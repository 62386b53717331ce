# SPDX-License-Identifier: Apache-2.0
"""Windows in ONNX that TVM's importer lacks: indices of MaxPool, MaxUnpool, Col2Im, LRN of even size."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.ir.graph import Extent

_MAX_POOLS = {1: op.nn.max_pool1d, 2: op.nn.max_pool2d, 3: op.nn.max_pool3d}
_TRANSPOSED = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose}


def max_pool(node: Node) -> relax.Expr | None:
    """MaxPool with its second result: indices in the flattened tensor, for MaxUnpool."""
    if node.results == 1:
        return None
    data, extents = node.tensor(), node.extents()
    if not all(isinstance(extent, int) for extent in extents):
        raise node.refusal("its second result (indices) needs fixed extents")
    samples, channels, *spatial = [int(extent) for extent in extents]
    rank = len(spatial)
    kernel = node.integers("kernel_shape", ())
    strides, dilations = node.integers("strides", (1,) * rank), node.integers("dilations", (1,) * rank)
    pads = node.integers("pads", (0,) * (2 * rank))
    ceil = bool(node.integer("ceil_mode", 0))
    pooled = node.emit(_MAX_POOLS[rank](data, kernel, strides, pads, dilations, ceil))
    outputs = [int(extent) for extent in pooled.ty.shape.values[2:]]
    table = _windows(spatial, outputs, kernel, strides, pads[:rank], dilations)
    windows, size = table.shape
    flat = node.reshaped(data, [samples, channels, int(np.prod(spatial))])
    inside = relax.const(table.clip(0).reshape(-1), "int64")
    elements = node.reshaped(node.emit(op.take(flat, inside, 2)), [samples, channels, windows, size])
    if (table < 0).any():
        lowest = relax.const(np.where(table < 0, -np.inf, 0).astype(str(data.ty.dtype)))
        elements = node.emit(op.add(elements, lowest))
    largest = node.emit(op.argmax(elements, -1, keepdims=True))
    own = np.arange(samples * channels).reshape(samples, channels, 1, 1) * int(np.prod(spatial))
    if node.integer("storage_order", 0):
        table = _column_major(table, spatial)
    places = node.emit(op.gather_elements(relax.const(own + table, "int64"), largest, 3))
    return relax.Tuple([pooled, node.reshaped(places, [samples, channels, *outputs])])


def _windows(
    spatial: list[int],
    outputs: list[int],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    dilations: tuple[int, ...],
) -> NDArray[np.int64]:
    """The index of each element of each window in the flattened image: (windows, elements), -1 in the padding."""
    rows = []
    for start in product(*map(range, outputs)):
        row = []
        for offset in product(*map(range, kernel)):
            at = [s * t - p + o * d for s, t, p, o, d in zip(start, strides, pads, offset, dilations, strict=True)]
            inside = all(0 <= a < extent for a, extent in zip(at, spatial, strict=True))
            row.append(int(np.ravel_multi_index(at, spatial)) if inside else -1)
        rows.append(row)
    return np.array(rows, "int64")


def _column_major(table: NDArray[np.int64], spatial: list[int]) -> NDArray[np.int64]:
    """Indices with the first spatial axis running fastest."""
    at = np.unravel_index(table.clip(0), spatial)
    return np.asarray(np.ravel_multi_index(at[::-1], spatial[::-1]), "int64")


def max_unpool(node: Node) -> relax.Expr:
    """Zeros, with elements at the indices that MaxPool gave."""
    data, places, extents = node.tensor(0), node.tensor(1), node.extents(0)
    if not all(isinstance(extent, int) for extent in extents) or not node.is_constant(2):
        raise node.refusal("its extents must be fixed; give --batch N")
    samples, channels, *spatial = [int(extent) for extent in extents]
    rank, shape = len(spatial), node.value(2)
    kernel, strides = node.integers("kernel_shape", ()), node.integers("strides", (1,) * rank)
    pads = node.integers("pads", (0,) * (2 * rank))
    own = [
        (extent - 1) * stride + size - pads[axis] - pads[rank + axis]
        for axis, (extent, stride, size) in enumerate(zip(spatial, strides, kernel, strict=True))
    ]
    outputs = own if shape is None else [int(extent) for extent in shape[2:]]
    size = samples * channels * int(np.prod(own))
    zeros = node.emit(op.zeros(relax.ShapeExpr([size]), str(data.ty.dtype)))
    flat, where = node.reshaped(data, [-1]), node.reshaped(places, [-1])
    found = node.reshaped(node.emit(op.scatter_elements(zeros, where, flat, 0)), [samples, channels, *own])
    if own == outputs:
        return found
    behind = [wide - extent for wide, extent in zip(outputs, own, strict=True)]
    widths = [0, 0, 0, 0, *(width for extent in behind for width in (0, extent))]
    return op.nn.pad(found, widths, pad_value=0.0)


def columns_to_image(node: Node) -> relax.Expr:
    """Col2Im as a transposed convolution whose kernels hold a single 1 each."""
    image, block = node.value(1), node.value(2)
    if image is None or block is None or len(image) not in _TRANSPOSED:
        raise node.refusal("its image and block must be constants of 1 or 2 extents")
    rank, data = len(image), node.tensor()
    strides, dilations = node.integers("strides", (1,) * rank), node.integers("dilations", (1,) * rank)
    pads = node.integers("pads", (0,) * (2 * rank))
    sizes = [int(size) for size in block]
    covered = [dilation * (size - 1) + 1 for dilation, size in zip(dilations, sizes, strict=True)]
    padded = [int(extent) + pads[axis] + pads[rank + axis] for axis, extent in enumerate(image)]
    counts = [(p - c) // s + 1 for p, c, s in zip(padded, covered, strides, strict=True)]
    rest = [(p - c) % s for p, c, s in zip(padded, covered, strides, strict=True)]
    samples, rows, _ = node.extents()
    if not isinstance(rows, int):
        raise node.refusal("its channels must be fixed")
    elements = int(np.prod(sizes))
    kernel = np.eye(elements).reshape(elements, 1, *sizes)
    weight = relax.const(np.tile(kernel, (rows // elements, *[1] * (rank + 1))).astype(str(data.ty.dtype)))
    extents: list[Extent] = [samples, rows, *counts]
    return _TRANSPOSED[rank](
        node.reshaped(data, extents),
        weight,
        strides=list(strides),
        padding=list(pads),
        output_padding=rest,
        dilation=list(dilations),
        groups=rows // elements,
    )


def local_response_norm(node: Node) -> relax.Expr:
    """x divided by a power of the sum of squares over channels: (size − 1) // 2 before, size // 2 after."""
    data, size = node.tensor(), node.integer("size", 1)
    before, behind = (size - 1) // 2, size // 2
    channels = node.extents()[1]
    if not isinstance(channels, int):
        raise node.refusal("its channels must be fixed")
    squares = node.emit(op.multiply(data, data))
    widths = [0, 0, before, behind] + [0, 0] * (data.ty.ndim - 2)
    wide = node.emit(op.nn.pad(squares, widths, pad_value=0.0))
    total: relax.Expr | None = None
    for shift in range(size):
        part = node.emit(op.strided_slice(wide, [1], [shift], [shift + channels], assume_inbound=True))
        total = part if total is None else node.emit(op.add(total, part))
    assert total is not None
    scaled = node.emit(op.multiply(total, node.scalar(node.number("alpha", 1e-4) / size)))
    base = node.emit(op.add(scaled, node.scalar(node.number("bias", 1.0))))
    return op.multiply(data, node.emit(op.power(base, node.scalar(-node.number("beta", 0.75)))))


CONVERTERS: dict[str, Converter] = {
    "Col2Im": columns_to_image,
    "LRN": local_response_norm,
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
}
"""By operator of ONNX."""
