# SPDX-License-Identifier: Apache-2.0
"""The mapped axis of a tensor: the one along which a vmap, or the samples of a batch, lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class MappedAxis:
    """The mapped axis of one tensor.

    Attributes:
        axis: its place, counted from the front.
        entries: how many adjacent entries belong to one index of the vmap.
        blocks: how often all indices follow each other: entry i belongs to index i // entries % indices, and there are
            blocks * indices * entries of them.
    """

    axis: int
    entries: int = 1
    blocks: int = 1

    @property
    def each(self) -> int:
        """How many entries belong to one index."""
        return self.entries * self.blocks


class Unknown(str):
    """Why it is not known where the mapped axis of a value is.

    Another reason says that there is none, as the value, or its entries, depend on several indices.
    """


@dataclass(frozen=True)
class Axes:
    """The mapped axes of a call's arguments, at least one of which has one.

    Attributes:
        places: for each argument the place of its mapped axis, None if it is the same for all indices.
        entries, blocks: of all of them, see MappedAxis.
    """

    places: tuple[int | None, ...]
    entries: int = 1
    blocks: int = 1

    def __iter__(self) -> Iterator[int | None]:
        return iter(self.places)

    def __getitem__(self, argument: int) -> int | None:
        return self.places[argument]

    @property
    def first(self) -> int:
        """The place of the mapped axis in the first argument that has one."""
        return next(place for place in self.places if place is not None)

    @property
    def each(self) -> int:
        """How many entries belong to one index."""
        return self.at(self.first).each

    def at(self, axis: int) -> MappedAxis:
        """A mapped axis with entries as these."""
        return MappedAxis(axis, self.entries, self.blocks)
