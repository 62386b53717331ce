# SPDX-License-Identifier: Apache-2.0
"""Which values the free extents of a program take: what may be assumed of them, and what then has to be checked.

A user states a range by `torch.export.Dim(name, min=4, max=20)`. Where a translation needs it, such as for x[:, :3] or
positions[: x.shape[1]], the model takes no extents for which that would be out of bounds; the rest of a range stays
without effect, so that a last batch may be smaller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tvm
from tvm import tirx

from relax_ops.compat import arithmetic
from tvm_convgrad.codegen.loops import dtype_of
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.core.extent_limits import MOST_EXTENT, Limits
from tvm_convgrad.training.ir.graph import Extent

if TYPE_CHECKING:  # an optional package
    import torch


@dataclass
class FreeExtents:
    """The free extents of a program.

    Attributes:
        stated: the limits by the name of the extent, where the program states some.
        limits: those that a translation has relied on, which have to be checked.
    """

    stated: Mapping[str, Limits]
    limits: dict[str, Limits] = field(default_factory=dict)

    def rely_on(self, used: Mapping[str, Limits]) -> None:
        """Note limits that have to be checked."""
        for name, (least, most) in used.items():
            low, high = self.limits.get(name, (1, MOST_EXTENT))
            if (least, most) != (1, MOST_EXTENT):
                self.limits[name] = (max(least, low), min(most, high))


_here: ContextVar[FreeExtents | None] = ContextVar("free_extents", default=None)


@contextmanager
def extents_of_program(program: torch.export.ExportedProgram) -> Iterator[FreeExtents]:
    """Inside, `is_at_most` knows the limits that a program states."""
    stated = {}
    for symbol, found in program.range_constraints.items():
        least = int(found.lower) if found.lower > 1 else 1
        most = int(found.upper) if found.upper < MOST_EXTENT else MOST_EXTENT  # infinity is a class of PyTorch's own
        if (least, most) != (1, MOST_EXTENT):
            stated[str(symbol)] = (least, most)
    extents = FreeExtents(stated)
    token = _here.set(extents)
    try:
        yield extents
    finally:
        _here.reset(token)


def refuse_formulas(program: torch.export.ExportedProgram, source: str) -> None:
    """Refuse inputs with an extent such as 2 * Dim("h"), of which PyTorch decomposes no program that it has loaded.

    Raises:
        ModelError: the input, the axis and the formula.
    """
    for node in program.graph.nodes:
        for axis, extent in enumerate(getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ()):
            formula = getattr(getattr(extent, "node", None), "expr", None)
            if formula is not None and not formula.is_Symbol and not formula.is_number:
                raise ModelError(
                    f"{source}: axis {axis} of input {node.name!r} has the extent {formula}, a formula of a Dim; "
                    "export the model with a Dim alone there, or with a fixed extent."
                )


def fixed_extents(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Free extents of inputs that PyTorch has found to be numbers, by the axis: by a loop in a decomposition."""
    fixed = {}
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for axis, extent in enumerate(getattr(value, "shape", ())):
            given = getattr(getattr(extent, "node", None), "_expr", None)  # `expr` has been replaced by the number
            if given is not None and not given.is_number and extent.node.expr.is_number:
                fixed[f"axis {axis} of input {node.name!r}"] = int(extent.node.expr)
    return fixed


def is_at_most(low: Extent, high: Extent) -> bool:
    """Whether one place is never behind another, whatever the free extents are, which are 1 at least."""
    difference = high - low
    if isinstance(difference, int):
        return difference >= 0
    variables = tirx.analysis.undefined_vars(difference)
    if _is_proven(difference, variables, {}):
        return True
    extents = _here.get()
    names = {str(variable.name) for variable in variables}
    stated = {} if extents is None else {name: limits for name, limits in extents.stated.items() if name in names}
    if extents is None or not stated or not _is_proven(difference, variables, stated):
        return False
    extents.rely_on({name: _widest(difference, variables, stated, name) for name in stated})
    return True


def _widest(difference: tirx.Expr, variables: list[tirx.Var], stated: Mapping[str, Limits], name: str) -> Limits:
    """The widest limits of one extent by which a difference is not negative, with those of the others."""

    def holds(least: int, most: int) -> bool:
        return _is_proven(difference, variables, {**stated, name: (least, most)})

    least, most = stated[name]
    if holds(1, MOST_EXTENT):
        return 1, MOST_EXTENT
    if holds(least, MOST_EXTENT):
        most = MOST_EXTENT
        least = 1 + bisect_left(range(1, least), True, key=lambda each: holds(each, MOST_EXTENT))
    elif holds(1, most):
        least = 1
    return least, most


def _is_proven(difference: tirx.Expr, variables: list[tirx.Var], limits: Mapping[str, Limits]) -> bool:
    """Whether a difference is not negative for extents in these limits."""
    analyzer = arithmetic.Analyzer()
    for variable in variables:
        least, most = limits.get(str(variable.name), (1, MOST_EXTENT))
        first, count = (tirx.const(number, dtype_of(variable)) for number in (least, most - least + 1))
        analyzer.bind(variable, tvm.ir.Range.from_min_extent(first, count))
    return bool(analyzer.can_prove(difference >= 0))


__all__ = ["FreeExtents", "extents_of_program", "fixed_extents", "is_at_most", "refuse_formulas"]
