# SPDX-License-Identifier: Apache-2.0
"""The layout of all gradients of a step in one flat float32 buffer, as the manifest has it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_convgrad.core.rounding import round_up

Array = np.ndarray[Any, Any]

ALIGNMENT = 16
"""Offsets are multiples of so many elements, 64 bytes, which kernels expect of every tensor."""


@dataclass(frozen=True)
class FlatEntry:
    """One gradient: the name of its parameter, its extents, and its offset in the buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Where each gradient lies in a buffer of `size` elements; what lies between them is zero."""

    entries: tuple[FlatEntry, ...]
    size: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> FlatLayout:
        """The layout of gradients of these names and extents, one after the other."""
        entries: list[FlatEntry] = []
        offset = 0
        for name, shape in shapes:
            entries.append(FlatEntry(name, shape, offset))
            offset += round_up(entries[-1].size, ALIGNMENT)
        return cls(tuple(entries), offset)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> FlatLayout:
        """Read it from a manifest."""
        entries = (FlatEntry(each["name"], tuple(each["shape"]), each["offset"]) for each in content["entries"])
        return cls(tuple(entries), content["size"])

    def to_json(self) -> dict[str, Any]:
        """What the manifest has."""
        entries = [{"name": each.name, "shape": list(each.shape), "offset": each.offset} for each in self.entries]
        return {"size": self.size, "entries": entries}

    def views(self, buffer: Array) -> dict[str, Array]:
        """Each gradient by name, in the memory of a buffer."""
        return {each.name: buffer[each.offset : each.offset + each.size].reshape(each.shape) for each in self.entries}


__all__ = ["ALIGNMENT", "FlatEntry", "FlatLayout"]
