# SPDX-License-Identifier: Apache-2.0
"""`GemmTiling`: the parameters of a generated implicit GEMM; `Blocking`: the sizes and strides that follow from one.

Blocking has two levels:

- A *tile* is what the registers hold: tile_m scalars x tile_n vectors of accumulators. It covers tile_h x tile_w pixels
  and channel_block result channels; which of the two are the vectors is `vector_axis`.
- A *spatial block* is block_h x block_w result pixels of one depth of one image, computed tile after tile. Its *panel*
  is the packed copy of the source pixels that its taps read, with zeros for padding. All phases of a group and all
  their taps read the same panel, each tap from its own start.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.borders import valid_range
from tvm_convgrad.kernels.contract import Tiling
from tvm_convgrad.kernels.gemm.taps import TapRanges, tap_ranges
from tvm_convgrad.kernels.spec import DHW, ConvSpec, Phase

MOST_INTERLEAVED = 4
"""The largest stride along w for which columns of each residue are packed apart: by a shuffle of as many vectors."""


@dataclass(frozen=True)
class GemmTiling(Tiling):
    """How the loop nest of a group of phases is blocked.

    The fields are independent of each other; `gemm.plan.invalid` gives the reason why a combination cannot be built.

    Attributes:
        vector_axis: "channels": vectors run over result channels, m over pixels; "pixels": vectors run over pixels of a
            row, m over result channels.
        tile_m, tile_n: of the register tile: broadcast scalars x vectors.
        block_h: result rows of a spatial block; divides the rows of a result.
        block_tiles: tiles along w of a spatial block.
        order: of the loops. "source": work items are spatial blocks, each packs its panel; W is packed once, before.
            "weights": work items are blocks of result channels, each packs its part of W; the source is packed before.
        splits: into how many work items the inner loop is split as well: over result channels in the order "source",
            over spatial blocks in the order "weights".
        unpacked: the source is read in place, without a panel.
        tile_h: rows over which the pixels of a tile are spread; 1 where vectors run over pixels.
        exact_columns: whether the tiles at the ends of a row sum each tap only for the pixels for which it is in
            bounds; their code has the taps of a row one by one.
        channel_parts: into how many parts the source's channels are divided. All tiles of a spatial block sum a part
            before the next, and their sums are kept in memory between: the W of a part stays in the core's own cache.
    """

    vector_axis: str
    tile_m: int
    tile_n: int
    block_h: int
    block_tiles: int
    order: str = "source"
    splits: int = 1
    unpacked: bool = False
    tile_h: int = 1
    exact_columns: bool = False
    channel_parts: int = 1

    @property
    def over_pixels(self) -> bool:
        """Whether vectors run over pixels."""
        return self.vector_axis == "pixels"


@dataclass(frozen=True)
class Blocking:
    """Sizes, counts and strides that follow from a tiling. Strides are in elements.

    Attributes:
        tile_w: columns of a tile.
        channel_block: result channels of a tile; channel_blocks: how many of these a group has.
        last_vectors: vectors of a tile of the last block that hold result channels; tile_n where they are of pixels.
        tiles_w: tiles of a row.
        block_w: columns of a spatial block.
        blocks_w, blocks_h: spatial blocks of a row and of an image's height.
        taps: of each phase: ((kernel indices), (offsets)), ascending by offset.
        panel_first: the first offset on each axis that the panel holds.
        panel_step: source positions from one position of the panel to the next.
        panel_slices: the depth offsets that the panel holds, or, if `whole_depth`, the depths of the source.
        panel_h, panel_w: rows and columns of a depth slice of the panel.
        residues: the columns that taps read, by their number modulo `interleaved`. Those of a residue are contiguous in
            the panel, `residue_w` elements from those of the one before, so that consecutive results read consecutive
            columns. (0,) and 1 where panels are in the order of the source.
        stride_w, stride_h, stride_d, stride_c: from one column, row, depth slice and channel to the next, of the panel,
            or of the source itself if it is unpacked.
        step_w, step_h: the same from one column and row of the result to the next.
        tap_starts: for each phase, where each tap begins.
        panel_size: elements.
        run: number of taps that are contiguous, so that one loop runs over the channels of all of them.
        ranges: which taps are in bounds.
        whole_depth: whether one panel holds all depth slices of an image and serves results of every depth.
    """

    tile_w: int
    channel_block: int
    channel_blocks: int
    last_vectors: int
    tiles_w: int
    block_w: int
    blocks_w: int
    blocks_h: int
    taps: tuple[tuple[tuple[DHW, DHW], ...], ...]
    panel_first: DHW
    panel_step: DHW
    panel_slices: tuple[int, ...]
    panel_h: int
    panel_w: int
    residues: tuple[int, ...]
    interleaved: int
    residue_w: int
    stride_w: int
    stride_h: int
    stride_d: int
    stride_c: int
    step_w: int
    step_h: int
    tap_starts: tuple[tuple[int, ...], ...]
    panel_size: int
    run: int
    ranges: TapRanges
    whole_depth: bool

    @property
    def tap_count(self) -> int:
        """Taps of all phases."""
        return sum(map(len, self.taps))

    @property
    def spatial_blocks(self) -> int:
        """Spatial blocks of one depth of one image."""
        return self.blocks_w * self.blocks_h

    def packed_share(self, spec: ConvSpec, block_h: int) -> float:
        """The part of the rows of all panels that is packed: rows of padding are not where no tap reads them."""
        if not self.ranges.skips_rows:
            return 1.0
        step, extent, packed = block_h * spec.in_step[1], spec.source.extents[1], 0
        for block in range(self.blocks_h):
            first, end = valid_range(block * step + self.panel_first[1], self.panel_step[1], self.panel_h, extent)
            packed += end - first
        return packed / (self.panel_h * self.blocks_h)

    def read_share(self, block_h: int, height: int) -> float:
        """The part of a panel's rows that a spatial block of `block_h` rows reads, of a source of this height."""
        if not self.ranges.skips_rows:
            return 1.0
        taps = max(len({offset[1] for _, offset in of_phase}) for of_phase in self.taps)
        return min(1.0, taps * block_h / self.panel_h, height / self.panel_h)

    def panels(self, depth: int) -> int:
        """Panels of an image whose results have `depth` slices."""
        return self.spatial_blocks if self.whole_depth else self.spatial_blocks * depth


@lru_cache(maxsize=64)  # planning asks several times in a row
def blocking_of(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> Blocking:
    """The blocking of a valid tiling."""
    lanes = machine.lanes(spec.dtype)
    _, h, w = (axis.count for axis in phases[0])
    vectors = tiling.tile_n * lanes
    tile_w = vectors if tiling.over_pixels else tiling.tile_m // tiling.tile_h
    channel_block = tiling.tile_m if tiling.over_pixels else vectors
    tiles_w = -(-w // tile_w)
    block_tiles = min(tiling.block_tiles, tiles_w)
    block_w = min(block_tiles * tile_w, w)
    taps, low, high, slices, strided = _reach(phases, spec.in_step)
    # Where vectors run over pixels, the loop over taps is the innermost one: another in it would be entered too often.
    skipped_w, exact = 0 if tiling.over_pixels else tile_w, tiling.exact_columns
    ranges = tap_ranges(phases, spec.in_step, spec.source.extents, tiling.tile_h, skipped_w, exact_columns=exact)
    whole_depth = tiling.order == "weights" and not tiling.unpacked and spec.source.extents[0] > 1
    slices = tuple(range(spec.source.extents[0])) if whole_depth else slices
    step = [1, 1, 1]
    for axis in (1, 2):
        # Columns of a source with contiguous pixels are packed by whole vectors, whether or not a tap reads them.
        if strided[axis] and (axis == 1 or spec.source.channel == 1):
            step[axis] = spec.in_step[axis]
    channels, source = spec.source_channels, spec.source
    panel_h = ((tiling.block_h - 1) * spec.in_step[1] + high[1] - low[1]) // step[1] + 1
    if ranges.skips_rows and tiling.block_h == h and step[1] == 1 and spec.source.extents[1] < panel_h:
        low, panel_h = (low[0], 0, low[2]), spec.source.extents[1]  # rows of padding are never read
    panel_w = ((block_w - 1) * spec.in_step[2] + high[2] - low[2]) // step[2] + 1
    if ranges.skips_columns and block_w == w and step[2] == 1 and spec.source.extents[2] < panel_w:
        low, panel_w = (*low[:2], 0), spec.source.extents[2]  # nor are such columns
    interleaved = 1
    residues: tuple[int, ...] = (0,)
    if tiling.over_pixels and not tiling.unpacked and source.channel != 1 and spec.in_step[2] <= MOST_INTERLEAVED:
        interleaved = spec.in_step[2]
        residues = tuple(sorted({(x - low[2]) % interleaved for of_phase in taps for _, (_, _, x) in of_phase})) or (0,)
    residue_w = -(-panel_w // interleaved)
    if source.channel != 1 or tiling.over_pixels:
        residue_w = round_up(residue_w, lanes)
    padded_w = residue_w * len(residues)
    if tiling.unpacked:
        stride_w, stride_h, stride_d = source.spatial[2], source.spatial[1], source.spatial[0]
        stride_c, step = source.channel, [1, 1, 1]
        size = 0
        starts = tuple(
            tuple(sum(o * s for o, s in zip(offset, source.spatial, strict=True)) for _, offset in of_phase)
            for of_phase in taps
        )
    else:
        if tiling.over_pixels:
            stride_w, stride_h, stride_d = 1, padded_w, padded_w * panel_h
            stride_c = spread(stride_d * len(slices), machine.vector_bytes // 4)
            size = stride_c * channels + vectors
        else:
            stride_w = channels if channels < lanes else spread(round_up(channels, lanes), lanes)
            stride_h, stride_d, stride_c = padded_w * stride_w, padded_w * panel_h * stride_w, 1
            size = stride_d * len(slices) + lanes
        starts = tuple(
            tuple(
                (d if whole_depth else slices.index(d)) * stride_d
                + (y - low[1]) // step[1] * stride_h
                + residues.index((x - low[2]) // step[2] % interleaved) * residue_w
                + (x - low[2]) // step[2] // interleaved * stride_w
                for _, (d, y, x) in of_phase
            )
            for of_phase in taps
        )
    runs = not tiling.over_pixels and stride_c == 1 and tiling.channel_parts == 1
    channel_blocks = -(-spec.result_channels // channel_block)
    beyond = (channel_blocks * channel_block - spec.result_channels) // lanes if not tiling.over_pixels else 0
    return Blocking(
        tile_w=tile_w,
        channel_block=channel_block,
        channel_blocks=channel_blocks,
        last_vectors=tiling.tile_n - beyond,
        tiles_w=tiles_w,
        block_w=block_w,
        blocks_w=-(-tiles_w // block_tiles),
        blocks_h=h // tiling.block_h,
        taps=taps,
        panel_first=low,
        panel_step=tuple(step),  # type: ignore[arg-type]
        panel_slices=slices,
        panel_h=panel_h,
        panel_w=panel_w,
        residues=residues,
        interleaved=interleaved,
        residue_w=residue_w,
        stride_w=stride_w,
        stride_h=stride_h,
        stride_d=stride_d,
        stride_c=stride_c,
        step_w=spec.in_step[2] // (step[2] * interleaved) * stride_w,
        step_h=spec.in_step[1] // step[1] * stride_h,
        tap_starts=starts,
        panel_size=round_up(size, lanes),
        run=_run(starts, channels, ranges.inseparable_taps(phases)) if runs else 1,
        ranges=ranges,
        whole_depth=whole_depth,
    )


_Taps = tuple[tuple[tuple[DHW, DHW], ...], ...]


@lru_cache(maxsize=64)
def _reach(phases: tuple[Phase, ...], steps: DHW) -> tuple[_Taps, DHW, DHW, tuple[int, ...], tuple[bool, ...]]:
    """What the taps of a group of phases read, whatever the tiling; planning needs it hundreds of times.

    Returns:
        The taps of each phase, their lowest and highest offset on each axis, the depth offsets, and for each axis
        whether all offsets are multiples of its step apart.
    """
    taps = tuple(_sorted_taps(phase) for phase in phases)
    offsets = [offset for of_phase in taps for _, offset in of_phase] or [(0, 0, 0)]
    axes = list(zip(*offsets, strict=True))
    low, high = tuple(map(min, axes)), tuple(map(max, axes))
    strided = tuple(
        all((o - first) % step == 0 for o in axis) for axis, first, step in zip(axes, low, steps, strict=True)
    )
    return taps, low, high, tuple(sorted(set(axes[0]))), strided


def reads_padding(spec: ConvSpec, phases: tuple[Phase, ...], ranges: TapRanges) -> bool:
    """Whether some tap of some result reads padding; ranges of taps may skip those that do, along d always."""
    steps_and_extents = list(zip(spec.in_step, spec.source.extents, strict=True))
    skipped = (ranges.along_d is not None, ranges.skips_rows, ranges.skips_columns)
    return any(
        not skips and valid_range(offset, step, axis.count, extent) != (0, axis.count)
        for phase in phases
        for axis, (step, extent), skips in zip(phase, steps_and_extents, skipped, strict=True)
        for _, offset in axis.taps
    )


def _sorted_taps(phase: Phase) -> tuple[tuple[DHW, DHW], ...]:
    """((kernel indices), (offsets)) of a phase's taps, ascending by offset."""
    taps = []
    for (kd, d), (kh, h), (kw, w) in itertools.product(*(axis.taps for axis in phase)):
        taps.append(((kd, kh, kw), (d, h, w)))
    return tuple(sorted(taps, key=lambda tap: tap[1]))


def _run(starts: tuple[tuple[int, ...], ...], channels: int, inseparable: tuple[int, ...]) -> int:
    """The largest number of taps, in all phases, of which each begins where the channels of the one before it end.

    Args:
        inseparable: for each phase, how many taps are computed or skipped together; the run divides it.
    """
    for run in range(min(inseparable), 1, -1):
        divides = all(taps % run == 0 for taps in inseparable)
        if divides and all(
            b - a == channels
            for of_phase in starts
            for first in range(0, len(of_phase), run)
            for a, b in itertools.pairwise(of_phase[first : first + run])
        ):
            return run
    return 1


def spread(stride: int, lanes: int) -> int:
    """A stride of at least this many elements that does not map all streams to the same few sets of a cache."""
    return stride + lanes if stride % (8 * lanes) == 0 and stride >= 16 * lanes else stride


__all__ = ["Blocking", "GemmTiling", "blocking_of", "reads_padding", "spread"]
