# SPDX-License-Identifier: Apache-2.0
"""Custom operators for torch.export and own modules: all gradients, dgrad and wgrad of convolutions of each rank.

    tvm_convgrad::conv2d_backward(grad, data, weight, stride, padding, dilation, groups) -> (Tensor, Tensor, Tensor)
    tvm_convgrad::conv2d_backward_data(grad, weight, data_size, stride, padding, dilation, groups) -> Tensor
    tvm_convgrad::conv2d_backward_weight(grad, data, kernel_size, stride, padding, dilation, groups) -> Tensor

and the same for conv1d and conv3d. They compute by kernels where these were measured to be faster, whether the bridge
is enabled or not, and elsewhere by PyTorch's own operator; on other devices than CPUs by that alone. They are
differentiable any number of times, by the closure of the family; in forward mode, and under the transforms of
torch.func, PyTorch's own operator computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.torch.override import Bridge
from tvm_convgrad.torch.plan import Results

NAMESPACE = "tvm_convgrad"

_bridge = Bridge()
_own = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class _Geometry:
    """The arguments that all operators end with."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(
        self, compute: Compute, grad: Tensor, data: Tensor, weight: Tensor, wanted: tuple[bool, ...]
    ) -> Results:
        """The wanted ones of the gradients of data, weight and bias."""
        zeros = [0] * (data.dim() - 2)
        ends = (list(self.stride), list(self.padding), list(self.dilation), False, zeros, self.groups, list(wanted))
        return compute(grad, data, weight, [grad.shape[1]], *ends)

    def forward(self, data: Tensor, weight: Tensor) -> Tensor:
        """The convolution."""
        zeros = [0] * (data.dim() - 2)
        return torch.ops.aten.convolution(
            data, weight, None, list(self.stride), list(self.padding), list(self.dilation), False, zeros, self.groups
        )


Compute = Callable[..., Results]

Gradients = Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[bool], Sequence[Any]], list[Tensor | None]]
"""(an operator's tensors, the gradients of its results, which gradients are needed, the geometry) -> gradients of the
tensors. None among those of the results: nothing reads it."""

_EVERY, _DATA, _WEIGHT = (True, True, True), (True, False, False), (False, True, False)
_ENDS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"


def _geometry(ends: Sequence[Any]) -> _Geometry:
    stride, padding, dilation, groups = ends
    return _Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)


def _backward(compute: Compute, grad: Tensor, data: Tensor, weight: Tensor, *ends: Any) -> Results:
    return _geometry(ends)(compute, grad, data, weight, _EVERY)


def _backward_data(compute: Compute, grad: Tensor, weight: Tensor, data_size: Sequence[int], *ends: Any) -> Tensor:
    if len(data_size) != grad.dim():
        raise ProblemError(
            f"conv{grad.dim() - 2}d_backward_data: data_size has all {grad.dim()} extents of the data, samples and "
            f"channels first, but is {list(data_size)}; pass list(data.shape)."
        )
    data = _empty(data_size, grad)
    result = _geometry(ends)(compute, grad, data, weight, _DATA)[0]
    assert result is not None
    return result


def _backward_weight(compute: Compute, grad: Tensor, data: Tensor, kernel_size: Sequence[int], *ends: Any) -> Tensor:
    geometry = _geometry(ends)
    if len(kernel_size) != grad.dim() - 2:
        raise ProblemError(
            f"conv{grad.dim() - 2}d_backward_weight: kernel_size has {grad.dim() - 2} extents, without channels, but "
            f"is {list(kernel_size)}; pass list(weight.shape[2:])."
        )
    weight = _empty((grad.shape[1], data.shape[1] // geometry.groups, *kernel_size), data)
    result = geometry(compute, grad, data, weight, _WEIGHT)[1]
    assert result is not None
    return result


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor whose data nothing reads, in the memory format of another."""
    made = like.new_empty(tuple(shape))
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if last is not None and not like.is_contiguous() and like.is_contiguous(memory_format=last):
        return made.to(memory_format=last)
    return made


_OPERATORS = {
    "backward": ("(Tensor grad, Tensor data, Tensor weight, {}) -> (Tensor, Tensor, Tensor)", _backward),
    "backward_data": ("(Tensor grad, Tensor weight, SymInt[] data_size, {}) -> Tensor", _backward_data),
    "backward_weight": ("(Tensor grad, Tensor data, SymInt[] kernel_size, {}) -> Tensor", _backward_weight),
}


def define() -> None:
    """Register the operators with PyTorch; again is harmless."""
    if hasattr(torch.ops.tvm_convgrad, "conv2d_backward"):
        return
    for rank in SPATIAL:
        for ending, (schema, function) in _OPERATORS.items():
            name = f"{NAMESPACE}::conv{rank}d_{ending}"
            torch.library.define(name, schema.format(_ENDS), tags=(torch.Tag.needs_fixed_stride_order,))
            torch.library.impl(name, "CompositeExplicitAutograd", partial(function, _own))
            torch.library.impl(name, "FuncTorchBatched", partial(function, _own))  # under vmap alone
            torch.library.impl(name, "CPU", partial(function, _by_plan))
            torch.library.register_fake(name, partial(function, _own))
        _differentiable(rank)


def _by_plan(*arguments: Any) -> Results:
    _bridge.prepare()
    return _bridge.backward(*arguments)


def _differentiable(rank: int) -> None:
    """The gradients of the operators, which are linear in each operand."""
    for ending, (_, function) in _OPERATORS.items():
        operator = getattr(torch.ops.tvm_convgrad, f"conv{rank}d_{ending}").default
        call = partial(_with_gradients, operator, function, _GRADIENTS[ending])
        torch.library.impl(f"{NAMESPACE}::conv{rank}d_{ending}", "Autograd", call)


def _with_gradients(
    operator: Any, function: Callable[..., Any], gradients: Gradients, *arguments: Any
) -> Tensor | Results:
    """An operator's entry for autograd."""
    result: Tensor | Results = (
        function(_own, *arguments)
        if _is_transformed(arguments)
        else _BelowAutograd.apply(operator, gradients, *arguments)
    )
    return result


def _is_transformed(arguments: Sequence[Any]) -> bool:
    """Whether a transform of torch.func runs, or an operand has a tangent of forward mode."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    return any(torch.autograd.forward_ad.unpack_dual(each).tangent is not None for each in tensors)


class _BelowAutograd(torch.autograd.Function):
    """An operator's kernel with a function that gives the gradients of its tensors, which come first."""

    @staticmethod
    def forward(ctx: Any, operator: Any, gradients: Gradients, *arguments: Any) -> Any:
        """The operator's results."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(each for each in arguments if isinstance(each, Tensor)))
        ctx.gradients, ctx.ends, ctx.count = gradients, arguments[-4:], len(arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    @staticmethod
    def backward(ctx: Any, *changes: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all arguments."""
        saved = ctx.saved_tensors
        found = ctx.gradients(saved, changes, ctx.needs_input_grad[2 : 2 + len(saved)], ctx.ends)
        return (None, None, *found, *[None] * (ctx.count - len(found)))


def _of_backward_data(
    tensors: Sequence[Tensor], changes: Sequence[Tensor | None], needed: Sequence[bool], ends: Sequence[Any]
) -> list[Tensor | None]:
    """Of dgrad(grad, weight): by forward and wgrad."""
    (grad, weight), (change,) = tensors, changes
    if change is None:
        return [None, None]
    first = _geometry(ends).forward(change, weight) if needed[0] else None
    second = _of(grad, "weight")(grad, change, weight.shape[2:], *ends) if needed[1] else None
    return [first, second]


def _of_backward_weight(
    tensors: Sequence[Tensor], changes: Sequence[Tensor | None], needed: Sequence[bool], ends: Sequence[Any]
) -> list[Tensor | None]:
    """Of wgrad(grad, data): by forward and dgrad."""
    (grad, data), (change,) = tensors, changes
    if change is None:
        return [None, None]
    first = _geometry(ends).forward(data, change) if needed[0] else None
    second = _of(grad, "data")(grad, change, data.shape, *ends) if needed[1] else None
    return [first, second]


def _of_backward(
    tensors: Sequence[Tensor], changes: Sequence[Tensor | None], needed: Sequence[bool], ends: Sequence[Any]
) -> list[Tensor | None]:
    """Of all gradients of (grad, data, weight): the sums of what each result gives."""
    (grad, data, weight), (of_data, of_weight, of_bias) = tensors, changes
    for_grad, for_data, for_weight = needed
    by_data, for_weight_found = _of_backward_data((grad, weight), (of_data,), (for_grad, for_weight), ends)
    by_weight, for_data_found = _of_backward_weight((grad, data), (of_weight,), (for_grad, for_data), ends)
    terms = [each for each in (by_data, by_weight) if each is not None]
    if for_grad and of_bias is not None:
        terms.append(of_bias.reshape(1, -1, *[1] * (grad.dim() - 2)).expand_as(grad))
    return [sum(terms[1:], terms[0]) if terms else None, for_data_found, for_weight_found]


def _of(grad: Tensor, what: str) -> Any:
    """The operator of one gradient, of the rank of a tensor."""
    return getattr(torch.ops.tvm_convgrad, f"conv{grad.dim() - 2}d_backward_{what}")


_GRADIENTS: dict[str, Gradients] = {
    "backward": _of_backward,
    "backward_data": _of_backward_data,
    "backward_weight": _of_backward_weight,
}

__all__ = ["NAMESPACE", "define"]
