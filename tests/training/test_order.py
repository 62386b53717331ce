# SPDX-License-Identifier: Apache-2.0
"""The order of calls: weight gradients come where their operands are, and nothing is overwritten before it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te, topi

from relax_ops.active import rules
from tests.linked import PLAIN
from tests.training.harness import Runner, relative_error
from tests.training.test_lower import SHAPES, model
from tvm_convgrad.training.compile.lower import ordered, simplified
from tvm_convgrad.training.ir.graph import bindings_of
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.passes.in_place import overwriting
from tvm_convgrad.training.passes.order import OrderCalls, ReadersFirst
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


def overwritten_early(name: str, passed: Any) -> list[str]:
    """The operators of a function, behind a pass, whose call in place stands before a reader of what it overwrites."""
    square = relax.TensorType((N, N), "float32")
    x, y = relax.Var("x", square), relax.Var("y", square)
    own, acc = (te.placeholder((N, N), "float32", name) for name in ("own", "acc"))
    builder = relax.BlockBuilder()
    with builder.function(name, [x, y]):
        with builder.dataflow():
            summand = builder.emit(relax.op.exp(x))
            view = builder.emit(relax.op.reshape(summand, [N * N]))
            made = overwriting(builder, te.create_prim_func([own, acc, topi.add(own, acc)]), "add", 1)
            total = builder.emit(made.call([y, summand], square))
            after = builder.emit(relax.op.cos(total))
            late, viewed = builder.emit(relax.op.sin(summand)), builder.emit(relax.op.tan(view))
            output = builder.emit_output(relax.Tuple([late, viewed, after]))
        builder.emit_func_output(output)
    values = [binding.value for binding in bindings_of(passed(builder.get())[name])]
    found = [value.op.name.removeprefix("relax.") for value in values if isinstance(value, tvm.ir.Call)]
    assert sorted(found) == sorted(["exp", "reshape", "call_tir_inplace", "cos", "sin", "tan"])
    return found


@pytest.mark.parametrize(
    ("name", "make"),
    [("step", OrderCalls), ("predict", OrderCalls), ("step", ReadersFirst)],
    ids=["step", "predict", "step on a GPU"],
)
def test_what_is_overwritten_was_read_before(name: str, make: Any) -> None:
    found = overwritten_early(name, make())
    assert max(found.index("sin"), found.index("tan")) < found.index("call_tir_inplace") < found.index("cos")


def test_what_is_overwritten_in_a_later_block_was_read_before() -> None:
    """What is behind a call with effects is a block of its own, and reads what earlier blocks have made."""
    square = relax.TensorType((N, N), "float32")
    x, y = relax.Var("x", square), relax.Var("y", square)
    own, acc = (te.placeholder((N, N), "float32", name) for name in ("own", "acc"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y], pure=False):
        with builder.dataflow():
            summand = builder.emit_output(relax.op.exp(x))
        builder.emit(relax.op.print(y, format="{}"))
        builder.emit(relax.op.print(x, format="{}"))
        with builder.dataflow():
            made = overwriting(builder, te.create_prim_func([own, acc, topi.add(own, acc)]), "add", 1)
            total = builder.emit_output(made.call([y, summand], square))
            late = builder.emit_output(relax.op.sin(summand))
            after = builder.emit_output(relax.op.cos(total))
        builder.emit_func_output(relax.Tuple([late, after]))
    before = builder.get()["main"].body.blocks
    blocks = ReadersFirst()(builder.get())["main"].body.blocks
    assert [type(block) for block in blocks] == [type(block) for block in before]
    assert [list(block.bindings) for block in blocks[:2]] == [list(block.bindings) for block in before[:2]]
    assert [binding.var for binding in blocks[2].bindings] == [late, total, after]


@pytest.mark.parametrize("parameters", [1, 0])
def test_a_reader_behind_the_block_of_a_call_in_place_stays_there(parameters: int) -> None:
    """It is meant to read what was written; the function may have no parameters, and so no state."""
    square = relax.TensorType((N, N), "float32")
    inputs = [relax.Var("x", square)][:parameters]
    own, acc = (te.placeholder((N, N), "float32", name) for name in ("own", "acc"))
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            summand = builder.emit_output(relax.op.ones((N, N), "float32"))
            other = builder.emit_output(relax.op.exp(inputs[0] if inputs else summand))
        made = overwriting(builder, te.create_prim_func([own, acc, topi.add(own, acc)]), "add", 1)
        total = builder.emit(made.call([other, summand], square))
        late = builder.emit(relax.op.sin(summand))
        builder.emit_func_output(relax.Tuple([total, late]))
    wanted = [binding.var for binding in bindings_of(builder.get()["main"])]
    found = [binding.var for binding in bindings_of(ReadersFirst()(builder.get())["main"])]
    assert found == wanted


def test_fusion_leaves_what_another_convolution_reads(monkeypatch: Any) -> None:
    """FuseOps calls the sum in place for gelu and tanh, before the third convolution has read what is overwritten."""
    rng = np.random.default_rng(8)
    weights = {f"w{i}": rng.standard_normal((4, 4, 3, 3), "float32") / 4 for i in range(4)}
    x = relax.Var("x", relax.TensorType((2, 4, 6, 6), "float32"))
    p = [relax.Var(name, relax.TensorType(value.shape, "float32")) for name, value in weights.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, *p]):
        with builder.dataflow():
            first = builder.emit(relax.op.nn.gelu(builder.emit(relax.op.nn.conv2d(x, p[0], padding=1))))
            summand = builder.emit(relax.op.nn.conv2d(x, p[1], padding=1))
            read = builder.emit(relax.op.nn.conv2d(summand, p[2], padding=1))
            total = builder.emit(relax.op.add(summand, builder.emit(relax.op.nn.conv2d(x, p[3], padding=1))))
            mixed = builder.emit(relax.op.tanh(builder.emit(relax.op.add(first, total))))
            both = builder.emit(relax.op.concat([mixed, read], axis=1))
            output = builder.emit_output(relax.op.mean(both, [2, 3]))
        builder.emit_func_output(output)
    step = build_step(from_module(builder.get(), parameters=weights), momentum=0.9, lr=0.1, split=True)
    images, labels = rng.standard_normal((2, 4, 6, 6), "float32"), np.array([1, 5])
    fused = Runner(step)
    assert any("call_tir_inplace" in line for line in lines_before_memory(step))
    nothing = tvm.transform.module_pass(lambda module, _: module, opt_level=0, name="Nothing")
    monkeypatch.setattr("tvm_convgrad.training.compile.lower.FuseEpilogues", lambda: nothing)
    plain = Runner(step)
    assert relative_error(fused.predict(images), plain.predict(images)) < 1e-6
    losses = [[runner.step(images, labels, lr=0.1)[0] for _ in range(3)] for runner in (fused, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for name, value in plain.named().items():
        assert relative_error(fused.named()[name], value) < 1e-4, name


def lines_before_memory(step: Any) -> list[str]:
    """The function `predict` as its kernels are called, before it is given memory."""
    target = tvm.target.Target(PLAIN)
    with rules():
        module, _ = ordered(simplified(step.module), target)
    return str(module["predict"].script()).splitlines()


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
