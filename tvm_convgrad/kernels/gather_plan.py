# SPDX-License-Identifier: Apache-2.0
"""How forward and dgrad are cut: depthwise or implicit GEMM; for the latter the tiling of least estimated time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tvm_convgrad.kernels.depthwise_plan import SMALL_GROUPS, faster_of, plan_depthwise_gather
from tvm_convgrad.kernels.gather_shape import GatherTiling, Shape, in_bounds, shape_of
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.regions import by_regions
from tvm_convgrad.kernels.spec import Gather, Phase, data_gather, forward_gather
from tvm_convgrad.kernels.target import CLOCK, Machine, beyond_near_pages
from tvm_convgrad.kernels.tile import balanced, tile_rows
from tvm_convgrad.problem import ConvProblem

FMA_LATENCY = 4.0
"""Cycles; a tile of fewer than twice as many accumulators waits for its own sums."""

STEP_OVERHEAD = 0.3
"""Cycles of a step of the reduction beyond its arithmetic and loads."""

FAR_VECTOR_CYCLES = 3.3
"""Of a vector of pixels, from a channel's own place, which no prefetcher foresees, or across two lines of the cache."""

FAR_PAGE_CYCLES = 1.0
"""More, of a step whose channel lies in a page of its own, when there are many: each pass translates them again."""

NEAR_BYTES = 1 << 15
"""Of a block of W that stays in the first cache from one tile to the next."""

WEIGHT_VECTOR_CYCLES = 0.3
"""More, of a step, for each vector of a larger block."""

SPLIT_VECTOR_CYCLES = 1.9
"""More, of a vector of pixels where planes are no whole lines of the cache: most vectors lie across two of them."""

TILE_OVERHEAD = 30.0
"""Cycles to begin and end a tile."""

SHORT_SUM = 64
"""Steps of a reduction so short that the next tile's begin has to hide this one's end."""

WIDE_TILE = 0.01
"""More, relative, of a short reduction for each accumulator beyond 16: the core looks ahead less far."""

STORE_CYCLES = 1.5
"""Of a vector of results that goes straight to memory."""

TURN_CYCLES = 16.0
"""Of a vector of results that is turned on its way."""

COPY_CYCLES = 0.3
"""Of an element that is packed in the order it has in memory."""

FAR_COPY_CYCLES = 0.8
"""The same where channels lie far apart, line after line."""

SQUARE_CYCLES = 1.15
"""Of an element that is packed through squares turned in registers, whose rows lie far apart."""

ELEMENT_CYCLES = 1.5
"""Of an element that is packed by itself."""

FETCH_CYCLES = 0.6
"""More, of an element that is packed before anything is summed, and does not come from the core's own cache."""

TOUCH_CYCLES = 8.0
"""Of the first vectors of each channel that a tile reads from a place of its own."""

PIXEL_TOUCH_CYCLES, FAR_TOUCH_CYCLES = 8.0, 28.0
"""The same of a tile that reads single pixels there, and more where there are many channels in pages of their own."""

SHARED_BYTES = 4.5
"""Bytes a cycle and core from the shared cache, while results go there."""

SEEN = 0.15
"""The part of a stream from there that the arithmetic of the tile that reads it never hides."""

LOAD_CYCLES = 0.62
"""Of a vector or broadcast that a step loads."""

WRITTEN_BYTES = 10.0
"""The same of panels that all cores pack together, which happens before any results."""

MEMORY_BYTES = 3.0
"""Bytes a cycle and core from memory."""

ITEM_OVERHEAD = 1500.0
"""Cycles of a work item."""

SHARED_PANEL = 1 << 26
"""The most bytes of a panel of the whole source."""

LONE_COLUMN_ROWS, LONG_SUM = 28, 256
"""Rows of a tile of one vector of channels, so that a load of W serves more of them, and the steps of a sum from which
on that gains."""

GROUP_COST = 0.015
"""What a loop nest more, relative to all, has to gain: time to compile, and work that is shared less evenly."""

MOST_CUTS = 24
"""Other cuts that are worth compiling for a measurement."""


def plan_gather(problem: ConvProblem, face: str, machine: Machine) -> Choice:
    """The choice for forward or dgrad."""
    gather = forward_gather(problem) if face == "forward" else data_gather(problem)
    depthwise = plan_depthwise_gather(problem, face, gather, machine)
    if isinstance(depthwise, Choice) and not depthwise.kind.startswith(SMALL_GROUPS):
        return depthwise
    cuts = [(each, *_best_tilings(each, machine)) for each in (gather, *by_regions(gather))]
    gather, tilings, cycles = min(cuts, key=lambda cut: cut[2] * (1 + GROUP_COST * len(cut[1])))
    seconds = cycles * machine.parts / CLOCK
    choice = Choice(f"implicit GEMM {face}", "covers the problem", seconds, {}, (gather, tilings))
    return faster_of(choice, depthwise, f"depthwise {face}")


def _best_tilings(gather: Gather, machine: Machine) -> tuple[tuple[GatherTiling, ...], float]:
    """The tiling of least estimated time for each group of phases, and the cycles of all."""
    tilings, cycles = [], 0.0
    for phases in gather.phases:
        costs = {tiling: estimate(gather, phases, tiling, machine) for tiling in candidates(gather, phases, machine)}
        best = min(costs, key=lambda tiling: costs[tiling])
        tilings.append(best)
        cycles += costs[best]
    return tuple(tilings), cycles


def other_cuts(
    detail: tuple[Gather, tuple[GatherTiling, ...]], machine: Machine
) -> Iterator[tuple[tuple[Gather, tuple[GatherTiling, ...]], float]]:
    """Other details of a choice and their estimates in seconds: one group of phases at a time is cut otherwise.

    The best estimate of each kind of tile comes first, then the second best of each, up to MOST_CUTS in all.
    """
    gather, own = detail
    found: list[tuple[int, float, tuple[GatherTiling, ...]]] = []
    costs = [estimate(gather, phases, tiling, machine) for phases, tiling in zip(gather.phases, own, strict=True)]
    for number, phases in enumerate(gather.phases):
        ranks: dict[object, int] = {}
        every = {t: estimate(gather, phases, t, machine) for t in candidates(gather, phases, machine)}
        for tiling, cost in sorted(every.items(), key=lambda pair: pair[1]):
            kind = replace(tiling, lines=1, strip=1, splits=1)
            ranks[kind] = ranks.get(kind, -1) + 1
            if tiling != own[number]:
                total = sum(costs) - costs[number] + cost
                found.append((ranks[kind], total, (*own[:number], tiling, *own[number + 1 :])))
    for _, cycles, tilings in sorted(found, key=lambda each: each[:2])[:MOST_CUTS]:
        yield (gather, tilings), cycles * machine.parts / CLOCK


def invalid_cut(detail: tuple[Gather, tuple[GatherTiling, ...]], machine: Machine) -> str:
    """Why one of a detail's tilings cannot be built, or nothing."""
    gather, tilings = detail
    reasons = (invalid(gather, phases, t, machine) for phases, t in zip(gather.phases, tilings, strict=True))
    return next(filter(None, reasons), "")


def invalid(gather: Gather, phases: tuple[Phase, ...], tiling: GatherTiling, machine: Machine) -> str:
    """Why a tiling cannot be built for a group of phases, or nothing."""
    _, h, w = (axis.count for axis in phases[0])
    if tiling.orientation not in ("channels", "pixels"):
        return f"orientation is {tiling.orientation}, neither channels nor pixels"
    if tiling.order not in ("source", "weights"):
        return f"order is {tiling.order}, neither source nor weights"
    if min(tiling.rows, tiling.columns, tiling.lines, tiling.strip, tiling.splits, tiling.tile_lines) < 1:
        return "a number of the tiling is less than one"
    if tiling.rows * tiling.columns + tiling.columns + 1 > machine.registers:
        return f"{tiling.rows} x {tiling.columns} accumulators do not fit {machine.registers} registers"
    if h % tiling.lines:
        return f"{tiling.lines} lines do not divide {h}"
    if tiling.over_pixels:
        return _invalid_pixels(gather, phases, tiling, machine)
    if tiling.rows % tiling.tile_lines or tiling.lines % tiling.tile_lines:
        return f"{tiling.tile_lines} lines of a tile do not divide its rows and the slab's lines"
    if tiling.rows // tiling.tile_lines > w:
        return f"a line has {w} pixels, less than a tile's"
    return _invalid_panel(gather, phases, tiling, machine)


def _invalid_pixels(gather: Gather, phases: tuple[Phase, ...], tiling: GatherTiling, machine: Machine) -> str:
    if tiling.tile_lines != 1:
        return "vectors of pixels stay in their line"
    if tiling.rows > gather.result_channels:
        return f"{tiling.rows} rows for {gather.result_channels} result channels"
    if shape_of(gather, phases, tiling, machine).step_x != 1:
        return "pixels of the source that neighbouring results need are not neighbours"
    if tiling.direct and phases[0][2].count < tiling.columns * machine.lanes(gather.dtype):
        return "vectors would be longer than a line"
    return _invalid_panel(gather, phases, tiling, machine)


def _invalid_panel(gather: Gather, phases: tuple[Phase, ...], tiling: GatherTiling, machine: Machine) -> str:
    if tiling.direct:
        if gather.source.dtype != gather.dtype:
            return f"the source is {gather.source.dtype}, sums are {gather.dtype}"
        return "" if in_bounds(gather, phases) else "taps reach over the source's border"
    shape = shape_of(gather, phases, tiling, machine)
    size = shape.panel_size * 4
    if tiling.order == "weights":
        size *= gather.batch * gather.groups * shape.panels(phases[0][0].count)
        if size > SHARED_PANEL:
            return "the panel of the whole source is too large"
    return ""


def candidates(gather: Gather, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GatherTiling]:
    """Valid tilings worth a thought; the first two orientations always have one."""
    for tile in _tiles(gather, phases, machine):
        # Each tap of single pixels would go to the places of all channels again.
        again = not tile.over_pixels and gather.source.channel != 1 and _most_taps(phases) > 1
        for direct in (False,) if again else (True, False):
            for tiling in _cuts(gather, phases, machine, tile, direct):
                if not invalid(gather, phases, tiling, machine):
                    yield tiling


def _tiles(gather: Gather, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GatherTiling]:
    """Register tiles of both orientations."""
    _, h, w = (axis.count for axis in phases[0])
    lanes, channels = machine.lanes(gather.dtype), gather.result_channels
    most = machine.registers - 1
    for columns in (1, 2, 3):
        rows = min(tile_rows(machine, columns), most)
        yield GatherTiling("channels", balanced(w, min(rows, w)), columns, 1, 1)
        if columns == 1 and gather.source_channels * _most_taps(phases) >= LONG_SUM:
            rows = min(LONE_COLUMN_ROWS, most - 2)
            yield GatherTiling("channels", balanced(w, min(rows, w)), columns, 1, 1)
        if columns > 1 and w > rows // 2:
            yield GatherTiling("channels", balanced(w, min(rows // 2 + 1, w)), columns, 1, 1)
        for tile_lines in (n for n in range(2, rows // w + 1) if h % n == 0):
            yield GatherTiling("channels", tile_lines * w, columns, tile_lines, 1, tile_lines=tile_lines)
    if gather.result.channel == 1 and channels >= lanes // 2:
        return
    for columns in (1, 2, 3, 4, 5, 6, 7):
        if columns > 1 and (columns - 1) * lanes >= w:
            break
        rows = min(tile_rows(machine, columns), channels)
        if rows >= 1:  # the tuner has fewer registers than there are
            yield GatherTiling("pixels", balanced(channels, rows), columns, 1, 1)


def _most_taps(phases: tuple[Phase, ...]) -> int:
    """Of one phase."""
    return max(math.prod(len(axis.taps) for axis in phase) for phase in phases)


def _cuts(
    gather: Gather, phases: tuple[Phase, ...], machine: Machine, tile: GatherTiling, direct: bool
) -> Iterator[GatherTiling]:
    """The slabs, orders and splits of a tile."""
    _, h, _ = (axis.count for axis in phases[0])
    base = replace(tile, direct=direct)
    if invalid(gather, phases, base, machine):
        return
    shape = shape_of(gather, phases, base, machine)
    tiles = shape.tiles
    budget = machine.l2_bytes // 4
    lines = [n for n in range(tile.tile_lines, h + 1) if h % n == 0 and n % tile.tile_lines == 0]
    pieces = sorted({-(-tiles // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)} | {1})
    for strip in pieces:
        for count in lines if strip == tiles else lines[:1]:
            cut = replace(base, lines=count, strip=strip)
            full = shape_of(gather, phases, cut, machine)
            bytes_ = _slab_bytes(gather, full, cut, direct)
            smallest = strip == 1 and count == lines[0]
            if bytes_ <= budget or smallest:
                yield cut
                for splits in (2, 4, machine.parts, 2 * machine.parts):
                    if full.blocks >= splits > 1:
                        yield replace(cut, splits=splits)
            # Vectors of pixels from a panel of everything come from far, channel after channel: nothing foresees that.
            near = not tile.over_pixels or gather.source.size * 4 <= machine.l2_bytes
            if near and strip == tiles and (count == lines[-1] or bytes_ <= budget):
                slabs = gather.batch * phases[0][0].count * full.slabs
                for splits in sorted({1, min(2, slabs), min(machine.parts, slabs)}):
                    yield replace(cut, order="weights", splits=splits)


def _slab_bytes(gather: Gather, shape: Shape, tiling: GatherTiling, direct: bool) -> int:
    if not direct:
        return int(shape.panel_size * 4 * shape.lines_read(tiling.lines, gather.source.extents[1]))
    return shape.span * tiling.lines * gather.in_step[1] * gather.in_step[2] * gather.source_channels * 4


def estimate(gather: Gather, phases: tuple[Phase, ...], tiling: GatherTiling, machine: Machine) -> float:
    """Cycles until the last core is done, by arithmetic, packing, stores and traffic beyond the core's own cache."""
    shape = shape_of(gather, phases, tiling, machine)
    lanes, element = machine.lanes(gather.dtype), 8 if gather.dtype == "float64" else 4
    depth, h, _ = (axis.count for axis in phases[0])
    channels, groups, parts = gather.source_channels, gather.groups, machine.parts
    images = gather.batch * depth
    tiles = images * groups * shape.blocks * (h // tiling.tile_lines) * shape.tiles
    accumulators = tiling.rows * tiling.columns
    step = max(accumulators / 2, (tiling.rows + tiling.columns) * LOAD_CYCLES, FMA_LATENCY) + STEP_OVERHEAD
    if not tiling.over_pixels and channels * shape.run < 8:
        step += 1.0
    if shape.tap_count * channels < SHORT_SUM * len(phases):
        step *= 1 + WIDE_TILE * max(0, accumulators - 16)
    if tiling.over_pixels:
        step = max(step, FAR_VECTOR_CYCLES * tiling.columns + tiling.rows / 2 + STEP_OVERHEAD)
    if tiling.over_pixels and tiling.direct:
        step += FAR_PAGE_CYCLES * beyond_near_pages(channels, gather.source.channel * element)
        if gather.source.channel * element % 64:
            step += SPLIT_VECTOR_CYCLES * tiling.columns
    if not tiling.over_pixels and shape.block * shape.tap_count * channels * element > NEAR_BYTES * len(phases):
        step += WEIGHT_VECTOR_CYCLES * tiling.columns
    arithmetic = tiles * shape.tap_count * shape.met.share * channels * step
    turned = not tiling.over_pixels and gather.result.channel != 1
    scattered = tiling.over_pixels and gather.result.spatial[2] * gather.out_step[2] != 1
    store = TURN_CYCLES if turned else lanes * ELEMENT_CYCLES if scattered else STORE_CYCLES
    work = arithmetic + tiles * len(phases) * (accumulators * store + TILE_OVERHEAD)
    # The source.
    slabs = images * groups * shape.slabs
    panels = gather.batch * groups * shape.panels(depth) * (1.0 if shape.joint else shape.met.packed)
    copied = COPY_CYCLES
    if tiling.over_pixels or gather.source.channel != 1:
        copied = FAR_COPY_CYCLES if tiling.over_pixels and gather.source.channel != 1 else SQUARE_CYCLES
    if gather.source.dtype != gather.dtype or not machine.has_masks:
        copied = ELEMENT_CYCLES
    splits, copies = (tiling.splits, 1) if tiling.order == "source" else (1, tiling.splits)
    panel = 0 if tiling.direct else shape.panel_size * shape.lines_packed(gather, tiling.lines)
    if gather.source.size * element > machine.l2_bytes and tiling.order == "weights":
        copied += FETCH_CYCLES
    work += panels * splits * panel * copied
    if tiling.direct and gather.source.channel != 1:
        again = tiles if tiling.order == "weights" else tiles / shape.blocks
        touch = TOUCH_CYCLES
        if not tiling.over_pixels:
            touch = PIXEL_TOUCH_CYCLES + FAR_TOUCH_CYCLES * beyond_near_pages(channels, gather.source.channel * element)
        work += again * channels * touch
    # W.
    weights = groups * shape.blocks * shape.block * shape.tap_count * channels
    neighbours = gather.weight_result == 1
    contiguous = gather.weight_source == 1 or gather.weight_source == shape.tap_count
    per_weight = COPY_CYCLES if neighbours else SQUARE_CYCLES if contiguous else 2 * SQUARE_CYCLES
    work += weights * copies * per_weight
    # Streams from beyond the core's own cache: W for the first tile of each slab, the source for every tile.
    block_bytes = shape.block * shape.tap_count * channels * element
    slab_bytes: float = _slab_bytes(gather, shape, tiling, tiling.direct)
    if shape.joint:  # of all planes, a slab reads those that its taps reach
        slab_bytes *= min(1.0, len(phases[0][0].taps) / len(shape.planes))
    tile_bytes = slab_bytes * slabs * shape.blocks / tiles
    if tiling.order == "source":
        items, largest = slabs * tiling.splits, -(-shape.blocks // tiling.splits) / (shape.blocks * slabs)
        work += 2 * weights * element / WRITTEN_BYTES
        beyond_w = _beyond(weights / groups * element, slab_bytes, machine)
        beyond_source = _beyond(slab_bytes, block_bytes, machine)
    else:
        pieces = images * shape.slabs
        items, largest = groups * shape.blocks * copies, -(-pieces // copies) / (pieces * groups * shape.blocks)
        beyond_w = _beyond(block_bytes, slab_bytes, machine)
        whole = panels * panel * element / groups if shape.joint else pieces * slab_bytes
        beyond_source = _beyond(whole, block_bytes, machine)
        work += 0 if tiling.direct else 2 * panels * panel * element / WRITTEN_BYTES
    for beyond, times, bytes_ in ((beyond_w, slabs * shape.blocks, block_bytes), (beyond_source, tiles, tile_bytes)):
        stream = beyond * bytes_ / SHARED_BYTES
        work += times * max(SEEN * stream, stream - arithmetic / tiles)
    if tiling.direct and not tiling.over_pixels and shape.step_x * element % 4096 == 0:
        work += arithmetic * 0.3  # all rows fall into the same sets of the cache
    work += items * ITEM_OVERHEAD
    total = work * min(1.0, -(-items // parts) * largest)
    moved = (gather.source.size + gather.weight.size + gather.result.size) * element / parts / MEMORY_BYTES
    return max(total, moved) + 0.2 * min(total, moved)


def _beyond(streamed: float, kept: float, machine: Machine) -> float:
    """The part of what is read again and again that the core's own cache does not hold, besides what it keeps."""
    return min(1.0, max(0.0, (streamed + kept - machine.l2_bytes) / streamed)) if streamed else 0.0


__all__ = ["GatherTiling", "candidates", "estimate", "invalid", "invalid_cut", "other_cuts", "plan_gather"]
