# SPDX-License-Identifier: Apache-2.0
"""The graph of a step with one node for each convolution; what runs between two of them is folded into a group.

Rows are the layers of the model from the input down, columns the directions: the forward pass goes down the first
column, the backward pass up the last one, and the gradients of a layer stand beside its forward convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.report.matching import convolutions_of, direction_of
from tvm_convgrad.training.runtime.dataflow import KernelCall
from tvm_convgrad.training.runtime.timeline import FORWARD, OPTIMIZER

COLUMNS = ("forward", "wgrad", "dgrad")


@dataclass(frozen=True)
class Node:
    """A convolution, or a group of other calls.

    Attributes:
        kind: "forward", "wgrad" or "dgrad" of a convolution, "other" of a group, "update" of the optimizer's calls.
        calls: their numbers in the step, from 0.
        entry: the convolution's number among the entries, from 0; None of a group.
        sources: the numbers of the nodes whose results it reads, from 0.
        row, column: its place, from 0; column 0 is forward, 1 wgrad, 2 dgrad.
    """

    kind: str
    calls: tuple[int, ...]
    entry: int | None
    sources: tuple[int, ...]
    row: int
    column: int


@dataclass(frozen=True)
class StepGraph:
    """The nodes in the order in which they run, the update last, and the calls that they are made of."""

    nodes: tuple[Node, ...]
    calls: tuple[KernelCall, ...]


def graph_of(calls: Sequence[KernelCall], entries: Sequence[Mapping[str, Any]]) -> StepGraph:
    """The graph of the kernel calls of a step.

    Args:
        calls: in their order.
        entries: its convolutions, with `op` and `descriptor`. One that no call computes alone, as a composition of
            stock operators, has no node.
    """
    numbers = convolutions_of(calls, entries)
    groups = _groups(calls, numbers)
    home = {call: node for node, (_, members) in enumerate(groups) for call in members}
    kinds = [
        kind if entry is None else direction_of(str(entries[entry]["op"])) for kind, entry in _kinds(groups, numbers)
    ]
    descriptors = ["" if entry is None else str(entries[entry]["descriptor"]) for _, entry in _kinds(groups, numbers)]
    columns = [_column(kind, calls[members[0]].phase) for kind, (_, members) in zip(kinds, groups, strict=True)]
    rows = _rows(kinds, descriptors, columns)
    nodes = []
    for node, (_, members) in enumerate(groups):
        sources = {home[source] for call in members for source in calls[call].sources} - {node}
        entry = numbers[members[0]]
        nodes.append(Node(kinds[node], tuple(members), entry, tuple(sorted(sources)), rows[node], columns[node]))
    return StepGraph(tuple(nodes), tuple(calls))


def _groups(calls: Sequence[KernelCall], numbers: Sequence[int | None]) -> list[tuple[str, list[int]]]:
    """Kinds and calls of the nodes: convolutions, runs of other calls of one phase, and all updates as one."""
    groups: list[tuple[str, list[int]]] = []
    updates: list[int] = []
    for place, (call, number) in enumerate(zip(calls, numbers, strict=True)):
        if call.phase == OPTIMIZER:
            updates.append(place)
        elif number is not None:
            groups.append(("convolution", [place]))
        elif groups and groups[-1][0] == "other" and calls[groups[-1][1][0]].phase == call.phase:
            groups[-1][1].append(place)
        else:
            groups.append(("other", [place]))
    return [*groups, ("update", updates)] if updates else groups


def _kinds(groups: Sequence[tuple[str, list[int]]], numbers: Sequence[int | None]) -> list[tuple[str, int | None]]:
    return [(kind, numbers[members[0]] if kind == "convolution" else None) for kind, members in groups]


def _column(kind: str, phase: str) -> int:
    if kind in COLUMNS:
        return COLUMNS.index(kind)
    if kind == "update":
        return COLUMNS.index("wgrad")
    return COLUMNS.index("forward" if phase == FORWARD else "dgrad")


def _rows(kinds: Sequence[str], descriptors: Sequence[str], columns: Sequence[int]) -> list[int]:
    """The row of each node: the forward pass in its order, gradients beside their layer, and groups between these."""
    down = [node for node, column in enumerate(columns) if column == 0]
    keys: dict[int, float] = {node: float(place) for place, node in enumerate(down)}
    layers: dict[str, list[float]] = {}
    for node in down:
        if kinds[node] == "forward":
            layers.setdefault(descriptors[node], []).append(keys[node])
    unused = {kind: {text: list(found) for text, found in layers.items()} for kind in ("wgrad", "dgrad")}
    up = [node for node, kind in enumerate(kinds) if columns[node] != 0 and kind != "update"]
    for node in up:  # the backward pass meets the layers of one problem in the opposite order
        if kinds[node] in unused and unused[kinds[node]].get(descriptors[node]):
            keys[node] = unused[kinds[node]][descriptors[node]].pop()
    taken = {(columns[node], key) for node, key in keys.items()}
    for place, node in enumerate(up):
        if node not in keys:
            before = next((keys[each] for each in reversed(up[:place]) if each in keys), float(len(down)))
            after = next((keys[each] for each in up[place + 1 :] if each in keys), -1.0)
            key = (before + after) / 2
            while (columns[node], key) in taken:
                key -= 0.01
            keys[node] = key
            taken.add((columns[node], key))
    order = {key: row for row, key in enumerate(sorted(set(keys.values())))}
    return [order[keys[node]] if node in keys else len(order) for node in range(len(kinds))]


__all__ = ["COLUMNS", "Node", "StepGraph", "graph_of"]
