# SPDX-License-Identifier: Apache-2.0
"""Gradients of gather_nd and scatter_nd; all exact."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gradients.harness import check, integers, relax
from tvm_convgrad.core.errors import UnsupportedError

op = relax.op
X = integers(2, 3, 4, 5)


def constant(values):
    return relax.const(np.array(values, "int64"), "int64")


GATHERED = {
    "repeated": (lambda x: op.gather_nd(x, constant([[1, 2], [0, 0], [1, 2]])), lambda x: x[[1, 0, 1], [2, 0, 2]]),
    "elements": (lambda x: op.gather_nd(x, constant([[1, 2, 3, 4]])), lambda x: x[[1], [2], [3], [4]]),
    "one_axis": (
        lambda x: op.gather_nd(x, constant([[[1], [1]], [[0], [1]]])),
        lambda x: x[np.array([[1, 1], [0, 1]])],
    ),
    "batch": (
        lambda x: op.gather_nd(x, constant([[[0, 1], [2, 3]], [[1, 1], [1, 1]]]), 1),
        lambda x: x[[[0, 0], [1, 1]], [[0, 2], [1, 1]], [[1, 3], [1, 1]]],
    ),
    "batch_of_two_axes": (
        lambda x: op.gather_nd(x, constant([[[3], [0], [1]], [[2], [2], [0]]]), 2),
        lambda x: x[[[0, 0, 0], [1, 1, 1]], [[0, 1, 2], [0, 1, 2]], [[3, 0, 1], [2, 2, 0]]],
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_gather_nd(name):
    pytest.importorskip("torch")
    build, oracle = GATHERED[name]
    check(lambda _, x: build(x), oracle, [X], exact=True)


@pytest.mark.parametrize("reduction", ["update", "add"])
def test_scatter_nd(reduction):
    """Places that occur twice get both of the updates that are added."""
    torch = pytest.importorskip("torch")
    places = [[1, 2], [0, 0], [1, 2 if reduction == "add" else 1]]
    index = tuple(torch.tensor(places).T)
    check(
        lambda _, x, u: op.scatter_nd(x, constant(places), u, reduction),
        lambda x, u: x.index_put(index, u, accumulate=reduction == "add"),
        [X, integers(3, 4, 5, seed=1)],
        exact=True,
    )


def test_other_reductions_are_refused():
    with pytest.raises(UnsupportedError, match="reduction 'mul' has no gradient"):
        check(
            lambda _, x, u: op.scatter_nd(x, constant([[1, 2]]), u, "mul"),
            lambda x, u: x,
            [X, integers(1, 4, 5, seed=1)],
        )
