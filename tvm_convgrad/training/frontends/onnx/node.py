# SPDX-License-Identifier: Apache-2.0
"""A node of an ONNX graph as converters get it, and its queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tvm import relax
from tvm.relax import op

from relax_ops.compat import Constant, array_of
from relax_ops.expressions import known_extents
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.ir.graph import Extent

Attribute: TypeAlias = "int | float | bytes | tuple[int, ...] | tuple[float, ...]"


@dataclass(frozen=True)
class Node:
    """A node whose operands are Relax expressions, None where an optional one is not given.

    Attributes:
        kind: the operator, such as "Resize".
        place: name of the node and line of the user's module, for messages.
        builder: what its Relax calls are emitted into.
        operands: tensors, and what TVM's importer makes of shapes.
        attributes: those that the file states.
        opset: version of the operator set.
        results: how many results the node has.
    """

    kind: str
    place: str
    builder: relax.BlockBuilder
    operands: tuple[relax.Expr | None, ...]
    attributes: Mapping[str, Attribute]
    opset: int
    results: int = 1

    def given(self, position: int) -> bool:
        """Whether the node has this operand."""
        return len(self.operands) > position and self.operands[position] is not None

    def tensor(self, position: int = 0) -> relax.Expr:
        """An operand that the standard demands."""
        operand = self.operands[position] if self.given(position) else None
        if operand is None or not isinstance(operand.ty, relax.TensorType):
            raise self.refusal(f"operand {position} is not a tensor")
        return operand

    def value(self, position: int) -> npt.NDArray[np.generic] | None:
        """The value of a constant operand; None if there is no such operand or it is not a constant."""
        operand = self.operands[position] if self.given(position) else None
        return array_of(operand) if isinstance(operand, Constant) else None

    def places(self, position: int) -> npt.NDArray[np.int64] | None:
        """The value of a constant operand that holds indices; None if there is none, or it is not a constant."""
        value = self.value(position)
        return None if value is None else value.astype("int64")

    def is_constant(self, *positions: int) -> bool:
        """Whether each of these operands is a constant or not given."""
        return all(not self.given(position) or self.value(position) is not None for position in positions)

    def is_float(self, position: int = 0) -> bool:
        """Whether an operand has floating elements."""
        return str(self.tensor(position).ty.dtype).startswith(("float", "bfloat"))

    def text(self, name: str, default: str) -> str:
        """An attribute that is a string."""
        value = self.attributes.get(name)
        return value.decode() if isinstance(value, bytes) else default

    def number(self, name: str, default: float) -> float:
        """An attribute that is a number."""
        value = self.attributes.get(name, default)
        assert isinstance(value, int | float)
        return float(value)

    def integer(self, name: str, default: int) -> int:
        """An attribute that is an integer."""
        return int(self.number(name, default))

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """An attribute that is a list of integers."""
        value = self.attributes.get(name, default)
        assert isinstance(value, tuple)
        return tuple(int(each) for each in value)

    def emit(self, expr: relax.Expr) -> relax.Var:
        """A variable bound to an expression."""
        return self.builder.emit(expr)

    def extents(self, position: int = 0) -> tuple[Extent, ...]:
        """The extents of an operand, ints where they are known."""
        return known_extents(self.tensor(position))

    def scalar(self, value: float, position: int = 0) -> relax.Expr:
        """A constant of the element type of an operand."""
        return relax.const(value, str(self.tensor(position).ty.dtype))

    def reshaped(self, data: relax.Expr, extents: list[Extent]) -> relax.Var:
        """A tensor with other extents."""
        return self.emit(op.reshape(data, relax.ShapeExpr(extents)))

    def refusal(self, reason: str) -> UnsupportedError:
        """The error of an operator that is not supported."""
        return UnsupportedError(f"{self.kind} ({self.place}): {reason}" if self.place else f"{self.kind}: {reason}")


Converter: TypeAlias = Callable[[Node], "relax.Expr | None"]
"""converter(node) -> its results (a relax.Tuple of several), or None for what is left to TVM's own converter."""
