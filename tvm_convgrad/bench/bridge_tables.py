# SPDX-License-Identifier: Apache-2.0
"""Tables of training steps that were measured with a bridge and without, and of their calls."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_convgrad.bench.bridge import BRIDGES, BridgeMeasurement
from tvm_convgrad.bench.bridge_calls import account
from tvm_convgrad.report.tables import print_table, quantity

MOST_ROWS = 12
"""Calls that are printed, the lowest ratios first; a JSON file has all."""


def show_bridge(bridge: str, found: Sequence[BridgeMeasurement]) -> None:
    """Print a table of the measurements, a row each, and what is known of their calls."""
    columns = (
        "model",
        "batch",
        "layout",
        "ratio",
        "processor",
        "with, ms",
        "without, ms",
        "pairs",
        f"kernels/both/{BRIDGES[bridge].name}",
        "warm, s",
    )
    rows = [
        (
            m.model,
            m.batch,
            m.layout,
            quantity(m.ratio),
            quantity(m.processor_without / m.processor_with),
            f"{m.with_bridge * 1e3:.1f}",
            f"{m.without * 1e3:.1f}",
            m.pairs,
            f"{m.kernels}/{m.mixed}/{m.own}",
            f"{m.compile_seconds:.1f} ({m.compiled} compiled)",
        )
        for m in found
    ]
    title = f"training steps of {BRIDGES[bridge].name}: time (and processor time) without the bridge / with it"
    print_table(title, columns, rows, right=columns[1:])
    if any(m.calls for m in found):
        _show_calls(BRIDGES[bridge].name, [m for m in found if m.calls])


def _show_calls(framework: str, steps: Sequence[BridgeMeasurement]) -> None:
    """Print for each step where its time goes, and its calls with the lowest ratios."""
    columns = (
        "model",
        "batch",
        "layout",
        "calls",
        "slower",
        "lowest",
        "slower by processor",
        "lowest",
        f"convolutions in {framework}'s step",
        "their ratio",
        "step's",
        "at most",
        "GFLOP/s a core",
        f"{framework}'s",
    )
    rows = []
    for step in steps:
        found = account(step.processor_without, step.calls)
        rows.append(
            (
                step.model,
                step.batch,
                step.layout,
                found.calls,
                found.slower,
                quantity(found.worst),
                found.processor_slower,
                quantity(found.processor_worst),
                f"{found.share:.0%}",
                quantity(found.speedup),
                quantity(step.processor_without / step.processor_with),
                quantity(found.most),
                f"{found.rate * 1e-9:.0f}",
                f"{found.own_rate * 1e-9:.0f}",
            )
        )
    print_table(
        "calls slower by more than 5 %; of processor time: the part of convolutions, ratios, and the step's ratio if "
        "convolutions took no time",
        columns,
        rows,
        right=columns[1:],
    )
    for step in steps:
        _show_step(framework, step)


def _show_step(framework: str, step: BridgeMeasurement) -> None:
    columns = (
        "call",
        "uses",
        "by",
        "ratio",
        "processor",
        "with, us",
        "without, us",
        "GFLOP/s a core",
        f"{framework}'s",
    )
    calls = sorted(step.calls, key=lambda each: each.ratio)[:MOST_ROWS]
    rows = [
        (
            each.call,
            each.uses,
            each.where,
            quantity(each.ratio),
            quantity(each.processor_ratio),
            f"{each.with_bridge * 1e6:.0f}",
            f"{each.without * 1e6:.0f}",
            f"{each.flop / each.processor_with * 1e-9:.0f}",
            f"{each.flop / each.processor_without * 1e-9:.0f}",
        )
        for each in calls
    ]
    title = f"{step.model}, batch {step.batch}, {step.layout}: the {len(calls)} lowest of {len(step.calls)} calls"
    print_table(title, columns, rows, right=(columns[1], *columns[3:]))


__all__ = ["MOST_ROWS", "show_bridge"]
