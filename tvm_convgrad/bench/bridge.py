# SPDX-License-Identifier: Apache-2.0
"""Training steps of PyTorch or JAX with the bridge enabled and without, in turns in one process that loads no TVM.

As a program (`python -m tvm_convgrad.bench.bridge JSON`) this module measures one network of PyTorch and prints the
measurement; bridge_jax.py is the same for JAX.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.files import write_atomic
from tvm_convgrad.core.kept_objects import default_folder
from tvm_convgrad.report.tables import installed_version, print_table, quantity
from tvm_convgrad.threads import intended_threads

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "convnext_t", "cnn3d", "unet", "groupnorm_cifar")
"""The names in bridge_networks.BRIDGE_NETWORKS, which needs PyTorch to be imported; the last one is small."""


@dataclass(frozen=True)
class Framework:
    """A framework that has a bridge.

    Attributes:
        name: as it is called.
        package: whose version is printed; also the extra that installs it.
        models: names of networks, of which the last is small.
        program: the module that measures one network in a process of its own.
    """

    name: str
    package: str
    models: tuple[str, ...]
    program: str

    @property
    def default_models(self) -> tuple[str, ...]:
        """All but the small one."""
        return self.models[:-1]


JAX_MODELS = ("resnet18", "mobilenet_v2", "small")
"""The names in jax_networks.JAX_NETWORKS, which needs JAX to be imported."""

BRIDGES = {
    "torch": Framework("PyTorch", "torch", MODELS, "tvm_convgrad.bench.bridge"),
    "jax": Framework("JAX", "jax", JAX_MODELS, "tvm_convgrad.bench.bridge_jax"),
}
"""By the words of --bridge."""

FORMATS = {"NCHW": "contiguous", "NHWC": "channels_last"}
MIN_PAIRS = 5
MOST_WARM_STEPS = 40


@dataclass(frozen=True)
class BridgeMeasurement:
    """The measurement of the training steps of a network.

    Attributes:
        model, batch, layout: the network, its samples, and NCHW or NHWC.
        with_bridge, without: seconds of a step, medians; ratio: the median of the pairs' ratios; pairs: how many.
        compile_seconds: of the steps until all is compiled, measured and chosen.
        compiled: kernels that were not kept by an earlier run.
        kernels, mixed, own: different calls that kernels compute, that both do, and that the framework does.
    """

    model: str
    batch: int
    layout: str
    with_bridge: float
    without: float
    ratio: float
    pairs: int
    compile_seconds: float
    compiled: int
    kernels: int
    mixed: int
    own: int


@dataclass(frozen=True)
class Request:
    """What one process measures."""

    model: str
    batch: int
    layout: str
    seconds: float
    threads: int
    folder: str


def run_bridge(
    bridge: str,
    models: Sequence[str],
    batches: Sequence[int],
    layouts: Sequence[str],
    *,
    seconds: float,
    threads: int | None = None,
    path: Path | None = None,
) -> list[BridgeMeasurement]:
    """Measure each network in a process of its own.

    Args:
        bridge: a key of BRIDGES.
        models: names of its networks.
        batches, layouts: sizes, and keys of FORMATS.
        seconds: time for the pairs of each measurement; there are at least MIN_PAIRS.
        threads: of PyTorch; None: TVM_NUM_THREADS, or all cores. JAX has as many as the process may use cores.
        path: a JSON file that is written after each measurement.

    Raises:
        UnsupportedError: an unknown network.
        SetupError: the framework is missing, or a process fails.
    """
    framework = BRIDGES[bridge]
    unknown = [name for name in models if name not in framework.models]
    if unknown:
        raise UnsupportedError(
            f"bench --bridge {bridge} --step {unknown[0]}: give one of {', '.join(framework.models)}."
        )
    if installed_version(framework.package) is None:
        raise SetupError(
            f"bench --bridge {bridge}: {framework.name} is missing: pip install 'tvm-convgrad[{framework.package}]'."
        )
    count = threads or intended_threads()
    found: list[BridgeMeasurement] = []
    for model in models:
        for batch in batches:
            for layout in layouts:
                request = Request(model, batch, layout, seconds, count, str(default_folder()))
                found.append(_alone(bridge, request))
                if path is not None:
                    version = installed_version(framework.package)
                    words = {"threads": count, framework.package: version, "steps": list(map(asdict, found))}
                    write_atomic(path, (json.dumps(words, indent=1) + "\n").encode())
    return found


def _alone(bridge: str, request: Request) -> BridgeMeasurement:
    command = [sys.executable, "-m", BRIDGES[bridge].program, json.dumps(asdict(request))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SetupError(f"bench --bridge {bridge}: {request.model} could not be measured: {last}")
    return BridgeMeasurement(**json.loads(done.stdout.splitlines()[-1]))


def _measure(request: Request) -> BridgeMeasurement:
    """In a process of its own: pairs of steps, with the bridge and without."""
    import torch

    import tvm_convgrad.torch as bridge
    from tvm_convgrad.bench.bridge_networks import BRIDGE_NETWORKS

    torch.set_num_threads(request.threads)
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

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(module(x), target).backward()
        optimizer.step()
        return time.perf_counter() - begin

    folder = Path(request.folder)
    begin = time.perf_counter()
    with bridge.enable(wait=True, folder=folder):
        for _ in range(MOST_WARM_STEPS):
            step()
            if all(told.where not in ("compiling", "measuring") for told in bridge.explain()):
                break
    warm = time.perf_counter() - begin
    pairs: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(pairs) < MIN_PAIRS or time.perf_counter() - begin < request.seconds:
        with bridge.enable(wait=True, folder=folder):
            ours = step()
        pairs.append((ours, step()))
    where = [told.where for told in bridge.explain()]
    return BridgeMeasurement(
        model=request.model,
        batch=request.batch,
        layout=request.layout,
        with_bridge=median(ours for ours, _ in pairs),
        without=median(own for _, own in pairs),
        ratio=median(own / ours for ours, own in pairs),
        pairs=len(pairs),
        compile_seconds=warm,
        compiled=bridge.stats().compiled,
        kernels=where.count("kernels"),
        mixed=where.count("both"),
        own=where.count("PyTorch"),
    )


def show_bridge(bridge: str, found: Sequence[BridgeMeasurement]) -> None:
    """Print a table of the measurements, a row each."""
    columns = (
        "model",
        "batch",
        "layout",
        "ratio",
        "with, ms",
        "without, ms",
        "pairs",
        f"kernels/both/{BRIDGES[bridge].name}",
        "warm, s",
    )
    rows = [
        (
            m.model,
            m.batch,
            m.layout,
            quantity(m.ratio),
            f"{m.with_bridge * 1e3:.1f}",
            f"{m.without * 1e3:.1f}",
            m.pairs,
            f"{m.kernels}/{m.mixed}/{m.own}",
            f"{m.compile_seconds:.1f} ({m.compiled} compiled)",
        )
        for m in found
    ]
    print_table(
        f"training steps of {BRIDGES[bridge].name}: time without the bridge / with it", columns, rows, right=columns[1:]
    )


__all__ = ["BRIDGES", "FORMATS", "MODELS", "BridgeMeasurement", "Framework", "Request", "run_bridge", "show_bridge"]

if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Request(**json.loads(sys.argv[1]))))))
