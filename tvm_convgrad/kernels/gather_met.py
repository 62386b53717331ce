# SPDX-License-Identifier: Apache-2.0
"""Which taps of a gather meet the source where: products with the zeros of a border are left out, plane and line-wise.

The taps of a phase are ordered by their offsets, depth outside. Those whose plane meets the source are neighbours in
that order; of each plane, those whose line does. So the sum of a tile runs over a range of planes, and a range of
lines in each. Columns cannot be left out so: a tile has many of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from tvm_convgrad.kernels.spec import AxisPhase, Phase, Three

NEARLY_ALL = 0.985
"""The part of the taps' lines that meet the source from which on the others are summed as well: to find the range for
each tile costs as much."""

Ranges = tuple[tuple[int, int], ...]
"""(first, after the last) for each position of an axis."""


@dataclass(frozen=True)
class Met:
    """Ranges (first, after the last) of the taps along an axis that meet the source, for each phase.

    Attributes:
        planes: by the depth of the result; None if all taps meet it everywhere.
        lines: by the number of the tile along the height; None if nearly all meet it.
        share, packed: the part of all products that is left, and of all planes of panels.
        clear: whether lines of a panel that lie outside of the source are never read.
    """

    planes: tuple[Ranges, ...] | None
    lines: tuple[Ranges, ...] | None
    share: float
    packed: float
    clear: bool

    def pieces(self, phases: tuple[Phase, ...]) -> tuple[int, ...]:
        """How many taps of each phase are always summed, or left out, together."""
        axes = 2 if self.lines is not None else 1 if self.planes is not None else 0
        return tuple(math.prod(len(axis.taps) for axis in phase[axes:]) for phase in phases)


@lru_cache(maxsize=256)
def met_taps(phases: tuple[Phase, ...], steps: Three, extents: Three, tile_lines: int) -> Met:
    """The taps of a group of phases that meet a source of these extents, for tiles of so many lines."""
    planes = tuple(_ranges(phase[0], steps[0], extents[0], 1) for phase in phases)
    lines = tuple(_ranges(phase[1], steps[1], extents[1], tile_lines) for phase in phases)
    of_planes, of_lines = (
        _share(ranges, [phase[axis] for phase in phases]) for axis, ranges in ((0, planes), (1, lines))
    )
    skips_lines = of_lines <= NEARLY_ALL
    return Met(
        planes=planes if of_planes < 1 else None,
        lines=lines if skips_lines else None,
        share=of_planes * (of_lines if skips_lines else 1.0),
        packed=of_planes,
        clear=skips_lines and tile_lines == 1,
    )


def _ranges(axis: AxisPhase, step: int, extent: int, positions: int) -> Ranges:
    """Of each `positions` neighbouring results, the taps, ascending by offset, that one of them meets the source by."""
    offsets = sorted(offset for _, offset in axis.taps)
    found = []
    for first in range(0, axis.count, positions):
        last = min(first + positions, axis.count) - 1
        begin = sum(last * step + offset < 0 for offset in offsets)
        end = sum(first * step + offset < extent for offset in offsets)
        found.append((begin, max(begin, end)))
    return tuple(found)


def _share(ranges: tuple[Ranges, ...], axes: list[AxisPhase]) -> float:
    """The part of the taps in all ranges."""
    met = sum(end - first for of_phase in ranges for first, end in of_phase)
    every = sum(len(axis.taps) * len(of_phase) for axis, of_phase in zip(axes, ranges, strict=True))
    return met / every if every else 1.0


__all__ = ["Met", "Ranges", "met_taps"]
