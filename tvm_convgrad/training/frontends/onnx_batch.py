# SPDX-License-Identifier: Apache-2.0
"""ONNX graphs that fix the batch of their export: reshapes are freed of it, and other nodes are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_BATCH = "convgrad_batch"
_SHAPE_ELEMENTS = 64
"""Tensors of more elements are no shapes; their values are left out of the graph whose shapes are inferred."""
_END = np.iinfo("int32").max
"""Ends of slices from here on mean the end of the axis."""

Extent = int | str | None


def with_free_batch(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its batch taken out of the constants of reshapes that keep each sample's elements together.

    An exporter without a free batch writes a reshape of [16, 8, 1, 1] to the constant [16, 8]. Where the
    data has the batch on axis 0, and each sample has as many elements as the constant, axis 0 of the result is the same
    batch, whatever it is; so the constant becomes [0, 8], in which ONNX's 0 stands for the extent of the data.
    """
    stored = stored_batch(proto)
    if stored is None:
        return proto
    free = type(proto)()
    free.CopyFrom(proto)
    while True:
        graph = _Graph.of(free, stored)
        node = next((node for node in free.graph.node if graph.keeps_samples(node)), None)
        if node is None:
            return free
        shape = graph.values[node.input[1]].astype("int64")
        shape[0] = 0
        name = f"{node.output[0]}_free_shape"
        free.graph.initializer.append(_tensor(shape, name))
        node.input[1] = name
        del node.attribute[:]  # allowzero, which changes nothing in a constant without zeros


def fixed_shapes(proto: onnx.ModelProto) -> list[str]:
    """The nodes that fix a batch: operator, name and constant of each."""
    graph = _Graph.of(proto, stored_batch(proto))
    found = []
    for node in proto.graph.node:
        what = _FIXED.get(node.op_type, _operand)(graph, node)
        if what:
            found.append(f"{node.op_type} {node.name or node.output[0]!r} has {what}")
    return found or _shape_constants(proto, graph)


def _shape_constants(proto: onnx.ModelProto, graph: _Graph) -> list[str]:
    """Vectors of integers that begin with the stored batch, from which other nodes compute a shape."""
    users = {name: node for node in reversed(proto.graph.node) for name in node.input}
    shapes = {n: v.tolist() for n, v in graph.values.items() if v.dtype == np.int64 and v.ndim == 1 and v.size > 1}
    return [
        f"{users[name].op_type} {users[name].name or users[name].output[0]!r} reads the constant shape {shape}"
        for name, shape in shapes.items()
        if name in users and graph.stored not in (None, 1) and shape[0] == graph.stored
    ]


def stored_batch(proto: onnx.ModelProto) -> int | None:
    """The batch of the file, if that is one number for all inputs."""
    initializers = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value.type.tensor_type.shape.dim for value in proto.graph.input if value.name not in initializers]
    found = {int(extents[0].dim_value) if extents else 0 for extents in inputs}
    return found.pop() or None if len(found) == 1 else None


@dataclass(frozen=True)
class _Graph:
    """Extents of the tensors of a graph whose inputs have a symbolic batch, and the values of its small constants."""

    stored: int | None
    shapes: dict[str, list[Extent]]
    values: dict[str, np.ndarray[Any, Any]]

    @classmethod
    def of(cls, proto: onnx.ModelProto, stored: int | None) -> _Graph:
        """Infer the extents of all tensors."""
        import onnx

        copy = type(proto)()
        copy.CopyFrom(proto)
        values = _take_values(copy.graph)
        initializers = {tensor.name for tensor in copy.graph.initializer}
        for value in copy.graph.input:
            if value.name not in initializers and value.type.tensor_type.shape.dim:
                value.type.tensor_type.shape.dim[0].dim_param = _BATCH
        for value in copy.graph.output:
            value.type.tensor_type.ClearField("shape")
        del copy.graph.value_info[:]
        graph = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
        shapes: dict[str, list[Extent]] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.tensor_type.HasField("shape"):
                extents = value.type.tensor_type.shape.dim
                shapes[value.name] = [e.dim_value if e.HasField("dim_value") else e.dim_param or None for e in extents]
        return cls(stored, shapes, values)

    def batched(self, name: str) -> bool:
        """Whether axis 0 of a tensor is the batch."""
        return self.shapes.get(name, [])[:1] == [_BATCH]

    def keeps_samples(self, node: onnx.NodeProto) -> bool:
        """Whether a node reshapes to a constant with the stored batch and keeps each sample's elements together."""
        if node.op_type != "Reshape" or not self.batched(node.input[0]):
            return False
        given, wanted = self.shapes[node.input[0]][1:], self.constant(node, 1)
        if not wanted or wanted[0] != self.stored or 0 in wanted:
            return False
        if not all(isinstance(extent, int) for extent in given):
            return False
        elements = math.prod(extent for extent in given if isinstance(extent, int))
        known = math.prod(extent for extent in wanted[1:] if extent > 0)
        return elements % known == 0 if -1 in wanted else elements == known

    def constant(self, node: onnx.NodeProto, position: int) -> list[int]:
        """The values of a constant operand, which is a vector; empty if there is none."""
        name = node.input[position] if len(node.input) > position else ""
        return [int(value) for value in self.values[name].ravel()] if name in self.values else []


def _reshape(graph: _Graph, node: onnx.NodeProto) -> str:
    shape, data = graph.constant(node, 1), graph.shapes.get(node.input[0], [])
    fixed = (graph.batched(node.input[0]) and shape[:1] > [0]) or (_BATCH in data and min(shape, default=0) > 0)
    return f"the constant shape {shape}" if fixed else ""


def _expand(graph: _Graph, node: onnx.NodeProto) -> str:
    shape = graph.constant(node, 1)
    return f"the constant shape {shape}" if shape and shape[0] > 1 and shape[0] == graph.stored else ""


def _constant_of_shape(graph: _Graph, node: onnx.NodeProto) -> str:
    shape = graph.constant(node, 0)
    return f"the constant shape {shape}" if shape and shape[0] == graph.stored else ""


def _resize(graph: _Graph, node: onnx.NodeProto) -> str:
    sizes = graph.constant(node, 3)
    return f"the constant sizes {sizes}" if sizes and graph.batched(node.input[0]) else ""


def _slice(graph: _Graph, node: onnx.NodeProto) -> str:
    ends, axes = graph.constant(node, 2), graph.constant(node, 3)
    axes = axes or list(range(len(ends)))
    if not graph.batched(node.input[0]) or 0 not in axes or len(axes) != len(ends):
        return ""
    end = ends[axes.index(0)]
    return f"the constant end {end} on axis 0" if 0 < end < _END else ""


def _operand(graph: _Graph, node: onnx.NodeProto) -> str:
    """A constant with the stored batch beside an operand with the symbolic one."""
    if graph.stored in (None, 1) or node.op_type in _WEIGHTED or not any(map(graph.batched, node.input)):
        return ""
    for name in node.input:
        shape = graph.shapes.get(name, [])
        if len(shape) > 1 and shape[0] == graph.stored:
            return f"the operand {name!r} of the constant shape {shape}"
    return ""


_FIXED: dict[str, Callable[[_Graph, Any], str]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Resize": _resize,
    "Slice": _slice,
}
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators whose constant operand has other extents than samples on axis 0."""


def _take_values(graph: onnx.GraphProto) -> dict[str, np.ndarray[Any, Any]]:
    """The values of small constants by name; those of large initializers are removed from the graph."""
    from onnx import numpy_helper

    values: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _SHAPE_ELEMENTS:
            values[tensor.name] = numpy_helper.to_array(tensor)
        else:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value" and math.prod(attribute.t.dims) <= _SHAPE_ELEMENTS:
                    values[node.output[0]] = numpy_helper.to_array(attribute.t)
                elif attribute.name in ("value_int", "value_ints"):
                    values[node.output[0]] = np.array(attribute.ints or [attribute.i], "int64")
    return values


def _tensor(values: np.ndarray[Any, Any], name: str) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(values, name)
