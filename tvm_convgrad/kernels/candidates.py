# SPDX-License-Identifier: Apache-2.0
"""The candidates of the tuner: all plans of the kernels that may be taken for a problem, in their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.chooser import Choice, choices, choose
from tvm_convgrad.kernels.tuned import use_winners


def candidates(problem: ConvProblem, direction: str, machine: Machine) -> Iterator[Choice]:
    """The choice by estimate, then that of the other kernels that may be taken, then other plans of each in turn.

    Nothing if no kernel takes the problem; only the choice itself if its kernel has no other plans.
    """
    with use_winners(None):
        own = choose(problem, direction, machine)
        if not own.is_kernel:
            return
        yield own
        others = [each for each in choices(problem, direction, machine) if each.name != own.name]
        yield from others
        every = [_other_plans(problem, direction, machine, each) for each in (own, *others)]
        for round_ in itertools.zip_longest(*every):
            yield from filter(None, round_)


def _other_plans(problem: ConvProblem, direction: str, machine: Machine, own: Choice) -> Iterator[Choice]:
    """The choice with each other plan of its kernel."""
    assert own.kernel is not None
    assert own.plan is not None
    for plan in own.kernel.tilings(problem, direction, own.plan, machine):
        estimate = own.kernel.estimate(problem, direction, plan, machine)
        yield replace(own, plan=plan, estimate=estimate, reason="a candidate of the tuner")


__all__ = ["candidates"]
