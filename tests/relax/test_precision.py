# SPDX-License-Identifier: Apache-2.0
"""Element types: float32 accumulation of 16-bit operands, mixed operands, result types, ToMixedPrecision."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.single_run import quick_machine
from tests.relax.programs import call, module, tensor
from tvm_convgrad import evaluate
from tvm_convgrad.core import reference
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import evaluate_problem
from tvm_convgrad.verify.operators import check_problems, random_problems

LONG = ConvProblem.from_descriptor("mb8ic2ih56oc2kh1")  # wgrad sums 8 * 56 * 56 = 25,088 products


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("impl", ["kernel", "composition:swapped", "composition:tiled"])
def test_long_sums_of_half_precision(dtype: str, impl: str) -> None:
    """25,088 positive terms: accumulated in float16 the result is off by half; ours stays within 2e-3 (float16).

    bfloat16 results are off by their own rounding, 2^-9, at most.
    """
    problem = LONG.with_dtypes(dtype, dtype, dtype)
    rng = np.random.default_rng(0)
    grad = (rng.random(problem.grad_shape) * 0.5).astype(numpy_dtype(dtype))
    data = (rng.random(problem.data_shape) * 0.5).astype(numpy_dtype(dtype))
    found = evaluate_problem("backward_weight", problem, grad, data, impl=impl).astype("float64")
    want = reference.backward_weight(problem, grad, data)
    error = np.abs(found / want - 1).max()
    assert want.min() > 1000
    assert error < (2e-3 if dtype == "float16" else 2.0**-8)
    # The same sum in float32 results shows the accumulator alone: n * 2^-24 at the very most, far less in practice.
    wide = problem.with_dtypes(dtype, "float32", dtype)
    found = evaluate_problem("backward_weight", wide, grad, data, impl=impl).astype("float64")
    assert np.abs(found / want - 1).max() < 1e-4


def test_a_sum_beyond_float16_is_right_when_the_result_is_wide() -> None:
    """4096 + 1 + 1 + … is 4096 for ever in float16; 25,088 ones are counted exactly by a float32 accumulator."""
    problem = LONG.with_dtypes("float16", "float32", "float16")
    ones = np.ones(problem.grad_shape, "float16"), np.ones(problem.data_shape, "float16")
    assert (evaluate_problem("backward_weight", problem, *ones) == 25088).all()


@pytest.mark.parametrize("grad", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("other", ["float16", "bfloat16", "float32", "float64"])
def test_every_pair_of_operand_types(grad: str, other: str) -> None:
    problem = ConvProblem.from_descriptor("g2mb2ic4ih5iw4oc6kh3kw2sh2sw1ph1pw0")
    problem = problem.with_dtypes(other, other, grad)
    assert [
        v for v in check_problems([problem], directions=("backward_weight", "backward_data")) if v.status != "right"
    ] == []


def test_result_type_of_evaluate() -> None:
    rng = np.random.default_rng(0)
    grad = rng.integers(-3, 4, (2, 4, 3)).astype(ml_dtypes.bfloat16)
    data = rng.integers(-3, 4, (2, 2, 5)).astype("float16")
    attributes: dict[str, Any] = {"kernel_size": 3}
    assert evaluate("conv1d_backward_weight", grad, data, **attributes).dtype == "float32"
    assert evaluate("conv1d_backward_weight", grad, data, out_dtype="float64", **attributes).dtype == "float64"
    found = evaluate("conv1d_backward_weight", grad, data, out_dtype="bfloat16", **attributes)
    assert found.dtype == ml_dtypes.bfloat16
    problem = ConvProblem(2, 2, 4, (5,), (3,), data_dtype="float16", grad_dtype="bfloat16")
    np.testing.assert_array_equal(found.astype("float64"), reference.backward_weight(problem, grad, data))


def dtypes_of_calls(mod: Any) -> dict[str, tuple[list[str], str]]:
    found = {}

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and "backward" in expr.op.name:
            found[str(expr.op.name)] = ([str(a.ty.dtype) for a in expr.args[:2]], str(expr.ty.dtype))

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def test_mixed_precision_pass() -> None:
    """ToMixedPrecision casts the operands down and keeps the sum's type; the program equals float64 exactly."""
    problem = ConvProblem.from_descriptor("mb2ic3ih6iw5oc4kh3kw3ph1pw1")
    grad, data, weight = (tensor(name, *problem.tensors[name]) for name in ("grad", "data", "weight"))

    def expression(builder: Any) -> Any:
        dw = builder.emit(call("conv2d_backward_weight", grad, data, kernel_size=3, padding=1))
        dx = builder.emit(call("conv2d_backward_data", grad, weight, data_shape=problem.data_shape, padding=1))
        return relax.Tuple([dw, dx])

    mod = module(expression, [grad, data, weight])
    mixed = relax.transform.ToMixedPrecision(out_dtype="float32")(mod)
    calls = dtypes_of_calls(mixed)
    assert set(calls) == {"relax.nn.conv2d_backward_weight", "relax.nn.conv2d_backward_data"}
    assert all(operands == ["float16", "float16"] for operands, _ in calls.values())
    assert all(result == "float32" for _, result in calls.values())
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(-3, 4, shape).astype("float32") for name, (shape, _) in problem.tensors.items()}
    machine = quick_machine(mixed)
    result = machine["main"](*(tvm.runtime.tensor(arrays[name]) for name in ("grad", "data", "weight")))
    want = reference.backward_weight(problem, arrays["grad"], arrays["data"])
    np.testing.assert_array_equal(result[0].numpy(), want)
    np.testing.assert_array_equal(result[1].numpy(), reference.backward_data(problem, arrays["grad"], arrays["weight"]))


def test_gradient_after_mixed_precision_feeds_mixed_operands() -> None:
    """The upstream gradient of a cast convolution is float32 beside float16 operands; parameters keep types."""
    problem = ConvProblem.from_descriptor("mb2ic3ih6iw5oc4kh3kw3ph1pw1")
    x, w = (tensor(name, *problem.tensors[name]) for name in ("data", "weight"))
    upstream = tensor("upstream", problem.grad_shape)

    def expression(builder: Any) -> Any:
        y = builder.emit(relax.op.nn.conv2d(x, w, padding=[1, 1, 1, 1]))
        return relax.op.sum(relax.op.multiply(y, upstream))

    mod = relax.transform.ToMixedPrecision(out_dtype="float32")(module(expression, [x, w, upstream]))
    mod = relax.transform.Gradient("main", require_grads=list(mod["main"].params[:2]))(mod)
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(-3, 4, shape).astype("float32") for name, (shape, _) in problem.tensors.items()}
    machine = quick_machine(mod)
    order = ("data", "weight", "grad")
    gradients = machine["main_adjoint"](*(tvm.runtime.tensor(arrays[name]) for name in order))[1]
    for found, want in zip(
        gradients,
        (
            reference.backward_data(problem, arrays["grad"], arrays["weight"]),
            reference.backward_weight(problem, arrays["grad"], arrays["data"]),
        ),
        strict=True,
    ):
        assert str(found.dtype) == "float32"
        np.testing.assert_array_equal(found.numpy(), want)


def test_mixed_types_of_random_problems() -> None:
    """Random problems whose three tensors have three types."""
    drawn = [p for p in random_problems(400, 11) if len({p.data_dtype, p.kernel_dtype, p.grad_dtype}) == 3][:20]
    assert len(drawn) == 20
    assert [
        v for v in check_problems(drawn, directions=("backward_weight", "backward_data")) if v.status != "right"
    ] == []
