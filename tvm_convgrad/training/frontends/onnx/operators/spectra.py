# SPDX-License-Identifier: Apache-2.0
"""ONNX's DFT and STFT as products with a table of cosines and sines; complex numbers have a last axis of 2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.fourier_table import LARGEST_FACTOR, interleaved_table
from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.ir.graph import Extent


def dft(node: Node) -> relax.Expr:
    """The transform along one axis of real or complex numbers, padded with zeros or cut to `dft_length`."""
    data, extents = node.tensor(0), list(node.extents(0))
    parts, rank = extents[-1], len(extents)
    if node.opset >= 20:
        given = node.value(2)
        if not node.is_constant(2):
            raise node.refusal("its axis must be a constant")
        axis = -2 if given is None else int(given.item())
    else:
        axis = node.integer("axis", 1)
    axis %= rank
    is_inverse, is_half = bool(node.integer("inverse", 0)), bool(node.integer("onesided", 0))
    if not node.is_constant(1) or not isinstance(extents[axis], int):
        raise node.refusal("its length must be fixed; export the model without a dynamic shape for this axis")
    if is_inverse and is_half:
        raise node.refusal("inverse and onesided together are not imported; give it the whole spectrum")
    length = node.value(1)
    period = int(extents[axis]) if length is None else int(length.item())
    rows = min(int(extents[axis]), period)
    if rows < int(extents[axis]):
        data = node.emit(op.strided_slice(data, [axis], [0], [rows], assume_inbound=True))
    order = [*(other for other in range(rank - 1) if other != axis), axis, rank - 1]
    data = node.emit(op.permute_dims(data, order)) if order != sorted(order) else data
    outer = [extents[other] for other in order[:-2]]
    columns = period // 2 + 1 if is_half else period
    found = _product(node, data, outer, (rows, columns, period, int(parts)), is_inverse)
    return op.permute_dims(found, [int(place) for place in np.argsort(order)])


def stft(node: Node) -> relax.Expr:
    """The spectra of frames of a real signal: (samples, frames, frequencies, 2)."""
    data, extents = node.tensor(0), list(node.extents(0))
    step, length, window = node.value(1), node.value(3), node.value(2)
    if step is None or not node.is_constant(3) or (length is None and not node.given(2)):
        raise node.refusal("frame_step and frame_length must be constants")
    if len(extents) == 3 and extents[2] == 2:
        raise node.refusal("signals of complex numbers are not imported; give it the real and the imaginary part apart")
    if not isinstance(extents[1], int):
        raise node.refusal("the length of its signal must be fixed; export the model without a dynamic shape for it")
    size = int(node.extents(2)[0]) if length is None else int(length.item())
    hop, is_half = int(step.item()), bool(node.integer("onesided", 1))
    count = (extents[1] - size) // hop + 1
    places = np.arange(count)[:, None] * hop + np.arange(size)
    signal = node.reshaped(data, extents[:2])
    frames = node.emit(op.take(signal, relax.const(places.reshape(-1), "int64"), 1))
    frames = node.reshaped(frames, [extents[0], count, size])
    if node.given(2):
        before = (size - int(node.extents(2)[0])) // 2
        shape = node.tensor(2) if window is None else relax.const(window)
        after = size - int(node.extents(2)[0]) - before
        shape = node.emit(op.nn.pad(shape, [before, after])) if before or after else shape
        frames = node.emit(op.multiply(frames, shape))
    columns = size // 2 + 1 if is_half else size
    return _product(node, frames, [extents[0], count], (size, columns, size, 1), False)


def _product(
    node: Node, data: relax.Expr, outer: Sequence[Extent], sizes: tuple[int, int, int, int], is_inverse: bool
) -> relax.Var:
    """Numbers (outer, rows, parts) transformed: (outer, columns, 2)."""
    rows, columns, period, parts = sizes
    if period > LARGEST_FACTOR:
        raise node.refusal(
            f"a transform of {period} elements is not imported, since its table would have {period} x {period} "
            f"numbers; take one of at most {LARGEST_FACTOR}"
        )
    dtype = str(node.tensor(0).ty.dtype)
    table = interleaved_table(rows, columns, period, parts, is_inverse=is_inverse)
    flat = node.reshaped(data, [*outer, rows * parts])
    found = node.emit(op.matmul(flat, relax.const(table.astype(dtype), dtype)))
    return node.reshaped(found, [*outer, columns, 2])


CONVERTERS: dict[str, Converter] = {"DFT": dft, "STFT": stft}
"""By operator of ONNX."""
