# SPDX-License-Identifier: Apache-2.0
"""Gradients of ONNX operators at their kinks, where PyTorch's convention counts: finite differences have none."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

import torch.nn.functional as F  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tests.training.onnx_graphs import SHAPE, model  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

CASES = {
    # the nodes, and PyTorch's function of whole numbers
    "elu": (lambda g, x: g("Elu", x, alpha=0.7), lambda x: F.elu(x, 0.7)),
    "celu": (lambda g, x: g("Celu", x, alpha=1.3), lambda x: F.celu(x, 1.3)),
    "selu": (lambda g, x: g("Selu", x), F.selu),
    "clip": (lambda g, x: g("Clip", x, 0.0, 1.0), lambda x: x.clamp(0, 1)),
    "clip_low_tensor": (
        lambda g, x: g("Clip", x, g("Mul", g("ReduceMax", x, keepdims=0), 0.0)),
        lambda x: x.clamp(min=x.max() * 0),
    ),
    "clip_high_tensor": (
        lambda g, x: g("Clip", x, "", g("Mul", g("ReduceMax", x, keepdims=0), 0.0)),
        lambda x: x.clamp(max=x.max() * 0),
    ),
    "clip_tensors": (
        lambda g, x: g(
            "Clip", x, g("Mul", g("ReduceMax", x, keepdims=0), 0.0), g("Mul", g("ReduceMin", x, keepdims=0), -0.5)
        ),
        lambda x: x.clamp(x.max() * 0, x.min() * -0.5),
    ),
    "hard_sigmoid": (
        lambda g, x: g("HardSigmoid", g("Mul", x, 3.0), alpha=1 / 6, beta=0.5),
        lambda x: F.hardsigmoid(x * 3),
    ),
    "hard_swish": (lambda g, x: g("HardSwish", g("Mul", x, 3.0)), lambda x: F.hardswish(x * 3)),
    "relu": (lambda g, x: g("Relu", x), F.relu),
    "leaky_relu": (lambda g, x: g("LeakyRelu", x, alpha=0.2), lambda x: F.leaky_relu(x, 0.2)),
    "abs": (lambda g, x: g("Abs", x), torch.abs),
}


def whole():
    """-2, -1, 0, 1 and 2, all of them often."""
    return np.random.default_rng(5).integers(-2, 3, SHAPE).astype("float32")


def test_gradients_at_kinks_are_those_of_pytorch():
    step = build_step(
        from_onnx(model({name: nodes for name, (nodes, _) in CASES.items()}, 18, "float32")), loss="mse", lr=1.0
    )
    runner, x = Runner(step), whole()
    target = np.random.default_rng(6).normal(size=runner.predict(x).shape).astype("float32")
    runner.step(x, target, lr=float(target.size))
    after = runner.named("parameter")
    wrong = {}
    for number, (name, (_, function)) in enumerate(CASES.items()):
        data = torch.tensor(x.astype("float64"), requires_grad=True)
        width = int(np.prod(SHAPE[1:]))
        wanted = torch.tensor(target[:, number * width : (number + 1) * width].astype("float64"))
        ((function(data).flatten(1) - wanted) ** 2).sum().backward()
        slope = data.grad.numpy().sum(0)
        error = float(np.abs(-after[f"offsets.{name}"] - slope).max())
        if not error < 1e-5 * np.abs(slope).max():
            wrong[name] = error
    assert wrong == {}
