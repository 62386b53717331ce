# SPDX-License-Identifier: Apache-2.0
"""The folded graph of a step: which call is which convolution, what is folded, and where boxes stand."""

from __future__ import annotations

import pytest

from tvm_convgrad.report.html.drawing import draw
from tvm_convgrad.report.matching import convolutions_of
from tvm_convgrad.report.step_graph import graph_of
from tvm_convgrad.training.runtime.dataflow import KernelCall

A, B = "mb2ic3ih8oc4oh8kh3ph1", "mb2ic4ih8oc4oh8kh1"
X, WA, Y, WB = (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 8, 8), (4, 4, 1, 1)
OPS = ("conv2d_backward_data", "conv2d_backward_weight", "conv2d_backward_weight", "conv2d", "conv2d")
ENTRIES = [
    {"op": op, "descriptor": text, "gflop": 1.0 + place, "fused": []}
    for place, (op, text) in enumerate(zip(OPS, (B, B, A, A, B), strict=True))
]
CALLS = (
    KernelCall("conv2d_forward_kernel", "forward", (X, WA, Y), ()),
    KernelCall("relu", "forward", (Y, Y), (0,)),
    KernelCall("add", "forward", (Y, Y), (0, 1)),
    KernelCall("conv2d_forward_kernel", "forward", (Y, WB, Y), (2,)),
    KernelCall("loss", "forward", (Y,), (3,)),
    KernelCall("loss_gradient", "backward", (Y, Y), (4,)),
    KernelCall("conv2d_backward_data_kernel", "backward", (Y, WB, Y), (5,)),
    KernelCall("update", "optimizer", (WB,), ()),
    KernelCall("conv2d_backward_weight_kernel", "backward", (Y, WB), (2, 5)),
    KernelCall("relu_gradient", "backward", (Y, Y), (1, 6)),
    KernelCall("conv2d_backward_weight_kernel", "backward", (X, Y, WA), (9,)),
    KernelCall("update", "optimizer", (WA,), (10,)),
)


def test_gradients_stand_beside_their_layer() -> None:
    nodes = graph_of(CALLS, ENTRIES).nodes
    assert [(node.kind, node.calls, node.entry) for node in nodes] == [
        ("forward", (0,), 3),
        ("other", (1, 2), None),
        ("forward", (3,), 4),
        ("other", (4,), None),
        ("other", (5,), None),
        ("dgrad", (6,), 0),
        ("wgrad", (8,), 1),
        ("other", (9,), None),
        ("wgrad", (10,), 2),
        ("update", (7, 11), None),
    ]
    assert [node.sources for node in nodes] == [(), (0,), (1,), (2,), (3,), (4,), (1, 4), (1, 5), (7,), (8,)]
    rows = [node.row for node in nodes]
    assert rows[6] == rows[5] == rows[2], "the gradients of the second layer"
    assert rows[8] == rows[0], "and of the first"
    assert rows[0] < rows[7] < rows[2] <= rows[4]
    places = {(node.row, node.column) for node in nodes}
    assert len(places) == len(nodes), "no two boxes at one place"


def test_equal_problems_are_taken_in_turns() -> None:
    """Layers of one problem have an entry each; a third call repeats one; a call of an unknown shape has none."""
    entries = [{"op": "conv2d", "descriptor": B}, {"op": "conv2d", "descriptor": B}]
    calls = [CALLS[3], CALLS[3], CALLS[3], KernelCall("conv2d_forward_kernel", "forward", (Y,), ())]
    assert convolutions_of(calls, entries) == [0, 1, 0, None]


def test_a_free_batch_leaves_the_weight_to_compare() -> None:
    entries = [{"op": "conv2d", "descriptor": "mb{n}ic3ih8oc4oh8kh3ph1"}]
    assert convolutions_of([CALLS[3], KernelCall("conv2d_forward_kernel", "forward", (WA,), ())], entries) == [None, 0]


def test_bars_are_times_where_there_are_some() -> None:
    graph = graph_of(CALLS, ENTRIES)
    by_work = draw(graph, ENTRIES)
    assert [box.bar > 0 for box in by_work.boxes] == [node.entry is not None for node in graph.nodes]
    seconds = [float(place) for place in range(len(CALLS))]
    timed = draw(graph, ENTRIES, seconds)
    largest = max(timed.boxes, key=lambda box: box.bar)
    assert (largest.kind, largest.text) == ("update", "1.8e+04 ms, 27.3%")
    assert timed.boxes[1].bar == pytest.approx(largest.bar * 3 / 18)
    assert timed.boxes[1].calls == ("relu: 1e+03 ms", "add: 2e+03 ms")
    assert not any(timed.boxes[line.reader].kind == "update" for line in timed.lines)
