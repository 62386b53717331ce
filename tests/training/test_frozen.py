# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters are part of the state and stay; batch norms of frozen layers keep their statistics unless told."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from tests.training.harness import Runner
from tests.training.small_models import data, relax_module, weights
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step

FROZEN = ("conv_weight", "bn_weight", "bn_bias")
STATISTICS = ("bn_mean", "bn_var")


def small(frozen: tuple[str, ...] = FROZEN):
    return from_module(relax_module(batch=8), parameters=weights(), frozen=frozen)


def test_frozen_parameters_are_states_that_stay():
    model = small()
    assert model.frozen == set(FROZEN)
    step = build_step(model, optimizer="adam", lr=0.1, weight_decay=0.1)
    assert {schema.name for schema in step.state if schema.role == "frozen"} == set(FROZEN)
    assert not [schema.name for schema in step.state if schema.name.startswith(("conv_weight.", "bn_weight."))]
    runner = Runner(step)
    for seed in range(3):
        runner.step(*data(8, seed), lr=0.1)
    for name in FROZEN:
        np.testing.assert_array_equal(runner.named()[name], weights()[name])
    assert all((runner.named()[name] != weights()[name]).any() for name in ("conv_bias", "fc_weight", "fc_bias"))


@pytest.mark.parametrize(
    ("bn", "frozen", "moves"),
    [
        ("train", FROZEN, False),
        ("train-all", FROZEN, True),
        ("frozen", FROZEN, False),
        ("train", (), True),
        ("train", ("bn_weight",), True),  # its shift is trained, so the layer is not frozen
        ("train", ("conv_weight",), True),
    ],
)
def test_statistics_of_frozen_layers(bn, frozen, moves):
    step = build_step(small(frozen), bn=bn, lr=0.1)
    runner = Runner(step)
    x, labels = data(8)
    _, predictions = runner.step(x, labels, lr=0.0)
    for name in STATISTICS:
        assert (runner.named()[name] != weights()[name]).any() == moves
    runner.reset()
    by_statistics = np.allclose(predictions, runner.predict(x), atol=1e-5)
    assert by_statistics != moves  # a layer that keeps its statistics is normalised by them


def test_values_can_be_set_without_building_anew():
    """They are data of the state, no constants of the code."""
    runner = Runner(build_step(small(), lr=0.1))
    x, _ = data(8)
    before = runner.predict(x)
    names = [schema.name for schema in runner.step_module.state]
    state = list(runner.state)
    state[names.index("conv_weight")] = tvm.runtime.tensor(np.zeros_like(weights()["conv_weight"]))
    runner.state = tuple(state)
    assert np.ptp(runner.predict(x), axis=0).max() < 1e-6 < np.ptp(before, axis=0).max()


def test_pytorch_state_dict_is_complete():
    """Frozen parameters, frozen batch norms, buffers: all that `load_state_dict` asks for, with PyTorch's values."""
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
            self.second = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
            self.head = torch.nn.Linear(4, 3)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.register_buffer("shift", torch.arange(3.0))
            self.register_buffer("unsaved", torch.ones(3), persistent=False)

        def forward(self, x):
            return self.head(self.second(self.first(x)).mean((2, 3))) * self.scale + self.shift * self.unsaved

    torch.manual_seed(0)
    network = Network()
    network.first.requires_grad_(False)
    x = torch.randn(6, 2, 8, 8)
    labels = torch.randint(0, 3, (6,))
    model = from_exported_program(torch.export.export(network.train(), (x,)))
    runner = Runner(build_step(model, lr=0.1))
    runner.step(x.numpy(), labels.numpy(), lr=0.1)
    network.first[1].eval()  # what a frozen layer is in PyTorch
    torch.nn.functional.cross_entropy(network(x), labels).backward()
    torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1).step()
    found = runner.named("parameter", "frozen", "running_stat")
    wanted = {name: value.numpy() for name, value in network.state_dict().items()}
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)
    assert found["scale"] != 0.5
    assert (found["first.1.num_batches_tracked"], found["second.1.num_batches_tracked"]) == (0, 1)
    network.load_state_dict({name: torch.tensor(value) for name, value in found.items()})
