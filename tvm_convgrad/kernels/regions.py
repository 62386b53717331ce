# SPDX-License-Identifier: Apache-2.0
"""A gather cut into regions of its result in which each tap meets the source everywhere or nowhere.

With a dilation of 36 on an image of 28 pixels, as in DeepLab, eight of nine taps of a 3x3 kernel never meet the image,
and with 24 those of the border meet 4 of its 28 lines. Columns of a border are zeros that a kernel multiplies.
Here a result axis is cut where the set of taps that meet the source changes, and each region keeps its own taps only.
Along the depth sums leave out such taps by themselves (gather_met.py). They do along the height, too, but there a
region's source can be read in place, and its panel has fewer lines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tvm_convgrad.kernels.spec import AxisPhase, Gather, Phase, merged

WORTH = 1.15
"""How many times fewer products the regions of each axis that is cut must have: they cost loops, lines that end early,
and time to compile."""

MOST = 12
"""Regions of a gather: each is a loop nest of its own to compile."""


def by_regions(gather: Gather) -> Iterator[Gather]:
    """The gather cut along columns, along lines, along both, and whole without the taps that meet nothing anywhere.

    Each only where that saves a good part of its products.

    Nothing for results with strides: their phases are interleaved line by line.
    """
    if gather.out_step != (1, 1, 1) or len(gather.phases) != 1 or len(gather.phases[0]) != 1:
        return
    phase = gather.phases[0][0]
    before = products(gather)
    axes_of_source = zip(phase, gather.in_step, gather.source.extents, strict=True)
    pieces = [_regions(axis, step, size) for axis, step, size in axes_of_source]
    whole = [_without_dead_taps(axis, regions) for axis, regions in zip(phase, pieces, strict=True)]
    lines, columns = (
        regions if _along(axis) >= WORTH * max(1, sum(map(_along, regions))) else [axis]
        for axis, regions in list(zip(whole, pieces, strict=True))[1:]
    )
    seen = set()
    none = tuple([axis] for axis in whole)
    for axes in ((none[0], none[1], columns), (none[0], lines, none[2]), (none[0], lines, columns), none):
        groups = tuple(((d, h, w),) for d, h, w in itertools.product(*axes))
        if len(groups) > MOST:
            continue
        cut = merged(replace(gather, phases=groups))
        if cut.phases not in seen and before >= WORTH * max(1, products(cut)):
            seen.add(cut.phases)
            yield cut


def products(gather: Gather) -> int:
    """Of a pair of channels: taps of every result position."""
    return sum(_products(phase) for phases in gather.phases for phase in phases)


def _products(phase: Phase) -> int:
    return math.prod(map(_along, phase))


def _along(axis: AxisPhase) -> int:
    return axis.count * len(axis.taps)


def _regions(axis: AxisPhase, step: int, size: int) -> list[AxisPhase]:
    """Pieces of an axis, in order, each with the taps that meet the source at all of its positions."""
    starts = {0}
    for _, offset in axis.taps:
        # The first position with q * step + offset >= 0, and the first with q * step + offset >= size.
        starts |= {min(axis.count, max(0, -(-(limit - offset) // step))) for limit in (0, size)}
    ends = [*sorted(starts - {0, axis.count}), axis.count]
    pieces, start = [], 0
    for end in ends:
        taps = tuple((k, start * step + o) for k, o in axis.taps if 0 <= start * step + o < size)
        pieces.append(AxisPhase(end - start, axis.base + start, taps))
        start = end
    return pieces


def _without_dead_taps(axis: AxisPhase, regions: list[AxisPhase]) -> AxisPhase:
    """The axis in one piece, with the taps that some region has."""
    alive = {k for region in regions for k, _ in region.taps}
    return replace(axis, taps=tuple(tap for tap in axis.taps if tap[0] in alive))


__all__ = ["by_regions", "products"]
