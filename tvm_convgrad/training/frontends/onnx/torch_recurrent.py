# SPDX-License-Identifier: Apache-2.0
"""Weights of recurrent layers in graphs of torch.onnx.export (dynamo=True), as the model's own parameters.

The exporter computes the operands of LSTM, GRU and RNN in advance: for each layer the weights of both directions, with
the gates in ONNX's order. The note of each node has the call of PyTorch, which lists all parameters of all layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

Tensor: TypeAlias = npt.NDArray[np.generic]

_PARAMETER = re.compile(r"(weight|bias)_(ih|hh)_l\d+(_reverse)?$")
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""By operator: PyTorch's number of each gate of ONNX."""
RECURRENT = tuple(_GATES)
STATES = (5, 6)
"""Positions of the initial states among a node's operands."""
_INPUT, _RECURRENCE, _BIAS = 1, 2, 3


@dataclass
class Restored:
    """The parameters of the model by name, and the nodes that make the operands of them."""

    values: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)


def are_weights(stored: Sequence[str]) -> bool:
    """Whether these arguments of a call are weights and biases of recurrent layers, and none is a state."""
    return bool(stored) and all(_PARAMETER.search(name) for name in stored)


def restore(
    nodes: Sequence[onnx.NodeProto],
    stored: Sequence[str],
    values: Mapping[str, Tensor],
    name_of: Callable[[str], str],
) -> Restored:
    """Give the nodes of one call, a layer each in order, operands that are made of the model's parameters.

    Nothing is changed where the notes do not fit the graph.

    Args:
        nodes: LSTM, GRU or RNN nodes.
        stored: the parameters that the call lists: weights and biases of each direction of each layer.
        values: initializers by name.
        name_of: the model's name of a parameter.
    """
    restored = Restored()
    layers = [_Layer.of(node) for node in nodes]
    weights = [name for name in stored if _PARAMETER.search(name)]
    if sum(layer.parameters for layer in layers) != len(weights):
        return restored
    for layer in layers:
        own, weights = weights[: layer.parameters], weights[layer.parameters :]
        layer.write([name_of(name) for name in own], values, restored)
    return restored


@dataclass(frozen=True)
class _Layer:
    """One node, whose operands have a direction each along axis 0."""

    node: onnx.NodeProto
    directions: int
    has_bias: bool

    @classmethod
    def of(cls, node: onnx.NodeProto) -> _Layer:
        """From the attributes and operands of a node."""
        texts = {attribute.name: attribute.s for attribute in node.attribute}
        both = texts.get("direction") == b"bidirectional"
        return cls(node, 2 if both else 1, len(node.input) > _BIAS and bool(node.input[_BIAS]))

    @property
    def parameters(self) -> int:
        """Parameters in PyTorch: a bias is two."""
        return self.directions * (4 if self.has_bias else 2)

    def write(self, names: Sequence[str], values: Mapping[str, Tensor], restored: Restored) -> None:
        """Add the parameters whose operands are initializers, and let the node read what is made of them.

        Large ones may be left as nodes that the exporter has written.
        """
        each = len(names) // self.directions
        for position in (_INPUT, _RECURRENCE, _BIAS)[: 3 if self.has_bias else 2]:
            operand = values.get(self.node.input[position])
            if operand is None:
                continue
            made = []
            for direction, part in enumerate(operand):
                own = names[direction * each :][:each]
                chosen = own[2:] if position == _BIAS else [own[position - _INPUT]]
                pieces = np.split(part, len(chosen))
                rows = [self._gathered(name, piece, restored) for name, piece in zip(chosen, pieces, strict=True)]
                made.append(self._joined(rows, 1, f"{chosen[0]}.gates", restored))
            result = f"{next(filter(None, self.node.output))}.operand{position}"
            self.node.input[position] = self._joined(made, 0, result, restored)

    def _gathered(self, name: str, piece: Tensor, restored: Restored) -> str:
        """A parameter with gates in ONNX's order, behind an axis of one direction."""
        from onnx import helper, numpy_helper

        gates = _GATES[self.node.op_type]
        blocks = np.split(np.arange(len(piece)), len(gates))
        order = np.concatenate([blocks[gate] for gate in gates])
        value = np.empty_like(piece)
        value[order] = piece
        restored.values[name] = value
        table, result = f"{name}.rows", f"{name}.gathered"
        rows = numpy_helper.from_array(order[None].astype("int64"), table)
        restored.nodes.append(helper.make_node("Constant", [], [table], table, value=rows))
        restored.nodes.append(helper.make_node("Gather", [name, table], [result], result, axis=0))
        return result

    @staticmethod
    def _joined(parts: Sequence[str], axis: int, result: str, restored: Restored) -> str:
        from onnx import helper

        if len(parts) == 1:
            return parts[0]
        restored.nodes.append(helper.make_node("Concat", list(parts), [result], result, axis=axis))
        return result
