# SPDX-License-Identifier: Apache-2.0
"""A run of a ResNet-18 with all that people set, killed and resumed, beside the same run that was not killed.

    python -m benchmarks.killed_run
    python -m benchmarks.killed_run --kills 5 --epochs 6 --dtype bfloat16

The network is torchvision's ResNet-18 for images of 32x32, the data are CIFAR-shaped: ten classes, each a fixed random
picture under noise. The step clips the norm of its gradients, keeps moving averages of the parameters and leaves biases
and norms
without weight decay; the rate follows a cosine with a warm-up, an epoch ends with a validation, and the best state is
kept. The second run gets SIGKILL after steps that are drawn, as often as --kills says, and goes on by --resume. Losses,
validations and the final state of both must be equal to the bit; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.data_parallel import network_of

TRAIN, VALIDATED, CLASSES = 1024, 256, 10
COMMAND = [sys.executable, "-m", "tvm_convgrad"]


def write_data(path: Path, seed: int) -> None:
    """Ten classes of 3x32x32, with x_train, x_val and x_test."""
    draw = np.random.default_rng(seed)
    pictures = draw.standard_normal((CLASSES, 3, 32, 32), "float32")
    arrays: dict[str, np.ndarray] = {}
    for name, count in (("train", TRAIN), ("val", VALIDATED), ("test", VALIDATED)):
        classes = draw.integers(0, CLASSES, count)
        noise = draw.standard_normal((count, 3, 32, 32), "float32")
        arrays |= {f"x_{name}": 0.5 * pictures[classes] + noise, f"y_{name}": classes}
    np.savez(path, **arrays)


def build(folder: Path, batch: int, dtype: str) -> Path:
    """Export the network and build its step by the command; its path."""
    import torch

    model, shape = network_of("resnet18_cifar")
    torch.export.save(torch.export.export(model, (torch.zeros(batch, *shape),)), folder / "net.pt2")
    options = ["--optimizer", "sgd", "--lr", "0.05", "--momentum", "0.9", "--weight-decay", "5e-4"]
    options += ["--decayed", "matrices", "--clip-norm", "1", "--ema", "0.95", "--target", "native", "--dtype", dtype]
    command = [*COMMAND, "build", str(folder / "net.pt2"), "-o", str(folder / "step.so"), "--bn", "train-all", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "step.so"


def run(step: Path, data: Path, checkpoints: Path, epochs: int) -> list[str]:
    """The command line of a run."""
    options = ["--epochs", str(epochs), "--schedule", "cosine:warmup=8", "--averages", "--use-best", "--validate-every"]
    options += ["16", "--checkpoint-dir", str(checkpoints), "--checkpoint-every", "7", "--resume", "--json"]
    options += ["--save-state", str(checkpoints.with_suffix(".npz"))]
    return [*COMMAND, "run", str(step), "--data", str(data), *options]


def finished(command: list[str]) -> dict[str, object]:
    """Run to the end; what it reports."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return dict(json.loads(done.stdout))


def killed(command: list[str], checkpoints: Path, after: int) -> int:
    """Kill a run once it has kept `after` steps; the steps that are kept."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and last_kept(checkpoints) < after:
        time.sleep(0.01)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"the run ended with code {process.returncode} before step {after}")
    return last_kept(checkpoints)


def last_kept(checkpoints: Path) -> int:
    """The steps of the newest checkpoint; 0 without one."""
    return max((int(path.stem[5:]) for path in checkpoints.glob("step-*.ckpt")), default=0)


def main() -> None:
    """Build, run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="Of the data and of the steps after which it is killed.")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(folder / "data.npz", given.seed)
        step = build(folder, given.batch, given.dtype)
        whole = finished(run(step, folder / "data.npz", folder / "whole", given.epochs))
        steps = given.epochs * (TRAIN // given.batch)
        cut = run(step, folder / "data.npz", folder / "cut", given.epochs)
        goals = sorted(random.Random(given.seed).sample(range(7, steps - 7), given.kills))
        kept = [killed(cut, folder / "cut", goal) for goal in goals]
        resumed = finished(cut)
        same = all(whole[name] == resumed[name] for name in ("losses", "best_loss", "best_step", "test_accuracy"))
        with np.load(folder / "whole.npz") as first, np.load(folder / "cut.npz") as second:
            same &= all(np.array_equal(first[name], second[name], equal_nan=True) for name in first.files)
    losses = whole["losses"]
    assert isinstance(losses, list)
    print(f"{steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {whole['test_accuracy']}")
    print(f"killed with {', '.join(map(str, kept))} steps kept; {'equal to the bit' if same else 'NOT EQUAL'}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
