# SPDX-License-Identifier: Apache-2.0
"""The order of calls: weight gradients come where their operands are, and nothing is overwritten before it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from tests.training.harness import Runner
from tests.training.test_lower import SHAPES, model
from tvm_convgrad.training.ir.graph import bindings_of
from tvm_convgrad.training.passes.order import OrderCalls
from tvm_convgrad.training.step.build import build_step

N = 64


def step_of(body: Any) -> Any:
    """A module whose `step` takes x and the state (w, v), both N x N."""
    square = relax.TensorType((N, N), "float32")
    x, state = relax.Var("x", square), relax.Var("state", relax.TupleType([square, square]))
    builder = relax.BlockBuilder()
    with builder.function("step", [x, state]):
        with builder.dataflow():
            items = [builder.emit(relax.TupleGetItem(state, i)) for i in range(2)]
            output = builder.emit_output(body(builder, x, *items))
        builder.emit_func_output(output)
    return builder.get()


def operators(module: Any) -> list[str]:
    values = [binding.value for binding in bindings_of(OrderCalls()(module)["step"])]
    return [value.op.name.removeprefix("relax.") for value in values if isinstance(value, tvm.ir.Call)]


def test_the_last_reader_of_much_comes_at_once() -> None:
    def body(builder: Any, x: Any, w: Any, v: Any) -> Any:
        large = builder.emit(relax.op.exp(x))
        onwards = builder.emit(relax.op.sin(large))
        for _ in range(3):
            onwards = builder.emit(relax.op.cos(onwards))
        small = builder.emit(relax.op.sum(large))
        return relax.Tuple([small, onwards, relax.Tuple([w, v])])

    assert operators(step_of(body)) == ["exp", "sin", "sum", "cos", "cos", "cos"]


def test_a_new_parameter_waits_for_the_readers_of_the_old_one() -> None:
    def body(builder: Any, x: Any, w: Any, v: Any) -> Any:
        gradient = builder.emit(relax.op.exp(x))
        update = builder.emit(relax.op.subtract(w, gradient))
        loss = builder.emit(relax.op.sum(builder.emit(relax.op.matmul(x, v))))
        later = builder.emit(relax.op.sin(w))
        return relax.Tuple([loss, builder.emit(relax.op.sum(later)), relax.Tuple([update, v])])

    found = operators(step_of(body))
    assert sorted(found) == sorted(["exp", "subtract", "matmul", "sum", "sin", "sum"])
    assert found.index("exp") < found.index("subtract")
    assert found.index("sin") < found.index("subtract")  # though it stands behind it

    def read_before(builder: Any, x: Any, w: Any, v: Any) -> Any:
        gradient = builder.emit(relax.op.exp(x))
        loss = builder.emit(relax.op.matmul(x, w))
        update = builder.emit(relax.op.subtract(w, gradient))
        return relax.Tuple([builder.emit(relax.op.sum(loss)), x, relax.Tuple([update, v])])

    found = operators(step_of(read_before))
    assert found.index("matmul") < found.index("subtract")


def test_a_reader_of_the_new_parameter_follows_it() -> None:
    """Even if it reads the old one, too."""

    def body(builder: Any, x: Any, w: Any, v: Any) -> Any:
        update = builder.emit(relax.op.subtract(w, builder.emit(relax.op.exp(x))))
        change = builder.emit(relax.op.divide(update, w))
        return relax.Tuple([builder.emit(relax.op.sum(change)), x, relax.Tuple([update, v])])

    assert operators(step_of(body)) == ["exp", "subtract", "divide", "sum"]


def test_a_new_parameter_waits_for_the_readers_of_views_of_the_old_one() -> None:
    def body(builder: Any, x: Any, w: Any, v: Any) -> Any:
        view = builder.emit(relax.op.reshape(w, [N * N]))
        inner = builder.emit(relax.op.expand_dims(view, 0))
        gradients = [builder.emit(op(x)) for op in (relax.op.exp, relax.op.cos)]
        late = builder.emit(relax.op.sin(inner))
        update = builder.emit(relax.op.add(*gradients))
        return relax.Tuple([builder.emit(relax.op.sum(late)), x, relax.Tuple([update, v])])

    found = operators(step_of(body))
    assert found.index("sin") < found.index("add")  # which would free the gradients earlier


def test_a_step_is_the_same_in_either_order(monkeypatch: Any) -> None:
    step = build_step(model(), optimizer="sgd", momentum=0.9, lr=0.1)
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal(SHAPES["x"], "float32"), rng.integers(0, 5, 4)
    one = Runner(step)
    nothing = tvm.transform.module_pass(lambda module, _: module, opt_level=0, name="Nothing")
    monkeypatch.setattr("tvm_convgrad.training.compile.lower.OrderCalls", lambda: nothing)
    other = Runner(step)
    for _ in range(3):
        losses = [runner.step(x, y, lr=0.1)[0] for runner in (one, other)]
        assert losses[0] == losses[1]
    for name, value in one.named().items():
        np.testing.assert_array_equal(value, other.named()[name])
