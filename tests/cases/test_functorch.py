# SPDX-License-Identifier: Apache-2.0
"""functorch's vmap cases of convolutions and their gradients: shapes, variants, in_dims of its tests, nested too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.batching.programs import Vmapped, batched, ints, looped, run
from tests.batching.test_vmap import backward_reference
from tests.cases import load
from tvm_convgrad.batching import vmap_rule
from tvm_convgrad.core import reference
from tvm_convgrad.core.batch_rules import RULES
from tvm_convgrad.core.catalogue import BY_SHORT
from tvm_convgrad.core.problem import ConvProblem

pytestmark = pytest.mark.skipif(not load.FOLDER.is_dir(), reason=load.ABSENT)

GEOMETRY = ("strides", "padding", "dilation", "groups")


def functorch() -> Any:
    return load.read("functorch_vmap_conv")


def problem_of(case: dict[str, Any]) -> ConvProblem:
    strides, dilation = case.get("strides", case.get("stride", 1)), case.get("dilations", case.get("dilation", 1))
    padding = case.get("pads", case.get("padding", 0))
    return ConvProblem.from_shapes(
        case["x_shape"],
        case["w_shape"],
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=case.get("groups", 1),
    )


def geometry_of(problem: ConvProblem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in GEOMETRY}


def vmapped(op: str, shapes: Sequence[Any], levels: Sequence[Sequence[int | None]], attributes: Any) -> Vmapped:
    """Operands for nested vmaps of two entries each, `levels` outermost first, and the rule."""
    rule: Any = op
    for dims in reversed(levels):
        shapes = [batched(shape, 2, dim) for shape, dim in zip(shapes, dims, strict=True)]
        rule = vmap_rule(rule, dims)
    rng = np.random.default_rng(len(shapes))
    return Vmapped(rule, [ints(rng, shape) for shape in shapes], attributes)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_forward(rank: int) -> None:
    """test_vmap.py's test_conv{1,2,3}d; the same dims again for the vmap of the vmap."""
    problems = dict.fromkeys(problem_of(case) for case in functorch()["forward_vmap"] if case["ndim"] == rank)
    assert len(problems) == 2
    cases, want = [], []
    for problem, dims in product(problems, functorch()["in_dims"]["2 tensors"]):
        for levels in ([dims],) if rank == 3 else ([dims], [dims, dims]):
            shapes = [problem.data_shape, problem.weight_shape]
            case = vmapped(f"conv{rank}d", shapes, levels, geometry_of(problem))
            cases.append(case)
            want.append(looped(lambda *a, p=problem: reference.forward(p, *a), case.rule.levels, case.operands))
    for found, expected in zip(run(cases), want, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("number", range(6))
def test_backward(number: int) -> None:
    """Every variant of the operator database, with every in_dims of three tensors, all gradients at once."""
    problems = list(dict.fromkeys(problem_of(case) for case in functorch()["opinfo_variants"]))
    assert len(problems) == 6
    problem = problems[number]
    cases, want = [], []
    for dims in functorch()["in_dims"]["3 tensors"]:
        levels = [dims, (0, 0, None)] if dims == [0, 0, 0] else [dims]
        shapes = [problem.grad_shape, problem.data_shape, problem.weight_shape]
        case = vmapped("conv2d_backward", shapes, levels, geometry_of(problem))
        cases.append(case)
        want.append(looped(backward_reference(problem, False), case.rule.levels, case.operands))
    for found, expected in zip(run(cases), want, strict=True):
        for part, array in zip(found, expected, strict=True):
            np.testing.assert_array_equal(part, array)


def test_double_backward() -> None:
    """The gradients of convolution_backward with each of its six arguments batched or not: all 64 of functorch's.

    They are products of the family: ggO = conv(ggI, W) + conv(I, ggW) + ggb, gI = dgrad(gO, ggW), gW = wgrad(gO, ggI).
    """
    case = functorch()["double_backward"]
    problem, names = problem_of(case), case["args"]
    shapes = {
        "ggI": problem.data_shape,
        "ggW": problem.weight_shape,
        "ggb": tuple(case["bias"]),
        "gO": problem.grad_shape,
        "weight": problem.weight_shape,
        "input": problem.data_shape,
    }
    size, rng = 2, np.random.default_rng(0)
    both = {name: (ints(rng, shapes[name]), ints(rng, [size, *shapes[name]])) for name in names}
    terms: list[tuple[str, str, str, dict[str, Any]]] = [
        ("conv2d", "ggI", "weight", {}),
        ("conv2d", "input", "ggW", {}),
        ("conv2d_backward_data", "gO", "ggW", {"data_shape": problem.data_shape}),
        ("conv2d_backward_weight", "gO", "ggI", {"kernel_size": problem.kernel}),
    ]
    keys, cases = [], []
    for op, first, second, own in terms:
        for has in [(0, 1), (1, 0), (1, 1)]:
            keys.append((op, first, second, has))
            operands = [both[first][has[0]], both[second][has[1]]]
            cases.append(Vmapped(vmap_rule(op, [0 if b else None for b in has]), operands, own))
    found = dict(zip(keys, run(cases), strict=True))
    functions = {
        "conv2d": reference.forward,
        "conv2d_backward_data": reference.backward_data,
        "conv2d_backward_weight": reference.backward_weight,
    }
    combinations = list(product((0, 1), repeat=len(names)))
    assert len(combinations) == case["in_dims_count"]
    for choice in combinations:
        has = dict(zip(names, choice, strict=True))

        def value(op: str, first: str, second: str, has: dict[str, int] = has) -> Any:
            """The term by its rule, once and broadcast where neither operand is batched."""
            pair = (has[first], has[second])
            if pair == (0, 0):
                return functions[op](problem, both[first][0], both[second][0])[None]
            return found[op, first, second, pair]

        bias = both["ggb"][has["ggb"]].reshape(-1, 1, problem.out_channels, 1, 1)
        sums = value(*terms[0][:3]) + value(*terms[1][:3]) + bias
        gradients = [sums, value(*terms[2][:3]), value(*terms[3][:3])]
        for k in range(size):
            one = {name: both[name][1][k] if has[name] else both[name][0] for name in names}
            want = [
                reference.forward(problem, one["ggI"], one["weight"])
                + reference.forward(problem, one["input"], one["ggW"])
                + one["ggb"][:, None, None],
                reference.backward_data(problem, one["gO"], one["ggW"]),
                reference.backward_weight(problem, one["gO"], one["ggI"]),
            ]
            for have, expected in zip(gradients, want, strict=True):
                np.testing.assert_array_equal(have[k % len(have)], expected)


def test_our_table_folds_as_functorch_does() -> None:
    """functorch's notes say into what each of its rules folds the batch; ours fold into the same."""
    directions = {short: BY_SHORT[short].name for short in ("dgrad", "wgrad")}
    tensors = {"dy": "grad", "x": "data", "w": "weight"}
    compared = 0
    for entry in functorch()["rule_table"]:
        names = [tensors.get(name) for name in entry["batched"]]
        if entry["op"] not in directions or None in names:
            continue
        rule = RULES[directions[entry["op"]], tuple(names)]
        into = "groups" if "groups*=B" in entry["how"] else "N" if "into N" in entry["how"] else "channels"
        assert rule.into == into, entry
        compared += 1
    assert compared == 6
