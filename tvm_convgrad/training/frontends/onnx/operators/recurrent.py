# SPDX-License-Identifier: Apache-2.0
"""ONNX's LSTM, GRU and RNN, unrolled over the sequence. TVM's importer lacks them.

The products of the inputs with their weights are one matmul for all steps. Where no initial state is given, the first
step has no recurrent term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents
from tvm_convgrad.training.frontends.onnx.node import Converter, Node

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_ACTIVATIONS: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "relu": op.nn.relu,
    "sigmoid": op.sigmoid,
    "tanh": op.tanh,
}
_DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = 4, 5, 6, 7

State = tuple["relax.Expr | None", "relax.Expr | None"]
"""Hidden and cell state; None is zeros."""


def recurrent(node: Node) -> relax.Expr:
    """The results (Y, Y_h) of GRU and RNN, and (Y, Y_h, Y_c) of LSTM."""
    batch_first = bool(node.integer("layout", 0))
    data = node.tensor()
    if batch_first:
        data = node.emit(op.permute_dims(data, [1, 0, 2]))
    length = known_extents(data)[0]
    if not isinstance(length, int):
        raise node.refusal(f"the length of its sequence is {length}; it is unrolled, so export it with a fixed length")
    _refuse(node, length)
    directions = _DIRECTIONS[node.text("direction", "forward")]
    outputs: list[list[relax.Expr]] = []
    last: list[State] = []
    for number, backwards in enumerate(directions):
        cell = _Cell.of(node, number, batch_first)
        state, steps = cell.start, cell.inputs(data, length)
        hidden: list[relax.Expr] = []
        for step in reversed(steps) if backwards else steps:
            state = cell.step(step, state)
            assert state[0] is not None
            hidden.append(state[0])
        outputs.append(hidden[::-1] if backwards else hidden)
        last.append(state)
    steps = [op.stack([each[time] for each in outputs], 0) for time in range(length)]
    results = [node.emit(op.stack([node.emit(step) for step in steps], 0))]  # length, directions, batch, hidden
    for place in range(2 if node.kind == "LSTM" else 1):
        results.append(node.emit(op.stack([state[place] for state in last], 0)))
    if batch_first:
        results = [node.emit(op.permute_dims(results[0], [2, 0, 1, 3]))] + [
            node.emit(op.permute_dims(result, [1, 0, 2])) for result in results[1:]
        ]
    return relax.Tuple(results)


def _refuse(node: Node, length: int) -> None:
    lengths = node.value(_LENGTHS)
    if node.given(_LENGTHS) and (lengths is None or np.any(lengths != length)):
        raise node.refusal(
            "its sequence_lens differ from the length of the sequence; pad all samples to one length, and mask the loss"
        )
    if node.integer("input_forget", 0):
        raise node.refusal("input_forget = 1 is not supported; export the model without it")


@dataclass(frozen=True)
class _Cell:
    """One direction of a layer: its weights transposed, as (rows, gates · hidden)."""

    node: Node
    weight: relax.Expr
    recurrence: relax.Expr
    bias: tuple[relax.Expr, relax.Expr] | None
    peepholes: Sequence[relax.Expr] | None
    start: State
    activations: tuple[str, ...]

    @classmethod
    def of(cls, node: Node, number: int, batch_first: bool) -> _Cell:
        """The direction `number` of a node."""

        def part(position: int, axis: int = 0) -> relax.Expr | None:
            if not node.given(position):
                return None
            whole = node.tensor(position)
            if known_extents(whole)[axis] != 1:
                whole = node.emit(op.strided_slice(whole, [axis], [number], [number + 1], assume_inbound=True))
            return node.emit(op.squeeze(whole, [axis]))

        def transposed(position: int) -> relax.Expr:
            matrix = part(position)
            if matrix is None:
                raise node.refusal(f"operand {position}, its weight, is missing")
            return node.emit(op.permute_dims(matrix, [1, 0]))

        both, peepholes = part(3), part(_PEEPHOLES)
        halves = None if both is None else op.split(both, 2, 0)
        state_axis = 1 if batch_first else 0
        names = node.attributes.get("activations", ())
        assert isinstance(names, tuple)
        given = [name.decode().lower() if isinstance(name, bytes) else str(name).lower() for name in names]
        default = _DEFAULTS[node.kind]
        own = tuple(given[number * len(default) :][: len(default)]) or default
        unknown = sorted(set(own) - set(_ACTIVATIONS))
        if unknown:
            raise node.refusal(f"its activation {unknown[0]!r} is not supported; use one of {', '.join(_ACTIVATIONS)}")
        return cls(
            node,
            transposed(1),
            transposed(2),
            None if halves is None else _fields(node, halves, 2),
            None if peepholes is None else _fields(node, op.split(peepholes, 3, 0), 3),
            (part(_HIDDEN, state_axis), part(_CELL, state_axis) if node.kind == "LSTM" else None),
            own,
        )

    def inputs(self, data: relax.Expr, length: int) -> list[relax.Expr]:
        """The part of the gates that the inputs give, by step: (batch, gates · hidden)."""
        products = self.node.emit(op.matmul(data, self.weight))
        if self.bias is not None:
            bias = self.bias[0]
            if self.node.kind != "GRU":
                bias = self.node.emit(op.add(bias, self.bias[1]))
            products = self.node.emit(op.add(products, bias))
        if length == 1:
            return [self.node.emit(op.squeeze(products, [0]))]
        steps = _fields(self.node, op.split(products, length, 0), length)
        return [self.node.emit(op.squeeze(step, [0])) for step in steps]

    def step(self, given: relax.Expr, state: State) -> State:
        """The state behind one step."""
        make = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.node.kind]
        return make(given, *state)

    def _lstm(self, given: relax.Expr, hidden: relax.Expr | None, cell: relax.Expr | None) -> State:
        emit = self.node.emit
        gates = given if hidden is None else emit(op.add(given, emit(op.matmul(hidden, self.recurrence))))
        entry, output, forget, change = self._gates(gates)
        if self.peepholes is not None and cell is not None:
            entry = emit(op.add(entry, emit(op.multiply(self.peepholes[0], cell))))
            forget = emit(op.add(forget, emit(op.multiply(self.peepholes[2], cell))))
        fresh = emit(op.multiply(self._active(0, entry), self._active(1, change)))
        if cell is not None:
            fresh = emit(op.add(fresh, emit(op.multiply(self._active(0, forget), cell))))
        if self.peepholes is not None:
            output = emit(op.add(output, emit(op.multiply(self.peepholes[1], fresh))))
        return emit(op.multiply(self._active(0, output), self._active(2, fresh, clipped=False))), fresh

    def _gru(self, given: relax.Expr, hidden: relax.Expr | None, _cell: relax.Expr | None) -> State:
        emit, after = self.node.emit, bool(self.node.integer("linear_before_reset", 0))
        update, reset, change = self._gates(given)
        biases = [None] * 3 if self.bias is None else self._gates(self.bias[1])
        products: Sequence[relax.Expr | None] = [None] * 3
        weights = None
        if hidden is not None:
            weights = self._gates(self.recurrence)
            products = [emit(op.matmul(hidden, weights[0])), emit(op.matmul(hidden, weights[1])), None]
        update = self._active(0, self._sum(update, products[0], biases[0]))
        reset = self._active(0, self._sum(reset, products[1], biases[1]))
        inner: relax.Expr | None = None
        if weights is not None and hidden is not None:
            inner = emit(op.matmul(hidden if after else emit(op.multiply(reset, hidden)), weights[2]))
        if after:
            inner = biases[2] if inner is None else self._sum(inner, biases[2])
            inner = None if inner is None else emit(op.multiply(reset, inner))
            change = self._sum(change, inner)
        else:
            change = self._sum(change, inner, biases[2])
        change = self._active(1, change)
        one = relax.const(1, str(update.ty.dtype))
        fresh = emit(op.multiply(emit(op.subtract(one, update)), change))
        return (fresh if hidden is None else emit(op.add(fresh, emit(op.multiply(update, hidden))))), None

    def _rnn(self, given: relax.Expr, hidden: relax.Expr | None, _cell: relax.Expr | None) -> State:
        emit = self.node.emit
        total = given if hidden is None else emit(op.add(given, emit(op.matmul(hidden, self.recurrence))))
        return self._active(0, total), None

    def _sum(self, first: relax.Expr, *others: relax.Expr | None) -> relax.Expr:
        for other in others:
            first = first if other is None else self.node.emit(op.add(first, other))
        return first

    def _gates(self, tensor: relax.Expr) -> Sequence[relax.Expr]:
        count = _GATES[self.node.kind]
        return _fields(self.node, op.split(tensor, count, tensor.ty.ndim - 1), count)

    def _active(self, place: int, tensor: relax.Expr, clipped: bool = True) -> relax.Expr:
        """An activation of a tensor, which the attribute `clip` bounds."""
        bound = self.node.number("clip", 0.0)
        if bound and clipped:
            tensor = self.node.emit(op.clip(tensor, -bound, bound))
        return self.node.emit(_ACTIVATIONS[self.activations[place]](tensor))


def _fields(node: Node, parts: relax.Expr, count: int) -> tuple[relax.Expr, ...]:
    """The tensors of a split."""
    whole = node.emit(parts)
    return tuple(node.emit(relax.TupleGetItem(whole, place)) for place in range(count))


CONVERTERS: dict[str, Converter] = {"GRU": recurrent, "LSTM": recurrent, "RNN": recurrent}
"""By operator of ONNX."""
