# SPDX-License-Identifier: Apache-2.0
"""References of Relay while a program is converted: cells that hold values, which the Relax program has none of.

A program is converted in the order in which Relay runs it, so a reference is a cell of the converter, and to read it is
to name the value that was written last. Only behind an `if` does that depend on data: what its branches write becomes
further results of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import program as ir


@dataclass(eq=False)
class Reference:
    """A cell.

    Attributes:
        value: a tensor, a list of values, a function or another reference, as the converter has them.
        depth: how many branches of `if` it was made in.
    """

    value: Any
    depth: int


class Memory:
    """The references that open branches have written to, with what they held before."""

    def __init__(self) -> None:
        self._branches: list[dict[Reference, Any]] = []

    def new(self, value: Any) -> Reference:
        """A reference that holds `value`."""
        return Reference(value, len(self._branches))

    def write(self, reference: Reference, value: Any) -> None:
        """Give a reference another value, until the innermost open branch is closed."""
        if self._branches:
            self._branches[-1].setdefault(reference, reference.value)
        reference.value = value

    def open_branch(self) -> None:
        """From here on values are those of one branch of an `if`."""
        self._branches.append({})

    def close_branch(self) -> dict[Reference, Any]:
        """Undo what the branch wrote.

        Returns:
            What the references that were there before hold at the end of the branch, if it wrote to them.
        """
        before = {ref: value for ref, value in self._branches.pop().items() if ref.depth <= len(self._branches)}
        after = {ref: ref.value for ref in before}
        for ref, value in before.items():
            ref.value = value
        return after


def refuse_shared(program: ir.Program) -> None:
    """Refuse references in a graph that two functions or branches share.

    Relay evaluates a shared expression once, in a place that the graph does not state. The place makes no difference to
    other expressions.

    Raises:
        ModelError: there is one; the remedy is A-normal form, which states every place.
    """
    if not any(isinstance(expr, ir.REFERENCES) for expr in ir.walk(program)):
        return
    places: dict[int, _Place] = {}
    stack: list[tuple[ir.Expr, _Place]] = [(function, _SEVERAL) for function in program.functions.values()]
    while stack:
        expr, place = stack.pop()
        seen = places.get(id(expr))
        if seen in (place, _SEVERAL):
            continue
        if seen is not None:
            place = _SEVERAL
            if isinstance(expr, ir.REFERENCES):
                raise ModelError(
                    f"{program.source}: a {type(expr).__name__} belongs to two functions or branches, and the graph "
                    "does not say which of them runs it; save the program after relay.transform.ToANormalForm()."
                )
        places[id(expr)] = place
        stack.extend(_inside(expr, place))


_Place = tuple[int, int]
"""A function or a branch: the expression that it belongs to, and which part of it."""
_SEVERAL: _Place = (0, 0)


def _inside(expr: ir.Expr, place: _Place) -> list[tuple[ir.Expr, _Place]]:
    """The expressions directly inside one, each with the function or branch that runs it."""
    if isinstance(expr, ir.Function):
        return [(expr.body, (id(expr), 1))]
    if isinstance(expr, ir.If):
        return [(expr.condition, place), (expr.then, (id(expr), 1)), (expr.other, (id(expr), 2))]
    return [(child, place) for child in ir.children(expr)]
