# SPDX-License-Identifier: Apache-2.0
"""The loop over the taps of a tile's sum, without the taps that read only padding.

The taps of a phase are sorted by offset: by d, then h, then w. So the taps in bounds at a depth are contiguous, and
within each of their depth slices so are the taps in bounds at a row. The sum of a tile therefore runs over one range of
depth taps and one range of row taps, which tables give. Columns are not skipped: a tile has many of them.

`TapRanges` has the ranges and what they save, for the cost model; `TapLoops` emits the loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache

from tvm_convgrad.codegen.loops import Index, LookupTable, Loops, expr
from tvm_convgrad.kernels.borders import valid_range
from tvm_convgrad.kernels.spec import DHW, AxisPhase, Phase

SKIP_BELOW = 0.985
"""Rows of padding are skipped if at most this part of the (tile, row tap) pairs is in bounds: finding the range of each
tile costs about as much as the rest."""

Ranges = tuple[tuple[int, int], ...]
"""(first, after the last) of the taps, sorted by offset, for each position along an axis."""


@dataclass(frozen=True)
class TapRanges:
    """The taps in bounds along d and h, and what skipping the others saves.

    Attributes:
        along_d: for each phase and depth of its results; None if all taps are always in bounds.
        along_h: for each phase and row of tiles; None if rows of padding are not skipped.
        share: the part of all products that is computed.
        share_d: the part of the depth slices of all panels that lies in the source.
        skips_rows: whether rows of a panel outside of the source are never read, so that they need not be packed.
    """

    along_d: tuple[Ranges, ...] | None
    along_h: tuple[Ranges, ...] | None
    share: float
    share_d: float
    skips_rows: bool

    def inseparable_taps(self, phases: tuple[Phase, ...]) -> tuple[int, ...]:
        """For each phase, the number of consecutive taps that are always computed or skipped together."""
        skipped_axes = 2 if self.along_h is not None else 1 if self.along_d is not None else 0
        return tuple(math.prod(len(axis.taps) for axis in phase[skipped_axes:]) for phase in phases)


@lru_cache(maxsize=256)
def tap_ranges(phases: tuple[Phase, ...], steps: DHW, extents: DHW, tile_h: int) -> TapRanges:
    """The ranges of a group of phases, for a source of these extents and tiles of `tile_h` rows of results."""
    along_d = tuple(_ranges(phase[0], steps[0], extents[0], 1) for phase in phases)
    along_h = tuple(_ranges(phase[1], steps[1], extents[1], tile_h) for phase in phases)
    share_d, share_h = (
        _share(ranges, [phase[axis] for phase in phases]) for axis, ranges in ((0, along_d), (1, along_h))
    )
    skips = share_h <= SKIP_BELOW
    return TapRanges(
        along_d=along_d if share_d < 1 else None,
        along_h=along_h if skips else None,
        share=share_d * (share_h if skips else 1.0),
        share_d=share_d,
        skips_rows=skips and tile_h == 1,
    )


def _ranges(axis: AxisPhase, step: int, extent: int, positions: int) -> Ranges:
    """For each `positions` consecutive results, the range of the taps that are in bounds at one of them at least."""
    valid = [valid_range(offset, step, axis.count, extent) for offset in sorted(offset for _, offset in axis.taps)]
    found = []
    for first in range(0, axis.count, positions):
        last = min(first + positions, axis.count) - 1
        begin = sum(start > last for start, _ in valid)
        end = sum(end > first for _, end in valid)
        found.append((begin, max(begin, end)))
    return tuple(found)


def _share(ranges: tuple[Ranges, ...], axes: list[AxisPhase]) -> float:
    """The part of the taps that is in the ranges."""
    computed = sum(end - first for of_phase in ranges for first, end in of_phase)
    every = sum(len(axis.taps) * len(of_phase) for axis, of_phase in zip(axes, ranges, strict=True))
    return computed / every if every else 1.0


@dataclass(frozen=True)
class TilePosition:
    """What the ranges of a tile depend on: its phase, the depth of its results, and its row of tiles."""

    phase: Index
    d: Index
    row: Index


class TapLoops:
    """Emits the loop over the taps of a tile, in runs of `run` taps."""

    def __init__(self, loops: Loops, phases: tuple[Phase, ...], ranges: TapRanges, run: int) -> None:
        self.loops, self.ranges = loops, ranges
        counts = [[len(axis.taps) for axis in phase] for phase in phases]
        self._runs = LookupTable(loops, "tap_count", [d * h * w // run for d, h, w in counts])
        self._runs_of_d = LookupTable(loops, "slice_taps", [h * w // run for _, h, w in counts])
        self._d_taps = LookupTable(loops, "slice_count", [d for d, _, _ in counts])
        self._runs_of_h = LookupTable(loops, "row_taps", [w // run for _, _, w in counts])
        self._depths, self._rows = phases[0][0].count, len(ranges.along_h[0]) if ranges.along_h is not None else 0
        self._first_d, self._valid_d = self._tables("slice", ranges.along_d)
        self._first_h, self._valid_h = self._tables("row", ranges.along_h)

    def _tables(self, name: str, ranges: tuple[Ranges, ...] | None) -> tuple[LookupTable, LookupTable]:
        flat = [each for of_phase in ranges or () for each in of_phase]
        return (
            LookupTable(self.loops, f"first_{name}", [first for first, _ in flat]),
            LookupTable(self.loops, f"valid_{name}s", [end - first for first, end in flat]),
        )

    def count(self, phase: Index) -> Index:
        """The runs of a phase, in bounds or not."""
        return self._runs.at(phase)

    @contextmanager
    def each(self, tile: TilePosition) -> Iterator[Index]:
        """Loop over the runs that are in bounds; yields the number of the run in its phase."""
        loops, ranges, phase = self.loops, self.ranges, tile.phase
        if ranges.along_d is None and ranges.along_h is None:
            with loops.loop(self._runs.at(phase), "tap") as tap:
                yield tap
            return
        with ExitStack() as nest:
            of_d = self._runs_of_d.at(phase)
            first: Index = 0
            slices = self._d_taps.at(phase)
            if ranges.along_d is not None:
                at = loops.let(expr(phase * self._depths + tile.d), "depth_at")
                first, slices = self._first_d.at(at), loops.let(expr(self._valid_d.at(at)), "slices")
            start: Index = 0
            length = of_d
            if ranges.along_h is not None:
                at = loops.let(expr(phase * self._rows + tile.row), "row_at")
                start = self._first_h.at(at) * self._runs_of_h.at(phase)
                length = loops.let(expr(self._valid_h.at(at) * self._runs_of_h.at(phase)), "valid_taps")
            k: Index = 0
            if not isinstance(slices, int) or slices != 1:
                k = nest.enter_context(loops.loop(slices, "slice"))
            start = loops.let(expr((first + k) * of_d + start), "first_tap")
            yield start + nest.enter_context(loops.loop(length, "tap"))


__all__ = ["SKIP_BELOW", "Ranges", "TapLoops", "TapRanges", "TilePosition", "tap_ranges"]
