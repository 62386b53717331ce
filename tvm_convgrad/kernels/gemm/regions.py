# SPDX-License-Identifier: Apache-2.0
"""Other decompositions of a result: into regions for large dilations, and into phases that make whole rows.

Splitting a result into regions in which each tap is either in bounds everywhere or nowhere serves large dilations.

With a dilation of 36 on an image of 28 x 28, as in DeepLab, eight of the nine taps of a 3x3 kernel read only padding,
and with 24 the taps of its upper row are in bounds for 4 of the 28 rows. Here a result axis is split where the set of
taps in bounds changes, and each region is a group of phases with its own taps, without any padding.

Along d, and along h, the kernel itself skips taps (see taps.py), along w those that a whole tile does not need; and a
region's source can be read in place, or its panel has fewer rows.

The phases of dgrad with a stride have different numbers of columns or rows if the stride does not divide the result's
extents, and could not be stored as one row. As many of each reach beyond the result, where nothing is stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tvm_convgrad.kernels.borders import valid_range
from tvm_convgrad.kernels.spec import AxisPhase, ConvSpec, Phase, collapse_axes

MIN_GAIN = 1.15
"""How many times fewer products the regions of each split axis must have: regions cost loops, tiles that end early, and
time to compile."""

WIDE_GAIN = 1.08
"""The same where each region is at least WIDE positions long, so that tiles fit it."""

WIDE = 4
"""Positions of a region in which a register tile has room."""

MAX_REGIONS = 12
"""Regions of a result: each is a loop nest of its own to compile."""


def by_regions(spec: ConvSpec) -> Iterator[ConvSpec]:
    """The convolution split along w, along h, along both, and unsplit but without taps that read only padding.

    Each only where that saves enough products. Nothing for strided results: their phases are interleaved row by row.
    """
    if spec.out_step != (1, 1, 1) or len(spec.phases) != 1 or len(spec.phases[0]) != 1:
        return
    phase = spec.phases[0][0]
    before = products(spec)
    axes_of_source = zip(phase, spec.in_step, spec.source.extents, strict=True)
    regions = [_regions(axis, step, extent) for axis, step, extent in axes_of_source]
    whole = [_without_dead_taps(axis, pieces) for axis, pieces in zip(phase, regions, strict=True)]
    h, w = (
        pieces if _along(axis) >= _least_gain(pieces) * max(1, sum(map(_along, pieces))) else [axis]
        for axis, pieces in list(zip(whole, regions, strict=True))[1:]
    )
    seen = set()
    unsplit = tuple([axis] for axis in whole)
    for axes in ((unsplit[0], unsplit[1], w), (unsplit[0], h, unsplit[2]), (unsplit[0], h, w), unsplit):
        groups = tuple((phase_of_region,) for phase_of_region in itertools.product(*axes))
        if len(groups) > MAX_REGIONS:
            continue
        split = collapse_axes(replace(spec, phases=groups))  # type: ignore[arg-type]
        least = min(map(_least_gain, axes))
        if split.phases not in seen and before >= least * max(1, products(split)):
            seen.add(split.phases)
            yield split


def by_whole_rows(spec: ConvSpec) -> Iterator[ConvSpec]:
    """The convolution with phases of one size, if those of a strided dgrad have several and results are in rows.

    Their results are stored by way of `ResultStore`'s staging buffer only.
    """
    steps, extents = spec.out_step, spec.result.extents
    if len(spec.phases) == 1 or spec.result.channel == 1 or spec.result.spatial[2] != 1:
        return
    if any(extent < step for extent, step in zip(extents, steps, strict=True)):
        return
    d, h, w = (-(-extent // step) for extent, step in zip(extents, steps, strict=True))
    phases = tuple(
        (replace(of_d, count=d), replace(of_h, count=h), replace(of_w, count=w))
        for group in spec.phases
        for of_d, of_h, of_w in group
    )
    yield replace(spec, phases=(phases,))


def reaches_beyond(spec: ConvSpec, phase: Phase) -> bool:
    """Whether a phase has results beyond the result's last ones."""
    ends = ((axis.count - 1) * step + axis.base for axis, step in zip(phase, spec.out_step, strict=True))
    return any(end >= extent for end, extent in zip(ends, spec.result.extents, strict=True))


def products(spec: ConvSpec) -> int:
    """The taps of all result positions, for one pair of channels."""
    return sum(_products(phase) for phases in spec.phases for phase in phases)


def _products(phase: Phase) -> int:
    return math.prod(map(_along, phase))


def _along(axis: AxisPhase) -> int:
    return axis.count * len(axis.taps)


def _least_gain(pieces: list[AxisPhase]) -> float:
    """How many times fewer products an axis split into these must have."""
    return WIDE_GAIN if len(pieces) > 1 and min(axis.count for axis in pieces) >= WIDE else MIN_GAIN


def _regions(axis: AxisPhase, step: int, extent: int) -> list[AxisPhase]:
    """The regions of an axis, in order, each with the taps that are in bounds at all of its positions."""
    starts = {0}
    for _, offset in axis.taps:
        starts |= set(valid_range(offset, step, axis.count, extent))
    ends = [*sorted(starts - {0, axis.count}), axis.count]
    regions, start = [], 0
    for end in ends:
        taps = tuple((k, start * step + o) for k, o in axis.taps if 0 <= start * step + o < extent)
        regions.append(AxisPhase(end - start, axis.base + start, taps))
        start = end
    return regions


def _without_dead_taps(axis: AxisPhase, regions: list[AxisPhase]) -> AxisPhase:
    """The unsplit axis with the taps that are in bounds in some region."""
    alive = {k for region in regions for k, _ in region.taps}
    return replace(axis, taps=tuple(tap for tap in axis.taps if tap[0] in alive))


__all__ = ["by_regions", "by_whole_rows", "products", "reaches_beyond"]
