# SPDX-License-Identifier: Apache-2.0
"""The catalogue: closure of the family, attributes, and the type relation on plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.core.strategies import problems
from tvm_convgrad.core.catalogue import BY_NAME, DIRECTIONS, NEW_OPS
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import (
    ConvAttributes,
    NumberProver,
    TensorSpec,
    infer_backward_data,
    infer_backward_weight,
)

PROVER = NumberProver()


def test_names() -> None:
    assert [entry.name for entry in NEW_OPS] == [
        f"conv{rank}d_backward_{operand}" for rank in (1, 2, 3) for operand in ("weight", "data")
    ]
    assert BY_NAME["conv2d"].direction is DIRECTIONS["forward"]
    assert BY_NAME["conv2d_backward_weight"].attributes[0] == "kernel_size"


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
def test_each_gradient_gives_its_operand_from_the_other_two_tensors(direction: object) -> None:
    for operand, (other_name, operands) in zip(direction.operands, direction.gradients, strict=True):  # type: ignore[attr-defined]
        other = DIRECTIONS[other_name]
        assert other.result == operand
        # `result` stands for the incoming gradient, which has the place of the direction's own result.
        names = tuple(direction.result if name == "result" else name for name in operands)  # type: ignore[attr-defined]
        assert names == other.operands


def attributes_of(problem: ConvProblem, op: str, **changes: object) -> ConvAttributes:
    attributes = ConvAttributes(
        op=op,
        rank=problem.rank,
        strides=problem.strides,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
        grad_layout=problem.grad_layout,
        data_layout=problem.data_layout,
        kernel_layout=problem.kernel_layout,
        kernel_size=problem.kernel if "weight" in op else None,
    )
    return replace(attributes, **changes)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems())
def test_the_type_relation_gives_the_problems_shapes(problem: ConvProblem) -> None:
    spec = {name: TensorSpec(shape, len(shape), dtype) for name, (shape, dtype) in problem.tensors.items()}
    prefix = f"conv{problem.rank}d_backward_"
    weight = infer_backward_weight(attributes_of(problem, prefix + "weight"), spec["grad"], spec["data"], PROVER)
    assert weight.shape == problem.weight_shape
    data = infer_backward_data(
        attributes_of(problem, prefix + "data"), spec["grad"], spec["weight"], problem.data_shape, PROVER
    )
    assert data.shape == problem.data_shape


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems())
def test_an_extent_too_many_is_refused(problem: ConvProblem) -> None:
    """One more element of grad on any axis belongs to no convolution of this data."""
    op = f"conv{problem.rank}d_backward_data"
    weight = TensorSpec(problem.weight_shape, problem.rank + 2, "float32")
    for axis, letter in enumerate(problem.grad_layout):
        shape = list(problem.grad_shape)
        shape[axis] = int(shape[axis]) + 1
        grad = TensorSpec(tuple(shape), len(shape), "float32")
        with pytest.raises(ProblemError, match=f"^{op}: ") as caught:
            infer_backward_data(attributes_of(problem, op), grad, weight, problem.data_shape, PROVER)
        assert {"N": "batch", "C": "channels"}.get(letter, f"axis {letter}") in str(caught.value)


def test_result_dtype() -> None:
    problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3")

    def result(grad: str | None, data: str | None, out_dtype: str | None = None) -> str | None:
        attributes = attributes_of(problem, "conv2d_backward_weight", out_dtype=out_dtype)
        return infer_backward_weight(
            attributes, TensorSpec(problem.grad_shape, 4, grad), TensorSpec(problem.data_shape, 4, data), PROVER
        ).dtype

    assert result("float16", "float16") == "float16"
    assert result("float16", "bfloat16") == "float32"
    assert result("float16", "float32") == "float32"
    assert result("bfloat16", "float64") == "float64"
    assert result("float16", "float16", "float32") == "float32"
    assert result("float32", "float32", "bfloat16") == "bfloat16"
    assert result(None, "float32") is None
    assert result(None, "float32", "float16") == "float16"


def test_unknown_shapes_are_left_open() -> None:
    problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3")
    attributes = attributes_of(problem, "conv2d_backward_weight")
    unknown = TensorSpec(None, 4, "float32")
    assert infer_backward_weight(attributes, unknown, unknown, PROVER) == TensorSpec(None, 4, "float32")
    with pytest.raises(ProblemError, match="grad has 3 axes; layout NCHW has 4"):
        infer_backward_weight(attributes, TensorSpec(None, 3, None), unknown, PROVER)
