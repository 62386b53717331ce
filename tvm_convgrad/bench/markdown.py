# SPDX-License-Identifier: Apache-2.0
"""Measurements as a Markdown document: where and how, the means, and a line for every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tvm_convgrad.bench.measure import Measurement
from tvm_convgrad.bench.results import Results, means
from tvm_convgrad.bench.roof import Roof
from tvm_convgrad.training.envelope import write_atomic

LOW = 0.95
"""How many ratios are under this is said below the means."""

FACES = {"backward_weight": "wgrad", "backward_data": "dgrad", "forward": "forward"}
"""What the columns are called."""


def save_markdown(path: Path, results: Results, command: str) -> None:
    """Write the document.

    Args:
        command: what was run, for the reader to repeat it.

    Raises:
        ArtifactError: it cannot be written.
    """
    write_atomic(path, document(results, command).encode())


def document(results: Results, command: str) -> str:
    """The text: ratios are time of the rival / ours, so more is better; rates are ours, in GFLOP/s."""
    where, roof = results.environment, results.roof
    versions = ", ".join(
        f"{name} {where[name]}" for name in ("apache-tvm", "torch", "jax", "nvidia-cudnn-cu13") if where.get(name)
    )
    threads = "" if where.get("gpu") else f"{roof.threads} threads, "
    peaks = results.peaks
    spread = (
        f" at the start, {results.held.gflops:.0f} ({min(peaks):.0f} to {max(peaks):.0f}) beside layers"
        if peaks
        else ""
    )
    parts = [
        "# Layers, measured",
        "Written by",
        f"    {command}",
        f"on {results.device} ({roof.machine}), {threads}{versions}: {roof.of} {roof.gflops:.0f} GFLOP/s"
        f"{spread}, memory {roof.bandwidth:.1f} GB/s, both measured. Ratios are the rival's time / ours, medians of "
        "interleaved pairs; percentages are parts of the peak, ours and the rival's. `docs/BENCH.md` says what the "
        "columns are.",
    ]
    for rival in dict.fromkeys(m.rival for m in results.measurements):
        of_rival = [m for m in results.measurements if m.rival == rival]
        parts += [f"## Against {rival}: geometric means", _means(of_rival, results), _low(of_rival)]
        parts += [f"## Against {rival}: every layer", _layers(of_rival, roof)]
    if results.failures:
        failures = [(f["face"], f["descriptor"], f["reason"]) for f in results.failures]
        parts += ["## Not measured", _table(("face", "problem", "reason"), failures)]
    return "\n\n".join(parts) + "\n"


def _means(measurements: Sequence[Measurement], results: Results) -> str:
    names = ("suite", "layout", "batch", "face", "layers")
    numbers = ("ratio", "worst", "total", "bound")
    rows = [
        (
            *(str(row[name]) for name in names),
            *(f"{row[n]:.2f}" for n in numbers),
            *(f"{row[n]:.0%}" for n in ("peak", "rival_peak")),
        )
        for row in means(measurements, results.roof)
    ]
    return _table((*names, *numbers, "peak", "its peak"), rows)


def _low(measurements: Sequence[Measurement]) -> str:
    """How many are clearly slower than the rival, counted as the table prints them."""
    low = sum(round(m.ratio, 2) < LOW for m in measurements)
    return f"{low} of {len(measurements)} measurements are under {LOW}."


def _layers(measurements: Sequence[Measurement], roof: Roof) -> str:
    found = {(m.suite, m.descriptor, m.face): m for m in measurements}
    faces = [face for face in FACES if any(m.face == face for m in measurements)]
    rows = []
    for suite, descriptor in dict.fromkeys((m.suite, m.descriptor) for m in measurements):
        of_layer = {face: found.get((suite, descriptor, face)) for face in faces}
        count = next(m.count for m in of_layer.values() if m is not None)
        cells = ["–" if m is None else _cell(m, roof.at(m.peak)) for m in of_layer.values()]
        rows.append((suite, f"`{descriptor}`", str(count), *cells))
    return _table(("suite", "problem", "count", *(f"{FACES[face]} (GFLOP/s, peak, its peak)" for face in faces)), rows)


def _cell(m: Measurement, roof: Roof) -> str:
    parts = (f"{rate / roof.gflops:.0%}" for rate in (m.gflops, m.rival_gflops))
    return f"{m.ratio:.2f} ({m.gflops:.0f}, {', '.join(parts)})"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


__all__ = ["document", "save_markdown"]
