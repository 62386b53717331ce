# SPDX-License-Identifier: Apache-2.0
"""`tvm_convgrad.compile` on tensors of PyTorch: what has no memory is refused, and autograd knows what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

import tvm_convgrad
from tvm_convgrad.core.errors import ProblemError, UnsupportedError

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def wgrad(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("store")
    return tvm_convgrad.compile("conv2d_backward_weight", "mb1ic1ih4oc1kh3", folder=folder)


def operands():
    return torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4)


def test_tensors_without_memory_are_refused(wgrad) -> None:
    fake = torch._subclasses.FakeTensorMode()
    dy, x = operands()
    with pytest.raises(UnsupportedError, match="grad has no memory"):
        wgrad(fake.from_tensor(dy), x)
    with pytest.raises(UnsupportedError, match="data has no memory"):
        wgrad(dy, fake.from_tensor(x))
    with fake, pytest.raises(UnsupportedError, match="grad has no memory"):
        wgrad(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4))


def test_negated_views_are_refused(wgrad) -> None:
    dy, x = operands()
    with pytest.raises(ProblemError, match=r"grad is a negated view; give tensor\.resolve_neg\(\)"):
        wgrad(torch._neg_view(dy), x)


def test_what_autograd_saved_may_not_be_written(wgrad) -> None:
    out = torch.ones(1, 1, 3, 3)
    factor = torch.ones(1, 1, 3, 3, requires_grad=True)
    loss = (out * factor).sum()
    assert wgrad(*operands(), out=out) is out
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
