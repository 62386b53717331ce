# SPDX-License-Identifier: Apache-2.0
"""The drawing of a step's graph: boxes, lines and their texts, which the template writes as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.report.gradients import Entry
from tvm_convgrad.report.step_graph import COLUMNS, Node, StepGraph
from tvm_convgrad.report.tables import quantity

BOX, GAP, HEIGHT, STRIDE, MARGIN = 112, 17, 34, 46, 20
"""Width of a box, space beside it, its height, the distance of rows, and the border, in units of the drawing."""
HEAD = 16
"""The height of the headings of the columns."""


@dataclass(frozen=True)
class Box:
    """A node as it is drawn.

    Attributes:
        number: of the node, from 0.
        kind: of the node, a class of the style.
        x, y: of its upper left corner.
        title, text: its two lines.
        bar: the width of the bar at its foot.
        row: the number of the convolution in the table; 0 of a group.
        label: what is said of it by screen readers, and where it is chosen.
        calls: names of the functions that it calls, with times if they were measured.
    """

    number: int
    kind: str
    x: int
    y: int
    title: str
    text: str
    bar: float
    row: int
    label: str
    calls: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """From the node that writes to the node that reads: their numbers, and the path."""

    source: int
    reader: int
    path: str


@dataclass(frozen=True)
class Drawing:
    """All of it: its size and that of a box in units, headings with their places, lines below boxes."""

    width: int
    height: int
    box: int
    box_height: int
    headings: tuple[tuple[int, str], ...]
    lines: tuple[Line, ...]
    boxes: tuple[Box, ...]


def draw(graph: StepGraph, entries: Sequence[Entry], seconds: Sequence[float] = ()) -> Drawing:
    """The drawing of a graph.

    Args:
        graph: of the step.
        entries: its convolutions, in the order of the table.
        seconds: of each call, if they were measured; else bars are shares of the arithmetic.
    """
    weights = [_weight(node, entries, seconds) for node in graph.nodes]
    most, total = max(weights, default=0.0) or 1.0, sum(weights) or 1.0
    boxes = []
    for number, (node, weight) in enumerate(zip(graph.nodes, weights, strict=True)):
        title, text, label = _words(node, graph, entries)
        if seconds:
            text = f"{quantity(weight * 1e3)} ms, {weight / total:.1%}"
            label += f", {text} of the operators' time"
        calls = [
            graph.calls[call].name + (f": {quantity(seconds[call] * 1e3)} ms" if seconds else "") for call in node.calls
        ]
        row = 0 if node.entry is None else node.entry + 1
        x, y = _corner(node)
        boxes.append(Box(number, node.kind, x, y, title, text, BOX * weight / most, row, label, tuple(calls)))
    lines = [
        Line(source, number, _path(graph.nodes[source], node))
        for number, node in enumerate(graph.nodes)
        if node.kind != "update"
        for source in node.sources
    ]
    rows = max((node.row for node in graph.nodes), default=0) + 1
    headings = tuple((MARGIN + column * (BOX + 2 * GAP) + BOX // 2, name) for column, name in enumerate(COLUMNS))
    width = 2 * MARGIN + 3 * BOX + 4 * GAP
    return Drawing(width, HEAD + MARGIN + rows * STRIDE, BOX, HEIGHT, headings, tuple(lines), tuple(boxes))


def _corner(node: Node) -> tuple[int, int]:
    return MARGIN + node.column * (BOX + 2 * GAP), HEAD + MARGIN + node.row * STRIDE


def _weight(node: Node, entries: Sequence[Entry], seconds: Sequence[float]) -> float:
    """What the bar of a node shows: its seconds, or the arithmetic of a convolution."""
    if seconds:
        return sum(seconds[call] for call in node.calls)
    return float(entries[node.entry]["gflop"] or 0.0) if node.entry is not None else 0.0


def _words(node: Node, graph: StepGraph, entries: Sequence[Entry]) -> tuple[str, str, str]:
    """The two lines of a box, and its label."""
    if node.entry is not None:
        entry = entries[node.entry]
        problem = ConvProblem.from_descriptor(entry["descriptor"])
        kernel = "x".join(map(str, problem.kernel))
        title = f"#{node.entry + 1} {kernel}, {problem.in_channels}→{problem.out_channels}"
        return title, _extents(problem, entry["fused"]), f"{node.entry + 1}: {node.kind} of {problem.descriptor}"
    if node.kind == "update":
        title = f"update: {len(node.calls)} calls"
        return title, "", f"update by the optimizer, {len(node.calls)} calls"
    first = graph.calls[node.calls[0]].name.removeprefix("fused_")
    one = len(node.calls) == 1
    title = first if one else f"{len(node.calls)} others"
    return _cut(title), "" if one else _cut(first), f"{len(node.calls)} other {'call' if one else 'calls'}, {first}"


def _extents(problem: ConvProblem, fused: Sequence[str]) -> str:
    """The extents of the data, what is not 1 of strides, dilation and groups, and what is fused."""
    words = ["x".join(map(str, problem.data_extents))]
    for letter, values in (("s", problem.strides), ("d", problem.dilation)):
        if set(values) != {1}:
            words.append(letter + "x".join(map(str, dict.fromkeys(values))))
    if problem.groups > 1:
        words.append(f"g{problem.groups}")
    return _cut(" ".join(words) + "".join(f" +{each}" for each in fused))


def _cut(text: str, most: int = 17) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _path(source: Node, reader: Node) -> str:
    """The line between two boxes: down or up inside a column, around boxes in between, or across to another column."""
    (x0, y0), (x1, y1) = _corner(source), _corner(reader)
    if source.column != reader.column:
        right = reader.column > source.column
        start, end = (x0 + BOX, x1) if right else (x0, x1 + BOX)
        bend = GAP if right else -GAP
        y0, y1 = y0 + HEIGHT // 2, y1 + HEIGHT // 2
        return f"M{start} {y0}C{start + bend} {y0} {end - bend} {y1} {end} {y1}"
    down = y1 > y0
    if abs(source.row - reader.row) == 1:
        x = x0 + BOX // 2
        return f"M{x} {y0 + HEIGHT}V{y1}" if down else f"M{x} {y0}V{y1 + HEIGHT}"
    # around, on the outer side of the column
    side, bend = (x0, -GAP) if source.column == 0 else (x0 + BOX, GAP)
    y0, y1 = y0 + HEIGHT // 2, y1 + HEIGHT // 2
    return f"M{side} {y0}C{side + bend} {y0} {side + bend} {y1} {side} {y1}"


__all__ = ["Box", "Drawing", "Line", "draw"]
