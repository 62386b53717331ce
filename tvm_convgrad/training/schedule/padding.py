# SPDX-License-Identifier: Apache-2.0
"""Products of matrices whose extents no register tile divides, padded to extents that one does.

An attention over 197 tokens has products of 197 rows: a prime, so that a tile of whole rows and vectors does not exist,
and the loops would be scalar. The operands are copied with zeros behind them, and the result without what they add.
"""

from __future__ import annotations

import math

from tvm import s_tir, tirx

from tvm_convgrad.training.schedule.blocks import extents_of, kinds_of, root_blocks, work_of
from tvm_convgrad.training.schedule.reductions import LANES, ROWS, Tile, choose_tile

MOST_ADDED = 1 / 2
"""The part of an axis's extent that may be added to it: 11 elements are faster as one vector of 16 than as scalars."""

LEAST_WORK = 1 << 16  # multiply-accumulates; for fewer the copies count


def pad_products(schedule: s_tir.Schedule) -> None:
    """Pad each sum of products that gets a larger register tile so."""
    for block in root_blocks(schedule) or []:
        added = _added(schedule, block)
        if not any(added):
            continue
        extents = [extent or 0 for extent in extents_of(schedule, block)]
        schedule.pad_einsum(block, [extent + more if more else 1 for extent, more in zip(extents, added, strict=True)])


def _added(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> list[int]:
    """By how much to extend each iterator of a block; zeros where the block stays as it is."""
    kinds, extents = kinds_of(schedule, block), extents_of(schedule, block)
    none = [0] * len(kinds)
    if "R" not in kinds or "?" in kinds or None in extents or work_of(schedule, block) < LEAST_WORK:
        return none
    if not _is_einsum(schedule.get(block)):
        return none
    known = [extent for extent in extents if extent is not None]
    wide = [_rounded(extent) for extent in known]
    before, after = choose_tile(schedule, block), choose_tile(schedule, block, wide)
    if after is None or _elements(after) < 2 * _elements(before):
        return none
    tiled = {after.lanes_axis: after.lanes, **after.rows}
    return [
        -extent % tiled[axis] if axis in tiled else 0  # no more than the tile needs
        for axis, extent in enumerate(known)
    ]


def _rounded(extent: int) -> int:
    """The next multiple of the largest factor of a tile that does not add too much to the extent."""
    for factor in sorted({*LANES, *ROWS}, reverse=True):
        if -extent % factor <= extent * MOST_ADDED:
            return extent + -extent % factor
    return extent


def _elements(tile: Tile | None) -> int:
    return tile.lanes * math.prod(tile.rows.values()) if tile else 1


def _is_einsum(block: tirx.SBlock) -> bool:
    """Whether a block adds up products of elements at its iterators themselves: what TVM's pad_einsum takes."""
    if len(block.writes) != 1 or block.init is None or len(block.reads) < 2:
        return False
    own = {iterator.var for iterator in block.iter_vars}
    return all(
        isinstance(part.extent, tirx.IntImm)
        and int(part.extent) == 1
        and (isinstance(part.min, tirx.IntImm) or part.min in own)
        for region in [*block.reads, *block.writes]
        for part in region.region
    )


__all__ = ["pad_products"]
