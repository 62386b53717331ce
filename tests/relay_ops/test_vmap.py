# SPDX-License-Identifier: Apache-2.0
"""vmap_rule on Relay expressions, built: every operator and combination of batched operands equals a Python loop."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.differentiate import value_and_gradients
from tests.relay_ops.harness import assert_equal, calls, run, typed
from tvm_convgrad import ConvProblem
from tvm_convgrad.batching import VmapRule, vmap_rule
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import DIRECTIONS, OpEntry
from tvm_convgrad.core.errors import ProblemError, UnsupportedError

PAIRS = ((0, None), (None, 0), (0, 0), (-1, -1), (2, 1))


def looped(function: Any, levels: Any, operands: Any) -> Any:
    """The definition of vmap: a loop over each level's batch axis."""
    if not levels:
        return function(*operands)
    dims = levels[0]
    (size,) = {array.shape[dim] for array, dim in zip(operands, dims, strict=True) if dim is not None}
    return np.stack(
        [
            looped(
                function,
                levels[1:],
                [array if dim is None else np.take(array, k, dim) for array, dim in zip(operands, dims, strict=True)],
            )
            for k in range(size)
        ]
    )


@dataclass
class Case:
    direction: str
    problem: ConvProblem
    rule: VmapRule
    operands: list[Any]

    @property
    def attributes(self) -> dict[str, Any]:
        own = {
            "backward_weight": {"kernel_size": self.problem.kernel},
            "backward_data": {"data_shape": self.problem.data_shape},
        }
        names = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "grad_layout")
        return {name: getattr(self.problem, name) for name in names} | own.get(self.direction, {})

    def expected(self) -> Any:
        function = reference.DIRECTIONS[self.direction]
        wide = [array.astype("float64") for array in self.operands]
        return looped(lambda *arrays: function(self.problem, *arrays), self.rule.levels, wide)


def case_of(direction: str, problem: ConvProblem, *levels: tuple[int | None, ...], size: int = 3) -> Case:
    """Operands of small integers; `levels` outermost first, of `size`, `size - 1`, … entries."""
    rng = np.random.default_rng(len(levels))
    rule: Any = OpEntry(DIRECTIONS[direction], problem.rank).name
    shapes = [list(problem.tensors[name][0]) for name in DIRECTIONS[direction].operands]
    for depth, dims in reversed(list(enumerate(levels))):
        for shape, dim in zip(shapes, dims, strict=True):
            if dim is not None:
                shape.insert(dim % (len(shape) + 1), size - depth)
        rule = vmap_rule(rule, dims)
    dtypes = [problem.tensors[name][1] for name in DIRECTIONS[direction].operands]
    operands = [rng.integers(-3, 4, shape).astype(t) for shape, t in zip(shapes, dtypes, strict=True)]
    return Case(direction, problem, rule, operands)


def module_of(cases: list[Case]) -> tuple[Any, dict[str, Any]]:
    """One function of all operands that returns all results."""
    variables, results, arrays = [], [], {}
    for number, case in enumerate(cases):
        names = [f"{name}_{number}" for name in case.rule.operands]
        arrays |= dict(zip(names, case.operands, strict=True))
        own = [relay.var(name, shape=arrays[name].shape, dtype=str(arrays[name].dtype)) for name in names]
        variables += own
        results.append(case.rule(*own, **case.attributes))
    return typed(relay.Function(variables, relay.Tuple(results))), arrays


def check(cases: list[Case]) -> None:
    module, arrays = module_of(cases)
    for case, found in zip(cases, run(module, arrays, opt_level=0), strict=True):
        assert_equal(found, case.expected())


def problem_of(rank: int, groups: int, **more: Any) -> ConvProblem:
    return ConvProblem.from_shapes(
        (2, 4, 5, 6, 4)[: rank + 2],
        (8, 4 // groups, 3, 2, 2)[: rank + 2],
        strides=(2, 1, 2)[:rank],
        padding=((1, 0),) * rank,
        dilation=(1, 2, 1)[:rank],
        groups=groups,
        **more,
    )


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_operator_and_combination(direction, rank):
    cases = [case_of(direction, problem_of(rank, 2), dims) for dims in PAIRS]
    check([*cases, case_of(direction, problem_of(rank, 1), (0, 0)), case_of(direction, problem_of(rank, 4), (None, 1))])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nested(direction):
    problem = ConvProblem.from_shapes((2, 4, 5, 6), (6, 2, 3, 2), strides=2, padding=1, groups=2)
    pairs = (((0, None), (None, -1)), ((None, 0), (1, 0)), ((1, 0), (0, None)))
    check([case_of(direction, problem, *levels) for levels in pairs])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_channels_last_and_types(direction):
    last = {"data_layout": "NHWC", "kernel_layout": "HWIO", "grad_layout": "NHWC"}
    problem = ConvProblem.from_shapes((2, 5, 6, 4), (3, 2, 2, 6), padding="SAME", groups=2, **last)
    double = problem_of(2, 2, dtypes=("float64",) * 3)
    check([case_of(direction, one, dims) for one in (problem, double) for dims in PAIRS[:3]])


def test_transposed():
    """conv_transpose is dgrad: output padding, groups, a weight in IO order."""
    found, wanted, variables, arrays = [], [], [], {}
    for number, (rank, dims) in enumerate(product((1, 2, 3), PAIRS[:3])):
        problem = ConvProblem(2, 4, 6, (8, 7, 6)[:rank], (3, 2, 3)[:rank], (2,) * rank, ((1, 0),) * rank, groups=2)
        case = case_of("backward_data", problem, dims, size=2)
        extra = [
            int(x) - ((int(y) - 1) * 2 + k - 1)
            for x, y, k in zip(problem.data_extents, problem.grad_extents, problem.kernel, strict=True)
        ]
        own = [relay.var(f"v{number}_{i}", shape=a.shape, dtype=str(a.dtype)) for i, a in enumerate(case.operands)]
        variables += own
        arrays |= {var.name_hint: array for var, array in zip(own, case.operands, strict=True)}
        rule = vmap_rule(f"conv{rank}d_transpose", dims)
        found.append(rule(*own, strides=2, padding=problem.padding, output_padding=extra, groups=2))
        wanted.append(case.expected())
    results = run(typed(relay.Function(variables, relay.Tuple(found))), arrays, opt_level=0)
    for have, want in zip(results, wanted, strict=True):
        assert_equal(have, want)


def test_one_convolution_whatever_the_batch_and_its_gradient():
    cases = [case_of(direction, problem_of(2, 2), dims, size=7) for direction, dims in product(DIRECTIONS, PAIRS)]
    module, _ = module_of(cases)
    names = [f"nn.{OpEntry(direction, 2).name}" for direction in DIRECTIONS.values()]
    assert [len(calls(module, name)) for name in names] == [len(PAIRS)] * 3
    # The sum of a vmapped wgrad over its batch, and that sum's gradient in dY.
    case = case_of("backward_weight", problem_of(2, 2), (0, 0))
    operands = [relay.var(name, shape=a.shape) for name, a in zip(("grad", "data"), case.operands, strict=True)]
    step = value_and_gradients(relay.Function(operands, relay.sum(case.rule(*operands, **case.attributes))))
    value, d_grad, _ = run(step, dict(zip(("grad", "data"), case.operands, strict=True)), opt_level=0)
    assert_equal(value, np.asarray(case.expected().sum()))
    ones = np.ones(case.problem.weight_shape)
    want = np.stack([reference.forward(case.problem, x.astype("float64"), ones) for x in case.operands[1]])
    assert_equal(d_grad, want)


@pytest.mark.parametrize(
    ("op", "dims", "shapes", "error", "says"),
    [
        ("conv1d", (0, 0), ((3, 2, 4, 8), (2, 6, 4, 3)), ProblemError, "3 entries.* 2; they must be equal"),
        ("conv1d", (0, None), ((2, 4, 8), (6, 4, 3)), ProblemError, "data has 3 axes; with the batch axes"),
        ("conv1d", (0, None), ((tvm.tir.Any(), 2, 4, 8), (6, 4, 3)), UnsupportedError, "data is .*must be numbers"),
        ("conv1d", (0, None), ((3, 2, 4, 8), (6, 3, 3)), ProblemError, "channels"),
        ("conv1d", (0, None), ((3, 2, 4, 8),), ProblemError, "1 operands were given"),
        ("conv1d_backward", (0, 0, 0), ((2, 2, 6, 6), (2, 2, 4, 8), (2, 6, 4, 3)), UnsupportedError, "in Relay take"),
        ("conv1d_backward_data", (0, None), ((3, 2, 6, 6), (6, 4, 3)), ProblemError, "data_shape is missing"),
        ("conv1d_transpose", (0, None), ((3, 2, 6), (6, 4, 3)), ProblemError, "with the batch axes"),
    ],
)
def test_what_is_wrong_is_refused(op, dims, shapes, error, says):
    operands = [relay.var(f"v{i}", relay.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with pytest.raises(error, match=says):
        vmap_rule(op, dims)(*operands)


def test_arrays_are_refused():
    with pytest.raises(UnsupportedError, match="must be Relay expressions, not ndarray"):
        vmap_rule("conv1d", (0, None))(np.zeros((2, 2, 4, 8)), np.zeros((6, 4, 3)))
