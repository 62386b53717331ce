# SPDX-License-Identifier: Apache-2.0
"""Parameters in graphs of torch.onnx.export(dynamo=False), told by the names of their nodes.

In eval mode that exporter computes in advance what follows from parameters alone, and calls the result after the
operator: the weight of a linear layer, transposed, is `onnx::MatMul_173`. Its nodes are called after the modules that
they are in, `/encoder/layers.0/fc/MatMul`, so the parameter is `encoder.layers.0.fc.weight`. What has a bias beside it
is called after that.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tvm_convgrad.training.frontends.onnx.names import names_read
from tvm_convgrad.training.frontends.onnx.torch_recurrent import RECURRENT, restore

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

    from tvm_convgrad.training.frontends.onnx.torch_notes import Tensor

_SECOND = re.compile(r"_\d+$")
_COMPUTED = re.compile(r"onnx::(MatMul|PRelu|LSTM|GRU|RNN)_\d+")


def with_module_names(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the weights of linear and recurrent layers and of PReLU as the module has them.

    Nodes transpose, reshape or reorder them for the operators. A transposed weight that equals an embedding's is that
    one: tied weights stay tied. What the names do not determine stays as it is.
    """
    if proto.producer_name != "pytorch" or not any(
        _COMPUTED.fullmatch(tensor.name) for tensor in proto.graph.initializer
    ):
        return proto
    copy = _without_initializers(proto)
    _Graph(copy, proto.graph.initializer).rewrite()
    return copy


def module_of(node: onnx.NodeProto) -> str:
    """The module that a node is in, as PyTorch names it; "" for the whole model or where the name has none.

    The name of a module in a Sequential begins with that of the Sequential: `/layer1/layer1.0/conv/Conv`.
    """
    parts = node.name.split("/")[1:-1]
    own = [
        part for part, following in zip(parts, [*parts, ""][1:], strict=True) if not following.startswith(f"{part}.")
    ]
    return ".".join(own)


def _without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model without its weights: those that are replaced are not to be in memory twice."""
    copy = type(proto)()
    for target, source, left_out in ((copy, proto, "graph"), (copy.graph, proto.graph, "initializer")):
        for field, value in source.ListFields():
            if field.name == left_out:
                continue
            if hasattr(value, "MergeFrom"):  # a message, or a list
                getattr(target, field.name).MergeFrom(value)
            else:
                setattr(target, field.name, value)
    return copy


class _Stored(Mapping[str, "Tensor"]):
    """Initializers by name, each read when it is looked up, as protobuf copies what it returns."""

    def __init__(self, tensors: Sequence[onnx.TensorProto]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def __getitem__(self, name: str) -> Tensor:
        from onnx import numpy_helper

        return np.asarray(numpy_helper.to_array(self._tensors[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an initializer, which is not read."""
        return tuple(self._tensors[name].dims)


class _Graph:
    """A graph whose computed initializers are replaced.

    Args:
        proto: the model without initializers, which are written into it.
        initializers: those of the model, which stay as they are.
    """

    def __init__(self, proto: onnx.ModelProto, initializers: Sequence[onnx.TensorProto]) -> None:
        self._proto, self._initializers = proto, initializers
        self._values = _Stored(initializers)
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in proto.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._plain = {module_of(node) for node in proto.graph.node}
        self._read: defaultdict[str, set[tuple[str, bytes]]] = defaultdict(set)
        for name in filter(_COMPUTED.fullmatch, self._values):
            readers = self._readers.get(name, [])
            value = hashlib.sha256(self._values[name].tobytes()).digest() if readers else b""
            for module in map(module_of, readers):
                self._read[_SECOND.sub("", module)].add((module, value))
        self._made: dict[str, Callable[[], Tensor]] = {}
        self._nodes: dict[str, onnx.NodeProto] = {}

    def rewrite(self) -> None:
        """Replace all that can be."""
        layers: dict[str, list[onnx.NodeProto]] = {}
        for given in filter(_COMPUTED.fullmatch, list(self._values)):
            readers, shape = self._readers.get(given, []), self._values.shape(given)
            kinds = {(node.op_type, at) for node in readers for at, name in enumerate(node.input) if name == given}
            if kinds == {("MatMul", 1)} and len(shape) == 2:
                self._restore(readers, given, self._linear, partial(self._transposed, given))
            elif kinds == {("PRelu", 1)} and np.prod(shape, dtype=int) == max(shape, default=0):
                self._restore(readers, given, self._weight, partial(self._flat, given))
        for node in self._proto.graph.node:
            if node.op_type in RECURRENT and module_of(node):
                layers.setdefault(module_of(node), []).append(node)
        for module, nodes in layers.items():
            self._restore_recurrent(module, nodes)
        self._write()

    def _transposed(self, given: str) -> Tensor:
        return self._values[given].T

    def _flat(self, given: str) -> Tensor:
        return self._values[given].reshape(-1)

    def _linear(self, node: onnx.NodeProto, value: Tensor) -> str:
        """What the weight of a product is called; "" if that is not known."""
        tables = [each.input[0] for each in self._proto.graph.node if each.op_type == "Gather"]
        for name in (name for name in tables if name in self._values and value.min() != value.max()):
            if self._values.shape(name) == value.shape and _is_same(self._values[name], value):
                return name
        for reader in self._readers.get(node.output[0], []):
            if reader.op_type == "Add":
                biases = [name for name in reader.input if name.endswith("bias") and name in self._values]
                if len(biases) == 1 and self._values.shape(biases[0]) == value.shape[:1]:
                    return self._free(f"{biases[0].removesuffix('bias')}weight", value)
        return self._weight(node, value)

    def _weight(self, node: onnx.NodeProto, value: Tensor) -> str:
        """The weight of a node's module, after the name of the module.

        A second module of a name, or call of the module, is `q_1`; the names of lists that are not the module of a call
        are not in it. One that reads equal values is the same module, called again; of others the name says nothing.
        """
        module = module_of(node)
        base = _SECOND.sub("", module)
        if not module or len({key for name, key in self._read[base] if base in self._plain or name == module}) > 1:
            return ""
        return self._free(f"{base if base in self._plain else module}.weight", value)

    def _free(self, name: str, value: Tensor) -> str:
        """The name, if no other tensor has it."""
        made = self._made.get(name)
        taken = made() if made is not None and name not in self._values else self._values.get(name, value)
        return name if np.array_equal(taken, value) else ""

    def _restore(
        self,
        readers: list[onnx.NodeProto],
        given: str,
        name_of: Callable[[onnx.NodeProto, Tensor], str],
        parameter: Callable[[], Tensor],
    ) -> None:
        """Let nodes read what an operator makes of the parameter, if it has a name."""
        from onnx import helper, numpy_helper

        name = name_of(readers[0], parameter())
        if not name:
            return
        result = f"{name}.{given.removeprefix('onnx::')}"
        if readers[0].op_type == "MatMul":
            self._nodes[result] = helper.make_node("Transpose", [name], [result], name=result, perm=[1, 0])
        else:
            shape = numpy_helper.from_array(np.array(self._values.shape(given), "int64"))
            extents = f"{result}.shape"
            self._nodes[extents] = helper.make_node("Constant", [], [extents], name=extents, value=shape)
            self._nodes[result] = helper.make_node("Reshape", [name, extents], [result], name=result)
        if name not in self._values:
            self._made[name] = parameter
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
        self._made |= {name: partial(np.asarray, value) for name, value in restored.values.items()}
        self._nodes |= {node.output[0]: node for node in restored.nodes}

    def _write(self) -> None:
        from onnx import numpy_helper

        graph = self._proto.graph
        nodes = [*self._nodes.values(), *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        read = names_read(graph)
        gone = {name for name in self._values if name not in read and _COMPUTED.fullmatch(name)}
        graph.initializer.extend(tensor for tensor in self._initializers if tensor.name not in gone)
        for name, value in self._made.items():
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value()), name))
        for entry in [entry for entry in graph.input if entry.name in gone]:  # as files of old versions have them
            graph.input.remove(entry)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return bool(one.dtype == other.dtype and np.array_equal(one, other))


__all__ = ["module_of", "with_module_names"]
