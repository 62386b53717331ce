# SPDX-License-Identifier: Apache-2.0
"""Numbers of a cut gather that the plan and the kernel share: tiles, slabs, and what a source panel holds where.

A *tile* is what the registers hold: `rows` x `columns` vectors. A *slab* is `lines` result lines by a strip of tiles,
of one depth of one image; its *panel* has the source pixels that the slab's taps reach, borders as zeros where they
are read. All phases of a group and all their taps read the one panel, each from a place of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from tvm_convgrad.kernels.gather_met import Met, met_taps
from tvm_convgrad.kernels.spec import Gather, Phase, Three
from tvm_convgrad.kernels.target import Machine


@dataclass(frozen=True)
class GatherTiling:
    """How a group of phases is cut. The fields are independent; `gather_plan.invalid` says which do not go together.

    Attributes:
        orientation: "channels": vectors run over result channels, rows are pixels; "pixels": vectors run over pixels
            of a line, rows are result channels.
        rows, columns: of the register tile; columns count vectors.
        tile_lines: over how many lines the pixels of a tile with orientation "channels" are spread.
        lines: result lines of a slab; divides the lines of a result.
        strip: tiles of a slab in the direction of lines.
        order: "source": work items are slabs, W is packed once for all; "weights": work items are blocks of result
            channels, the source is packed once for all.
        splits: pieces of what a work item would do: of the result channels in the order "source", of the slabs in the
            order "weights".
        direct: the source is read where it is, without a panel.
    """

    orientation: str
    rows: int
    columns: int
    lines: int
    strip: int
    order: str = "source"
    splits: int = 1
    direct: bool = False
    tile_lines: int = 1

    @property
    def over_pixels(self) -> bool:
        """Whether vectors run over pixels."""
        return self.orientation == "pixels"


@dataclass(frozen=True)
class Shape:
    """What follows from a tiling.

    Attributes:
        tile_columns: pixels of a line in a tile.
        block: result channels of a tile; blocks: how many of these there are in a group.
        tiles: of a line; span: columns of a slab; strips, line_slabs: slabs of a line, and of an image's height.
        taps: of each phase: ((kernel indices), (offsets)), ascending by offset.
        low, fetch: the first offset on each axis that the panel holds, and the distance of what it holds.
        planes: depth offsets, or those of the source if `joint`; panel_lines, panel_columns: of a plane.
        pitch, line_pitch, plane_pitch, channel_step: elements between neighbouring pixels, lines, planes and channels
            of the panel, or of the source itself if it is read directly.
        step_x, step_line: the same between pixels and lines of the result.
        starts: where each tap of each phase begins; panel_size: elements.
        run: taps that lie one behind the other, so that one loop runs over their channels.
        met: which of the taps meet the source where.
        joint: whether one panel holds all planes of an image, for results of every depth.
    """

    tile_columns: int
    block: int
    blocks: int
    tiles: int
    span: int
    strips: int
    line_slabs: int
    taps: tuple[tuple[tuple[Three, Three], ...], ...]
    low: Three
    fetch: Three
    planes: tuple[int, ...]
    panel_lines: int
    panel_columns: int
    pitch: int
    line_pitch: int
    plane_pitch: int
    channel_step: int
    step_x: int
    step_line: int
    starts: tuple[tuple[int, ...], ...]
    panel_size: int
    run: int
    met: Met
    joint: bool

    @property
    def tap_count(self) -> int:
        """Taps of all phases."""
        return sum(map(len, self.taps))

    @property
    def slabs(self) -> int:
        """Slabs of one depth of one image."""
        return self.strips * self.line_slabs

    def lines_packed(self, gather: Gather, lines: int) -> float:
        """The part of the lines of all panels that lies in the source, where others are not packed."""
        if not self.met.clear:
            return 1.0
        step, extent, packed = lines * gather.in_step[1], gather.source.extents[1], 0
        for slab in range(self.line_slabs):
            first = slab * step + self.low[1]
            before = min(self.panel_lines, max(0, -(first // self.fetch[1])))
            packed += max(0, min(self.panel_lines, -((first - extent) // self.fetch[1])) - before)
        return packed / (self.panel_lines * self.line_slabs)

    def lines_read(self, lines: int, height: int) -> float:
        """The part of a panel's lines that slabs of so many lines read, of a source of this height."""
        if not self.met.clear:
            return 1.0
        taps = max(len({offset[1] for _, offset in of_phase}) for of_phase in self.taps)
        return min(1.0, taps * lines / self.panel_lines, height / self.panel_lines)

    def panels(self, depth: int) -> int:
        """Panels of an image whose results have so many planes."""
        return self.slabs if self.joint else self.slabs * depth


def shape_of(gather: Gather, phases: tuple[Phase, ...], tiling: GatherTiling, machine: Machine) -> Shape:
    """The numbers of a valid tiling."""
    lanes = machine.lanes(gather.dtype)
    _, h, w = (axis.count for axis in phases[0])
    width = tiling.columns * lanes
    tile_columns = width if tiling.over_pixels else tiling.rows // tiling.tile_lines
    block = tiling.rows if tiling.over_pixels else width
    tiles = -(-w // tile_columns)
    strip = min(tiling.strip, tiles)
    span = min(strip * tile_columns, w)
    taps, low, high, planes, strided = _reach(phases, gather.in_step)
    met = met_taps(phases, gather.in_step, gather.source.extents, tiling.tile_lines)
    joint = tiling.order == "weights" and not tiling.direct and gather.source.extents[0] > 1
    planes = tuple(range(gather.source.extents[0])) if joint else planes
    fetch = [1, 1, 1]
    for axis in (1, 2):
        # Columns of sources with neighbouring pixels come in whole vectors.
        if strided[axis] and (axis == 1 or gather.source.channel == 1):
            fetch[axis] = gather.in_step[axis]
    channels, source = gather.source_channels, gather.source
    panel_lines = ((tiling.lines - 1) * gather.in_step[1] + high[1] - low[1]) // fetch[1] + 1
    if met.clear and tiling.lines == h and fetch[1] == 1 and gather.source.extents[1] < panel_lines:
        low, panel_lines = (low[0], 0, low[2]), gather.source.extents[1]  # no border is read
    panel_columns = ((span - 1) * gather.in_step[2] + high[2] - low[2]) // fetch[2] + 1
    room = _up(panel_columns, lanes) if source.channel != 1 or tiling.over_pixels else panel_columns
    if tiling.direct:
        pitch, line_pitch, plane_pitch = source.spatial[2], source.spatial[1], source.spatial[0]
        channel_step, fetch = source.channel, [1, 1, 1]
        size = 0
        starts = tuple(
            tuple(sum(o * s for o, s in zip(offset, source.spatial, strict=True)) for _, offset in of_phase)
            for of_phase in taps
        )
    else:
        if tiling.over_pixels:
            pitch, line_pitch, plane_pitch = 1, room, room * panel_lines
            channel_step = spread(plane_pitch * len(planes), machine.vector_bytes // 4)
            size = channel_step * channels + width
        else:
            pitch = channels if channels < lanes else spread(_up(channels, lanes), lanes)
            line_pitch, plane_pitch, channel_step = room * pitch, room * panel_lines * pitch, 1
            size = plane_pitch * len(planes) + lanes
        starts = tuple(
            tuple(
                (d if joint else planes.index(d)) * plane_pitch
                + (y - low[1]) // fetch[1] * line_pitch
                + (x - low[2]) // fetch[2] * pitch
                for _, (d, y, x) in of_phase
            )
            for of_phase in taps
        )
    return Shape(
        tile_columns=tile_columns,
        block=block,
        blocks=-(-gather.result_channels // block),
        tiles=tiles,
        span=span,
        strips=-(-tiles // strip),
        line_slabs=h // tiling.lines,
        taps=taps,
        low=low,
        fetch=tuple(fetch),  # type: ignore[arg-type]
        planes=planes,
        panel_lines=panel_lines,
        panel_columns=panel_columns,
        pitch=pitch,
        line_pitch=line_pitch,
        plane_pitch=plane_pitch,
        channel_step=channel_step,
        step_x=gather.in_step[2] // fetch[2] * pitch,
        step_line=gather.in_step[1] // fetch[1] * line_pitch,
        starts=starts,
        panel_size=_up(size, lanes),
        run=_run(starts, channels, met.pieces(phases)) if not tiling.over_pixels and channel_step == 1 else 1,
        met=met,
        joint=joint,
    )


_Taps = tuple[tuple[tuple[Three, Three], ...], ...]


@lru_cache(maxsize=64)
def _reach(phases: tuple[Phase, ...], steps: Three) -> tuple[_Taps, Three, Three, tuple[int, ...], tuple[bool, ...]]:
    """Taps of each phase, their lowest and highest offset on each axis, depth offsets, and whether all are steps apart.

    Kept, since a plan asks for the same phases hundreds of times.
    """
    taps = tuple(_sorted_taps(phase) for phase in phases)
    offsets = [offset for of_phase in taps for _, offset in of_phase] or [(0, 0, 0)]
    axes = list(zip(*offsets, strict=True))
    low, high = tuple(map(min, axes)), tuple(map(max, axes))
    strided = tuple(
        all((o - first) % step == 0 for o in axis) for axis, first, step in zip(axes, low, steps, strict=True)
    )
    return taps, low, high, tuple(sorted(set(axes[0]))), strided


def in_bounds(gather: Gather, phases: tuple[Phase, ...]) -> bool:
    """Whether every tap of every result pixel meets the source, so that there is no border."""
    for phase in phases:
        for axis in range(3):
            for _, offset in phase[axis].taps:
                last = (phase[axis].count - 1) * gather.in_step[axis] + offset
                if offset < 0 or last >= gather.source.extents[axis]:
                    return False
    return True


def _sorted_taps(phase: Phase) -> tuple[tuple[Three, Three], ...]:
    taps = []
    for (kd, d), (kh, h), (kw, w) in itertools.product(*(axis.taps for axis in phase)):
        taps.append(((kd, kh, kw), (d, h, w)))
    return tuple(sorted(taps, key=lambda tap: tap[1]))


def _run(starts: tuple[tuple[int, ...], ...], channels: int, pieces: tuple[int, ...]) -> int:
    """The most taps, in all phases, that follow one another at a distance of their channels.

    Args:
        pieces: of each phase, how many taps are summed or left out together.
    """
    for run in range(min(pieces), 1, -1):
        whole = all(piece % run == 0 for piece in pieces)
        if whole and all(
            b - a == channels for s in starts for i in range(0, len(s), run) for a, b in _pairs(s, i, run)
        ):
            return run
    return 1


def _pairs(starts: tuple[int, ...], first: int, run: int) -> list[tuple[int, int]]:
    piece = starts[first : first + run]
    return list(itertools.pairwise(piece))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def spread(distance: int, lanes: int) -> int:
    """A distance of streams, in elements, that does not map all of them to the same few sets of a cache."""
    return distance + lanes if distance % (8 * lanes) == 0 and distance >= 16 * lanes else distance


__all__ = ["GatherTiling", "Shape", "in_bounds", "shape_of", "spread"]
