# SPDX-License-Identifier: Apache-2.0
"""wgrad in the terms of the kernels: a contraction over pixels of dY's channels (rows) with X's channels (lanes)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from tvm_convgrad.kernels.loops import larger, quotient, remainder, smaller
from tvm_convgrad.kernels.spec import Three, View, WeightView, axes_of, views
from tvm_convgrad.problem import ConvProblem

LINE = 256
"""Pixels that are neighbours in memory are cut into lines of at most this many."""

VECTOR = 16
"""Lines of a multiple of this are packed by whole vectors on every machine."""


@dataclass(frozen=True)
class WeightSpec:
    """wgrad in the terms of the kernel; extents over depth, height, width.

    Attributes:
        x, dy, dw: the tensors.
        batch, groups, out_channels, in_channels: the last two per group.
        kernel, strides, dilation, low: of the convolution; low is the padding before.
        dtype: of sums.
        first: where dW has the first tap; taps that meet only padding are left out at both ends of an axis.
        is_whole: whether no tap is left out; the others are zero.
        gathered: where this is a 1x1 convolution whose row channels are the (tap, input channel) pairs of another one,
            that one; dy is then a view of its X that has the pixels' first taps.
    """

    x: View
    dy: View
    dw: WeightView
    batch: int
    groups: int
    out_channels: int
    in_channels: int
    kernel: Three
    strides: Three
    dilation: Three
    low: Three
    dtype: str
    first: int = 0
    is_whole: bool = True
    gathered: WeightSpec | None = None

    @property
    def is_pointwise(self) -> bool:
        """Whether the one tap multiplies each pixel of dY with the pixel of X at the same position.

        Equal extents alone do not say so: with a stride and padding, X and dY may have as many pixels by coincidence.
        """
        at_its_place = self.strides == (1, 1, 1) and self.low == (0, 0, 0)
        return self.kernel == (1, 1, 1) and at_its_place and self.x.extents == self.dy.extents

    @property
    def line_step(self) -> int:
        """Lines of a panel of X from one line of dY to the next: without taps it has only those that are met."""
        return self.strides[1] if self.kernel[1] > 1 else 1

    @property
    def column_step(self) -> int:
        """Columns of a panel of X from one column of dY to the next."""
        return self.strides[2] if self.kernel[2] > 1 else 1

    @property
    def line_pace(self) -> int:
        """Lines of X from one line of its panel to the next."""
        return self.strides[1] if self.kernel[1] == 1 else 1

    @property
    def column_pace(self) -> int:
        """Columns of X from one column of its panel to the next."""
        return self.strides[2] if self.kernel[2] == 1 else 1

    @property
    def turns(self) -> bool:
        """Whether X's panel is a transpose of neighbouring columns, or each second one, of channels that lie apart."""
        pace = self.x.spatial[2] * self.column_pace
        return pace in (1, 2) and self.x.channel != 1 and self.x.dtype == self.dtype

    @cached_property
    def met(self) -> tuple[list[tuple[int, int]], ...]:
        """For each axis and each tap along it, the positions of dY, (first, after the last), where it meets X."""
        return tuple(self._met_along(axis) for axis in range(3))

    def _met_along(self, axis: int) -> list[tuple[int, int]]:
        extent, stride = self.dy.extents[axis], self.strides[axis]
        bounds = []
        for k in range(self.kernel[axis]):
            offset = k * self.dilation[axis] - self.low[axis]
            first = min(extent, max(0, -(offset // stride)))
            bounds.append((first, max(first, min(extent, -((offset - self.x.extents[axis]) // stride)))))
        return bounds

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """For each axis, the part of dY's positions where taps meet X: all that is summed unless this gathers."""
        return tuple(
            sum(end - first for first, end in bounds) / (len(bounds) * extent)
            for bounds, extent in zip(self.met, self.dy.extents, strict=True)
        )

    def planes_met(self, number: Any, count: Any) -> tuple[Any, Any]:
        """Of all images' planes of X, (first, after the last) of those between which planes of dY meet some."""
        depth, extent = self.dy.extents[0], self.x.extents[0]
        last = number + (count - 1)
        reach = (self.kernel[0] - 1) * self.dilation[0] + 1

        def plane(number: Any, after: int) -> Any:
            within_image = remainder(number, depth) * self.strides[0] + (after - self.low[0])
            return quotient(number, depth) * extent + larger(smaller(within_image, extent), 0)

        return plane(number, 0), plane(last, reach)

    def panel_lines(self, lines: int) -> int:
        """Lines of a panel of X for so many lines of dY."""
        return (lines - 1) * self.line_step + (self.kernel[1] - 1) * self.dilation[1] + 1

    @cached_property
    def swapped(self) -> WeightSpec:
        """The transposed contraction, of one group: vectors of dY, and rows of X's channels at all taps.

        Kept, as each estimate asks for it three times.
        """
        if self.is_pointwise:
            dw = replace(self.dw, out=self.dw.into, into=self.dw.out)
            return replace(
                self, x=self.dy, dy=self.x, dw=dw, out_channels=self.in_channels, in_channels=self.out_channels
            )
        rows = self.row_taps
        step = self.in_weight(rows[1]) if len(rows) > 1 else 1
        d, h, w = (step * s for step, s in zip(self.x.spatial, self.strides, strict=True))
        return replace(
            self,
            x=self.dy,
            dy=replace(self.x, spatial=(d, h, w), extents=self.dy.extents),
            dw=replace(self.dw, out=step, into=self.dw.out, spatial=(0, 0, 0)),
            out_channels=len(rows),
            in_channels=self.out_channels,
            kernel=(1, 1, 1),
            strides=(1, 1, 1),
            dilation=(1, 1, 1),
            low=(0, 0, 0),
            gathered=self,
        )

    @cached_property
    def row_taps(self) -> list[tuple[Three, int]]:
        """The (tap, input channel) pairs in the order in which dW has them; none if it has them in no even order."""
        taps = list(itertools.product(*(range(k) for k in self.kernel)))
        pairs = [(tap, i) for tap in taps for i in range(self.in_channels)]
        pairs.sort(key=self.in_weight)
        places = [self.in_weight(pair) for pair in pairs]
        step = places[1] - places[0] if len(places) > 1 else 1
        return pairs if places == [n * step for n in range(len(places))] else []  # type: ignore[return-value]

    def in_weight(self, pair: tuple[tuple[int, ...], int]) -> int:
        """Where dW has a (tap, input channel) pair, from an output channel's first element on."""
        tap, channel = pair
        return channel * self.dw.into + sum(k * s for k, s in zip(tap, self.dw.spatial, strict=True))


@dataclass(frozen=True)
class WeightTiling:
    """How wgrad is cut. Each field can be changed without the others; `refusal` in weight_plan.py says if it may.

    Attributes:
        rows, columns: of the register tile: output channels, and vectors of input channels.
        lines: of dY in a slab; the last slab of a plane may have fewer.
        planes: of dY in a slab; 1 unless a slab holds whole planes.
        parts: pieces of the pixels that are summed apart.
        splits: pieces of the output channels that are separate work items.
        parallel: whether threads pay.
        inner: blocks of input channels that one work item computes, slab by slab, so that dY's slab stays in cache.
        swapped: whether output channels are the lanes, and the rows are input channels, or pairs of tap and channel.
        direct: whether X's vectors are read where they are, without a panel.
        packed: whether dY's slab is packed into a panel [block of output channels][pixel][row].
        prefetched: whether the next slab's lines are asked for while this one is summed.
    """

    rows: int
    columns: int
    lines: int
    planes: int
    parts: int
    splits: int
    parallel: bool
    inner: int = 1
    swapped: bool = False
    direct: bool = False
    packed: bool = False
    prefetched: bool = False


@dataclass(frozen=True)
class VectorPanel:
    """A slab of X as [plane][line][column][channel], without what no tap meets: borders are neither stored nor read.

    Planes of X that several planes of dY meet are there once if that takes less room (`shares_planes`); else each plane
    of dY has one for each tap along the depth.

    Attributes:
        planes, lines, columns: of the panel; pitch: columns that a line has room for.
        first_column: the first column that is met, counted from where the first tap of dY's first column lies.
        line_size, plane_size, size: elements.
    """

    planes: int
    lines: int
    columns: int
    pitch: int
    first_column: int
    shares_planes: bool
    line_size: int
    plane_size: int
    size: int

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(spec: WeightSpec, lines: int, planes: int, width: int, square: int) -> VectorPanel:
        """The panel for so many lines and planes of dY and `width` channels; lines fill whole squares of columns."""
        step, dilation, taps = spec.column_step, spec.dilation[2], spec.kernel[0]
        met = [(k * dilation, first, end) for k, (first, end) in enumerate(spec.met[2]) if first < end]
        first_column = min((offset + first * step for offset, first, _ in met), default=0)
        columns = max((offset + (end - 1) * step + 1 for offset, _, end in met), default=1) - first_column
        spans = [spec.planes_met(start, planes) for start in range(spec.dy.extents[0])]
        shared = max(1, max(end - first for first, end in spans))
        shares = shared < planes * taps
        panel_planes, panel_lines = min(shared, planes * taps), spec.panel_lines(lines)
        pitch = -(-columns // square) * square
        size = panel_lines * pitch * width
        return VectorPanel(
            panel_planes, panel_lines, columns, pitch, first_column, shares, pitch * width, size, panel_planes * size
        )


@dataclass(frozen=True)
class TapPanel:
    """A slab of X with borders, [plane][depth tap][line][channel][column] or [...][line][column][channel] as in memory.

    A line is a few runs of neighbours, so that it is packed by vectors; each pixel's (tap, channel) pairs lie at the
    same offsets from it.

    Attributes:
        source: the convolution whose taps these are.
        rows: of a block.
        lines: of the panel.
        runs, scale: runs in a line, and elements of a run that are one column; runs is 0 where X has none.
        pitch, line_size, plane_size, size: elements of a run, of a line, of a plane of dY with its depth taps, of all.
        offsets: of the pairs, in dW's order, from the pixel's first.
    """

    source: WeightSpec
    rows: int
    lines: int
    runs: int
    scale: int
    pitch: int
    line_size: int
    plane_size: int
    size: int
    offsets: tuple[int, ...]

    @staticmethod
    def runs_of(spec: WeightSpec) -> tuple[int, int]:
        """Runs in a line of X, and elements of a run that are one column."""
        if spec.x.spatial[2] == 1:
            return spec.in_channels, 1
        if spec.x.channel == 1 and spec.x.spatial[2] == spec.in_channels:
            return 1, spec.in_channels
        return 0, 0

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(spec: WeightSpec, rows: int, slab: tuple[int, int], lanes: int) -> TapPanel:
        """The panel of a spec that gathers, for blocks of so many rows and a slab of (lines, planes) of dY."""
        source = spec.gathered
        assert source is not None
        runs, scale = TapPanel.runs_of(source)
        lines = source.panel_lines(slab[0])
        columns = (source.dy.extents[2] - 1) * source.strides[2] + (source.kernel[2] - 1) * source.dilation[2] + 1
        pitch = -(-columns * scale // lanes) * lanes
        line_size = runs * pitch
        plane_size = source.kernel[0] * lines * line_size
        offsets = tuple(
            (kd * lines + kh * source.dilation[1]) * line_size
            + kw * source.dilation[2] * scale
            + channel * (pitch if scale == 1 else 1)
            for (kd, kh, kw), channel in source.row_taps
        )
        return TapPanel(source, rows, lines, runs, scale, pitch, line_size, plane_size, slab[1] * plane_size, offsets)

    @property
    def column_size(self) -> int:
        """Elements from one pixel of dY to the next."""
        return self.source.strides[2] * self.scale

    @property
    def firsts(self) -> list[int]:
        """The first row of each block; the last block overlaps the one before it."""
        count = len(self.offsets)
        return [min(first, count - self.rows) for first in range(0, count, self.rows)]

    @property
    def starts(self) -> list[int]:
        """The offset of each block's first row."""
        return [self.offsets[first] for first in self.firsts]

    @cached_property
    def met(self) -> list[tuple[tuple[int, int], ...]]:
        """For each block and axis, the positions of dY, (first, after the last), between which any row meets X."""
        bounds, taps = self.source.met, [tap for tap, _ in self.source.row_taps]

        def hull(axis: int, among: list[Three]) -> tuple[int, int]:
            met = [bounds[axis][tap[axis]] for tap in among]
            return min(first for first, _ in met), max(end for _, end in met)

        return [tuple(hull(axis, taps[first : first + self.rows]) for axis in range(3)) for first in self.firsts]

    @cached_property
    def share(self) -> float:
        """The part of dY's positions that blocks sum over."""
        summed = sum(math.prod(end - first for first, end in bounds) for bounds in self.met)
        return summed / (len(self.met) * math.prod(self.source.dy.extents))

    def kinds(self) -> dict[tuple[int, ...], list[int]]:
        """Blocks by the offsets from their first rows: those of one kind have one code."""
        kinds: dict[tuple[int, ...], list[int]] = {}
        for block, first in enumerate(self.firsts):
            start = self.offsets[first]
            kinds.setdefault(tuple(o - start for o in self.offsets[first : first + self.rows]), []).append(block)
        return kinds


def weight_spec(problem: ConvProblem) -> WeightSpec:
    """wgrad in the terms of the kernel, 1x1 over contiguous pixels joined to lines."""
    x, dw, dy = views(problem)
    kernel, strides, dilation, padding = axes_of(problem)
    d, h, w = (low for low, _ in padding)
    spec = WeightSpec(
        x=x,
        dy=dy,
        dw=dw,
        batch=int(problem.batch),
        groups=problem.groups,
        out_channels=problem.out_channels // problem.groups,
        in_channels=problem.in_channels // problem.groups,
        kernel=kernel,
        strides=strides,
        dilation=dilation,
        low=(d, h, w),
        dtype=problem.accumulator,
    )
    return _joined(_pixelwise(_met(spec)))


def _met(spec: WeightSpec) -> WeightSpec:
    """The taps from the first to the last on each axis that meet X somewhere: large dilations leave few."""
    ranges = []
    for axis, count in enumerate(spec.kernel):
        extent, stride = spec.x.extents[axis], spec.strides[axis]
        offsets = [k * spec.dilation[axis] - spec.low[axis] for k in range(count)]
        reach = range(0, spec.dy.extents[axis] * stride, stride)
        met = [k for k, offset in enumerate(offsets) if any(0 <= at + offset < extent for at in reach)]
        ranges.append((met[0], met[-1] + 1) if met else (0, count))
    if all(bounds == (0, count) for bounds, count in zip(ranges, spec.kernel, strict=True)):
        return spec
    (d0, d1), (h0, h1), (w0, w1) = ranges
    d, h, w = (low - first * step for low, (first, _), step in zip(spec.low, ranges, spec.dilation, strict=True))
    return replace(
        spec,
        kernel=(d1 - d0, h1 - h0, w1 - w0),
        low=(d, h, w),
        first=sum(first * step for (first, _), step in zip(ranges, spec.dw.spatial, strict=True)),
        is_whole=False,
    )


def _pixelwise(spec: WeightSpec) -> WeightSpec:
    """A 1x1 kernel without padding meets every stride-th pixel of X: a view of X that has only those."""
    if spec.kernel != (1, 1, 1) or spec.low != (0, 0, 0):
        return spec
    reach = tuple((n - 1) * s for n, s in zip(spec.dy.extents, spec.strides, strict=True))
    if any(r >= e for r, e in zip(reach, spec.x.extents, strict=True)):
        return spec  # padding after the data is met
    d, h, w = (step * s for step, s in zip(spec.x.spatial, spec.strides, strict=True))
    return replace(spec, x=replace(spec.x, spatial=(d, h, w), extents=spec.dy.extents), strides=(1, 1, 1))


def _joined(spec: WeightSpec) -> WeightSpec:
    """A 1x1 kernel sees pixels, not lines: join those that are neighbours in memory, then cut them into lines again."""
    if not spec.is_pointwise:
        return spec
    d, h, w = spec.dy.extents
    for view in (spec.x, spec.dy):
        step = view.spatial[2]
        if (h > 1 and view.spatial[1] != w * step) or (d > 1 and view.spatial[0] != h * w * step):
            return spec
    total = d * h * w
    widths = [n for n in range(2 * VECTOR, min(total, LINE) + 1) if total % n == 0]
    width = max(widths, key=lambda n: (n % VECTOR == 0, n), default=total)

    def cut(view: View) -> View:
        step = view.spatial[2]
        return replace(view, spatial=(0, width * step, step), extents=(1, total // width, width))

    return replace(spec, x=cut(spec.x), dy=cut(spec.dy))


__all__ = ["TapPanel", "VectorPanel", "WeightSpec", "WeightTiling", "weight_spec"]
