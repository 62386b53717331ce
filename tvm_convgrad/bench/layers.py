# SPDX-License-Identifier: Apache-2.0
"""A run over layers: the list of work, the loop with its progress, and the tables at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm_convgrad.bench.gpu_roof import measure_gpu_roof
from tvm_convgrad.bench.measure import SLOW_RIVALS, Measurement, measure
from tvm_convgrad.bench.peak import Peak
from tvm_convgrad.bench.place import Place
from tvm_convgrad.bench.results import Results, environment, key_of, means
from tvm_convgrad.bench.rivals import prepare_rivals
from tvm_convgrad.bench.roof import Roof, measure_roof
from tvm_convgrad.bench.suites import suite as problems_of
from tvm_convgrad.errors import ConvGradError, UnsupportedError
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.report.tables import followed, print_table, stderr
from tvm_convgrad.threads import use_threads


@dataclass(frozen=True)
class Layer:
    """One problem of a suite, and how often it occurs in its network."""

    suite: str
    problem: ConvProblem
    count: int = 1


class BenchError(ConvGradError, RuntimeError):
    """Layers that could not be measured."""


def layers_of(
    suites: Iterable[str], batches: Iterable[int], layouts: Sequence[str], dtype: str = "float32"
) -> list[Layer]:
    """All layers of some suites, in an element type."""
    return [
        Layer(name, problem.with_dtypes(dtype, dtype, dtype), count)
        for name in suites
        for batch in batches
        for layout in layouts
        for problem, count in problems_of(name, batch, layout).items()
    ]


def problems_from(descriptors: Iterable[str], dtype: str = "float32") -> list[Layer]:
    """The layers that descriptors name.

    Raises:
        DescriptorError, ProblemError: no descriptor, or one with symbolic extents.
        UnsupportedError: of another element type than `dtype`.
    """
    problems = [ConvProblem.from_descriptor(text) for text in descriptors]
    for problem in problems:
        problem.require_static("bench")
        if {of for _, of in problem.tensors.values()} != {dtype}:
            raise UnsupportedError(
                f"this measures {dtype}, and {problem.descriptor} is not: leave out its _dt=, or give its --dtype."
            )
    return [Layer("problem", problem) for problem in problems]


def run_layers(
    layers: Sequence[Layer],
    faces: Sequence[str],
    against: Sequence[str],
    *,
    place: Place,
    seconds: float,
    threads: int | None,
    path: Path | None,
    resume: bool,
) -> Results:
    """Measure every face of every layer against every rival.

    A problem that occurs in several suites is measured once. What a kernel or a rival refuses is kept as a failure.

    Raises:
        SetupError: a rival, or the library, is missing.
        ArtifactError: `path` cannot be written, or `resume` does not fit it.
    """
    count = use_threads(threads)
    prepare_rivals(against, count, place)
    where = environment(place, count, seconds)
    results = Results.resume(path, where) if resume and path is not None else None
    peak = None if place.gpu else Peak(place.target, count)
    if results is None:
        roof = measure_gpu_roof(place) if peak is None else measure_roof(peak)
        results = Results(where, roof, path)
        results.save()
    busy = _load()
    if busy > 0.3:
        _say(f"others keep {busy:.1f} of {os.cpu_count()} CPUs busy: measure again when they do not")
    work = [(layer, face) for layer in layers for face in faces]
    for layer, face in followed(work, "measuring"):
        _measure_layer(results, layer, face, against, place, seconds, peak)
    return results


def _measure_layer(
    results: Results, layer: Layer, face: str, against: Sequence[str], place: Place, seconds: float, peak: Peak | None
) -> None:
    problem = layer.problem
    known = {(m.face, m.descriptor, m.rival): m for m in results.measurements}
    done = results.done()
    missing = []
    for rival in against:
        before = known.get((face, problem.descriptor, rival))
        if before is None:
            missing.append(rival)
            continue
        again = replace(before, suite=layer.suite, count=layer.count)
        if key_of(again) not in done:
            results.add(again)
    if not missing:
        return
    try:
        for found in measure(
            face,
            problem,
            place=place,
            against=missing,
            seconds=seconds,
            peak=peak,
            suite=layer.suite,
            count=layer.count,
        ):
            results.add(found)
            _say(f"{found.ratio:6.2f}x  {found.variant:20}  {face:15}  {problem.descriptor}  [{found.kernel}]")
    except ConvGradError as error:
        results.failures.append(
            {"suite": layer.suite, "face": face, "descriptor": problem.descriptor, "reason": str(error)}
        )
        results.save()
        _say(f"failed   {face}  {problem.descriptor}: {error}")


def show(results: Results) -> None:
    """Print the worst layers first, then the means, then the limits of the machine.

    Raises:
        BenchError: some layers could not be measured.
    """
    roof = results.roof
    columns = (
        "ratio",
        "face",
        "problem",
        "kernel",
        "ms",
        "GFLOP/s",
        "peak",
        "its peak",
        "roof",
        "rival",
        "pairs",
        "suite",
        "count",
    )
    right = ("ratio", "ms", "GFLOP/s", "peak", "its peak", "roof", "pairs", "count")
    for rival in dict.fromkeys(m.rival for m in results.measurements):
        of_rival = sorted((m for m in results.measurements if m.rival == rival), key=lambda m: m.ratio)
        print_table(f"time of {rival} / ours, worst first", columns, (_row(m, roof) for m in of_rival), right)
        once = sum(m.pairs == 1 for m in of_rival)
        if rival in SLOW_RIVALS and once:
            _say(f"{rival} is slow: {once} of {len(of_rival)} layers were measured by a single pair")
    named = ("rival", "suite", "layout", "batch", "face", "layers", "ratio", "worst", "total", "bound")
    rows = [
        (
            *(row[name] for name in named[:6]),
            *(f"{row[name]:.2f}" for name in ("ratio", "worst", "total", "bound")),
            f"{row['peak']:.0%}",
            f"{row['rival_peak']:.0%}",
        )
        for row in means(results.measurements, roof)
    ]
    print_table("geometric means", (*named, "peak", "its peak"), rows, right=(*named[5:], "peak", "its peak"))
    peaks = results.peaks
    beside = f"{results.held.gflops:.0f} ({min(peaks):.0f} to {max(peaks):.0f})" if peaks else "–"
    print_table(
        "this machine, measured",
        ("device", "of", "threads", f"{roof.of}, GFLOP/s", "beside the layers", "memory, GB/s"),
        [(results.device, roof.machine, roof.threads, f"{roof.gflops:.0f}", beside, f"{roof.bandwidth:.1f}")],
    )
    if results.failures:
        first = results.failures[0]
        raise BenchError(
            f"{len(results.failures)} could not be measured; the first: {first['face']} of {first['descriptor']}: "
            f"{first['reason']}"
        )


def _row(m: Measurement, start: Roof) -> tuple[Any, ...]:
    roof = start.at(m.peak)
    return (
        f"{m.ratio:.2f}",
        m.face,
        m.descriptor,
        m.kernel,
        f"{m.ours * 1e3:.3f}",
        f"{m.gflops:.0f}",
        f"{m.gflops / roof.gflops:.0%}",
        f"{m.rival_gflops / roof.gflops:.0%}",
        f"{m.gflops / roof.attainable(m.intensity):.0%}",
        m.variant,
        m.pairs,
        f"{m.suite} {m.layout} b{m.batch}",
        m.count,
    )


def _load(seconds: float = 0.2) -> float:
    """How many CPUs were busy for a while in which this process slept; 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0

    def busy() -> int:
        user, nice, system = map(int, stat.read_text().split()[1:4])
        return user + nice + system

    before = busy()
    time.sleep(seconds)
    return min((busy() - before) / os.sysconf("SC_CLK_TCK") / seconds, float(os.cpu_count() or 1))


def _say(text: str) -> None:
    stderr().print(text, markup=False, soft_wrap=True)
