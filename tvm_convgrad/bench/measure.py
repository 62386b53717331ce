# SPDX-License-Identifier: Apache-2.0
"""Time a face of a problem against rivals: interleaved pairs in one process, so that noise hits both alike.

A pair is a turn of ours and a turn of each variant of the rival. A turn of a short call first calls without looking at
the clock until the threads of the party before, which spin a few milliseconds for more work, sleep; then it calls until
the clock can tell, and counts the mean. The ratio is the median of the ratios of the pairs, not the ratio of medians.
On a CPU multiply-adds in registers have a short turn in each pair, too, right behind ours: what the cores reach then.

On a GPU a turn is as many calls in a row as fill it by what the turn before took, and waits once, for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from tvm_convgrad.bench.ours import Call, random_operands, tvm_call
from tvm_convgrad.bench.peak import Peak
from tvm_convgrad.bench.place import Place
from tvm_convgrad.bench.rivals import RIVALS
from tvm_convgrad.errors import SetupError
from tvm_convgrad.problem import ConvProblem

MIN_PAIRS = 5
SLOW_RIVALS = ("stock",)
"""A hundred times slower: where the call that checks the result took longer than all pairs may, it is the only pair."""

SETTLE = 0.02
"""Seconds after which the threads of the party before do not spin any more.

GNU OpenMP, which PyTorch brings, looks 300,000 times for more work with a `pause` between: of about 50 cycles on AMD's
cores, of 140 on Intel's.
"""

TURN = 0.004
"""Seconds that are counted in a turn, at the least."""

LONG = 0.1
"""Seconds of a call in which spinning threads of others do not count."""

TOLERANCE = 1e-3
"""Largest difference to the rival's result, relative to its largest element: float32 sums in another order."""

UNITS = {"float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Spacing of numbers at 1 to which operands and results are rounded: two roundings of a result may differ by it."""


@dataclass(frozen=True)
class Measurement:
    """One face of one problem against one rival.

    Attributes:
        suite, layout, batch, count: the network, and how often the layer occurs in it.
        face, descriptor: what was computed; `--problem DESCRIPTOR --face FACE` repeats it.
        kernel: what the plan chose.
        rival, variant: whom it was compared with, and the better one of the rival's layouts.
        ours, theirs: seconds, medians.
        ratio: the median of theirs / ours of each pair; pairs: how many.
        gflops, rival_gflops: 2e-9 * multiply-accumulates / seconds.
        peak: GFLOP/s of multiply-adds in registers on all threads, the median of a turn in each pair; null on a GPU.
        intensity: FLOP for each byte of the three tensors, each moved once.
        compile_seconds: of our module.
    """

    suite: str
    layout: str
    batch: int
    count: int
    face: str
    descriptor: str
    kernel: str
    rival: str
    variant: str
    ours: float
    theirs: float
    ratio: float
    pairs: int
    gflops: float
    rival_gflops: float
    peak: float | None
    intensity: float
    compile_seconds: float

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(
    face: str,
    problem: ConvProblem,
    *,
    place: Place,
    against: Sequence[str],
    seconds: float,
    peak: Peak | None = None,
    suite: str = "",
    count: int = 1,
) -> Iterator[Measurement]:
    """Time `face` of a static problem of the place's type against each rival in turn.

    Args:
        against: keys of RIVALS.
        seconds: to spend on the pairs of each rival, beyond compiling.
        peak: what takes turns with the parties; None on a GPU.

    Raises:
        SetupError: a rival is missing, or the two results differ, so that times would mean nothing.
        UnsupportedError: our kernels, or the rival, refuse the problem.
    """
    problem.require_static("bench")
    arrays = random_operands(face, problem)
    begin = time.perf_counter()
    ours = replace(tvm_call(face, problem, arrays, place, place.impl), name="ours")
    compile_seconds = time.perf_counter() - begin
    found = ours.read(ours.run()).astype(np.float32)
    tolerance = TOLERANCE + 2 * UNITS[place.numbers]
    for rival in against:
        calls = RIVALS[rival](face, problem, arrays, place)
        first = {call.name: _checked(call, found, tolerance, f"{face} of {problem.descriptor}") for call in calls}
        once = rival in SLOW_RIVALS and min(first.values()) > seconds
        rates: list[float] = []
        beside = _kept(peak, rates)
        times = _one_pair(ours, first, beside) if once else pairs([ours, *calls], seconds, beside)
        best = min(first, key=lambda name: median(times[name]))
        own, theirs = times[ours.name], times[best]
        yield Measurement(
            suite=suite,
            layout=problem.data_layout,
            batch=int(problem.batch),
            count=count,
            face=face,
            descriptor=problem.descriptor,
            kernel=ours.kernel,
            rival=rival,
            variant=best,
            ours=median(own),
            theirs=median(theirs),
            ratio=median(their / our for our, their in zip(own, theirs, strict=True)),
            pairs=len(own),
            gflops=2e-9 * problem.macs / median(own),
            rival_gflops=2e-9 * problem.macs / median(theirs),
            peak=median(rates) if rates else None,
            intensity=2 * problem.macs / problem.bytes,
            compile_seconds=compile_seconds,
        )


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean of logarithms."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def _checked(call: Call, found: Any, tolerance: float, what: str) -> float:
    """Seconds of a first call whose result agrees with ours."""
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
    """A turn of the peak, kept in `rates`."""
    return None if peak is None else lambda: rates.append(peak.turn())


def _one_pair(ours: Call, first: dict[str, float], beside: Callable[[], None] | None) -> dict[str, list[float]]:
    times = {ours.name: [_turn(ours, 0.0)], **{name: [seconds] for name, seconds in first.items()}}
    if beside is not None:
        beside()
    return times


def pairs(calls: Sequence[Call], seconds: float, beside: Callable[[], None] | None = None) -> dict[str, list[float]]:
    """Seconds of a call of each, round by round; `beside` is called in each, behind the first one's turn."""
    times: dict[str, list[float]] = {call.name: [] for call in calls}
    begin = time.perf_counter()
    while len(times[calls[0].name]) < MIN_PAIRS or time.perf_counter() - begin < seconds:
        for call in calls:
            before = times[call.name]
            before.append(_turn(call, before[-1] if before else 0.0))
            if beside is not None and call is calls[0]:
                beside()
    return times


def _turn(call: Call, expected: float) -> float:
    """Mean seconds of a call; `expected` of an earlier turn, or 0."""
    if call.wait is not None:
        return _queue(call, max(1, math.ceil(TURN / (expected or _queue(call, 1)))))
    begin = time.perf_counter()
    while expected < LONG and time.perf_counter() - begin < SETTLE:
        call.run()
    runs, begin, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < TURN:
        call.run()
        runs += 1
        elapsed = time.perf_counter() - begin
    return elapsed / runs


def _queue(call: Call, runs: int) -> float:
    """Mean seconds of calls in a row that a GPU works off, after one that is not counted."""
    assert call.wait is not None
    call.run()
    call.wait()
    begin = time.perf_counter()
    for _ in range(runs):
        call.run()
    call.wait()
    return (time.perf_counter() - begin) / runs
