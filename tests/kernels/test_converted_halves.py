# SPDX-License-Identifier: Apache-2.0
"""The implicit GEMMs of 16-bit types without dot products: vectors are converted in registers, sums are float32."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm

from tests.kernels.harness import compiled
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import Epilogue

AVX512 = tvm.target.Target({"kind": "llvm", "mcpu": "cascadelake", "num-cores": 2})
BF16 = tvm.target.Target({"kind": "llvm", "mcpu": "cooperlake", "num-cores": 2})
MACHINE = machine_of(AVX512)

PROBLEMS = {
    "1x1": "mb2ic48ih8iw9oc80kh1kw1",
    "1x1, channels last": "mb2ic48ih8iw9oc80kh1kw1_lay=NHWC:OHWI:NHWC",
    "1x1, no whole vectors": "mb2ic19ih5iw7oc13kh1kw1_lay=NHWC:HWIO:NHWC",
    "1x1, stride 2": "mb1ic32ih12iw12oc64oh6ow6kh1kw1sh2sw2",
    "3x3": "mb1ic32ih9iw13oc48kh3kw3ph1pw1",
    "3x3, channels last, groups": "g2mb2ic36ih6iw7oc40kh3kw3ph1pw1_lay=NHWC:HWIO:NHWC",
    "stem": "mb1ic3ih19iw21oc24oh10ow11kh7kw7sh2sw2ph3pw3",
    "stem, channels last": "mb1ic3ih19iw21oc24oh10ow11kh7kw7sh2sw2ph3pw3_lay=NHWC:OHWI:NHWC",
}

TYPES = (
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float16", "float16", "float16"),
    ("bfloat16", "float32", "float16"),
    ("float32", "bfloat16", "bfloat16"),
    ("float16", "bfloat16", "float32"),
    ("bfloat16", "float64", "bfloat16"),
)
"""Of X, W and dY: one type, or several; sums are float32 or, in the last, float64."""

needs_avx512 = pytest.mark.skipif("avx512bw" not in local_features(), reason="compiled only: this CPU has no AVX-512")


def _samples() -> list:
    """Each problem in each direction, with one type for all tensors and with others in turn."""
    cases = [(name, direction) for name in PROBLEMS for direction in DIRECTIONS]
    mixed = [(*case, TYPES[1 + i % (len(TYPES) - 1)]) for i, case in enumerate(cases)]
    return [(*case, TYPES[0]) for case in cases] + mixed


def _function(problem: ConvProblem, direction: str, target: tvm.target.Target, epilogue: Epilogue):
    machine = machine_of(target)
    choice = chooser.choose(problem, direction, machine)
    assert choice.is_kernel, choice
    return chooser.build(problem, direction, machine, choice, "main", epilogue)


@needs_avx512
@pytest.mark.parametrize(("name", "direction", "types"), _samples())
def test_results_are_exact(name, direction, types):
    problem = ConvProblem.from_descriptor(PROBLEMS[name]).with_dtypes(*types)
    operands, wanted = numbers_of(problem, direction, 0)
    library = compiled(_function(problem, direction, AVX512, Epilogue()), AVX512)
    result = tvm.runtime.tensor(np.full_like(wanted, np.nan))
    library["main"](*map(tvm.runtime.tensor, operands), result)
    np.testing.assert_array_equal(result.numpy(), wanted)


@needs_avx512
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["1x1", "1x1, channels last", "3x3, channels last, groups"])
def test_results_are_added_to(name, direction):
    problem = ConvProblem.from_descriptor(PROBLEMS[name]).with_dtypes(*TYPES[0])
    operands, wanted = numbers_of(problem, direction, 0)
    before = np.random.default_rng(0).integers(-3, 4, wanted.shape).astype("float32")
    library = compiled(_function(problem, direction, AVX512, Epilogue(accumulate=True)), AVX512)
    result = tvm.runtime.tensor(before.astype(numpy_dtype("bfloat16")))
    library["main"](*map(tvm.runtime.tensor, operands), result)
    exact = wanted.astype("float32") + before
    np.testing.assert_array_equal(result.numpy(), exact.astype(numpy_dtype("bfloat16")))


@needs_avx512
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_denormals_are_kept(direction):
    """Unlike dot products: one product is a denormal of bfloat16."""
    problem = ConvProblem.from_descriptor(PROBLEMS["1x1"]).with_dtypes(*TYPES[0])
    first, second = (problem.tensors[name][0] for name in DIRECTIONS[direction].operands)
    tiny = np.full(first, 2.0**-130).astype(numpy_dtype("bfloat16"))
    ones = np.ones(second, numpy_dtype("bfloat16"))
    shape, _ = problem.tensors[DIRECTIONS[direction].result]
    result = tvm.runtime.tensor(np.full(shape, np.nan, numpy_dtype("bfloat16")))
    library = compiled(_function(problem, direction, AVX512, Epilogue()), AVX512)
    library["main"](*map(tvm.runtime.tensor, (tiny, ones)), result)
    count = {"forward": 48, "backward_data": 80, "backward_weight": 2 * 8 * 9}[direction]
    assert (result.numpy().astype("float64") == count * 2.0**-130).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["1x1", "1x1, channels last", "3x3"])
@pytest.mark.parametrize(("dtype", "instruction"), [("bfloat16", "vpmovzxwd"), ("float16", "vcvtph2ps")])
def test_machine_code_converts_vectors(name, direction, dtype, instruction):
    problem = ConvProblem.from_descriptor(PROBLEMS[name]).with_dtypes(dtype, dtype, dtype)
    code = compiled(_function(problem, direction, AVX512, Epilogue()), AVX512).mod.inspect_source("s")
    assert re.search(rf"{instruction}\t.*%zmm", code)


def test_a_cpu_with_dot_products_converts_other_operands():
    """Operands of two types are no pairs; vectors of the one in bfloat16 are converted."""
    problem = ConvProblem.from_descriptor(PROBLEMS["1x1"]).with_dtypes("bfloat16", "float32", "float32")
    code = compiled(_function(problem, "backward_weight", BF16, Epilogue()), BF16).mod.inspect_source("s")
    assert re.search(r"vpmovzxwd\t.*%zmm", code)
    assert "vdpbf16ps" not in code
