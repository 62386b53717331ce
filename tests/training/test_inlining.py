# SPDX-License-Identifier: Apache-2.0
"""Which elementwise stages are written into others: none that would be computed twice or make an endless expression."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, topi

from tvm_convgrad.training.schedule.blocks import opened, root_blocks
from tvm_convgrad.training.schedule.cpu import scheduled
from tvm_convgrad.training.schedule.inlining import CHOICE, MOST_NODES, inline, nodes_of

SHAPE = (3, 12)


def squared(x: te.Tensor) -> te.Tensor:
    """x to the power 2^14, as squares of squares."""
    for _ in range(14):
        x = topi.multiply(x, x)
    return x


def adjacent(x: te.Tensor) -> te.Tensor:
    """The sum of two adjacent elements of what is not cheap."""
    inner = topi.minimum(topi.multiply(x, x), topi.full_like(x, 4.0))
    return topi.add(topi.strided_slice(inner, [0, 1], [3, 12]), topi.strided_slice(inner, [0, 0], [3, 11]))


def rolled(x: te.Tensor) -> te.Tensor:
    """The halves of what is not cheap, the other way round: each element is read in one branch of a condition."""
    inner = topi.minimum(topi.multiply(x, x), topi.full_like(x, 4.0))
    return topi.concatenate([topi.strided_slice(inner, [0, 6], [3, 12]), topi.strided_slice(inner, [0, 0], [3, 6])], 1)


def blocks_of_blocks(x: te.Tensor) -> te.Tensor:
    """Sums of three shifted, padded copies of sums of three shifted, padded copies, and so on, four times."""
    for _ in range(4):
        x = topi.nn.pad(x, (0, 1), (0, 1))
        parts = [topi.strided_slice(x, [0, k], [3, 12 + k]) for k in range(3)]
        x = topi.add(topi.add(parts[0], parts[1]), parts[2])
    return x


def padded_sums(x: np.ndarray) -> np.ndarray:
    for _ in range(4):
        x = np.pad(x, ((0, 0), (1, 1)))
        x = x[:, :12] + x[:, 1:13] + x[:, 2:14]
    return x


def larger(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    return te.compute(SHAPE, lambda i, j: tvm.tirx.Select(a[i, j] > b[i, j], a[i, j], b[i, j]), name="larger")


def running(x: te.Tensor) -> te.Tensor:
    """The largest of x, x + 1, 2 x + 2 and so on; each is in a condition and is one of its two values."""
    most = x
    for number in range(1, 17):
        scale = tvm.tirx.const(float(number), "float32")
        most = larger(topi.add(topi.multiply(x, scale), scale), most)
    return most


CASES: dict[str, tuple[Callable[[te.Tensor], te.Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "squared": (squared, lambda x: x ** (2**14)),
    "adjacent": (adjacent, lambda x: np.minimum(x * x, 4)[:, 1:] + np.minimum(x * x, 4)[:, :-1]),
    "rolled": (rolled, lambda x: np.roll(np.minimum(x * x, 4), 6, 1)),
    "blocks of blocks": (blocks_of_blocks, padded_sums),
    "running": (running, lambda x: np.max([x, *(x * n + n for n in range(1, 17))], 0)),
}


def function_of(name: str) -> tvm.tirx.PrimFunc:
    x = te.placeholder(SHAPE, "float32", name="x")
    return te.create_prim_func([x, CASES[name][0](x)])


def left_of(name: str) -> list[tvm.tirx.BufferStore]:
    """What the stages store that are left after inlining."""
    schedule = opened(function_of(name))
    inline(schedule, root_blocks(schedule) or [])
    return [schedule.get(block).body for block in root_blocks(schedule) or []]


@pytest.mark.parametrize("name", CASES)
def test_results_are_exact(name: str) -> None:
    largest = 1 if name == "squared" else 3
    x = np.random.default_rng(7).integers(-largest, largest + 1, SHAPE).astype("float32")
    wanted = CASES[name][1](x.astype("float64"))
    found = tvm.runtime.tensor(np.full(wanted.shape, np.nan, "float32"))
    tvm.compile(scheduled(function_of(name)), target="llvm")(tvm.runtime.tensor(x), found)
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_expressions_do_not_grow_without_end() -> None:
    """2^14 factors would be written out."""
    nodes = [sum(1 for _ in nodes_of(store.value)) for store in left_of("squared")]
    assert MOST_NODES / 4 < max(nodes) <= MOST_NODES


def test_conditions_in_one_another_are_few() -> None:
    """2^16 would be written out; TVM's simplifier takes half a minute for 2^8."""
    choices = [sum(isinstance(node, tvm.tirx.Select) for node in nodes_of(store.value)) for store in left_of("running")]
    assert 8 <= max(choices) <= MOST_NODES / CHOICE


@pytest.mark.parametrize(("name", "stages"), [("adjacent", 2), ("rolled", 1)])
def test_no_element_is_computed_twice(name: str, stages: int) -> None:
    assert len(left_of(name)) == stages


def test_sums_of_padded_sums_stay_apart() -> None:
    """As one expression there would be a condition for each of 81 ways to an element."""
    nodes = [sum(1 for _ in nodes_of(store.value)) for store in left_of("blocks of blocks")]
    assert len(nodes) >= 4
    assert max(nodes) < 30
