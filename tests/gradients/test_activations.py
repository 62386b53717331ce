# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations against PyTorch in float64, on and off the kinks, and one against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.gradients.harness import batch, check, gradients, integers, relax, sample
from tvm_convgrad.core.errors import UnsupportedError

op = relax.op
SHAPE = (3, 4, 5)


def _const(value):
    return relax.const(value, "float32")


SMOOTH = {
    "gelu": (op.nn.gelu, lambda F: F.gelu),
    "gelu_tanh": (op.nn.gelu_tanh, lambda F: lambda x: F.gelu(x, approximate="tanh")),
    "selu": (op.nn.selu, lambda F: F.selu),
    "silu": (op.nn.silu, lambda F: F.silu),
    "softplus": (lambda x: op.nn.softplus(x, 2.0, 3.0), lambda F: lambda x: F.softplus(x, 2.0, 3.0)),
    "hardswish": (
        lambda x: op.divide(op.multiply(x, op.clip(op.add(x, _const(3.0)), 0, 6)), _const(6.0)),
        lambda F: F.hardswish,
    ),
    "hardsigmoid": (
        lambda x: op.divide(op.clip(op.add(x, _const(3.0)), 0, 6), _const(6.0)),
        lambda F: F.hardsigmoid,
    ),
    "sigmoid": (op.sigmoid, lambda F: F.sigmoid),
    "tanh": (op.tanh, lambda F: F.tanh),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth(name):
    functional = pytest.importorskip("torch").nn.functional
    build, oracle = SMOOTH[name]
    arrays = [sample(*SHAPE) * 3]
    check(lambda _, x: build(x), oracle(functional), arrays, symbolic=batch(arrays))


@pytest.mark.parametrize(
    ("name", "build", "oracle"),
    [
        ("clip", lambda x: op.clip(x, -1, 1), lambda F: lambda x: x.clamp(-1, 1)),
        ("relu6", op.nn.relu6, lambda F: F.relu6),
        ("leakyrelu", lambda x: op.nn.leakyrelu(x, 0.25), lambda F: lambda x: F.leaky_relu(x, 0.25)),
    ],
)
def test_kinks_are_exact(name, build, oracle):
    """On the kinks as off them."""
    torch = pytest.importorskip("torch")
    arrays = [integers(*SHAPE, high=5) + (2 if name == "relu6" else 0)]
    check(lambda _, x: build(x), oracle(torch.nn.functional), arrays, symbolic=batch(arrays), exact=True)


@pytest.mark.parametrize("alphas", [4, 1])
def test_prelu(alphas):
    functional = pytest.importorskip("torch").nn.functional
    arrays = [integers(*SHAPE), integers(alphas, seed=3) / 4]
    check(lambda _, x, a: op.nn.prelu(x, a, 1), functional.prelu, arrays, symbolic=batch(arrays), exact=True)


def test_prelu_on_the_last_axis():
    arrays = [sample(2, 3, 4), np.array([0.25, -0.5, 1.0, 2.0], "float32")]
    check(
        lambda _, x, a: op.nn.prelu(x, a, 2),
        lambda x, a: np.where(x > 0, x, x * a),
        arrays,
        numeric=True,
        terms=6,
    )


def test_gelu_by_finite_differences():
    erf = np.vectorize(math.erf)
    arrays = [sample(2, 5) * 2]
    check(lambda _, x: op.nn.gelu(x), lambda x: x * (1 + erf(x / math.sqrt(2))) / 2, arrays, numeric=True)


def test_gelu_in_float16_keeps_the_dtype_and_half_precision():
    x = sample(4, 8).astype("float16")
    (found,), (cot,) = gradients(lambda _, v: op.nn.gelu(v), [x])
    erf = np.vectorize(math.erf)
    v = x.astype("float64")
    want = cot * ((1 + erf(v / math.sqrt(2))) / 2 + v * np.exp(-v * v / 2) / math.sqrt(2 * math.pi))
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, want, rtol=2**-10, atol=2**-12)


def test_selu_of_large_values_has_no_nan():
    (found,), _ = gradients(lambda _, v: op.nn.selu(v), [np.array([[200.0, -200.0]], "float32")])
    assert np.isfinite(found).all()


def test_dropout_itself_is_refused():
    def build(builder, x):
        return relax.TupleGetItem(builder.emit(op.nn.dropout(x, 0.5)), 0)

    with pytest.raises(UnsupportedError, match="seed_dropouts"):
        gradients(build, [sample(2, 3)])
