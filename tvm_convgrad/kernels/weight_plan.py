# SPDX-License-Identifier: Apache-2.0
"""How wgrad is cut: all sensible cuts, the time of each by a model of one core, and the best of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tvm_convgrad.kernels.depthwise_plan import SMALL_GROUPS, faster_of, plan_depthwise_weight
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.target import CLOCK, MOST_PIECES, Machine, beyond_near_pages
from tvm_convgrad.kernels.tile import balanced, fits, tile_rows
from tvm_convgrad.kernels.weight_spec import (
    VECTOR,
    TapPanel,
    VectorPanel,
    WeightSpec,
    WeightTiling,
    weight_spec,
)
from tvm_convgrad.problem import ConvProblem

KIND = "implicit GEMM wgrad"
"""The kernel that is cut here."""

SLABS = (128, 256, 400, 800)
"""Pixels of a slab that are tried: more make little of loading and storing sums, fewer stay in the core's cache."""

MOST_CUTS = 24
"""Other cuts that are worth compiling for a measurement."""

MAX_TAP_ROWS, MAX_FEW_ROWS = 512, 2048
"""Pairs of tap and input channel up to which they are tried as rows: more fill the lanes of vectors of X as well,
unless channels fill few of them."""

FEW_LANES = 0.8
"""The part of the lanes that are few."""

MAX_CODE = 128
"""Accumulators of all the code for blocks of such pairs, which do not all lie alike."""

ADD_LATENCY = 4
"""Cycles from one multiply-add of an accumulator to the next; two start in a cycle."""

LOAD_COST = 0.55
"""Cycles of a load of the inner loop: two start in a cycle, but not all rows are in the first cache."""

PANEL_COST = 0.25
"""Cycles that a vector of a panel beyond the first cache delays a step."""

LINE_COST = 5
"""Cycles to leave a loop over the pixels of a line: its exit is mispredicted now and then, and pipelines drain."""

TILE_COST = 40
"""Cycles to clear a tile and to enter its loops."""

KEEP_COST = 2.5
"""Cycles to add one accumulator to sums in the core's cache."""

COPY_COST, TRANSPOSE_COST, GATHER_COST = 0.15, 0.3, 2.0
"""Cycles to pack one element: by vectors, through transposed registers, one by one."""

WRITE_COST, TURNED_COST, LOST_COST, SCATTER_COST = 0.2, 3.0, 10.0, 2.5
"""Cycles to write one element of dW: by vectors, by transposed vectors that lie lines apart (in a dW that the core's
cache does not hold), one by one."""

SHARED_BYTES, MEMORY_BYTES = 40.0, 4.5
"""Bytes a cycle that a core gets from the cache that cores share, mostly behind its sums, and from memory."""

LONE_BYTES, SUMS_BYTES = 10.0, 12.0
"""Bytes a cycle of what no prefetcher foresees, a line at a time, and of sums that do not fit into the core's cache."""

FAR_COST = 14.0
"""Cycles of a pixel whose row's scalars lie in a page of its own, where there are many: translations, cache sets."""

LONE_COST, LONE_DISTANCE = 1.0, 512
"""Cycles of a pixel whose row's scalars come from the second cache, and how many bytes pixels are apart then; half as
many where each tap reads them."""

SHARED_CACHE = 8 << 20
"""Bytes: tensors larger than this come from memory."""

ASK_COST = 0.5
"""Cycles a pixel to ask for lines ahead."""

HIDDEN = 0.25
"""The part of the time for streaming that remains when lines are asked for a slab ahead."""


def plan_weight(problem: ConvProblem, machine: Machine) -> Choice:
    """The choice for wgrad."""
    depthwise = plan_depthwise_weight(problem, machine)
    if isinstance(depthwise, Choice) and not depthwise.kind.startswith(SMALL_GROUPS):
        return depthwise
    spec = weight_spec(problem)
    parallel = problem.macs >= machine.parallel_from
    _, tiling = min(
        ((_elapsed(spec, t, machine), t) for t in candidates(spec, machine, parallel)), key=lambda pair: pair[0]
    )
    seconds = estimate(spec, tiling, machine)
    return faster_of(Choice(KIND, "covers the problem", seconds, {}, (spec, tiling)), depthwise, "depthwise wgrad")


# ---------------------------------------------------------------------------------------------------- candidates


def invalid_cut(detail: tuple[WeightSpec, WeightTiling], machine: Machine) -> str:
    """Why a detail's tiling cannot be built, or nothing."""
    return refusal(*detail, machine)


def refusal(spec: WeightSpec, tiling: WeightTiling, machine: Machine) -> str:
    """Why the implicit GEMM cannot be cut so, or nothing."""
    for name in ("rows", "columns", "lines", "planes", "parts", "splits", "inner"):
        if getattr(tiling, name) < 1:
            return f"{name} is {getattr(tiling, name)}; it must be at least 1"
    if tiling.parts > MOST_PIECES:
        return f"parts is {tiling.parts}; it must be at most {MOST_PIECES}"
    reason = swap_refusal(spec) if tiling.swapped else ""
    if reason:
        return reason
    spec = spec.swapped if tiling.swapped else spec
    if tiling.rows > spec.out_channels:
        return f"rows is {tiling.rows}; there are {spec.out_channels} channels to put into them"
    if not fits(machine, tiling.rows, tiling.columns):
        return f"{tiling.rows} x {tiling.columns} accumulators do not fit into the registers"
    if tiling.planes > 1 and tiling.lines < spec.dy.extents[1]:
        return "planes is more than 1, but lines is not the whole height"
    if tiling.packed and not machine.has_masks:
        return "packed needs masked loads and stores"
    if spec.gathered is not None:
        if tiling.packed:
            return "packed is for rows of channels; pairs of tap and channel have a panel of their own"
        kinds = len(_tap_panel(spec, tiling, machine).kinds())
        if kinds > 1 and (tiling.splits > 1 or kinds * tiling.rows * tiling.columns > MAX_CODE):
            return f"rows is {tiling.rows}; its blocks lie in {kinds} ways: too much code, and no splits"
    if not tiling.direct:
        return ""
    if not spec.is_pointwise or spec.x.channel != 1 or spec.x.dtype != spec.dtype:
        return "direct needs pixels that meet one to one, and neighbouring channels of the accumulator's type"
    if spec.in_channels % (tiling.columns * machine.lanes(spec.dtype)) and not machine.has_masks:
        return "direct needs masked loads where channels do not fill the vectors"
    return ""


def other_cuts(
    detail: tuple[WeightSpec, WeightTiling], machine: Machine
) -> Iterator[tuple[tuple[WeightSpec, WeightTiling], float]]:
    """Other details of a choice and their estimates in seconds, for measurements; packed and unpacked, direct or not.

    The best estimate of each kind of tile comes first, then the second best of each, up to MOST_CUTS in all.
    """
    spec, own = detail
    knobs = ("packed", "direct", "prefetched")
    found = {
        varied: _elapsed(spec, varied, machine)
        for tiling in candidates(spec, machine, own.parallel)
        for values in itertools.product((False, True), repeat=len(knobs))
        if not refusal(spec, varied := replace(tiling, **dict(zip(knobs, values, strict=True))), machine)
    }
    ranks: dict[WeightTiling, int] = {}
    ordered: list[tuple[int, float, WeightTiling]] = []
    for tiling, seconds in sorted(found.items(), key=lambda pair: pair[1]):
        kind = replace(tiling, lines=1, planes=1, parts=1, splits=1, inner=1, prefetched=False)
        ranks[kind] = ranks.get(kind, -1) + 1
        if tiling != own:
            ordered.append((ranks[kind], seconds, tiling))
    for _, seconds, tiling in sorted(ordered, key=lambda each: each[:2])[:MOST_CUTS]:
        yield (spec, tiling), seconds * machine.parts


def swap_refusal(spec: WeightSpec) -> str:
    """Why rows and vectors cannot change places, or nothing."""
    if spec.groups > 1:
        return "swapped needs one group"
    if spec.is_pointwise:
        return ""
    if not spec.row_taps:
        return "swapped needs a weight in which pairs of tap and input channel lie evenly"
    if not TapPanel.runs_of(spec)[0]:
        return "swapped needs lines of X that are runs of neighbours"
    return ""


def candidates(spec: WeightSpec, machine: Machine, parallel: bool) -> Iterator[WeightTiling]:
    """The cuts that are worth a look."""
    planes_in_all = spec.batch * spec.dy.extents[0]
    turns: tuple[bool, ...] = (False, True)
    lanes = machine.lanes(spec.dtype)
    few = spec.in_channels < FEW_LANES * lanes * -(-spec.in_channels // lanes)
    most = MAX_FEW_ROWS if few else MAX_TAP_ROWS
    if swap_refusal(spec) or (not spec.is_pointwise and spec.in_channels * math.prod(spec.kernel) > most):
        turns = (False,)
    height, line = spec.dy.extents[1:]
    for turned, columns in itertools.product(turns, (2, 1, 3)):
        seen = spec.swapped if turned else spec
        rows = _rows(seen, columns, machine)
        in_blocks = -(-seen.in_channels // (columns * lanes))
        out_blocks = -(-seen.out_channels // rows)
        inners = {1, min(4, in_blocks), min(8, in_blocks), -(-in_blocks // machine.parts), in_blocks}
        pieces = {1, min(machine.parts, out_blocks), min(4 * machine.parts, out_blocks)}
        large = seen.is_pointwise and max(spec.x.size, spec.dy.size) * 4 > machine.l2_bytes
        for lines, planes in dict.fromkeys(_slab(planes_in_all, height, line, pixels) for pixels in SLABS):
            slabs = -(-planes_in_all // planes) * -(-height // lines)
            tile = WeightTiling(rows, columns, lines, planes, 1, 1, parallel, swapped=turned)
            # Nothing is refused for its parts, its blocks or what it asks for.
            ways = {splits: _ways(spec, seen, replace(tile, splits=splits), machine) for splits in pieces}
            ahead = slabs > 1 and large
            # Where rows are gathered only vectors are asked for, which may not be worth its cycles.
            asks = (ahead,) if seen.gathered is None or not ahead else (True, False)
            parts_of = {1, machine.parts if slabs >= machine.parts else 1}
            for parts, inner, splits, asked in itertools.product(parts_of, inners, pieces, asks):
                for way in ways[splits]:
                    yield replace(way, parts=parts, inner=inner, prefetched=asked)


def _slab(planes_in_all: int, height: int, line: int, pixels: int) -> tuple[int, int]:
    """Lines and planes of slabs of about so many pixels, all of a size."""
    lines = balanced(height, max(1, min(height, pixels // line)))
    if lines < height:
        return lines, 1
    return lines, balanced(planes_in_all, max(1, min(planes_in_all, pixels // (height * line))))


def _ways(spec: WeightSpec, seen: WeightSpec, tile: WeightTiling, machine: Machine) -> list[WeightTiling]:
    """The tile with X's panel or without, with dY's or without: what is allowed and worth a look."""
    direct, packed = replace(tile, direct=True), replace(tile, packed=True)
    found = []
    in_place = not refusal(spec, direct, machine)
    if (not in_place or seen.gathered is None) and not refusal(spec, tile, machine):
        found.append(tile)
        # With a panel of one operand, one of the other costs little more, and its passes are even.
        if _lone_rows(seen, 4) and not refusal(spec, packed, machine):
            found.append(packed)
    return [*found, direct] if in_place else found


def _far_rows(spec: WeightSpec, tiling: WeightTiling, element: int) -> float:
    """How far, from 0 to 1, a slab of dY whose pixels are no neighbours spreads over more pages than are near."""
    return beyond_near_pages(tiling.planes * tiling.lines * spec.dy.extents[2], spec.dy.spatial[2] * element)


def _lone_rows(spec: WeightSpec, element: int) -> bool:
    """Whether pixels of dY are no neighbours, and so far apart that they share few sets of the first cache."""
    distance = LONE_DISTANCE if spec.is_pointwise else LONE_DISTANCE // 2
    return spec.gathered is None and spec.dy.spatial[2] * element >= distance


def _rows(spec: WeightSpec, columns: int, machine: Machine) -> int:
    """The rows of a tile: as few blocks as registers allow, of equal size; pairs of tap and channel that lie alike."""
    count = spec.out_channels
    if spec.gathered is None:
        return balanced(count, min(tile_rows(machine, columns), count))
    lanes = machine.lanes(spec.dtype)

    def worth(rows: int) -> tuple[float, int]:
        panel = TapPanel.of(spec, rows, (1, 1), lanes)
        kinds = len(panel.kinds())
        if kinds * rows * columns > MAX_CODE:
            return (count * columns * 2 * ADD_LATENCY, kinds)
        return (-(-count // rows) * (max(rows * columns, 2 * ADD_LATENCY) + 4) * panel.share, kinds)

    return min((rows for rows in range(1, count + 1) if fits(machine, rows, columns)), key=worth)


# ---------------------------------------------------------------------------------------------------- cost


def _elapsed(spec: WeightSpec, tiling: WeightTiling, machine: Machine) -> float:
    """Seconds on all of the machine's parts: what one core needs, and the share of it of the core that has most."""
    seen = spec.swapped if tiling.swapped else spec
    depth, height, _ = seen.dy.extents
    in_blocks = -(-seen.in_channels // (tiling.columns * machine.lanes(spec.dtype)))
    out_blocks = -(-seen.out_channels // tiling.rows)
    slabs = -(-spec.batch * depth // tiling.planes) * -(-height // tiling.lines)
    items, largest = spec.groups, 1 / spec.groups
    for count, size in (
        (in_blocks, min(tiling.inner, in_blocks)),
        (out_blocks, -(-out_blocks // tiling.splits)),
        (slabs, -(-slabs // tiling.parts)),
    ):
        items *= -(-count // size)
        largest *= size / count
    return estimate(spec, tiling, machine) * min(1.0, -(-items // machine.parts) * largest)


def estimate(spec: WeightSpec, tiling: WeightTiling, machine: Machine) -> float:
    """Seconds on one core: multiply-adds, sums, packing and writing, and the streams that caches do not hold."""
    spec = spec.swapped if tiling.swapped else spec
    lanes = machine.lanes(spec.dtype)
    element = 8 if spec.dtype == "float64" else 4
    rows, columns, width = tiling.rows, tiling.columns, tiling.columns * lanes
    depth, height, line = spec.dy.extents
    taps = math.prod(spec.kernel)
    line_slabs = -(-height // tiling.lines)
    slabs = -(-spec.batch * depth // tiling.planes) * line_slabs
    pixels = spec.batch * depth * height * line
    in_blocks, out_blocks = -(-spec.in_channels // width), -(-spec.out_channels // rows)
    tiles = taps * in_blocks * out_blocks * spec.groups
    in_items = -(-in_blocks // tiling.inner)

    loads = LOAD_COST if spec.gathered is None else 0.5
    step = max(rows * columns / 2, (rows + columns) * loads, ADD_LATENCY) + columns * PANEL_COST
    step += ASK_COST if tiling.prefetched else 0
    joined = spec.kernel[1:] == (1, 1) and spec.gathered is None and (line % lanes == 0 or spec.x.channel == 1)
    exits = slabs if joined else spec.batch * depth * height * spec.shares[0] * spec.shares[1]
    sums = rows * columns * KEEP_COST * (0 if slabs == 1 else 1)
    share = math.prod(spec.shares) if spec.gathered is None else _tap_panel(spec, tiling, machine).share
    cycles = tiles * (pixels * step * share + exits * LINE_COST + slabs * (TILE_COST + sums))

    panel = _panel(spec, tiling, width).size
    if not tiling.direct:
        cycles += slabs * in_blocks * spec.groups * tiling.splits * panel * _pack_cost(spec, machine)
    if spec.gathered is not None:
        plain = machine.has_masks and spec.gathered.x.dtype == spec.dtype
        size = _tap_panel(spec, tiling, machine).size
        cycles += slabs * in_items * tiling.splits * size * (COPY_COST if plain else GATHER_COST)
    if tiling.packed:
        cost = TRANSPOSE_COST if spec.dy.channel != 1 else COPY_COST
        cycles += pixels * spec.out_channels * spec.groups * in_items * cost

    # Streams: X once a split, dY once an item of input channels, or once a block of them if its slab leaves the cache.
    slab_pixels = tiling.planes * tiling.lines * line
    per_split = -(-spec.out_channels // tiling.splits)
    both = slab_pixels * (per_split + min(tiling.inner * width, spec.in_channels)) * element
    kept = taps * tiling.inner * width * per_split * element if slabs > tiling.parts else 0
    touched = slab_pixels * per_split * element + panel * element + kept // tiling.inner
    reads = in_items if touched <= machine.l2_bytes * 3 // 4 else in_blocks
    apart = spec.x.channel == 1  # pixels that are not met are then whole lines of the cache
    met = min(spec.x.size, pixels * spec.in_channels * spec.groups * taps if apart else spec.x.size) * element
    stream = met * tiling.splits / _rate(met)
    lone = spec.gathered is None and not tiling.packed and spec.dy.spatial[2] > 1
    stream += spec.dy.size * element * reads / min(_rate(spec.dy.size * element), LONE_BYTES if lone else SHARED_BYTES)
    cycles += stream * (HIDDEN if tiling.prefetched and 2 * both <= machine.l2_bytes else 1)
    if lone:
        cycles += tiles * pixels * (FAR_COST * _far_rows(spec, tiling, element) + LONE_COST * _lone_rows(spec, element))
    if tiling.direct and spec.gathered is None:
        distance = spec.x.spatial[2] * element
        cycles += tiles * pixels * FAR_COST * beyond_near_pages(slab_pixels, distance)
    if kept and kept + slab_pixels * per_split * element + panel * element > machine.l2_bytes * 3 // 4:
        rate = max(MEMORY_BYTES, SUMS_BYTES * min(1.0, SHARED_CACHE * 3 / 8 / (kept * machine.parts)))
        cycles += slabs * tiles * rows * width * element * 2 / rate

    dw = spec.dw
    write = SCATTER_COST
    if dw.into == 1:
        write = WRITE_COST
    elif machine.has_masks and (dw.out == 1 or dw.spatial[2] == 1):
        turned = TURNED_COST if dw.size * element <= machine.l2_bytes * 3 // 4 else LOST_COST
        write = WRITE_COST if dw.into * element < 256 else turned
    cycles += dw.size * write + dw.size * element * 2 / SHARED_BYTES
    if tiling.parts > 1:
        cycles += dw.size * tiling.parts * (KEEP_COST / lanes + element * 2 / SHARED_BYTES)
    return cycles / CLOCK


def _rate(size: int) -> float:
    return SHARED_BYTES if size <= SHARED_CACHE else MEMORY_BYTES


def _pack_cost(spec: WeightSpec, machine: Machine) -> float:
    if spec.x.dtype != spec.dtype:
        return GATHER_COST
    if spec.x.channel == 1:
        return COPY_COST
    if not spec.turns or not machine.has_masks:
        return GATHER_COST
    return TRANSPOSE_COST * (1 if spec.x.spatial[2] * spec.column_pace == 1 else 1.5)


def _tap_panel(spec: WeightSpec, tiling: WeightTiling, machine: Machine) -> TapPanel:
    """The panel of the rows of a spec that gathers."""
    return TapPanel.of(spec, tiling.rows, (tiling.lines, tiling.planes), machine.lanes(spec.dtype))


def _panel(spec: WeightSpec, tiling: WeightTiling, width: int) -> VectorPanel:
    """The panel of X."""
    return VectorPanel.of(spec, tiling.lines, tiling.planes, width, VECTOR if spec.turns else 1)


__all__: list[Any] = [
    "KIND",
    "candidates",
    "estimate",
    "invalid_cut",
    "other_cuts",
    "plan_weight",
    "refusal",
    "weight_spec",
]
