# SPDX-License-Identifier: Apache-2.0
"""The values that a model takes in a tensor of integers because it uses them as indices, and the check of an array."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

Array = np.ndarray[Any, Any]
Kind = Literal["rows", "classes", "values"]


@dataclass(frozen=True)
class IndexRange:
    """The integers from `low` to `high`, and some others.

    Attributes:
        low, high: the first and the last one; there is none if `high` is below `low`.
        kind: what they number, for messages: rows of one tensor, of which negative ones count from the end; classes; or
            "values" if they are the intersection of several kinds.
        others: further values, such as a class that a loss ignores.
    """

    low: int
    high: int
    kind: Kind = "values"
    others: tuple[int, ...] = ()

    @classmethod
    def of_rows(cls, extent: int) -> IndexRange:
        """Indices of an axis; negative ones count from the end."""
        return cls(-extent, extent - 1, "rows")

    @classmethod
    def of_classes(cls, count: int, ignored: int | None = None) -> IndexRange:
        """Class numbers, and the one that a loss ignores."""
        found = cls(0, count - 1, "classes")
        return found if ignored is None else found.with_other(ignored)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> IndexRange:
        """Read a manifest entry; a kind that this version does not know is "values"."""
        kind = entry.get("kind", "values")
        known: Kind = kind if kind in get_args(Kind) else "values"
        return cls(int(entry["low"]), int(entry["high"]), known, tuple(map(int, entry.get("others", ()))))

    def to_json(self) -> dict[str, Any]:
        """The manifest entry."""
        entry = {"low": self.low, "high": self.high, "kind": self.kind}
        return entry | ({"others": list(self.others)} if self.others else {})

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high or value in self.others

    def with_other(self, value: int) -> IndexRange:
        """The same with one more value."""
        return self if value in self else replace(self, others=tuple(sorted((*self.others, value))))

    def __and__(self, other: IndexRange) -> IndexRange:
        """The values that both have.

        >>> str(IndexRange.of_rows(10) & IndexRange.of_rows(7))
        'an index of 7 rows (-7 to 6)'
        >>> str(IndexRange.of_rows(10) & IndexRange.of_classes(12, -100))
        'a value from 0 to 9'
        """
        low, high = max(self.low, other.low), min(self.high, other.high)
        common = sorted({value for value in (*self.others, *other.others) if value in self and value in other})
        return IndexRange(low, high, self._common(other), tuple(value for value in common if not low <= value <= high))

    def hull(self, other: IndexRange) -> IndexRange:
        """The least range with the values of both: what an array may have if some of its elements are in each."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        both_others = sorted({*self.others, *other.others})
        return IndexRange(low, high, self._common(other), tuple(v for v in both_others if not low <= v <= high))

    def _common(self, other: IndexRange) -> Kind:
        return self.kind if self.kind == other.kind else "values"

    def __str__(self) -> str:
        others = "".join(f", or {value}" for value in self.others)
        if self.kind == "rows":
            return f"an index of {self.high + 1} rows ({self.low} to {self.high}{others})"
        if self.kind == "classes":
            return f"one of {self.high + 1} classes ({self.low} to {self.high}{others})"
        return f"a value from {self.low} to {self.high}{others}"

    def refusal(self, array: Array, what: str) -> str:
        """A sentence about the first element of an array of integers that is out of range, or "".

        Args:
            what: how the sentence calls the array.
        """
        # Two passes without a copy; Python compares integers of any size.
        if not array.size or (int(array.min()) >= self.low and int(array.max()) <= self.high):
            return ""
        wrong = self.outside(array)
        if not wrong.any():
            return ""
        place = [int(axis) for axis in np.unravel_index(np.argmax(wrong), array.shape)]
        value = int(array[tuple(place)])
        remedy = f"; build with --ignore-index {value} if it marks what has no loss" if self._may_ignore(value) else ""
        return (
            f"{what} has the value {value}{f' at {place}' if place else ''}, which is out of range; the model takes it "
            f"as {self}{remedy}."
        )

    def outside(self, array: Array) -> Array:
        """Where the elements of an array of integers are out of range."""
        limits = np.iinfo(array.dtype)
        wrong = np.zeros(array.shape, bool)
        if self.low > limits.min:
            wrong |= array < min(self.low, int(limits.max))
            wrong |= np.asarray(self.low > limits.max)
        if self.high < limits.max:
            wrong |= array > max(self.high, int(limits.min))
            wrong |= np.asarray(self.high < limits.min)
        for value in self.others:
            if limits.min <= value <= limits.max:
                wrong &= array != value
        return wrong

    def _may_ignore(self, value: int) -> bool:
        """Whether the label may be meant as one that has no loss, such as -100 and 255."""
        return self.kind == "classes" and not self.others and value in (-100, -1, 255)
