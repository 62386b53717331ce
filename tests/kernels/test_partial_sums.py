# SPDX-License-Identifier: Apache-2.0
"""The partial sums of wgrad on many cores stay within what indices reach; their number is part of a tiling's rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tvm_convgrad.codegen.hardware import CPUS, MOST_PARTIAL_SUMS, MOST_PARTS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser

WIDE = [
    "mb64ic2048ih14oc2048kh3ph1_lay=NHWC:OHWI:NHWC",
    "mb8ic4096iw2048oc11008kw1_lay=NWC:OWI:NWC",
    "mb8ic1280ih64oc1280kh3ph1",
    "mb256ic2048ih7oc2048kh3ph1_dt=bf16:bf16:bf16",
]


@pytest.mark.parametrize("cpu", ["AVX2", "AVX-512", "AVX512-BF16", "AMX-BF16"])
@pytest.mark.parametrize("text", WIDE)
def test_the_parts_of_a_wide_weight_are_few(text, cpu):
    problem, machine = ConvProblem.from_descriptor(text), replace(CPUS[cpu], parts=MOST_PARTS)
    choice = chooser.choose(problem, "backward_weight", machine)
    (tiling,) = choice.plan.tilings
    weight = math.prod(problem.tensors["weight"][0])
    assert tiling.split_k * weight <= MOST_PARTIAL_SUMS
    many = replace(choice, plan=replace(choice.plan, tilings=(replace(tiling, split_k=200),)))
    refused = many.kernel.invalid(problem, "backward_weight", many.plan, machine)
    assert "split_k is 200; it must be at most" in refused


def test_the_parts_of_a_depthwise_weight_are_few():
    text = "g8192mb4ic8192ih64oc131072kh7ph3_lay=NHWC:HWIO:NHWC"
    problem, machine = ConvProblem.from_descriptor(text), replace(CPUS["AVX-512"], parts=MOST_PARTS)
    for choice in chooser.choices(problem, "backward_weight", machine):
        split = getattr(choice.plan.tilings[0], "split_k", 1) if choice.is_kernel else 1
        assert split * math.prod(problem.tensors["weight"][0]) <= MOST_PARTIAL_SUMS
