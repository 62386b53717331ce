# SPDX-License-Identifier: Apache-2.0
"""ONNX's selections by indices (Gather, GatherND, ScatterElements and others), as operators that have all rules.

TVM's importer reads extents when the program runs, to wrap negative places; here they are known. That of
ScatterElements leaves negative places as they are, of which the gradient would read out of bounds.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.ir.graph import Extent

_BEFORE_FIRST = -(2**31)
"""Ends of slices up to here mean the place before the first one."""


def gather_nd(node: Node) -> relax.Expr | None:
    """GatherND of leading axes as a `take` along the axis that they are flattened to."""
    data, places = node.tensor(0), node.tensor(1)
    extents, shape = list(node.extents(0)), list(node.extents(1))
    batch, depth = node.integer("batch_dims", 0), shape[-1]
    if batch or not isinstance(depth, int):
        return None
    size: Extent = 1
    for extent in extents[:depth]:
        size = size * extent
    constant = node.places(1)
    if not all(isinstance(extent, int) for extent in extents[1:depth]):
        return None
    strides = [int(np.prod(extents[axis + 1 : depth], dtype="int64")) for axis in range(depth)]
    flat: relax.Expr
    if constant is not None and (isinstance(extents[0], int) or (constant[..., 0] >= 0).all()):
        known = [extent if isinstance(extent, int) else 0 for extent in extents[:depth]]
        wrapped = np.where(constant < 0, constant + np.array(known), constant)
        flat = relax.const((wrapped * np.array(strides)).sum(-1), "int64")
    else:
        flat = _flat(node, places, extents[:depth], strides)
    whole = data if depth == 1 else node.reshaped(data, [size, *extents[depth:]])
    return op.take(whole, flat, 0)


def _flat(node: Node, places: relax.Expr, extents: list[Extent], strides: list[int]) -> relax.Expr:
    """Computed indices along the flattened axis."""
    places = node.emit(op.astype(places, "int64"))
    bounds = []
    for extent in extents:
        if not isinstance(extent, int):
            raise node.refusal(f"computed indices need fixed extents, not {extent}")
        bounds.append(extent)
    last = node.emit(op.add(places, relax.const(np.array(bounds, "int64"), "int64")))
    wrapped = node.emit(op.where(op.less(places, relax.const(0, "int64")), last, places))
    terms = node.emit(op.multiply(wrapped, relax.const(np.array(strides, "int64"), "int64")))
    return node.emit(op.sum(terms, [-1]))


def gather_elements(node: Node) -> relax.Expr | None:
    """GatherElements along an axis of known extent."""
    axis = node.integer("axis", 0) % node.tensor().ty.ndim
    places = _wrapped(node, axis)
    return None if places is None else op.gather_elements(node.tensor(), places, axis)


def scatter_elements(node: Node) -> relax.Expr:
    """ScatterElements along an axis of known extent."""
    axis = node.integer("axis", 0) % node.tensor().ty.ndim
    places = _wrapped(node, axis)
    if places is None:
        raise node.refusal(f"the extent of axis {axis} is {node.extents()[axis]}; scattering needs a fixed one")
    reduction = node.text("reduction", "none")
    return op.scatter_elements(
        node.tensor(), places, node.tensor(2), axis=axis, reduction="update" if reduction == "none" else reduction
    )


def scatter_nd(node: Node) -> relax.Expr | None:
    """ScatterND at constant indices."""
    constant, extents = node.places(1), node.extents()
    if constant is None:
        return None
    indexed = extents[: constant.shape[-1]]
    known = [extent if isinstance(extent, int) else 0 for extent in indexed]
    negative = (constant < 0).reshape(-1, len(known))
    if any(not isinstance(extent, int) and negative[:, axis].any() for axis, extent in enumerate(indexed)):
        return None  # the extent that a place is counted from is not known
    places = relax.const(np.where(constant < 0, constant + np.array(known, "int64"), constant), "int64")
    reduction = node.text("reduction", "none")
    return op.scatter_nd(node.tensor(), places, node.tensor(2), "update" if reduction == "none" else reduction)


def _wrapped(node: Node, axis: int) -> relax.Expr | None:
    """Operand 1, indices along an axis of operand 0, counted from the front; None if the extent is not known."""
    extent, constant = node.extents()[axis], node.places(1)
    if not isinstance(extent, int):
        return None
    if constant is not None:
        return relax.const(np.where(constant < 0, constant + extent, constant).astype("int64"), "int64")
    places = node.emit(op.astype(node.tensor(1), "int64"))
    last = node.emit(op.add(places, relax.const(extent, "int64")))
    return node.emit(op.where(op.less(places, relax.const(0, "int64")), last, places))


def gather(node: Node) -> relax.Expr | None:
    """Gather by constant indices."""
    places, axis = node.places(1), node.integer("axis", 0)
    operand = node.operands[0]
    if places is None or operand is None or not isinstance(operand.ty, relax.TensorType) or not node.is_float():
        return None
    extent = node.extents()[axis % operand.ty.ndim]
    if not isinstance(extent, int) and (places < 0).any():
        return None
    wrapped = np.where(places < 0, places + extent, places) if isinstance(extent, int) else places
    return op.take(operand, relax.const(wrapped.astype("int64"), "int64"), axis % operand.ty.ndim)


def compress(node: Node) -> relax.Expr | None:
    """Compress by a constant mask."""
    mask, data = node.value(1), node.tensor()
    if mask is None:
        return None
    (places,) = np.nonzero(mask)
    if "axis" in node.attributes:
        return op.take(data, relax.const(places, "int64"), node.integer("axis", 0) % data.ty.ndim)
    return op.take(node.reshaped(data, [-1]), relax.const(places, "int64"), 0)


def reverse_sequence(node: Node) -> relax.Expr:
    """ReverseSequence by constant lengths."""
    lengths, data = node.value(1), node.tensor()
    time, batch = node.integer("time_axis", 0), node.integer("batch_axis", 1)
    extents = node.extents()
    extent = extents[time]
    if lengths is None or not isinstance(extent, int):
        raise node.refusal("its lengths and the extent of the time axis must be constants")
    places = np.tile(np.arange(extent), (len(lengths), 1))
    for row, length in zip(places, lengths.tolist(), strict=True):
        row[:length] = row[:length][::-1]
    shape = [1] * len(extents)
    shape[batch], shape[time] = len(lengths), extent
    table = relax.const((places if batch < time else places.T).reshape(shape), "int64")
    return op.gather_elements(data, node.emit(op.broadcast_to(table, relax.ShapeExpr(list(extents)))), time)


def expand(node: Node) -> relax.Expr | None:
    """Expand to a constant shape, in which 1 leaves an axis as it is."""
    shape, data = node.value(1), node.operands[0]
    if shape is None or data is None or not isinstance(data.ty, relax.TensorType):
        return None
    extents: list[Extent] = list(node.extents())
    wanted = [int(extent) for extent in shape]
    count = max(len(extents), len(wanted))
    extents = [1] * (count - len(extents)) + extents
    wanted = [1] * (count - len(wanted)) + wanted
    target = [extent if wide == 1 else wide for extent, wide in zip(extents, wanted, strict=True)]
    return op.broadcast_to(data, relax.ShapeExpr(target))


def space_to_depth(node: Node) -> relax.Expr:
    """SpaceToDepth, whose new channels count block positions first ("DCR", the only mode before opset 28) or last."""
    size, (batch, channels, height, width) = node.integer("blocksize", 1), node.extents()
    if not isinstance(height, int) or not isinstance(width, int) or height % size or width % size:
        raise node.refusal(f"the extents {height} and {width} are not multiples of the blocksize, {size}")
    blocks = node.reshaped(node.tensor(), [batch, channels, height // size, size, width // size, size])
    order = [0, 1, 3, 5, 2, 4] if node.text("mode", "DCR") == "CRD" else [0, 3, 5, 1, 2, 4]
    return op.reshape(
        node.emit(op.permute_dims(blocks, order)),
        relax.ShapeExpr([batch, channels * size * size, height // size, width // size]),
    )


def slice_backwards(node: Node) -> relax.Expr | None:
    """A Slice of whole axes from their last place to their first one; TVM's has no form for free extents."""
    starts, ends, steps = (node.places(position) for position in (1, 2, 4))
    is_tensor = isinstance(getattr(node.operands[0], "ty", None), relax.TensorType)
    if not is_tensor or starts is None or ends is None or steps is None or not node.is_constant(3):
        return None
    if (starts != -1).any() or (ends > _BEFORE_FIRST).any() or (steps != -1).any():
        return None
    axes = node.places(3)
    data = node.tensor()
    for axis in range(len(starts)) if axes is None else axes:
        data = node.emit(op.flip(data, int(axis)))
    return data


CONVERTERS: dict[str, Converter] = {
    "Compress": compress,
    "Expand": expand,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "ReverseSequence": reverse_sequence,
    "Scatter": scatter_elements,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "Slice": slice_backwards,
    "SpaceToDepth": space_to_depth,
}
"""By operator of ONNX."""
