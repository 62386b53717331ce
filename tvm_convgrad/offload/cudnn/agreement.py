# SPDX-License-Identifier: Apache-2.0
"""Whether engines agree: how far their results may differ, and which of them are with the majority."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.exact import Array
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.settings import Settings

T = TypeVar("T")

_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TF32 = 2.0**-11
_GROWTH = {"float64": 512, "float32": 512, "float16": 64, "bfloat16": 64}
"""How much more a transform rounds than a product does: what Winograd's of large tiles was seen to do, and some."""


@dataclass(frozen=True)
class Bound:
    """How far two right results may differ: by `absolute`, and by `relative` times the larger of the two."""

    absolute: float
    relative: float

    def differing(self, found: Array, wanted: Array) -> Array:
        """Where they differ by more, or are not numbers."""
        a, b = (each.astype(np.promote_types(np.float32, each.dtype), copy=False) for each in (found, wanted))
        with np.errstate(invalid="ignore"):
            return ~(np.abs(a - b) <= self.absolute + self.relative * np.maximum(np.abs(a), np.abs(b)))


def bound(call: Call, limit: int, settings: Settings) -> Bound:
    """For operands of integers up to `limit`, as `Call.numbers` gives them.

    Every partial sum of their products is an integer that the type of the sums holds: by its length, or, of more terms
    than EXACT_TERMS, of ones with either sign, almost surely (Hoeffding: to come to 2^24, 2^31 terms have a chance of
    exp(-2^16)). So the order of summation changes nothing, and results of float32 and float64 are equal. A narrower
    result may be rounded twice, the second time with a summand. What settings allow besides adds to this: tf32 rounds
    sums to 10 bits, at most `terms * limit^2`; transforms round each product more, and errors add up by their root.
    """
    dtype = call.result.dtype
    unit, largest = _ROUNDING[dtype], call.terms * limit**2
    absolute = 0.0
    if settings.tf32 and dtype == "float32":
        absolute += 2 * _TF32 * largest
    if settings.transforms:
        absolute += _GROWTH[dtype] * unit * math.sqrt(call.terms) * limit**2
    if numpy_dtype(dtype).itemsize > 2:
        return Bound(absolute, 0.0)
    return Bound(absolute + 8 * unit * limit, 4 * unit)


@dataclass
class _Group(Generic[T]):
    result: Array
    engines: list[T] = field(default_factory=list)


class Agreement(Generic[T]):
    """Engines grouped by their results: one that differs from a group's first by more than the bound begins another."""

    def __init__(self, allowed: Bound) -> None:
        self._allowed = allowed
        self._groups: list[_Group[T]] = []

    def add(self, who: T, result: Array) -> None:
        """Count a result."""
        for group in self._groups:
            if not self._allowed.differing(result, group.result).any():
                group.engines.append(who)
                return
        self._groups.append(_Group(result, [who]))

    def majority(self) -> list[T]:
        """The engines of the largest group, in order; none if another is as large."""
        sizes = sorted((len(group.engines) for group in self._groups), reverse=True)
        if not sizes or (len(sizes) > 1 and sizes[0] == sizes[1]):
            return []
        return self._largest().engines

    def others(self) -> list[tuple[T, str]]:
        """Those who are not with the majority, and how they differ from the first of the largest group."""
        if not self._groups:
            return []
        reference = self._largest()
        told = []
        if not self.majority():
            told = [(who, "as many engines differ from it as agree with it") for who in reference.engines]
        for group in self._groups:
            if group is reference:
                continue
            wrong = self._allowed.differing(group.result, reference.result)
            where = tuple(int(index) for index in np.argwhere(wrong)[0])
            detail = (
                f"{int(wrong.sum())} of {wrong.size} elements differ from {reference.engines[0]}, the first at "
                f"{list(where)}: {group.result[where]} instead of {reference.result[where]} "
                f"({_votes(group)} against {_votes(reference)})"
            )
            told += [(who, detail) for who in group.engines]
        return told

    def _largest(self) -> _Group[T]:
        return max(self._groups, key=lambda group: len(group.engines))


def _votes(group: _Group[Any]) -> str:
    count = len(group.engines)
    return f"{count} engine" + "s" * (count != 1)


__all__ = ["Agreement", "Bound", "bound"]
