# SPDX-License-Identifier: Apache-2.0
"""The JSON file of a run's measurements: written after each of them, and read back by --resume; geometric means.

The file has the keys `format`, `environment` (versions, CPU, threads, target, seconds), `roofline`, `measurements`,
`failures` and `means`. Numbers that are not finite are null.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import tvm_convgrad
from tvm_convgrad.bench.configuration import Configuration
from tvm_convgrad.bench.measure import Measurement, geometric_mean
from tvm_convgrad.bench.roofline import Roofline
from tvm_convgrad.bench.run_options import RunOptions
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.files import write_atomic
from tvm_convgrad.core.json_text import json_text
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.registry import ENTRIES, library_packages
from tvm_convgrad.report.tables import installed_version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 4
"""The version of the file's format. Since 4 measurements name their `direction` and `baseline`."""

DENSE, DENSE_CHANNELS = "dense", 64
"""The name of the layers that are bound by multiply-adds, and the least number of channels that these have."""

GRADIENTS = ("backward_weight", "backward_data")
ENGINE_VARIABLES = tuple(entry.variable for entry in ENTRIES.values() if entry.variable)
"""Environment variables that decide which engines and kernels of libraries for GPUs may be used."""

Key = tuple[str, str, int, str, str, str]


def environment(config: Configuration, threads: int, seconds: float) -> dict[str, Any]:
    """The versions, machine and options that two runs must share for their measurements to be one table."""
    names = ("apache-tvm", "torch", "jax", *(library_packages("cuda") if config.gpu else []))
    of_gpu: dict[str, Any] = {}
    if config.gpu:
        variables = {name: os.environ[name] for name in ENGINE_VARIABLES if name in os.environ}
        of_gpu = {"gpu": config.gpu_name, "numbers": config.numbers, "variables": variables}
    return {
        "tvm_convgrad": tvm_convgrad.__version__,
        **{name: installed_version(name) for name in names},
        "cpu": cpu_name(),
        **of_gpu,
        "threads": threads,
        "target": str(config.target),
        "seconds": seconds,
        "impl": config.impl,
    }


class Results:
    """The measurements of a run, in order.

    Attributes:
        environment: of the run, by `environment`.
        roofline: measured at the start.
        path: the JSON file, or None.
        measurements: all of them.
        failures: {suite, direction, descriptor, reason} of what could not be measured.
    """

    def __init__(self, where: dict[str, Any], roofline: Roofline, path: Path | None = None) -> None:
        self.environment, self.roofline, self.path = where, roofline, path
        self.measurements: list[Measurement] = []
        self.failures: list[dict[str, str]] = []

    @property
    def device(self) -> str:
        """The name of the GPU, or of the CPU."""
        return str(self.environment.get("gpu") or self.environment["cpu"])

    @property
    def sustained(self) -> Roofline:
        """The roofline with the median of the peaks beside layers; without any, that of the start."""
        peaks = self.peaks
        return self.roofline.with_peak(median(peaks) if peaks else None)

    @property
    def peaks(self) -> list[float]:
        """GFLOP/s of the FMA peak beside each measurement; none on a GPU."""
        return [m.peak for m in self.measurements if m.peak is not None]

    @classmethod
    def resume(cls, path: Path, where: dict[str, Any]) -> Results | None:
        """The results that an earlier run left in `path`, to go on with; None if there is no such file.

        Raises:
            ArtifactError: it is not a file of measurements, or one of another format or environment.
        """
        try:
            content = json.loads(path.read_text())
            written = int(content["format"])
            if written == FORMAT:
                found = cls(content["environment"], Roofline(**content["roofline"]), path)
                found.measurements = [_measurement(entry) for entry in content["measurements"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{path}: not measurements that bench wrote ({type(error).__name__}); remove it, or leave out --resume."
            ) from error
        if written != FORMAT:
            raise ArtifactError(
                f"{path}: of format {written}; this version goes on with {FORMAT} only (since 4, measurements name "
                "their direction and baseline): remove it, or leave out --resume."
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
            "roofline": asdict(self.roofline),
            "measurements": [asdict(m) for m in self.measurements],
            "failures": self.failures,
            "means": means(self.measurements, self.roofline),
        }
        write_atomic(self.path, (json_text(content, indent=1) + "\n").encode())


def save_measurements(name: str, found: Sequence[DataclassInstance], options: RunOptions, threads: int) -> None:
    """Write a JSON file of measurements of steps or per-sample gradients under the key `name`, if a file is wanted.

    Raises:
        ArtifactError: it cannot be written.
    """
    if options.path is not None:
        where = environment(options.config, threads, options.seconds)
        content = {"format": FORMAT, "environment": where, name: [asdict(m) for m in found]}
        write_atomic(options.path, (json_text(content, indent=1) + "\n").encode())


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    """The measurement of an entry of the file, where null is what was not finite, except for `peak`."""
    values: dict[str, Any] = {
        name: math.nan if value is None and name != "peak" else value for name, value in entry.items()
    }
    return Measurement(**values)


def key_of(m: Measurement) -> Key:
    """What identifies a measurement: suite, layout, batch, direction, descriptor and baseline."""
    return m.suite, m.layout, m.batch, m.direction, m.descriptor, m.baseline


def means(measurements: Sequence[Measurement], roofline: Roofline) -> list[dict[str, Any]]:
    """Geometric means by baseline: of each suite, layout, batch and direction; of each batch over the suites; of all.

    The rows of suite DENSE are of the layers of all suites that are bound by multiply-adds: 3x3 and 1x1, in one group,
    with 64 channels and more. A group of measurements that has a row already (all layers are dense, or of one layout)
    has no second one.

    Returns:
        Rows with the keys
            baseline, suite, layout, batch, direction: of the group; direction "gradients" is wgrad and dgrad.
            layers: how many distinct layers.
            ratio, worst: the geometric mean of their ratios, and the smallest one.
            total: time of all layers, each as often as it occurs in its network, theirs / ours.
            peak, baseline_peak: geometric means of the share of the peak that ours and the baseline reach; the peak is
                that beside each layer, on a GPU that of the start.
            bound: the ratio that kernels on the roofline would have: at that peak, or at the bandwidth of memory. Where
                the baseline is at nine tenths of it, bound is 1.1. Layers that caches make faster than memory count as
                they were measured.
    """
    rows: list[dict[str, Any]] = []
    seen: set[tuple[int, ...]] = set()
    for baseline in dict.fromkeys(m.baseline for m in measurements):
        of_baseline = [m for m in measurements if m.baseline == baseline]
        for keys in _LEVELS:
            for group in dict.fromkeys(keys(m) for m in of_baseline):
                if group is None:
                    continue
                directions = GRADIENTS if group[3] == "gradients" else None
                members = [
                    m for m in of_baseline if keys(m) == group and (directions is None or m.direction in directions)
                ]
                identity = tuple(map(id, members))
                if not members or identity in seen:
                    continue
                seen.add(identity)
                names = dict(zip(("suite", "layout", "batch", "direction"), group, strict=True))
                rows.append({"baseline": baseline, **names, **_mean(members, roofline)})
    return rows


@lru_cache(maxsize=4096)
def dense_kind(descriptor: str) -> str | None:
    """ "3x3" or "1x1" for a problem in one group with DENSE_CHANNELS and more on both sides; None for others."""
    problem = ConvProblem.from_descriptor(descriptor)
    if problem.groups > 1 or min(problem.in_channels, problem.out_channels) < DENSE_CHANNELS:
        return None
    kind = "x".join(map(str, problem.kernel))
    return kind if kind in ("3x3", "1x1") else None


def _dense(m: Measurement, direction: str, of_kind: bool = False) -> tuple[Any, ...] | None:
    kind = dense_kind(m.descriptor)
    return None if kind is None else (f"{DENSE} {kind}" if of_kind else DENSE, "all", m.batch, direction)


_LEVELS: tuple[Callable[[Measurement], tuple[Any, ...] | None], ...] = (
    lambda m: (m.suite, m.layout, m.batch, m.direction),
    lambda m: (m.suite, "all", m.batch, "gradients"),
    lambda m: ("all", m.layout, m.batch, m.direction),
    lambda m: ("all", "all", m.batch, "gradients"),
    lambda m: ("all", "all", "all", m.direction),
    lambda m: ("all", "all", "all", "gradients"),
    lambda _: ("all", "all", "all", "all"),
    lambda m: _dense(m, "gradients", of_kind=True),
    lambda m: _dense(m, m.direction),
    lambda m: _dense(m, "gradients"),
)


def _mean(members: list[Measurement], roofline: Roofline) -> dict[str, Any]:
    ours = sum(m.count * m.ours for m in members)
    rooflines = [(m, roofline.with_peak(m.peak)) for m in members]
    return {
        "layers": len(members),
        "ratio": geometric_mean(m.ratio for m in members),
        "worst": min(m.ratio for m in members),
        "total": sum(m.count * m.theirs for m in members) / ours,
        "peak": geometric_mean(m.gflops / its.gflops for m, its in rooflines),
        "baseline_peak": geometric_mean(m.baseline_gflops / its.gflops for m, its in rooflines),
        "bound": geometric_mean(max(m.ratio, its.attainable(m.intensity) / m.baseline_gflops) for m, its in rooflines),
    }


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the CPU from /proc/cpuinfo, else what `platform` names.

    A hypervisor may hide the model's number (`AMD EPYC`); family and model of the CPUID instruction are then added.
    """
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = fields.get("model name")
    if name is None:
        return platform.processor() or platform.machine()
    if any(letter.isdigit() for letter in name) or "cpu family" not in fields:
        return name
    return f"{name}, family {fields['cpu family']} model {fields.get('model', '?')}"
