# SPDX-License-Identifier: Apache-2.0
"""Gradients of a .pt2's functions at their kinks and bounds are PyTorch's, which no finite difference has."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

X = np.array([[0, 3, 6, -3], [-1, 1, 0, 0], [6, 6, 3, 3], [0.5, -0.5, 2, -6], [1, 1, 1, 1]], "float32")
"""The bounds of every function, some of them side by side."""

FUNCTIONS = {
    "clamp from 0 to 6": lambda x: torch.clamp(x, 0, 6),
    "clamp to 6": lambda x: torch.clamp(x, max=6),
    "clamp from -3 to 3": lambda x: x.clamp(-3, 3),
    "clamp by tensors": lambda x: torch.clamp(x, torch.zeros(4), torch.full((4,), 6.0)),
    "square root of a clamp": lambda x: x.clamp(min=1e-3).sqrt(),
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -3, 3),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": lambda x: F.hardshrink(x, 1.0),
    "softshrink": lambda x: F.softshrink(x, 1.0),
    "threshold": lambda x: F.threshold(x, 1.0, 0.5),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25])),
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "softplus": lambda x: F.softplus(x, 1, 3),
    "logsigmoid": F.logsigmoid,
    "abs": torch.abs,
    "power of abs": lambda x: x.abs() ** 1.5,
    "sign": lambda x: torch.sign(x) * x,
    "floor": lambda x: torch.floor(x) * x,
    "frac": torch.frac,
    "fmod": lambda x: torch.fmod(x, 3.0),
    "remainder": lambda x: torch.remainder(x, 3.0),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "maximum with a number": lambda x: torch.maximum(x, torch.ones_like(x)),
    "maximum with ties": lambda x: torch.max(x, x.flip(1)),
    "minimum with ties": lambda x: torch.minimum(x, x.flip(1)),
    "amax with ties": lambda x: x * x.amax(1, keepdim=True),
    "norm": lambda x: x * x.norm(dim=1, keepdim=True),
    "norm of order 1": lambda x: x * x.norm(p=1, dim=1, keepdim=True),
    "largest norm": lambda x: x * x.norm(p=float("inf"), dim=1, keepdim=True),
    "where": lambda x: torch.where(x >= 3, x * 2, x),
    "hinge": lambda x: F.relu(1 - x),
    "copysign": lambda x: torch.copysign(x, -x),
    "product with zeros": lambda x: x * x.prod(1, keepdim=True) / 100,
    "cumulative product": lambda x: torch.cumprod(x, 1) / 100,
}


class Functions(torch.nn.Module):
    """The results of all functions of rows of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(np.repeat(X[None], len(FUNCTIONS), 0)))

    def forward(self, x):
        """`x` is added, and is zero."""
        return torch.stack([function(self.w[i] + x) for i, function in enumerate(FUNCTIONS.values())], 1)


def test_gradients_at_kinks_are_those_of_pytorch() -> None:
    model, zeros = Functions(), torch.zeros(X.shape)
    step = build_step(from_exported_program(torch.export.export(model, (zeros,))), loss="mse", lr=1.0)
    runner = Runner(step)
    upstream = np.linspace(-1, 2, len(FUNCTIONS) * X.size, dtype="float32").reshape(len(X), len(FUNCTIONS), -1)
    found = model(zeros)
    target = (found - torch.tensor(upstream)).detach()
    before = runner.named("parameter")["w"].copy()
    runner.step(zeros.numpy(), target.numpy(), lr=1.0)
    moved = before - runner.named("parameter")["w"]
    torch.nn.functional.mse_loss(found, target).backward()
    assert model.w.grad is not None
    wanted = model.w.grad.numpy()
    close = np.isclose(moved, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), equal_nan=True)
    wrong = {name: X[~row].tolist() for name, row in zip(FUNCTIONS, close, strict=True) if not row.all()}
    assert wrong == {}


class Extrema(torch.nn.Module):
    """The largest and the smallest of each row, and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        """Of x."""
        high, low = (x + self.w).max(1), (x + self.w).min(1)
        return torch.stack([high.values, low.values, high.indices.float(), low.indices.float()], 1)


def test_extrema_along_an_axis_pass_nan_on() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1, nan, 3, 2], [nan, nan, 0, 0], [1, 2, 2, 1], [-inf, 1, inf, 0], [0, 0, 0, nan]]
    x, model = np.array(rows, "float32"), Extrema()
    program = torch.export.export(model, (torch.tensor(x),))
    runner = Runner(build_step(from_exported_program(program), loss="mse", lr=1.0))
    np.testing.assert_array_equal(runner.predict(x), model(torch.tensor(x)).detach().numpy())
