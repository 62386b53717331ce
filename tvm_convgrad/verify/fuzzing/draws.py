# SPDX-License-Identifier: Apache-2.0
"""How the fuzzer draws cases of each kernel: its problems, its share, and a random plan of all that it accepts.

Plans are not only those that the kernel's estimate considers, but all that its `invalid` accepts: every order of
loops, split, panel, prefetch and transposition. A kernel that has no entry here is drawn from the plans that it gives
the tuner, with random values in their fields.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.tile_product import ROWS, TileGrid
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Kernel, Plan, Tiling
from tvm_convgrad.kernels.depthwise import channels_plan, columns_plan
from tvm_convgrad.kernels.depthwise.channels import ChannelsTiling
from tvm_convgrad.kernels.depthwise.channels_wgrad import ChannelsWgradTiling
from tvm_convgrad.kernels.depthwise.columns import ColumnsTiling, rows_per_vector
from tvm_convgrad.kernels.depthwise.columns_plan import not_converted, wgrad_rows_per_vector, x_not_converted
from tvm_convgrad.kernels.depthwise.columns_wgrad import ColumnsWgradTiling
from tvm_convgrad.kernels.gemm import plan as gemm_plan
from tvm_convgrad.kernels.gemm.amx import HalfTileGemm, TileGemm
from tvm_convgrad.kernels.gemm.dot import DotGemm
from tvm_convgrad.kernels.gemm.tiling import GemmTiling
from tvm_convgrad.kernels.registry import all_kernels
from tvm_convgrad.kernels.spec import ConvSpec, Phase, conv_spec
from tvm_convgrad.kernels.wgrad import plan as wgrad_plan
from tvm_convgrad.kernels.wgrad.amx import HalfTileWgrad, TileWgrad
from tvm_convgrad.kernels.wgrad.dot import DotWgrad
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, WgradTiling
from tvm_convgrad.kernels.winograd import plan as winograd_plan
from tvm_convgrad.verify.fuzzing.problems import ANY, DEPTHWISE, HALF_PAIRS, PAIRS, SMALL_GROUPS, SQUARE

TRIES = 300
"""Random tilings that are drawn until one is valid; after them a known valid one is taken."""

T = TypeVar("T")


@dataclass(frozen=True)
class Draw:
    """How a kernel is drawn.

    Attributes:
        problems: the regime of problems that are drawn for it.
        weight: its share of the cases, relative to the others.
        plan: a random valid plan for a problem, a direction and a machine.
    """

    problems: str
    weight: int
    plan: Callable[[Kernel, random.Random, ConvProblem, str, Machine], Plan]


def draw_of(kernel: Kernel) -> Draw:
    """How a kernel is drawn: its entry in DRAWS, or else its own plans with another value in one field."""
    return DRAWS.get(type(kernel), Draw(ANY, 1, _any_plan))


def _any_plan(kernel: Kernel, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
    own = kernel.plan(problem, direction, machine)
    known = [own, *itertools.islice(kernel.tilings(problem, direction, own, machine), 50)]
    place = rng.randrange(len(own.tilings))

    def draw() -> Plan:
        tilings = list(rng.choice(known).tilings)
        tilings[place] = changed(rng, tilings[place])
        return replace(own, tilings=tuple(tilings))

    return _until_valid(draw, lambda plan: kernel.invalid(problem, direction, plan, machine), lambda: rng.choice(known))


def drawn_kernels() -> list[Kernel]:
    """All kernels, those of DRAWS first and in its order."""
    order = {kind: number for number, kind in enumerate(DRAWS)}
    return sorted(all_kernels(), key=lambda kernel: order.get(type(kernel), len(order)))


def changed(rng: random.Random, tiling: Tiling) -> Tiling:
    """A tiling with another value in one of its fields, valid or not."""
    name = rng.choice([item.name for item in fields(tiling)])
    value = getattr(tiling, name)
    other: object = rng.choice((0, 1, 2, 3, 4, 5, 7, 16, 31))
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, str):
        other = rng.choice(("channels", "pixels", "source", "weights"))
    return replace(tiling, **{name: other})


def _until_valid(draw: Callable[[], T], invalid: Callable[[T], str], last: Callable[[], T]) -> T:
    """The first valid one of TRIES drawn tilings or plans, else `last`."""
    for _ in range(TRIES):
        tiling = draw()
        if not invalid(tiling):
            return tiling
    return last()


def _one_tiling(
    kernel: Kernel, problem: ConvProblem, direction: str, machine: Machine, draw: Callable[[], Tiling], last: Tiling
) -> Plan:
    """A plan of one drawn tiling that the kernel accepts, else of `last`."""

    def invalid(plan: Plan) -> str:
        return kernel.invalid(problem, direction, plan, machine)

    return _until_valid(lambda: Plan((draw(),)), invalid, lambda: Plan((last,)))


def _up_to(rng: random.Random, most: int) -> int:
    """A number from 1 to `most`: small, any, or the largest."""
    most = max(1, most)
    return rng.choice((1, min(2, most), most, rng.randint(1, most), rng.randint(1, most)))


def _maybe(rng: random.Random) -> bool:
    return rng.random() < 0.5


# ------------------------------------------------------------------------------------------------- implicit GEMM


def _gemm(kernel: Kernel, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
    """A decomposition into regions, and for each of its loop nests a tiling of its own."""
    assert isinstance(kernel, gemm_plan.ImplicitGemm)
    regions = kernel.regions(problem, direction)
    region = rng.randrange(len(regions))
    spec = regions[region]
    return Plan(tuple(_gemm_tiling(kernel, rng, spec, phases, machine) for phases in spec.phases), region)


def _gemm_tiling(
    kernel: gemm_plan.ImplicitGemm, rng: random.Random, spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine
) -> GemmTiling:
    """Every field is drawn independently, within what registers and channels allow."""
    _, h, w = (axis.count for axis in phases[0])
    lanes, in_tiles = machine.lanes(spec.dtype), isinstance(kernel, TileGemm)
    divisors = [n for n in range(1, h + 1) if h % n == 0]
    # Only sources whose padding is never read can be read in place, and 1x1 kernels have a prefetch of their own there.
    often = 0.7 if max(len(axis.taps) for phase in phases for axis in phase) == 1 else 0.4

    def draw() -> GemmTiling:
        over_pixels = not in_tiles and rng.random() < max(often, 0.5)
        tile_n = rng.choice((1, 1, 2, 3, rng.randint(1, 7)))
        most = TileGrid.most_pieces(tile_n) * ROWS if in_tiles else (machine.registers - 1 - tile_n) // tile_n
        block_h = rng.choice(divisors)
        tile_h = 1 if over_pixels or _maybe(rng) else rng.choice([n for n in divisors if block_h % n == 0])
        if over_pixels:
            tile_m = _up_to(rng, min(most, spec.result_channels))
            tiles = -(-w // (tile_n * lanes))
        else:
            limit = max(1, min(most // tile_h, w))
            # Columns of padding are skipped only by tiles that divide a row.
            tile_w = rng.choice((_up_to(rng, limit), rng.choice([n for n in range(1, limit + 1) if w % n == 0])))
            tile_m, tiles = tile_w * tile_h, -(-w // tile_w)
        vector_axis = "pixels" if over_pixels else "channels"
        order = rng.choice(("source", "weights"))
        block_tiles = _up_to(rng, tiles)
        unpacked = rng.random() < often
        exact = len(phases) == 1 and not over_pixels and not in_tiles and _maybe(rng)
        splits, parts = _up_to(rng, 5), 1
        if order == "weights" and not (over_pixels or in_tiles or w % (tile_m // tile_h)) and _maybe(rng):
            parts = rng.choice([n for n in range(1, spec.source_channels + 1) if spec.source_channels % n == 0])
        return GemmTiling(
            vector_axis, tile_m, tile_n, block_h, block_tiles, order, splits, unpacked, tile_h, exact, parts
        )

    return _until_valid(
        draw,
        lambda tiling: kernel.nest_invalid(spec, phases, tiling, machine),
        lambda: rng.choice(list(kernel.candidates(spec, phases, machine))),
    )


def _wgrad(kernel: Kernel, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
    """Every field is drawn independently."""
    assert isinstance(kernel, wgrad_plan.ImplicitGemmWgrad)
    spec = kernel.spec(problem, machine)
    in_tiles = isinstance(kernel, TileWgrad)
    swaps = not in_tiles and not wgrad_plan.swap_refusal(spec)

    def draw() -> WgradTiling:
        transposed = swaps and _maybe(rng)
        tiling = _wgrad_tiling(rng, spec.transposed if transposed else spec, transposed, machine)
        return _in_tiles(rng, spec, tiling) if in_tiles else tiling

    def invalid(tiling: WgradTiling) -> str:
        return kernel.tiling_refusal(spec, tiling, machine)

    return Plan((_until_valid(draw, invalid, lambda: next(kernel.candidates(spec, machine, True))),))


def _in_tiles(rng: random.Random, spec: WgradSpec, tiling: WgradTiling) -> WgradTiling:
    """The tiling with as many sums as tile registers hold, without what is for vector registers."""
    tile_m = _up_to(rng, min(TileGrid.most_pieces(tiling.tile_n) * ROWS, spec.out_channels))
    return replace(tiling, tile_m=tile_m, vectors_in_place=False, scalars_packed=False, prefetch=False)


def _wgrad_tiling(rng: random.Random, oriented: WgradSpec, transposed: bool, machine: Machine) -> WgradTiling:
    tile_n = rng.choice((1, 1, 2, 3, rng.randint(1, 5)))
    tile_m = _up_to(rng, min((machine.registers - 1 - tile_n) // tile_n, oriented.out_channels))
    depth, height, _ = oriented.dy.extents
    slab_h = _up_to(rng, height)
    slab_d = _up_to(rng, oriented.batch * depth) if slab_h == height else 1
    in_blocks = -(-oriented.in_channels // (tile_n * machine.lanes(oriented.dtype)))
    out_blocks = -(-oriented.out_channels // tile_m)
    return WgradTiling(
        tile_m=tile_m,
        tile_n=tile_n,
        slab_h=slab_h,
        slab_d=slab_d,
        split_k=rng.choice((1, 1, 2, 3, 5)),
        split_m=_up_to(rng, out_blocks + 1),
        parallel=machine.parallel_from == 0,
        n_blocks=_up_to(rng, in_blocks + 1),
        transposed=transposed,
        vectors_in_place=_maybe(rng),
        scalars_packed=rng.random() < 0.3,
        prefetch=_maybe(rng),
    )


# ------------------------------------------------------------------------------------------------- depthwise


def _channels(kernel: Kernel, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
    """Every field is drawn independently."""
    if direction == BACKWARD_WEIGHT.name:
        return _channels_wgrad(kernel, rng, problem, machine)
    spec = conv_spec(problem, direction)
    blocks = -(-spec.groups * channels_plan.group_width(spec) // machine.lanes(spec.dtype))
    step = spec.out_step[1]

    def draw() -> ChannelsTiling:
        in_place = rng.random() < 0.85
        slab_h = _up_to(rng, -(-spec.result.extents[1] // step)) * step
        prefetch, inner = (in_place and _maybe(rng) for _ in range(2))
        splits = _up_to(rng, blocks) if in_place else 1
        return ChannelsTiling(in_place, _up_to(rng, 14), slab_h, splits, prefetch, inner)

    return _one_tiling(kernel, problem, direction, machine, draw, ChannelsTiling(False, 4, step, 1, False, False))


def _channels_wgrad(kernel: Kernel, rng: random.Random, problem: ConvProblem, machine: Machine) -> Plan:
    lanes = machine.lanes(problem.accumulator)
    multiplier = problem.out_channels // problem.groups
    divisors = [n for n in range(1, multiplier + 1) if multiplier % n == 0]
    height = 1 if problem.rank == 1 else int(problem.grad_extents[-2])

    def draw() -> ChannelsWgradTiling:
        in_place = rng.random() < 0.85
        return ChannelsWgradTiling(
            in_place,
            tile_w=rng.choice((1, 2, 3, 8, rng.randint(1, 16))),
            copies=rng.randint(1, 4),
            multiples=rng.choice(divisors),
            slab_h=_up_to(rng, height),
            split_k=rng.choice((1, 1, 2, 3, 5)),
            channel_splits=_up_to(rng, -(-problem.in_channels // lanes)),
            prefetch=in_place and _maybe(rng),
        )

    last = ChannelsWgradTiling(False, 8, 1, 1, 1, 1, 1, False)
    return _one_tiling(kernel, problem, BACKWARD_WEIGHT.name, machine, draw, last)


def _columns(kernel: Kernel, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
    """Every field is drawn independently."""
    if direction == BACKWARD_WEIGHT.name:
        height = 1 if problem.rank == 1 else int(problem.grad_extents[-2])
        block_channels, split_k = _up_to(rng, problem.out_channels), _up_to(rng, int(problem.batch))
        most = wgrad_rows_per_vector(problem, machine)
        converted = not x_not_converted(problem, machine) and _maybe(rng)
        if most > 1 and _maybe(rng):
            return Plan((ColumnsWgradTiling(-(-height // most), block_channels, split_k, most, converted),))
        return Plan((ColumnsWgradTiling(_up_to(rng, min(height, 14)), block_channels, split_k, 1, converted),))
    spec = conv_spec(problem, direction)
    most = rows_per_vector(spec, machine.lanes(spec.dtype))

    def draw() -> ColumnsTiling:
        per_vector = most if _maybe(rng) else 1
        tiling = ColumnsTiling(_up_to(rng, 14), 1, per_vector)
        if not not_converted(spec, tiling, machine) and _maybe(rng):
            return replace(tiling, converted=True, block_channels=_up_to(rng, min(spec.groups, 20)))
        return replace(tiling, split_h=_up_to(rng, 5) if per_vector == 1 else 1)

    return _one_tiling(kernel, problem, direction, machine, draw, ColumnsTiling(1, 1, 1))


# ------------------------------------------------------------------------------------------------- Winograd


def _winograd(kernel: Kernel, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
    """One of its own tilings: there are no others."""
    every = winograd_plan.tilings(problem, direction, machine)
    return Plan((rng.choice(list(itertools.islice(every, 200))),))


DRAWS: dict[type[Kernel], Draw] = {
    gemm_plan.ImplicitGemm: Draw(ANY, 5, _gemm),
    DotGemm: Draw(PAIRS, 2, _gemm),
    TileGemm: Draw(PAIRS, 2, _gemm),
    HalfTileGemm: Draw(HALF_PAIRS, 1, _gemm),
    wgrad_plan.ImplicitGemmWgrad: Draw(ANY, 4, _wgrad),
    DotWgrad: Draw(PAIRS, 2, _wgrad),
    TileWgrad: Draw(PAIRS, 2, _wgrad),
    HalfTileWgrad: Draw(HALF_PAIRS, 1, _wgrad),
    channels_plan.DepthwiseChannels: Draw(DEPTHWISE, 2, _channels),
    channels_plan.SmallGroups: Draw(SMALL_GROUPS, 2, _channels),
    columns_plan.DepthwiseColumns: Draw(DEPTHWISE, 2, _columns),
    winograd_plan.Winograd: Draw(SQUARE, 2, _winograd),
}
"""Kernels of which all tilings are drawn."""

__all__ = ["Draw", "changed", "draw_of", "drawn_kernels"]
