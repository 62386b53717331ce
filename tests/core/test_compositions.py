# SPDX-License-Identifier: Apache-2.0
"""Every composition of legalize/ on 500 random problems, executed in numpy: the algebra without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from legalize.forms import DATA_FORMS, WEIGHT_FORMS, compose_backward_data, compose_backward_weight
from legalize.rearrange import rearrange
from tests.core.numpy_builder import NumpyBuilder
from tests.core.strategies import problems
from tvm_convgrad.core import reference
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem

BUILDER = NumpyBuilder()


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def test_backward_weight(form: str, problem: ConvProblem) -> None:
    (grad, data), _ = numbers_of(problem, "backward_weight")
    found = compose_backward_weight(BUILDER, problem, grad.astype("float64"), data.astype("float64"), form)
    np.testing.assert_array_equal(found, reference.backward_weight(problem, grad, data))


@pytest.mark.parametrize("form", DATA_FORMS)
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def test_backward_data(form: str, problem: ConvProblem) -> None:
    (grad, weight), _ = numbers_of(problem, "backward_data")
    found = compose_backward_data(
        BUILDER, problem, grad.astype("float64"), weight.astype("float64"), problem.data_shape, form
    )
    np.testing.assert_array_equal(found, reference.backward_data(problem, grad, weight))


def test_unknown_and_refused_forms() -> None:
    problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3")
    grad, data = (np.zeros(problem.tensors[name][0]) for name in ("grad", "data"))
    with pytest.raises(UnsupportedError, match="no composition 'winograd'; there are swapped, tiled"):
        compose_backward_weight(BUILDER, problem, grad, data, "winograd")
    symbolic = ConvProblem.from_descriptor("mb{n}ic3ih5oc4kh3")
    with pytest.raises(UnsupportedError, match=r"'tiled' refuses .*mb\{n\}.*the batch is symbolic"):
        compose_backward_weight(BUILDER, symbolic, grad, data, "tiled")


@pytest.mark.parametrize(
    ("pattern", "sizes", "shape"),
    [
        ("n (g i) ... -> i (g n) ...", {"g": 2}, (3, 4, 5, 6)),
        ("n c ... -> 1 (n c) ...", {}, (1, 12, 5, 6)),
        ("n o ... -> o n ...", {}, (6, 2, 5, 6)),
    ],
)
def test_rearrange_shapes(pattern: str, sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    n, c = {"i": (2, 6), "1": (2, 6), "o": (2, 6)}[pattern.split("-> ")[1][0]]
    value = np.arange(n * c * 30.0).reshape(n, c, 5, 6)
    assert rearrange(BUILDER, value, pattern, **sizes).shape == shape


def test_moving_axes_of_one_element_is_a_reshape() -> None:
    class Still(NumpyBuilder):
        def transpose(self, value: Any, permutation: Sequence[int]) -> Any:
            raise AssertionError("no element moves")

    value = np.arange(2 * 6 * 5).reshape(2, 1, 6, 5)
    found = rearrange(Still(), value, "b n c ... -> n (b c) ...")
    np.testing.assert_array_equal(found, value.reshape(1, 12, 5))


def test_rearrange_is_what_einops_means() -> None:
    value = np.arange(2 * 6 * 5).reshape(2, 6, 5)
    found = rearrange(BUILDER, value, "n (g i) ... -> i (g n) ...", g=3)
    want = value.reshape(2, 3, 2, 5).transpose(2, 1, 0, 3).reshape(2, 6, 5)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("pattern", "sizes", "part"),
    [
        ("n (g i) ... -> i (g n) ...", {}, "leaves the sizes of g, i open"),
        ("n c w ... -> n c w ...", {"x": 1}, None),
        ("n c ... -> n ...", {}, "same names on both sides"),
        ("n c h w d -> n c h w d", {}, "has 5 axes"),
    ],
)
def test_rearrange_refuses(pattern: str, sizes: dict[str, int], part: str | None) -> None:
    value = np.zeros((2, 6, 5))
    if part is None:
        assert rearrange(BUILDER, value, pattern, **sizes).shape == value.shape
        return
    with pytest.raises(ProblemError, match=part):
        rearrange(BUILDER, value, pattern, **sizes)
