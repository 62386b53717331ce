# SPDX-License-Identifier: Apache-2.0
"""The page of the report, from the entries of `report.gradients`: one file, which can be opened anywhere."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tvm.target import Target

from tvm_convgrad.codegen.hardware import Machine, machine_of
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.report.gradients import Entry, with_shares
from tvm_convgrad.report.html.charts import Dot, Json, limits, memory, roofline
from tvm_convgrad.report.html.drawing import draw
from tvm_convgrad.report.html.measured import Measured
from tvm_convgrad.report.matching import direction_of
from tvm_convgrad.report.step_graph import StepGraph
from tvm_convgrad.report.tables import byte_count, cores_in_words, quantity, short_target
from tvm_convgrad.training.runtime.memory import StepMemory

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Content:
    """What a report is about.

    Attributes:
        source: the model or library, as the command was given it.
        target: the text of TVM's target.
        cores: that kernels are made for; None for GPUs.
        gradients, forward: entries of `report.gradients`.
        memory: of the step, or the reason why it is not known.
        warnings: of the model.
        graph: of the step, or the reason why it is not known.
        measured: a profile of the step, which takes the place of estimates; it needs the graph.
    """

    source: str
    target: str
    cores: int | None
    gradients: Sequence[Entry]
    forward: Sequence[Entry]
    memory: StepMemory | str
    warnings: Sequence[str] = ()
    graph: StepGraph | str = "The graph is made of the kernel calls of a built library; build the model to see it."
    measured: Measured | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table; `sort` has what each column is sorted by."""

    number: int
    direction: str
    operator: str
    problem: str
    kernel: str
    tiling: str
    reason: str
    refused: Sequence[dict[str, str]]
    cells: Sequence[tuple[str, str, float]]


def check_packages() -> None:
    """Refuse to begin a report without the packages that draw it.

    Raises:
        SetupError: one is not installed.
    """
    for name in ("vl_convert", "jinja2"):
        _package(name)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SetupError(
            f"--html needs the package {name}, which is not installed; pip install 'tvm-convgrad[report]'"
        ) from error


def page_of(content: Content) -> str:
    """The report as HTML, with Vega in it; nothing is loaded when it is shown.

    Raises:
        SetupError: a package that draws it is not installed.
    """
    check_packages()
    jinja, convert = _package("jinja2"), _package("vl_convert")
    entries = [*with_shares(content.gradients), *with_shares(content.forward)]
    graph, measured = content.graph, content.measured
    if measured is not None and isinstance(graph, StepGraph):
        entries = measured.entries(entries, graph)
    columns = MEASURED if measured is not None else COLUMNS
    rows = [_row(entry, number, columns) for number, entry in enumerate(entries, 1)]
    machine = machine_of(Target(content.target))
    dots = [_dot(row, entry) for row, entry in zip(rows, entries, strict=True) if entry["seconds"] and entry["gflop"]]
    charts: dict[str, Json] = {}
    if measured is not None and dots:
        lines = measured.limits.gflops, measured.limits.bandwidth
        charts["roofline"] = roofline(dots, lines, f"GFLOP/s by {measured.threads} threads, measured")
    elif machine is not None and dots:
        charts["roofline"] = roofline(dots, limits(machine))
    if isinstance(content.memory, StepMemory):
        charts["memory"] = memory(content.memory)
    environment = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((_FOLDER / "page.html.jinja").read_text(encoding="utf-8"))
    seconds = () if measured is None else measured.seconds
    return str(
        template.render(
            content=content,
            rows=rows,
            facts=_facts(content, machine) if measured is None else _measured_facts(content, measured),
            columns=columns,
            drawing=draw(graph, entries, seconds) if isinstance(graph, StepGraph) else None,
            others=[] if measured is None else _others(measured),
            other_columns=OTHERS,
            roofline_missing="" if "roofline" in charts else _no_roofline(machine),
            memory_missing=content.memory if isinstance(content.memory, str) else "",
            peak=_peak(content.memory) if isinstance(content.memory, StepMemory) else "",
            style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
            script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
            charts=json.dumps(charts).replace("<", "\\u003c"),
            vega=convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script"),
        )
    )


COLUMNS = (
    ("number", "#"),
    ("direction", "direction"),
    ("problem", "problem"),
    ("kernel", "kernel"),
    ("gflop", "GFLOP"),
    ("bytes", "bytes"),
    ("share", "share"),
    ("seconds", "estimate, ms"),
    ("roofline", "of roofline"),
)
"""Columns by which the table can be sorted: key and heading."""


MEASURED = (
    *COLUMNS[:6],
    ("share", "of time"),
    ("seconds", "ms"),
    ("speed", "GFLOP/s"),
    ("rate", "GB/s"),
    ("roofline", "of roofline"),
)
"""The same of a profile."""

OTHERS = (
    ("name", "operator"),
    ("phase", "phase"),
    ("calls", "calls"),
    ("share", "of time"),
    ("seconds", "ms"),
    ("rate", "GB/s"),
    ("roofline", "of roofline"),
)
"""Columns of the table of a profile's other operators."""


def _row(entry: Entry, number: int, columns: Sequence[tuple[str, str]]) -> Row:
    """A row of the table of convolutions."""
    return Row(
        number,
        direction_of(entry["op"]),
        entry["op"],
        entry["descriptor"],
        " + ".join([entry["kernel"], *entry["fused"]]),
        entry["plan"],
        entry["reason"],
        entry["refused"],
        _cells(entry, [key for key, _ in columns[4:]]),
    )


def _cells(entry: Entry, keys: Sequence[str]) -> list[tuple[str, str, float]]:
    """The numbers of a row: key, text, and what it is sorted by; what is not known comes last."""
    seconds = entry["seconds"]
    values: dict[str, float | None] = {key: entry[key] for key in ("gflop", "bytes", "share", "roofline")}
    values["seconds"] = None if seconds is None else seconds * 1e3
    values["speed"] = entry["gflop"] / seconds if seconds and entry["gflop"] is not None else None
    values["rate"] = entry["bytes"] * 1e-9 / seconds if seconds and entry["bytes"] is not None else None
    written = {key: quantity(values[key]) for key in ("gflop", "seconds", "speed", "rate")}
    written |= {key: _percent(values[key]) for key in ("share", "roofline")} | {"bytes": byte_count(entry["bytes"])}
    return [(key, written[key], -1.0 if (value := values[key]) is None else float(value)) for key in keys]


def _others(measured: Measured) -> list[list[tuple[str, str, str | float]]]:
    """The operators of a profile that are not convolutions, the longest first: cells of key, text and sorting value."""
    found: list[list[tuple[str, str, str | float]]] = []
    for row in measured.rows:
        if row.problem:
            continue
        shapes = " ".join("x".join(map(str, shape)) or "1" for shape in row.shapes)
        share, rate, reached = row.seconds / measured.total, row.bytes * 1e-9 / row.seconds, measured.limits.share(row)
        found.append(
            [
                ("name", f"{row.name} {shapes}", row.name),
                ("phase", row.phase, row.phase),
                ("calls", str(row.calls), row.calls),
                ("share", _percent(share), share),
                ("seconds", quantity(row.seconds * 1e3), row.seconds),
                ("rate", quantity(rate), rate),
                ("roofline", _percent(reached), reached),
            ]
        )
    return found


def _measured_facts(content: Content, measured: Measured) -> list[tuple[str, str]]:
    """What stands at the top of the page of a profile."""
    line, calls = measured.timeline, len(measured.timeline.calls)
    convolutions = sum(row.seconds for row in measured.rows if row.problem)
    return [
        ("target", short_target(content.target)),
        ("ran with", f"batch {measured.batch}, {measured.threads} threads"),
        ("a step, without the profiler", f"{quantity(line.step * 1e3)} ms"),
        ("all operators", f"{quantity(measured.total * 1e3)} ms in {calls} kernel calls"),
        ("convolutions", f"{quantity(convolutions * 1e3)} ms, {convolutions / measured.total:.0%} of the operators"),
        ("limits, measured", f"{measured.limits.gflops:.0f} GFLOP/s, {measured.limits.bandwidth:.1f} GB/s"),
    ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _dot(row: Row, entry: Entry) -> Dot:
    refused = tuple(f"{each['kernel']}: {each['reason']}" for each in row.refused)
    return Dot(
        row.number,
        row.direction,
        row.problem,
        row.kernel,
        row.tiling,
        refused,
        entry["gflop"],
        entry["bytes"],
        entry["seconds"],
        entry["share"] or 0.0,
    )


def _facts(content: Content, machine: Machine | None) -> list[tuple[str, str]]:
    """What stands at the top of the page."""
    entries = [*content.gradients, *content.forward]
    work = sum(entry["gflop"] or 0.0 for entry in entries)
    per = sorted({entry["per"] for entry in entries} - {"step"})
    seconds = [entry["seconds"] for entry in entries if entry["seconds"]]
    facts = [("target", short_target(content.target))]
    if content.cores is not None:
        facts.append(("cores", cores_in_words(content.cores)))
    if machine is not None:
        peak, bandwidth = limits(machine)
        facts.append(("one core, by the cost model", f"{peak:.0f} GFLOP/s, {bandwidth:.1f} GB/s ({machine.name})"))
    facts.append(("convolutions", f"{len(content.gradients)} gradients, {len(content.forward)} forward"))
    facts.append(("arithmetic", f"{work:.4g} GFLOP" + (f" a {per[0]}" if per else " a step")))
    if seconds:
        facts.append(
            (
                "estimated time",
                f"{sum(seconds) * 1e3:.4g} ms of core time ({len(seconds)} of {len(entries)} convolutions)",
            )
        )
    return facts


def _no_roofline(machine: Machine | None) -> str:
    if machine is None:
        return "There are no estimates: kernels are generated for CPUs only, and the target is not a CPU."
    return "No convolution has an estimate: a library computes them, or the batch size is not fixed."


def _peak(step: StepMemory) -> str:
    number = step.moments.index(step.peak) + 1
    return (
        f"Peak: {byte_count(step.peak.bytes)} of tensors during kernel call {number} of {len(step.moments)} "
        f"({step.peak.name}), plus {byte_count(step.state)} of state and {byte_count(step.batch)} of the batch."
    )


__all__ = ["COLUMNS", "Content", "check_packages", "page_of"]
