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


@in_both
@pytest.mark.parametrize(("rank", "last"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_an_operand_that_is_not_read_may_be_expanded(rank: int, last: bool, kernels_always: None) -> None:
    """`torch.nn.grad` gives one element in its place; results have PyTorch's strides, from kernels, too."""
    kind = {2: torch.channels_last, 3: torch.channels_last_3d}[rank] if last else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, *[7] * rank), (6, 2, *[3] * rank), (2, 6, *[4] * rank))
    x, w, dy = (torch.randn(shape, generator=generator).to(memory_format=kind) for shape in shapes)
    of_data = getattr(torch.nn.grad, f"conv{rank}d_input")
    of_weight = getattr(torch.nn.grad, f"conv{rank}d_weight")

    def both():
        options = {"stride": 2, "padding": 1, "groups": 2}
        return of_data(x.shape, w, dy, **options), of_weight(x, w.shape, dy, **options)

    both()
    before = bridge.stats().kernel_calls
    found = both()
    assert bridge.stats().kernel_calls == before + 2
    bridge.disable()
    for one, other in zip(found, both(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
        assert one.stride() == other.stride()


@in_both
@pytest.mark.parametrize("place", [0, 1, 2])
def test_operands_that_are_read_may_not_be_expanded(place: int, kernels_always: None) -> None:
    """Of the gradients of data and weight together all three are read."""
    tensors = [torch.ones(2, 4, 4, 4), torch.ones(2, 4, 6, 6), torch.ones(4, 4, 3, 3)]
    tensors[place] = torch.ones(1).expand(tensors[place].shape)
    before = bridge.stats()
    for _ in range(2):
        torch.ops.aten.convolution_backward(*tensors, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
    after = bridge.stats()
    assert (after.kernel_calls - before.kernel_calls, after.pytorch_calls - before.pytorch_calls) == (0, 2)


@in_both
def test_nothing_that_is_wanted_is_refused_all_the_same(kernels_always: None) -> None:
    """By PyTorch, which checks the call in any case, in each of the calls."""
    x, w, dy = torch.ones(1, 2, 3), torch.ones(1, 3, 1), torch.ones(1, 3, 6)
    for dtype in (torch.float32, torch.float64):
        tensors = [each.to(dtype) for each in (dy, x, w)]
        for _ in range(3):
            with pytest.raises(RuntimeError, match="to have 1 channels"):
                torch.ops.aten.convolution_backward(*tensors, [3], [2], [0], [1], True, [1], 1, [False] * 3)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_lost(bad: float, groups: int, last: bool, kernels_always: None) -> None:
    """It is in each result that reads it; where a tap reads padding, zero times it may be left out."""
    kind = torch.channels_last if last else torch.contiguous_format
    shapes = (2, 8, 8, 8), (2, 8, 8, 8), (8, 8 // groups, 3, 3)
    dy, x, w = (torch.rand(shape).add(1).to(memory_format=kind) for shape in shapes)
    dy[0, 2, 0, 3], x[1, 3, 5, 6], x[0, 0, 0, 0], w[5, 0, 0, 2] = bad, bad, bad, bad

    def results(dy, x, w):
        call = (w, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True, True, False])
        dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, *call)
        return torch.conv2d(x, w, padding=1, groups=groups), dx, dw

    ones = [torch.ones_like(each, dtype=torch.float64) for each in (dy, x, w)]
    marks = [(~each.isfinite()).double() for each in (dy, x, w)]
    of_dy, of_x, of_w = (results(*ones[:place], mark, *ones[place + 1 :]) for place, mark in enumerate(marks))
    must = of_x[0] + of_w[0], of_dy[1] + of_w[1], of_dy[2] + of_x[2]
    in_dy, in_x = (mark.amax((0, 2, 3)) for mark in marks[:2])
    in_w = marks[2].view(groups, 8 // groups, -1, 9).amax(-1)  # of a group's outputs and inputs
    may = (
        in_w.amax(2).view(1, 8, 1, 1),
        in_w.amax(1).view(1, 8, 1, 1),
        in_dy.view(8, 1, 1, 1) + in_x.view(groups, 1, -1).expand(-1, 8 // groups, -1).reshape(8, -1, 1, 1),
    )
    results(dy, x, w)
    before = bridge.stats().kernel_calls
    found = results(dy, x, w)
    assert bridge.stats().kernel_calls == before + 2
    for each, read, padding in zip(found, must, may, strict=True):
        assert not each[read > 0.5].isfinite().any()
        assert each[read + padding < 0.5].isfinite().all()
