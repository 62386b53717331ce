# SPDX-License-Identifier: Apache-2.0
"""The same bits on any number of threads: work is cut when the kernel is made, not when it runs."""

import tvm

from tests.kernels.harness import NATIVE
from tests.threads import run_with_threads
from tvm_convgrad.catalogue import FACES
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.problem import ConvProblem

TEXTS = ("mb4ic20ih20iw20oc24oh20ow20kh3kw3ph1pw1", "g32mb3ic32ih16iw16oc32oh8ow8kh3kw3sh2sw2ph1pw1")

PROGRAM = """
import numpy as np, tvm
from tests.kernels.harness import kernel_of
from tests.kernels.test_threads import problems
from tests.threads import check_same_bits
from tvm_convgrad.catalogue import FACES
for problem in problems():
    for face in FACES:
        choice, library = kernel_of(problem, face)
        print(repr(choice.detail))
        rng = np.random.default_rng(0)
        shapes = [problem.tensors[name][0] for name in FACES[face].operands]
        operands = [tvm.runtime.tensor(rng.standard_normal(s).astype("float32")) for s in shapes]
        def run():
            result = tvm.runtime.tensor(np.full(problem.tensors[FACES[face].result][0], np.nan, "float32"))
            library["main"](*operands, result)
            assert not np.isnan(result.numpy()).any()
            return [result.numpy()]
        check_same_bits(run)
"""


def problems():
    for problem in map(ConvProblem.from_descriptor, TEXTS):
        yield from (problem, problem.with_layouts("NHWC", "OHWI", "NHWC"))


def test_threads_do_not_change_bits(monkeypatch):
    """Nor does their number, where the kernel is made, change how its work is cut."""
    details = run_with_threads(PROGRAM, checks=12)
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    machine = machine_of(tvm.target.Target(NATIVE))
    assert details == [repr(plan.choose(p, face, machine).detail) for p in problems() for face in FACES]
