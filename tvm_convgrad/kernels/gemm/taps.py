# SPDX-License-Identifier: Apache-2.0
"""The loop over the taps of a tile's sum, without the taps that read only padding.

The taps of a phase are sorted by offset: by d, then h, then w. So the taps in bounds at a depth are contiguous, within
each of their depth slices so are the taps in bounds at a row, and within each of their rows those in bounds at a
column. The sum of a tile therefore runs over one range of depth taps, one of row taps and one of column taps, which
tables give. Columns are skipped where dilation is so large that some tap reads only padding for all columns of a tile,
and, in the tiles at the ends of a row, pixel by pixel (`GemmTiling.exact_columns`): there the code has each tap of a
row by itself, with the pixels for which it is in bounds.

`TapRanges` has the ranges and what they save, for the cost model; `TapLoops` emits the loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from tvm_convgrad.codegen.loops import Index, LookupTable, Loops, expr
from tvm_convgrad.kernels.borders import valid_range
from tvm_convgrad.kernels.spec import DHW, AxisPhase, Phase

SKIP_BELOW = 0.985
"""Rows of padding are skipped if at most this part of the (tile, row tap) pairs is in bounds: finding the range of each
tile costs about as much as the rest."""

SKIP_COLUMNS_BELOW = 0.9
"""The same for columns of padding, where the loop over the taps of a row is one more."""

Ranges = tuple[tuple[int, int], ...]
"""(first, after the last) of the taps, sorted by offset, for each position along an axis."""


@dataclass(frozen=True)
class TapRanges:
    """The taps in bounds along each axis, and what skipping the others saves.

    Attributes:
        along_d: for each phase and depth of its results; None if all taps are always in bounds.
        along_h: for each phase and row of tiles; None if rows of padding are not skipped.
        along_w: for each phase and column of tiles; None if columns of padding are not skipped.
        pixels: for the first and the last tile of a row, or the only one, and each tap along w: (first, after the last)
            of the pixels of the tile's row for which the tap is in bounds; None if all are computed.
        share: the part of all products that is computed, without what `pixels` saves.
        share_d: the part of the depth slices of all panels that lies in the source.
        skips_rows: whether rows of a panel outside of the source are never read, so that they need not be packed.
        skips_columns: the same of its columns.
    """

    along_d: tuple[Ranges, ...] | None
    along_h: tuple[Ranges, ...] | None
    along_w: tuple[Ranges, ...] | None
    pixels: tuple[Ranges, ...] | None
    share: float
    share_d: float
    skips_rows: bool
    skips_columns: bool

    def inseparable_taps(self, phases: tuple[Phase, ...]) -> tuple[int, ...]:
        """For each phase, the number of consecutive taps that are always computed or skipped together."""
        skipped_axes = 2 if self.along_h is not None else 1 if self.along_d is not None else 0
        if self.along_w is not None or self.pixels is not None:
            skipped_axes = 3
        return tuple(math.prod(len(axis.taps) for axis in phase[skipped_axes:]) for phase in phases)


@lru_cache(maxsize=256)
def tap_ranges(
    phases: tuple[Phase, ...], steps: DHW, extents: DHW, tile_h: int, tile_w: int = 0, *, exact_columns: bool = False
) -> TapRanges:
    """The ranges of a group of phases, for a source of these extents.

    Args:
        tile_h: rows of results of a tile.
        tile_w: columns of results of a tile; 0 if columns are not to be skipped.
        exact_columns: whether they are skipped pixel by pixel, of a single phase.
    """
    columns = phases[0][2].count
    by_columns = tile_w if tile_w and columns % tile_w == 0 and not exact_columns else columns  # other tiles overlap
    axes = [([phase[axis] for phase in phases], steps[axis], extents[axis]) for axis in range(3)]
    (along_d, share_d), (along_h, share_h), (along_w, share_w) = (
        _along(*axis, positions) for axis, positions in zip(axes, (1, tile_h, by_columns), strict=True)
    )
    skips, skips_w = share_h <= SKIP_BELOW, by_columns < columns and share_w <= SKIP_COLUMNS_BELOW
    exact_h, exact_w = share_h == _along(*axes[1], 1)[1], share_w == _along(*axes[2], 1)[1]
    pixels = _pixels(phases[0][2], steps[2], extents[2], tile_w) if exact_columns else None
    if pixels is not None:
        between = range(tile_w, (-(-columns // tile_w) - 1) * tile_w)  # the tiles between the first and the last one
        offsets = [offset for _, offset in phases[0][2].taps]
        exact_w = all(0 <= q * steps[2] + offset < extents[2] for q in between for offset in offsets)
    return TapRanges(
        along_d=along_d if share_d < 1 else None,
        along_h=along_h if skips else None,
        along_w=along_w if skips_w else None,
        pixels=pixels,
        share=share_d * (share_h if skips else 1.0) * (share_w if skips_w else 1.0),
        share_d=share_d,
        skips_rows=skips and exact_h,
        skips_columns=(skips_w or pixels is not None) and exact_w,
    )


def _along(axes: list[AxisPhase], step: int, extent: int, positions: int) -> tuple[tuple[Ranges, ...] | None, float]:
    """The ranges of all phases along an axis, or None if no tap ever reads padding; the part of the taps in them."""
    if all(valid_range(tap, step, axis.count, extent) == (0, axis.count) for axis in axes for _, tap in axis.taps):
        return None, 1.0
    ranges = tuple(_ranges(axis, step, extent, positions) for axis in axes)
    return ranges, _share(ranges, axes)


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


def _pixels(axis: AxisPhase, step: int, extent: int, tile_w: int) -> tuple[Ranges, ...]:
    """For the first and the last tile of a row, or the only one, the pixels for which each tap is in bounds."""
    offsets = sorted(offset for _, offset in axis.taps)
    found = []
    for start in sorted({0, axis.count - tile_w}):
        valid = [valid_range(start * step + offset, step, tile_w, extent) for offset in offsets]
        found.append(tuple((first, max(first, end)) for first, end in valid))
    return tuple(found)


def _share(ranges: tuple[Ranges, ...], axes: list[AxisPhase]) -> float:
    """The part of the taps that is in the ranges."""
    computed = sum(end - first for of_phase in ranges for first, end in of_phase)
    every = sum(len(axis.taps) * len(of_phase) for axis, of_phase in zip(axes, ranges, strict=True))
    return computed / every if every else 1.0


@dataclass(frozen=True)
class TilePosition:
    """What the ranges of a tile depend on.

    Attributes:
        phase, d: its phase, and the depth of its results.
        row, column: its row and its column of tiles.
        first_column: its first column of the result.
    """

    phase: Index
    d: Index
    row: Index
    column: Index
    first_column: Index


class TapLoops:
    """Emits the loop over the taps of a tile, in runs of `run` taps."""

    def __init__(self, loops: Loops, phases: tuple[Phase, ...], ranges: TapRanges, run: int) -> None:
        self.loops, self.ranges = loops, ranges
        counts = [[len(axis.taps) for axis in phase] for phase in phases]
        self._runs = LookupTable(loops, "tap_count", [d * h * w // run for d, h, w in counts])
        self._runs_of_d = LookupTable(loops, "slice_taps", [h * w // run for _, h, w in counts])
        self._d_taps = LookupTable(loops, "slice_count", [d for d, _, _ in counts])
        self._runs_of_h = LookupTable(loops, "row_taps", [w // run for _, _, w in counts])
        self._h_taps = LookupTable(loops, "row_count", [h for _, h, _ in counts])
        self._depths, self._rows, self._columns = (
            len(along[0]) if along is not None else 0 for along in (ranges.along_d, ranges.along_h, ranges.along_w)
        )
        self._first_d, self._valid_d = self._tables("slice", ranges.along_d)
        self._first_h, self._valid_h = self._tables("row", ranges.along_h)
        self._first_w, self._valid_w = self._tables("column", ranges.along_w)

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
        if ranges.along_d is None and ranges.along_h is None and ranges.along_w is None:
            with loops.loop(self._runs.at(phase), "tap") as tap:
                yield tap
            return
        if ranges.along_w is not None:
            at = loops.let(expr(phase * self._columns + tile.column), "column_at")
            column, columns = self._first_w.at(at), loops.let(expr(self._valid_w.at(at)), "columns")
            with self.each_row(tile) as first_of_row, loops.loop(columns, "tap") as tap:
                yield first_of_row + column + tap
            return
        with self._each_slice(tile) as (start, rows):
            # A run may have the taps of several rows, where rows are not skipped.
            skips_rows = ranges.along_h is not None
            length = expr(rows * self._runs_of_h.at(phase)) if skips_rows else self._runs_of_d.at(phase)
            length = loops.let(length, "valid_taps")
            with loops.loop(length, "tap") as tap:
                yield start + tap

    @contextmanager
    def each_row(self, tile: TilePosition) -> Iterator[Index]:
        """Loop over the rows of taps that are in bounds, of runs of one tap; yields the number of a row's first tap."""
        with self._each_slice(tile) as (start, rows), self.loops.loop(rows, "tap_row") as row:
            yield self.loops.let(expr(start + row * self._runs_of_h.at(tile.phase)), "first_of_row")

    @contextmanager
    def _each_slice(self, tile: TilePosition) -> Iterator[tuple[Index, Index]]:
        """Loop over the depth slices in bounds; yields the first run in bounds of each, and its rows of taps."""
        loops, ranges, phase = self.loops, self.ranges, tile.phase
        first: Index = 0
        slices = self._d_taps.at(phase)
        if ranges.along_d is not None:
            at = loops.let(expr(phase * self._depths + tile.d), "depth_at")
            first, slices = self._first_d.at(at), self._valid_d.at(at)
        start: Index = 0
        rows = self._h_taps.at(phase)
        if ranges.along_h is not None:
            at = loops.let(expr(phase * self._rows + tile.row), "row_at")
            start, rows = self._first_h.at(at) * self._runs_of_h.at(phase), self._valid_h.at(at)
        rows = loops.let(expr(rows), "rows")
        with loops.loop(loops.let(slices, "slices"), "slice") as k:
            yield loops.let(expr((first + k) * self._runs_of_d.at(phase) + start), "first_tap"), rows


__all__ = ["SKIP_BELOW", "SKIP_COLUMNS_BELOW", "Ranges", "TapLoops", "TapRanges", "TilePosition", "tap_ranges"]
