# SPDX-License-Identifier: Apache-2.0
"""Times one direction of a layer against baselines: interleaved pairs in one process, so that noise hits both alike.

A pair is a turn (`measure.timing`) of ours and a turn of each variant (memory layout) of the baseline. The ratio of a
measurement is the median of the ratios of its pairs, not the ratio of medians. On a CPU a kernel of multiply-adds in
registers has a short turn in each pair, right behind ours: it gives the peak that the cores reach at that time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from tvm_convgrad.bench.baselines import BASELINES
from tvm_convgrad.bench.configuration import Configuration
from tvm_convgrad.bench.peak import Peak
from tvm_convgrad.bench.suites import Layer
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.measure.program import random_operands, tvm_call
from tvm_convgrad.measure.timing import Array, Call, pairs, turn

SLOW_BASELINES = ("stock",)
"""Baselines that are a hundred times slower: where the call that checks the result takes longer than `seconds`, it is
the only pair."""

TOLERANCE = 1e-3
"""Largest difference to the baseline's result, relative to its largest element: float32 sums in another order."""

UNITS = {"float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Spacing of numbers at 1 to which operands and results are rounded: two roundings of a result may differ by it."""


@dataclass(frozen=True)
class Measurement:
    """One direction of one layer against one baseline.

    Attributes:
        suite, layout, batch, count: the network, and how often the layer occurs in it.
        direction: "forward", "backward_weight" or "backward_data".
        descriptor: of the problem; `convgrad bench --problem DESCRIPTOR --direction DIRECTION` repeats the measurement.
        kernel: what the plan chose.
        baseline, variant: whom it was compared with, and the fastest of the baseline's memory layouts.
        ours, theirs: seconds of a call, medians.
        ratio: the median of theirs / ours of each pair; pairs: how many.
        gflops, baseline_gflops: 2e-9 * multiply-accumulates / seconds.
        peak: GFLOP/s of multiply-adds in registers on all threads, the median of a turn in each pair; None on a GPU.
        intensity: FLOP for each byte of the three tensors, each moved once.
        compile_seconds: time to compile our module.
    """

    suite: str
    layout: str
    batch: int
    count: int
    direction: str
    descriptor: str
    kernel: str
    baseline: str
    variant: str
    ours: float
    theirs: float
    ratio: float
    pairs: int
    gflops: float
    baseline_gflops: float
    peak: float | None
    intensity: float
    compile_seconds: float


def measure(
    direction: str,
    layer: Layer,
    baselines: Sequence[str],
    config: Configuration,
    *,
    seconds: float,
    peak: Peak | None = None,
) -> Iterator[Measurement]:
    """Time a direction of a layer, whose problem is static and of the configuration's type, against each baseline.

    Args:
        direction: "forward", "backward_weight" or "backward_data".
        layer: the problem, and where it comes from.
        baselines: keys of BASELINES.
        config: where to measure, and which implementation is ours.
        seconds: time for the pairs of each baseline, beyond compiling.
        peak: the kernel that has a turn in each pair; None on a GPU.

    Raises:
        SetupError: a baseline is missing, or the two results differ, so that times would mean nothing.
        UnsupportedError: our kernels, or the baseline, refuse the problem.
    """
    problem = layer.problem
    problem.require_static("bench")
    arrays = random_operands(direction, problem)
    begin = time.perf_counter()
    ours = replace(tvm_call(direction, problem, arrays, config.target, config.impl), name="ours")
    compile_seconds = time.perf_counter() - begin
    found = ours.read(ours.run()).astype(np.float32)
    tolerance = TOLERANCE + 2 * UNITS[config.numbers]
    for baseline in baselines:
        calls = BASELINES[baseline](direction, problem, arrays, config)
        first = {call.name: _checked(call, found, tolerance, f"{direction} of {problem.descriptor}") for call in calls}
        once = baseline in SLOW_BASELINES and min(first.values()) > seconds
        rates: list[float] = []
        beside = _kept(peak, rates)
        times = _one_pair(ours, first, beside) if once else pairs([ours, *calls], seconds, beside)
        best = min(first, key=lambda name: median(times[name]))
        own, theirs = times[ours.name], times[best]
        yield Measurement(
            suite=layer.suite,
            layout=problem.data_layout,
            batch=int(problem.batch),
            count=layer.count,
            direction=direction,
            descriptor=problem.descriptor,
            kernel=ours.kernel,
            baseline=baseline,
            variant=best,
            ours=median(own),
            theirs=median(theirs),
            ratio=median(their / our for our, their in zip(own, theirs, strict=True)),
            pairs=len(own),
            gflops=2e-9 * problem.macs / median(own),
            baseline_gflops=2e-9 * problem.macs / median(theirs),
            peak=median(rates) if rates else None,
            intensity=2 * problem.macs / problem.bytes,
            compile_seconds=compile_seconds,
        )


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def _checked(call: Call, found: Array, tolerance: float, what: str) -> float:
    """Seconds of a first call, whose result must agree with ours (`found`)."""
    begin = time.perf_counter()
    result = call.run()
    if call.wait is not None:
        call.wait()
    seconds = time.perf_counter() - begin
    wanted = call.read(result).astype(np.float32)
    error = float(np.abs(found - wanted).max()) / max(float(np.abs(wanted).max()), 1e-30)
    if not error <= tolerance:
        raise SetupError(f"{what}: ours and {call.name} differ by {error:.1e} of the largest value")
    return seconds


def _kept(peak: Peak | None, rates: list[float]) -> Callable[[], None] | None:
    """A function that gives the peak a turn and appends its rate to `rates`; None without a peak."""
    return None if peak is None else lambda: rates.append(peak.turn())


def _one_pair(ours: Call, first: dict[str, float], beside: Callable[[], None] | None) -> dict[str, list[float]]:
    times = {ours.name: [turn(ours, 0.0)], **{name: [seconds] for name, seconds in first.items()}}
    if beside is not None:
        beside()
    return times
