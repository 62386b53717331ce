# SPDX-License-Identifier: Apache-2.0
"""Gradients of an instance norm whose result is permuted, against differences of the loss in float64.

PyTorch 2.13 cannot be the reference: on CPUs its own gradients of scale and shift are wrong there, in float64 too.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

CHANGE = 1e-5


class Tokens(torch.nn.Module):
    """Pixels as tokens of a layer that takes them first, as attention with `batch_first=True` does inside."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.InstanceNorm2d(6, affine=True), torch.nn.Linear(6, 4)

    def forward(self, x):
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        return self.linear(tokens.transpose(0, 1)).tanh().transpose(0, 1)


def test_gradients_are_those_of_the_loss():
    torch.manual_seed(1)
    network = Tokens()
    x, target = torch.randn(3, 6, 5, 3), torch.randn(3, 15, 4)
    exact = copy.deepcopy(network).double()

    @torch.no_grad()
    def loss():
        return float(((exact(x.double()) - target.double()) ** 2).sum())

    step = build_step(from_exported_program(torch.export.export(network, (x,))), loss="mse", lr=1.0)
    runner = Runner(step)
    before = runner.named("parameter")
    runner.step(x.numpy(), target.numpy(), lr=float(target.numel()))
    after = runner.named("parameter")
    for name, parameter in exact.named_parameters():
        wanted = np.zeros(parameter.numel())
        for place in range(parameter.numel()):
            row = parameter.data.view(-1)
            value = float(row[place])
            row[place] = value + CHANGE
            above = loss()
            row[place] = value - CHANGE
            wanted[place] = (above - loss()) / (2 * CHANGE)
            row[place] = value
        found = (before[name].astype("float64") - after[name]).reshape(-1)
        # Sums of 180 terms, and of before and after.
        np.testing.assert_allclose(found, wanted, rtol=0, atol=400 * 2.0**-24 * max(np.abs(wanted).max(), 1.0))
