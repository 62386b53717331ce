# SPDX-License-Identifier: Apache-2.0
"""The Markdown document of measurements of layers: machine and command, geometric means, a line for every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tvm_convgrad.bench.measure import Measurement
from tvm_convgrad.bench.results import Results, means
from tvm_convgrad.bench.roofline import Roofline
from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.files import write_atomic
from tvm_convgrad.offload.registry import library_packages

LOW = 0.95
"""The document counts the ratios under this."""

DIRECTIONS = ("backward_weight", "backward_data", "forward")
"""The directions in the order of their columns."""


def save_markdown(path: Path, results: Results, command: str) -> None:
    """Write the document.

    Args:
        command: what was run, for the reader to repeat it.

    Raises:
        ArtifactError: it cannot be written.
    """
    write_atomic(path, document(results, command).encode())


def document(results: Results, command: str) -> str:
    """The text of the document: ratios are time of the baseline / ours, so more is better; rates are ours."""
    where, roofline = results.environment, results.roofline
    measured = f"{roofline.of} {roofline.gflops:.0f} GFLOP/s"
    versions = ", ".join(
        f"{name} {where[name]}" for name in ("apache-tvm", "torch", "jax", *library_packages("cuda")) if where.get(name)
    )
    threads = "" if where.get("gpu") else f"{roofline.threads} threads, "
    peaks = results.peaks
    spread = (
        f" at the start, {results.sustained.gflops:.0f} ({min(peaks):.0f} to {max(peaks):.0f}) beside layers"
        if peaks
        else ""
    )
    parts = [
        "# Layers, measured",
        "Written by",
        f"    {command}",
        f"on {results.device} ({roofline.machine}), {threads}{versions}: {measured}{spread}, memory "
        f"{roofline.bandwidth:.1f} GB/s, both measured. Ratios are the baseline's time / ours, medians of interleaved "
        "pairs; percentages are parts of the peak, ours and the baseline's. `docs/BENCH.md` explains the columns.",
    ]
    for baseline in dict.fromkeys(m.baseline for m in results.measurements):
        of_baseline = [m for m in results.measurements if m.baseline == baseline]
        parts += [f"## Against {baseline}: geometric means", _means(of_baseline, results), _low(of_baseline)]
        parts += [f"## Against {baseline}: every layer", _layers(of_baseline, roofline)]
    if results.failures:
        failures = [(WORDS[f["direction"]], f["descriptor"], f["reason"]) for f in results.failures]
        parts += ["## Not measured", _table(("direction", "problem", "reason"), failures)]
    return "\n\n".join(parts) + "\n"


def _means(measurements: Sequence[Measurement], results: Results) -> str:
    names = ("suite", "layout", "batch", "direction", "layers")
    numbers = ("ratio", "worst", "total", "bound")
    rows = [
        (
            *(WORDS.get(str(row[name]), str(row[name])) for name in names),
            *(f"{row[n]:.2f}" for n in numbers),
            *(f"{row[n]:.0%}" for n in ("peak", "baseline_peak")),
        )
        for row in means(measurements, results.roofline)
    ]
    return _table((*names, *numbers, "peak", "its peak"), rows)


def _low(measurements: Sequence[Measurement]) -> str:
    """The sentence that counts the ratios under LOW, rounded as the table prints them."""
    low = sum(round(m.ratio, 2) < LOW for m in measurements)
    return f"{low} of {len(measurements)} measurements are under {LOW}."


def _layers(measurements: Sequence[Measurement], roofline: Roofline) -> str:
    found = {(m.suite, m.descriptor, m.direction): m for m in measurements}
    directions = [direction for direction in DIRECTIONS if any(m.direction == direction for m in measurements)]
    rows = []
    for suite, descriptor in dict.fromkeys((m.suite, m.descriptor) for m in measurements):
        of_layer = {direction: found.get((suite, descriptor, direction)) for direction in directions}
        count = next(m.count for m in of_layer.values() if m is not None)
        cells = ["–" if m is None else _cell(m, roofline.with_peak(m.peak)) for m in of_layer.values()]
        rows.append((suite, f"`{descriptor}`", str(count), *cells))
    return _table(
        (
            "suite",
            "problem",
            "count",
            *(f"{WORDS[direction]} (GFLOP/s, peak, its peak)" for direction in directions),
        ),
        rows,
    )


def _cell(m: Measurement, roofline: Roofline) -> str:
    parts = (f"{rate / roofline.gflops:.0%}" for rate in (m.gflops, m.baseline_gflops))
    return f"{m.ratio:.2f} ({m.gflops:.0f}, {', '.join(parts)})"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


__all__ = ["document", "save_markdown"]
