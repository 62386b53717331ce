# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of mixed types, and options that change it, in .pt2 files: a step predicts what PyTorch computes."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from tvm import relax

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.core.errors import UnsupportedError  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.promotion import as_declared  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

UNIT = 2.0**-24
CASES = {
    "bytes / 255": lambda x: (x.abs() * 9).byte() / 255.0 - 0.5,
    "bytes / a number": lambda x: (x.abs() * 9).byte() / 3,
    "int8 / 3": lambda x: (x * 10).to(torch.int8) / 3,
    "integers * 0.5": lambda x: x.long() * 0.5,
    "integers + 0.5": lambda x: x.long() + 0.5,
    "0.5 - integers": lambda x: 0.5 - x.long(),
    "1.5 - float16": lambda x: 1.5 - x.half(),
    "1 / integers": lambda x: 1.0 / (x.long().abs() + 1),
    "root of integers": lambda x: (x.long() + 5) ** 0.5 + torch.sqrt(x.long() + 5),
    "functions of integers": lambda x: (
        torch.exp(x.int()) + torch.tanh(x.abs().byte()) + torch.rsqrt(torch.arange(1, 6))
    ),
    "sigmoid of booleans": lambda x: torch.sigmoid(x > 0),
    "booleans * 1.5": lambda x: (x > 0) * 1.5,
    "booleans + booleans": lambda x: ((x > 0) + (x > 1)).float() + ((x > 0) * (x > -1)).float() * 2,
    "sums of booleans": lambda x: (x > 0).sum(1, keepdim=True) * x + (x > 0).cumsum(1) * 0.5,
    "float16 * float32": lambda x: x.half() * x,
    "float64 * float32": lambda x: x.double() * x,
    "2 ** integers": lambda x: torch.pow(2.0, x.long()),
    "integers < 0.5": lambda x: (x.long() < 0.5) * x + (x.long() == x) * 3,
    "clamp by floats": lambda x: x.long().clamp(-0.5, 1.5) * x,
    "where of mixed": lambda x: torch.where(x > 0, 1, 0.5) * x + torch.where(x.long() > 0, 0.5, x),
    "maximum of mixed": lambda x: torch.maximum(x.int(), x),
    "joined": lambda x: torch.cat([x[:, :3], x[:, 3:].long()], 1),
    "ages": lambda x: x * torch.exp(torch.arange(5) * -0.3) * (torch.arange(5) / 5),
    "quotient of integers": lambda x: x * (torch.arange(5) / torch.arange(1, 6)),
    "integers in float32": lambda x: x.long().sum(1, keepdim=True, dtype=torch.float32) * x,
    "place * 0.5": lambda x: x.argmax(1, keepdim=True) * 0.5 * x,
    "place among infinities": lambda x: torch.full_like(x, -torch.inf).argmax(1, keepdim=True) + x,
    "largest of infinities": lambda x: x.masked_fill(x < 9, -torch.inf).max(1, keepdim=True)[0].clamp(min=-3) + x,
    "add with alpha": lambda x: torch.add(x, x.sin(), alpha=2.5) + torch.add(x, 3, alpha=2),
    "sub with alpha": lambda x: torch.sub(x, x.sin(), alpha=2.5),
    "rsub with alpha": lambda x: torch.rsub(x, x.sin(), alpha=2.5),
    "integers with alpha": lambda x: torch.add(x.long(), x.int(), alpha=3) * 0.5,
    "addmm": lambda x: torch.addmm(x[:, :3], x, x.T, beta=0.3, alpha=1.7) @ x,
    "addmv": lambda x: torch.addmv(x[:, 0], x, x[0], beta=0.3, alpha=1.7)[:, None] * x,
    "addbmm": lambda x: torch.addbmm(x[:, :3], x[None], x.T[None], beta=0.3, alpha=1.7) @ x,
    "softmax in float32": lambda x: torch.softmax(x.half(), 1, dtype=torch.float32),
    "mean in float64": lambda x: x.mean(1, keepdim=True, dtype=torch.float64).float() * x,
    "mask of infinities": lambda x: torch.softmax(x[:, :3] + torch.full((3, 3), -torch.inf).triu(1), 1) @ x,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0) + F.hardtanh(x, -0.3, 0.7) + F.softplus(x, 2.0, 1.0),
}


class Cases(nn.Module):
    """All functions beside each other, each times a parameter, as a tensor of a row a sample."""

    def __init__(self, functions):
        super().__init__()
        self.functions, self.scale = functions, nn.Parameter(torch.ones(5))

    def forward(self, x):
        return torch.cat([function(x).float() * self.scale for function in self.functions], 1)


@cache
def predictions():
    """By name: what a compiled step predicts, and PyTorch."""
    x = torch.randn((3, 5), generator=torch.Generator().manual_seed(0)) * 1.5
    network = Cases(list(CASES.values()))
    runner = Runner(build_step(from_exported_program(torch.export.export(network, (x,))), loss="mse", lr=0.1))
    found, wanted = runner.predict(x.numpy()), network(x).detach().numpy()
    return {
        name: (a, b)
        for name, a, b in zip(CASES, np.split(found, len(CASES), 1), np.split(wanted, len(CASES), 1), strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_pytorch(name):
    """To a few roundings of the largest element, in the narrowest type that a case has."""
    found, wanted = predictions()[name]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=32 * UNIT * np.abs(wanted).max())


def test_a_translation_to_integers_of_what_is_a_float_is_refused():
    node = SimpleNamespace(meta={"val": torch.zeros(2)})
    importer = SimpleNamespace(block_builder=relax.BlockBuilder())
    same = relax.Var("x", relax.TensorType((2,), "float32"))
    assert as_declared(node, same, importer) is same
    with pytest.raises(UnsupportedError, match=r"float32 in PyTorch but int32 in TVM; convert them to one type"):
        as_declared(node, relax.Var("x", relax.TensorType((2,), "int32")), importer)


class UnderAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.up, self.head = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 5, 2), nn.Linear(5, 6)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.up(torch.relu(self.stem(x)))
            return self.head(x.mean((2, 3))).float()


def test_a_model_exported_under_autocast():
    """Each product rounds to 8 bits, in both; PyTorch's own error in bfloat16 beside float32 is of the same size."""
    torch.manual_seed(0)
    network, x = UnderAutocast(), torch.randn(2, 3, 8, 8)
    runner = Runner(build_step(from_exported_program(torch.export.export(network, (x,))), loss="mse", lr=0.1))
    wanted = network(x).detach().numpy()
    np.testing.assert_allclose(runner.predict(x.numpy()), wanted, rtol=0, atol=2.0**-8 * np.abs(wanted).max())
