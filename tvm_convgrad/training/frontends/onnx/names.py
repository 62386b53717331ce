# SPDX-License-Identifier: Apache-2.0
"""Initializers of ONNX graphs: names that TVM's importer keeps, and parameters that an exporter has merged."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx


def with_own_parameters(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with an initializer of its own for each parameter that PyTorch's exporter has merged with an equal one.

    In eval mode the TorchScript exporter keeps one of several initializers with equal values, such as the zeros of new
    biases and running means, and writes the others as Identity nodes with their names. For inference this is the same;
    in training it would tie them. Parameters that are one tensor in PyTorch have one name, and no Identity.
    """
    if proto.producer_name != "pytorch":
        return proto
    values = {tensor.name: tensor for tensor in proto.graph.initializer}
    results = {output.name for output in proto.graph.output}
    merged = [
        node
        for node in proto.graph.node
        if node.op_type == "Identity" and node.input[0] in values and node.output[0] not in results
    ]
    if not merged:
        return proto
    copy = type(proto)()
    copy.CopyFrom(proto)
    names = {node.output[0] for node in merged}
    kept = [node for node in copy.graph.node if node.output[0] not in names]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    for node in merged:
        tensor = copy.graph.initializer.add()
        tensor.CopyFrom(values[node.input[0]])
        tensor.name = node.output[0]
    return copy


def with_safe_names(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with initializers renamed that TVM's importer would misname, and their public names by the new ones.

    TVM 0.26 strips the letters o, n, x and colons from both ends of a name (`bn_mean` becomes `bn_mea`), 0.27 the
    prefix onnx::, and both lose one of two initializers that then have one name. Public names lack the prefix, unless
    another initializer is called so.
    """
    given = [tensor.name for tensor in proto.graph.initializer]
    taken = {*given, *(name for node in proto.graph.node for name in (*node.input, *node.output))}
    fresh = (name for name in (f"initializer{i}_" for i in itertools.count()) if name not in taken)
    renamed = {name: next(fresh) for name in given if name != name.strip("onx:")}
    if not renamed:
        return proto, {}
    copy = type(proto)()
    copy.CopyFrom(proto)
    for tensor in (*copy.graph.initializer, *copy.graph.input):
        tensor.name = renamed.get(tensor.name, tensor.name)
    _rename_uses(copy.graph, renamed)
    short = {name: name.removeprefix("onnx::") for name in renamed}
    uses = Counter([*short.values(), *(name for name in given if name not in renamed)])
    return copy, {new: short[name] if uses[short[name]] == 1 else name for name, new in renamed.items()}


def names_read(graph: onnx.GraphProto) -> set[str]:
    """What the nodes of a graph read, those of the bodies of If and Loop among them, and its results."""
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for node in graph.node:
        for attribute in node.attribute:
            bodies = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            read = read.union(*map(names_read, bodies))
    return read


def _rename_uses(graph: onnx.GraphProto, renamed: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                _rename_uses(inner, renamed)
    for output in graph.output:
        output.name = renamed.get(output.name, output.name)
