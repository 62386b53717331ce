# SPDX-License-Identifier: Apache-2.0
"""Training steps of PyTorch with the bridge enabled and without, in turns in one process that loads no TVM.

As a program (`python -m tvm_convgrad.bench.bridge_torch JSON`) this module measures one network and prints the
measurement. It imports PyTorch.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import tvm_convgrad.torch as bridge
from tvm_convgrad.bench.bridge import BridgeMeasurement, Request
from tvm_convgrad.bench.bridge_calls import CallMeasurement
from tvm_convgrad.bench.bridge_networks import BRIDGE_NETWORKS
from tvm_convgrad.bench.bridge_pairs import CALL_PAIRS, in_turns
from tvm_convgrad.torch.override import BRIDGE
from tvm_convgrad.torch.plan import Plan
from tvm_convgrad.torch.signature import FORWARD, Form, Signature

MOST_WARM_STEPS = 80

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""

Step = Callable[[], None]


def training_step(request: Request) -> Step:
    """A step of stochastic gradient descent of a network."""
    torch.manual_seed(0)
    make, shape = BRIDGE_NETWORKS[request.model]
    module, x = make().train(), torch.randn(request.batch, *shape)
    if request.layout == "NHWC":
        form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        module, x = module.to(memory_format=form), x.to(memory_format=form)
    with torch.no_grad():
        classes = module(x[:2]).shape[1]
    target = torch.randint(classes, (request.batch,))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(module(x), target).backward()
        optimizer.step()

    return step


def _measure(request: Request) -> BridgeMeasurement:
    """In a process of its own: pairs of steps, with the bridge and without."""
    torch.set_num_threads(request.threads)
    step = training_step(request)
    enabled = partial(bridge.enable, wait=True, folder=Path(request.folder))
    begin = time.perf_counter()
    with enabled():
        for _ in range(MOST_WARM_STEPS):
            step()
            if all(told.where not in ("compiling", "measuring") for told in bridge.explain()):
                break
    warm = time.perf_counter() - begin
    uses = _uses(step, enabled)
    pairs = in_turns(step, step, request.seconds, enabled)
    told = bridge.explain()
    calls = []
    if request.calls:
        _keep_memory()
        for plan, count, words in zip(BRIDGE.plans, uses, told, strict=True):
            run = _call(plan.signature)
            times = in_turns(run, run, 0.0, enabled, CALL_PAIRS)
            calls.append(CallMeasurement.of(words.call, count, words.where, _flop(plan), times))
    return BridgeMeasurement.of(
        request,
        pairs,
        compile_seconds=warm,
        compiled=bridge.stats().compiled,
        where=[each.where for each in told],
        calls=calls,
    )


def _keep_memory() -> None:
    """Have glibc keep what is freed: a call whose result has new pages of the operating system takes up to three times
    as long, and whether it has them is chance."""
    library = ctypes.CDLL(None)
    for parameter, value in ((_TRIM_THRESHOLD, -1), (_MMAP_MAX, 0)):
        library.mallopt(parameter, value)


def _uses(step: Step, enabled: Callable[[], bridge.Enabled]) -> list[int]:
    """How often a step has each of the different calls."""

    def calls() -> list[int]:
        return [plan.by_kernels.calls + plan.by_pytorch.calls for plan in BRIDGE.plans]

    before = calls()
    with enabled():
        step()
    return [after - earlier for earlier, after in zip(before, calls(), strict=True)]


def _flop(plan: Plan) -> int:
    """Of a call; 0 of one that is not in the family."""
    return sum(2 * part.job.problem.macs for part in plan.parts)


def _tensor(form: Form) -> Tensor:
    return torch.empty_strided(form.shape, form.strides, dtype=getattr(torch, form.dtype)).normal_()


def _call(signature: Signature) -> Step:
    """The call of a signature, on tensors of its own."""
    data, weight = _tensor(signature.data), _tensor(signature.weight)
    channels = weight.shape[1] * signature.groups if signature.transposed else weight.shape[0]
    fixed = (
        signature.stride,
        signature.padding,
        signature.dilation,
        signature.transposed,
        signature.output_padding,
        signature.groups,
    )
    if signature.operator == FORWARD:
        bias = torch.randn(channels, dtype=weight.dtype) if signature.wanted[2] else None
        return partial(torch.ops.aten.convolution.default, data, weight, bias, *fixed)
    assert signature.grad is not None
    sizes = [channels] if signature.wanted[2] else None
    operator = torch.ops.aten.convolution_backward.default
    return partial(operator, _tensor(signature.grad), data, weight, sizes, *fixed, signature.wanted)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Request(**json.loads(sys.argv[1]))))))
