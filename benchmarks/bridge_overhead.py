# SPDX-License-Identifier: Apache-2.0
"""What a call through the PyTorch bridge costs beside the kernels' own time, in microseconds, on one thread.

    python benchmarks/bridge_overhead.py

Autograd calls forward and backward of a tiny convolution, as training does: by PyTorch's own operators, by the bridge
(every kernel there is computes), and by entries in Python that return constants, which is what PyTorch takes to come to
Python and back. All have turns in many short rounds; each number is the least of its rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

import tvm_convgrad.torch
from tvm_convgrad.torch.override import BRIDGE

RUNS, ROUNDS = 60, 150


@contextmanager
def constants(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor):
    """PyTorch's entries, replaced by functions that do nothing."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution", lambda *_: y, "CPU")
    library.impl("convolution_backward", lambda *_: (x, w, None), "CPU")
    try:
        yield
    finally:
        library._destroy()


def steps(dtype: torch.dtype) -> tuple[Callable[[], None], tuple[torch.Tensor, ...]]:
    """Forward and backward of a tiny convolution, and its tensors."""
    x, w, dy = (torch.randn(shape, dtype=dtype) for shape in ((1, 4, 6, 6), (4, 4, 3, 3), (1, 4, 6, 6)))
    data, weight = x.clone().requires_grad_(), w.clone().requires_grad_()

    def step() -> None:
        torch.autograd.grad(torch.conv2d(data, weight, padding=1), (data, weight), dy)

    return step, (x, w, dy)


def main() -> None:
    torch.set_num_threads(1)
    step, tensors = steps(torch.float32)
    double, _ = steps(torch.float64)

    def bridge() -> AbstractContextManager[object]:
        return tvm_convgrad.torch.enable(wait=True, always=True)

    with bridge():
        for _ in range(3):
            step()
            double()
    kernels = [kernel for plan in BRIDGE._plans.values() for _, kernel in plan.taken]
    memory = [[torch.empty(shape) for shape, _ in kernel.job.tensors] for kernel in kernels]
    addresses = [[each.data_ptr() for each in tensors] for tensors in memory]

    def alone() -> None:
        for kernel, each in zip(kernels, addresses, strict=True):
            kernel.run(1, *each)

    contenders: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[], None]]] = {
        "own": (nullcontext, step),
        "bridge": (bridge, step),
        "constants": (lambda: constants(*tensors), step),
        "kernels": (nullcontext, alone),
        "float64": (bridge, double),
        "float64 own": (nullcontext, double),
    }
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(ROUNDS):
        for name, (context, call) in contenders.items():
            with context():
                call()
                begin = time.perf_counter()
                for _ in range(RUNS):
                    call()
                least[name] = min(least[name], (time.perf_counter() - begin) / RUNS * 1e6)
    own, bridged, nothing, alone_us, falls, beside = least.values()
    print(f"forward and backward by PyTorch       {own:6.1f} us")
    print(f"by the bridge                         {bridged:6.1f} us, of which the three kernels take {alone_us:.1f}")
    print(f"by entries in Python that do nothing  {nothing:6.1f} us")
    print(f"the bridge's part of one call         {(bridged - nothing - alone_us) / 2:6.1f} us")
    print(f"float64, which falls through          {falls:6.1f} us, by PyTorch {beside:.1f} us")


if __name__ == "__main__":
    main()
