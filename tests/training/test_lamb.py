# SPDX-License-Identifier: Apache-2.0
"""LAMB against its paper's Algorithm 2 in float64, with bounds, averages, groups that do not decay and loss scales."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.training.harness import Runner, relative_error
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.model.ensemble import ensemble
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step

BATCH, FEATURES, OUTPUTS = 8, 12, 5
RNG = np.random.default_rng(11)
VALUES = {
    "weight": RNG.standard_normal((FEATURES, OUTPUTS)).astype("float32"),
    "bias": np.zeros(OUTPUTS, "float32"),  # a norm of 0, for which the ratio is 1
}
BETAS, EPS, DECAY, RATE = (0.8, 0.95), 1e-6, 0.1, 0.02


def linear():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((BATCH, FEATURES), "float32"))
    weight, bias = (relax.Var(name, relax.TensorType(value.shape, "float32")) for name, value in VALUES.items())
    with builder.function("main", [x, weight, bias]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.add(relax.op.matmul(x, weight), bias))
        builder.emit_func_output(y)
    return from_module(builder.get(), parameters=VALUES)


class Paper:
    """Algorithm 2 on the mean squared error of a linear layer."""

    def __init__(self, clip=None, ema=None, biases_decay=True):
        self.values = {name: value.astype("float64") for name, value in VALUES.items()}
        self.averages = dict(self.values)
        self.moments = dict.fromkeys(VALUES, (0.0, 0.0))
        self.clip, self.ema, self.biases_decay, self.steps = clip, ema, biases_decay, 0

    def step(self, x, target, rate):
        self.steps += 1
        difference = x.astype("float64") @ self.values["weight"] + self.values["bias"] - target
        scaled = 2 * difference / difference.size
        gradients = {"weight": x.T @ scaled, "bias": scaled.sum(0)}
        if self.clip:
            norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
            gradients = {name: value * min(1.0, self.clip / (norm + 1e-6)) for name, value in gradients.items()}
        for name, gradient in gradients.items():
            m, v = self.moments[name]
            m, v = BETAS[0] * m + (1 - BETAS[0]) * gradient, BETAS[1] * v + (1 - BETAS[1]) * gradient**2
            self.moments[name] = m, v
            ratio = m / (1 - BETAS[0] ** self.steps) / (np.sqrt(v / (1 - BETAS[1] ** self.steps)) + EPS)
            value = self.values[name]
            update = ratio + (DECAY * value if value.ndim > 1 or self.biases_decay else 0.0)
            sizes = np.linalg.norm(value), np.linalg.norm(update)
            trust = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
            self.values[name] = value - rate * trust * update
            if self.ema:
                self.averages[name] = self.ema * self.averages[name] + (1 - self.ema) * self.values[name]
        return (difference**2).mean()


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"clip_norm": 0.05, "decayed": "matrices"}, {"clip": 0.05, "biases_decay": False}),
        ({"ema": 0.7, "loss_scale": 64.0}, {"ema": 0.7}),
        ({"loss_scale": "dynamic", "decayed": "matrices"}, {"biases_decay": False}),
    ],
    ids=str,
)
def test_steps_are_those_of_the_paper(options, reference):
    settings = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    runner = Runner(build_step(linear(), loss="mse", optimizer="lamb", **settings, **options))
    paper = Paper(**reference)
    for number in range(6):
        x = RNG.standard_normal((BATCH, FEATURES)).astype("float32")
        target = RNG.standard_normal((BATCH, OUTPUTS)).astype("float32")
        rate = RATE / (1 + number)
        loss, _ = runner.step(x, target, lr=rate)
        assert loss == pytest.approx(paper.step(x, target, rate), rel=1e-5)
    for name, value in runner.named("parameter").items():
        assert relative_error(value, paper.values[name]) < 1e-5
    if "ema" in options:
        for name, value in runner.named("average").items():
            assert relative_error(value, paper.averages[name.removesuffix(".ema")]) < 1e-5


def test_a_gradient_that_is_not_a_number_stays_one():
    """So that a run ends: the rule for norms of 0 must not hide it."""
    runner = Runner(build_step(linear(), loss="mse", optimizer="lamb"))
    x = np.full((BATCH, FEATURES), np.nan, "float32")
    runner.step(x, np.zeros((BATCH, OUTPUTS), "float32"), lr=RATE)
    assert all(np.isnan(value).all() for value in runner.named("parameter").values())


def test_an_ensemble_is_refused():
    with pytest.raises(UnsupportedError, match="lamb takes the norm of a parameter, which would join the members"):
        build_step(ensemble([linear(), linear()]), loss="mse", optimizer="lamb")
