# SPDX-License-Identifier: Apache-2.0
"""The convolutions that other projects test: every one type-checks in its own size, every kind of them is computed.

Numbers are checked on small problems of the same kind (fewer samples and channels, shorter axes; grouping, kernels,
strides, dilation, padding and the remainders of the floor division as they were), each kind once. Convolutions that are
refused are counted: it is by design, for one reason.
"""

from __future__ import annotations

import numpy as np
import pytest

from legalize.forms import DATA_FORMS, WEIGHT_FORMS, compose_backward_data, compose_backward_weight
from tests.cases.load import ABSENT, FILES, FOLDER, cases, small_problems
from tests.core.numpy_builder import NumpyBuilder
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core import reference
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import (
    ConvAttributes,
    NumberProver,
    TensorSpec,
    infer_backward_data,
    infer_backward_weight,
)
from tvm_convgrad.kernels.chooser import choose, refusal
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE
from tvm_convgrad.verify.fuzzing.cases import KernelCase
from tvm_convgrad.verify.fuzzing.check import check_case
from tvm_convgrad.verify.operators import ALL_DIRECTIONS, check_problems

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)

REFUSED = {
    # JAX crops by negative padding, which is refused by design; cropping is a slice before the convolution.
    "jax_conv_grad_grids": (336, "negative; slice the data"),
}

COUNTS = {
    "tf_conv2d_backprop": 83,
    "tf_conv_gradient_grids": 104,
    "tf_depthwise": 37,
    "onednn_conv_shapes": 825,
    "onednn_deconv_shapes": 206,
    "deepbench_conv": 217,
    "cutlass_conv_problems": 84,
    "tvm_conv_grad": 53,
}
"""Entries of the files, so that a file that is read wrongly cannot pass by being empty."""

SHARDS = 4
"""Small problems of all files are computed in this many tests, for parallel runs."""

COMPILED_EVERY, EMPTY_EVERY = 5, 3
"""One kind in this many is compiled, too; kernels of all kinds are interpreted. The second is of empty tensors."""


@pytest.mark.parametrize("file", FILES)
def test_every_shape_type_checks(file: str) -> None:
    problems = [problem for _, problem in cases(file) if isinstance(problem, ConvProblem)]
    refusals = [problem for _, problem in cases(file) if isinstance(problem, str)]
    assert problems
    assert len(cases(file)) == COUNTS.get(file, len(cases(file)))
    count, reason = REFUSED.get(file, (0, ""))
    assert len(refusals) == count
    assert all(reason in sentence for sentence in refusals)
    for problem in problems:
        assert ConvProblem.from_descriptor(problem.descriptor) == problem
        grad, data, weight = (
            TensorSpec(shape, len(shape), dtype)
            for shape, dtype in (problem.tensors[name] for name in ("grad", "data", "weight"))
        )
        assert infer_backward_weight(_attributes(problem), grad, data, NumberProver()) == weight
        found = infer_backward_data(_attributes(problem), grad, weight, problem.data_shape, NumberProver())
        assert found == data


def _attributes(problem: ConvProblem) -> ConvAttributes:
    return ConvAttributes(
        op="conv",
        rank=problem.rank,
        strides=problem.strides,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
        grad_layout=problem.grad_layout,
        data_layout=problem.data_layout,
        kernel_layout=problem.kernel_layout,
        kernel_size=problem.kernel,
    )


def _all_small() -> list[ConvProblem]:
    return list(dict.fromkeys(problem for file in FILES for problem in small_problems(file)))


def _chooses_affordable(problem: ConvProblem) -> bool:
    """Kernels of a hundred taps and more are left to the numpy run: their compiled loops are slow, not different."""
    return problem.macs <= 200_000


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_kind_composes(shard: int) -> None:
    """Every composition, executed in numpy, equals the reference exactly."""
    builder = NumpyBuilder()
    problems = _all_small()[shard::SHARDS]
    assert len(problems) > 100
    for problem in problems:
        (grad, data), _ = numbers_of(problem, "backward_weight")
        want = reference.backward_weight(problem, grad, data)
        for form in WEIGHT_FORMS:
            found = compose_backward_weight(builder, problem, grad.astype("f8"), data.astype("f8"), form)
            np.testing.assert_array_equal(found, want, err_msg=f"{form} {problem}")
        (grad, weight), _ = numbers_of(problem, "backward_data")
        want = reference.backward_data(problem, grad, weight)
        for form in DATA_FORMS:
            found = compose_backward_data(
                builder, problem, grad.astype("f8"), weight.astype("f8"), problem.data_shape, form
            )
            np.testing.assert_array_equal(found, want, err_msg=f"{form} {problem}")


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_kind_has_a_right_kernel(shard: int) -> None:
    """All directions of every kind equal float64 exactly by the kernel that is chosen, on all CPUs in turn.

    They are interpreted, at a quarter of the cost of compiling them without LLVM's optimiser, which also finds
    accesses out of bounds and races. Kernels refuse empty tensors, which `test_every_kind_compiles` computes.
    """
    problems = [problem for problem in _all_small() if _chooses_affordable(problem) and not refusal(problem)]
    assert len(problems) > 600
    faults = {}
    for number in range(shard, len(problems), SHARDS):
        # Neighbours in the list are alike, so that a kind is met on several of the instruction sets.
        problem, machine = problems[number], list(CPUS.values())[number // SHARDS % len(CPUS)]
        for direction in ALL_DIRECTIONS:
            choice = choose(problem, direction, machine)
            assert choice.kernel is not None
            assert choice.plan is not None
            case = KernelCase(problem, direction, machine, choice.kernel, choice.plan, NO_EPILOGUE, any_batch=False)
            if fault := check_case(case):
                faults[str(case)] = fault
    assert faults == {}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_kind_compiles(shard: int) -> None:
    """All directions of a fifth of the kinds equal float64 exactly when compiled, and more of those with empty tensors.

    "auto" takes kernels, which the test above interprets for every kind, and for empty tensors compositions, which
    `test_every_kind_composes` executes for every kind. Of every sixth kind one of the compositions is compiled.
    """
    problems = [problem for problem in _all_small() if _chooses_affordable(problem)][shard::SHARDS]
    compiled = [
        problem for n, problem in enumerate(problems) if n % (EMPTY_EVERY if refusal(problem) else COMPILED_EVERY) == 0
    ]
    verdicts = list(check_problems(compiled, impls=("auto",), target="llvm"))
    assert len(verdicts) == 3 * len(compiled)
    forms = (("composition:swapped", "composition:transposed"), ("composition:tiled", "composition:dilated"))
    for place, impls in enumerate(forms):
        verdicts += check_problems(problems[6 * place :: 12], impls=impls, target="llvm")
    assert [verdict for verdict in verdicts if verdict.status != "right"] == []
