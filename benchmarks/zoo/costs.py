# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a step of ours and of PyTorch's eager step.

python -m benchmarks.zoo.costs ours step.so problem.pt        prints bytes
python -m benchmarks.zoo.costs torch timm:convnext_atto problem.pt
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.zoo.architectures import Architecture
from benchmarks.zoo.problem import Problem, first_tensor
from tvm_convgrad.bench.contenders import MEMORY_STEPS, resident
from tvm_convgrad.measure.timing import Call, pairs
from tvm_convgrad.training.runtime.session import Session

RATE = 1e-3


def our_step(session: Session, problem: Problem) -> Callable[[], object]:
    """A step of ours."""
    arrays = tuple(value.numpy() for value in problem.inputs)
    inputs = arrays if len(arrays) > 1 else arrays[0]
    return lambda: session.step(inputs, problem.target.numpy(), RATE)


def torch_step(module: nn.Module, problem: Problem) -> Callable[[], None]:
    """An eager step of PyTorch with plain SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    criterion = nn.functional.mse_loss if problem.loss == "mse" else nn.functional.cross_entropy

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(first_tensor(module(*problem.inputs)), problem.target).backward()
        optimizer.step()

    return step


def timed(module: nn.Module, session: Session, problem: Problem, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of our steps and of PyTorch's eager steps, in turns."""
    calls = [
        Call(name, run, lambda found: found)
        for name, run in (("ours", our_step(session, problem)), ("theirs", torch_step(module, problem)))
    ]
    for call in calls:
        call.run()  # PyTorch's first step plans its convolutions
    found = pairs(calls, seconds)
    return found["ours"], found["theirs"]


def memory(who: str, source: str, problem: Path) -> int:
    """Bytes that a step takes in a process of its own, the model and its state included.

    Args:
        who: "ours" or "torch".
        source: our library, or the architecture's name and its mode: "timm:convnext_atto train".
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            __name__ if __name__ != "__main__" else "benchmarks.zoo.costs",
            who,
            source,
            str(problem),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the memory of the steps that the command line names."""
    who, source, path = sys.argv[1:]
    problem = torch.load(path, weights_only=False)
    torch.ones(8, 8).mm(torch.ones(8, 8))
    gc.collect()
    before = resident("VmRSS")
    if who == "ours":
        step: Callable[[], object] = our_step(Session(Path(source)), problem)
    else:
        name, mode = source.rsplit(" ", 1)
        step = torch_step(Architecture(name).make().train(mode == "train"), problem)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # loading a model may take more than training it, and happens once
    for _ in range(MEMORY_STEPS - 1):
        step()
    peak = resident("VmHWM")
    assert before is not None
    assert peak is not None
    print(peak - before)


if __name__ == "__main__":
    main()
