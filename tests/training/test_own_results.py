# SPDX-License-Identifier: Apache-2.0
"""Buffers of a model that keep another buffer, a parameter, the inputs or the predictions do not change with them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tvm

torch = pytest.importorskip("torch")

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

CASES = {
    "another buffer": lambda net, x, y: (net.number.mul_(0.9).add_(0.3), net.kept.copy_(net.number.reshape(2, 2))),
    "a buffer of statistics": lambda net, x, y: (
        net.number.mul_(0.9).add_(y.detach().mean(0), alpha=0.1),
        net.kept.copy_(net.number.reshape(2, 2)),
    ),
    "the old value of another": lambda net, x, y: (
        net.kept.copy_(net.number.reshape(2, 2)),
        net.number.mul_(0.9).add_(0.3),
    ),
    "a parameter": lambda net, x, y: net.kept.copy_(net.scale.detach().reshape(2, 2)),
    "a part of the input": lambda net, x, y: net.kept.copy_(x[0, :4].reshape(2, 2)),
    "the input": lambda net, x, y: net.samples.copy_(x),
    "a constant": lambda net, x, y: net.kept.fill_(0.25),
}


class Net(torch.nn.Module):
    """Two buffers, which the forward pass reads and then changes as a case says."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("number", torch.ones(4))
        self.register_buffer("kept", torch.zeros(2, 2))
        self.register_buffer("samples", torch.zeros(6, 4))

    def forward(self, x):
        seen = self.kept.clone().reshape(4) + self.number.clone() + 0.1 * self.samples.clone()
        y = torch.tanh(x * self.scale) * seen
        self.change(self, x, y)
        return self.linear(y)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"recompute": "all"}, {"split": True}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_buffer_keeps_what_it_was_given(case, options):
    torch.manual_seed(0)
    net, parts = Net(CASES[case]).train(), options.get("accumulate", 1)
    runner = Runner(build_step(from_exported_program(torch.export.export(net, (torch.randn(6, 4),))), **options))
    reference = copy.deepcopy(net)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    tensor = tvm.runtime.tensor(np.empty((6 * parts, 4), "float32"))  # one for all batches, as a pool of buffers
    for _ in range(4):
        x, target = torch.randn(6 * parts, 4), torch.randint(0, 3, (6 * parts,))
        optimizer.zero_grad()
        wanted = 0.0
        for part in range(parts):
            rows = slice(6 * part, 6 * part + 6)
            loss = torch.nn.functional.cross_entropy(reference(x[rows]), target[rows]) / parts
            loss.backward()
            wanted += loss.item()
        optimizer.step()
        tensor.copyfrom(x.numpy())
        loss = _step(runner, tensor, target.numpy(), bool(options.get("split")))
        assert abs(loss - wanted) < 1e-5 * max(1.0, abs(wanted))
    for name, value in runner.named().items():
        if name in reference.state_dict():
            np.testing.assert_allclose(value, reference.state_dict()[name].numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def _step(runner, x, target, split):
    """The loss of a step, by `gradients` and `apply` if it is split."""
    y, rate = tvm.runtime.tensor(target), tvm.runtime.tensor(np.float32(0.5))
    if not split:
        loss, _, runner.state = runner.machine["step"](x, y, rate, runner.state)
        return float(loss.numpy())
    loss, _, gradients, moved = runner.machine["gradients"](x, y, runner.state)
    runner.state = runner.machine["apply"](gradients, rate, runner.state)
    places = [i for i, schema in enumerate(runner.step_module.state) if schema.role == "running_stat"]
    state = list(runner.state)
    for place, value in zip(places, moved, strict=True):
        state[place] = value
    runner.state = state
    return float(loss.numpy())
