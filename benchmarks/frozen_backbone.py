# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a step that trains the last layer alone, beside the step that trains all of ResNet-18.

    python -m benchmarks.frozen_backbone --batch 8 --steps 20

Builds both for this CPU by `convgrad build` (SGD with momentum, 224 px). The steps run in turns in one process; the
ratio is the median over the pairs. The memory of each is measured in a process of its own: the peak of its resident
memory during steps less what was resident with TVM and before the library was loaded, so that the library, parameters
and optimizer state count. Beside it stands the plan's: state, batch and what is computed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.data_parallel import network_of

TRAINED = "classifier.*"


def resident(field: str) -> int:
    """Bytes of this process by a field of /proc/self/status: VmRSS now, VmHWM the peak since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def batch_of(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    random = np.random.default_rng(0)
    return random.standard_normal((batch, 3, 224, 224), "float32"), random.integers(0, 10, batch)


def build(folder: Path, batch: int) -> dict[str, Path]:
    """Both steps, built by the command."""
    import torch

    network, shape = network_of("resnet18")
    model = folder / "resnet18.pt2"
    torch.export.save(torch.export.export(network.train(), (torch.zeros(batch, *shape),)), model)
    steps = {"all": folder / "all.so", "head": folder / "head.so"}
    for name, step in steps.items():
        command = [sys.executable, "-m", "tvm_convgrad", "build", str(model), "-o", str(step), "--target", "native"]
        command += ["--momentum", "0.9", "--lr", "0.01"] + (["--train", TRAINED] if name == "head" else [])
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return steps


def memory(step: Path, batch: int) -> int:
    """Peak bytes that three steps take in this process, beyond what it had before the library was loaded."""
    import tvm  # noqa: F401  - the session imports it late; its own memory is not the step's

    from tvm_convgrad.training.runtime.session import Session

    x, y = batch_of(batch)
    before = resident("VmRSS")
    session = Session(step)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    for _ in range(3):
        session.step(x, y)
    return resident("VmHWM") - before


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps that are timed")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(memory(arguments.memory_of, arguments.batch))
        return
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        steps = build(Path(folder), arguments.batch)
        peaks = {}
        for name, step in steps.items():
            command = [sys.executable, "-m", "benchmarks.frozen_backbone", "--batch", str(arguments.batch)]
            command += ["--memory-of", str(step)]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
            peaks[name] = int(found.stdout)
        from tvm_convgrad.training.runtime.artifact import read_artifact
        from tvm_convgrad.training.runtime.memory import memory_of
        from tvm_convgrad.training.runtime.session import Session

        planned = {name: memory_of(read_artifact(step)).total for name, step in steps.items()}
        x, y = batch_of(arguments.batch)
        sessions = {name: Session(step) for name, step in steps.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(arguments.steps + 2):
            for name, session in sessions.items():
                begin = time.perf_counter()
                session.step(x, y)
                if number >= 2:
                    seconds[name].append(time.perf_counter() - begin)
    ratio = median(head / whole for head, whole in zip(seconds["head"], seconds["all"], strict=True))
    for name in steps:
        memories = f"{peaks[name] / 2**20:.0f} MiB, planned {planned[name] / 2**20:.0f}"
        print(f"{name}: {median(seconds[name]) * 1e3:.1f} ms a step, {memories}")
    parts = [f"{ratio:.2f} of the time", f"{peaks['head'] / peaks['all']:.2f} of the memory"]
    print(f"head / all: {', '.join(parts)}, planned {planned['head'] / planned['all']:.2f}")


if __name__ == "__main__":
    main()
