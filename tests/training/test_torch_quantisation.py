# SPDX-License-Identifier: Apache-2.0
"""Quantisation-aware training: steps of `torch.ao.quantization.prepare_qat` and fake quantisation, against PyTorch.

PyTorch computes fake quantisation in float32 alone, and so the comparison is with its float32.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
quantization = pytest.importorskip("torch.ao.quantization")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.dropout import _declare_operators  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.operators import fake_quantize  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

UNIT = 2.0**-24
BOUNDS = ((-128, 127), (0, 255), (0, 127), (-8, 7), (0, 15), (-127, 127))


class Classifier(nn.Module):
    """A convolution with a batch norm that prepare_qat folds into it, and a linear layer, quantised at both ends."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.linear = nn.Linear(8, 5)

    def forward(self, x):
        features = self.relu(self.norm(self.conv(self.quant(x))))
        return self.dequant(self.linear(features.mean((2, 3))))


def prepared(backend):
    """The classifier after prepare_qat, whose observers have seen no batch."""
    torch.manual_seed(0)
    model = Classifier().train()
    model.qconfig = quantization.get_default_qat_qconfig(backend)
    quantization.fuse_modules_qat(model, [["conv", "norm", "relu"]], inplace=True)
    return quantization.prepare_qat(model)


def batches(count):
    """Images of growing contrast, so that the observers' averages move, with classes."""
    generator = torch.Generator().manual_seed(5)
    for number in range(count):
        x = torch.randn(4, 3, 8, 8, generator=generator) * (1 + number)
        yield x, torch.randint(0, 5, (4,), generator=generator)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("changed", ["nothing", "observers off", "rounding off", "seen"])
@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_prepared_models_train_as_in_pytorch(backend, changed):
    """Losses, parameters and observers after three steps; x86 has grids per channel, qnnpack one per tensor."""
    model = prepared(backend)
    if changed != "nothing":
        model(next(batches(1))[0])
    if changed == "observers off":
        model.apply(quantization.disable_observer)
    if changed == "rounding off":
        model.apply(quantization.disable_fake_quant)
    size = torch.export.Dim("n") if changed == "seen" else None
    program = torch.export.export(model, (torch.zeros(4, 3, 8, 8),), dynamic_shapes=({0: size},) if size else None)
    runner = Runner(build_step(from_exported_program(program), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, labels in batches(3):
        found = runner.step(x.numpy(), labels.numpy(), lr=0.1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(np.ravel(found[0])[0], loss.item(), rtol=100 * UNIT)
    held, wanted = runner.named(), model.state_dict()
    predicted = copy.deepcopy(model).eval()(x).detach().numpy()  # observers move there, too
    np.testing.assert_allclose(runner.predict(x.numpy()), predicted, rtol=0, atol=1000 * UNIT)
    moved = [name for name in held if name.endswith((".scale", ".min_val"))]
    assert len(moved) == 10
    for name, value in held.items():
        expected = wanted[name].numpy()
        assert value.shape == expected.shape
        # A sum of 4 * 36 products and their gradients' sums, rounded in another order.
        np.testing.assert_allclose(value, expected, rtol=0, atol=1000 * UNIT * max(1.0, np.abs(expected).max()))


def test_observers_are_those_of_pytorch_bit_for_bit():
    """Averages, scales, zero points and values of random data: denormal and huge, of one sign, zero, any bounds."""
    _declare_operators()
    draws = np.random.default_rng(0)
    torch.manual_seed(0)
    on = torch.ones(1, dtype=torch.int64)
    for case in range(400):
        is_per_channel, is_symmetric = bool(draws.integers(2)), bool(draws.integers(2))
        least, most = BOUNDS[draws.integers(len(BOUNDS))]
        size = 10.0 ** draws.uniform(-8, 4)
        x = size * (torch.randn(4, 37) + draws.integers(-2, 3))
        x = (x, x.abs(), -x.abs(), 0 * x)[case % 4]
        lowest = torch.full((4,) if is_per_channel else (), math.inf)
        highest = -lowest
        if draws.integers(2):
            lowest, highest = size * (torch.rand_like(lowest) - 2), size * (torch.rand_like(lowest) + 1)
        scale = torch.ones(4 if is_per_channel else 1)
        held = [lowest, highest, scale, torch.zeros_like(scale, dtype=torch.int32)]
        rest = (0.01, least, most, 0 if is_per_channel else -1, is_per_channel, is_symmetric)
        found = fake_quantize.observed(x, on, on, *held, *rest)
        wanted = [each.clone() for each in held]
        values = torch.fused_moving_avg_obs_fake_quant(x, on, on, *wanted, *rest)
        for one, other in zip((found[0], *found[2:]), (values, *wanted), strict=True):
            assert torch.equal(one, other), (case, rest, one, other)


class Quantised(nn.Linear):
    """Weights and inputs on grids of numbers: some are out of their bounds."""

    def forward(self, x):
        weight = torch.fake_quantize_per_tensor_affine(self.weight, 0.125, -1, -3, 1)
        return F.linear(torch.fake_quantize_per_tensor_affine(x * self.bias[0], 0.25, 3, -2, 9), weight, self.bias)


class Grids(nn.Linear):
    """Weights on a grid for each row, and inputs on a grid that a tensor holds; some are out of their bounds."""

    def forward(self, x):
        scale, middle = torch.tensor([0.3, 0.11, 0.07]), torch.tensor([0, 1, -2], dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self.weight, scale, middle, 0, -2, 2)
        x = torch.fake_quantize_per_tensor_affine(x * self.bias[0], scale[:1], middle[1:2], -2, 3)
        x = torch.fake_quantize_per_channel_affine(x, torch.full((7,), 0.05), torch.arange(7) * 0.4, 1, -40, 40)
        return F.linear(x, weight, self.bias)


@pytest.mark.parametrize("make", [Quantised, Grids])
def test_the_gradient_passes_within_the_bounds(make):
    """A product of numbers of the grids is exact but for its sum's last bits."""
    torch.manual_seed(3)
    model, x, target = make(7, 3), torch.randn(5, 7), torch.randn(5, 3)
    runner = Runner(build_step(from_exported_program(torch.export.export(model, (x,))), loss="mse", lr=1.0))
    before = runner.named("parameter")
    runner.step(x.numpy(), target.numpy(), lr=1.0)
    F.mse_loss(model(x), target).backward()
    assert 0 < int((model.weight.grad == 0).sum()) < 21
    for name, value in model.named_parameters():
        np.testing.assert_allclose(before[name] - runner.named()[name], value.grad.numpy(), rtol=0, atol=40 * UNIT)
