# SPDX-License-Identifier: Apache-2.0
"""With the bridge enabled, convolutions and their gradients equal float64, in the strides that PyTorch answers with."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

UNIT = {"float32": 2.0**-23, "bfloat16": 2.0**-7}

CASES = {
    "plain": (2, (2, 6, 9, 8), 10, 3, {"padding": 1}),
    "stride": (2, (2, 4, 9, 11), 6, (3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    "dilation": (2, (1, 5, 12, 9), 7, 3, {"dilation": (3, 2), "padding": 2}),
    "groups": (2, (2, 8, 7, 7), 12, 3, {"groups": 4, "padding": 1}),
    "depthwise": (2, (2, 16, 10, 10), 16, 5, {"groups": 16, "padding": 2}),
    "pointwise": (2, (3, 16, 5, 5), 24, 1, {}),
    "one channel": (2, (2, 1, 8, 8), 1, 3, {}),
    "one pixel": (2, (4, 8, 1, 1), 8, 1, {}),
    "1-D": (1, (2, 6, 17), 5, 4, {"stride": 3, "padding": 2}),
    "3-D": (3, (1, 4, 5, 6, 7), 6, 3, {"stride": (1, 2, 1), "padding": 1}),
}


def problem(name: str, transposed: bool, dtype: str):
    """Module, input and gradient of the output; the module's weights are its own."""
    rank, shape, out, kernel, options = CASES[name]
    kind = getattr(torch.nn, f"Conv{'Transpose' if transposed else ''}{rank}d")
    torch.manual_seed(0)
    module = kind(shape[1], out, kernel, **options).to(getattr(torch, dtype))
    x = torch.randn(shape, dtype=getattr(torch, dtype))
    return module, x


def step(module, tensors, dy=None):
    """Output, and gradients of the input, weight and bias; and the output's gradient."""
    x, weight, bias = (each.detach().clone().requires_grad_() for each in tensors)
    y = torch.func.functional_call(module, {"weight": weight, "bias": bias}, x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) if dy is None else dy
    dy = dy.contiguous(memory_format=form(y))
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)], dy


def form(y):
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.dim())
    return last if last is not None and y.is_contiguous(memory_format=last) else torch.contiguous_format


MATRIX = [
    *((name, False, False, "float32") for name in CASES if name not in ("plain", "pointwise")),
    *((name, False, True, "float32") for name in ("plain", "one channel", "3-D")),
    *((name, True, False, "float32") for name in ("groups", "1-D")),
    ("stride", True, True, "float32"),
    ("groups", False, True, "bfloat16"),
]


in_both = pytest.mark.parametrize("entries", ["C++", "Python"], indirect=True)


@in_both
@pytest.mark.parametrize(("name", "transposed", "last", "dtype"), MATRIX)
def test_results_equal_float64(name: str, transposed: bool, last: bool, dtype: str, kernels_always: None) -> None:
    """Bounds are from the number of summands; strides are PyTorch's own, with kernels and without."""
    module, x = problem(name, transposed, dtype)
    if last:
        kind = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        module, x = module.to(memory_format=kind), x.to(memory_format=kind)
    tensors = (x, module.weight, module.bias)
    bridge.disable()
    own, dy = step(module, tensors)
    exact, _ = step(module, [each.double() for each in tensors], dy.double())
    sizes, _ = step(module, [each.double().abs() for each in tensors], dy.double().abs())
    with bridge.enable(wait=True, always=True, folder=bridge.override.BRIDGE.folder):
        step(module, tensors, dy)
        before = bridge.stats().kernel_calls
        found, _ = step(module, tensors, dy)
    assert bridge.stats().kernel_calls == before + 2, bridge.explain()[-2:]
    for one, other, wanted, size in zip(found, own, exact, sizes, strict=True):
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        summands = dy.numel() + module.weight.numel()  # no sum is longer
        bound = UNIT[dtype] * wanted.abs() + UNIT["float32"] * math.sqrt(summands) * size
        assert ((one.double() - wanted).abs() <= bound).all()


@in_both
@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_only_what_is_wanted_is_given(wanted, transposed: bool, kernels_always: None) -> None:
    """Of gradients that are not wanted there is None, as in PyTorch."""
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    dy = torch.randn(2, 4, 8, 8) if transposed else torch.randn(2, 4, 4, 4)
    call = (dy, x, w, [4], [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1, list(wanted))
    found = [torch.ops.aten.convolution_backward(*call) for _ in range(2)]
    bridge.disable()
    own = torch.ops.aten.convolution_backward(*call)
    for results in found:
        assert [each is not None for each in results] == [each is not None for each in own]
        for one, other in zip(results, own, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
