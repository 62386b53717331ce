# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own samples of its convolutions: forward and gradients with the bridge enabled equal PyTorch in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")
methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

NAMES = [f"nn.functional.conv{form}{rank}d" for form in ("", "_transpose") for rank in (1, 2, 3)]
OPS = {op.name: op for op in methods.op_db if op.name in NAMES}


def results(op, sample, dtype):
    """Output, and gradients of all tensors for a gradient of ones and minus ones."""

    def cast(value):
        return value.detach().to(dtype).requires_grad_() if isinstance(value, torch.Tensor) else value

    tensors = [cast(each) for each in (sample.input, *sample.args)]
    options = {name: cast(value) for name, value in sample.kwargs.items()}
    y = op.op(*tensors, **options)
    needed = [each for each in (*tensors, *options.values()) if isinstance(each, torch.Tensor)]
    dy = torch.ones_like(y).cumsum(-1) % 2 * 2 - 1
    return [y.detach(), *torch.autograd.grad(y, needed, dy)]


@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, kernels_always: None) -> None:
    """Kernels compute every second call of each sample that they take; the first one is PyTorch's."""
    op = OPS[name]
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    assert samples
    before = bridge.stats().kernel_calls
    for sample in samples[:: len(samples) // 2 + 1]:
        wanted = results(op, sample, torch.float64)
        results(op, sample, torch.float32)
        for one, other in zip(results(op, sample, torch.float32), wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)
    assert bridge.stats().kernel_calls > before


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck_of_samples(name: str, kernels_always: None) -> None:
    """In float64 all falls through, with the results and errors of PyTorch."""
    op = OPS[name]
    for sample in list(op.sample_inputs("cpu", torch.float64, requires_grad=True))[:3]:
        assert gradients_are_right(op, sample)


def gradients_are_right(op, sample) -> bool:
    tensors = tuple(each for each in (sample.input, *sample.args) if isinstance(each, torch.Tensor))
    rest = tuple(each for each in sample.args if not isinstance(each, torch.Tensor))
    return torch.autograd.gradcheck(lambda *each: op.op(*each, *rest, **sample.kwargs), tensors, fast_mode=True)
