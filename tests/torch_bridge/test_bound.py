# SPDX-License-Identifier: Apache-2.0
"""The bound of benchmarks/bridge_bound: PyTorch's convolutions that write zeros are like its own in all but values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
torch_steps = pytest.importorskip("benchmarks.bridge_bound.torch_steps")

from benchmarks.bridge_bound.result import Bound  # noqa: E402
from tvm_convgrad.bench.bridge import Request  # noqa: E402
from tvm_convgrad.bench.bridge_pairs import Pairs, Turn  # noqa: E402


def results(last: bool) -> list:
    kind = torch.channels_last if last else torch.contiguous_format
    shapes = (2, 4, 7, 6), (6, 2, 3, 3), (6,)
    tensors = [torch.ones(shape, requires_grad=True) for shape in shapes]
    x, w = (each.detach().to(memory_format=kind).requires_grad_() for each in tensors[:2])
    y = torch.conv2d(x, w, tensors[2], stride=2, padding=1, groups=2)
    return [y.detach(), *torch.autograd.grad(y.square().sum() + y.sum(), (x, w, tensors[2]))]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_zeros_have_the_form_of_results(forward: bool, last: bool) -> None:
    own = results(last)
    for _ in range(2):  # the first call is PyTorch's
        with torch_steps.zeros(forward):
            found = results(last)
    for one, other in zip(found, own, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert [bool(each.any()) for each in found] == [not forward, False, False, False]
    assert all(torch.equal(one, other) for one, other in zip(results(last), own, strict=True))


def test_bounds_are_ratios_of_pairs() -> None:
    request = Request("unet", 8, "NCHW", 0.0, 1, "")
    own = [Turn(4.0, 6.0)] * 3
    gradients, both = (Pairs(tuple([Turn(*each)] * 3), tuple(own)) for each in ((2.0, 2.0), (1.0, 1.5)))
    bound = Bound.of(request, gradients, both)
    assert (bound.gradients, bound.all_convolutions, bound.processor_gradients, bound.processor_all) == (2, 4, 3, 4)
