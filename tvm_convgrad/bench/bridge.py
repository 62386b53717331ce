# SPDX-License-Identifier: Apache-2.0
"""Training steps of PyTorch or JAX with the bridge enabled and without: a process that loads no TVM for each network.

The processes are the programs bridge_torch.py and bridge_jax.py, which need their framework.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tvm_convgrad.bench.bridge_calls import CallMeasurement
from tvm_convgrad.bench.bridge_pairs import Pairs
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.files import write_atomic
from tvm_convgrad.core.kept_objects import default_folder
from tvm_convgrad.report.tables import installed_version
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
    "torch": Framework("PyTorch", "torch", MODELS, "tvm_convgrad.bench.bridge_torch"),
    "jax": Framework("JAX", "jax", JAX_MODELS, "tvm_convgrad.bench.bridge_jax"),
}
"""By the words of --bridge."""

FORMATS = {"NCHW": "contiguous", "NHWC": "channels_last"}


@dataclass(frozen=True)
class Request:
    """What one process measures.

    Attributes:
        model, batch, layout: the network, its samples, and NCHW or NHWC.
        seconds: time for the pairs of steps; there are at least MIN_PAIRS.
        threads: of PyTorch.
        folder: of compiled kernels.
        calls: whether each of the different convolution calls is measured by itself, too.
    """

    model: str
    batch: int
    layout: str
    seconds: float
    threads: int
    folder: str
    calls: bool = False


@dataclass(frozen=True)
class BridgeMeasurement:
    """The measurement of the training steps of a network.

    Attributes:
        model, batch, layout: the network, its samples, and NCHW or NHWC.
        with_bridge, without: seconds of a step, medians; ratio: the median of the pairs' ratios; pairs: how many.
        processor_with, processor_without: processor time of a step, medians.
        compile_seconds: of the steps until all is compiled, measured and chosen.
        compiled: kernels that were not kept by an earlier run.
        kernels, mixed, own: different calls that kernels compute, that both do, and that the framework does.
        calls: each of them by itself, if that was asked for.
    """

    model: str
    batch: int
    layout: str
    with_bridge: float
    without: float
    ratio: float
    pairs: int
    processor_with: float
    processor_without: float
    compile_seconds: float
    compiled: int
    kernels: int
    mixed: int
    own: int
    calls: tuple[CallMeasurement, ...] = ()

    @staticmethod
    def of(
        request: Request,
        pairs: Pairs,
        *,
        compile_seconds: float,
        compiled: int,
        where: Sequence[str],
        calls: Sequence[CallMeasurement] = (),
    ) -> BridgeMeasurement:
        """The measurement of what was asked for.

        Args:
            request: what was measured.
            pairs: of steps.
            compile_seconds, compiled, calls: attributes.
            where: who computes each of the different calls, in the words of the bridge's `explain`.
        """
        (ours, own), (processor, processor_own) = pairs.seconds, pairs.processor
        kernels, mixed = sum(each in ("kernel", "kernels") for each in where), where.count("both")
        return BridgeMeasurement(
            model=request.model,
            batch=request.batch,
            layout=request.layout,
            with_bridge=ours,
            without=own,
            ratio=pairs.ratio,
            pairs=len(pairs.without),
            processor_with=processor,
            processor_without=processor_own,
            compile_seconds=compile_seconds,
            compiled=compiled,
            kernels=kernels,
            mixed=mixed,
            own=len(where) - kernels - mixed,
            calls=tuple(calls),
        )

    @staticmethod
    def from_json(text: str) -> BridgeMeasurement:
        """What `json.dumps(asdict(measurement))` wrote."""
        words = json.loads(text)
        calls = tuple(CallMeasurement(**each) for each in words.pop("calls"))
        return BridgeMeasurement(**words, calls=calls)


def run_bridge(
    bridge: str,
    models: Sequence[str],
    batches: Sequence[int],
    layouts: Sequence[str],
    *,
    seconds: float,
    threads: int | None = None,
    calls: bool = False,
    path: Path | None = None,
) -> list[BridgeMeasurement]:
    """Measure each network in a process of its own.

    Args:
        bridge: a key of BRIDGES.
        models: names of its networks.
        batches, layouts: sizes, and keys of FORMATS.
        seconds: time for the pairs of each measurement; there are at least bridge_pairs.MIN_PAIRS.
        threads: of PyTorch; None: TVM_NUM_THREADS, or all cores. JAX has as many as the process may use cores.
        calls: measure each of the different convolution calls by itself, too.
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
                request = Request(model, batch, layout, seconds, count, str(default_folder()), calls)
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
    return BridgeMeasurement.from_json(done.stdout.splitlines()[-1])


__all__ = ["BRIDGES", "FORMATS", "MODELS", "BridgeMeasurement", "Framework", "Request", "run_bridge"]
