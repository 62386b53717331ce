# SPDX-License-Identifier: Apache-2.0
"""Training with nn.batch_norm: its gradient by the statistics of the batch, and the running ones, against formulas."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relay

from relay_ops.batch_norm import BatchStatistics
from relay_ops.differentiate import value_and_gradients
from tests.relay_ops.harness import calls, run, typed
from tvm_convgrad.core.errors import ModelError, ProblemError, UnsupportedError

EPSILON = 2**-7  # a number of float32, to which Relay's SimplifyInference rounds it


def training(x, gamma, beta, mean, var, dy, axis, epsilon, momentum):
    """y, dx, dgamma, dbeta, running mean and variance, as Ioffe and Szegedy write them; in float64."""
    axes = tuple(i for i in range(x.ndim) if i != axis)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    n = x.size // x.shape[axis]
    m, v = x.mean(axes), x.var(axes)
    s = np.sqrt(v + epsilon).reshape(shape)
    normal = (x - m.reshape(shape)) / s
    dn = dy * gamma.reshape(shape)
    inner = dn - dn.mean(axes, keepdims=True) - normal * (dn * normal).mean(axes, keepdims=True)
    return (
        normal * gamma.reshape(shape) + beta.reshape(shape),
        inner / s,
        (dy * normal).sum(axes),
        dy.sum(axes),
        (1 - momentum) * mean + momentum * m,
        (1 - momentum) * var + momentum * v * n / (n - 1),
    )


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 4, 5), 1), ((2, 4, 5, 3), 3), ((6, 3), -1)])
def test_training(shape, axis):
    rng = np.random.default_rng(0)
    channels = shape[axis]
    arrays = {"x": 3 + rng.standard_normal(shape), "dy": rng.standard_normal(shape)}
    arrays |= {name: rng.uniform(1, 2, channels) for name in ("gamma", "beta", "mean", "var")}
    v = {name: relay.var(name, shape=array.shape, dtype="float64") for name, array in arrays.items()}
    made = relay.nn.batch_norm(v["x"], v["gamma"], v["beta"], v["mean"], v["var"], axis=axis, epsilon=EPSILON)
    function = relay.Function(list(v.values()), relay.Tuple([relay.sum(made[0] * v["dy"]), made[0], made[1], made[2]]))
    program = BatchStatistics(momentum=0.3)(typed(function))
    step = value_and_gradients(program["main"], more=True)
    assert len(calls(step, "nn.batch_norm")) == 1, "computed once"
    loss, dx, _, dgamma, dbeta, dmean, dvar, y, mean, var = run(step, arrays, opt_level=1)
    a = arrays
    want = training(a["x"], a["gamma"], a["beta"], a["mean"], a["var"], a["dy"], axis % len(shape), EPSILON, 0.3)
    for have, wanted in zip((y, dx, dgamma, dbeta, mean, var), want, strict=True):
        np.testing.assert_allclose(have, wanted, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(loss, (want[0] * arrays["dy"]).sum(), rtol=1e-11)
    assert not dmean.any()
    assert not dvar.any()


def test_the_gradient_of_a_weight_before_it():
    """conv, batch norm, relu in float32: the weight's gradient against a difference of numpy's loss in float64."""
    shapes = {"x": (4, 2, 6, 6), "w": (3, 2, 3, 3), "g": (3,), "b": (3,), "m": (3,), "v": (3,)}
    v = {name: relay.var(name, shape=shape) for name, shape in shapes.items()}
    value = relay.nn.conv2d(v["x"], v["w"], channels=3, kernel_size=(3, 3), padding=(1, 1))
    value = relay.nn.relu(relay.nn.batch_norm(value, v["g"], v["b"], v["m"], v["v"])[0])
    program = BatchStatistics()(typed(relay.Function(list(v.values()), relay.mean(value * value))))
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    step = value_and_gradients(program["main"])
    _, _, dw, *_ = run(step, arrays, opt_level=1)
    direction, h = rng.standard_normal(dw.shape), 1e-5
    losses = []
    for sign in (1, -1):
        moved = {name: array.astype("float64") for name, array in arrays.items()}
        moved["w"] = moved["w"] + sign * h * direction
        losses.append(numpy_loss(moved))
    difference = (losses[0] - losses[1]) / (2 * h)
    assert abs(difference - (dw * direction).sum()) <= 1e-4 * np.linalg.norm(dw) * np.linalg.norm(direction)


def numpy_loss(a):
    padded = np.pad(a["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    y = np.einsum("nchwij,ocij->nohw", windows, a["w"])
    dy, c = np.zeros_like(y), a["m"]
    y = training(y, a["g"], a["b"], c, c, dy, 1, 1e-5, 0.1)[0]
    return (np.maximum(y, 0) ** 2).mean()


def test_what_is_wrong_is_refused():
    def program(*shape):
        x, c = relay.var("x", shape=shape), relay.var("c", shape=(3,))
        return typed(relay.Function([x, c], relay.nn.batch_norm(x, c, c, c, c)[0]))

    with pytest.raises(ProblemError, match="share of the batch"):
        BatchStatistics(momentum=1.5)
    with pytest.raises(UnsupportedError, match=r"axis 0 .*Any"):
        BatchStatistics()(program(relay.Any(), 3))
    with pytest.raises(UnsupportedError, match="one element a channel"):
        BatchStatistics()(program(1, 3))
    with pytest.raises(ModelError, match="tuple of tensors"):
        value_and_gradients(program(2, 3)["main"], more=True)
