# SPDX-License-Identifier: Apache-2.0
"""Models of torch.export that hold a module, a weight or a buffer under several names."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.training.harness import Runner, relative_error  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program, load_pt2  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402


class Shared(nn.Module):
    """A block with running statistics under three names, called twice, and a weight that two layers have."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
        self.last = self.again = self.zero
        self.first, self.second = nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.again(self.first(x)).relu()
        return self.second(self.zero(x)).mean((2, 3))


@pytest.mark.parametrize("saved", [True, False])
def test_a_tensor_with_several_names_is_trained_as_one_under_the_first(saved, tmp_path):
    """A loaded program has a tensor for each name, all in the same memory."""
    torch.manual_seed(0)
    network = Shared().train()
    reference = copy.deepcopy(network).double()
    x, target = torch.randn(4, 3, 5, 6), torch.tensor([0, 2, 1, 2])
    program = torch.export.export(network, (x,))
    given = list(program.state_dict)
    if saved:
        torch.export.save(program, tmp_path / "model.pt2")
        model = load_pt2(tmp_path / "model.pt2", None)
    else:
        model = from_exported_program(program)
        assert list(program.state_dict) == given
    runner = Runner(build_step(model, lr=1.0))
    assert set(runner.named("parameter")) == dict(network.named_parameters()).keys()
    loss, _ = runner.step(x.numpy(), target.numpy(), lr=1.0)
    expected = torch.nn.functional.cross_entropy(reference(x.double()), target)
    expected.backward()
    assert abs(loss - expected.item()) < 1e-5
    found = runner.named("parameter", "running_stat")
    for name, parameter in reference.named_parameters():
        assert relative_error(found[name], (parameter - parameter.grad).detach().numpy()) < 1e-5, name
    for name, buffer in reference.named_buffers():
        assert np.allclose(found[name], buffer.numpy(), rtol=1e-5, atol=1e-6), name


def test_an_imported_program_stays_as_it_is_and_shares_no_memory_with_the_model():
    """The graph is copied for the import, the weights when the model takes them."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3)
    ).train()
    program = torch.export.export(network, (torch.zeros(2, 3, 8, 8),))
    before, graph = {name: tensor.clone() for name, tensor in program.state_dict.items()}, str(program.graph)
    model = from_exported_program(program)
    assert str(program.graph) == graph
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.state_dict.items())
    for values in (*model.parameters.values(), *model.states.values()):
        assert not any(np.shares_memory(values, tensor.detach().numpy()) for tensor in program.state_dict.values())
