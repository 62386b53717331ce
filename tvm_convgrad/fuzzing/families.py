# SPDX-License-Identifier: Apache-2.0
"""The families of kernels as the fuzzer draws them: which problems each takes, and a random tiling of all it accepts.

A family's tilings are not those that its plan considers, but all that its `refusal` lets through: every order of work,
split, packing, swap, prefetch and panel.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tvm_convgrad.fuzzing.problems import ANY, DEPTHWISE, SMALL_GROUPS, SQUARE
from tvm_convgrad.kernels import (
    candidates,
    depthwise_plan,
    depthwise_planes_plan,
    gather_plan,
    weight_plan,
    winograd_plan,
)
from tvm_convgrad.kernels.depthwise_gather import DepthwiseTiling
from tvm_convgrad.kernels.depthwise_planes import PlaneTiling, lines_of_a_vector
from tvm_convgrad.kernels.depthwise_planes_weight import PlaneWeightTiling
from tvm_convgrad.kernels.depthwise_weight import DepthwiseWeightTiling
from tvm_convgrad.kernels.gather_shape import GatherTiling
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.regions import by_regions
from tvm_convgrad.kernels.spec import Gather, Phase, data_gather, forward_gather
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.weight_spec import WeightSpec, WeightTiling, weight_spec
from tvm_convgrad.kernels.winograd_shape import WinogradTiling
from tvm_convgrad.problem import ConvProblem

TRIES = 300
"""Random tilings of which one should be valid; then the last resort is taken."""

_SHORT = {"forward": "forward", "backward_data": "backward_data", "backward_weight": "wgrad"}


class Family(ABC):
    """Kernels of one kind.

    Attributes:
        name: how the names of its kernels begin.
        problems: the kind of problems that are drawn for it.
        weight: its share of the cases, relative to the others.
        directions: those that it computes.
    """

    name: str
    directions: tuple[str, ...] = ("forward", "backward_weight", "backward_data")
    problems: str = ANY
    weight: int = 1

    def kind(self, direction: str) -> str:
        """The kernel's name."""
        return f"{self.name} {_SHORT[direction]}"

    @abstractmethod
    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Why no kernel of the family takes the problem, or nothing."""

    @abstractmethod
    def draw(self, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> tuple[int, list[Any]]:
        """(decomposition into regions, a random valid tiling for each loop nest)."""

    @abstractmethod
    def tiling_types(self, direction: str) -> type:
        """The class of the tilings."""

    @abstractmethod
    def detail(self, problem: ConvProblem, direction: str, region: int, tilings: tuple[Any, ...]) -> Any:
        """The `detail` of the plan's choice."""

    def loop_nests(self, problem: ConvProblem, direction: str, region: int) -> int:
        """How many there are, each with a tiling of its own; 0 if there is no such decomposition into regions."""
        return int(region == 0)

    def invalid(
        self, problem: ConvProblem, direction: str, region: int, tilings: tuple[Any, ...], machine: Machine
    ) -> str:
        """Why the kernel cannot be built with these tilings, or nothing."""
        nests = self.loop_nests(problem, direction, region)
        if len(tilings) != nests or not nests:
            return f"there are {len(tilings)} tilings for {nests} loop nests of region {region}"
        detail = self.detail(problem, direction, region, tilings)
        return candidates.refusal(problem, direction, Choice(self.kind(direction), "", detail=detail), machine)

    def region_of(self, problem: ConvProblem, direction: str, detail: Any) -> int:
        """The decomposition into regions of a plan's detail."""
        return 0


def gather_of(problem: ConvProblem, direction: str) -> Gather:
    """Forward or dgrad in the terms of kernels."""
    return forward_gather(problem) if direction == "forward" else data_gather(problem)


def _until_valid(draw: Callable[[], Any], invalid: Callable[[Any], str], last: Callable[[], Any]) -> Any:
    """The first valid tiling of TRIES drawn ones, else the last resort."""
    for _ in range(TRIES):
        tiling = draw()
        if not invalid(tiling):
            return tiling
    return last()


def _up_to(rng: random.Random, most: int) -> int:
    """A number from 1 to `most`: small, any, or the largest."""
    most = max(1, most)
    return rng.choice((1, min(2, most), most, rng.randint(1, most), rng.randint(1, most)))


def _maybe(rng: random.Random) -> bool:
    return rng.random() < 0.5


# ------------------------------------------------------------------------------------------------- implicit GEMM


class ImplicitGemm(Family):
    """Forward and dgrad."""

    name = "implicit GEMM"
    weight = 5
    directions = ("forward", "backward_data")

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Nothing: it takes every problem."""
        return ""

    def loop_nests(self, problem: ConvProblem, direction: str, region: int) -> int:
        """One for each group of phases of the decomposition."""
        regions = self.regions(problem, direction)
        return len(regions[region].phases) if 0 <= region < len(regions) else 0

    def regions(self, problem: ConvProblem, direction: str) -> list[Gather]:
        """The result whole, then its decompositions into regions."""
        gather = gather_of(problem, direction)
        return [gather, *by_regions(gather)]

    def region_of(self, problem: ConvProblem, direction: str, detail: Any) -> int:
        """The number of the detail's decomposition."""
        return self.regions(problem, direction).index(detail[0])

    def draw(self, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> tuple[int, list[Any]]:
        """A decomposition, and for each of its loop nests a tiling of its own."""
        regions = self.regions(problem, direction)
        region = rng.randrange(len(regions))
        gather = regions[region]
        return region, [self._draw_one(rng, gather, phases, machine) for phases in gather.phases]

    def _draw_one(
        self, rng: random.Random, gather: Gather, phases: tuple[Phase, ...], machine: Machine
    ) -> GatherTiling:
        _, h, w = (axis.count for axis in phases[0])
        lanes = machine.lanes(gather.dtype)
        divisors = [n for n in range(1, h + 1) if h % n == 0]

        def draw() -> GatherTiling:
            over_pixels = _maybe(rng)
            columns = rng.choice((1, 1, 2, 3, rng.randint(1, 7)))
            most = (machine.registers - 1 - columns) // columns
            lines = rng.choice(divisors)
            tile_lines = 1 if over_pixels or _maybe(rng) else rng.choice([n for n in divisors if lines % n == 0])
            if over_pixels:
                rows = _up_to(rng, min(most, gather.result_channels))
                tiles = -(-w // (columns * lanes))
            else:
                pixels = _up_to(rng, min(most // tile_lines, w))
                rows, tiles = pixels * tile_lines, -(-w // pixels)
            orientation = "pixels" if over_pixels else "channels"
            order = rng.choice(("source", "weights"))
            strip = _up_to(rng, tiles)
            direct = rng.random() < 0.4
            return GatherTiling(orientation, rows, columns, lines, strip, order, _up_to(rng, 5), direct, tile_lines)

        return _until_valid(
            draw,
            lambda tiling: gather_plan.invalid(gather, phases, tiling, machine),
            lambda: rng.choice(list(gather_plan.candidates(gather, phases, machine))),
        )

    def tiling_types(self, direction: str) -> type:
        """One for both directions."""
        return GatherTiling

    def detail(self, problem: ConvProblem, direction: str, region: int, tilings: tuple[Any, ...]) -> Any:
        """The decomposition and its tilings."""
        return self.regions(problem, direction)[region], tilings


class ImplicitGemmWeight(Family):
    """wgrad."""

    name = "implicit GEMM"
    weight = 4
    directions = ("backward_weight",)

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Nothing: it takes every problem."""
        return ""

    def draw(self, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> tuple[int, list[Any]]:
        """Every field is drawn by itself."""
        spec = weight_spec(problem)
        swaps = not weight_plan.swap_refusal(spec)

        def draw() -> WeightTiling:
            swapped = swaps and _maybe(rng)
            return self._draw_one(rng, spec.swapped if swapped else spec, swapped, machine)

        def invalid(tiling: WeightTiling) -> str:
            return weight_plan.refusal(spec, tiling, machine)

        return 0, [_until_valid(draw, invalid, lambda: next(weight_plan.candidates(spec, machine, True)))]

    @staticmethod
    def _draw_one(rng: random.Random, seen: WeightSpec, swapped: bool, machine: Machine) -> WeightTiling:
        columns = rng.choice((1, 1, 2, 3, rng.randint(1, 5)))
        rows = _up_to(rng, min((machine.registers - 1 - columns) // columns, seen.out_channels))
        depth, height, _ = seen.dy.extents
        lines = _up_to(rng, height)
        planes = _up_to(rng, seen.batch * depth) if lines == height else 1
        in_blocks = -(-seen.in_channels // (columns * machine.lanes(seen.dtype)))
        out_blocks = -(-seen.out_channels // rows)
        return WeightTiling(
            rows=rows,
            columns=columns,
            lines=lines,
            planes=planes,
            parts=rng.choice((1, 1, 2, 3, 5)),
            splits=_up_to(rng, out_blocks + 1),
            parallel=machine.parallel_from == 0,
            inner=_up_to(rng, in_blocks + 1),
            swapped=swapped,
            direct=_maybe(rng),
            packed=rng.random() < 0.3,
            prefetched=_maybe(rng),
        )

    def tiling_types(self, direction: str) -> type:
        """The one of wgrad."""
        return WeightTiling

    def detail(self, problem: ConvProblem, direction: str, region: int, tilings: tuple[Any, ...]) -> Any:
        """The contraction and its tiling."""
        return weight_spec(problem), tilings[0]


# ------------------------------------------------------------------------------------------------- depthwise


def _depthwise_detail(problem: ConvProblem, direction: str, tiling: object) -> object:
    """The tiling of wgrad; for forward and dgrad also the problem in the kernels' terms, and its taps."""
    if direction == "backward_weight":
        return tiling
    return gather_of(problem, direction), tiling, depthwise_planes_plan.kernel_of(problem)


class Depthwise(Family):
    """Vectors of channels: one channel a group on one side, or small groups of as many on both."""

    def __init__(self, small_groups: bool) -> None:
        self.name = depthwise_plan.SMALL_GROUPS if small_groups else "depthwise"
        self._small_groups = small_groups
        self.problems = SMALL_GROUPS if small_groups else DEPTHWISE
        self.weight = 1 if small_groups else 2

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """As the plan says, when no other kernel is asked."""
        if self._small_groups == (problem.is_depthwise or self._one_a_group(problem)):
            return "another family takes this many channels a group"
        if direction == "backward_weight":
            return depthwise_plan.weight_refusal(problem, machine)
        return depthwise_plan.gather_refusal(problem, gather_of(problem, direction), machine)

    @staticmethod
    def _one_a_group(problem: ConvProblem) -> bool:
        return min(problem.in_channels, problem.out_channels) == problem.groups

    def draw(self, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> tuple[int, list[Any]]:
        """Every field is drawn by itself."""
        lanes = machine.lanes(problem.accumulator)
        if direction == "backward_weight":
            return 0, [self._draw_weight(rng, problem, lanes, machine)]
        gather = gather_of(problem, direction)
        together = min(gather.source_channels, gather.result_channels)
        blocks = -(-gather.groups * together // lanes)
        step = gather.out_step[1]

        def draw() -> DepthwiseTiling:
            direct = rng.random() < 0.85
            lines = _up_to(rng, -(-gather.result.extents[1] // step)) * step
            prefetched = direct and _maybe(rng)
            return DepthwiseTiling(direct, _up_to(rng, 14), lines, _up_to(rng, blocks) if direct else 1, prefetched)

        def invalid(tiling: DepthwiseTiling) -> str:
            return depthwise_plan.invalid_depthwise(gather, tiling, machine)

        return 0, [_until_valid(draw, invalid, lambda: DepthwiseTiling(False, 4, step, 1, False))]

    @staticmethod
    def _draw_weight(rng: random.Random, problem: ConvProblem, lanes: int, machine: Machine) -> DepthwiseWeightTiling:
        multiplier = problem.out_channels // problem.groups
        divisors = [n for n in range(1, multiplier + 1) if multiplier % n == 0]
        height = 1 if problem.rank == 1 else int(problem.grad_extents[-2])

        def draw() -> DepthwiseWeightTiling:
            direct = rng.random() < 0.85
            return DepthwiseWeightTiling(
                direct,
                pixels=rng.choice((1, 2, 3, 8, rng.randint(1, 16))),
                copies=rng.randint(1, 4),
                multiples=rng.choice(divisors),
                lines=_up_to(rng, height),
                parts=rng.choice((1, 1, 2, 3, 5)),
                chunks=_up_to(rng, -(-problem.in_channels // lanes)),
                prefetched=direct and _maybe(rng),
            )

        return _until_valid(
            draw,
            lambda tiling: depthwise_plan.invalid_depthwise_weight(problem, tiling, machine),
            lambda: DepthwiseWeightTiling(False, 8, 1, 1, 1, 1, 1, False),
        )

    def tiling_types(self, direction: str) -> type:
        """One for wgrad, one for the others."""
        return DepthwiseWeightTiling if direction == "backward_weight" else DepthwiseTiling

    def detail(self, problem: ConvProblem, direction: str, region: int, tilings: tuple[Any, ...]) -> Any:
        """As of all depthwise kernels."""
        return _depthwise_detail(problem, direction, tilings[0])


class DepthwisePlanes(Family):
    """Vectors of columns."""

    name = "depthwise planes"
    problems = DEPTHWISE
    weight = 2

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """As the plan says."""
        if direction == "backward_weight":
            if not problem.is_depthwise:
                return "not one input channel a group"
            found = depthwise_planes_plan.plan_planes_weight(problem, machine)
        else:
            gather = gather_of(problem, direction)
            if gather.groups == 1 or min(gather.source_channels, gather.result_channels) > 1:
                return "not one channel a group"
            if sum(map(len, gather.phases)) > depthwise_plan.MOST_PHASES:
                return "too many phases"
            found = depthwise_planes_plan.plan_planes(problem, direction, gather, machine)
        return "" if isinstance(found, Choice) else found

    def draw(self, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> tuple[int, list[Any]]:
        """Every field is drawn by itself."""
        if direction == "backward_weight":
            height = 1 if problem.rank == 1 else int(problem.grad_extents[-2])
            channels, parts = _up_to(rng, problem.out_channels), _up_to(rng, int(problem.batch))
            return 0, [PlaneWeightTiling(_up_to(rng, min(height, 14)), channels, parts)]
        gather = gather_of(problem, direction)
        folded = lines_of_a_vector(gather, machine.lanes(gather.dtype))

        def draw() -> PlaneTiling:
            fold = folded if _maybe(rng) else 1
            return PlaneTiling(_up_to(rng, 14), _up_to(rng, 5) if fold == 1 else 1, fold)

        def invalid(tiling: PlaneTiling) -> str:
            return depthwise_planes_plan.invalid_planes(gather, tiling, machine)

        return 0, [_until_valid(draw, invalid, lambda: PlaneTiling(1, 1, 1))]

    def tiling_types(self, direction: str) -> type:
        """One for wgrad, one for the others."""
        return PlaneWeightTiling if direction == "backward_weight" else PlaneTiling

    def detail(self, problem: ConvProblem, direction: str, region: int, tilings: tuple[Any, ...]) -> Any:
        """As of all depthwise kernels."""
        return _depthwise_detail(problem, direction, tilings[0])


# ------------------------------------------------------------------------------------------------- Winograd


class Winograd(Family):
    """3x3 kernels by Winograd's transform."""

    name = "winograd"
    problems = SQUARE

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """As the plan says."""
        reason = winograd_plan.refusal(problem, direction, machine)
        if not reason and next(winograd_plan.cuts(problem, direction, machine), None) is None:
            return "the tiles of one row take too much memory"
        return reason

    def draw(self, rng: random.Random, problem: ConvProblem, direction: str, machine: Machine) -> tuple[int, list[Any]]:
        """One of the plan's own: there are no others."""
        return 0, [rng.choice(list(itertools.islice(winograd_plan.cuts(problem, direction, machine), 200)))]

    def tiling_types(self, direction: str) -> type:
        """One for all directions."""
        return WinogradTiling

    def detail(self, problem: ConvProblem, direction: str, region: int, tilings: tuple[Any, ...]) -> Any:
        """The tiling."""
        return tilings[0]


FAMILIES: tuple[Family, ...] = (
    ImplicitGemm(),
    ImplicitGemmWeight(),
    Depthwise(small_groups=False),
    Depthwise(small_groups=True),
    DepthwisePlanes(),
    Winograd(),
)
"""All families; a direction of a problem is computed by those that do not refuse it."""


def family_of(kind: str, direction: str) -> Family | None:
    """The family that has a kernel of this name for a direction."""
    return next((each for each in FAMILIES if direction in each.directions and each.kind(direction) == kind), None)


__all__ = ["FAMILIES", "Family", "family_of", "gather_of"]
