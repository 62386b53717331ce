# SPDX-License-Identifier: Apache-2.0
"""The kernel of forward and dgrad as an implicit GEMM: its tilings, and an estimate of the time of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.register_tile import balanced, tile_rows
from tvm_convgrad.core.catalogue import BACKWARD_DATA, FORWARD
from tvm_convgrad.core.exact import Array
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.borders import valid_range
from tvm_convgrad.kernels.contract import Kernel, Plan, planned
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.frame import conv_frame
from tvm_convgrad.kernels.gemm.ahead import packed, packs_ahead, panel_bounds
from tvm_convgrad.kernels.gemm.cycles import NEAR_WEIGHT_BYTES, block_bytes, bytes_of, estimate, phase_weight_bytes
from tvm_convgrad.kernels.gemm.kernel import PhaseGroup, largest_panel
from tvm_convgrad.kernels.gemm.regions import by_regions, by_whole_rows, reaches_beyond
from tvm_convgrad.kernels.gemm.taps import tap_ranges
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling, blocking_of, reads_padding
from tvm_convgrad.kernels.spec import ConvSpec, Phase, conv_spec, shapes_of
from tvm_convgrad.kernels.vectors import converts_halves

MAX_PANEL_BYTES = 1 << 26
"""The most bytes of a panel of the whole source."""

SINGLE_VECTOR_TILE_M, LONG_REDUCTION = 28, 256
"""tile_m of a tile of one vector of channels, which shares a load of W among more pixels, and the number of steps of a
reduction from which on that gains."""

MOST_OVERLAP = 0.98
"""What tiles of another size compute, relative to the largest ones of equal size, so that they are worth an estimate:
49 pixels are 4 tiles of 13 that overlap by 3 pixels, or 7 of 7."""

PART_SHARE = 0.75
"""The share of the L2 for the W of a part of the source's channels."""

NEST_COST = 0.015
"""The relative gain that each additional loop nest of a decomposition must bring: it takes time to compile, and work is
distributed less evenly."""

MOST_EXACT_TAPS, EXACT_GAIN = 7, 0.006
"""Tiles at the ends of a row sum the pixels of each tap by itself for at most so many taps along w, and if that saves
at least this part of a row's products for each of them: every tap is code, which TVM and LLVM take time to compile."""

MAX_CANDIDATES = 24
"""The most other plans that are given to the tuner."""

Refusal = Callable[[ConvSpec, tuple[Phase, ...], GemmTiling, Machine], str]
"""Why a tiling cannot be built for a group of phases on a machine, or nothing."""


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
        """The whole result as one spec, then its other decompositions: `Plan.region` is an index of it."""
        return regions_of(problem, direction)

    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The best tilings of the whole result, or of its regions where that gains more than more loop nests cost."""
        found = [(*self._best_tilings(each, machine), n) for n, each in enumerate(self.regions(problem, direction))]
        tilings, _, region = min(found, key=lambda each: each[1] * (1 + NEST_COST * len(each[0])))
        return Plan(tilings, region)

    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """The cycles of all loop nests, one after the other, until the last core is done, times the cores."""
        spec = self.regions(problem, direction)[plan.region]
        nests = zip(spec.phases, tilings_of(plan), strict=True)
        return sum(self.nest_cycles(spec, phases, t, machine) for phases, t in nests) * machine.parts / machine.clock

    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why one of the tilings cannot be built, or nothing."""
        regions = self.regions(problem, direction)
        if not 0 <= plan.region < len(regions):
            return f"region is {plan.region}; it must be from 0 to {len(regions) - 1}"
        spec = regions[plan.region]
        if len(plan.tilings) != len(spec.phases):
            return f"there are {len(plan.tilings)} tilings for {len(spec.phases)} loop nests of region {plan.region}"
        nests = zip(spec.phases, tilings_of(plan), strict=True)
        return next(filter(None, (self.nest_invalid(spec, phases, t, machine) for phases, t in nests)), "")

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (source, weight, [bias,] result)."""
        spec = self.regions(planned(problem), direction)[plan.region]
        tilings = tilings_of(plan)
        panel = largest_panel(spec, tilings, machine)
        halves = has_halves(spec, machine)
        frame = conv_frame(spec, shapes_of(problem, direction), epilogue, panel, halves=halves)
        for phases, tiling in zip(spec.phases, tilings, strict=True):
            PhaseGroup(frame, spec, phases, tiling, machine).emit()
        return frame.finish(name)

    def packed_weight(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, weight: Array
    ) -> Array | None:
        """The panels of W, if its elements are packed as they are."""
        spec = self.regions(planned(problem), direction)[plan.region]
        return packed(weight, spec, tilings_of(plan), machine) if packs_ahead(spec) else None

    def emit_packed(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (source, panels of W, [bias,] result)."""
        spec, tilings = self.regions(planned(problem), direction)[plan.region], tilings_of(plan)
        bounds = panel_bounds(spec, tilings, machine)
        shapes = {**shapes_of(problem, direction), "weight": ((bounds[-1],), spec.dtype)}
        panel = largest_panel(spec, tilings, machine)
        frame = conv_frame(spec, shapes, epilogue, panel, halves=has_halves(spec, machine))
        for phases, tiling, first in zip(spec.phases, tilings, bounds[:-1], strict=True):
            PhaseGroup(frame, spec, phases, tiling, machine, packed_at=first).emit()
        return frame.finish(name)

    def tilings(self, problem: ConvProblem, direction: str, own: Plan, machine: Machine) -> Iterator[Plan]:
        """One loop nest at a time has another tiling.

        The best estimate of each kind of tile comes first, then the second best of each, up to MAX_CANDIDATES in all.
        """
        spec, taken = self.regions(problem, direction)[own.region], tilings_of(own)
        found: list[tuple[int, float, tuple[GemmTiling, ...]]] = []
        nests = zip(spec.phases, taken, strict=True)
        costs = [self.nest_cycles(spec, phases, tiling, machine) for phases, tiling in nests]
        for number, phases in enumerate(spec.phases):
            ranks: dict[object, int] = {}
            every = {t: self.nest_cycles(spec, phases, t, machine) for t in self.candidates(spec, phases, machine)}
            for tiling, cost in sorted(every.items(), key=lambda pair: pair[1]):
                kind = replace(tiling, block_h=1, block_tiles=1, splits=1)
                ranks[kind] = ranks.get(kind, -1) + 1
                if tiling != taken[number]:
                    total = sum(costs) - costs[number] + cost
                    found.append((ranks[kind], total, (*taken[:number], tiling, *taken[number + 1 :])))
        for _, _, tilings in sorted(found, key=lambda each: each[:2])[:MAX_CANDIDATES]:
            yield Plan(tilings, own.region)

    # -- of one loop nest: kernels over other register tiles have their own -------------------------------------------

    def candidates(self, spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GemmTiling]:
        """Valid tilings of a group of phases that are worth an estimate; there is always one."""
        return candidates(spec, phases, machine)

    def nest_cycles(self, spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> float:
        """Cycles of the loop nest of a group of phases until the last core is done."""
        return estimate(spec, phases, tiling, machine)

    def nest_invalid(self, spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
        """Why a tiling cannot be built for a group of phases, or nothing."""
        return invalid(spec, phases, tiling, machine)

    def _best_tilings(self, spec: ConvSpec, machine: Machine) -> tuple[tuple[GemmTiling, ...], float]:
        """The tiling of least estimated time for each group of phases, and the cycles of all."""
        tilings, cycles = [], 0.0
        for phases in spec.phases:
            every = self.candidates(spec, phases, machine)
            costs = {tiling: self.nest_cycles(spec, phases, tiling, machine) for tiling in every}
            best = min(costs, key=lambda tiling: costs[tiling])
            tilings.append(best)
            cycles += costs[best]
        return tuple(tilings), cycles


@lru_cache(maxsize=1024)
def regions_of(problem: ConvProblem, direction: str) -> tuple[ConvSpec, ...]:
    """The whole result as one spec, then its other decompositions: `Plan.region` is an index of it."""
    spec = conv_spec(problem, direction)
    return spec, *by_regions(spec), *by_whole_rows(spec)


def tilings_of(plan: Plan) -> tuple[GemmTiling, ...]:
    """The tilings of a plan of this kernel.

    Raises:
        TypeError: the plan is of another kernel.
    """
    tilings = tuple(tiling for tiling in plan.tilings if isinstance(tiling, GemmTiling))
    if len(tilings) != len(plan.tilings):
        raise TypeError(f"{plan} is a plan of another kernel than the implicit GEMM")
    return tilings


def invalid(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
    """Why a tiling of vector registers cannot be built for a group of phases, or nothing."""
    sums = tiling.tile_m * tiling.tile_n
    if min(tiling.tile_m, tiling.tile_n) >= 1 and sums + tiling.tile_n + 1 > machine.registers:
        return f"{tiling.tile_m} x {tiling.tile_n} accumulators do not fit {machine.registers} registers"
    return invalid_blocks(spec, phases, tiling, machine)


def invalid_blocks(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
    """Why a tiling cannot be built for a group of phases, whatever its sums are kept in, or nothing."""
    _, h, w = (axis.count for axis in phases[0])
    if tiling.vector_axis not in ("channels", "pixels"):
        return f"vector_axis is {tiling.vector_axis}; it must be channels or pixels"
    if tiling.order not in ("source", "weights"):
        return f"order is {tiling.order}; it must be source or weights"
    if min(tiling.tile_m, tiling.tile_n, tiling.block_h, tiling.block_tiles, tiling.splits, tiling.tile_h) < 1:
        return "a number of the tiling is less than 1"
    if tiling.channel_parts < 1 or spec.source_channels % tiling.channel_parts:
        return f"channel_parts is {tiling.channel_parts}; it must divide the {spec.source_channels} channels"
    if h % tiling.block_h:
        return f"block_h is {tiling.block_h}; it must divide the {h} rows of the result"
    if tiling.over_pixels and any(reaches_beyond(spec, phase) for phase in phases):
        return "vector_axis is pixels; phases that reach beyond the result are stored by way of channels"
    if tiling.exact_columns and (tiling.over_pixels or len(phases) > 1 or not phases[0][2].taps):
        return "exact_columns needs vectors of channels, and one phase that has taps"
    if tiling.channel_parts > 1 and (reason := _invalid_parts(spec, phases, tiling)):
        return reason
    if tiling.over_pixels:
        return _invalid_pixels(spec, phases, tiling, machine)
    if tiling.tile_m % tiling.tile_h or tiling.block_h % tiling.tile_h:
        return f"tile_h is {tiling.tile_h}; it must divide tile_m, {tiling.tile_m}, and block_h, {tiling.block_h}"
    if tiling.tile_m // tiling.tile_h > w:
        return f"a row of the result has {w} pixels, fewer than a row of the tile"
    return _invalid_panel(spec, phases, tiling, machine)


def _invalid_parts(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling) -> str:
    if tiling.over_pixels or tiling.order != "weights":
        return f"channel_parts is {tiling.channel_parts}; it needs vectors of channels and the order weights"
    width, tile_w = phases[0][2].count, tiling.tile_m // tiling.tile_h
    if tile_w < 1 or width % tile_w:
        return f"channel_parts is {tiling.channel_parts}; tiles of {tile_w} columns would sum some of {width} twice"
    return ""


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


def has_halves(spec: ConvSpec, machine: Machine) -> bool:
    """Whether tensors of bfloat16 are viewed as HALF, so that vectors of them are converted in registers."""
    types = (spec.source.dtype, spec.weight.dtype, spec.result.dtype)
    return spec.pairs is None and "bfloat16" in types and converts_halves(machine, "bfloat16", spec.dtype)


def _invalid_panel(spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
    if tiling.unpacked:
        converts = tiling.over_pixels and spec.pairs is None and converts_halves(machine, spec.source.dtype, spec.dtype)
        if spec.source.dtype != spec.dtype and not converts:
            return f"an unpacked source must have the type of the sums, {spec.dtype}; it is {spec.source.dtype}"
        padding = reads_padding(spec, phases, blocking_of(spec, phases, tiling, machine).ranges)
        return "taps read padding, which an unpacked source does not have" if padding else ""
    blocking = blocking_of(spec, phases, tiling, machine)
    size = blocking.panel_size * DTYPE_BYTES[spec.dtype]
    if tiling.order == "weights":
        size *= spec.batch * spec.groups * blocking.panels(phases[0][0].count)
        if size > MAX_PANEL_BYTES:
            return f"the panel of the whole source takes {size} bytes, more than {MAX_PANEL_BYTES}"
    return ""


def candidates(spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GemmTiling]:
    """Valid tilings of vector registers that are worth an estimate; there is always one."""
    tiles = (replace(tile, exact_columns=_ends_gain(spec, phases, tile)) for tile in _tiles(spec, phases, machine))
    return blocked(spec, phases, machine, tiles, invalid)


def _ends_gain(spec: ConvSpec, phases: tuple[Phase, ...], tile: GemmTiling) -> bool:
    """Whether it gains more than its code costs to sum only pixels in bounds in a tile at an end of a row."""
    if tile.over_pixels or len(phases) > 1 or not phases[0][2].taps:
        return False
    tile_w, (steps, extents) = tile.tile_m // tile.tile_h, (spec.in_step, spec.source.extents)
    if tap_ranges(phases, steps, extents, tile.tile_h, tile_w).along_w is not None:
        return False
    axis = phases[0][2]
    valid = [valid_range(offset, steps[2], axis.count, extents[2]) for _, offset in axis.taps]
    taps, inside = len(axis.taps), sum(end - first for first, end in valid)
    return taps <= MOST_EXACT_TAPS and inside <= (1 - EXACT_GAIN * taps) * axis.count * taps


def blocked(
    spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine, tiles: Iterable[GemmTiling], refusal: Refusal
) -> Iterator[GemmTiling]:
    """Tilings with these register tiles that are worth an estimate, and that `refusal` does not refuse."""
    for tile in tiles:
        # Every tap would load its single pixels again, which lie far apart: all channels, or those of one group.
        apart = spec.source.channel != 1 or spec.groups > 1
        scattered = not tile.over_pixels and apart and _most_taps(phases) > 1
        for unpacked in (False,) if scattered else (True, False):
            for tiling in _blocked(spec, phases, machine, replace(tile, unpacked=unpacked), refusal):
                if not refusal(spec, phases, tiling, machine):
                    yield tiling


def _tiles(spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GemmTiling]:
    """Register tiles with vectors of channels, and with vectors of pixels, in spatial blocks of one tile."""
    _, h, w = (axis.count for axis in phases[0])
    lanes, channels = machine.lanes(spec.dtype), spec.result_channels
    most = machine.registers - 1
    piece = _columns_alike(spec, phases) or most + 1
    for tile_n in (1, 2, 3):
        limit = min(tile_rows(machine, tile_n), most)
        yield GemmTiling("channels", balanced(w, min(limit, w)), tile_n, 1, 1)
        if tile_n == 1 and spec.source_channels * _most_taps(phases) >= LONG_REDUCTION:
            limit = min(SINGLE_VECTOR_TILE_M, most - 2)
            yield GemmTiling("channels", balanced(w, min(limit, w)), tile_n, 1, 1)
        if tile_n > 1 and w > limit // 2:
            yield GemmTiling("channels", balanced(w, min(limit // 2 + 1, w)), tile_n, 1, 1)
            exact = min(range(limit // 2 + 2, min(limit, w) + 1), key=lambda m: (round_up(w, m), -m), default=w)
            if round_up(w, exact) < MOST_OVERLAP * round_up(w, balanced(w, limit)):
                yield GemmTiling("channels", exact, tile_n, 1, 1)
        for tile_h in (n for n in range(2, limit // w + 1) if h % n == 0):
            yield GemmTiling("channels", tile_h * w, tile_n, tile_h, 1, tile_h=tile_h)
        for tile_h in (n for n in range(1, limit // piece + 1) if h % n == 0):
            yield GemmTiling("channels", tile_h * piece, tile_n, tile_h, 1, tile_h=tile_h)
    if spec.result.channel == 1 and channels >= lanes // 2:
        return
    for tile_n in (1, 2, 3, 4, 5, 6, 7):
        tile_m = min(tile_rows(machine, tile_n), channels)
        if tile_m < 1 or (tile_n > 1 and (tile_n - 1) * lanes >= w):
            break
        yield GemmTiling("pixels", balanced(channels, tile_m), tile_n, 1, 1)


def _columns_alike(spec: ConvSpec, phases: tuple[Phase, ...]) -> int:
    """The most consecutive columns of a tile such that all taps of all tiles are in bounds everywhere or nowhere.

    It is 0 where that is a single column, or all of them.
    """
    columns = phases[0][2].count
    borders = {columns}
    for phase in phases:
        for _, offset in phase[2].taps:
            borders |= set(valid_range(offset, spec.in_step[2], columns, spec.source.extents[2]))
    alike = math.gcd(*borders)
    return alike if 1 < alike < columns else 0


def _most_taps(phases: tuple[Phase, ...]) -> int:
    """The taps of the phase that has most."""
    return max(math.prod(len(axis.taps) for axis in phase) for phase in phases)


def _blocked(
    spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine, tile: GemmTiling, refusal: Refusal
) -> Iterator[GemmTiling]:
    """The spatial blocks, orders and splits of a register tile."""
    if refusal(spec, phases, tile, machine):
        return
    _, h, _ = (axis.count for axis in phases[0])
    tiles_w, source_bytes = blocking_of(spec, phases, tile, machine).tiles_w, bytes_of(spec.source)
    budget = machine.l2_bytes // 4
    heights = [n for n in range(tile.tile_h, h + 1) if h % n == 0 and n % tile.tile_h == 0]
    widths = sorted({-(-tiles_w // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)} | {1})
    for block_tiles in widths:
        for block_h in heights if block_tiles == tiles_w else heights[:1]:
            tiling = replace(tile, block_h=block_h, block_tiles=block_tiles)
            blocking = blocking_of(spec, phases, tiling, machine)
            bytes_ = block_bytes(spec, blocking, tiling)
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
                kept = block_h * blocking.block_w * blocking.channel_block * len(phases) * DTYPE_BYTES[spec.dtype]
                parts = {1, _channel_parts(spec, blocking, machine) if kept <= budget else 1}
                for splits in sorted({1, min(2, blocks), min(machine.parts, blocks)}):
                    for count in sorted(parts):
                        yield replace(tiling, order="weights", splits=splits, channel_parts=count)


def _channel_parts(spec: ConvSpec, blocking: Blocking, machine: Machine) -> int:
    """The fewest parts of the source's channels whose W leaves room in the L2; 1 if all of W may be read again."""
    weight_bytes = phase_weight_bytes(spec, blocking)
    if weight_bytes <= NEAR_WEIGHT_BYTES:
        return 1
    dividing = (n for n in range(2, spec.source_channels + 1) if spec.source_channels % n == 0)
    return next((n for n in dividing if weight_bytes <= n * machine.l2_bytes * PART_SHARE), 1)


KERNELS = (ImplicitGemm(),)

__all__ = [
    "KERNELS",
    "ImplicitGemm",
    "blocked",
    "candidates",
    "invalid",
    "invalid_blocks",
    "regions_of",
    "tilings_of",
]
