# SPDX-License-Identifier: Apache-2.0
"""What the planner and the tuner choose is never refused when it is read from a file; for large problems, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import candidates, chooser
from tvm_convgrad.kernels.gemm.tiling import GemmTiling
from tvm_convgrad.kernels.transforms import allow_transforms

PROBLEMS = (
    "g64mb32ic64ih57oc128oh28kh3sh2",
    "g32mb32ic32ih112oc32kh3ph1",
    "g144mb64ic144ih57oc144oh29kh7sh2ph3_dt=f64:f64:f64",
    "g96mb8ic96ih56oc96kh7ph3_lay=NHWC:OHWI:NHWC",
    "g32mb8ic128ih28oc128kh3ph1_lay=NHWC:OHWI:NHWC",
    "mb8ic256ih14oc256kh3ph1",
    "mb8ic64ih56oc256kh1_lay=NHWC:OHWI:NHWC",
    "mb2ic3id8oc64kd3pd1",
    "g2mb64ic4ih28oc4kh2ph1_lay=NHWC:HWIO:NHWC_dt=f16:f16:f16",
    "g8mb32ic16ih13oc16kh1_dt=bf16:bf16:bf16",
)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("text", PROBLEMS)
def test_no_choice_is_refused(text: str, cpu: str) -> None:
    problem = ConvProblem.from_descriptor(text)
    for direction in DIRECTIONS:
        for parts in (2, 8, 64):
            machine = replace(CPUS[cpu], parts=parts)
            with allow_transforms():
                chosen = chooser.choices(problem, direction, machine)
            for choice in chosen:
                assert choice.kernel.invalid(problem, direction, choice.plan, machine) == ""
        for choice in candidates.candidates(problem, direction, replace(CPUS[cpu], parts=8)):
            assert choice.kernel.invalid(problem, direction, choice.plan, machine) == "", str(choice.plan)


@pytest.mark.parametrize(
    ("text", "pixels"),
    [
        ("mb32ic768ih7oc3072kh1", 49),  # tiles of 13 would overlap by 3 pixels
        ("mb32ic3072ih7oc768kh1", 49),
        ("mb8ic96ih14oc576kh1", 196),  # vectors of pixels would be 14 for 12.25
    ],
)
def test_tiles_of_a_small_image_hardly_overlap(text: str, pixels: int) -> None:
    """A forward kernel for channels first computes at most 2 % of the pixels twice, which costs a transposed store."""
    machine = replace(CPUS["AVX-512"], parts=2)
    (tiling,) = chooser.choose(ConvProblem.from_descriptor(text), "forward", machine).plan.tilings
    assert isinstance(tiling, GemmTiling)
    assert tiling.vector_axis == "channels"
    assert -(-pixels // tiling.tile_m) * tiling.tile_m / pixels < 1.021
