# SPDX-License-Identifier: Apache-2.0
"""Cases are strings that are read back, wrong ones shrink, and compiled ones run between pages without rights."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Plan
from tvm_convgrad.kernels.registry import all_kernels
from tvm_convgrad.kernels.wgrad.spec import WgradTiling
from tvm_convgrad.verify.fuzzing import campaign, compiled
from tvm_convgrad.verify.fuzzing.campaign import case_number
from tvm_convgrad.verify.fuzzing.check import check_case, draw_case, numbers_of, read_case
from tvm_convgrad.verify.fuzzing.guarded import GuardedMemory
from tvm_convgrad.verify.fuzzing.problems import REGIMES, Axis, draw_problem
from tvm_convgrad.verify.fuzzing.shrink import shrink

SEED = 20261122


@pytest.fixture(scope="module")
def drawn():
    return [case_number(number, SEED) for number in range(400)]


def test_a_case_is_its_string(drawn):
    for case in drawn:
        again = read_case(ConvProblem.from_descriptor(case.problem.descriptor), case.direction, case.tiling_text)
        assert again == case


def test_a_seed_is_a_list_of_cases(drawn):
    assert [str(case_number(number, SEED)) for number in range(30)] == [str(case) for case in drawn[:30]]
    assert str(case_number(0, SEED + 1)) != str(drawn[0])


def test_every_field_of_every_tiling_varies():
    values: dict[tuple[str, str], Counter[object]] = {}
    for number in range(1500):
        for tiling in case_number(number, SEED).plan.tilings:
            for item in fields(tiling):
                seen = values.setdefault((type(tiling).__name__, item.name), Counter())
                seen[getattr(tiling, item.name)] += 1
    assert len({name for name, _ in values}) == 7
    assert {key: counts for key, counts in values.items() if len(counts) < 2} == {}


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.__name__.strip("_"))
def test_regimes_give_valid_axes(regime):
    rng = random.Random(1)
    axes = [regime(rng, rank) for rank in (1, 2, 3) for _ in range(50)]
    assert all(isinstance(axis, Axis) and axis.extent >= 1 and min(axis.padding) >= 0 for axis in axes)
    assert len(set(axes)) > 20


def test_problems_reach_what_networks_do_not_have():
    rng = random.Random(SEED)
    problems = [draw_problem(rng) for _ in range(3000)]
    kinds = {
        "X and dY of equal extents, and strides": lambda p: p.data_extents == p.grad_extents and max(p.strides) > 1,
        "border wider than the kernel": lambda p: any(
            max(pair) > k for pair, k in zip(p.padding, p.kernel, strict=True)
        ),
        "stride longer than the kernel": lambda p: any(s > k for s, k in zip(p.strides, p.kernel, strict=True)),
        "one element": lambda p: set(p.data_extents) == {1},
        "batch 9": lambda p: p.batch == 9,
        "a channel more than a vector": lambda p: p.in_channels in (9, 17) and p.groups == 1,
        "groups of three": lambda p: p.groups > 1 and p.in_channels == 3 * p.groups,
        "mixed types": lambda p: len({p.data_dtype, p.kernel_dtype, p.grad_dtype}) == 3,
        "three layouts": lambda p: p.data_layout != p.grad_layout,
        "all numbers equal": lambda p: len({p.batch, p.in_channels, p.out_channels, *p.data_extents}) == 1,
    }
    for name, holds in kinds.items():
        assert sum(map(holds, problems)) >= 5, name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("isa=AVX2", "kernel is missing"),
        ("kernel=implicit_GEMM", "isa is missing"),
        ("isa=MMX kernel=implicit_GEMM", "isa=MMX is unknown; use AVX-512"),
        ("isa=AVX2 kernel=magic", "'magic' computes no backward_weight; there are depthwise, small groups"),
        ("isa=AVX2 kernel=implicit_GEMM colour=red", "'colour' is unknown"),
        ("isa=AVX2 kernel=implicit_GEMM tiling=tile_m:1", "WgradTiling has the fields tile_m, tile_n"),
        ("isa=AVX2 kernel=implicit_GEMM epilogue=softmax", "epilogue=softmax is unknown; use bias, relu"),
        ("isa=AVX2 l2=much kernel=implicit_GEMM", "l2=much is not a number that a machine has"),
        ("isa=AVX2 parts=-3 kernel=implicit_GEMM", "parts=-3 is not a number that a machine has"),
        ("isa=AVX2 kernel=implicit_GEMM region=first", "region=first is not a number"),
    ],
)
def test_a_malformed_string_is_refused(text, words):
    with pytest.raises(ProblemError, match="--tiling") as error:
        read_case(ConvProblem.from_descriptor("mb1ic2ih4oc2kh3"), "backward_weight", text)
    assert words in str(error.value)


def test_a_tiling_that_the_kernel_refuses_is_refused(drawn):
    """So are tilings of a tuner's file: every family has numbers that it refuses, with the field's name."""
    refused = set()
    for case in drawn:
        names = [
            item.name for item in fields(case.plan.tilings[0]) if type(getattr(case.plan.tilings[0], item.name)) is int
        ]
        wild = replace(case.plan.tilings[0], **dict.fromkeys(names, 0))
        text = replace(case, plan=replace(case.plan, tilings=(wild, *case.plan.tilings[1:]))).tiling_text
        with pytest.raises(UnsupportedError, match=case.kernel.label(case.direction)):
            read_case(case.problem, case.direction, text)
        refused.add(case.kernel)
    assert refused == set(all_kernels())


def test_a_plan_of_another_kernel_is_refused(drawn):
    """So are plans of another number of loop nests, and of a region that there is not."""
    for case in drawn:
        twice, nowhere = Plan(2 * case.plan.tilings, case.plan.region), replace(case.plan, region=99)
        for plan in (twice, nowhere):
            with pytest.raises(UnsupportedError, match=case.kernel.label(case.direction)):
                read_case(case.problem, case.direction, replace(case, plan=plan).tiling_text)
        other = next(each.plan for each in drawn if type(each.plan.tilings[0]) is not type(case.plan.tilings[0]))
        same_number = Plan((other.tilings[0],) * len(case.plan.tilings), case.plan.region)
        with pytest.raises(TypeError, match="a plan of"):
            case.kernel.invalid(case.planned_problem, case.direction, same_number, case.machine)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_random_cases_are_right(rng):
    """Hypothesis draws the case, so that it shrinks one that is wrong."""
    case = draw_case(rng)
    assert check_case(case, SEED) == "", str(case)


def test_a_wrong_case_shrinks(drawn):
    """To one product, where everything is wrong that has a product of the second input channel."""

    def fault(case):
        return "planted" if case.problem.in_channels // case.problem.groups >= 2 else ""

    case = next(
        c for c in drawn if c.direction == "backward_weight" and isinstance(c.plan.tilings[0], WgradTiling) and fault(c)
    )
    small = shrink(case, fault)
    assert fault(small)
    assert small.problem.in_channels == 2
    assert small.problem.macs <= 8
    assert small.problem.data_layout.startswith("NC")
    assert read_case(small.problem, small.direction, small.tiling_text) == small


def test_numbers_have_no_zeros_and_results_begin_as_nan(drawn):
    for case in drawn[:40]:
        numbers = numbers_of(case, 1)
        assert all((operand != 0).all() for operand in numbers.operands)
        first = numbers.results[0].astype("float64")
        assert (first != 0).all() if case.epilogue.accumulate else np.isnan(first).all()


# ------------------------------------------------------------------------------------------------- compiled cases


def test_compiled_cases_are_right(drawn):
    cases = [case for case in drawn[:60] if compiled.runs_here(case)][:16]
    assert len(cases) >= 4
    assert compiled.compile_and_check(cases, SEED) == [""] * len(cases)


@pytest.mark.parametrize(("at_end", "index"), [(True, 5), (False, -1)])
def test_guarded_memory_ends_the_process(at_end, index):
    program = f"""
import ctypes, numpy as np
from tvm_convgrad.verify.fuzzing.guarded import GuardedMemory
memory = GuardedMemory(at_end={at_end})
array = memory.copy(np.arange(5, dtype="float32"))
assert array.tolist() == [0, 1, 2, 3, 4]
array[:] = 7
print("inside", flush=True)
ctypes.c_float.from_address(array.ctypes.data + 4 * {index}).value
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "inside\n"
    assert done.returncode == -11


def test_guarded_memory_holds_empty_and_large_arrays():
    memory = GuardedMemory(at_end=True)
    for shape in ((0, 3), (1,), (1024,), (1025,), (70, 70)):
        assert memory.copy(np.ones(shape)).sum() == np.prod(shape)


def test_a_process_that_ends_is_its_cases_fault(monkeypatch, drawn):
    """The cases after it are checked by another process."""
    cases = [case for case in drawn[:40] if compiled.runs_here(case)][:3]
    right = compiled._in_a_process
    broken = ["", "machine code ended the process (signal 11)"]
    monkeypatch.setattr(compiled, "_in_a_process", lambda c, *_: broken if len(c) == 3 else right(c, SEED, False))
    assert compiled.compile_and_check(cases, SEED) == [*broken, ""]


def test_a_campaign_is_the_same_for_any_number_of_processes():
    one, two = (list(campaign.fuzz(41, 3, workers=workers)) for workers in (1, 2))
    assert one == two
    assert len(one) >= 41
