# SPDX-License-Identifier: Apache-2.0
"""Forward and dgrad whose tiles sum a part of the source's channels at a time (`GemmTiling.channel_parts`)."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.harness import MACHINE, built, check_choice, run_in_red_zones
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.contract import Plan
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gemm.plan import candidates, invalid, regions_of
from tvm_convgrad.kernels.gemm.tile_sums import invalid_tile
from tvm_convgrad.kernels.gemm.tiling import GemmTiling
from tvm_convgrad.kernels.registry import kernel_named

PROBLEMS = (
    "mb2ic24ih12oc40kh3ph1",
    "mb2ic24ih12oc40kh3ph1_lay=NHWC:OHWI:NHWC",
    "mb1ic12ih13oc20kh3sh2ph1",  # phases that are interleaved in dgrad
    "mb1ic12ih12oc20kh2sh2_lay=NHWC:OHWI:NHWC",
    "g2mb2ic12ih10oc36kh3dh3ph4",
    "mb1ic6id4ih8oc18kd3kh3kw3pd1ph1pw1",
    "mb3ic36ih7oc33kh1",
)


def _choices(problem: ConvProblem, direction: str, most: int) -> list[Choice]:
    """Choices with the first parts that are valid, of tilings that differ."""
    kernel = kernel_named("implicit GEMM", direction)
    found = []
    for region, spec in enumerate(regions_of(problem, direction)):
        for n in (2, 3, spec.source_channels):
            tilings = []
            for phases in spec.phases:
                every = [
                    varied
                    for tiling in candidates(spec, phases, MACHINE)
                    if not invalid(spec, phases, varied := replace(tiling, channel_parts=n), MACHINE)
                ]
                tilings.append(every[:: max(1, len(every) // 3)])
            found += [Choice("", "", kernel=kernel, plan=Plan(each, region)) for each in zip(*tilings, strict=False)]
    return found[:most]


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_exact(text: str, direction: str) -> None:
    problem = ConvProblem.from_descriptor(text)
    choices = _choices(problem, direction, 4)
    assert len(choices) > 1
    for choice in choices:
        check_choice(problem, direction, choice)


@pytest.mark.parametrize("text", PROBLEMS[:3])
def test_accumulates_once(text: str) -> None:
    """A gradient that is added to one that is there is added after the last part only."""
    problem = ConvProblem.from_descriptor(text)
    operands, wanted = numbers_of(problem, "backward_data", 0)
    before = np.arange(wanted.size, dtype=wanted.dtype).reshape(wanted.shape) % 7
    choice = _choices(problem, "backward_data", 1)[0]
    library = built(problem, "backward_data", choice, Epilogue(accumulate=True))
    found = run_in_red_zones(problem, "backward_data", library, operands, before)
    np.testing.assert_array_equal(found, wanted + before)


def test_refusals_say_what_parts_need() -> None:
    spec = regions_of(ConvProblem.from_descriptor("mb1ic8ih14oc32kh3ph1"), "forward")[0]
    tiling = GemmTiling("channels", 14, 2, 14, 1, order="weights", channel_parts=2)
    assert not invalid(spec, spec.phases[0], tiling, MACHINE)
    for wrong, reason in (
        ({"channel_parts": 3}, "divide the 8 channels"),
        ({"channel_parts": 0}, "divide the 8 channels"),
        ({"order": "source"}, "order weights"),
        ({"tile_m": 9}, "would sum some of 14 twice"),
        ({"vector_axis": "pixels", "tile_n": 1}, "vectors of channels"),
    ):
        assert reason in invalid(spec, spec.phases[0], replace(tiling, **wrong), MACHINE)
    assert "tile registers" in invalid_tile(tiling)


@pytest.mark.parametrize(
    ("text", "divided"),
    [("mb8ic2048ih28oc256kh3dh11ph12", True), ("mb8ic3072ih7oc768kh3ph1", True), ("mb8ic512ih28oc512kh3ph1", False)],
)
def test_long_reductions_are_divided(text: str, divided: bool) -> None:
    """Those of which a block of W is read from beyond the L2 tile after tile: 1.2 to 1.7 times as fast."""
    machine = replace(CPUS["AVX-512"], parts=2)
    for layout in ("", "_lay=NHWC:OHWI:NHWC"):
        (tiling,) = chooser.choose(ConvProblem.from_descriptor(text + layout), "forward", machine).plan.tilings
        assert isinstance(tiling, GemmTiling)
        assert (tiling.channel_parts > 1) == divided
