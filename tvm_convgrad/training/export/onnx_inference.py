# SPDX-License-Identifier: Apache-2.0
"""ONNX graphs in inference mode, whatever mode they were exported in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ModelError

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_MODE = 2
"""The number of Dropout's operand `training_mode`."""


def set_inference(proto: onnx.ModelProto, source: str) -> int:
    """Make batch norms take their running statistics, and dropout the identity; gives how many nodes were changed.

    Raises:
        ModelError: something reads the statistics that a batch norm in training mode would compute.
    """
    nodes = [node for body in (proto.graph, *proto.functions) for node in _nodes(body.node)]
    read = {name for node in nodes for name in node.input} | {output.name for output in proto.graph.output}
    read |= {name for function in proto.functions for name in function.output}
    changed, dropped = 0, set()
    for node in nodes:
        if node.op_type == "BatchNormalization":
            changed += _batch_norm(node, read, source)
        elif node.op_type == "Dropout" and len(node.input) > _MODE:
            dropped.update(node.input[_MODE:])
            del node.input[_MODE:]
            changed += 1
    dropped -= {name for node in nodes for name in node.input}
    _drop(proto, dropped)
    kept = [value for value in proto.graph.value_info if value.name in read]
    if changed:
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(kept)
    return changed


def _drop(proto: onnx.ModelProto, names: set[str]) -> None:
    """Remove initializers and Constant nodes of these names."""
    for tensor in [tensor for tensor in proto.graph.initializer if tensor.name in names]:
        proto.graph.initializer.remove(tensor)
    for node in [node for node in proto.graph.node if node.op_type == "Constant" and node.output[0] in names]:
        proto.graph.node.remove(node)


def _batch_norm(node: onnx.NodeProto, read: set[str], source: str) -> bool:
    """Put one batch norm into inference mode; gives whether it was in another one."""
    modes = [attribute for attribute in node.attribute if attribute.name == "training_mode"]
    moved = [name for name in node.output[1:] if name]
    if not moved and not any(attribute.i for attribute in modes):
        return False
    if read.intersection(moved):
        raise ModelError(
            f"{source}: the graph reads the statistics that {node.name or node.output[0]!r} computes in training mode "
            f"({', '.join(sorted(read.intersection(moved)))}), which inference does not; export it without them."
        )
    for attribute in modes:
        node.attribute.remove(attribute)
    del node.output[1:]
    return True


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, and those of branches and loops inside of them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner.node)


__all__ = ["set_inference"]
