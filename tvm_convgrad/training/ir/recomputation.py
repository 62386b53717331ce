# SPDX-License-Identifier: Apache-2.0
"""How much of what a function computes may be computed again instead of being kept, as an attribute of the function."""

from __future__ import annotations

from typing import NamedTuple

import tvm
from tvm import relax

_ATTRIBUTE = "convgrad.recompute"
RECOMPUTING = ("step", "gradients")
"""The functions of a step that may compute values again."""
NONE, AUTO, CHEAP, ALL = "none", "auto", "cheap", "all"


class Recomputation(NamedTuple):
    """What a function may compute again.

    Attributes:
        values: NONE; CHEAP: all but results of convolutions and matrix products; ALL; AUTO: those of CHEAP that cost
            hardly any time.
        budget: as little as it takes for all tensors that the function makes to have at most that many bytes at one
            time; None: as much as it takes for the least memory.
    """

    values: str = NONE
    budget: int | None = None

    @property
    def is_required(self) -> bool:
        """Whether a target on which nothing can be computed again must refuse it."""
        return self.values not in (NONE, AUTO)

    @classmethod
    def of(cls, given: str | int) -> Recomputation:
        """That of `StepOptions.recompute`: one of the values, or a budget for ALL."""
        return cls(ALL, given) if isinstance(given, int) else cls(given)


def recomputation_of(function: relax.Function) -> Recomputation:
    """What a function says."""
    found = str((function.attrs or {}).get(_ATTRIBUTE, NONE))
    values, _, budget = found.partition(" ")
    return Recomputation(values, int(budget) if budget else None)


def with_recomputation(module: tvm.IRModule, wanted: Recomputation) -> tvm.IRModule:
    """The module whose functions of a step say so; the given one is not changed."""
    text = wanted.values if wanted.budget is None else f"{wanted.values} {wanted.budget}"
    functions = {
        variable: function.with_attr(_ATTRIBUTE, text) if str(variable.name_hint) in RECOMPUTING else function
        for variable, function in module.functions_items()
    }
    return tvm.IRModule(functions, attrs=module.attrs)


__all__ = ["ALL", "AUTO", "CHEAP", "NONE", "RECOMPUTING", "Recomputation", "recomputation_of", "with_recomputation"]
