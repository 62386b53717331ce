# SPDX-License-Identifier: Apache-2.0
"""The batching table in numpy, without a compiler: every rule on random problems equals the loop, exactly."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legalize.batching import UnbatchedCall, vmap
from tests.core.numpy_builder import NumpyBuilder
from tests.core.strategies import problems
from tvm_convgrad.core import reference
from tvm_convgrad.core.batch_rules import RULES
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.problem import ConvProblem

FUNCTIONS: dict[str, Any] = {
    "forward": reference.forward,
    "backward_weight": reference.backward_weight,
    "backward_data": reference.backward_data,
}


def test_every_combination_has_a_rule() -> None:
    combinations = [(0,), (1,), (0, 1)]
    assert set(RULES) == {
        (direction.name, tuple(direction.operands[i] for i in batched))
        for direction in DIRECTIONS.values()
        for batched in combinations
    }


def run(direction: str, problem: ConvProblem, levels: list[dict[str, int | None]], operands: dict[str, Any]) -> Any:
    """The rules on numpy arrays; each call is one run of the reference, counted."""
    calls = []

    def call(made: UnbatchedCall) -> Any:
        calls.append(made)
        assert not made.carried
        shapes = dict(zip(DIRECTIONS[direction].operands, (value.shape for value in made.operands), strict=True))
        data = tuple(made.data_shape) if made.data_shape is not None else shapes["data"]
        one = dict(zip(problem.data_layout, data, strict=True))
        out = shapes["weight"][problem.kernel_layout.index("O")] if "weight" in shapes else None
        out = out or shapes["grad"][problem.grad_layout.index("C")]
        folded = replace(problem, batch=one["N"], in_channels=one["C"], out_channels=out, groups=made.groups)
        return FUNCTIONS[direction](folded, *made.operands)

    layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
    shape = problem.data_shape if direction == "backward_data" else None
    found = vmap(NumpyBuilder(), DIRECTIONS[direction], levels, operands, layouts, problem.groups, shape, call)
    assert len(calls) == 1, "one call of the reference, whatever the batch"
    return found


def looped(direction: str, problem: ConvProblem, levels: list[dict[str, int | None]], operands: dict[str, Any]) -> Any:
    """The definition of vmap: a Python loop over the outermost batch."""
    if not levels:
        return FUNCTIONS[direction](problem, *(operands[name] for name in DIRECTIONS[direction].operands))
    level = levels[0]
    sizes = {operands[name].shape[dim] for name, dim in level.items() if dim is not None}
    (size,) = sizes

    def entry(index: int) -> dict[str, Any]:
        return {
            name: value if level[name] is None else np.take(value, index, level[name])
            for name, value in operands.items()
        }

    return np.stack([looped(direction, problem, levels[1:], entry(index)) for index in range(size)])


@st.composite
def vmaps(draw: Any, depth: int = 1) -> tuple[str, ConvProblem, list[dict[str, int | None]], dict[str, Any]]:
    """A direction, a problem, levels of vmap with batch axes anywhere, and operands of small integers."""
    problem = draw(problems(dtypes=("float64",)))
    direction = draw(st.sampled_from(list(DIRECTIONS)))
    names = DIRECTIONS[direction].operands
    shapes = {name: [int(e) for e in problem.tensors[name][0]] for name in names}
    levels: list[dict[str, int | None]] = []
    for _ in range(depth):
        size = draw(st.integers(1, 3))
        batched = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
        level: dict[str, int | None] = {}
        for name, has in zip(names, batched, strict=True):
            level[name] = draw(st.integers(0, len(shapes[name]))) if has else None
            if has:
                shapes[name].insert(level[name], size)
        levels.insert(0, level)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return direction, problem, levels, {name: rng.integers(-4, 5, shapes[name]).astype("float64") for name in names}


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(case=vmaps())
def test_a_vmap_is_a_loop(case: Any) -> None:
    np.testing.assert_array_equal(run(*case), looped(*case))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(case=vmaps(depth=2))
def test_nested_vmaps_are_nested_loops(case: Any) -> None:
    np.testing.assert_array_equal(run(*case), looped(*case))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=vmaps(depth=3))
def test_three_vmaps(case: Any) -> None:
    np.testing.assert_array_equal(run(*case), looped(*case))


def test_every_rule_at_every_rank_with_groups() -> None:
    """What hypothesis draws, once by hand: no rule, rank or grouping is left to chance."""
    rng = np.random.default_rng(0)
    for (direction, batched), rank, groups in product(RULES, (1, 2, 3), (1, 2, 4)):
        problem = ConvProblem.from_shapes(
            (2, 4, 5, 6, 4)[: rank + 2],
            (8, 4 // groups, 3, 2, 2)[: rank + 2],
            strides=(2, 1, 2)[:rank],
            padding=((1, 0),) * rank,
            groups=groups,
        )
        operands, level = {}, {}
        for name in DIRECTIONS[direction].operands:
            shape = [*problem.tensors[name][0]]
            level[name] = 0 if name in batched else None
            operands[name] = rng.integers(-4, 5, [3, *shape] if name in batched else shape).astype("float64")
        case = (direction, problem, [level], operands)
        np.testing.assert_array_equal(run(*case), looped(*case), err_msg=f"{direction} {batched} {rank} {groups}")


def test_batches_must_agree() -> None:
    problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3")
    operands = {"data": np.zeros((2, *problem.data_shape)), "weight": np.zeros((3, *problem.weight_shape))}
    with pytest.raises(ProblemError, match="the batch of data has 2 entries, that of weight 3"):
        run("forward", problem, [{"data": 0, "weight": 0}], operands)


@pytest.mark.parametrize("level", [{"data": 0, "weight": None}, {"data": 0, "weight": 0}])
def test_a_batch_has_an_entry(level: dict[str, int | None]) -> None:
    problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3")
    shapes = {"data": problem.data_shape, "weight": problem.weight_shape}
    operands = {name: np.zeros((0, *shapes[name]) if at == 0 else shapes[name]) for name, at in level.items()}
    with pytest.raises(ProblemError, match="the batch of data has 0 entries; a vmap needs at least 1"):
        run("forward", problem, [level], operands)
