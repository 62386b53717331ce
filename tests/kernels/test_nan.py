# SPDX-License-Identifier: Apache-2.0
"""Every NaN stays one where it is stored as bfloat16, whatever its payload; infinity stays infinity."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.kernels.harness import kernel_of
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.training.compile.lower import LowerStep

NAN = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F80FFFF]
INFINITY = [0x7F800000, 0xFF800000]
CPUS = {"x86-64": "", "haswell": "avx2", "skylake-avx512": "avx512bw"}
LAYOUTS = ("", "_lay=NHWC:OHWI:NHWC", "_lay=NCHW:OHWI:NHWC")


def numbers(bits, count):
    """As many ones, the first of them of these bits."""
    values = np.ones(count, "float32")
    values.view("uint32")[: len(bits)] = bits
    return values


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_of_an_operand_are_nan_of_a_kernels_result(layout, cpu):
    if CPUS[cpu] and CPUS[cpu] not in local_features():
        pytest.skip(f"this CPU has no {CPUS[cpu]}")
    # Pixel i reads a number of x alone: W is 1 for one channel, so that the sum is the number itself.
    problem = ConvProblem.from_descriptor(f"mb1ic1ih1iw24oc1kh1kw1_dt=f32:f32:bf16{layout}")
    _, library = kernel_of(problem, "forward", {"kind": "llvm", "mcpu": cpu})
    x = numbers([*NAN, *INFINITY], 24).reshape([int(e) for e in problem.tensors["data"][0]])
    shape = [int(e) for e in problem.tensors["grad"][0]]
    result = tvm.runtime.tensor(np.zeros(shape, numpy_dtype("bfloat16")))
    weight = np.ones([int(e) for e in problem.tensors["weight"][0]], "float32")
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(weight), result)
    check(result.numpy().reshape(-1))


@pytest.mark.parametrize("count", [11, 5000])
@pytest.mark.parametrize("rounded", [False, True], ids=["stored", "rounded"])
@pytest.mark.parametrize("cpu", CPUS)
def test_nan_of_a_step_are_nan_in_16_bits(cpu, rounded, count):
    if CPUS[cpu] and CPUS[cpu] not in local_features():
        pytest.skip(f"this CPU has no {CPUS[cpu]}")
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    x, builder = relax.Var("x", relax.TensorType((count,), "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.astype(x, "bfloat16"))
            result = builder.emit_output(relax.op.astype(value, "float32") if rounded else value)
        builder.emit_func_output(result)
    executable = tvm.compile(builder.get(), target, relax_pipeline=LowerStep(target))
    found = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(numbers([*NAN, *INFINITY], count)))
    check(found.numpy())


def check(found):
    found = found.astype("float32")
    nan, infinite = found[: len(NAN)], found[len(NAN) : len(NAN) + 2]
    assert np.isnan(nan).all(), nan
    assert infinite.tolist() == [np.inf, -np.inf]
    assert (found[len(NAN) + 2 :] == 1).all()
