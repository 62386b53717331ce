# SPDX-License-Identifier: Apache-2.0
"""Parameters in graphs of torch.onnx.export(dynamo=False), told by the names of their nodes.

In eval mode that exporter computes in advance what follows from parameters alone, and calls the result after the
operator: the weight of a linear layer, transposed, is `onnx::MatMul_173`. Its nodes are called after the modules that
they are in, `/encoder/layers.0/fc/MatMul`, so the parameter is `encoder.layers.0.fc.weight`. What has a bias beside it
is called after that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from tvm_convgrad.training.frontends.onnx_torch_recurrent import RECURRENT, restore

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

    from tvm_convgrad.training.frontends.onnx_torch_notes import Tensor

_SECOND = re.compile(r"_\d+$")
_COMPUTED = re.compile(r"onnx::(MatMul|PRelu|LSTM|GRU|RNN)_\d+")


def with_module_names(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the weights of linear and recurrent layers and of PReLU as the module has them.

    Nodes transpose, reshape or reorder them for the operators. A transposed weight that equals an embedding's is that
    one: tied weights stay tied. What the names do not tell stays as it is.
    """
    if proto.producer_name != "pytorch" or not any(
        _COMPUTED.fullmatch(tensor.name) for tensor in proto.graph.initializer
    ):
        return proto
    copy = type(proto)()
    copy.CopyFrom(proto)
    _Graph(copy).rewrite()
    return copy


def module_of(node: onnx.NodeProto) -> str:
    """The module that a node is in, as PyTorch names it; "" for the whole model or where the name tells none.

    The name of a module in a Sequential begins with that of the Sequential: `/layer1/layer1.0/conv/Conv`.
    """
    parts = node.name.split("/")[1:-1]
    own = [
        part for part, following in zip(parts, [*parts, ""][1:], strict=True) if not following.startswith(f"{part}.")
    ]
    return ".".join(own)


class _Graph:
    """A graph whose computed initializers are replaced."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        from onnx import numpy_helper

        self._proto = proto
        self._values: dict[str, Tensor] = {
            tensor.name: np.asarray(numpy_helper.to_array(tensor)) for tensor in proto.graph.initializer
        }
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in proto.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._plain = {module_of(node) for node in proto.graph.node}
        self._read: defaultdict[str, set[tuple[str, bytes]]] = defaultdict(set)
        for name, value in self._values.items():
            for node in self._readers.get(name, []) if _COMPUTED.fullmatch(name) else []:
                module = module_of(node)
                self._read[_SECOND.sub("", module)].add((module, value.tobytes()))
        self._made: dict[str, Tensor] = {}
        self._nodes: dict[str, onnx.NodeProto] = {}

    def rewrite(self) -> None:
        """Replace all that can be."""
        layers: dict[str, list[onnx.NodeProto]] = {}
        for given in filter(_COMPUTED.fullmatch, list(self._values)):
            readers, value = self._readers.get(given, []), self._values[given]
            kinds = {(node.op_type, at) for node in readers for at, name in enumerate(node.input) if name == given}
            if kinds == {("MatMul", 1)} and value.ndim == 2:
                stored = np.ascontiguousarray(value.T)
                self._restore(readers, given, self._linear(readers[0], stored), stored)
            elif kinds == {("PRelu", 1)} and value.size == max(value.shape, default=0):
                self._restore(readers, given, self._weight(readers[0], value.reshape(-1)), value.reshape(-1))
        for node in self._proto.graph.node:
            if node.op_type in RECURRENT and module_of(node):
                layers.setdefault(module_of(node), []).append(node)
        for module, nodes in layers.items():
            self._restore_recurrent(module, nodes)
        self._write()

    def _linear(self, node: onnx.NodeProto, value: Tensor) -> str:
        """What the weight of a product is called; "" if it cannot be told."""
        tables = [each.input[0] for each in self._proto.graph.node if each.op_type == "Gather"]
        for name in (name for name in tables if name in self._values and value.min() != value.max()):
            if self._values[name].dtype == value.dtype and np.array_equal(self._values[name], value):
                return name
        for reader in self._readers.get(node.output[0], []):
            if reader.op_type == "Add":
                biases = [name for name in reader.input if name.endswith("bias") and name in self._values]
                if len(biases) == 1 and self._values[biases[0]].shape == value.shape[:1]:
                    return self._free(f"{biases[0].removesuffix('bias')}weight", value)
        return self._weight(node, value)

    def _weight(self, node: onnx.NodeProto, value: Tensor) -> str:
        """The weight of a node's module, after the name of the module.

        A second module of a name, or call of the module, is `q_1`: the names of lists that are no modules of a call are
        not in it. One that reads equal values is the same module, called again; of others the name tells nothing.
        """
        module = module_of(node)
        base = _SECOND.sub("", module)
        if not module or len({key for name, key in self._read[base] if base in self._plain or name == module}) > 1:
            return ""
        return self._free(f"{base if base in self._plain else module}.weight", value)

    def _free(self, name: str, value: Tensor) -> str:
        """The name, if no other tensor has it."""
        taken = self._values.get(name, self._made.get(name, value))
        return name if np.array_equal(taken, value) else ""

    def _restore(self, readers: list[onnx.NodeProto], given: str, name: str, value: Tensor) -> None:
        """Let nodes read what an operator makes of the parameter."""
        from onnx import helper, numpy_helper

        if not name:
            return
        result = f"{name}.{given.removeprefix('onnx::')}"
        if readers[0].op_type == "MatMul":
            self._nodes[result] = helper.make_node("Transpose", [name], [result], name=result, perm=[1, 0])
        else:
            shape = numpy_helper.from_array(np.array(self._values[given].shape, "int64"))
            extents = f"{result}.shape"
            self._nodes[extents] = helper.make_node("Constant", [], [extents], name=extents, value=shape)
            self._nodes[result] = helper.make_node("Reshape", [name, extents], [result], name=result)
        if name not in self._values:
            self._made[name] = value
        for node in readers:
            node.input[1] = result

    def _restore_recurrent(self, module: str, nodes: list[onnx.NodeProto]) -> None:
        stored = []
        for layer, node in enumerate(nodes):
            texts = {attribute.name: attribute.s for attribute in node.attribute}
            kinds: tuple[str, ...] = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            kinds = kinds if len(node.input) > 3 and node.input[3] else kinds[:2]
            for ending in ("", "_reverse") if texts.get("direction") == b"bidirectional" else ("",):
                stored += [f"{kind}_l{layer}{ending}" for kind in kinds]
        if any(f"{module}.{name}" in self._values for name in stored):
            return
        restored = restore(nodes, stored, self._values, lambda name: f"{module}.{name}")
        self._made |= restored.values
        self._nodes |= {node.output[0]: node for node in restored.nodes}

    def _write(self) -> None:
        from onnx import numpy_helper

        graph = self._proto.graph
        nodes = [*self._nodes.values(), *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        read = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
        gone = [t for t in graph.initializer if t.name not in read and _COMPUTED.fullmatch(t.name)]
        for tensor in gone:
            graph.initializer.remove(tensor)
        for name, value in self._made.items():
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        for tensor in gone:  # files of old versions list initializers among the inputs
            for entry in [entry for entry in graph.input if entry.name == tensor.name]:
                graph.input.remove(entry)


__all__ = ["module_of", "with_module_names"]
