# SPDX-License-Identifier: Apache-2.0
"""The shapes of wgrad's two panels of X, which the plan and the kernel share: of vectors, and of im2col rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.spec import DHW
from tvm_convgrad.kernels.wgrad.spec import WgradSpec


@dataclass(frozen=True)
class VectorPanel:
    """A slab of X as [depth slice][row][column][channel]; only what some tap reads, so that borders take no room.

    Slices of X that several slices of dY read are stored once if that takes less room (`shares_slices`); else each
    slice of dY has one for each tap along the depth.

    Attributes:
        slices, rows, columns: of the panel, half of the columns where only even pairs are held; pitch: columns that a
            row has room for.
        first_column: the first column that is read, counted from where the first tap of dY's first column lies.
        row_size, slice_size, size: elements of a row, of a slice, of the panel.
    """

    slices: int
    rows: int
    columns: int
    pitch: int
    first_column: int
    shares_slices: bool
    row_size: int
    slice_size: int
    size: int

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(spec: WgradSpec, slab_h: int, slab_d: int, width: int, square: int) -> VectorPanel:
        """The panel for a slab of dY and `width` channels; rows have room for whole multiples of `square` columns."""
        step, dilation, taps = spec.step_w, spec.dilation[2], spec.kernel[0]
        reads = [(k * dilation, first, end) for k, (first, end) in enumerate(spec.valid_ranges[2]) if first < end]
        first_column = min((offset + first * step for offset, first, _ in reads), default=0)
        columns = max((offset + (end - 1) * step + 1 for offset, _, end in reads), default=1) - first_column
        columns = -(-columns // spec.word_columns)
        spans = [spec.x_slices(start, slab_d) for start in range(spec.dy.extents[0])]
        shared = max(1, max(end - first for first, end in spans))
        slices, rows = min(shared, slab_d * taps), spec.panel_rows(slab_h)
        pitch = round_up(columns, square)
        size = rows * pitch * width
        shares = shared < slab_d * taps
        return VectorPanel(slices, rows, columns, pitch, first_column, shares, pitch * width, size, slices * size)


@dataclass(frozen=True)
class Im2colPanel:
    """A slab of X from which im2col rows are read: [depth slice of dY][depth tap][row][...], with zeros as padding.

    The last two axes are [channel][column] or [column][channel], as in memory, so that a row consists of a few
    contiguous runs and is packed by vectors. Each pixel's (tap, channel) pairs lie at the same offsets from it.

    Attributes:
        source: the convolution whose taps these are.
        tile_m: im2col rows in a block.
        rows: rows of X in a depth slice of the panel.
        runs, scale: contiguous runs in a row, and elements of a run in one column; runs is 0 where X has none.
        pitch, row_size: elements of a run and of a row.
        slice_size: elements of a depth slice of dY with its depth taps; size: of the panel.
        offsets: of the pairs, in dW's order, from the pixel's first.
    """

    source: WgradSpec
    tile_m: int
    rows: int
    runs: int
    scale: int
    pitch: int
    row_size: int
    slice_size: int
    size: int
    offsets: tuple[int, ...]

    @staticmethod
    def runs_of(spec: WgradSpec) -> tuple[int, int]:
        """Contiguous runs in a row of X, and elements of a run in one column; (0, 0) if there are none."""
        if spec.x.spatial[2] == 1:
            return spec.in_channels, 1
        if spec.x.channel == 1 and spec.x.spatial[2] == spec.in_channels:
            return 1, spec.in_channels
        return 0, 0

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(spec: WgradSpec, tile_m: int, slab: tuple[int, int], lanes: int) -> Im2colPanel:
        """The panel of a spec over im2col rows, for a slab of (slab_h, slab_d) rows and depth slices of dY."""
        source = spec.im2col_of
        assert source is not None
        runs, scale = Im2colPanel.runs_of(source)
        rows = source.panel_rows(slab[0])
        columns = (source.dy.extents[2] - 1) * source.strides[2] + (source.kernel[2] - 1) * source.dilation[2] + 1
        pitch = round_up(columns * scale, lanes)
        row_size = runs * pitch
        slice_size = source.kernel[0] * rows * row_size
        offsets = tuple(
            (kd * rows + kh * source.dilation[1]) * row_size
            + kw * source.dilation[2] * scale
            + channel * (pitch if scale == 1 else 1)
            for (kd, kh, kw), channel in source.im2col_rows
        )
        return Im2colPanel(
            source, tile_m, rows, runs, scale, pitch, row_size, slice_size, slab[1] * slice_size, offsets
        )

    @property
    def column_size(self) -> int:
        """Elements from one pixel of dY to the next."""
        return self.source.strides[2] * self.scale

    @property
    def firsts(self) -> list[int]:
        """The first im2col row of each block; the last block overlaps the one before it."""
        count = len(self.offsets)
        return [min(first, count - self.tile_m) for first in range(0, count, self.tile_m)]

    @property
    def starts(self) -> list[int]:
        """The offset of each block's first im2col row."""
        return [self.offsets[first] for first in self.firsts]

    @cached_property
    def valid_ranges(self) -> list[tuple[tuple[int, int], ...]]:
        """For each block and axis, the positions of dY, (first, after the last), between which any tap is in bounds."""
        bounds, taps = self.source.valid_ranges, [tap for tap, _ in self.source.im2col_rows]

        def hull(axis: int, among: list[DHW]) -> tuple[int, int]:
            ranges = [bounds[axis][tap[axis]] for tap in among]
            first = min(first for first, _ in ranges)
            if axis == 2 and self.source.dots:  # pairs begin at even columns
                first -= first % 2
            return first, max(end for _, end in ranges)

        return [tuple(hull(axis, taps[first : first + self.tile_m]) for axis in range(3)) for first in self.firsts]

    @cached_property
    def valid_fraction(self) -> float:
        """The part of dY's positions that blocks sum over."""
        summed = sum(math.prod(end - first for first, end in ranges) for ranges in self.valid_ranges)
        return summed / (len(self.valid_ranges) * math.prod(self.source.dy.extents))

    def blocks_by_offsets(self) -> dict[tuple[int, ...], list[int]]:
        """The numbers of the blocks, by their rows' offsets from the first: blocks of the same offsets share code."""
        found: dict[tuple[int, ...], list[int]] = {}
        for block, first in enumerate(self.firsts):
            start = self.offsets[first]
            found.setdefault(tuple(o - start for o in self.offsets[first : first + self.tile_m]), []).append(block)
        return found


__all__ = ["Im2colPanel", "VectorPanel"]
