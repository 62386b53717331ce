# SPDX-License-Identifier: Apache-2.0
"""The measurements of a run: written after each of them, read back to go on, and summed up.

The file is JSON: `format`, `environment` (versions, CPU, threads, target, seconds), `roof`, `measurements`, `failures`
and `means`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import tvm_convgrad
from tvm_convgrad.bench.measure import Measurement, geometric_mean
from tvm_convgrad.bench.place import Place
from tvm_convgrad.bench.roof import Roof
from tvm_convgrad.errors import ArtifactError
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.report.tables import installed_version
from tvm_convgrad.training.envelope import write_atomic

FORMAT = 3
"""Of the file. Measurements have the peak of their time since 3."""

DENSE, DENSE_CHANNELS = "dense", 64
"""What layers that multiply-adds bound are called, and the channels that they have at the least."""

GRADIENTS = ("backward_weight", "backward_data")
ENGINE_VARIABLES = ("CONVGRAD_CUDNN", "CONVGRAD_CUTLASS")
"""What engines and kernels of libraries for GPUs may do."""

Key = tuple[str, str, int, str, str, str]


def environment(place: Place, threads: int, seconds: float) -> dict[str, Any]:
    """What two runs must share for their measurements to be one table."""
    names = ("apache-tvm", "torch", "jax", *(["nvidia-cudnn-cu13"] if place.gpu else []))
    of_gpu: dict[str, Any] = {}
    if place.gpu:
        variables = {name: os.environ[name] for name in ENGINE_VARIABLES if name in os.environ}
        of_gpu = {"gpu": place.name, "numbers": place.numbers, "variables": variables}
    return {
        "tvm_convgrad": tvm_convgrad.__version__,
        **{name: installed_version(name) for name in names},
        "cpu": _cpu(),
        **of_gpu,
        "threads": threads,
        "target": str(place.target),
        "seconds": seconds,
        "impl": place.impl,
    }


class Results:
    """Measurements by what they are of, in the order of being made.

    Attributes:
        measurements: all of them.
        failures: {suite, face, descriptor, reason} of what could not be measured.
    """

    def __init__(self, where: dict[str, Any], roof: Roof, path: Path | None = None) -> None:
        self.environment, self.roof, self.path = where, roof, path
        self.measurements: list[Measurement] = []
        self.failures: list[dict[str, str]] = []

    @property
    def device(self) -> str:
        """What was measured: the GPU, or the CPU."""
        return str(self.environment.get("gpu") or self.environment["cpu"])

    @property
    def held(self) -> Roof:
        """The roof with the median of the peaks that layers were measured beside, and that of the start without any."""
        peaks = self.peaks
        return self.roof.at(median(peaks) if peaks else None)

    @property
    def peaks(self) -> list[float]:
        """GFLOP/s of the FMA peak beside each measurement; none on a GPU."""
        return [m.peak for m in self.measurements if m.peak is not None]

    @classmethod
    def resume(cls, path: Path, where: dict[str, Any]) -> Results | None:
        """Go on with the run that left `path`; None if there is no such file.

        Raises:
            ArtifactError: it is no file of measurements, or one of another environment.
        """
        try:
            content = json.loads(path.read_text())
            written = int(content["format"])
            if written == FORMAT:
                found = cls(content["environment"], Roof(**content["roof"]), path)
                found.measurements = [Measurement(**entry) for entry in content["measurements"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{path}: not measurements that bench wrote ({type(error).__name__}); remove it, or leave out --resume."
            ) from error
        if written != FORMAT:
            raise ArtifactError(
                f"{path}: of format {written}; this version goes on with {FORMAT} only (since 3, each has the "
                "peak of its time): remove it, or leave out --resume."
            )
        for name, value in where.items():
            if found.environment.get(name) != value:
                raise ArtifactError(
                    f"{path}: measured with {name} = {found.environment.get(name)}, now it is {value}; such numbers do "
                    "not belong into one table: leave out --resume."
                )
        return found

    def done(self) -> set[Key]:
        """The keys of what has been measured."""
        return {key_of(m) for m in self.measurements}

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement, and write the file if there is one."""
        self.measurements.append(measurement)
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all.

        Raises:
            ArtifactError: it cannot be written.
        """
        if self.path is None:
            return
        content = {
            "format": FORMAT,
            "environment": self.environment,
            "roof": self.roof.plain(),
            "measurements": [m.plain() for m in self.measurements],
            "failures": self.failures,
            "means": means(self.measurements, self.roof),
        }
        write_atomic(self.path, (json.dumps(content, indent=1) + "\n").encode())


def key_of(m: Measurement) -> Key:
    """What a measurement is of."""
    return m.suite, m.layout, m.batch, m.face, m.descriptor, m.rival


def means(measurements: Sequence[Measurement], roof: Roof) -> list[dict[str, Any]]:
    """Geometric means by rival: of each suite, layout, batch and face; of each batch over the suites; of all.

    Each row: rival, suite, layout, batch, face ("gradients" is wgrad and dgrad), `layers` (how many distinct ones),
    `ratio` (their geometric mean), `worst`, `total` (time of all layers, each as often as it occurs, theirs / ours),
    `peak` and `rival_peak` (geometric means of ours and the rival's parts of the peak that was measured beside each
    layer, or at the start on a GPU), and `bound`: the ratio that kernels at the roofline would have, that is, at that
    peak or at the bandwidth of memory, whichever ends first. A rival that is at nine tenths of it leaves room for 1.1.
    Layers that caches let go faster than memory count as they were measured.

    The suites DENSE are those of all suites' layers that are bound by multiply-adds: 3x3 and 1x1, in one group, with
    64 channels and more. What is a row already (all layers are dense, or of one layout) is not there again.
    """
    rows: list[dict[str, Any]] = []
    seen: set[tuple[int, ...]] = set()
    for rival in dict.fromkeys(m.rival for m in measurements):
        of_rival = [m for m in measurements if m.rival == rival]
        for keys in _LEVELS:
            for group in dict.fromkeys(keys(m) for m in of_rival):
                if group is None:
                    continue
                faces = GRADIENTS if group[3] == "gradients" else None
                members = [m for m in of_rival if keys(m) == group and (faces is None or m.face in faces)]
                identity = tuple(map(id, members))
                if not members or identity in seen:
                    continue
                seen.add(identity)
                names = dict(zip(("suite", "layout", "batch", "face"), group, strict=True))
                rows.append({"rival": rival, **names, **_mean(members, roof)})
    return rows


@lru_cache(maxsize=4096)
def dense_kind(descriptor: str) -> str | None:
    """The kernel, 3x3 or 1x1, of a problem in one group that has DENSE_CHANNELS and more on both sides."""
    problem = ConvProblem.from_descriptor(descriptor)
    if problem.groups > 1 or min(problem.in_channels, problem.out_channels) < DENSE_CHANNELS:
        return None
    kind = "x".join(map(str, problem.kernel))
    return kind if kind in ("3x3", "1x1") else None


def _dense(m: Measurement, face: str, of_kind: bool = False) -> tuple[Any, ...] | None:
    kind = dense_kind(m.descriptor)
    return None if kind is None else (f"{DENSE} {kind}" if of_kind else DENSE, "all", m.batch, face)


_LEVELS: tuple[Callable[[Measurement], tuple[Any, ...] | None], ...] = (
    lambda m: (m.suite, m.layout, m.batch, m.face),
    lambda m: (m.suite, "all", m.batch, "gradients"),
    lambda m: ("all", m.layout, m.batch, m.face),
    lambda m: ("all", "all", m.batch, "gradients"),
    lambda m: ("all", "all", "all", m.face),
    lambda m: ("all", "all", "all", "gradients"),
    lambda _: ("all", "all", "all", "all"),
    lambda m: _dense(m, "gradients", of_kind=True),
    lambda m: _dense(m, m.face),
    lambda m: _dense(m, "gradients"),
)


def _mean(members: list[Measurement], roof: Roof) -> dict[str, Any]:
    ours = sum(m.count * m.ours for m in members)
    roofs = [(m, roof.at(m.peak)) for m in members]
    return {
        "layers": len(members),
        "ratio": geometric_mean(m.ratio for m in members),
        "worst": min(m.ratio for m in members),
        "total": sum(m.count * m.theirs for m in members) / ours,
        "peak": geometric_mean(m.gflops / its.gflops for m, its in roofs),
        "rival_peak": geometric_mean(m.rival_gflops / its.gflops for m, its in roofs),
        "bound": geometric_mean(max(m.ratio, its.attainable(m.intensity) / m.rival_gflops) for m, its in roofs),
    }


def _cpu() -> str:
    """The model of the CPU, as far as the system says."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
