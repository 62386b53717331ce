# SPDX-License-Identifier: Apache-2.0
"""What must hold between compiled operators whatever the oracle says: adjoints, groups, transposes, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.lowering import forced_forms
from relax_ops.single_run import quick_machine
from tests.relax.programs import module, tensor
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, effective_kernel, flat_padding
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.bulk import Case, run_cases
from tvm_convgrad.verify.operators import random_problems

Array = np.ndarray[Any, Any]


def single(problem: ConvProblem) -> ConvProblem:
    return problem.with_dtypes("float32", "float32", "float32")


def numbers(problem: ConvProblem, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-3, 4, [int(e) for e in shape]).astype("float32")
        for name, (shape, _) in problem.tensors.items()
    }


def compute(items: list[tuple[str, ConvProblem, dict[str, Array]]]) -> list[Array]:
    """Directions of problems, compiled together, by kernels and compositions in turns: both kinds must agree."""
    operands = [[arrays[name] for name in DIRECTIONS[direction].operands] for direction, _, arrays in items]
    impls = [("kernel", "composition")[(place + place // 3) % 2] for place in range(len(items))]
    return run_cases(
        [Case(direction, problem, impl) for impl, (direction, problem, _) in zip(impls, items, strict=True)], operands
    )


def test_the_three_directions_are_adjoint() -> None:
    """⟨dY, conv(X, W)⟩ = ⟨dX, X⟩ = ⟨dW, W⟩, exactly: the numbers are integers below 2^24."""
    drawn = [single(p) for p in random_problems(30, 21)]
    arrays = [numbers(p) for p in drawn]
    found = compute([(direction, p, a) for p, a in zip(drawn, arrays, strict=True) for direction in DIRECTIONS])
    for i, (problem, tensors) in enumerate(zip(drawn, arrays, strict=True)):
        results = dict(zip(DIRECTIONS, found[3 * i : 3 * i + 3], strict=True))
        products = {
            direction: float((results[direction].astype("float64") * tensors[DIRECTIONS[direction].result]).sum())
            for direction in DIRECTIONS
        }
        assert len(set(products.values())) == 1, (problem.descriptor, products)


@pytest.mark.parametrize(
    "descriptor",
    [
        "g2mb2ic4ih6iw5oc6kh3kw2sh2sw1ph1pw0",
        "g3mb2ic6iw9oc3kw3dw1pw2",
        "g4mb1ic4ih5oc8kh3ph1",
        "g2mb1ic4id4oc2kd2",
    ],
)
def test_groups_are_a_concatenation_of_their_parts(descriptor: str) -> None:
    problem = ConvProblem.from_descriptor(descriptor)
    g = problem.groups
    part = replace(problem, groups=1, in_channels=problem.in_channels // g, out_channels=problem.out_channels // g)
    whole = numbers(problem)
    split = {name: np.split(array, g, axis=0 if name == "weight" else 1) for name, array in whole.items()}
    pieces = [{name: split[name][i] for name in split} for i in range(g)]
    for direction in DIRECTIONS:
        (together,) = compute([(direction, problem, whole)])
        parts = compute([(direction, part, piece) for piece in pieces])
        axis = 0 if DIRECTIONS[direction].result == "weight" else 1
        np.testing.assert_array_equal(together, np.concatenate(parts, axis))


def test_padding_is_a_crop() -> None:
    """Padding X in the operator, and padding it by hand: the same dW, and dX is the inside of the padded one's."""
    for problem in (single(p).with_layouts() for p in random_problems(12, 22)):
        arrays = numbers(problem)
        widths = [(0, 0), (0, 0), *problem.padding]
        padded = replace(
            problem,
            data_extents=tuple(
                int(x) + sum(pair) for x, pair in zip(problem.data_extents, problem.padding, strict=True)
            ),
            padding=((0, 0),) * problem.rank,
        )
        by_hand = {**arrays, "data": np.pad(arrays["data"], widths)}
        dw, dw_by_hand, dx, dx_padded = compute(
            [
                ("backward_weight", problem, arrays),
                ("backward_weight", padded, by_hand),
                ("backward_data", problem, arrays),
                ("backward_data", padded, by_hand),
            ]
        )
        np.testing.assert_array_equal(dw, dw_by_hand, err_msg=problem.descriptor)
        inside = tuple(slice(low, low + extent) for (low, _), extent in zip(widths, problem.data_shape, strict=True))
        np.testing.assert_array_equal(dx, dx_padded[inside], err_msg=problem.descriptor)


def test_what_y_never_saw_has_no_gradient() -> None:
    """Trailing elements that the floor division hides get exactly zero, and are there."""
    problem = ConvProblem.from_descriptor("mb1ic2ih11iw9oc2kh2kw2sh4sw4")
    for impl in ("composition:transposed", "composition:dilated"):
        arrays = {name: np.ones_like(array) for name, array in numbers(problem).items()}
        operands = [arrays["grad"], arrays["weight"]]
        (dx,) = run_cases([Case("backward_data", problem, impl)], [operands])
        assert dx.shape == (1, 2, 11, 9)
        seen = np.zeros((11, 9), bool)
        for y, x in np.ndindex(3, 2):
            seen[4 * y : 4 * y + 2, 4 * x : 4 * x + 2] = True
        np.testing.assert_array_equal(dx != 0, np.broadcast_to(seen, dx.shape))


def test_a_transposed_convolution_is_dgrad() -> None:
    """TVM's own conv{1,2,3}d_transpose and our backward_data of the swapped convolution: one and the same."""
    drawn = [p for p in random_problems(60, 23) if _stock_serves(p)][:12]
    assert {p.rank for p in drawn} == {1, 2, 3}
    for problem in (single(p).with_layouts() for p in drawn):
        arrays = numbers(problem)
        grad, weight = tensor("grad", problem.grad_shape), tensor("weight", problem.weight_shape)
        function = getattr(relax.op.nn, f"conv{problem.rank}d_transpose")
        hidden = [
            (int(x) + sum(pair) - effective_kernel(k, d)) % s
            for x, pair, k, d, s in zip(
                problem.data_extents, problem.padding, problem.kernel, problem.dilation, problem.strides, strict=True
            )
        ]

        def expression(builder: Any, problem: ConvProblem = problem, function: Any = function) -> Any:
            return function(
                grad,  # noqa: B023 - called before the loop goes on
                weight,  # noqa: B023
                strides=list(problem.strides),
                padding=list(flat_padding(problem.padding)),
                output_padding=hidden,  # noqa: B023
                dilation=list(problem.dilation),
                groups=problem.groups,
                data_layout=data_layout_of(problem.rank),
                kernel_layout="IO" + SPATIAL[problem.rank],
            )

        with forced_forms(forward="composition"):
            machine = quick_machine(module(expression, [grad, weight]))
        transposed = machine["main"](*(tvm.runtime.tensor(arrays[n]) for n in ("grad", "weight"))).numpy()
        (dgrad,) = compute([("backward_data", problem, arrays)])
        np.testing.assert_array_equal(dgrad, transposed, err_msg=problem.descriptor)


def _stock_serves(problem: ConvProblem) -> bool:
    """Stock transposed convolutions want paddings within the kernel's reach."""
    return all(
        max(pair) < effective_kernel(k, d)
        for pair, k, d in zip(problem.padding, problem.kernel, problem.dilation, strict=True)
    )


def test_layouts_are_transposes() -> None:
    """The same numbers in another layout give the same numbers in another layout."""
    for problem in (single(p) for p in random_problems(24, 24) if p.data_layout[1] != "C"):
        plain = problem.with_layouts()
        layouts = {"data": (problem.data_layout, plain.data_layout), "grad": (problem.grad_layout, plain.grad_layout)}
        layouts["weight"] = (problem.kernel_layout, plain.kernel_layout)
        arrays = numbers(plain)
        moved = {
            name: np.ascontiguousarray(array.transpose([layouts[name][1].index(a) for a in layouts[name][0]]))
            for name, array in arrays.items()
        }
        directions = ("backward_weight", "backward_data")
        found = compute(
            [(direction, problem, moved) for direction in directions]
            + [(direction, plain, arrays) for direction in directions]
        )
        for direction, in_layout, in_plain in zip(directions, found[:2], found[2:], strict=True):
            source, target = layouts[DIRECTIONS[direction].result]
            np.testing.assert_array_equal(
                in_layout.transpose([source.index(a) for a in target]), in_plain, err_msg=problem.descriptor
            )
