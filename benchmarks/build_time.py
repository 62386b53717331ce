# SPDX-License-Identifier: Apache-2.0
"""How long `convgrad build` takes for whole models: with an empty cache, and with the cache that this build leaves.

    python -m benchmarks.build_time                                       # ResNet-18, ResNet-50, MobileNetV2
    python -m benchmarks.build_time timm:convnext_atto --runs 1           # a model of another library, as in the zoo
    python -m benchmarks.build_time -o table.md

Models have random weights, and are exported in train mode for 128 pixels and batch 8; that is not timed. The table has
the least of several builds, from the start of the command to its end: seconds, and the processor time of all its
processes, which other programs on the machine hardly change. "Kernels cached" has another seed, so that all but the
kernels is done again; "all cached" is the same build again.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.zoo.architectures import SIZE, named
from tvm_convgrad.bench.results import cpu_name
from tvm_convgrad.threads import available_cores

MODELS = ("torchvision:resnet18", "torchvision:resnet50", "torchvision:mobilenet_v2")
BATCH = 8
BUILDS = (("empty cache", "0"), ("kernels cached", "1"), ("all cached", "0"))
"""What is in the cache, and the seed of the build."""


def export(name: str, path: Path) -> None:
    """Write a model of the zoo as .pt2."""
    architecture = named(name)
    inputs = tuple(torch.zeros(BATCH, *shape) for shape in architecture.shapes)
    torch.export.save(torch.export.export(architecture.make().train(), inputs), path)


def build(model: Path, output: Path, cache: Path, seed: str) -> tuple[float, float]:
    """Seconds of a build in a process of its own, and its processor time."""
    command = [sys.executable, "-m", "tvm_convgrad", "build", model, "-o", output, "--target", "native", "--seed", seed]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "CONVGRAD_CACHE": str(cache)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, used


def row(name: str, runs: int) -> str:
    """The line of a model in the table."""
    found: dict[str, list[tuple[float, float]]] = {kept: [] for kept, _ in BUILDS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.pt2"
        export(name, model)
        for run in range(runs):
            for kept, seed in BUILDS:
                found[kept].append(build(model, Path(folder) / "step.so", Path(folder) / f"cache-{run}", seed))
    least = [tuple(map(min, zip(*measured, strict=True))) for measured in found.values()]
    return " | ".join(["", name, *(f"{seconds:.1f} s ({used:.1f} s)" for seconds, used in least), ""]).strip()


def main() -> None:
    """Export, build, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="architectures of benchmarks/zoo")
    parser.add_argument("--runs", type=int, default=2, help="builds of each kind, of which the least counts")
    parser.add_argument("-o", "--output", type=Path, help="a file for the table, instead of standard output")
    options = parser.parse_args()
    lines = [
        f"Seconds (processor time) of `convgrad build --target native`, {SIZE} px, batch {BATCH}, on {cpu_name()}, "
        f"{available_cores()} cores; apache-tvm {version('apache-tvm')}, torch {torch.__version__}.",
        "",
        "| model | " + " | ".join(kept for kept, _ in BUILDS) + " |",
        "|---" * (1 + len(BUILDS)) + "|",
    ]
    for name in options.models:
        lines.append(row(name, options.runs))
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
