# SPDX-License-Identifier: Apache-2.0
"""ONNX graphs that fix the batch of their export: reshapes are generalised, and other nodes are listed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_convgrad.training.frontends.onnx.torch_recurrent import RECURRENT, STATES

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_BATCH = "convgrad_batch"
_SHAPE_ELEMENTS = 64
"""Tensors of more elements are not shapes; their values are omitted from the graph whose shapes are inferred."""
_END = np.iinfo("int32").max
"""Ends of slices from here on mean the end of the axis."""

Extent = int | str | None


def with_free_batch(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its batch taken out of the constants of reshapes that keep each sample's elements together.

    An exporter without a free batch writes a reshape of [16, 8, 1, 1] to the constant [16, 8]. Where the data has the
    batch on an axis, and the constant has it behind as many elements, the result has the same batch, whatever it is; so
    the constant becomes [0, 8], in which ONNX's 0 stands for the extent of the data. A reshape that merges the batch
    with an axis behind it ([16, 4, 7, 7] to [64, 7, 7]: heads, windows) gets -1 there, and so does the one that splits
    it again. What is expanded to the batch beside a tensor that has it (a class token) takes its extent from the input.
    """
    from onnx import helper

    stored = stored_batch(proto)
    if stored is None:
        return proto
    free = type(proto)()
    free.CopyFrom(proto)
    light = type(proto)()
    light.CopyFrom(proto)
    values = _take_values(light.graph)
    known: dict[str, onnx.ValueInfoProto] = {}
    _drop_zero_states(free, stored)
    while True:
        graph = _Graph.of(light, stored, values, known)
        nodes = [node for node in light.graph.node if node.output[0] not in known]
        freed = {node.output[0]: found for node in nodes if (found := graph.derived(node))}
        expanded = [node.output[0] for node in nodes if not freed and graph.expands_to_batch(node, light.graph)]
        if not freed and not expanded:
            return free
        for result in expanded:
            extents = [_BATCH, *graph.shapes[result][1:]]
            known[result] = helper.make_tensor_value_info(result, graph.kinds[result], extents)
            for each in (free, light):
                _expand_to_batch(each.graph, result)
        for result, (shape, extents) in freed.items():
            known[result] = helper.make_tensor_value_info(result, graph.kinds[result], extents)
            if shape is None:
                continue
            name = f"{result}_free_shape"
            values[name] = np.array(shape, "int64")
            for each in (free, light):
                each.graph.initializer.append(_tensor(values[name], name))
                node = next(node for node in each.graph.node if result in node.output)
                node.input[1] = name
                del node.attribute[:]  # allowzero, which changes nothing in a constant without zeros


def _expand_to_batch(graph: onnx.GraphProto, result: str) -> None:
    """Let an Expand read the batch from the graph's first input, and the other extents from its constant."""
    from onnx import helper

    initializers = {tensor.name for tensor in graph.initializer}
    image = next(value.name for value in graph.input if value.name not in initializers)
    place, node = next((place, node) for place, node in enumerate(graph.node) if result in node.output)
    names = [f"{result}_free_{part}" for part in ("zero", "one", "end", "whole", "batch", "rest", "shape")]
    zero, one, end, whole, batch, rest, shape = names
    ints = {zero: [0], one: [1], end: [_END]}
    made = [
        helper.make_node("Constant", [], [name], value=_tensor(np.array(v, "int64"), name)) for name, v in ints.items()
    ]
    made += [
        helper.make_node("Shape", [image], [whole], whole),
        helper.make_node("Slice", [whole, zero, one], [batch], batch),
        helper.make_node("Slice", [node.input[1], one, end], [rest], rest),
        helper.make_node("Concat", [batch, rest], [shape], shape, axis=0),
    ]
    node.input[1] = shape
    for number, each in enumerate(made):
        graph.node.insert(place + number, each)


def _drop_zero_states(proto: onnx.ModelProto, stored: int) -> None:
    """Remove initial states of recurrent layers that are zeros of the stored batch, ONNX's default."""
    from onnx import numpy_helper

    states = {t.name: t for t in proto.graph.initializer if len(t.dims) == 3 and t.dims[1] == stored}
    for node in proto.graph.node:
        for position, name in enumerate(node.input):
            is_state = node.op_type in RECURRENT and position in STATES and name in states
            if is_state and not numpy_helper.to_array(states[name]).any():
                node.input[position] = ""


def fixed_shapes(proto: onnx.ModelProto) -> list[str]:
    """The nodes that fix a batch: operator, name and constant of each."""
    light = type(proto)()
    light.CopyFrom(proto)
    graph = _Graph.of(light, stored_batch(proto), _take_values(light.graph), {})
    found = []
    for node in proto.graph.node:
        what = _FIXED.get(node.op_type, _operand)(graph, node)
        if what:
            own = node.output[0].split(
                ".sample.expand."
            )  # of an initializer, taken apart by `with_exported_parameters`
            shown = f"the initializer {own[-1]!r}" if own[1:] else f"{node.op_type} {node.name or node.output[0]!r}"
            found.append(f"{shown} has {what}")
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
    """Extents and types of the tensors of a graph whose inputs have a symbolic batch, and values of small constants."""

    stored: int | None
    shapes: dict[str, list[Extent]]
    values: dict[str, np.ndarray[Any, Any]]
    kinds: dict[str, int]

    @classmethod
    def of(
        cls,
        proto: onnx.ModelProto,
        stored: int | None,
        values: dict[str, np.ndarray[Any, Any]],
        known: dict[str, onnx.ValueInfoProto],
    ) -> _Graph:
        """Infer the extents of all tensors.

        Args:
            proto: the graph, best without the values of large initializers.
            values: those of its small constants.
            known: types and extents of some tensors; of one extent that is a multiple of the batch, such as `_BATCH*4`.
        """
        import onnx

        copy = type(proto)()
        copy.CopyFrom(proto)
        initializers = {tensor.name for tensor in copy.graph.initializer}
        for value in copy.graph.input:
            if value.name not in initializers and value.type.tensor_type.shape.dim:
                value.type.tensor_type.shape.dim[0].dim_param = _BATCH
        for value in copy.graph.output:
            value.type.tensor_type.ClearField("shape")
        del copy.graph.value_info[:]
        outputs = {value.name for value in copy.graph.output}
        copy.graph.value_info.extend(value for name, value in known.items() if name not in outputs)
        graph = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
        shapes: dict[str, list[Extent]] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        kinds = {}
        for value in (*graph.input, *graph.value_info, *graph.output, *known.values()):
            kinds[value.name] = value.type.tensor_type.elem_type
            if value.type.tensor_type.HasField("shape"):
                extents = value.type.tensor_type.shape.dim
                shapes[value.name] = [e.dim_value if e.HasField("dim_value") else e.dim_param or None for e in extents]
        return cls(stored, shapes, values, kinds)

    def batched(self, name: str) -> bool:
        """Whether axis 0 of a tensor is the batch."""
        return self.shapes.get(name, [])[:1] == [_BATCH]

    def freed(self, node: onnx.NodeProto) -> tuple[list[int] | None, list[Extent]] | None:
        """Of a reshape whose data has the batch, and that keeps samples together: its constant for any batch, and the
        extents of the result. No constant where the one that there is will do; None for other nodes.
        """
        if node.op_type != "Reshape" or self.stored is None:
            return None
        given, wanted = self.shapes.get(node.input[0], []), self.constant(node, 1)
        places = [axis for axis, extent in enumerate(given) if not isinstance(extent, int)]
        if len(places) != 1 or not wanted or 0 in wanted:
            return None
        place = places[0]
        factor = _factor(given[place])
        before = math.prod(extent for extent in given[:place] if isinstance(extent, int))
        behind = math.prod(extent for extent in given[place + 1 :] if isinstance(extent, int))
        rest = math.prod(extent for extent in wanted if extent > 0)
        if factor is None or not rest or before * behind * factor * self.stored % rest:
            return None
        whole = [before * behind * factor * self.stored // rest if extent < 0 else extent for extent in wanted]
        for axis, extent in enumerate(whole):
            new, uneven = divmod(extent, self.stored)
            is_batch = math.prod(whole[:axis]) == before and new * math.prod(whole[axis + 1 :]) == factor * behind
            if uneven or not is_batch or (self.stored == 1 and new > 1 and wanted[axis] > 0):
                continue  # with one sample it is ambiguous whether an axis has its elements or the batch's
            extents: list[Extent] = list(whole)
            extents[axis] = _BATCH if new == 1 else f"{_BATCH}*{new}"
            whole[axis] = 0 if extents[axis : axis + 1] == given[axis : axis + 1] else -1
            return (whole if wanted[axis] > 0 else None), extents
        return None

    def derived(self, node: onnx.NodeProto) -> tuple[list[int] | None, list[Extent]] | None:
        """`freed`, `resized` or `kept`."""
        return self.freed(node) or self.resized(node) or self.kept(node)

    def kept(self, node: onnx.NodeProto) -> tuple[list[int], list[Extent]] | None:
        """As `freed`, of an Expand to the stored batch whose data has the batch already: 1 leaves an extent alone."""
        shape = self.constant(node, 1) if node.op_type == "Expand" else []
        if not shape or not self.batched(node.input[0]) or len(self.shapes[node.input[0]]) != len(shape):
            return None
        given = self.shapes[node.input[0]][1:]
        rest: list[Extent] = [old if new == 1 else new for old, new in zip(given, shape[1:], strict=True)]
        return [1, *shape[1:]], [_BATCH, *rest]

    def resized(self, node: onnx.NodeProto) -> tuple[None, list[Extent]] | None:
        """The extents of a resize by scales, whose batch onnx's inference does not know; as of `freed`."""
        if node.op_type != "Resize" or not self.batched(node.input[0]) or len(node.input) < 3:
            return None
        scales, extents = self.values.get(node.input[2]), self.shapes.get(node.output[0], [])
        if scales is None or not scales.size or scales.ravel()[0] != 1 or not extents:
            return None
        return None, [_BATCH, *extents[1:]]

    def expands_to_batch(self, node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
        """Whether a node expands a row to the stored batch, only for nodes that have another operand with the batch."""
        shape = self.constant(node, 1) if node.op_type == "Expand" else []
        if not shape or self.stored in (None, 1) or shape[0] != self.stored or min(shape) < 1:
            return False
        if len(self.shapes.get(node.input[0], [])) == len(shape) and self.shapes[node.input[0]][0] != 1:
            return False
        readers = [each for each in graph.node if node.output[0] in each.input]
        results = {value.name for value in graph.output}
        return bool(readers) and node.output[0] not in results and all(self._has_batch(r, len(shape)) for r in readers)

    def _has_batch(self, node: onnx.NodeProto, rank: int) -> bool:
        """Whether the operands of a node have one extent on axis 0, and one of them is the batch."""
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        others = [self.shapes.get(name, []) for name in node.input]
        beside = node.op_type in _ELEMENTWISE or (node.op_type == "Concat" and attributes["axis"] % rank != 0)
        return beside and any(len(extents) == rank and extents[0] == _BATCH for extents in others)

    def constant(self, node: onnx.NodeProto, position: int) -> list[int]:
        """The values of a constant operand, which is a vector; empty if there is none."""
        name = node.input[position] if len(node.input) > position else ""
        return [int(value) for value in self.values[name].ravel()] if name in self.values else []


def _factor(extent: Extent) -> int | None:
    """k of an extent that is k times the batch; None for other extents."""
    name, _, factor = str(extent).partition("*")
    return int(factor or 1) if name == _BATCH else None


def _reshape(graph: _Graph, node: onnx.NodeProto) -> str:
    shape, data = graph.constant(node, 1), graph.shapes.get(node.input[0], [])
    if graph.stored is None and -1 in shape and set(shape[: shape.index(-1)]) == {1}:
        return ""  # [1, -1, 8, 8]: the batch is part of the extent that ONNX computes
    varies = any(not isinstance(extent, int) for extent in data)
    fixed = (graph.batched(node.input[0]) and shape[:1] > [0]) or (varies and min(shape, default=0) > 0)
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
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where", "Max", "Min")
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators whose constant operand has other extents than samples on axis 0."""


def _take_values(graph: onnx.GraphProto) -> dict[str, np.ndarray[Any, Any]]:
    """The values of small constants by name; those of large initializers are removed from the graph.

    Vectors of integers that are joined count as constants: exporters that fold nothing write shapes so.
    """
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
        elif node.op_type == "Concat":
            parts = [values[name] for name in node.input if name in values]
            if len(parts) == len(node.input) and all(part.dtype == np.int64 and part.ndim == 1 for part in parts):
                values[node.output[0]] = np.concatenate(parts)
    return values


def _tensor(values: np.ndarray[Any, Any], name: str) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(values, name)
