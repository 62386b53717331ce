# SPDX-License-Identifier: Apache-2.0
"""The same bits on any number of threads: work is divided when the kernel is built, not when it runs."""

import tvm

from tests.kernels.harness import NATIVE, forced
from tests.threads import run_with_threads
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser

TEXTS = ("mb4ic20ih20iw20oc24oh20ow20kh3kw3ph1pw1", "g32mb3ic32ih16iw16oc32oh8ow8kh3kw3sh2sw2ph1pw1")

ONCE = (
    "mb4ic32ih14oc48oh14kh1",  # pixels one to one
    "mb2ic3ih32oc32oh16kh5sh2ph2_lay=NHWC:HWIO:NHWC",  # rows of taps
    "g8mb4ic32ih16oc32oh16kh3ph1_lay=NHWC:OHWI:NHWC",  # small groups
    "g3mb4ic24ih12oc18oh12kh3ph1",  # groups
    "mb3ic20id4ih8iw8oc24od4oh8ow8kd3kh3kw3pd1ph1pw1",
    "g16mb8ic16ih4oc32oh4kh3ph1",  # a channel multiplier
)
"""In one layout each."""

TRANSFORMED = "mb4ic32ih16oc32oh16kh3ph1"
"""By Winograd's transform."""

PROGRAM = """
import numpy as np, tvm
from tests.kernels.harness import kernel_of
from tests.kernels.test_threads import cases
from tests.threads import check_same_bits
from tvm_convgrad.core.catalogue import DIRECTIONS
for problem, direction, choose in cases():
    choice, library = kernel_of(problem, direction, choose=choose)
    print(choice.name, repr(choice.plan))
    rng = np.random.default_rng(0)
    shapes = [problem.tensors[name][0] for name in DIRECTIONS[direction].operands]
    operands = [tvm.runtime.tensor(rng.standard_normal(s).astype("float32")) for s in shapes]
    def run():
        result = tvm.runtime.tensor(np.full(problem.tensors[DIRECTIONS[direction].result][0], np.nan, "float32"))
        library["main"](*operands, result)
        assert not np.isnan(result.numpy()).any()
        return [result.numpy()]
    check_same_bits(run)
"""


def cases():
    """(problem, direction, function that chooses) of each kernel."""
    problems = [p for text in TEXTS for p in _in_both_layouts(text)]
    problems += map(ConvProblem.from_descriptor, ONCE)
    yield from ((problem, direction, chooser.choose) for problem in problems for direction in DIRECTIONS)
    if machine_of(tvm.target.Target(NATIVE)).has_masks:
        transformed = ConvProblem.from_descriptor(TRANSFORMED)
        yield from ((transformed, direction, forced("winograd")) for direction in DIRECTIONS)


def _in_both_layouts(text):
    problem = ConvProblem.from_descriptor(text)
    return problem, problem.with_layouts("NHWC", "OHWI", "NHWC")


def test_threads_do_not_change_bits(monkeypatch):
    """Nor does their number where the kernel is built change how work is divided; all kinds of kernels are there."""
    expected = list(cases())
    details = run_with_threads(PROGRAM, checks=len(expected))
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    machine = machine_of(tvm.target.Target(NATIVE))
    choices = [choose(problem, direction, machine) for problem, direction, choose in expected]
    assert details == [f"{choice.name} {choice.plan!r}" for choice in choices]
    if machine.has_masks:
        families = {choice.kernel.name for choice in choices}
        assert families == {"implicit GEMM", "depthwise", "depthwise columns", "small groups", "winograd"}
        assert any("split_k=8" in detail for detail in details)
        assert any("transposed=True" in detail for detail in details)
