# SPDX-License-Identifier: Apache-2.0
"""tvm_convgrad.evaluate and tvm_convgrad.op: the operators on arrays and on expressions, as a user calls them."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from tests.relax.programs import tensor
from tvm_convgrad import evaluate, evaluation, op
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BY_NAME
from tvm_convgrad.core.errors import DTypeError, ProblemError, SetupError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import COMPOSITIONS, _compiled, evaluate_problem

RNG = np.random.default_rng(0)
SAME = ConvProblem.from_shapes(
    (2, 7, 9, 4),
    (3, 3, 2, 6),
    strides=2,
    padding="SAME",
    groups=2,
    data_layout="NHWC",
    kernel_layout="HWIO",
)
LAYOUTS = {"data_layout": "NHWC", "kernel_layout": "HWIO", "grad_layout": "NHWC"}


def ints(*shape: int, dtype: str = "float32") -> Any:
    return RNG.integers(-4, 5, shape).astype(dtype)


def test_the_examples_of_the_docstrings() -> None:
    found = doctest.testmod(evaluation)
    assert found.attempted >= 12
    assert found.failed == 0


def test_operands_may_be_lists() -> None:
    data = [[[1.0, 2.0, 3.0]]]
    found = evaluate("conv1d", data, [[[1.0, 1.0]]])
    assert (found.dtype, found.tolist()) == (np.float64, [[[3.0, 5.0]]])


def test_the_example_of_the_documentation() -> None:
    grad, weight, data = ints(2, 4, 5, 6), ints(3, 3, 2, 6), ints(2, 7, 9, 4)
    found = evaluate(
        "conv2d_backward_data",
        grad,
        weight,
        data_shape=(2, 7, 9, 4),
        strides=2,
        padding="SAME",
        groups=2,
        **LAYOUTS,
    )
    np.testing.assert_array_equal(found, reference.backward_data(SAME, grad, weight))
    found = evaluate(
        "conv2d_backward_weight", grad, data, kernel_size=3, strides=2, padding="SAME", groups=2, **LAYOUTS
    )
    np.testing.assert_array_equal(found, reference.backward_weight(SAME, grad, data))
    found = evaluate("conv2d", data, weight, strides=2, padding="SAME", groups=2, **LAYOUTS)
    np.testing.assert_array_equal(found, reference.forward(SAME, data, weight))


@pytest.mark.parametrize("direction", COMPOSITIONS)
def test_every_implementation(direction: str) -> None:
    operands = {"grad": ints(2, 4, 5, 6), "weight": ints(3, 3, 2, 6), "data": ints(2, 7, 9, 4)}
    names = {"forward": ("data", "weight"), "backward_weight": ("grad", "data"), "backward_data": ("grad", "weight")}
    arrays = [operands[name] for name in names[direction]]
    want = reference.DIRECTIONS[direction](SAME, *arrays)
    for impl in ("auto", "kernel", "composition", *COMPOSITIONS[direction]):
        np.testing.assert_array_equal(evaluate_problem(direction, SAME, *arrays, impl=impl), want)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_forms_of_padding_mean_the_same(rank: int) -> None:
    grad, data = ints(1, 2, *(5,) * rank), ints(1, 3, *(5,) * rank)
    name = f"conv{rank}d_backward_weight"
    first = evaluate(name, grad, data, kernel_size=3, padding=1)
    for padding in ((1,), (1,) * rank, (1,) * 2 * rank, ((1, 1),) * rank, "SAME"):
        np.testing.assert_array_equal(evaluate(name, grad, data, kernel_size=(3,) * rank, padding=padding), first)


def test_arrays_that_are_not_contiguous() -> None:
    grad, data = ints(3, 5, 4, 2).transpose(3, 2, 1, 0), ints(2, 3, 5, 8)[..., ::2]
    problem = ConvProblem(2, 3, 4, (5, 4), (1, 2), padding=((0, 0), (0, 0)))
    with pytest.raises(ProblemError, match="axis W"):
        evaluate("conv2d_backward_weight", grad, data, kernel_size=(1, 1))
    found = evaluate("conv2d_backward_weight", grad, data, kernel_size=(1, 2))
    np.testing.assert_array_equal(found, reference.backward_weight(problem, grad, data))


def test_a_second_call_does_not_compile() -> None:
    grad, data = ints(1, 2, 6), ints(1, 3, 8)
    evaluate("conv1d_backward_weight", grad, data, kernel_size=3)
    misses = _compiled.cache_info().misses
    again = evaluate("conv1d_backward_weight", ints(1, 2, 6), data, kernel_size=3, padding="VALID")
    assert again.shape == (2, 3, 3)
    assert _compiled.cache_info().misses == misses


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "kind", "part"),
    [
        ("conv4d", [(1,), (1,)], {}, UnsupportedError, "no operator 'conv4d'; there are conv1d, conv1d_backward_data"),
        ("conv1d", [(1, 3, 8)], {}, ProblemError, "1 arrays were given; it takes two, data and weight"),
        ("conv1d", [(1, 3, 8), (2, 2, 3)], {}, ProblemError, "I axis is 2"),
        ("conv1d", [(1, 3, 8), (2, 3, 3)], {"kernel_size": 3}, ProblemError, "kernel_size unknown"),
        ("conv1d_backward_weight", [(1, 2, 6), (1, 3, 8)], {}, ProblemError, "kernel_size is missing"),
        (
            "conv1d_backward_data",
            [(1, 2, 6), (2, 3, 3)],
            {"stride": 1, "data_shape": (1, 3, 8)},
            ProblemError,
            "stride unknown",
        ),
        ("conv1d_backward_weight", [(1, 2, 6), (1, 3, 8)], {"kernel_size": 4}, ProblemError, "gives 5, but grad has 6"),
        ("conv1d_backward_data", [(1, 2, 6), (2, 3, 3)], {"data_shape": (1, 3, 9)}, ProblemError, "gives 7"),
    ],
)
def test_wrong_calls(
    name: str, shapes: list[Any], attributes: dict[str, Any], kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind) as caught:
        evaluate(name, *(ints(*shape) for shape in shapes), **attributes)
    assert part in str(caught.value)


def test_wrong_types_and_implementations() -> None:
    grad, data = ints(1, 2, 6), ints(1, 3, 8)
    with pytest.raises(DTypeError, match="grad has dtype int64"):
        evaluate("conv1d_backward_weight", grad.astype("int64"), data, kernel_size=3)
    with pytest.raises(
        UnsupportedError, match=r"no implementation 'composition:dilated'; there are .*composition:tiled"
    ):
        evaluate("conv1d_backward_weight", grad, data, kernel_size=3, impl="composition:dilated")
    problem = ConvProblem(1, 3, 2, (8,), (3,))
    with pytest.raises(ProblemError, match=r"grad is float64\[1, 2, 6\], but .* needs float32\[1, 2, 6\]"):
        evaluate_problem("backward_weight", problem, grad.astype("float64"), data)
    with pytest.raises(ProblemError, match="needs static extents"):
        evaluate_problem("backward_weight", ConvProblem("n", 3, 2, (8,), (3,)), grad, data)


@pytest.mark.parametrize(
    ("target", "error", "shown"),
    [
        ({"kind": "llvm", "mcpu": "cascadelak"}, UnsupportedError, "has no CPU 'cascadelak'; it has cascadelake"),
        ("lllvm", UnsupportedError, "evaluate: target = 'lllvm' is not one of TVM"),
        ("cuda:sm_90", SetupError, "GPU"),
        ({"kind": "llvm", "mtriple": "riscv64-linux-gnu"}, SetupError, "is for riscv64, but this machine is"),
    ],
)
def test_targets_that_cannot_run_here(target: Any, error: type[Exception], shown: str) -> None:
    with pytest.raises(error, match=shown):
        evaluate("conv2d", ints(1, 1, 4, 4), ints(1, 1, 3, 3), target=target)


def test_instructions_that_this_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "local_features", lambda: frozenset({"none"}))
    monkeypatch.setattr(evaluation, "required_features", lambda _: ["avx512f"])
    with pytest.raises(SetupError, match="needs avx512f, which this CPU does not have; use 'native'"):
        evaluate("conv2d", ints(1, 1, 4, 4), ints(1, 1, 3, 3))


def test_targets_by_name_are_those_of_the_command_line() -> None:
    x, w = ints(1, 2, 6, 6), ints(3, 2, 3, 3)
    np.testing.assert_array_equal(evaluate("conv2d", x, w, target="native"), evaluate("conv2d", x, w))


def test_op_functions_exist_for_the_whole_family() -> None:
    for name in BY_NAME:
        if "backward" in name:
            assert getattr(op, name).__doc__
    with pytest.raises(UnsupportedError, match=r"Relax expressions, not ndarray; for numpy arrays there is .*evaluate"):
        op.conv2d_backward_weight(ints(1, 1, 1, 1), tensor("data", (1, 1, 1, 1)), kernel_size=1)
