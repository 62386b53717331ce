# SPDX-License-Identifier: Apache-2.0
"""Adding a kernel is adding a file: one is chosen, explained, forced, tuned, verified and fuzzed."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

import tvm_convgrad.kernels
from relax_ops.lowering import recorded_choices
from relax_ops.program import directions_module
from tvm_convgrad.codegen.hardware import CPUS, machine_of, native_target
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.geometry import FLOAT_DTYPES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import evaluate_problem, implementations
from tvm_convgrad.kernels import chooser, registry
from tvm_convgrad.kernels.candidates import candidates
from tvm_convgrad.kernels.tuned import use_winners
from tvm_convgrad.report.gradients import describe_convolutions
from tvm_convgrad.tuning.store import Store
from tvm_convgrad.verify.fuzzing.check import check_case, draw_case, read_case
from tvm_convgrad.verify.suite import verify_problems

KERNEL = '''
"""Pointwise convolutions of one row in NCW, pixel by pixel."""

from dataclasses import dataclass

from tvm_convgrad.codegen.loops import Loops, load, make_parameter, zero
from tvm_convgrad.kernels.contract import Kernel, Plan, Tiling


@dataclass(frozen=True)
class RowTiling(Tiling):
    """How many pixels a step of the loop over a row computes; it divides the row."""

    pixels: int


class Rows(Kernel):
    name = "rows"
    directions = ("forward",)
    any_batch = False

    def epilogues(self, direction):
        return ()

    def tiling_type(self, direction):
        return RowTiling

    def refusal(self, problem, direction, machine):
        plain = (problem.data_layout, problem.kernel_layout, problem.grad_layout) == ("NCW", "OIW", "NCW")
        one = (problem.kernel, problem.strides, problem.padding, problem.groups) == ((1,), (1,), ((0, 0),), 1)
        types = {dtype for _, dtype in problem.tensors.values()}
        return "" if plain and one and types == {"float32"} else "it is made for 1x1 kernels in NCW and float32"

    def plan(self, problem, direction, machine):
        return Plan((RowTiling(1),))

    def estimate(self, problem, direction, plan, machine):
        return 1e-12 / plan.only(RowTiling).pixels

    def invalid(self, problem, direction, plan, machine):
        pixels, (row,) = plan.only(RowTiling).pixels, problem.data_extents
        return "" if pixels > 0 and row % pixels == 0 else f"pixels is {pixels}; it must divide {row}"

    def tilings(self, problem, direction, own, machine):
        (row,) = problem.data_extents
        return (Plan((RowTiling(pixels),)) for pixels in range(2, row + 1) if row % pixels == 0)

    def emit(self, problem, direction, plan, machine, name, epilogue):
        loops, pixels = Loops(), plan.only(RowTiling).pixels
        shapes = [problem.tensors[tensor][0] for tensor in ("data", "weight", "grad")]
        parameters = [make_parameter(f"p{i}", shape, "float32") for i, shape in enumerate(shapes)]
        x, w, y = (loops.flat(p, shape[0] * shape[1] * shape[2]) for p, shape in zip(parameters, shapes))
        (n, channels, row), out = shapes[0], problem.out_channels
        with loops.loop(n * out, "image") as item, loops.loop(row // pixels, "step") as step:
            sums = loops.buffer("sums", pixels, "float32")
            for i in range(pixels):
                loops.store(sums, i, zero("float32"))
            with loops.loop(channels, "channel") as c:
                for i in range(pixels):
                    at = (item // out * channels + c) * row + step * pixels + i
                    loops.store(sums, i, load(sums, i) + load(x, at) * load(w, item % out * channels + c))
            for i in range(pixels):
                loops.store(y, item * row + step * pixels + i, load(sums, i))
        return loops.finish(parameters, name)


KERNELS = (Rows(),)
'''

PROBLEM = ConvProblem.from_descriptor("mb2ic5iw12oc7ow12kw1")
OTHER = ConvProblem.from_descriptor("mb2ic5iw12oc7ow12kw3pw1")
TARGET = native_target()
MACHINE = machine_of(TARGET)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel of a file that was put beside the others."""
    (tmp_path / "rows.py").write_text(KERNEL)
    monkeypatch.setattr(tvm_convgrad.kernels, "__path__", [*tvm_convgrad.kernels.__path__, str(tmp_path)])
    registry.all_kernels.cache_clear()
    yield registry.kernel_named("rows", "forward")
    registry.all_kernels.cache_clear()
    sys.modules.pop("tvm_convgrad.kernels.rows")


def test_it_is_chosen_and_explained(rows) -> None:
    assert chooser.choose(PROBLEM, "forward", MACHINE).kernel is rows
    assert chooser.choose(OTHER, "forward", MACHINE).refused["rows forward"] == rows.refusal(OTHER, "forward", MACHINE)
    with TARGET, recorded_choices() as lowered:
        relax.transform.LegalizeOps()(directions_module([("main", DIRECTIONS["forward"], PROBLEM)]))
    (row,) = describe_convolutions(lowered)
    assert (row["kernel"], row["seconds"]) == ("rows forward", 1e-12)
    assert "implicit GEMM forward" in {other["kernel"] for other in row["refused"]}


def test_it_can_be_forced_and_verified(rows) -> None:
    operands, wanted = numbers_of(PROBLEM, "forward")
    assert "kernel:rows" in implementations()
    np.testing.assert_array_equal(evaluate_problem("forward", PROBLEM, *operands, impl="kernel:rows"), wanted)
    with pytest.raises(UnsupportedError, match=r"kernel:rows refuses it: it is made for 1x1"):
        evaluate_problem("forward", OTHER, *numbers_of(OTHER, "forward")[0], impl="kernel:rows")
    verdicts = list(verify_problems([PROBLEM], directions=("forward",), target=TARGET))
    assert {"auto", "kernel", "kernel:rows", "kernel:implicit-gemm"} <= {verdict.impl for verdict in verdicts}
    assert {verdict.status for verdict in verdicts} == {"right"}


def test_it_is_tuned(rows, tmp_path: Path) -> None:
    own, *others = candidates(PROBLEM, "forward", MACHINE)
    assert [choice.plan.tilings[0].pixels for choice in others] == [2, 3, 4, 6, 12]
    store = Store(tmp_path / "tunings.json", 1)
    store.record(PROBLEM, "forward", MACHINE, others[2], seconds=1.0, own_seconds=2.0, candidates=6)
    with use_winners(Store(tmp_path / "tunings.json", 1)):
        assert chooser.choose(PROBLEM, "forward", MACHINE).plan == others[2].plan != own.plan


def test_it_is_fuzzed(rows) -> None:
    drawn = [draw_case(random.Random(seed), ("forward",)) for seed in range(150)]
    found = [case for case in drawn if case.kernel is rows]
    assert len({case.plan for case in found}) > 1
    for case in found:
        assert check_case(case) == "", str(case)
        assert read_case(case.problem, case.direction, case.tiling_text) == case


def test_two_kernels_of_one_name_are_refused(rows, tmp_path: Path) -> None:
    (tmp_path / "more_rows.py").write_text(KERNEL)
    registry.all_kernels.cache_clear()
    with pytest.raises(SetupError, match=r"more_rows and tvm_convgrad\.kernels\.rows both define 'rows forward'"):
        registry.all_kernels()
    sys.modules.pop("tvm_convgrad.kernels.more_rows")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kernel", registry.all_kernels(), ids=lambda kernel: kernel.label(kernel.directions[0]))
def test_a_kernel_takes_the_types_that_it_declares(kernel, dtype):
    """Some problem of each, on some machine, and no problem of another type on any."""
    texts = ("mb2ic64ih14oc64kh3ph1", "g64mb2ic64ih14oc64kh3ph1", "g16mb2ic64ih14oc64kh3ph1_lay=NHWC:OHWI:NHWC")
    problems = [
        replace(problem, data_dtype=dtype, kernel_dtype=dtype, grad_dtype=dtype)
        for problem in map(ConvProblem.from_descriptor, (*texts, f"{texts[1]}_lay=NHWC:OHWI:NHWC"))
    ]
    for direction in kernel.directions:
        reasons = [kernel.refusal(problem, direction, each) for problem in problems for each in CPUS.values()]
        assert ("" in reasons) == (dtype in kernel.dtypes), (direction, reasons)
