# SPDX-License-Identifier: Apache-2.0
"""PyTorch's convolutions that write zeros, in the shapes and strides of its own results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from benchmarks.bridge_bound.result import Bound
from tvm_convgrad.bench.bridge import Request
from tvm_convgrad.bench.bridge_pairs import in_turns
from tvm_convgrad.bench.bridge_torch import training_step

WARM_STEPS = 2

Results = tuple[Tensor | None, ...]
Like = tuple[torch.Size, tuple[int, ...], torch.dtype] | None
"""Shape, strides and type of a result; no result has None."""

_OWN_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)


class Zeros:
    """An operator that PyTorch computes once for each kind of call, and that writes zeros after that."""

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        self._operator = operator
        self._known: dict[tuple[object, ...], tuple[Like, ...]] = {}

    def __call__(self, *arguments: object) -> Tensor | Results:
        """The results."""
        key = tuple(_word(each) for each in arguments)
        if key not in self._known:
            found = self._operator.redispatch(_OWN_KEYS, *arguments)
            self._known[key] = tuple(
                None if each is None else (each.shape, each.stride(), each.dtype)
                for each in ((found,) if isinstance(found, Tensor) else found)
            )
        results = tuple(
            None if like is None else torch.empty_strided(like[0], like[1], dtype=like[2]).zero_()
            for like in self._known[key]
        )
        return results if len(results) > 1 else results[0]


def _word(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return tuple(argument) if isinstance(argument, list) else argument


_FORWARD, _BACKWARD = Zeros(torch.ops.aten.convolution.default), Zeros(torch.ops.aten.convolution_backward.default)


@contextmanager
def zeros(forward: bool) -> Iterator[None]:
    """Inside, gradients of convolutions are zeros; with `forward` convolutions, too."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_backward", _BACKWARD.__call__, "CPU")
    if forward:
        library.impl("convolution", _FORWARD.__call__, "CPU")
    try:
        yield
    finally:
        library._destroy()


def measure(request: Request) -> Bound:
    """The bounds of one network."""
    torch.set_num_threads(request.threads)
    step = training_step(request)
    pairs = []
    for forward in (False, True):
        with zeros(forward):
            for _ in range(WARM_STEPS):
                step()
        step()
        pairs.append(in_turns(step, step, request.seconds, partial(zeros, forward)))
    return Bound.of(request, *pairs)
