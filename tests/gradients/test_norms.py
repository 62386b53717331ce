# SPDX-License-Identifier: Apache-2.0
"""Gradients of the normalisations in data, gamma and beta, with symbolic batch and extents."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gradients.harness import batch, check, gradients, relax, sample

op = relax.op
X = sample(2, 4, 6, 5)
SPATIAL = {0: "n", 2: "h", 3: "w"}
TERMS = 8 * 240


@pytest.mark.parametrize("axes", [[-1], [-2, -1], [1, 2, 3]], ids=str)
def test_layer_norm(axes):
    functional = pytest.importorskip("torch").nn.functional
    shape = X.shape[min(axes) :]
    arrays = [X, sample(*shape, seed=1), sample(*shape, seed=2)]
    check(
        lambda _, x, g, b: op.nn.layer_norm(x, g, b, axes, 1e-3),
        lambda x, g, b: functional.layer_norm(x, shape, g, b, 1e-3),
        arrays,
        symbolic={(0, 0): "n"},
        terms=TERMS,
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups):
    functional = pytest.importorskip("torch").nn.functional
    arrays = [X, sample(4, seed=1), sample(4, seed=2)]
    check(
        lambda _, x, g, b: op.nn.group_norm(x, g, b, groups, 1, [2, 3]),
        lambda x, g, b: functional.group_norm(x, groups, g, b),
        arrays,
        symbolic=batch(arrays, SPATIAL) if groups == 2 else {},
        terms=TERMS,
    )


def test_group_norm_with_channels_last():
    functional = pytest.importorskip("torch").nn.functional
    arrays = [sample(2, 3, 5, 4), sample(4, seed=1), sample(4, seed=2)]
    check(
        lambda _, x, g, b: op.nn.group_norm(x, g, b, 2, 3, [1, 2]),
        lambda x, g, b: functional.group_norm(x.permute(0, 3, 1, 2), 2, g, b).permute(0, 2, 3, 1),
        arrays,
        symbolic=batch(arrays),
        terms=TERMS,
    )


def test_instance_norm():
    functional = pytest.importorskip("torch").nn.functional
    arrays = [X, sample(4, seed=1), sample(4, seed=2)]
    check(
        lambda _, x, g, b: op.nn.instance_norm(x, g, b, 1, [2, 3]),
        lambda x, g, b: functional.instance_norm(x, weight=g, bias=b),
        arrays,
        symbolic=batch(arrays, SPATIAL),
        terms=TERMS,
    )


def test_rms_norm_by_finite_differences():
    arrays = [sample(3, 4, 6), sample(4, 6, seed=1)]

    def oracle(x, w):
        return x * w / np.sqrt((x * x).mean((1, 2), keepdims=True) + 1e-3)

    check(
        lambda _, x, w: op.nn.rms_norm(x, w, [-2, -1], 1e-3),
        oracle,
        arrays,
        symbolic={(0, 0): "n"},
        numeric=True,
        terms=TERMS,
    )


def _batch_norm_outputs(x, g, b, m, v, momentum=0.25):
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    y = (x - mean[:, None, None]) / np.sqrt(variance + 1e-3)[:, None, None] * g[:, None, None] + b[:, None, None]
    return [y, (1 - momentum) * m + momentum * mean, (1 - momentum) * v + momentum * variance]


@pytest.mark.parametrize("outputs", [1, 3])
def test_batch_norm_in_training(outputs):
    """Also with gradients that arrive at the running statistics."""
    arrays = [sample(2, 3, 4, 2), *(sample(3, seed=i, positive=True) for i in range(4))]

    def build(builder, *args):
        result = builder.emit(op.nn.batch_norm(*args, axis=1, epsilon=1e-3, momentum=0.25))
        return [relax.TupleGetItem(result, i) for i in range(outputs)]

    check(
        build,
        lambda *args: _batch_norm_outputs(*args)[:outputs],
        arrays,
        symbolic=batch(arrays, {0: "n", 2: "h"}),
        numeric=True,
        terms=TERMS,
    )


def test_batch_norm_with_channels_last_and_without_scale():
    arrays = [sample(2, 4, 2, 3), *(sample(3, seed=i, positive=True) for i in range(4))]

    def build(builder, *args):
        result = builder.emit(op.nn.batch_norm(*args, axis=3, epsilon=1e-3, scale=False, center=False))
        return relax.TupleGetItem(result, 0)

    def oracle(x, *_):
        return (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-3)

    check(build, oracle, arrays, numeric=True, terms=TERMS)


def test_batch_norm_with_moving_statistics():
    arrays = [sample(2, 3, 4, 2), *(sample(3, seed=i, positive=True) for i in range(4))]

    def build(builder, *args):
        result = builder.emit(op.nn.batch_norm(*args, axis=1, epsilon=1e-3, training=False))
        return relax.TupleGetItem(result, 0)

    def oracle(x, g, b, m, v):
        spread = [t[:, None, None] for t in (g, b, m, v)]
        return (x - spread[2]) / np.sqrt(spread[3] + 1e-3) * spread[0] + spread[1]

    check(build, oracle, arrays, symbolic=batch(arrays), numeric=True, terms=TERMS)


def test_layer_norm_in_float16_sums_in_float32():
    x, g, b = (sample(64, 64), sample(64, seed=1), sample(64, seed=2))
    halves = [v.astype("float16") for v in (x, g, b)]

    def build(_, v, gamma, beta):
        return op.nn.layer_norm(v, gamma, beta, [-1], 1e-3)

    found, _ = gradients(build, halves)
    wide, _ = gradients(build, [h.astype("float32") for h in halves])
    for have, want in zip(found, wide, strict=True):
        assert have.dtype == np.float16
        np.testing.assert_allclose(have, want, rtol=2**-10, atol=2**-10 * np.abs(want).max())
