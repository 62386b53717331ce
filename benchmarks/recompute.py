# SPDX-License-Identifier: Apache-2.0
"""Planned memory, and CPU time of a step, of networks without and with recomputation.

    python -m benchmarks.recompute resnet18 mobilenet_v2 unet --steps 10

Builds each network, one of those or of the zoo's (`timm:crossvit_9_dagger_240 --pixels 240`), with SGD and momentum, by
`convgrad build` with `--recompute` none, auto, cheap and all, and with `--memory` halfway between the least and the
plain plan. The steps run in turns in one process; a ratio is the median over the turns of the CPU time (user and
system) by that of the plain step of the same turn. The losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median

import numpy as np

from benchmarks.zoo.architectures import SIZE, named

NETWORKS = {
    "resnet18": "torchvision:resnet18",
    "mobilenet_v2": "torchvision:mobilenet_v2",
    "unet": "bench:unet",
}
LEVELS = ("none", "auto", "cheap", "all")


def exported(name: str, shape: tuple[int, ...], folder: Path) -> Path:
    """A .pt2 file of the network."""
    import torch

    from tvm_convgrad.bench.bridge_networks import BRIDGE_NETWORKS

    torch.manual_seed(0)
    library, _, model = NETWORKS.get(name, name).partition(":")
    network = BRIDGE_NETWORKS[model][0]() if library == "bench" else named(f"{library}:{model}").make()
    path = folder / f"{name.replace(':', '-')}.pt2"
    torch.export.save(torch.export.export(network.train(), (torch.zeros(shape),)), path)
    return path


def built(model: Path, output: Path, *options: str) -> int:
    """Build a step by the command; gives the bytes that are planned."""
    from tvm_convgrad.training.runtime.artifact import read_artifact
    from tvm_convgrad.training.runtime.memory import memory_of

    command = [sys.executable, "-m", "tvm_convgrad", "build", str(model), "-o", str(output), "--json"]
    done = subprocess.run([*command, "--momentum", "0.9", "--lr", "0.01", *options], check=True, stdout=subprocess.PIPE)
    print("  ", output.stem, *options, json.loads(done.stdout).get("recompute", ""), file=sys.stderr)
    return memory_of(read_artifact(output)).total


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", help=f"{', '.join(NETWORKS)} or a name of the zoo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=SIZE, help="height and width of an image")
    parser.add_argument("--steps", type=int, default=10, help="turns that are timed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recompute-") as place:
        for name in arguments.networks:
            measure(name, (arguments.batch, 3, arguments.pixels, arguments.pixels), arguments.steps, Path(place))


def measure(name: str, shape: tuple[int, ...], steps: int, folder: Path) -> None:
    """Print the row of each way to build a network."""
    from tvm_convgrad.training.runtime.session import Session

    model = exported(name, shape, folder)
    library = {level: model.with_name(f"{model.stem}-{level}.so") for level in (*LEVELS, "memory")}
    planned = {level: built(model, library[level], "--recompute", level) for level in LEVELS}
    limit = (planned["none"] + planned["all"]) // 2
    planned["memory"] = built(model, library["memory"], "--memory", f"{limit}B")
    sessions = {level: Session(library[level]) for level in planned}
    random = np.random.default_rng(0)
    first = sessions["none"]
    x = random.standard_normal(shape, "float32")
    y = random.integers(0, 10, tuple(map(int, first.target.shape)))
    seconds: dict[str, list[float]] = {level: [] for level in planned}
    for number in range(steps + 1):
        losses = set()
        for level, session in sessions.items():
            begin = cpu_seconds()
            losses.add(float(session.step(x, y)[0]))
            if number:
                seconds[level].append(cpu_seconds() - begin)
        assert len(losses) == 1, f"{name}: the losses differ: {losses}"
    for level, total in planned.items():
        ratio = median(own / plain for own, plain in zip(seconds[level], seconds["none"], strict=True))
        print(
            f"{name} {level}: {total / 1e6:.1f} MB planned ({total / planned['none']:.2f}), "
            f"{median(seconds[level]) * 1e3:.0f} ms of CPU time ({ratio:.2f})",
            flush=True,
        )


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = getrusage(RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
