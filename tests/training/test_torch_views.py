# SPDX-License-Identifier: Apache-2.0
"""Views that rely on strides of PyTorch's results, which a step's tensors do not have."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from tests.training.beside_torch import train_beside  # noqa: E402
from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

SAMPLES, PLACES, HEADS, WIDTH = 2, 5, 2, 4


class Attention(torch.nn.Module):
    """Self-attention, of which PyTorch's result on CPUs is contiguous once its heads stand behind the places."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, 3 * HEADS * WIDTH), torch.nn.Linear(PLACES * HEADS * WIDTH, 3)

    def forward(self, x):
        parts = [part.view(-1, PLACES, HEADS, WIDTH).transpose(1, 2) for part in self.inner(x).chunk(3, -1)]
        return self.outer(self.viewed(scaled_dot_product_attention(*parts)))

    def viewed(self, mixed):
        return mixed.permute(0, 2, 1, 3).view(-1, PLACES * HEADS * WIDTH)


class Transposed(Attention):
    def viewed(self, mixed):
        return mixed.transpose(1, 2).view(-1, PLACES, HEADS * WIDTH).relu().flatten(1)


class Written(Attention):
    """The view is written to, and the tensor is read under its other shape."""

    def viewed(self, mixed):
        permuted = mixed.permute(0, 2, 1, 3)
        self.write(permuted.view(-1, PLACES * HEADS * WIDTH))
        return permuted.flatten(1)

    def write(self, view):
        view.mul_(2)


class WrittenThroughAView(Written):
    def write(self, view):
        view[:, 3:].mul_(2)


@pytest.mark.parametrize("make", [Attention, Transposed])
def test_views_of_permuted_tensors(make):
    torch.manual_seed(0)
    model = make()
    x, labels = torch.randn(3, SAMPLES, PLACES, 8), torch.randint(0, 3, (3, SAMPLES))
    runner = Runner(build_step(from_exported_program(torch.export.export(model, (x[0],))), lr=0.1))
    train_beside(runner, copy.deepcopy(model).double(), zip(x, labels, strict=True), 0.1)


@pytest.mark.parametrize("make", [Written, WrittenThroughAView])
def test_a_view_that_is_written_to_is_no_copy(make):
    program = torch.export.export(make(), (torch.randn(SAMPLES, PLACES, 8),))
    with pytest.raises(ModelError, match="Cannot view a tensor"):
        from_exported_program(program)
