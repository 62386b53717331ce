# SPDX-License-Identifier: Apache-2.0
"""The same bits on any number of threads: work is cut when the kernel is made, not when it runs."""

import subprocess
import sys

PROGRAM = """
import hashlib, numpy as np, tvm
from tests.kernels.harness import NATIVE, kernel_of
from tvm_convgrad.catalogue import FACES
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.problem import ConvProblem
has_masks = machine_of(tvm.target.Target(NATIVE)).has_masks
for text in ("mb4ic20ih20iw20oc24oh20ow20kh3kw3ph1pw1", "g32mb3ic32ih16iw16oc32oh8ow8kh3kw3sh2sw2ph1pw1"):
    for problem in (p := ConvProblem.from_descriptor(text), p.with_layouts("NHWC", "OHWI", "NHWC")):
        winograd = has_masks and problem.groups == 1 and problem.data_layout == "NCHW"
        chosen = [(face, choose) for face in FACES for choose in [plan.choose, *[plan.choose_winograd] * winograd]]
        for face, choose in chosen:
            _, library = kernel_of(problem, face, chooser=choose)
            rng = np.random.default_rng(0)
            shapes = [problem.tensors[name][0] for name in FACES[face].operands]
            operands = [tvm.runtime.tensor(rng.standard_normal(s).astype("float32")) for s in shapes]
            result = tvm.runtime.tensor(np.full(problem.tensors[FACES[face].result][0], np.nan, "float32"))
            library["main"](*operands, result)
            assert not np.isnan(result.numpy()).any()
            print(face, hashlib.sha256(result.numpy().tobytes()).hexdigest())
"""


def test_threads_do_not_change_bits(monkeypatch):
    outputs = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("TVM_NUM_THREADS", threads)
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0].count("\n") in (12, 15)
    assert outputs[0] == outputs[1] == outputs[2]
