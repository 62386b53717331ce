# SPDX-License-Identifier: Apache-2.0
"""Layouts as strings, in TVM's way: letter i is logical axis i, and their order is the order of storage.

"ABCD" stores a tensor as the program writes it; "ACDB" stores an NCHW program's tensor as NHWC. Rank 0 is "". Packed
layouts ("ABCD16b") are not plain. Nothing here depends on an operator or an IR.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from legalize.builder import Extent

T = TypeVar("T")
Equal = Callable[[Any, Any], bool]


def initial(ndim: int) -> str:
    """The layout in which a program writes a tensor of `ndim` axes."""
    return "".join(chr(ord("A") + axis) for axis in range(ndim))


def is_plain(layout: str) -> bool:
    """Whether a layout only orders axes, without packing any."""
    return sorted(layout) == list(initial(len(layout)))


def storage_order(layout: str) -> list[int]:
    """Logical axes in the order of storage."""
    return [ord(letter) - ord("A") for letter in layout]


def layout_of(axes: Iterable[int]) -> str:
    """The layout that stores logical axes in this order."""
    return "".join(chr(ord("A") + axis) for axis in axes)


def relative(names: str, wanted: str) -> str:
    """The layout of a tensor whose logical axes are `names` (such as "NCHW") and that is stored as `wanted`."""
    return layout_of(names.index(name) for name in wanted)


def stored(values: Sequence[T], layout: str) -> list[T]:
    """Something that each logical axis has (extent, name, pad width), in the order of storage."""
    return [values[axis] for axis in storage_order(layout)]


def position(layout: str, axis: int) -> int:
    """Where logical axis `axis` (negative ones count from the end) is stored."""
    return storage_order(layout).index(axis % len(layout))


def without(layout: str, removed: Iterable[int]) -> str:
    """The layout that is left when these logical axes are gone and the rest are counted again."""
    gone = set(removed)
    kept = [axis for axis in storage_order(layout) if axis not in gone]
    rank = {axis: i for i, axis in enumerate(sorted(kept))}
    return layout_of(rank[axis] for axis in kept)


def trailing(layout: str, ndim: int) -> str | None:
    """The layout of an operand with fewer axes that broadcasts against `layout` as it is stored.

    Such an operand has the last `ndim` logical axes; None if these are not the last ones in storage.
    """
    lead = len(layout) - ndim
    tail = storage_order(layout)[lead:]
    return layout_of(axis - lead for axis in tail) if all(axis >= lead for axis in tail) else None


def same_order(axes: Sequence[int], layout: str) -> bool:
    """Whether `layout` stores these axes, which may be some of its axes only, in this order."""
    chosen = set(axes)
    return [axis for axis in storage_order(layout) if axis in chosen] == list(axes)


def reshape_groups(
    before: Sequence[Extent], after: Sequence[Extent], equal: Equal
) -> list[tuple[list[int], list[int]]] | None:
    """The axes of two shapes of one tensor, matched: each group's axes before hold the same elements as those after.

    Axes of extent 1 belong to no group. None if symbolic extents leave it open.
    """
    left = [axis for axis, extent in enumerate(before) if not equal(extent, 1)]
    right = [axis for axis, extent in enumerate(after) if not equal(extent, 1)]
    groups = []
    while left or right:
        if not left or not right:
            return None
        a, b = [left.pop(0)], [right.pop(0)]
        while not (len(a) == len(b) == 1 and equal(before[a[0]], after[b[0]])):
            extents = [before[axis] for axis in a], [after[axis] for axis in b]
            if not all(isinstance(extent, int) for side in extents for extent in side):
                return None
            have, want = math.prod(extents[0]), math.prod(extents[1])
            if have == want:
                break
            source, group = (left, a) if have < want else (right, b)
            if not source:
                return None
            group.append(source.pop(0))
        groups.append((a, b))
    return groups


def reshaped_order(layout: str, groups: Sequence[tuple[list[int], list[int]]]) -> list[int] | None:
    """The order in which a tensor stored in `layout` holds the axes of its new shape, as it is.

    None if the axes of a group are not stored side by side in their order, so that elements have to move.
    """
    grouped = [axis for axis in storage_order(layout) if any(axis in before for before, _ in groups)]
    order: list[int] = []
    while grouped:
        before, after = next(group for group in groups if grouped[0] in group[0])
        if grouped[: len(before)] != before:
            return None
        grouped = grouped[len(before) :]
        order += after
    return order


def with_units(order: Sequence[int], ndim: int, candidates: Sequence[str]) -> str:
    """A layout that stores the axes `order` in that order, and the other axes, of extent 1, anywhere.

    The first candidate that does so, else each further axis behind the axis that precedes it.
    """
    for candidate in candidates:
        if same_order(order, candidate):
            return candidate
    result = list(order)
    for axis in range(ndim):
        if axis not in order:
            result.insert(result.index(axis - 1) + 1 if axis else 0, axis)
    return layout_of(result)
