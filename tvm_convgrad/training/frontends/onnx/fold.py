# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of shapes in ONNX graphs, computed before TVM's importer sees it.

Exporters compute the operands of Reshape, Slice, Expand and Resize from the extents of tensors, in integers that are
tensors of the graph. TVM's importer takes such integers for data where they are initializers, or makes operators of
them that have no gradient. All of it is known where the extents are; what depends on a batch that is not known stays.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_BATCH = "convgrad_batch"
_STATED = "convgrad"
"""The domain of nodes that onnx does not define."""
_ROUNDS = 16
"""Rounds of folding and inferring shapes: each gets behind one more reshape to computed extents."""

_EVER_ANEW = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
    "Dropout",
}
_SHORT = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
"""Attributes of Constant that TVM's importer does not read, and their element types."""
_NONE: Mapping[str, Sequence[int | str]] = {}
_FLOATS = (1, 10, 11, 16)  # TensorProto's float, float16, double, bfloat16


def with_folded_shapes(
    proto: onnx.ModelProto, shapes: Mapping[str, Sequence[object]], constants: Collection[str] = ()
) -> onnx.ModelProto:
    """The model with every value that follows from constants and known extents as a constant.

    Args:
        proto: a model; its initializers of integers and booleans are constants, those of floats are parameters.
        shapes: extents of the inputs by name; what is not an int, such as a symbolic batch, is not known.
        constants: initializers of floats that are not parameters; scales of resizes are none either.
    """
    folded = type(proto)()
    folded.CopyFrom(proto)
    _initializers_to_constants(folded.graph, constants)
    _write_values(folded.graph)
    for _ in range(_ROUNDS):
        known = known_extents(folded, shapes)
        if not _fold(folded, known) and not _inline_branches(folded.graph):
            break
    stated: dict[str, list[int | str]] = {}
    extents = known_extents(folded, shapes)
    while found := _free_resizes(folded, extents) | _kept_batches(folded, extents, stated):
        stated |= found
        extents = known_extents(folded, shapes, stated)
    _free_reshapes(folded, extents)
    _free_tiles(folded, extents)
    _drop_unread(folded.graph)
    return folded


def _initializers_to_constants(graph: onnx.GraphProto, constants: Collection[str]) -> None:
    """Write initializers that are not parameters as nodes, which TVM's importer makes constants of."""
    from onnx import helper

    results = {output.name for output in graph.output}
    scales = {name for node in graph.node if node.op_type in ("Resize", "Upsample") for name in node.input[1:]}
    constants = scales.union(constants)
    moved = [
        tensor
        for tensor in graph.initializer
        if (tensor.data_type not in _FLOATS or tensor.name in constants) and tensor.name not in results
    ]
    names = {tensor.name for tensor in moved}
    nodes = [helper.make_node("Constant", [], [tensor.name], tensor.name, value=tensor) for tensor in moved]
    nodes.extend(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)
    for field in (graph.initializer, graph.input):
        kept = [value for value in field if value.name not in names]
        del field[:]
        field.extend(kept)


def _write_values(graph: onnx.GraphProto) -> None:
    """Write every Constant as a tensor, the only form that TVM's importer reads."""
    from onnx import helper, numpy_helper

    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name in _SHORT:
            array = np.array(helper.get_attribute_value(node.attribute[0]), _SHORT[node.attribute[0].name])
            node.attribute[0].CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array, node.output[0])))


def known_extents(
    proto: onnx.ModelProto, shapes: Mapping[str, Sequence[object]], stated: Mapping[str, Sequence[int | str]] = _NONE
) -> dict[str, list[int | str | None]]:
    """The extents of all tensors that follow from those of the inputs: numbers, the batch as `_BATCH`, or None.

    Args:
        proto: a model.
        shapes: extents of its inputs by name; what is not an int is the batch.
        stated: extents of tensors of which onnx's inference does not find the batch.
    """
    import onnx

    copy = type(proto)()
    copy.CopyFrom(proto)
    for value in copy.graph.input:
        for extent, wanted in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            if isinstance(wanted, int):
                extent.dim_value = wanted
            else:
                extent.dim_param = _BATCH
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    del copy.graph.value_info[:]
    if stated:
        graph = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
        kinds = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
        copy.graph.value_info.extend(
            onnx.helper.make_tensor_value_info(name, kinds[name], extents)
            for name, extents in stated.items()
            if name in kinds
        )
        copy.opset_import.append(onnx.helper.make_opsetid(_STATED, 1))
        for node in copy.graph.node:
            if node.output[0] in stated:  # else onnx's inference takes the first of the constant sizes for the batch
                node.domain, node.op_type = _STATED, "Stated"
    graph = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
    found: dict[str, list[int | str | None]] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            extents = value.type.tensor_type.shape.dim
            found[value.name] = [e.dim_value if e.HasField("dim_value") else e.dim_param or None for e in extents]
    return found


def _fold(proto: onnx.ModelProto, extents: Mapping[str, list[int | str | None]]) -> bool:
    """Replace nodes whose values are known by constants; whether any was."""
    from onnx import helper, numpy_helper

    graph = proto.graph
    constants = {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    known = set(constants)
    taken: list[onnx.NodeProto] = []
    values: dict[str, npt.NDArray[np.generic]] = {}
    vectors: dict[str, npt.NDArray[np.object_]] = {}
    for node in graph.node:
        if node.op_type == "Constant":
            continue
        picked = _picked_extents(node, extents, vectors, constants)
        if picked is not None and all(isinstance(extent, int) for extent in picked.flat):
            values[node.output[0]] = picked.astype("int64")
            known.add(node.output[0])
        elif picked is not None:
            vectors[node.output[0]] = picked
        elif _is_known(node, known):
            taken.append(node)
            known.update(node.output)
    values.update(_evaluated(proto, taken, values))
    if not values:
        return False
    kept = [node for node in graph.node if node.op_type == "Constant" or not set(values).intersection(node.output)]
    read = {name for node in kept for name in _read_by(node)} | {output.name for output in graph.output}
    made = [
        helper.make_node("Constant", [], [name], name, value=numpy_helper.from_array(np.asarray(value), name))
        for name, value in values.items()
        if name in read
    ]
    del graph.node[:]
    graph.node.extend([*made, *kept])
    return True


def _inline_branches(graph: onnx.GraphProto) -> bool:
    """Replace each If whose condition is a constant by the nodes of its branch; whether there was any."""
    from onnx import helper, numpy_helper

    constants = {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    nodes, changed = [], False
    for node in graph.node:
        if node.op_type != "If" or node.input[0] not in constants:
            nodes.append(node)
            continue
        taken = "then_branch" if numpy_helper.to_array(constants[node.input[0]]).item() else "else_branch"
        branch = next(attribute.g for attribute in node.attribute if attribute.name == taken)
        for tensor in branch.initializer:
            nodes.append(helper.make_node("Constant", [], [tensor.name], tensor.name, value=tensor))
        nodes.extend(branch.node)
        for inner, outer in zip(branch.output, node.output, strict=True):
            nodes.append(helper.make_node("Identity", [inner.name], [outer], node.name))
        changed = True
    if changed:
        kept = list(nodes)
        del graph.node[:]
        graph.node.extend(kept)
        _write_values(graph)
    return changed


def _read_by(node: onnx.NodeProto) -> set[str]:
    """The names that a node reads, its branches and bodies among them."""
    names = set(node.input)
    for attribute in node.attribute:
        for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            names.update(output.name for output in inner.output)
            names.update(name for each in inner.node for name in _read_by(each))
    return names


def _is_known(node: onnx.NodeProto, known: Collection[str]) -> bool:
    """Whether the results of a node follow from constants."""
    inner = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
    inputs = [name for name in node.input if name]
    return not inner and node.op_type not in _EVER_ANEW and bool(inputs) and all(name in known for name in inputs)


def _picked_extents(
    node: onnx.NodeProto,
    extents: Mapping[str, list[int | str | None]],
    vectors: Mapping[str, npt.NDArray[np.object_]],
    constants: Mapping[str, onnx.TensorProto],
) -> npt.NDArray[np.object_] | None:
    """The extents of a tensor that a node gives, some of which need not be known; None of other nodes.

    Args:
        node: Shape (with its attributes `start` and `end`) or Size, or Gather or Slice of what such a node gives.
        extents: of all tensors.
        vectors: results of such nodes of which not all is known, by name.
        constants: the constants of the graph.
    """
    from onnx import numpy_helper

    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type in ("Shape", "Size"):
        shape = extents.get(node.input[0])
        if shape is None:
            return None
        if node.op_type == "Size":
            whole = [extent for extent in shape if isinstance(extent, int)]
            return np.array(math.prod(whole) if len(whole) == len(shape) else None, object)
        return np.array(shape, object)[attributes.get("start", 0) : attributes.get("end", len(shape))]
    if node.op_type not in ("Gather", "Slice") or node.input[0] not in vectors:
        return None
    if not all(name in constants for name in node.input[1:] if name):
        return None
    vector = vectors[node.input[0]]
    if vector.ndim != 1:
        return None
    operands = [numpy_helper.to_array(constants[name]) if name else None for name in node.input[1:]]
    if node.op_type == "Gather":
        return np.asarray(vector[operands[0]], object)
    stated = {attribute.name: attribute.ints for attribute in node.attribute}
    if "starts" in stated:  # up to opset 9
        return vector[slice(stated["starts"][0], stated["ends"][0])]
    bounds = [None if each is None else int(each.item()) for each in (*operands, None, None)]
    return vector[slice(bounds[0], bounds[1], bounds[3])]


def _evaluated(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    values: Mapping[str, npt.NDArray[np.generic]],
) -> dict[str, npt.NDArray[np.generic]]:
    """The values of nodes that read constants only, by onnx's reference implementation.

    A node that this implementation cannot compute is omitted, and so is what reads it.
    """
    try:
        return _computed(proto, nodes, values)
    except Exception:  # onnx raises every kind
        found = dict(values)
        stored = {node.output[0] for node in proto.graph.node if node.op_type == "Constant"}
    for node in nodes:
        if all(name in found or name in stored for name in node.input if name):
            with contextlib.suppress(Exception):
                found.update(_computed(proto, [node], found))
    return found


def _computed(
    proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], values: Mapping[str, npt.NDArray[np.generic]]
) -> dict[str, npt.NDArray[np.generic]]:
    """The values of nodes in topological order."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    wanted = [name for node in nodes for name in node.output if name]
    if not wanted:
        return {}
    read = {name for node in nodes for name in node.input}
    constants = [node for node in proto.graph.node if node.op_type == "Constant" and node.output[0] in read]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items() if name in read]
    outputs = [helper.make_empty_tensor_value_info(name) for name in wanted]
    graph = helper.make_graph([*constants, *nodes], "constants", [], outputs, stored)
    model = helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=proto.ir_version)
    found = ReferenceEvaluator(model).run(None, {})
    return dict(zip(wanted, found, strict=True))


def _free_reshapes(proto: onnx.ModelProto, extents: Mapping[str, list[int | str | None]]) -> None:
    """Write reshapes to computed extents of which only the batch is not known with a constant: [batch, 8] is [0, 8].

    In ONNX, 0 is the extent that the data have on the same axis, and -1 what is left of them.
    """
    from onnx import helper, numpy_helper

    constants = {node.output[0] for node in proto.graph.node if node.op_type == "Constant"}
    added = []
    for node in proto.graph.node:
        if node.op_type != "Reshape" or node.input[1] in constants:
            continue
        given, wanted = extents.get(node.input[0]), extents.get(node.output[0])
        if given is None or wanted is None or any(extent is None for extent in wanted):
            continue
        free = [axis for axis, extent in enumerate(wanted) if not isinstance(extent, int)]
        if len(free) != 1 or 0 in wanted:
            continue
        axis = free[0]
        same = axis < len(given) and given[axis] == wanted[axis] == _BATCH
        target = [extent if isinstance(extent, int) else 0 if same else -1 for extent in wanted]
        name = f"{node.output[0]}_extents"
        value = numpy_helper.from_array(np.array(target, "int64"), name)
        added.append(helper.make_node("Constant", [], [name], name, value=value))
        node.input[1] = name
    nodes = [*added, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _free_resizes(proto: onnx.ModelProto, extents: Mapping[str, list[int | str | None]]) -> dict[str, list[int | str]]:
    """Give resizes whose computed sizes are known except for the batch constant sizes; their first entry is ignored.

    Returns the extents of their results. The sizes are joined, the first one being the batch of some tensor: what
    F.interpolate(size=y.shape[-2:]) exports.
    """
    from onnx import helper, numpy_helper

    made = {output: node for node in proto.graph.node for output in node.output}
    added = []
    found: dict[str, list[int | str]] = {}
    for node in proto.graph.node:
        sizes = made.get(node.input[3]) if node.op_type == "Resize" and len(node.input) > 3 else None
        if sizes is None or sizes.op_type != "Concat" or any(each.name == "axes" for each in node.attribute):
            continue
        wanted = [extent for extent in extents.get(node.output[0], [None])[1:] if isinstance(extent, int)]
        if len(wanted) + 1 != len(extents.get(node.input[0], ())) or not _is_batch(sizes.input[0], made, extents):
            continue
        name = f"{node.output[0]}_sizes"
        value = numpy_helper.from_array(np.array([1, *wanted], "int64"), name)
        added.append(helper.make_node("Constant", [], [name], name, value=value))
        node.input[3] = name
        found[node.output[0]] = [_BATCH, *wanted]
    nodes = [*added, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return found


def _kept_batches(
    proto: onnx.ModelProto, extents: Mapping[str, list[int | str | None]], stated: Collection[str]
) -> dict[str, list[int | str]]:
    """The extents of reshapes that leave the batch to -1, of which onnx's inference does not see that it is the same.

    Args:
        stated: results whose extents are known to be these.
    """
    from onnx import numpy_helper

    constants = {node.output[0]: node.attribute[0].t for node in proto.graph.node if node.op_type == "Constant"}
    found: dict[str, list[int | str]] = {}
    for node in proto.graph.node:
        if node.op_type != "Reshape" or node.input[1] not in constants or node.output[0] in stated:
            continue
        given = extents.get(node.input[0], [])
        wanted = [int(extent) for extent in numpy_helper.to_array(constants[node.input[1]])]
        known = [extent for extent in given if isinstance(extent, int)]
        rest = [extent for extent in wanted if extent > 0]
        if len(known) + 1 != len(given) or _BATCH not in given or len(rest) + 1 != len(wanted) or -1 not in wanted:
            continue
        if 0 not in known and math.prod(known) == math.prod(rest):
            found[node.output[0]] = [_BATCH if extent < 0 else extent for extent in wanted]
    return found


def _free_tiles(proto: onnx.ModelProto, extents: Mapping[str, list[int | str | None]]) -> None:
    """Write tiles by computed numbers along axes of extent 1 (`x.repeat(batch, 1, 1, 1)`) as Expand."""
    made = {output: node for node in proto.graph.node for output in node.output}
    for node in proto.graph.node:
        if node.op_type != "Tile":
            continue
        repeats, given = made.get(node.input[1]), extents.get(node.input[0], [])
        if repeats is None or repeats.op_type != "Concat" or len(repeats.input) != len(given):
            continue
        if all(_is_one(made.get(n)) or extent == 1 for n, extent in zip(repeats.input, given, strict=True)):
            node.op_type = "Expand"


def _is_one(node: onnx.NodeProto | None) -> bool:
    from onnx import numpy_helper

    return (
        node is not None and node.op_type == "Constant" and numpy_helper.to_array(node.attribute[0].t).tolist() == [1]
    )


def _is_batch(name: str, made: Mapping[str, onnx.NodeProto], extents: Mapping[str, list[int | str | None]]) -> bool:
    """Whether a value is the first extent of a tensor, and that is the batch: Shape(end=1), or picked of a Shape."""
    from onnx import numpy_helper

    node = made.get(name)
    while node is not None and node.op_type in ("Unsqueeze", "Squeeze", "Cast", "Gather", "Slice"):
        starts = next((attribute.ints for attribute in node.attribute if attribute.name == "starts"), None)
        if starts is not None:  # Slice up to opset 9
            if any(starts):
                return False
        elif node.op_type in ("Gather", "Slice"):
            index = made.get(node.input[1])
            if index is None or index.op_type != "Constant" or numpy_helper.to_array(index.attribute[0].t).any():
                return False
        node = made.get(node.input[0])
    if node is None or node.op_type != "Shape":
        return False
    start = next((attribute.i for attribute in node.attribute if attribute.name == "start"), 0)
    return start == 0 and extents.get(node.input[0], [None])[0] == _BATCH


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove nodes whose results are not read."""
    read = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(_read_by(node))
    del graph.node[:]
    graph.node.extend(reversed(kept))


__all__ = ["with_folded_shapes"]
