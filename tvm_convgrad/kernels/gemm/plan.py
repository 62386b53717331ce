# SPDX-License-Identifier: Apache-2.0
"""The kernel of forward and dgrad as an implicit GEMM: its tilings, and an estimate of the time of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine, beyond_near_pages
from tvm_convgrad.codegen.register_tile import balanced, tile_rows
from tvm_convgrad.core.catalogue import BACKWARD_DATA, FORWARD
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Kernel, Plan, planned
from tvm_convgrad.kernels.costs import GEMM, overlapped
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.frame import conv_frame
from tvm_convgrad.kernels.gemm.kernel import PhaseGroup, largest_panel
from tvm_convgrad.kernels.gemm.regions import by_regions
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling, blocking_of, in_bounds
from tvm_convgrad.kernels.spec import ConvSpec, Phase, View, WeightView, conv_spec, shapes_of

FAR_VECTOR_CYCLES = 3.3
"""Cycles to load a vector of pixels of one channel: channels lie far apart, so that no hardware prefetcher predicts it,
and the vector may straddle two cache lines."""

FAR_PAGE_CYCLES = 1.0
"""Additional cycles of a step whose channels lie in more pages than are near: each pass over them misses the TLB."""

WEIGHT_VECTOR_CYCLES = 0.3
"""Additional cycles of a step for each vector of W, if a block of W does not fit the first-level cache."""

SPLIT_LINE_CYCLES = 1.9
"""Additional cycles of a vector of pixels, if the bytes of a channel are not a multiple of a cache line: most vectors
then straddle two lines."""

SHORT_REDUCTION = 64
"""A reduction of fewer steps is short: the start of the next register tile has to hide the end of this one."""

WIDE_TILE_PENALTY = 0.01
"""The relative additional cost of a step of a short reduction for each accumulator beyond 16, as out-of-order execution
then reaches less far into the next tile."""

WORD_WIDE_TILE_PENALTY = 0.025
"""The same where pairs of bfloat16 are words: a dot product takes longer than a multiply-add."""

FEW_STEPS, FEW_STEPS_CYCLES = 8, 1.0
"""A loop over fewer channels than FEW_STEPS costs so many additional cycles a step."""

TRANSPOSED_STORE_CYCLES = 16.0
"""Cycles to store a vector of results that is transposed on its way."""

FAR_COPY_CYCLES = 0.8
"""Cycles to pack an element in the order of memory where channels lie far apart."""

FETCH_CYCLES = 0.6
"""Additional cycles to pack an element from beyond the core's own cache before anything is summed."""

TOUCH_CYCLES = 8.0
"""Cycles of the first vectors that a tile reads of a channel of the unpacked source."""

PIXEL_TOUCH_CYCLES, FAR_TOUCH_CYCLES = 8.0, 28.0
"""Cycles of the first pixels that a tile reads of such a channel one by one, and additional cycles if the channels lie
in more pages than are near."""

RATE_WHILE_STORING = 0.75
"""The share of the shared cache's rate that remains for reads while results are stored."""

EXPOSED = 0.15
"""The share of the time of a stream from the shared cache that the arithmetic of a tile never hides."""

RATE_WHILE_PACKING = 5 / 3
"""The rate of panels that all cores pack before they compute, relative to the shared cache's rate; it is above 1
because a part of a panel stays in the core's own cache."""

SAME_SET_PENALTY = 0.3
"""The relative additional cost of the arithmetic if rows are whole pages apart and fall into the same cache sets."""

ITEM_CYCLES = 1500.0
"""Cycles to start and end a work item."""

MAX_PANEL_BYTES = 1 << 26
"""The most bytes of a panel of the whole source."""

SINGLE_VECTOR_TILE_M, LONG_REDUCTION = 28, 256
"""tile_m of a tile of one vector of channels, which shares a load of W among more pixels, and the number of steps of a
reduction from which on that gains."""

NEST_COST = 0.015
"""The relative gain that each additional loop nest of a decomposition must bring: it takes time to compile, and work is
distributed less evenly."""

MAX_CANDIDATES = 24
"""The most other plans that are given to the tuner."""

WORD_TRANSPOSE, FAR_WORD = 0.5, 0.6
"""Factors where pairs of bfloat16 are words: of the cycles to transpose, as fewer bytes are moved; and of those to pack
a word in the order of memory where channels lie far apart, as each word has two channels."""


class ImplicitGemm(Kernel):
    """Forward and dgrad: W as one matrix of a GEMM, the source's taps as the other. It takes every problem."""

    name = "implicit GEMM"
    directions = (FORWARD.name, BACKWARD_DATA.name)
    reason = "covers the problem"

    def tiling_type(self, direction: str) -> type[GemmTiling]:
        """`GemmTiling`, for both directions."""
        return GemmTiling

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Nothing."""
        return ""

    def regions(self, problem: ConvProblem, direction: str) -> tuple[ConvSpec, ...]:
        """The whole result as one spec, then its decompositions into regions: `Plan.region` is an index of it."""
        return regions_of(problem, direction)

    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The best tilings of the whole result, or of its regions where that gains more than more loop nests cost."""
        found = [(*_best_tilings(each, machine), n) for n, each in enumerate(self.regions(problem, direction))]
        tilings, _, region = min(found, key=lambda each: each[1] * (1 + NEST_COST * len(each[0])))
        return Plan(tilings, region)

    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """The cycles of all loop nests, one after the other, until the last core is done, times the cores."""
        spec = self.regions(problem, direction)[plan.region]
        nests = zip(spec.phases, tilings_of(plan), strict=True)
        return sum(estimate(spec, phases, t, machine) for phases, t in nests) * machine.parts / machine.clock

    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why one of the tilings cannot be built, or nothing."""
        regions = self.regions(problem, direction)
        if not 0 <= plan.region < len(regions):
            return f"region is {plan.region}; it must be from 0 to {len(regions) - 1}"
        spec = regions[plan.region]
        if len(plan.tilings) != len(spec.phases):
            return f"there are {len(plan.tilings)} tilings for {len(spec.phases)} loop nests of region {plan.region}"
        nests = zip(spec.phases, tilings_of(plan), strict=True)
        return next(filter(None, (invalid(spec, phases, t, machine) for phases, t in nests)), "")

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (source, weight, [bias,] result)."""
        spec = self.regions(planned(problem), direction)[plan.region]
        tilings = tilings_of(plan)
        frame = conv_frame(spec, shapes_of(problem, direction), epilogue, largest_panel(spec, tilings, machine))
        for phases, tiling in zip(spec.phases, tilings, strict=True):
            PhaseGroup(frame, spec, phases, tiling, machine).emit()
        return frame.finish(name)

    def tilings(self, problem: ConvProblem, direction: str, own: Plan, machine: Machine) -> Iterator[Plan]:
        """One loop nest at a time has another tiling.

        The best estimate of each kind of tile comes first, then the second best of each, up to MAX_CANDIDATES in all.
        """
        spec, taken = self.regions(problem, direction)[own.region], tilings_of(own)
        found: list[tuple[int, float, tuple[GemmTiling, ...]]] = []
        costs = [estimate(spec, phases, tiling, machine) for phases, tiling in zip(spec.phases, taken, strict=True)]
        for number, phases in enumerate(spec.phases):
            ranks: dict[object, int] = {}
            every = {t: estimate(spec, phases, t, machine) for t in candidates(spec, phases, machine)}
            for tiling, cost in sorted(every.items(), key=lambda pair: pair[1]):
                kind = replace(tiling, block_h=1, block_tiles=1, splits=1)
                ranks[kind] = ranks.get(kind, -1) + 1
                if tiling != taken[number]:
                    total = sum(costs) - costs[number] + cost
                    found.append((ranks[kind], total, (*taken[:number], tiling, *taken[number + 1 :])))
        for _, _, tilings in sorted(found, key=lambda each: each[:2])[:MAX_CANDIDATES]:
            yield Plan(tilings, own.region)


@lru_cache(maxsize=1024)
def regions_of(problem: ConvProblem, direction: str) -> tuple[ConvSpec, ...]:
    """The whole result as one spec, then its decompositions into regions: `Plan.region` is an index of it."""
    spec = conv_spec(problem, direction)
    return spec, *by_regions(spec)


def tilings_of(plan: Plan) -> tuple[GemmTiling, ...]:
    """The tilings of a plan of this kernel.

    Raises:
        TypeError: the plan is of another kernel.
    """
    tilings = tuple(tiling for tiling in plan.tilings if isinstance(tiling, GemmTiling))
    if len(tilings) != len(plan.tilings):
        raise TypeError(f"{plan} is a plan of another kernel than the implicit GEMM")
    return tilings


def _best_tilings(spec: ConvSpec, machine: Machine) -> tuple[tuple[GemmTiling, ...], float]:
    """The tiling of least estimated time for each group of phases, and the cycles of all."""
    tilings, cycles = [], 0.0
    for phases in spec.phases:
        costs = {tiling: estimate(spec, phases, tiling, machine) for tiling in candidates(spec, phases, machine)}
        best = min(costs, key=lambda tiling: costs[tiling])
        tilings.append(best)
        cycles += costs[best]
    return tuple(tilings), cycles


def invalid(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
    """Why a tiling cannot be built for a group of phases, or nothing."""
    _, h, w = (axis.count for axis in phases[0])
    if tiling.vector_axis not in ("channels", "pixels"):
        return f"vector_axis is {tiling.vector_axis}; it must be channels or pixels"
    if tiling.order not in ("source", "weights"):
        return f"order is {tiling.order}; it must be source or weights"
    if min(tiling.tile_m, tiling.tile_n, tiling.block_h, tiling.block_tiles, tiling.splits, tiling.tile_h) < 1:
        return "a number of the tiling is less than 1"
    if tiling.tile_m * tiling.tile_n + tiling.tile_n + 1 > machine.registers:
        return f"{tiling.tile_m} x {tiling.tile_n} accumulators do not fit {machine.registers} registers"
    if h % tiling.block_h:
        return f"block_h is {tiling.block_h}; it must divide the {h} rows of the result"
    if tiling.over_pixels:
        return _invalid_pixels(spec, phases, tiling, machine)
    if tiling.tile_m % tiling.tile_h or tiling.block_h % tiling.tile_h:
        return f"tile_h is {tiling.tile_h}; it must divide tile_m, {tiling.tile_m}, and block_h, {tiling.block_h}"
    if tiling.tile_m // tiling.tile_h > w:
        return f"a row of the result has {w} pixels, fewer than a row of the tile"
    return _invalid_panel(spec, phases, tiling, machine)


def _invalid_pixels(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
    if tiling.tile_h != 1:
        return f"tile_h is {tiling.tile_h}; a vector of pixels lies in one row"
    if tiling.tile_m > spec.result_channels:
        return f"tile_m is {tiling.tile_m}; there are {spec.result_channels} result channels"
    if blocking_of(spec, phases, tiling, machine).step_w != 1:
        return "consecutive results do not read consecutive pixels"
    if tiling.unpacked and phases[0][2].count < tiling.tile_n * machine.lanes(spec.dtype):
        return "the vectors are longer than a row of the result"
    return _invalid_panel(spec, phases, tiling, machine)


def _invalid_panel(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
    if tiling.unpacked:
        if spec.source.dtype != spec.dtype:
            return f"an unpacked source must have the type of the sums, {spec.dtype}; it is {spec.source.dtype}"
        return "" if in_bounds(spec, phases) else "taps read padding, which an unpacked source does not have"
    blocking = blocking_of(spec, phases, tiling, machine)
    size = blocking.panel_size * DTYPE_BYTES[spec.dtype]
    if tiling.order == "weights":
        size *= spec.batch * spec.groups * blocking.panels(phases[0][0].count)
        if size > MAX_PANEL_BYTES:
            return f"the panel of the whole source takes {size} bytes, more than {MAX_PANEL_BYTES}"
    return ""


def candidates(spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GemmTiling]:
    """Valid tilings that are worth an estimate; there is always one."""
    for tile in _tiles(spec, phases, machine):
        # Every tap would load its single pixels from all channels again, which lie far apart.
        scattered = not tile.over_pixels and spec.source.channel != 1 and _most_taps(phases) > 1
        for unpacked in (False,) if scattered else (True, False):
            for tiling in _blocked(spec, phases, machine, replace(tile, unpacked=unpacked)):
                if not invalid(spec, phases, tiling, machine):
                    yield tiling


def _tiles(spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GemmTiling]:
    """Register tiles with vectors of channels, and with vectors of pixels, in spatial blocks of one tile."""
    _, h, w = (axis.count for axis in phases[0])
    lanes, channels = machine.lanes(spec.dtype), spec.result_channels
    most = machine.registers - 1
    for tile_n in (1, 2, 3):
        limit = min(tile_rows(machine, tile_n), most)
        yield GemmTiling("channels", balanced(w, min(limit, w)), tile_n, 1, 1)
        if tile_n == 1 and spec.source_channels * _most_taps(phases) >= LONG_REDUCTION:
            limit = min(SINGLE_VECTOR_TILE_M, most - 2)
            yield GemmTiling("channels", balanced(w, min(limit, w)), tile_n, 1, 1)
        if tile_n > 1 and w > limit // 2:
            yield GemmTiling("channels", balanced(w, min(limit // 2 + 1, w)), tile_n, 1, 1)
        for tile_h in (n for n in range(2, limit // w + 1) if h % n == 0):
            yield GemmTiling("channels", tile_h * w, tile_n, tile_h, 1, tile_h=tile_h)
    if spec.result.channel == 1 and channels >= lanes // 2:
        return
    for tile_n in (1, 2, 3, 4, 5, 6, 7):
        tile_m = min(tile_rows(machine, tile_n), channels)
        if tile_m < 1 or (tile_n > 1 and (tile_n - 1) * lanes >= w):
            break
        yield GemmTiling("pixels", balanced(channels, tile_m), tile_n, 1, 1)


def _most_taps(phases: tuple[Phase, ...]) -> int:
    """The taps of the phase that has most."""
    return max(math.prod(len(axis.taps) for axis in phase) for phase in phases)


def _blocked(spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine, tile: GemmTiling) -> Iterator[GemmTiling]:
    """The spatial blocks, orders and splits of a register tile."""
    if invalid(spec, phases, tile, machine):
        return
    _, h, _ = (axis.count for axis in phases[0])
    tiles_w, source_bytes = blocking_of(spec, phases, tile, machine).tiles_w, _bytes(spec.source)
    budget = machine.l2_bytes // 4
    heights = [n for n in range(tile.tile_h, h + 1) if h % n == 0 and n % tile.tile_h == 0]
    widths = sorted({-(-tiles_w // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)} | {1})
    for block_tiles in widths:
        for block_h in heights if block_tiles == tiles_w else heights[:1]:
            tiling = replace(tile, block_h=block_h, block_tiles=block_tiles)
            blocking = blocking_of(spec, phases, tiling, machine)
            bytes_ = _block_bytes(spec, blocking, tiling)
            smallest = block_tiles == 1 and block_h == heights[0]
            if bytes_ <= budget or smallest:
                yield tiling
                for splits in (2, 4, machine.parts, 2 * machine.parts):
                    if blocking.channel_blocks >= splits > 1:
                        yield replace(tiling, splits=splits)
            # Vectors of pixels of a panel of the whole source come from far apart, channel after channel: no hardware
            # prefetcher predicts them.
            near = not tile.over_pixels or source_bytes <= machine.l2_bytes
            if near and block_tiles == tiles_w and (block_h == heights[-1] or bytes_ <= budget):
                blocks = spec.batch * phases[0][0].count * blocking.spatial_blocks
                for splits in sorted({1, min(2, blocks), min(machine.parts, blocks)}):
                    yield replace(tiling, order="weights", splits=splits)


def _block_bytes(spec: ConvSpec, blocking: Blocking, tiling: GemmTiling) -> int:
    """Bytes of the source that a spatial block reads, from its panel or in place."""
    element = DTYPE_BYTES[spec.dtype]
    if not tiling.unpacked:
        return int(blocking.panel_size * element * blocking.read_share(tiling.block_h, spec.source.extents[1]))
    return blocking.block_w * tiling.block_h * spec.in_step[1] * spec.in_step[2] * spec.source_channels * element


def estimate(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> float:
    """Cycles until the last core is done: arithmetic, packing, stores, and traffic beyond the core's own cache."""
    blocking = blocking_of(spec, phases, tiling, machine)
    lanes, element = machine.lanes(spec.dtype), DTYPE_BYTES[spec.dtype]
    depth, h, _ = (axis.count for axis in phases[0])
    channels, groups, parts = spec.source_channels, spec.groups, machine.parts
    images = spec.batch * depth
    tiles = images * groups * blocking.channel_blocks * (h // tiling.tile_h) * blocking.tiles_w
    accumulators = tiling.tile_m * tiling.tile_n
    latency = machine.fma_latency if spec.pairs is None else machine.dot_latency
    step = max(accumulators / machine.fmas, (tiling.tile_m + tiling.tile_n) * GEMM.load, latency) + GEMM.step
    if not tiling.over_pixels and channels * blocking.run < FEW_STEPS:
        step += FEW_STEPS_CYCLES
    if blocking.tap_count * channels < SHORT_REDUCTION * len(phases):
        penalty = WIDE_TILE_PENALTY if spec.pairs is None else WORD_WIDE_TILE_PENALTY
        step *= 1 + penalty * max(0, accumulators - 16)
    if tiling.over_pixels:
        step = max(step, FAR_VECTOR_CYCLES * tiling.tile_n + tiling.tile_m / machine.fmas + GEMM.step)
    if tiling.over_pixels and tiling.unpacked:
        step += FAR_PAGE_CYCLES * beyond_near_pages(channels, spec.source.channel * element)
        if spec.source.channel * element % machine.line_bytes:
            step += SPLIT_LINE_CYCLES * tiling.tile_n
    if (
        not tiling.over_pixels
        and blocking.channel_block * blocking.tap_count * channels * element > machine.l1_bytes * len(phases)
    ):
        step += WEIGHT_VECTOR_CYCLES * tiling.tile_n
    arithmetic = tiles * blocking.tap_count * blocking.ranges.share * channels * step
    transposed = not tiling.over_pixels and spec.result.channel != 1
    scattered = tiling.over_pixels and spec.result.spatial[2] * spec.out_step[2] != 1
    narrow = WORD_TRANSPOSE if spec.pairs is not None and spec.result.dtype != spec.dtype else 1.0
    store = TRANSPOSED_STORE_CYCLES * narrow if transposed else lanes * GEMM.scalar if scattered else GEMM.store
    work = arithmetic + tiles * len(phases) * (accumulators * store + GEMM.tile)
    # The source.
    blocks = images * groups * blocking.spatial_blocks
    panels = spec.batch * groups * blocking.panels(depth) * (1.0 if blocking.whole_depth else blocking.ranges.share_d)
    copied = GEMM.copy
    if tiling.over_pixels or spec.source.channel != 1:
        copied = FAR_COPY_CYCLES if tiling.over_pixels and spec.source.channel != 1 else GEMM.transpose
    made = spec.pairs is not None and spec.pairs.source != 0
    if made and spec.source.spatial[2] == 1:
        copied *= FAR_WORD if tiling.over_pixels else WORD_TRANSPOSE
    if (spec.source.dtype != spec.dtype and not made) or not machine.has_masks:
        copied = GEMM.scalar
    splits, copies = (tiling.splits, 1) if tiling.order == "source" else (1, tiling.splits)
    panel = 0 if tiling.unpacked else blocking.panel_size * blocking.packed_share(spec, tiling.block_h)
    if _bytes(spec.source) > machine.l2_bytes and tiling.order == "weights":
        copied += FETCH_CYCLES
    work += panels * splits * panel * copied
    if tiling.unpacked and spec.source.channel != 1:
        again = tiles if tiling.order == "weights" else tiles / blocking.channel_blocks
        touch = TOUCH_CYCLES
        if not tiling.over_pixels:
            touch = PIXEL_TOUCH_CYCLES + FAR_TOUCH_CYCLES * beyond_near_pages(channels, spec.source.channel * element)
        work += again * channels * touch
    # W.
    weights = groups * blocking.channel_blocks * blocking.channel_block * blocking.tap_count * channels
    contiguous = spec.weight_result_stride == 1
    transposable = spec.weight_source_stride == 1 or spec.weight_source_stride == blocking.tap_count
    per_weight = GEMM.copy if contiguous else GEMM.transpose if transposable else 2 * GEMM.transpose
    work += weights * copies * per_weight
    # Streams from beyond the core's own cache: W for the first tile of each spatial block, the source for every tile.
    weight_bytes = blocking.channel_block * blocking.tap_count * channels * element
    source_bytes: float = _block_bytes(spec, blocking, tiling)
    if blocking.whole_depth:  # of all depth slices, a block reads those that its taps reach
        source_bytes *= min(1.0, len(phases[0][0].taps) / len(blocking.panel_slices))
    tile_bytes = source_bytes * blocks * blocking.channel_blocks / tiles
    if tiling.order == "source":
        items, largest = (
            blocks * tiling.splits,
            -(-blocking.channel_blocks // tiling.splits) / (blocking.channel_blocks * blocks),
        )
        work += 2 * weights * element / (RATE_WHILE_PACKING * machine.shared_rate)
        beyond_w = _beyond(weights / groups * element, source_bytes, machine)
        beyond_source = _beyond(source_bytes, weight_bytes, machine)
    else:
        pieces = images * blocking.spatial_blocks
        items, largest = (
            groups * blocking.channel_blocks * copies,
            -(-pieces // copies) / (pieces * groups * blocking.channel_blocks),
        )
        beyond_w = _beyond(weight_bytes, source_bytes, machine)
        whole = panels * panel * element / groups if blocking.whole_depth else pieces * source_bytes
        beyond_source = _beyond(whole, weight_bytes, machine)
        work += 0 if tiling.unpacked else 2 * panels * panel * element / (RATE_WHILE_PACKING * machine.shared_rate)
    for beyond, times, bytes_ in (
        (beyond_w, blocks * blocking.channel_blocks, weight_bytes),
        (beyond_source, tiles, tile_bytes),
    ):
        stream = beyond * bytes_ / (RATE_WHILE_STORING * machine.shared_rate)
        work += times * max(EXPOSED * stream, stream - arithmetic / tiles)
    if tiling.unpacked and not tiling.over_pixels and blocking.step_w * element % machine.page_bytes == 0:
        work += arithmetic * SAME_SET_PENALTY
    work += items * ITEM_CYCLES
    total = work * min(1.0, -(-items // parts) * largest)
    memory = (_bytes(spec.source) + _bytes(spec.weight) + _bytes(spec.result)) / parts / machine.mixed_rate
    return overlapped(total, memory)


def _bytes(view: View | WeightView) -> int:
    """Bytes of a tensor."""
    return view.size * DTYPE_BYTES[view.dtype]


def _beyond(streamed: float, kept: float, machine: Machine) -> float:
    """The share of `streamed` bytes, read repeatedly, that the core's own cache does not hold besides `kept` bytes."""
    return min(1.0, max(0.0, (streamed + kept - machine.l2_bytes) / streamed)) if streamed else 0.0


KERNELS = (ImplicitGemm(),)

__all__ = ["KERNELS", "ImplicitGemm", "candidates", "estimate", "invalid", "regions_of"]
