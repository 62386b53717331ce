# SPDX-License-Identifier: Apache-2.0
"""The contenders of a comparison of training steps: a compiled step in a Session, and PyTorch in eager mode.

Each is a function of no arguments that trains one step on the same batch and returns the loss. As a program
(`python -m tvm_convgrad.bench.contenders JSON`) this module runs one contender alone and prints the memory of its steps
and the time of its first one. TVM and PyTorch are imported inside functions: PyTorch is optional, and the process of
one contender must not load the other's library.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.threads import VARIABLE

Array = np.ndarray[Any, Any]
Step = Callable[[], float]

BUILT_IN = ("resnet18_cifar", "resnet18", "mobilenet_v2", "convnext_t", "groupnorm_cifar")
"""The names in `networks.NETWORKS`, which needs PyTorch to be imported."""

MEMORY_STEPS = 3
"""Steps after which the memory of a contender is measured."""


@dataclass(frozen=True)
class Training:
    """What both contenders train.

    Attributes:
        model: a name of BUILT_IN, or a .pt2 file.
        library: the compiled step, for ours.
        shape: of the input.
        target: shape of the target.
        classes: how many class numbers there are; 0 with the loss "mse".
        optimizer, settings: as `training.step.optimizers` has them.
        loss: "cross_entropy" or "mse".
        device: PyTorch's name of the device, "cpu" or "cuda".
        dtype: the type that convolutions and matrix products compute in; PyTorch's autocast, if it is not float32.
        tf32: whether float32 operands may be rounded for tensor cores.
    """

    model: str
    library: str
    shape: tuple[int, ...]
    target: tuple[int, ...]
    classes: int
    optimizer: str
    settings: dict[str, Any]
    loss: str
    device: str = "cpu"
    dtype: str = "float32"
    tf32: bool = False

    def batch(self) -> tuple[Array, Array]:
        """The same input and target each time."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal(self.shape, dtype=np.float32)
        if self.loss == "mse":
            return x, rng.standard_normal(self.target, dtype=np.float32)
        return x, rng.integers(0, self.classes, self.target)


def our_step(training: Training) -> Step:
    """A step of the compiled library, as Session runs it."""
    from tvm_convgrad.training.runtime.session import Session

    session = Session(Path(training.library))
    x, y = training.batch()
    return lambda: session.step(x, y)[0]


def torch_step(training: Training, channels_last: bool) -> Step:
    """A step of PyTorch in eager mode: zero_grad, forward, loss, backward, the optimizer's step.

    As for ours, the batch lies in the host's memory before it, and the loss afterwards.
    """
    import torch

    if training.model in BUILT_IN:
        from tvm_convgrad.bench.networks import network

        module = network(training.model)[0]
    else:
        # Here, as the package `training` loads TVM.
        from tvm_convgrad.training.frontends.torch_export.known_types import known_types

        with known_types(Path(training.model)):
            module = torch.export.load(training.model).module()
    x, y = map(torch.from_numpy, training.batch())
    form = torch.channels_last if channels_last else torch.contiguous_format
    module, x = module.to(training.device, memory_format=form), x.contiguous(memory_format=form)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimizer]
    optimizer = kind(module.parameters(), **training.settings)
    criterion = torch.nn.functional.mse_loss if training.loss == "mse" else torch.nn.functional.cross_entropy

    autocast = torch.autocast(training.device, getattr(torch, training.dtype), enabled=training.dtype != "float32")
    # as our step does: a factor on the loss that is undone before the update, for float16's small gradients
    scale = 1024.0 if training.dtype == "float16" else 1.0

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = criterion(module(x.to(training.device)), y.to(training.device))
        (loss * scale).backward()
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in module.parameters() if p.grad is not None], 1 / scale)
        optimizer.step()
        return float(loss.item())

    return step


class Alone(NamedTuple):
    """What a contender takes in a process of its own.

    Attributes:
        memory: bytes that its steps have resident at the most, beyond what the process has before it has the model; on
            a GPU, bytes of its memory (nothing else may run there). None without /proc/self/status.
        first: seconds of its first step, in which libraries choose and prepare what they run.
    """

    memory: int | None
    first: float


def alone(contender: str, training: Training, threads: int) -> Alone:
    """Run "ours", "torch contiguous" or "torch channels_last" in a process of its own.

    Raises:
        SetupError: the process fails.
    """
    request = json.dumps({"contender": contender, "threads": threads, "training": asdict(training)})
    done = subprocess.run(
        [sys.executable, "-m", "tvm_convgrad.bench.contenders", request],
        capture_output=True,
        text=True,
        env={**os.environ, VARIABLE: str(threads)},
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SetupError(f"{contender} could not be measured in a process of its own: {last}")
    return Alone(**json.loads(done.stdout.splitlines()[-1]))


def _main(request: str) -> None:
    """Run the contender of a request, as `alone` writes it, and print its Alone as JSON."""
    words = json.loads(request)
    contender, training = words["contender"], Training(**words["training"])
    make = _prepared(contender, training, words["threads"])
    gc.collect()
    if training.device == "cuda":
        taken = _gpu_memory()
        step = make(training)
        _, first = timed(step)
        for _ in range(MEMORY_STEPS - 1):
            step()
        print(json.dumps(Alone(_gpu_memory() - taken, first)._asdict()))
        return
    before = resident("VmRSS")
    step = make(training)
    _, first = timed(step)
    # Loading a model may take more than training it, and happens once.
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    for _ in range(MEMORY_STEPS - 1):
        step()
    peak = resident("VmHWM")
    print(json.dumps(Alone(None if before is None or peak is None else peak - before, first)._asdict()))


def _prepared(contender: str, training: Training, threads: int) -> Callable[[Training], Step]:
    """What makes a contender's step, after the contender's library is imported and set up."""
    if contender == "ours":
        import tvm  # noqa: F401  (what is imported does not count, and a session imports it late)

        import tvm_convgrad.training.runtime.session  # noqa: F401

        return our_step
    import torch

    prepare_torch(threads, training.tf32 if training.device == "cuda" else None)
    if training.device == "cuda":
        torch.ones(1, device="cuda")
    else:
        torch.ones(8, 8).mm(torch.ones(8, 8))
    return lambda training: torch_step(training, contender.endswith("channels_last"))


def prepare_torch(threads: int, tf32: bool | None) -> None:
    """Set PyTorch's threads; on a GPU also let it time engines, and round to tf32 if ours may.

    Args:
        threads: of PyTorch's pool.
        tf32: whether float32 operands may be rounded; None on a CPU.
    """
    import torch

    torch.set_num_threads(threads)
    if tf32 is not None:
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32


def timed(step: Step) -> tuple[float, float]:
    """The loss of a step, and its seconds."""
    begin = time.perf_counter()
    loss = step()
    return loss, time.perf_counter() - begin


def _gpu_memory() -> int:
    """Bytes of the GPU's memory that are in use, caches of allocators included."""
    from tvm_convgrad.offload.cuda import load_cuda  # imports TVM, which PyTorch's process on a CPU must not load

    load_cuda()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    code = ctypes.CDLL("libcudart.so.13").cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    if code:
        raise SetupError(f"cudaMemGetInfo failed with error {code}: the memory of the GPU cannot be measured")
    return total.value - free.value


def resident(name: str) -> int | None:
    """A number of /proc/self/status, in bytes; ru_maxrss would count the process that started this one."""
    status = Path("/proc/self/status")
    found = re.search(rf"^{name}:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found.group(1)) * 1024 if found else None


if __name__ == "__main__":
    _main(sys.argv[1])
