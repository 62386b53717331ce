# SPDX-License-Identifier: Apache-2.0
"""Gradients of reductions over any axes, with symbolic extents among the reduced ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gradients.harness import batch, check, gradients, integers, relax, sample

op = relax.op
SHAPE = (3, 4, 5, 2)
AXES = [None, [1], [-1, 0], [0, 2, 3]]


def _torch(name, axes, keepdims):
    torch = pytest.importorskip("torch")
    dims = tuple(range(4)) if axes is None else tuple(axes)
    if name in ("variance", "std"):
        function = torch.var if name == "variance" else torch.std
        return lambda x: function(x, dims, unbiased=False, keepdim=keepdims)
    function = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[name]
    return lambda x: function(x, dims, keepdim=keepdims)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "variance", "std", "max", "min"])
def test_reduction(name, axes):
    keepdims = axes == [1]
    arrays = [integers(*SHAPE) if name in ("sum", "max", "min") else sample(*SHAPE)]
    symbolic = batch(arrays, {0: "n", 2: "h"}) if axes != [1] else {}
    check(
        lambda _, x: getattr(op, name)(x, axis=axes, keepdims=keepdims),
        _torch(name, axes, keepdims),
        arrays,
        symbolic=symbolic,
        terms=120,
    )


def test_variance_far_from_zero():
    """Values around 1000: a formula that subtracts sums of squares would lose all digits."""
    arrays = [sample(4, 6) + 1000]
    check(
        lambda _, x: op.variance(x, axis=[0, 1]),
        lambda x: ((x - x.mean()) ** 2).mean(),
        arrays,
        numeric=True,
        terms=4000,
    )


def test_mean_of_many_float16():
    x = np.ones((60000,), "float16")
    (found,), (cot,) = gradients(lambda _, v: op.multiply(op.mean(v, [0]), relax.const(8192, "float16")), [x])
    np.testing.assert_allclose(found, np.full(60000, 8192 / 60000) * float(cot), rtol=2**-9)


@pytest.mark.parametrize("like", [False, True])
def test_collapse_sum(like):
    pytest.importorskip("torch")
    x, target = integers(*SHAPE), integers(4, 1, 2)

    def build(_, v, t):
        return op.collapse_sum_like(v, t) if like else op.collapse_sum_to(v, (4, 1, 2))

    check(build, lambda v, t: v.sum((0, 2))[:, None], [x, target], wrt=[0], symbolic={(0, 0): "n"}, exact=True)


def test_broadcast_to():
    pytest.importorskip("torch")
    check(
        lambda _, x: op.broadcast_to(x, (2, 4, 3, 5)), lambda x: x.expand(2, 4, 3, 5), [integers(4, 1, 5)], exact=True
    )


def test_cumsum():
    torch = pytest.importorskip("torch")
    arrays = [integers(*SHAPE)]
    check(lambda _, x: op.cumsum(x, 1), lambda x: torch.cumsum(x, 1), arrays, symbolic=batch(arrays), exact=True)
    exclusive = lambda x: torch.cumsum(x, 1) - x  # noqa: E731
    check(lambda _, x: op.cumsum(x, 1, exclusive=True), exclusive, arrays, symbolic=batch(arrays), exact=True)
    check(
        lambda _, x: op.cumsum(x, exclusive=True),
        lambda x: torch.cumsum(x.flatten(), 0) - x.flatten(),
        arrays,
        exact=True,
    )
