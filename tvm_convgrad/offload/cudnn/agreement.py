# SPDX-License-Identifier: Apache-2.0
"""Whether engines agree: how far their results may differ, and which of them are with the majority."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from tvm_convgrad.dtypes import numpy_dtype
from tvm_convgrad.offload.cudnn.bench import Call
from tvm_convgrad.offload.cudnn.settings import Settings

Array = np.ndarray[Any, Any]
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
        """Where they differ by more, or are no numbers."""
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
class _Party(Generic[T]):
    result: Array
    members: list[T] = field(default_factory=list)


class Parties(Generic[T]):
    """Results by agreement: who differs from a party's first by more than the bound founds another."""

    def __init__(self, allowed: Bound) -> None:
        self._allowed = allowed
        self._parties: list[_Party[T]] = []

    def add(self, who: T, result: Array) -> None:
        """Count a result."""
        for party in self._parties:
            if not self._allowed.differing(result, party.result).any():
                party.members.append(who)
                return
        self._parties.append(_Party(result, [who]))

    def majority(self) -> list[T]:
        """The members of the largest party, in order; none if another is as large."""
        sizes = sorted((len(party.members) for party in self._parties), reverse=True)
        if not sizes or (len(sizes) > 1 and sizes[0] == sizes[1]):
            return []
        return self._largest().members

    def others(self) -> list[tuple[T, str]]:
        """Those who are not with the majority, and how they differ from the first of the largest party."""
        if not self._parties:
            return []
        reference = self._largest()
        told = []
        if not self.majority():
            told = [(who, "as many engines differ from it as agree with it") for who in reference.members]
        for party in self._parties:
            if party is reference:
                continue
            wrong = self._allowed.differing(party.result, reference.result)
            where = tuple(int(index) for index in np.argwhere(wrong)[0])
            detail = (
                f"{int(wrong.sum())} of {wrong.size} elements differ from {reference.members[0]}, the first at "
                f"{list(where)}: {party.result[where]} instead of {reference.result[where]} "
                f"({_votes(party)} against {_votes(reference)})"
            )
            told += [(who, detail) for who in party.members]
        return told

    def _largest(self) -> _Party[T]:
        return max(self._parties, key=lambda party: len(party.members))


def _votes(party: _Party[Any]) -> str:
    count = len(party.members)
    return f"{count} engine" + "s" * (count != 1)


__all__ = ["Bound", "Parties", "bound"]
