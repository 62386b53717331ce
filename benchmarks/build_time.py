# SPDX-License-Identifier: Apache-2.0
"""How long `convgrad build` takes for whole models: with an empty cache, and with what that build has kept.

    python benchmarks/build_time.py                                       # ResNet-18, ResNet-50, MobileNetV2
    python benchmarks/build_time.py timm:convnext_atto --runs 1           # a model of timm

Models have random weights, and are exported in train mode for 128 pixels and batch 8; that is not timed. Of several
builds the fastest is printed, in seconds from the start of the command to its end, with the processor time of all its
processes. "kernels kept" has another seed, so that all but the kernels is done again; "kept" is the same build again.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

MODELS = ("resnet18", "resnet50", "mobilenet_v2")
BUILDS = (("empty cache", "0"), ("kernels kept", "1"), ("kept", "0"))
"""What is in the cache, and the seed of the build."""


def export(name: str, path: Path) -> None:
    """Write the model of torchvision, or of timm where the name begins with "timm:", as .pt2."""
    package, _, model = name.rpartition(":")
    if package == "timm":
        import timm  # optional

        network = timm.create_model(model)
    else:
        import torchvision  # optional

        network = torchvision.models.get_model(model, weights=None)
    example = torch.zeros(8, 3, 128, 128)
    torch.export.save(torch.export.export(network.train(), (example,)), path)


def build(model: Path, output: Path, cache: Path, seed: str) -> tuple[float, float]:
    """Seconds of a build in a process of its own, and its processor time."""
    command = [sys.executable, "-m", "tvm_convgrad", "build", model, "-o", output, "--target", "native", "--seed", seed]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "CONVGRAD_CACHE": str(cache)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, used


def main() -> None:
    """Export, build, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="names of torchvision, or timm:NAME")
    parser.add_argument("--runs", type=int, default=2, help="builds, of which the fastest counts")
    options = parser.parse_args()
    for name in options.models:
        found: dict[str, tuple[float, float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model.pt2"
            export(name, model)
            for run in range(options.runs):
                cache = Path(folder) / f"cache-{run}"
                for kept, seed in BUILDS:
                    measured = build(model, Path(folder) / "step.so", cache, seed)
                    found[kept] = min(found.get(kept, measured), measured)
        parts = (f"{kept} {seconds:.1f} s ({used:.1f} s of CPU)" for kept, (seconds, used) in found.items())
        print(f"{name}: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
