# SPDX-License-Identifier: Apache-2.0
"""A step's convolutions with what follows them: one kernel each, and what is reported about them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.lowering import forced_forms
from tests.linked import quick_module
from tests.training.harness import Runner, relative_error
from tvm_convgrad.training.compile.lower import plan_of
from tvm_convgrad.training.model.model import Model, from_module
from tvm_convgrad.training.step.build import build_step

SHAPES = {"x": (4, 12, 9, 7), "w1": (24, 12, 3, 3), "b1": (24,), "w2": (24, 24, 3, 3), "b2": (24,), "last": (5, 24)}


def model() -> Model:
    """conv, bias, relu; conv, bias, sum with what came before, relu; mean over pixels; linear."""
    variables = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in SHAPES.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", list(variables.values())):
        with builder.dataflow():

            def biased(value: relax.Expr, number: int) -> relax.Expr:
                result = builder.emit(relax.op.nn.conv2d(value, variables[f"w{number}"], padding=1))
                bias = builder.emit(relax.op.reshape(variables[f"b{number}"], (1, 24, 1, 1)))
                return builder.emit(relax.op.add(result, bias))

            first = builder.emit(relax.op.nn.relu(biased(variables["x"], 1)))
            second = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(biased(first, 2), first))))
            mean = builder.emit(relax.op.mean(second, [2, 3]))
            output = builder.emit_output(relax.op.matmul(mean, relax.op.permute_dims(variables["last"])))
        builder.emit_func_output(output)
    rng = np.random.default_rng(3)
    values = {name: rng.standard_normal(shape, "float32") * 0.3 for name, shape in SHAPES.items() if name != "x"}
    return from_module(builder.get(), parameters=values)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_bias_and_relu_are_part_of_the_kernels(layout: str) -> None:
    step = build_step(model(), optimizer="sgd", lr=0.1, layout=layout)
    plan = plan_of(step)
    fused = [(entry.op, entry.fused) for entry in plan]
    assert fused[:2] == [("conv2d", ("bias", "relu")), ("conv2d", ("bias",))]
    assert [("bias_grad" in names) for op, names in fused if op.endswith("weight")] == [True, True]
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal(SHAPES["x"], "float32"), rng.integers(0, 5, 4)
    one = Runner(step)
    with forced_forms(backward_weight="composition", backward_data="composition", forward="composition"):
        assert not any(entry.fused for entry in plan_of(step))
        other = Runner(step)
    for _ in range(3):
        losses = [runner.step(x, y, lr=0.1)[0] for runner in (one, other)]
        assert relative_error(*losses) < 1e-5
    for name, value in one.named().items():
        assert relative_error(value, other.named()[name]) < 1e-4, name


def test_a_module_that_is_no_step_is_compiled_by_the_same_rules() -> None:
    """TVM lowers no tensor that is full of infinities, and its group norm loses the digits of data far from zero."""
    x = relax.Var("x", relax.TensorType((2, 4, 6, 6), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            ones, zeros = (relax.const(np.full(4, number, "float32")) for number in (1, 0))
            norm = builder.emit(relax.op.nn.group_norm(x, ones, zeros, 2, 1, [2, 3]))
            mask = relax.op.triu(relax.op.full((6, 6), relax.const(-np.inf, "float32"), "float32"), 1)
            output = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.add(norm, builder.emit(mask)))))
        builder.emit_func_output(output)
    value = np.random.default_rng(0).integers(-9, 9, (2, 4, 6, 6)).astype("float32") + 4096
    found = quick_module(builder.get())["main"](tvm.runtime.tensor(value)).numpy()
    groups = value.astype("float64").reshape(2, 2, -1)
    groups = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    powers = np.tril(np.exp(groups.reshape(value.shape)))
    np.testing.assert_allclose(found, powers / powers.sum(3, keepdims=True), rtol=0, atol=2**-20)


def test_predictions_that_are_an_input_are_a_copy() -> None:
    """A function without bindings; its result must not change with the caller's tensor."""
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("predict", [x]):
        builder.emit_func_output(x)
    value = np.arange(6, dtype="float32").reshape(2, 3)
    given = tvm.runtime.tensor(value)
    found = quick_module(builder.get())["predict"](given)
    given.copyfrom(np.zeros_like(value))
    np.testing.assert_array_equal(found.numpy(), value)
