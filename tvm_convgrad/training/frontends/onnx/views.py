# SPDX-License-Identifier: Apache-2.0
"""Views that torch.onnx.export writes as gathers of places, as the reshapes that they are.

PyTorch decomposes an adaptive average pool of channels-last tensors to a mean and `aten.as_strided`, which the exporter
(dynamo=True) writes as a Gather of the flat tensor at places that it computes from sizes and strides. Where these are
of a contiguous tensor and no element is omitted, it is a reshape, whatever the batch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from tvm_convgrad.training.frontends.onnx.torch_notes import CALL

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_STRIDES = re.compile(r"as_strided\.default\]\(args = \(%\w+, \[[^\]]*\], \[([^\]]*)\]\)")

Extent = int | str
"""A number, or the name of a symbolic extent."""


def with_reshapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a Reshape in the place of each gather that is one, without what only makes its places."""
    from onnx import helper, numpy_helper

    made = {output: node for node in proto.graph.node for output in node.output}
    extents = _extents(proto)
    shapes: dict[str, tuple[str, list[int]]] = {}
    for node in proto.graph.node:
        flat = made.get(node.input[0]) if node.op_type == "Gather" else None
        if flat is None or flat.op_type != "Reshape" or not _strides(node):
            continue
        source, result = extents.get(flat.input[0]), extents.get(node.output[0])
        if source is None or result is None or _values(proto, flat.input[1]) != [-1]:
            continue
        if _is_contiguous(result, _strides(node)) and _count(source) == _count(result):
            shape = [extent if isinstance(extent, int) else -1 for extent in result]
            shapes[node.output[0]] = (flat.input[0], shape)
    if not shapes:
        return proto
    copy = type(proto)()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        if node.output and node.output[0] in shapes:
            source_name, shape = shapes[node.output[0]]
            name = f"{node.output[0]}.shape"
            reshape = helper.make_node("Reshape", [source_name, name], list(node.output), node.name)
            reshape.metadata_props.extend(node.metadata_props)
            node.CopyFrom(reshape)
            copy.graph.initializer.append(numpy_helper.from_array(np.array(shape, "int64"), name))
    _remove_unread(copy.graph)
    return copy


def _values(proto: onnx.ModelProto, name: str) -> list[int]:
    """The integers of an initializer; none if there is no such."""
    from onnx import numpy_helper

    tensor = next((tensor for tensor in proto.graph.initializer if tensor.name == name), None)
    return [] if tensor is None else [int(value) for value in numpy_helper.to_array(tensor).reshape(-1)]


def _remove_unread(graph: onnx.GraphProto) -> None:
    """Drop nodes of which no result is read; none where nodes have graphs inside, which read without saying so."""
    if any(attribute.HasField("g") or attribute.graphs for node in graph.node for attribute in node.attribute):
        return
    read = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))


def _extents(proto: onnx.ModelProto) -> dict[str, list[Extent]]:
    """The extents of tensors that the file states whole, by name."""
    found: dict[str, list[Extent]] = {}
    for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        extents = [dim.dim_param or int(dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.HasField("shape") and all(extents):
            found[value.name] = extents
    return found


def _strides(node: onnx.NodeProto) -> list[int]:
    """The strides of a node's call of PyTorch; none if it is not a view by strides, or has symbolic ones."""
    notes = {entry.key: entry.value for entry in getattr(node, "metadata_props", ())}
    found = _STRIDES.search(notes.get(CALL, ""))
    words = found.group(1).split(", ") if found else []
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []


def _is_contiguous(extents: list[Extent], strides: list[int]) -> bool:
    """Whether elements follow each other in the order of the axes, of which only the first of many may be symbolic."""
    if len(extents) != len(strides):
        return False
    axes = [(extent, stride) for extent, stride in zip(extents, strides, strict=True) if extent != 1]
    expected = 1
    for place, (extent, stride) in reversed(list(enumerate(axes))):
        if stride != expected or (isinstance(extent, str) and place > 0):
            return False
        expected *= extent if isinstance(extent, int) else 1
    return True


def _count(extents: list[Extent]) -> tuple[int, list[str]]:
    """The number of elements, as a product of a number and symbolic extents."""
    numbers = [extent for extent in extents if isinstance(extent, int)]
    return int(np.prod(numbers, dtype="int64")), sorted(extent for extent in extents if isinstance(extent, str))
