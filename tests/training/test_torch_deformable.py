# SPDX-License-Identifier: Apache-2.0
"""A residual block of deformable convolutions, against PyTorch in float64, and read without the operator."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.training.harness import Runner  # noqa: E402
from tests.training.torch_deformable import Geometry, deformed  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

nn = torch.nn

UNIT = 2.0**-24


class Deformable(nn.Module):
    """Modulated deformable convolution (v2): a convolution gives offsets and masks."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.geometry = Geometry(stride=(stride, stride), padding=(1, 1), offset_groups=2)
        self.moves = nn.Conv2d(channels, 54, 3, stride, 1)
        self.weight, self.bias = (
            nn.Parameter(torch.randn(channels, channels, 3, 3) * 0.1),
            nn.Parameter(torch.zeros(channels)),
        )

    def forward(self, x):
        y, z, mask = self.moves(x).chunk(3, 1)
        return deformed(x, self.weight, torch.cat([y, z], 1), torch.sigmoid(mask), self.bias, self.geometry)


class Block(nn.Module):
    """A residual block, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, 2, 1), nn.GroupNorm(2, 6)
        self.first, self.second, self.head = Deformable(6, 1), Deformable(6, 2), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.first(torch.relu(self.norm(x)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


def exported(network, x):
    return torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))


def test_step_of_a_block_is_that_of_pytorch():
    torch.manual_seed(0)
    network, x = Block(), torch.randn(2, 3, 13, 10)
    reference = copy.deepcopy(network).double()
    outputs = reference(x.double())
    target = torch.randn(2, 3, dtype=torch.float64)
    loss = ((outputs - target) ** 2).mean()
    loss.backward()
    runner = Runner(build_step(from_exported_program(exported(network, x), batch=2), loss="mse", lr=1.0))
    before = runner.named("parameter")
    found, _ = runner.step(x.numpy(), target.float().numpy(), lr=1.0)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    after = runner.named("parameter")
    for name, parameter in reference.named_parameters():
        wanted = parameter.grad.numpy()
        scale = max(float(np.abs(wanted).max()), float(np.abs(before[name]).max()))
        np.testing.assert_allclose(before[name] - after[name], wanted, rtol=0, atol=400 * UNIT * scale, err_msg=name)


def test_a_file_is_read_where_the_operator_is_not_loaded(tmp_path):
    """By a process that has no torchvision, or one whose operators do not load."""
    path = tmp_path / "block.pt2"
    torch.export.save(exported(Block(), torch.randn(2, 3, 13, 10)), path)
    program = (
        "import sys; sys.modules['torchvision'] = None\n"
        "from tvm_convgrad.training.frontends import load_model\n"
        f"print(len(load_model({str(path)!r}, batch=2).parameters))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "14", done.stderr
