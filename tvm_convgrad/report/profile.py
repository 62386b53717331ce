# SPDX-License-Identifier: Apache-2.0
"""A profile of a step: the time of each operator, its share, and what it reaches of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.report.matching import convolutions_of, direction_of, product_macs, with_batch
from tvm_convgrad.report.tables import print_pairs, print_table, quantity
from tvm_convgrad.training.runtime.timeline import PHASES, TimedCall, Timeline


@dataclass(frozen=True)
class Row:
    """All calls of one function with tensors of the same shapes in one phase.

    Attributes:
        name, phase, shapes: of the calls.
        problem: of a convolution: direction and descriptor; "" of others.
        calls: how many there are in a step.
        seconds: of all of them in a step.
        flop: of all of them, of convolutions and matrix products alone; 0 of others, and of convolutions with free
            extents besides the batch.
        bytes: of all of them, each tensor counted once a call.
    """

    name: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    problem: str
    calls: int
    seconds: float
    flop: float
    bytes: int


@dataclass(frozen=True)
class Limits:
    """What the machine reaches: GFLOP/s of multiply-adds and GB/s of memory, both measured."""

    gflops: float
    bandwidth: float

    def share(self, row: Row) -> float:
        """The least time that the machine needs for a row's arithmetic or memory, in parts of what it took."""
        return self.least(row.flop, row.bytes) / row.seconds if row.seconds else 0.0

    def least(self, flop: float, size: int) -> float:
        """The least seconds for this arithmetic and these bytes."""
        return max(flop / (self.gflops * 1e9), size / (self.bandwidth * 1e9))


def rows_of(timeline: Timeline, convolutions: Sequence[Mapping[str, Any]], batch: int) -> list[Row]:
    """The rows of a timeline, the longest first.

    Args:
        timeline: of the step.
        convolutions: the entries of an artifact's `forward` and `gradients`.
        batch: the samples of the step that was measured.
    """
    numbered = [
        entry | {"descriptor": with_batch(str(entry["descriptor"]), batch)} for entry in map(dict, convolutions)
    ]
    found: dict[tuple[object, ...], list[TimedCall]] = {}
    for call, number in zip(timeline.calls, convolutions_of(timeline.calls, numbered), strict=True):
        entry = None if number is None else numbered[number]
        problem = f"{direction_of(str(entry['op']))} {entry['descriptor']}" if entry else ""
        found.setdefault((problem, call.name, call.phase, call.shapes), []).append(call)
    rows = []
    for (computed, *_), calls in found.items():
        first = calls[0]
        solved = ConvProblem.from_descriptor(str(computed).partition(" ")[2]) if computed else None
        macs = (solved.macs if solved.is_static else 0) if solved else product_macs(first)
        rows.append(
            Row(
                first.name,
                first.phase,
                first.shapes,
                str(computed),
                len(calls),
                sum(call.seconds for call in calls),
                2.0 * macs * len(calls),
                sum(call.bytes for call in calls),
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def as_json(rows: Sequence[Row], timeline: Timeline, limits: Limits) -> dict[str, Any]:
    """The profile as plain values."""
    return {
        "step_seconds": timeline.step,
        "operator_seconds": sum(row.seconds for row in rows),
        "virtual_machine_seconds": timeline.machine,
        "phases": _phases(rows, timeline),
        "peak_gflops": limits.gflops,
        "bandwidth_gbytes": limits.bandwidth,
        "operators": [
            {
                "name": row.name,
                "phase": row.phase,
                "problem": row.problem or None,
                "shapes": [list(shape) for shape in row.shapes],
                "calls": row.calls,
                "seconds": row.seconds,
                "share": row.seconds / sum(each.seconds for each in rows),
                "gflop": row.flop * 1e-9 or None,
                "bytes": row.bytes,
                "roofline": limits.share(row),
            }
            for row in rows
        ],
    }


def _phases(rows: Iterable[Row], timeline: Timeline) -> dict[str, float]:
    seconds = dict.fromkeys(PHASES, 0.0)
    for row in rows:
        seconds[row.phase] += row.seconds
    seconds[PHASES[-1]] = timeline.machine
    return seconds


def show(title: str, rows: Sequence[Row], timeline: Timeline, limits: Limits, shown: int) -> None:
    """Print the longest rows, and what the phases take."""
    total = sum(row.seconds for row in rows)
    columns = ("operator", "phase", "calls", "ms", "share", "GFLOP/s", "GB/s", "of roofline")
    lines = [
        (
            row.problem or f"{row.name} {' '.join('x'.join(map(str, shape)) or '1' for shape in row.shapes)}",
            row.phase,
            row.calls,
            f"{row.seconds * 1e3:.3f}",
            f"{row.seconds / total:.1%}",
            quantity(row.flop / row.seconds * 1e-9 if row.flop else None),
            quantity(row.bytes / row.seconds * 1e-9),
            f"{limits.share(row):.0%}",
        )
        for row in rows[:shown]
    ]
    print_table(title, columns, lines, right=columns[2:])
    pairs = [(phase, f"{seconds * 1e3:.3f} ms") for phase, seconds in _phases(rows, timeline).items()]
    pairs += [
        ("all operators", f"{total * 1e3:.3f} ms in {len(timeline.calls)} calls of {len(rows)} kinds"),
        ("a step, nothing measured inside", f"{timeline.step * 1e3:.3f} ms"),
        ("peak", f"{limits.gflops:.0f} GFLOP/s, {limits.bandwidth:.1f} GB/s, both measured"),
    ]
    print_pairs("phases", pairs)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The last step that was measured as a trace of complete events, for chrome://tracing and Perfetto."""
    events = [
        {
            "name": call.name,
            "cat": call.phase,
            "ph": "X",
            "ts": call.begin * 1e6,
            "dur": call.seconds * 1e6,
            "pid": 0,
            "tid": 0,
            "args": {"shapes": [list(shape) for shape in call.shapes], "bytes": call.bytes},
        }
        for call in timeline.calls
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
