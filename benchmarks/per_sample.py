# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of a residual CNN: this package beside torch.func.vmap(grad), and the ordinary gradient.

    python benchmarks/per_sample.py [--batch 32] [--width 16] [--rounds 9]

Needs PyTorch. Both use the threads that `convgrad run` would. The parties take turns; a line has the median time and
its ratio to the ordinary gradient of the same party (ours with the update by SGD).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import tvm
import typer
from tvm import relax

from tvm_convgrad.threads import use_threads
from tvm_convgrad.training.frontends.torch_export import from_exported_program
from tvm_convgrad.training.lower import compile_module, compile_step
from tvm_convgrad.training.per_sample import per_sample_module
from tvm_convgrad.training.step import build_step


class Residual(torch.nn.Module):
    def __init__(self, width: int, stages: int = 3) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, width, 3, padding=1)
        self.first, self.second, self.down = (torch.nn.ModuleList() for _ in range(3))
        for stage in range(stages):
            channels = width * 2**stage
            self.first.append(torch.nn.Conv2d(channels, channels, 3, padding=1))
            self.second.append(torch.nn.Conv2d(channels, channels, 3, padding=1))
            self.down.append(torch.nn.Conv2d(channels, channels * 2, 3, stride=2, padding=1))
        self.norm = torch.nn.GroupNorm(8, width * 2**stages)
        self.scores = torch.nn.Linear(width * 2**stages, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for first, second, down in zip(self.first, self.second, self.down, strict=True):
            x = torch.relu(x + second(torch.relu(first(x))))
            x = torch.relu(down(x))
        return self.scores(self.norm(x).mean((2, 3)))


def torch_calls(network: Any, x: Any, labels: Any) -> dict[str, Callable[[], Any]]:
    """The ordinary gradient, all per-sample gradients, and clipping by them."""
    parameters = {name: value.detach() for name, value in network.named_parameters()}

    def loss(values: Any, image: Any, label: Any) -> Any:
        scores = torch.func.functional_call(network, values, (image[None],))
        return torch.nn.functional.cross_entropy(scores, label[None])

    def total(values: Any) -> Any:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(network, values, (x,)), labels)

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    ordinary = torch.func.grad(total)

    def clipped() -> Any:
        found = each(parameters, x, labels)
        norms = sum(value.flatten(1).square().sum(1) for value in found.values()).sqrt()
        factors = (1.0 / norms).clamp(max=1.0)
        return [torch.tensordot(factors, value, 1) for value in found.values()]

    return {
        "gradient": lambda: ordinary(parameters),
        "gradients": lambda: each(parameters, x, labels),
        "clipped": clipped,
    }


def our_calls(network: Any, x: Any, labels: Any) -> dict[str, Callable[[], Any]]:
    """A training step (the ordinary gradient and SGD), and the three results of PerSampleGradients."""
    model = from_exported_program(torch.export.export(network, (x,)))
    arrays = [x.numpy(), labels.numpy(), *model.parameters.values(), *model.states.values()]
    tensors = list(map(tvm.runtime.tensor, arrays))
    step = relax.VirtualMachine(compile_step(build_step(model), "native"), tvm.cpu())
    state = [step["init"]()]

    def train() -> None:
        state[0] = step["step"](*tensors[:2], tvm.runtime.tensor(np.float32(0)), state[0])[2]

    calls: dict[str, Callable[[], Any]] = {"gradient": train}
    for result in ("gradients", "norms", "clipped"):
        module = per_sample_module(model, result=result)
        main = relax.VirtualMachine(compile_module(module, "native"), tvm.cpu())["main_per_sample"]
        more = [tvm.runtime.tensor(np.float32(1))] if result == "clipped" else []
        calls[result] = lambda main=main, more=more: main(*tensors, *more)
    return calls


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def main(
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 32,
    width: Annotated[int, typer.Option(min=8, help="Channels of the first stage; a multiple of 8.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each call is timed.")] = 9,
) -> None:
    """Print the table."""
    torch.set_num_threads(use_threads())
    torch.manual_seed(0)
    network, x, labels = Residual(width), torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    parties = {"ours": our_calls(network, x, labels), "torch": torch_calls(network, x, labels)}
    calls = {(party, what): call for party, made in parties.items() for what, call in made.items()}
    for call in calls.values():
        call()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(milliseconds(call))
    medians = {key: statistics.median(found) for key, found in times.items()}
    print(f"{batch} samples of 3x32x32, {sum(p.numel() for p in network.parameters()):,} parameters")
    for (party, what), median in medians.items():
        print(f"{party:6} {what:10} {median:9.1f} ms   {median / medians[party, 'gradient']:5.2f} x its own gradient")


if __name__ == "__main__":
    typer.run(main)
