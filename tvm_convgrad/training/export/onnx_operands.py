# SPDX-License-Identifier: Apache-2.0
"""What trained parameters make of each operand of an ONNX graph.

The importer gives a graph other initializers than its file has: merged parameters are apart, transposed ones as the
model has them, biases are restored. Here its nodes are compared with those of the file, operand by operand: what one
reads of parameters there is computed of the trained values, by the reference implementation of ONNX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends.onnx.prepared import Prepared
from tvm_convgrad.training.runtime.schema import Array

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx


@dataclass(frozen=True)
class Operand:
    """An operand of a node that parameters decide.

    Attributes:
        result, position: the node, by the name of its first result, and the operand's number; -1 of one that a branch
            or a loop inside of the node reads.
        given: the operand's name in the file; "" if the file has none there.
        name: its name in the graph that was trained.
        value: what the trained parameters make of it.
    """

    result: str
    position: int
    given: str
    name: str
    value: Array


class TrainedOperands:
    """The operands of a graph for given parameters.

    Attributes:
        read: the names of the parameters that operands have been computed of.
    """

    def __init__(self, stages: Prepared, trained: Mapping[str, Array], source: str) -> None:
        """Of the stages of a file, and trained values by the names of parameters; others stay as in the file."""
        self._stages, self._trained, self._source = stages, trained, source
        self._public = stages.parameters
        self._tensors = {tensor.name: tensor for tensor in stages.own.graph.initializer}
        self._made = {name: node for node in stages.own.graph.node for name in node.output if name}
        self._computed: dict[str, Array] = {}
        self.read: set[str] = set()

    @cached_property
    def file_nodes(self) -> dict[str, onnx.NodeProto]:
        """The nodes of the file, as the importer compares them, by the name of each result."""
        return {name: node for node in self._stages.written.graph.node for name in node.output if name}

    @cached_property
    def file_tensors(self) -> dict[str, onnx.TensorProto]:
        """The initializers of the file by name."""
        return {tensor.name: tensor for tensor in self._stages.written.graph.initializer}

    def __iter__(self) -> Iterator[Operand]:
        """Every operand of a node of the file that is an initializer, or follows otherwise from some than in the file.

        Raises:
            ModelError: one that follows from the inputs, too, and is computed of other parameters than in the file.
        """
        for node in self._stages.own.graph.node:
            result = next(filter(None, node.output))
            before = self.file_nodes.get(result)
            if before is None:
                continue  # one that the importer has added: the nodes that read it are compared
            for position, name in enumerate(node.input):
                given = before.input[position] if position < len(before.input) else ""
                if name in self._tensors or given != name:
                    yield Operand(result, position, given, name, self.value(name))
            for name in sorted(_read_inside(node) & self._tensors.keys() & self.file_tensors.keys()):
                yield Operand(result, -1, name, name, self.value(name))

    def value(self, name: str) -> Array:
        """The value of a tensor of the trained graph that follows from initializers alone."""
        if name in self._tensors:
            return self._initializer(name)
        if name not in self._computed:
            self._computed[name] = self._evaluated(name)
        return self._computed[name]

    def _initializer(self, name: str) -> Array:
        from onnx import numpy_helper

        public = self._public[name]
        if public in self._trained:
            self.read.add(public)
            return self._trained[public]
        return numpy_helper.to_array(self._tensors[name])

    def _evaluated(self, name: str) -> Array:
        from onnx import helper
        from onnx.reference import ReferenceEvaluator

        needed: dict[int, onnx.NodeProto] = {}
        open_names, tensors = [name], {}
        while open_names:
            each = open_names.pop()
            if each in self._tensors:
                tensors[each] = self._initializer(each)
            elif each and each not in self._made:
                raise ModelError(
                    f"{self._source}: {name!r} shares nodes of the file with other parameters that are trained apart, "
                    "so their values cannot be written back; export the model without optimization, and build the "
                    "step again."
                )
            elif each and id(self._made[each]) not in needed:
                needed[id(self._made[each])] = self._made[each]
                open_names += self._made[each].input
        nodes = [node for node in self._stages.own.graph.node if id(node) in needed]
        graph = helper.make_graph(
            nodes,
            "operand",
            [_typed(key, value) for key, value in tensors.items()],
            [helper.make_empty_tensor_value_info(name)],
        )
        opsets = self._stages.own.opset_import
        model = helper.make_model(graph, opset_imports=opsets, ir_version=self._stages.own.ir_version)
        (found,) = ReferenceEvaluator(model).run(None, tensors)
        return found


def _read_inside(node: onnx.NodeProto) -> set[str]:
    """The names that branches and loops inside of a node read."""
    graphs = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
    nodes = [inner for graph in graphs for inner in graph.node]
    return {name for inner in nodes for name in (*inner.input, *_read_inside(inner))}


def _typed(name: str, value: Array) -> onnx.ValueInfoProto:
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


__all__ = ["Operand", "TrainedOperands"]
