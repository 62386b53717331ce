# SPDX-License-Identifier: Apache-2.0
"""Other cuts of the kernel that the plan takes for a problem, for the tuner to measure.

For implicit GEMMs they are the tilings of `gather_plan.candidates` and `weight_plan.candidates`, best estimates first;
for Winograd's transform, where it is allowed, those of `winograd_plan.cuts`.
For other kernels each is what the plan itself would choose if the machine had other caches, fewer registers or more
cores: the plan answers for every such machine with a cut that its kernel can be built with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tvm_convgrad.kernels import gather_plan, plan, weight_plan, winograd_plan
from tvm_convgrad.kernels.depthwise_plan import invalid_depthwise, invalid_depthwise_weight
from tvm_convgrad.kernels.depthwise_planes import PlaneTiling
from tvm_convgrad.kernels.depthwise_planes_plan import invalid_planes, invalid_planes_weight
from tvm_convgrad.kernels.depthwise_planes_weight import PlaneWeightTiling
from tvm_convgrad.kernels.depthwise_weight import DepthwiseWeightTiling
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tuned import tilings_of, use_winners, with_tilings
from tvm_convgrad.problem import ConvProblem

CACHE_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.125)
"""Of the cache that slabs and panels are cut for: what else runs on the machine leaves less of it, prefetching more."""

REGISTER_FACTORS = (1.0, 0.75, 0.875, 0.5)
"""Of the registers: a smaller tile may fit a problem's channels or pixels better. Never more than there are."""

PART_FACTORS = (1, 2, 4)
"""Of the pieces that work is cut into: more of them balance, and cost sums."""

_PLANS: dict[str, Any] = {**dict.fromkeys(plan.GATHERS, gather_plan), weight_plan.KIND: weight_plan}
"""The plans that list their own candidates, by the kind of kernel."""


def candidates(problem: ConvProblem, face: str, machine: Machine) -> Iterator[plan.Choice]:
    """The plan's own choice, then that of the other kernel that it may take, then distinct cuts of each in turn.

    The most different machines come last. Nothing if no kernel covers the problem; only the plan's own if its kernel
    has no tilings.
    """
    with use_winners(None):
        own = plan.choose(problem, face, machine)
        if not own.is_kernel:
            return
        yield own
        others = [each for each in plan.kernels(problem, face, machine) if each.kind != own.kind]
        yield from others
        every = [_cuts(problem, face, machine, each) for each in (own, *others)]
        for round_ in itertools.zip_longest(*every):
            yield from filter(None, round_)


def _cuts(problem: ConvProblem, face: str, machine: Machine, own: plan.Choice) -> Iterator[plan.Choice]:
    """Other cuts of a kernel."""
    if own.kind.startswith(plan.WINOGRAD):
        found: Iterable[tuple[Any, float]] = winograd_plan.ranked(problem, face, machine)
    elif own.kind in _PLANS:
        found = _PLANS[own.kind].other_cuts(own.detail, machine)
    else:
        found = _of_other_machines(problem, face, machine, own)
    for detail, seconds in found:
        if detail != own.detail:
            yield replace(own, detail=detail, estimate=seconds, reason="a candidate of the tuner")


def _of_other_machines(
    problem: ConvProblem, face: str, machine: Machine, own: plan.Choice
) -> Iterator[tuple[Any, float]]:
    seen = [tilings_of(own.detail)]
    if not seen[0]:
        return
    variants = [
        (abs(i) + abs(j) + abs(k), replace(
            machine,
            l2_bytes=int(machine.l2_bytes * cache),
            registers=int(machine.registers * registers),
            parts=machine.parts * parts,
        ))
        for i, cache in enumerate(CACHE_FACTORS)
        for j, registers in enumerate(REGISTER_FACTORS)
        for k, parts in enumerate(PART_FACTORS)
    ]  # fmt: skip
    for _, variant in sorted(variants, key=lambda pair: pair[0]):
        other = plan.kernels(problem, face, variant)[0]
        tilings = tilings_of(other.detail)
        # Everything but the tilings has to stay, as only they are kept.
        if other.kind != own.kind or tilings in seen or len(tilings) != len(seen[0]):
            continue
        if with_tilings(other.detail, seen[0]) != own.detail:
            continue
        seen.append(tilings)
        yield other.detail, other.estimate


def refusal(problem: ConvProblem, face: str, choice: plan.Choice, machine: Machine) -> str:
    """Why a cut that was read from a file cannot be built for its problem, or nothing."""
    if isinstance(problem.batch, str):
        problem = replace(problem, batch=plan.REPRESENTATIVE_BATCH)
    if choice.kind.startswith(plan.WINOGRAD):
        valid = choice.detail in winograd_plan.cuts(problem, face, machine)
        return "" if valid else f"Winograd's kernel cannot be cut as {plan.in_words(choice)}"
    if choice.kind in _PLANS:
        return str(_PLANS[choice.kind].invalid_cut(choice.detail, machine))
    detail = choice.detail
    if isinstance(detail, PlaneWeightTiling):
        return invalid_planes_weight(problem, detail)
    if isinstance(detail, DepthwiseWeightTiling):
        return invalid_depthwise_weight(problem, detail, machine)
    gather, tiling, _ = detail
    if isinstance(tiling, PlaneTiling):
        return invalid_planes(gather, tiling, machine)
    return invalid_depthwise(gather, tiling, machine)


__all__ = ["candidates", "refusal"]
