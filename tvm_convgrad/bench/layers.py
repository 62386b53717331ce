# SPDX-License-Identifier: Apache-2.0
"""A run over layers: the list of layers, the loop with its progress bar, and the tables at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tvm_convgrad.bench.baselines import prepare_baselines
from tvm_convgrad.bench.gpu_roofline import measure_gpu_roofline
from tvm_convgrad.bench.measure import SLOW_BASELINES, Measurement, measure
from tvm_convgrad.bench.peak import Peak
from tvm_convgrad.bench.results import Results, environment, key_of, means
from tvm_convgrad.bench.roofline import Roofline, measure_roofline
from tvm_convgrad.bench.run_options import RunOptions
from tvm_convgrad.bench.suites import Layer
from tvm_convgrad.bench.suites import suite as problems_of
from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.errors import ConvGradError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.report.tables import followed, print_table, stderr
from tvm_convgrad.threads import use_threads

_BUSY = 0.3
"""CPUs that other processes keep busy, above which a run prints a warning."""


class BenchError(ConvGradError, RuntimeError):
    """Layers that could not be measured."""


def layers_of(
    suites: Iterable[str], batches: Iterable[int], layouts: Sequence[str], dtype: str = "float32"
) -> list[Layer]:
    """All layers of some suites, for each batch and layout, in an element type."""
    return [
        Layer(name, problem.with_dtypes(dtype, dtype, dtype), count)
        for name in suites
        for batch in batches
        for layout in layouts
        for problem, count in problems_of(name, batch, layout).items()
    ]


def problems_from(descriptors: Iterable[str], dtype: str = "float32") -> list[Layer]:
    """The layers that descriptors name, of type `dtype` where a descriptor has no types (or float32, which it omits).

    Raises:
        DescriptorError, ProblemError: no descriptor, or one with symbolic extents.
        UnsupportedError: of another element type than `dtype`.
    """
    layers = []
    for problem in map(ConvProblem.from_descriptor, descriptors):
        problem.require_static("bench")
        types = {of for _, of in problem.tensors.values()}
        if types not in ({dtype}, {"float32"}):
            raise UnsupportedError(
                f"this measures {dtype}, and {problem.descriptor} is not: leave out its _dt=, or give its --dtype."
            )
        layers.append(Layer("problem", problem.with_dtypes(dtype, dtype, dtype)))
    return layers


def run_layers(
    layers: Sequence[Layer],
    directions: Sequence[str],
    baselines: Sequence[str],
    options: RunOptions,
    *,
    resume: bool = False,
) -> Results:
    """Measure every direction of every layer against every baseline.

    A problem that occurs in several suites is measured once. What a kernel or a baseline refuses is kept as a failure.

    Args:
        layers: static problems of the configuration's element type.
        directions: names of the catalogue.
        baselines: keys of BASELINES.
        options: where to measure, how long, and the file to write.
        resume: go on with the measurements in `options.path`, if the file exists.

    Raises:
        SetupError: a baseline, or the library, is missing.
        ArtifactError: `options.path` cannot be written, or its measurements are of another environment.
    """
    config, path = options.config, options.path
    count = use_threads(options.threads)
    prepare_baselines(baselines, count, config)
    where = environment(config, count, options.seconds)
    results = Results.resume(path, where) if resume and path is not None else None
    peak = None if config.gpu else Peak(config.target, count, config.dtype)
    if results is None:
        roofline = measure_gpu_roofline(config) if peak is None else measure_roofline(peak)
        results = Results(where, roofline, path)
        results.save()
    busy = _load()
    if busy > _BUSY:
        _print_progress(f"others keep {busy:.1f} of {os.cpu_count()} CPUs busy: measure again when they do not")
    work = [(layer, direction) for layer in layers for direction in directions]
    for layer, direction in followed(work, "measuring"):
        _measure_layer(results, layer, direction, _missing(results, layer, direction, baselines), options, peak)
    return results


def _missing(results: Results, layer: Layer, direction: str, baselines: Sequence[str]) -> list[str]:
    """The baselines of which a direction of a layer has no measurement.

    If another suite has the same problem, its measurement is added for this layer, too.
    """
    known = {(m.direction, m.descriptor, m.baseline): m for m in results.measurements}
    done = results.done()
    missing = []
    for baseline in baselines:
        before = known.get((direction, layer.problem.descriptor, baseline))
        if before is None:
            missing.append(baseline)
            continue
        again = replace(before, suite=layer.suite, count=layer.count)
        if key_of(again) not in done:
            results.add(again)
    return missing


def _measure_layer(
    results: Results, layer: Layer, direction: str, baselines: Sequence[str], options: RunOptions, peak: Peak | None
) -> None:
    """Add the measurements of a direction of a layer against `baselines`, or a failure."""
    if not baselines:
        return
    word, descriptor = WORDS[direction], layer.problem.descriptor
    try:
        for found in measure(direction, layer, baselines, options.config, seconds=options.seconds, peak=peak):
            results.add(found)
            _print_progress(f"{found.ratio:6.2f}x  {found.variant:20}  {word:7}  {descriptor}  [{found.kernel}]")
    except ConvGradError as error:
        failure = {"suite": layer.suite, "direction": direction, "descriptor": descriptor, "reason": str(error)}
        results.failures.append(failure)
        results.save()
        _print_progress(f"failed   {word}  {descriptor}: {error}")


def show(results: Results) -> None:
    """Print the worst layers first, then the means, then the limits of the machine.

    Raises:
        BenchError: some layers could not be measured.
    """
    roofline = results.roofline
    columns = (
        "ratio",
        "direction",
        "problem",
        "kernel",
        "ms",
        "GFLOP/s",
        "peak",
        "its peak",
        "roofline",
        "baseline",
        "pairs",
        "suite",
        "count",
    )
    right = ("ratio", "ms", "GFLOP/s", "peak", "its peak", "roofline", "pairs", "count")
    for baseline in dict.fromkeys(m.baseline for m in results.measurements):
        of_baseline = sorted((m for m in results.measurements if m.baseline == baseline), key=lambda m: m.ratio)
        rows = (_row(m, roofline.with_peak(m.peak)) for m in of_baseline)
        print_table(f"time of {baseline} / ours, worst first", columns, rows, right)
        once = sum(m.pairs == 1 for m in of_baseline)
        if baseline in SLOW_BASELINES and once:
            _print_progress(f"{baseline} is slow: {once} of {len(of_baseline)} layers were measured by a single pair")
    _show_means(results)
    peaks = results.peaks
    beside = f"{results.sustained.gflops:.0f} ({min(peaks):.0f} to {max(peaks):.0f})" if peaks else "–"
    limits = (f"{roofline.gflops:.0f}", beside, f"{roofline.bandwidth:.1f}")
    print_table(
        "this machine, measured",
        ("device", "of", "threads", f"{roofline.of}, GFLOP/s", "beside the layers", "memory, GB/s"),
        [(results.device, roofline.machine, roofline.threads, *limits)],
    )
    if results.failures:
        first = results.failures[0]
        raise BenchError(
            f"{len(results.failures)} could not be measured; the first: {WORDS[first['direction']]} of "
            f"{first['descriptor']}: {first['reason']}"
        )


def _show_means(results: Results) -> None:
    """Print the geometric means of groups of layers."""
    groups = ("baseline", "suite", "layout", "batch", "direction", "layers")
    numbers = ("ratio", "worst", "total", "bound")
    rows = [
        (
            *(WORDS.get(row[name], row[name]) for name in groups),
            *(f"{row[name]:.2f}" for name in numbers),
            *(f"{row[name]:.0%}" for name in ("peak", "baseline_peak")),
        )
        for row in means(results.measurements, results.roofline)
    ]
    right = ("layers", *numbers, "peak", "its peak")
    print_table("geometric means", (*groups[:-1], *right), rows, right=right)


def _row(m: Measurement, roofline: Roofline) -> tuple[object, ...]:
    """The cells of a measurement, whose shares are of the roofline."""
    return (
        f"{m.ratio:.2f}",
        WORDS[m.direction],
        m.descriptor,
        m.kernel,
        f"{m.ours * 1e3:.3f}",
        f"{m.gflops:.0f}",
        f"{m.gflops / roofline.gflops:.0%}",
        f"{m.baseline_gflops / roofline.gflops:.0%}",
        f"{m.gflops / roofline.attainable(m.intensity):.0%}",
        m.variant,
        m.pairs,
        f"{m.suite} {m.layout} b{m.batch}",
        m.count,
    )


def _load(seconds: float = 0.2) -> float:
    """How many CPUs were busy while this process slept; 0 where there is no /proc/stat."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0

    def busy() -> int:
        user, nice, system = map(int, stat.read_text().split()[1:4])
        return user + nice + system

    before = busy()
    time.sleep(seconds)
    return min((busy() - before) / os.sysconf("SC_CLK_TCK") / seconds, float(os.cpu_count() or 1))


def _print_progress(text: str) -> None:
    stderr().print(text, markup=False, soft_wrap=True)
