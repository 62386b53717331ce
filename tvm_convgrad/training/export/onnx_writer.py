# SPDX-License-Identifier: Apache-2.0
"""Trained parameters and running statistics in the ONNX model that a step was built of.

Initializers keep their names, and graph, opset and metadata stay, with these exceptions: where an exporter has made one
initializer of equal parameters which training has made unequal, each reader of another one gets an initializer of its
own, under the parameter's name; so does a layer whose bias it had removed; and the graph is one for inference, whatever
mode it was exported in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.export.onnx_inference import set_inference
from tvm_convgrad.training.export.onnx_operands import Operand, TrainedOperands
from tvm_convgrad.training.frontends.onnx.prepared import prepared
from tvm_convgrad.training.runtime.schema import Array

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_SHOWN = 3
_FREE_INITIALIZERS = 4
"""The version of ONNX's IR since which initializers need not be inputs of the graph, too."""


@dataclass
class Written:
    """A model with trained parameters.

    Attributes:
        proto: the model.
        changed: initializers of the file with a new value.
        added: initializers that the file does not have.
        notes: sentences about what else differs from the file.
    """

    proto: onnx.ModelProto
    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def with_trained(proto: onnx.ModelProto, trained: Mapping[str, Array], source: str) -> Written:
    """The model of a file with trained values.

    Args:
        proto: the model of the file, with its external data.
        trained: the values of parameters, frozen ones and running statistics, by the names that they have in the step.
        source: the file, for messages.

    Raises:
        ModelError: a parameter has no place in the file (all such are named), or another shape there; or parameters
            that the file merges inside a function have become unequal.
    """
    stages = prepared(proto, source)
    operands = TrainedOperands(stages, trained, source)
    found = list(operands)
    missing = sorted(set(trained) - operands.read)
    if missing:
        raise ModelError(
            f"{source} has no initializer for {_listed(missing)} of the step, such as statistics that are Constant "
            "nodes or that the graph computes; export the model with its parameters as initializers, and build the "
            "step again."
        )
    copy = type(proto)()
    copy.CopyFrom(stages.writable)
    written = Written(copy)
    _Writer(written, operands, source).write(found)
    if stages.writable is not proto:
        written.notes.append("random masks of the file are Dropout nodes, which do nothing in inference")
    modes = set_inference(copy, source)
    if modes:
        written.notes.append(f"batch norms and dropouts in training mode are in inference mode: {modes}")
    return written


class _Writer:
    """Writes operands into a copy of a file's model."""

    def __init__(self, written: Written, operands: TrainedOperands, source: str) -> None:
        self._written, self._operands, self._source = written, operands, source
        self._graph = written.proto.graph
        self._tensors = {tensor.name: tensor for tensor in self._graph.initializer}
        self._nodes = {name: node for node in self._graph.node for name in node.output if name}
        self._unlike = {name for name, node in self._nodes.items() if not self._is_of_file(name, node)}
        self._names = {*self._tensors, *self._nodes, *(name for node in self._graph.node for name in node.input)}
        self._own: dict[str, str] = {}

    def _is_of_file(self, result: str, node: onnx.NodeProto) -> bool:
        """Whether a node is the one that was compared: a function of the file is written out before that."""
        before = self._operands.file_nodes.get(result)
        return before is not None and (node.op_type, list(node.input)) == (before.op_type, list(before.input))

    def write(self, found: Iterable[Operand]) -> None:
        """Write all operands, those of one initializer of the file together."""
        by_given: dict[str, list[Operand]] = {}
        for operand in found:
            by_given.setdefault(operand.given, []).append(operand)
        absent = by_given.pop("", [])
        for given, operands in by_given.items():
            if given in self._operands.file_tensors:
                self._write_initializer(given, operands)
            else:
                self._write_computed(given, operands)
        for operand in absent:
            if operand.value.any():  # a removed bias that is still zero stays away
                self._write_operand(operand)

    def _write_initializer(self, given: str, operands: list[Operand]) -> None:
        """The new value of an initializer, that of the reader whose name it has if there are several values."""
        before = _values_of(self._operands.file_tensors[given])
        if all(_equal(operand.value, before) for operand in operands):
            return
        kept = next((operand for operand in operands if operand.name == given), operands[0])
        self._replace(given, before, kept.value)
        for operand in operands:
            if not _equal(operand.value, kept.value):
                self._write_operand(operand)

    def _write_computed(self, given: str, operands: list[Operand]) -> None:
        """What a node of the file gives to its readers: an Identity that merges parameters, or a share of one."""
        node = self._operands.file_nodes[given]
        merged = node.op_type == "Identity" and node.input[0] in self._operands.file_tensors
        now = self._operands.value(node.input[0] if merged else given)
        apart = [operand for operand in operands if not _equal(operand.value, now)]
        if not apart:
            return
        if merged and given in self._nodes:
            self._graph.node.remove(self._nodes.pop(given))
            self._add(given, apart[0].value)
            return
        for operand in apart:
            self._write_operand(operand)

    def _replace(self, name: str, before: Array, value: Array) -> None:
        from onnx import numpy_helper

        if (before.shape, before.dtype) != (value.shape, value.dtype) or name not in self._tensors:
            raise ModelError(
                f"{self._source}: {name!r} is {value.dtype}{list(value.shape)} in the step, but "
                f"{before.dtype}{list(before.shape)} in the file; build the step again."
            )
        if not _equal(before, value):
            doc = self._tensors[name].doc_string
            self._tensors[name].CopyFrom(numpy_helper.from_array(value, name))
            self._tensors[name].doc_string = doc
            self._written.changed.append(name)

    def _add(self, name: str, value: Array) -> None:
        from onnx import helper, numpy_helper

        self._tensors[name] = self._graph.initializer.add()
        self._tensors[name].CopyFrom(numpy_helper.from_array(value, name))
        if self._written.proto.ir_version < _FREE_INITIALIZERS:
            kind = self._tensors[name].data_type
            self._graph.input.append(helper.make_tensor_value_info(name, kind, value.shape))
        self._written.added.append(name)

    def _write_operand(self, operand: Operand) -> None:
        """Give one reader an initializer of its own."""
        node = self._nodes.get(operand.result)
        if node is None or operand.result in self._unlike:
            raise ModelError(
                f"{self._source}: {operand.name!r} shares the initializer {operand.given!r} with other parameters "
                "inside of a function, and training has made them unequal; export the model without functions, and "
                "build the step again."
            )
        if operand.name not in self._own:
            name, number = operand.name, 2
            while name in self._names:
                name, number = f"{operand.name}.{number}", number + 1
            self._names.add(name)
            self._own[operand.name] = name
            self._add(name, operand.value)
        node.input.extend([""] * (operand.position + 1 - len(node.input)))
        node.input[operand.position] = self._own[operand.name]


def _values_of(tensor: onnx.TensorProto) -> Array:
    """The values of an initializer."""
    from onnx import numpy_helper

    found: Array = numpy_helper.to_array(tensor)
    return found


def _equal(left: Array, right: Array) -> bool:
    """Whether two arrays have the same bits."""
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


__all__ = ["Written", "with_trained"]
