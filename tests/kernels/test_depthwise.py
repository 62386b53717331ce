# SPDX-License-Identifier: Apache-2.0
"""Depthwise kernels and those of small groups: over planes, channels in place, panels; fused epilogues; any batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from tests.kernels.harness import NATIVE, ZONE, _zoned, check_exact, compiled, run_in_red_zones
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.depthwise_planes import PlaneTiling
from tvm_convgrad.kernels.depthwise_planes_weight import PlaneWeightTiling
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.kernels.tuned import tilings_of, with_tilings
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.verification import numbers_of

TARGET = tvm.target.Target(NATIVE)
MACHINE = machine_of(TARGET)
GATHERS = ("forward", "backward_data")

PLANES = {
    "plain": "g20mb2ic20ih19iw21oc20kh3kw3ph1pw1",
    "strided": "g5mb3ic5ih12iw37oc5kh3kw3sh2sw2ph1pw1",
    "multiplier": "g3mb2ic3ih9iw16oc6kh3kw3ph1pw1",
    "lines folded": "g5mb2ic5ih7iw7oc5kh3kw3ph1pw1",
    "lines folded, rolled": "g3mb2ic3ih6iw5oc3kh7kw5ph3pw2",
    "rolled": "g18mb2ic18ih16iw16oc18kh7kw7ph3pw3",
}
CHANNELS = {
    "panels": "g40mb2ic40ih7iw10oc40kh3kw3sh2sw3ph1pw1",
    "panels, multiplier": "g18mb2ic18ih6iw7oc36kh3kw3sh1sw3ph1pw1",
    "half": "g20mb3ic20ih6iw9oc20kh3kw3sh2sw2ph1pw1_dt=f16:f16:f16",
    "in place": "g40mb3ic40ih9iw11oc40kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC",
    "in place, strided": "g32mb2ic32ih9iw9oc32kh3kw3sh2sw2ph1pw1_lay=NHWC:OHWI:NHWC",
}
GROUPS = {
    "groups of 4": "g12mb2ic48ih9iw12oc48kh3kw3ph1pw1",
    "groups of 8, strided": "g5mb2ic40ih9iw12oc40kh3kw3sh2sw2ph1pw1",
    "groups of 2, channels last": "g20mb2ic40ih8iw7oc40kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC",
    "groups of 16, channels last": "g3mb2ic48ih8iw7oc48kh3kw3sh2sw2ph1pw1_lay=NHWC:HWIO:NHWC",
    "groups of 4, 3-d": "g8mb1ic32id4ih6iw7oc32kd3kh3kw3sd2pd1ph1pw1",
}
CASES = {**{name: ("depthwise planes", text) for name, text in PLANES.items()}} | {
    name: ("depthwise", text) for name, text in CHANNELS.items()
}
CASES |= {name: ("small groups", text) for name, text in GROUPS.items()}


def built(problem: ConvProblem, face: str, choice: plan.Choice, epilogue: Epilogue = NO_EPILOGUE):
    function = plan.build(problem, face, MACHINE, choice, "main", epilogue)
    return compiled(function, TARGET)


def choice_of(problem: ConvProblem, face: str, family: str) -> plan.Choice:
    choice = plan.choose(problem, face, MACHINE)
    assert choice.kind == f"{family} {'wgrad' if face == 'backward_weight' else face}", choice
    return choice


@pytest.mark.parametrize("face", GATHERS)
@pytest.mark.parametrize("name", CASES)
def test_epilogues_of_every_batch(name, face):
    family, text = CASES[name]
    fixed = ConvProblem.from_descriptor(text)
    symbolic = replace(fixed, batch="n")
    epilogue = Epilogue(bias=True, relu=True, accumulate=True)
    library = built(symbolic, face, choice_of(symbolic, face, family), epilogue)
    axis = (fixed.grad_layout if face == "forward" else fixed.data_layout).index("C")
    for batch in (1, 3):
        problem = replace(fixed, batch=batch)
        operands, sums = numbers_of(problem, face, 0)
        rng = np.random.default_rng(batch)
        bias = rng.integers(-9, 10, sums.shape[axis]).astype(sums.dtype)
        before = rng.integers(-9, 10, sums.shape).astype(sums.dtype)
        along = [-1 if i == axis else 1 for i in range(sums.ndim)]
        found = run_in_red_zones(problem, face, library, [*operands, bias], before)
        np.testing.assert_array_equal(found, np.maximum(sums + before + bias.reshape(along), 0))


@pytest.mark.parametrize("name", [name for name in CASES if "rolled" not in name])
def test_sums_and_bias_gradients_of_every_batch(name):
    family, text = CASES[name]
    fixed = ConvProblem.from_descriptor(text)
    symbolic = replace(fixed, batch="n")
    choice = choice_of(symbolic, "backward_weight", family)
    adds = text.startswith(("g20", "g40"))  # of each family and way
    epilogue = Epilogue(accumulate=True, bias_grad=True, bias_accumulate=adds)
    library = built(symbolic, "backward_weight", choice, epilogue)
    for batch in (1, 5):
        operands, wanted = numbers_of(replace(fixed, batch=batch), "backward_weight", 0)
        axes = tuple(i for i, letter in enumerate(fixed.grad_layout) if letter != "C")
        bias_grad = operands[0].astype("float64").sum(axes).astype(wanted.dtype)
        zones = [
            _zoned(np.full_like(array, 3 if holds else np.nan), 77.0)
            for array, holds in ((wanted, True), (bias_grad, adds))
        ]
        library["main"](*(_zoned(array, np.nan)[1] for array in operands), *(result for _, result in zones))
        for (zone, _), right in zip(
            zones, (wanted + wanted.dtype.type(3), bias_grad + bias_grad.dtype.type(3 * adds)), strict=True
        ):
            np.testing.assert_array_equal(zone[ZONE : ZONE + right.size].reshape(right.shape), right)
            assert (zone[:ZONE] == 77.0).all()
            assert (zone[ZONE + right.size :] == 77.0).all()


@pytest.mark.parametrize("lines", [1, 4, 9])
@pytest.mark.parametrize("face", GATHERS)
def test_planes_in_any_number_of_slabs(face, lines):
    problem = ConvProblem.from_descriptor(PLANES["strided"])
    choice = choice_of(problem, face, "depthwise planes")
    operands, wanted = numbers_of(problem, face, 0)
    gather, _, kernel = choice.detail
    for slabs in (2, 3, 40):
        library = built(problem, face, replace(choice, detail=(gather, PlaneTiling(lines, slabs, 1), kernel)))
        np.testing.assert_array_equal(run_in_red_zones(problem, face, library, operands), wanted)


@pytest.mark.parametrize("face", [*GATHERS, "backward_weight"])
def test_asking_ahead_changes_nothing(face):
    problem = ConvProblem.from_descriptor(CHANNELS["in place, strided"])
    choice = choice_of(problem, face, "depthwise")
    operands, wanted = numbers_of(problem, face, 0)
    tilings = [replace(tiling, prefetched=True) for tiling in tilings_of(choice.detail)]
    library = built(problem, face, replace(choice, detail=with_tilings(choice.detail, tilings)))
    np.testing.assert_array_equal(run_in_red_zones(problem, face, library, operands), wanted)


@pytest.mark.parametrize("tiling", [(1, 1, 1), (5, 2, 3), (12, 20, 2), (7, 7, 5)])
def test_wgrad_of_planes_in_any_parts(tiling):
    problem = ConvProblem.from_descriptor(PLANES["plain"])
    choice = choice_of(problem, "backward_weight", "depthwise planes")
    operands, wanted = numbers_of(problem, "backward_weight", 0)
    library = built(problem, "backward_weight", replace(choice, detail=PlaneWeightTiling(*tiling)))
    np.testing.assert_array_equal(run_in_red_zones(problem, "backward_weight", library, operands), wanted)


@pytest.mark.parametrize("face", [*GATHERS, "backward_weight"])
def test_planes_of_shorter_vectors(face):
    if MACHINE.name != "AVX-512":
        pytest.skip("this machine's own vectors are the shorter ones")
    for name in ("strided", "lines folded"):
        check_exact(ConvProblem.from_descriptor(PLANES[name]), face, {"kind": "llvm", "mcpu": "haswell"})


def test_columns_that_no_position_meets_do_not_count():
    problem = ConvProblem.from_descriptor("g4mb1ic4ih6iw28oc4kh1kw1sh3sw2")  # even lines and columns of three are met
    (grad, data), wanted = numbers_of(problem, "backward_weight", 0)
    data[:, :, :, 1::2] = np.inf
    library = built(problem, "backward_weight", choice_of(problem, "backward_weight", "depthwise planes"))
    np.testing.assert_array_equal(run_in_red_zones(problem, "backward_weight", library, [grad, data]), wanted)


def test_why_planes_do_not_serve():
    for text, face, reason in (
        ("g20mb2ic20ih9iw9oc20kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC", "forward", ""),
        ("g40mb2ic40ih4iw4oc40kh3kw3ph1pw1", "backward_weight", "narrow planes leave lanes empty"),
        ("g40mb2ic40ih19iw19oc40kh5kw5ph2pw2", "backward_weight", "more sums than registers"),
        ("g40mb2ic40ih19iw19oc40kh3kw3sh3sw3ph1pw1", "forward", "strides of more than two"),
        ("g40mb2ic40ih19iw19oc40kh3kw3ph1pw1_dt=f16:f16:f16", "forward", "elements would have to be converted"),
    ):
        choice = plan.choose(ConvProblem.from_descriptor(text), face, MACHINE)
        assert choice.kind.startswith("depthwise ")
        assert "planes" not in choice.kind
        assert reason in next(iter(choice.refused.values()))
