# SPDX-License-Identifier: Apache-2.0
"""The catalogue of the operator family: its three directions, their gradients, and the operators by name and rank.

A convolution is bilinear, so it has three directions, each the gradient of the other two. All rules of the operators
follow from this and are written once, for all ranks and for both IRs (relax_ops, relay_ops): the type relation in
`core.type_relation`, vmap in `core.batch_rules`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_convgrad.core.geometry import SPATIAL


@dataclass(frozen=True)
class Direction:
    """One direction of the convolution.

    Attributes:
        name: "forward", "backward_weight" or "backward_data".
        short: the usual short name: "forward", "wgrad" or "dgrad".
        operands: the names of its two operands, in order.
        result: the name of its result. Operands and result are data, weight and grad in some order.
        gradients: for each operand, the direction that computes its gradient and that direction's two operands, where
            `result` stands for the gradient with respect to the result.
    """

    name: str
    short: str
    operands: tuple[str, str]
    result: str
    gradients: tuple[tuple[str, tuple[str, str]], tuple[str, tuple[str, str]]]


CLOSURE = {
    "grad = forward(data, weight)": ("data = backward_data(result, weight)", "weight = backward_weight(result, data)"),
    "weight = backward_weight(grad, data)": ("grad = forward(data, result)", "data = backward_data(grad, result)"),
    "data = backward_data(grad, weight)": ("grad = forward(result, weight)", "weight = backward_weight(grad, result)"),
}
"""Each direction, and the gradients of its operands in order, where `result` stands for the gradient that comes in."""


_SHORT = {"forward": "forward", "backward_weight": "wgrad", "backward_data": "dgrad"}


def _equation(text: str) -> tuple[str, str, tuple[str, str]]:
    """ "weight = backward_weight(grad, data)" as ("weight", "backward_weight", ("grad", "data"))."""
    result, _, call = text.partition(" = ")
    name, _, operands = call.rstrip(")").partition("(")
    first, second = operands.split(", ")
    return result, name, (first, second)


def _direction(text: str) -> Direction:
    result, name, operands = _equation(text)
    first, second = (_equation(gradient) for gradient in CLOSURE[text])
    assert (first[0], second[0]) == operands  # each gradient is that of its operand
    return Direction(name, _SHORT[name], operands, result, (first[1:], second[1:]))


FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA = map(_direction, CLOSURE)
DIRECTIONS = {direction.name: direction for direction in (FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA)}
"""The directions by name."""

WORDS = {direction.name: direction.short for direction in DIRECTIONS.values()}
"""The field's word for each direction, as commands take and print it."""

BY_SHORT = {direction.short: direction for direction in DIRECTIONS.values()}
"""The directions by the field's name."""


@dataclass(frozen=True)
class OpEntry:
    """One operator: a direction and a rank."""

    direction: Direction
    rank: int

    @property
    def name(self) -> str:
        """Such as `conv2d_backward_weight`; the forward one is the stock `conv2d`."""
        return f"conv{self.rank}d" + ("" if self.direction is FORWARD else f"_{self.direction.name}")

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attribute names in order. Extents of the result (kernel_size, data_shape) come first, as the operands do not
        determine them."""
        own = {"backward_weight": ("kernel_size",)}.get(self.direction.name, ())
        layouts = ("grad_layout", "data_layout", "kernel_layout")
        return (*own, "strides", "padding", "dilation", "groups", *layouts, "out_dtype")


NEW_OPS = tuple(OpEntry(direction, rank) for rank in SPATIAL for direction in (BACKWARD_WEIGHT, BACKWARD_DATA))
"""The six operators that TVM lacks."""

BY_NAME = {entry.name: entry for entry in (*NEW_OPS, *(OpEntry(FORWARD, rank) for rank in SPATIAL))}
"""Operators by name, the three forward ones included."""
