# SPDX-License-Identifier: Apache-2.0
"""The custom operators: PyTorch's own checks of an operator, its gradients twice, and torch.export of a module."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tvm_convgrad.core.errors import ProblemError

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

SHAPES = {1: ((2, 4, 9), (6, 2, 3)), 2: ((2, 4, 7, 6), (6, 2, 3, 2)), 3: ((1, 4, 5, 4, 6), (6, 2, 2, 3, 1))}


def ends(rank: int):
    return [2] * rank, [1] * rank, [1] * rank, 2


def operands(rank: int, dtype=torch.float64, last: bool = False):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES[rank])
    if last:
        x, w = (each.to(memory_format=torch.channels_last) for each in (x, w))
    stride, padding, dilation, groups = ends(rank)
    y = torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0] * rank, groups)
    return x, w, torch.randn_like(y)


def calls(rank: int, x, w, dy):
    ops = torch.ops.tvm_convgrad
    return [
        (getattr(ops, f"conv{rank}d_backward"), (dy, x, w, *ends(rank))),
        (getattr(ops, f"conv{rank}d_backward_data"), (dy, w, list(x.shape), *ends(rank))),
        (getattr(ops, f"conv{rank}d_backward_weight"), (dy, x, list(w.shape[2:]), *ends(rank))),
    ]


@pytest.mark.parametrize("rank", SHAPES)
def test_they_are_the_gradients(rank: int) -> None:
    x, w, dy = operands(rank)
    stride, padding, dilation, groups = ends(rank)
    wanted = torch.ops.aten.convolution_backward(
        dy, x, w, [6], stride, padding, dilation, False, [0] * rank, groups, [True] * 3
    )
    every, of_data, of_weight = (operator(*arguments) for operator, arguments in calls(rank, x, w, dy))
    for one, other in zip((*every, of_data, of_weight), (*wanted, *wanted[:2]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("last", [False, True])
def test_pytorchs_checks_of_operators(last: bool) -> None:
    """Schema, fakes with and without dynamic shapes, strides of fakes, autograd."""
    for operator, arguments in calls(2, *operands(2, torch.float32, last)):
        torch.library.opcheck(operator.default, arguments)


def functions(rank: int, x, w, dy):
    """Each operator as a function of its tensors, with these."""
    for operator, arguments in calls(rank, x, w, dy):
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        rest = arguments[len(tensors) :]
        yield (lambda *given, f=operator, r=rest: f(*given, *r)), tuple(tensors)


@pytest.mark.parametrize("rank", SHAPES)
def test_gradients_of_gradients(rank: int) -> None:
    for function, tensors in functions(rank, *(each.requires_grad_() for each in operands(rank))):
        assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("results", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_results(results: tuple[int, ...]) -> None:
    """Those that are not read have no gradient."""
    x, w, dy = (each.requires_grad_() for each in operands(2))
    function, tensors = next(functions(2, x, w, dy))
    found = torch.autograd.grad([function(*tensors)[i].square().sum() for i in results], tensors, allow_unused=True)
    stride, padding, dilation, groups = ends(2)
    own = torch.ops.aten.convolution_backward(
        dy, x, w, [6], stride, padding, dilation, False, [0, 0], groups, [True] * 3
    )
    wanted = torch.autograd.grad([own[i].square().sum() for i in results], tensors, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.zeros(()) if one is None else one, torch.zeros(()) if other is None else other)


@pytest.mark.parametrize("rank", SHAPES)
def test_transforms_of_functions(rank: int) -> None:
    """Forward mode, with and without operands that require gradients, and torch.func's grad, jvp and vmap."""
    for function, tensors in functions(rank, *operands(rank)):
        first = lambda *given, f=function: _first(f(*given)).square().sum()  # noqa: E731
        leaves = [each.clone().requires_grad_() for each in tensors]
        wanted = torch.autograd.grad(first(*leaves), leaves, allow_unused=True)
        places = tuple(i for i, each in enumerate(wanted) if each is not None)
        found = torch.func.grad(first, argnums=places)(*tensors)
        for place, gradient in zip(places, found, strict=True):
            torch.testing.assert_close(gradient, wanted[place])
        directions = tuple(torch.randn_like(each) for each in tensors)
        _, tangent = torch.func.jvp(first, tensors, directions)
        torch.testing.assert_close(tangent, sum((wanted[i] * directions[i]).sum() for i in places))
        several = tuple(torch.stack([each, 2 * each]) for each in tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns where it runs the operator once for each sample
            alone = _first(torch.func.vmap(function)(*several))
        torch.testing.assert_close(alone[0], _first(function(*tensors)))
        mapped = torch.func.vmap(torch.func.grad(first, argnums=places))(*several)
        for place, gradient in zip(places, mapped, strict=True):
            torch.testing.assert_close(gradient[0], wanted[place])


def _first(results):
    return results if isinstance(results, torch.Tensor) else results[0]


class Gradients(torch.nn.Module):
    """A module that computes gradients."""

    def forward(self, dy, x, w):
        return torch.ops.tvm_convgrad.conv2d_backward(dy, x, w, *ends(2))


def test_export_and_compile(tmp_path: Path) -> None:
    """The exported program names the operator, and is the same after it was saved and loaded."""
    x, w, dy = operands(2, torch.float32)
    program = torch.export.export(Gradients(), (dy, x, w))
    assert "tvm_convgrad.conv2d_backward" in program.graph_module.code
    torch.export.save(program, tmp_path / "gradients.pt2")
    loaded = torch.export.load(tmp_path / "gradients.pt2").module()
    compiled = torch.compile(Gradients(), fullgraph=True, backend="aot_eager")
    for one, other, wanted in zip(loaded(dy, x, w), compiled(dy, x, w), Gradients()(dy, x, w), strict=True):
        torch.testing.assert_close(one, wanted)
        torch.testing.assert_close(other, wanted)


def test_sizes_of_another_length_are_refused() -> None:
    grad, data, weight = torch.randn(2, 4, 5, 5), torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3)
    operators, ends = torch.ops.tvm_convgrad, ([1, 1], [0, 0], [1, 1], 1)
    with pytest.raises(ProblemError, match=r"data_size has all 4 extents .* but is \[7, 7\]; pass list\(data\.shape\)"):
        operators.conv2d_backward_data(grad, weight, [7, 7], *ends)
    with pytest.raises(ProblemError, match=r"kernel_size has 2 extents, without channels, but is \[4, 3, 3, 3\]"):
        operators.conv2d_backward_weight(grad, data, [4, 3, 3, 3], *ends)
