# SPDX-License-Identifier: Apache-2.0
"""Other cuts of the kernel that the plan takes for a problem, for the tuner to measure.

For implicit GEMMs they are the tilings of `gather_plan.candidates` and `weight_plan.candidates`, best estimates first.
For other kernels each is what the plan itself would choose if the machine had other caches, fewer registers or more
cores: the plan answers for every such machine with a cut that its kernel can be built with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tvm_convgrad.kernels import gather_plan, plan, weight_plan
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tuned import tilings_of, use_winners, with_tilings
from tvm_convgrad.problem import ConvProblem

CACHE_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.125)
"""Of the cache that slabs and panels are cut for: what else runs on the machine leaves less of it, prefetching more."""

REGISTER_FACTORS = (1.0, 0.75, 0.875, 0.5)
"""Of the registers: a smaller tile may fit a problem's channels or pixels better. Never more than there are."""

PART_FACTORS = (1, 2, 4)
"""Of the pieces that work is cut into: more of them balance, and cost sums."""

_CUTS: dict[str, Any] = {**dict.fromkeys(plan.GATHERS, gather_plan), weight_plan.KIND: weight_plan}
"""The plans that list their own candidates, by the kind of kernel."""


def candidates(problem: ConvProblem, face: str, machine: Machine) -> Iterator[plan.Choice]:
    """The plan's own choice, then distinct others of the same kernel, the most different machines last.

    Nothing if no kernel covers the problem; only the plan's own if its kernel has no tilings.
    """
    with use_winners(None):
        own = plan.choose(problem, face, machine)
        if not own.is_kernel:
            return
        yield own
        if own.kind in _CUTS:
            for detail, seconds in _CUTS[own.kind].other_cuts(own.detail, machine):
                yield replace(own, detail=detail, estimate=seconds, reason="a candidate of the tuner")
            return
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
            other = plan.choose(problem, face, variant)
            tilings = tilings_of(other.detail)
            # Everything but the tilings has to stay, as only they are kept.
            if other.kind != own.kind or tilings in seen or len(tilings) != len(seen[0]):
                continue
            if with_tilings(other.detail, seen[0]) != own.detail:
                continue
            seen.append(tilings)
            yield replace(other, reason="a candidate of the tuner")


def refusal(choice: plan.Choice, machine: Machine) -> str:
    """Why a cut that was read from a file cannot be built for its problem, or nothing."""
    return _CUTS[choice.kind].invalid_cut(choice.detail, machine) if choice.kind in _CUTS else ""


__all__ = ["candidates", "refusal"]
