# SPDX-License-Identifier: Apache-2.0
"""The closure and convolution_backward on 2,000 random problems in numpy: small integers, equality, no compiler.

A direction is linear in each operand, so its gradient g in an operand a is what has <g, a> = <r, direction> for the
cotangent r.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.core.strategies import problems
from tvm_convgrad.core.backward import OPERANDS, BackwardCall, backward_call
from tvm_convgrad.core.catalogue import DIRECTIONS, Direction
from tvm_convgrad.core.geometry import SPATIAL, effective_kernel
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCE
from tvm_convgrad.core.type_relation import NumberProver, TensorSpec

Arrays = dict[str, np.ndarray[Any, Any]]


def numbers(problem: ConvProblem, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-4, 5, shape).astype("float64") for name, (shape, _) in problem.tensors.items()}


def inner(a: Any, b: Any) -> float:
    return float((a * b).sum())


def gradients(
    problem: ConvProblem, direction: Direction, operands: Arrays, cotangent: Any
) -> list[tuple[Direction, Arrays, Any]]:
    """For each operand by the catalogue: the direction that gives its gradient, its operands, and the gradient."""
    found = []
    for name, taken in direction.gradients:
        given_to = [cotangent if each == "result" else operands[each] for each in taken]
        tensors = dict(zip(DIRECTIONS[name].operands, given_to, strict=True))
        found.append((DIRECTIONS[name], tensors, REFERENCE[name](problem, *given_to)))
    return found


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(problems(dtypes=("float64",)), st.sampled_from(list(DIRECTIONS.values())), st.integers(0, 2**16))
def test_gradients_of_gradients(problem: ConvProblem, direction: Direction, seed: int) -> None:
    """Of every direction by the table, and of what the table gives by the table again."""
    tensors, other = numbers(problem, seed), numbers(problem, seed + 1)
    operands, cotangent = {name: tensors[name] for name in direction.operands}, tensors[direction.result]
    value = inner(cotangent, REFERENCE[direction.name](problem, *operands.values()))
    first = gradients(problem, direction, operands, cotangent)
    for operand, (again, taken, gradient) in zip(direction.operands, first, strict=True):
        assert gradient.shape == operands[operand].shape
        assert inner(gradient, operands[operand]) == value
        second = inner(other[operand], gradient)
        for name, (_, _, twice) in zip(again.operands, gradients(problem, again, taken, other[operand]), strict=True):
            assert inner(twice, taken[name]) == second


def scattered(x: Any, w: Any, call: dict[str, Any]) -> Any:
    """A transposed convolution as torch.nn.ConvTranspose2d defines it: each element of x puts its kernel down."""
    groups = call["groups"]
    n, into, out, kernel = len(x), x.shape[1] // groups, w.shape[1], w.shape[2:]
    axes = list(zip(x.shape[2:], kernel, call["stride"], call["dilation"], call["output_padding"], strict=True))
    full = [(e - 1) * s + effective_kernel(k, d) + more for e, k, s, d, more in axes]
    y = np.zeros((n, groups, out, *full))
    for tap in product(*map(range, kernel)):
        places = (slice(t * d, t * d + (e - 1) * s + 1, s) for t, (e, _, s, d, _) in zip(tap, axes, strict=True))
        pieces = x.reshape(n, groups, into, *x.shape[2:]), w.reshape(groups, into, out, *kernel)[(..., *tap)]
        y[(..., *places)] += np.einsum("ngi...,gio->ngo...", *pieces)
    kept = (slice(low, end - high) for end, (low, high) in zip(full, call["padding"], strict=True))
    return y.reshape(n, groups * out, *full)[(..., *kept)]


def convolved(x: Any, w: Any, call: dict[str, Any]) -> Any:
    names = {"stride": "strides", "padding": "padding", "dilation": "dilation", "groups": "groups"}
    problem = ConvProblem.from_shapes(x.shape, w.shape, **{ours: call[name] for name, ours in names.items()})
    return REFERENCE["forward"](problem, x, w)


def drawn(rng: random.Random, transposed: bool) -> tuple[Any, Any, dict[str, Any]] | None:
    """Data, weight (canonical layouts) and the attributes of a convolution; None if it has no result."""
    rank, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2, 3))
    into, out = rng.randint(1, 3), rng.randint(1, 3)
    call: dict[str, Any] = {
        "stride": [rng.randint(1, 3) for _ in range(rank)],
        "padding": [(rng.randint(0, 3), rng.randint(0, 3)) for _ in range(rank)],
        "dilation": [rng.choice((1, 1, 2, 4)) for _ in range(rank)],
        "groups": groups,
    }
    steps = zip(call["stride"], call["dilation"], strict=True)
    call["output_padding"] = [rng.randint(0, max(pair) - 1) if transposed else 0 for pair in steps]
    extents, kernel = ([rng.randint(1, most) for _ in range(rank)] for most in (6, 4))
    weight = (groups * into, out, *kernel) if transposed else (groups * out, into, *kernel)
    axes = (call[name] for name in ("stride", "dilation", "padding", "output_padding"))
    for e, k, s, d, (low, high), more in zip(extents, kernel, *axes, strict=True):
        reach = (e - 1) * s + effective_kernel(k, d) + more - low - high
        if (reach if transposed else e + low + high - effective_kernel(k, d) + 1) < 1:
            return None
    numbers = np.random.default_rng(rng.randint(0, 2**16))
    shapes = (rng.randint(1, 3), groups * into, *extents), weight
    return *(numbers.integers(-4, 5, shape).astype("float64") for shape in shapes), call


def shuffled(rng: random.Random, letters: str) -> str:
    return "".join(rng.sample(letters, len(letters)))


def evaluated(call: BackwardCall, tensors: Arrays) -> list[Any]:
    """The gradients of data and weight that a checked call names."""
    layouts = dict(zip(OPERANDS, call.layouts, strict=True))
    crop = dict(zip(SPATIAL[len(call.crop)], call.crop, strict=True))
    grad = tensors["grad"]
    kept = tuple(slice(0, e - crop.get(letter, 0)) for letter, e in zip(layouts["grad"], grad.shape, strict=True))
    tensors = {**tensors, "grad": grad[kept]}
    problem = ConvProblem.from_shapes(
        tensors[call.roles["data"]].shape,
        tensors["weight"].shape,
        strides=call.strides,
        padding=call.padding,
        dilation=call.dilation,
        groups=call.groups,
        data_layout=layouts[call.roles["data"]],
        kernel_layout=layouts["weight"],
        grad_layout=layouts[call.roles["grad"]],
    )
    return [REFERENCE[direction.name](problem, tensors[a], tensors[b]) for direction, (a, b) in call.gradients]


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_convolution_backward(rng: random.Random, transposed: bool) -> None:
    """Any stride, dilation, uneven padding, output padding up to stride or dilation, groups, layouts."""
    made = drawn(rng, transposed)
    assume(made is not None)
    assert made is not None
    data, weight, call = made
    y = (scattered if transposed else convolved)(data, weight, call)
    grad = np.random.default_rng(rng.randint(0, 2**16)).integers(-4, 5, y.shape).astype("float64")
    spatial = SPATIAL[data.ndim - 2]
    canonical = {"grad": f"NC{spatial}", "data": f"NC{spatial}", "weight": ("IO" if transposed else "OI") + spatial}
    layouts = {name: shuffled(rng, letters) for name, letters in canonical.items()}
    tensors = {
        name: array.transpose([canonical[name].index(letter) for letter in layouts[name]])
        for name, array in (("grad", grad), ("data", data), ("weight", weight))
    }
    checked = backward_call(
        {name: TensorSpec(array.shape, array.ndim, "float64") for name, array in tensors.items()},
        NumberProver(),
        bias_sizes=[grad.shape[1]],
        transposed=transposed,
        grad_layout=layouts["grad"],
        data_layout=layouts["data"],
        kernel_layout=layouts["weight"],
        **call,
    )
    for name, gradient in zip(("data", "weight"), evaluated(checked, tensors), strict=True):
        assert gradient.shape == tensors[name].shape
        assert inner(gradient, tensors[name]) == inner(grad, y)
