# SPDX-License-Identifier: Apache-2.0
"""Operators that change nothing, and attention without them: one tensor of scores is kept for the gradient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.ir.graph import bindings_of, operator_name  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402


class Attention(nn.Module):
    """One layer of attention, by PyTorch's function or written out as products and a softmax."""

    def __init__(self, *, written_out: bool, **options: object) -> None:
        super().__init__()
        self.columns, self.head = nn.Linear(8, 24), nn.Linear(8, 3)
        self.written_out, self.options = written_out, options

    def forward(self, x):
        samples, length, width = x.shape
        parts = self.columns(x).reshape(samples, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        if self.written_out:
            mixed = ((query * 0.5) @ key.transpose(-2, -1)).softmax(-1) @ value
        else:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, **self.options)
        return self.head(mixed.transpose(1, 2).reshape(samples, length, width).mean(1))


@pytest.mark.parametrize("length", [7, torch.export.Dim("length", min=2, max=50)], ids=["fixed", "free"])
@pytest.mark.parametrize("written_out", [True, False], ids=["written out", "function"])
def test_scores_are_computed_once(written_out, length):
    model = Attention(written_out=written_out)
    free = None if isinstance(length, int) else ({1: length},)
    imported = from_exported_program(torch.export.export(model, (torch.zeros(2, 7, 8),), dynamic_shapes=free))
    operators = Counter(
        operator_name(binding.value)
        for binding in bindings_of(imported.module[imported.function])
        if hasattr(binding.value, "op")
    )
    assert operators["relax.nn.softmax"] == 1
    assert not operators.keys() & {"relax.broadcast_to", "relax.where", "relax.full", "relax.max"}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_narrow_operands_are_float32(masked, dtype):
    """As in PyTorch: scores above 65504 do not overflow, and a mask may be float32."""

    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("mask", torch.linspace(-2, 2, 36).view(6, 6))

        def forward(self, x):
            x = (x * self.scale).to(dtype)
            mixed = nn.functional.scaled_dot_product_attention(
                100 * x, 100 * x, x, attn_mask=self.mask if masked else None
            )
            return mixed.float()

    torch.manual_seed(0)
    model, x = Narrow(), torch.randn(2, 3, 6, 4)
    runner = Runner(build_step(from_exported_program(torch.export.export(model, (x,))), loss="mse"))
    wanted = model(x).detach().numpy()
    found = runner.predict(x.numpy())
    assert np.isfinite(wanted).all()
    assert np.abs(found - wanted).max() <= 4 * float(torch.finfo(dtype).eps) * np.abs(wanted).max()
