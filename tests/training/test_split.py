# SPDX-License-Identifier: Apache-2.0
"""The step in two gives the bits of the whole one; the flat buffer has each gradient where its layout says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.linked import linked, quick_step
from tests.training.harness import relative_error
from tests.training.small_models import Reference, data, relax_module, weights
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.flat import ALIGNMENT, FlatLayout
from tvm_convgrad.training.compile.lower import compile_step
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.model.trained_part import train_only
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.verify.bulk import native_target

BATCH = 4


def tensor(array: Any) -> Any:
    return tvm.runtime.tensor(np.asarray(array, order="C"))


class Both:
    """The same step, whole and in two, each with its own state."""

    def __init__(self, step: Any, machine: Any) -> None:
        self.module, self.machine = step, machine
        self.whole, self.halves = machine["init"](), machine["init"]()

    def gradients(self, *arrays: Any) -> tuple[Any, Any, np.ndarray[Any, Any]]:
        """The first half; the running statistics move."""
        loss, predictions, flat, moved = self.machine["gradients"](*map(tensor, arrays), self.halves)
        fresh = iter(moved)
        roles = [schema.role for schema in self.module.state]
        pairs = zip(roles, self.halves, strict=True)
        self.halves = tuple(next(fresh) if role == "running_stat" else old for role, old in pairs)
        return loss, predictions, flat.numpy()

    def compare(self, number: int) -> None:
        """The states after a step are equal bit for bit."""
        for schema, one, other in zip(self.module.state, self.whole, self.halves, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=f"{schema.name}, step {number}")

    def check(self, steps: int, batch: int, rate: float = 0.1) -> None:
        """Losses, predictions and state of both are equal bit for bit, whatever NaN is in the memory before."""
        for number in range(steps):
            x, labels = data(batch, seed=number)
            loss, predictions, self.whole = self.machine["step"](
                tensor(x), tensor(labels), tensor(np.float32(rate)), self.whole
            )
            other_loss, other_predictions, flat = self.gradients(x, labels)
            self.halves = self.machine["apply"](tensor(flat), tensor(np.float32(rate)), self.halves)
            np.testing.assert_array_equal(loss.numpy(), other_loss.numpy())
            np.testing.assert_array_equal(predictions.numpy(), other_predictions.numpy())
            self.compare(number)
            layout = self.module.flat
            between = np.ones(layout.size, bool)
            for entry in layout.entries:
                assert entry.offset % ALIGNMENT == 0
                between[entry.offset : entry.offset + entry.size] = False
            assert not flat[between].any()
            loss, predictions = self.machine["evaluate"](tensor(x), tensor(labels), self.halves)
            np.testing.assert_array_equal(predictions.numpy(), self.machine["predict"](tensor(x), self.halves).numpy())


MOMENTUM = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}
CASES: list[tuple[dict[str, Any], float]] = [
    ({"momentum": 0.9}, 0.0),
    ({"momentum": 0.9, "dtype": "float16"}, 0.0),
    ({"momentum": 0.9, "loss_scale": "dynamic", "layout": "NHWC:OHWI"}, 0.0),
    (MOMENTUM | {"nesterov": True}, 0.3),
    (MOMENTUM | {"clip_norm": 0.05, "accumulate": 3}, 0.3),
    (MOMENTUM | {"dtype": "float16", "clip_norm": 0.05, "accumulate": 2, "results": "operands"}, 0.0),
    ({"optimizer": "adam", "weight_decay": 0.2, "clip_value": 0.01, "layout": "NHWC:OHWI"}, 0.0),
    ({"optimizer": "adamw", "dtype": "bfloat16", "bn": "frozen", "decayed": "matrices"}, 0.3),
    ({"optimizer": "adamw", "accumulate": 3, "dropout_mode": "off"}, 0.3),
]


@pytest.mark.parametrize(("options", "dropout"), CASES, ids=str)
def test_halves_equal_the_whole(options: dict[str, Any], dropout: float) -> None:
    """On this machine's target, whose compiler contracts products and sums where they are in one kernel."""
    step = build_step(from_module(relax_module(BATCH, dropout), parameters=weights()), split=True, **options)
    both = Both(step, linked(compile_step(step, native_target())))
    both.check(3, BATCH * int(options.get("accumulate", 1)))


def odd_model(batch: Any) -> Any:
    """Two parameters of one gradient, a product of two large ones, a large matrix, a sum's reshape."""
    shapes = {
        "one": (300,),
        "other": (300,),
        "factor": (256, 300),
        "base": (256, 300),
        "matrix": (300, 300),
        "scale": (300,),
        "frozen": (300,),
        "out": (300, 5),
    }
    random = np.random.default_rng(0)
    values = {name: random.normal(0, 0.05, shape).astype("float32") for name, shape in shapes.items()}
    extent = tvm.tirx.Var(batch, "int64") if isinstance(batch, str) else batch
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((extent, 256), "float32"))
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            h = relax.op.matmul(x, builder.emit(relax.op.multiply(p["factor"], p["base"])))
            h = builder.emit(relax.op.add(builder.emit(h), builder.emit(relax.op.add(p["one"], p["other"]))))
            h = builder.emit(relax.op.matmul(builder.emit(relax.op.tanh(h)), p["matrix"]))
            h = builder.emit(relax.op.multiply(h, builder.emit(relax.op.add(p["scale"], p["frozen"]))))
            output = builder.emit_output(relax.op.matmul(builder.emit(relax.op.nn.relu(h)), p["out"]))
        builder.emit_func_output(output)
    return train_only(from_module(builder.get(), parameters=values), ["[!f]*", "factor"]), values


def test_a_parameter_whose_square_the_model_has_too() -> None:
    """LAMB's norm of it is no part of the model's, which is another kernel's sum."""
    shapes = {"matrix": (300, 40), "rows": (5, 40)}
    random = np.random.default_rng(0)
    values = {name: random.normal(0, 0.5, shape).astype("float32") for name, shape in shapes.items()}
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((BATCH, 300), "float32"))
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            h = builder.emit(relax.op.tanh(builder.emit(relax.op.matmul(x, p["matrix"]))))
            square = builder.emit(relax.op.multiply(p["rows"], p["rows"]))
            unit = relax.op.divide(p["rows"], relax.op.sqrt(builder.emit(relax.op.sum(square, 1, keepdims=True))))
            output = builder.emit_output(relax.op.matmul(h, relax.op.permute_dims(builder.emit(unit))))
        builder.emit_func_output(output)
    step = build_step(from_module(builder.get(), parameters=values), split=True, optimizer="lamb")
    both = Both(step, linked(compile_step(step, native_target())))
    x, labels = random.normal(0, 1, (BATCH, 300)).astype("float32"), random.integers(0, 5, BATCH)
    for number in range(3):
        *_, both.whole = both.machine["step"](tensor(x), tensor(labels), tensor(np.float32(0.1)), both.whole)
        *_, flat = both.gradients(x, labels)
        both.halves = both.machine["apply"](tensor(flat), tensor(np.float32(0.1)), both.halves)
        both.compare(number)


@pytest.mark.parametrize("batch", [BATCH, "n"])
def test_gradients_without_a_kernel_of_their_own(batch: Any) -> None:
    model, values = odd_model(batch)
    assert list(model.frozen) == ["frozen"]
    step = build_step(model, split=True, **MOMENTUM, clip_norm=0.3)
    both = Both(step, linked(compile_step(step, native_target())))
    random = np.random.default_rng(1)
    before = {name: value.copy() for name, value in values.items()}
    for number in range(2):
        x = random.normal(0, 1, (BATCH, 256)).astype("float32")
        labels = random.integers(0, 5, BATCH)
        loss, _, both.whole = both.machine["step"](tensor(x), tensor(labels), tensor(np.float32(0.1)), both.whole)
        other, _, flat = both.gradients(x, labels)
        if number == 0:
            check_odd(step.flat.views(flat), before, x, labels)
        both.halves = both.machine["apply"](tensor(flat), tensor(np.float32(0.1)), both.halves)
        assert float(loss.numpy()) == float(other.numpy())
        both.compare(number)


def check_odd(found: Any, values: Any, x: Any, labels: Any) -> None:
    """Gradients of the odd model against float64."""
    v = {name: value.astype("float64") for name, value in values.items()}
    x = x.astype("float64")
    h = np.tanh(x @ (v["factor"] * v["base"]) + v["one"] + v["other"])
    m, s = h @ v["matrix"], v["scale"] + v["frozen"]
    r = np.maximum(m * s, 0)
    logits = r @ v["out"]
    softmax = np.exp(logits - logits.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    d = (softmax - np.eye(5)[labels]) / len(x)
    dr = (d @ v["out"].T) * (m * s > 0)
    dh = (dr * s) @ v["matrix"].T * (1 - h * h)
    expected = {
        "one": dh.sum(0),
        "other": dh.sum(0),
        "factor": x.T @ dh * v["base"],
        "base": x.T @ dh * v["factor"],
        "matrix": h.T @ (dr * s),
        "scale": (dr * m).sum(0),
        "out": r.T @ d,
    }
    assert list(found) == [name for name in values if name != "frozen"]
    for name, value in expected.items():
        assert relative_error(found[name], value) < 2e-5, name


def test_flat_gradients_are_those_of_the_mean_loss() -> None:
    """Without the factor on the loss, of all micro-batches, against float64; statistics move, and nothing else."""
    step = build_step(from_module(relax_module(BATCH), parameters=weights()), split=True, accumulate=3, loss_scale=64.0)
    both = Both(step, quick_step(step))
    before = [value.numpy().copy() for value in both.halves]
    x, labels = data(3 * BATCH)
    loss, _, flat = both.gradients(x, labels)
    reference, losses, total = Reference(), [], {}
    for rows in (slice(start, start + BATCH) for start in range(0, 3 * BATCH, BATCH)):
        own, gradients, statistics = reference.loss_and_gradients(x[rows], labels[rows])
        losses.append(own)
        total = {key: total.get(key, 0.0) + gradient / 3 for key, gradient in gradients.items()}
        reference.values.update(statistics)
    assert abs(float(loss.numpy()) - np.mean(losses)) < 2e-5
    found = step.flat.views(flat)
    assert set(found) == set(total)
    for name, gradient in total.items():
        size = max(abs(gradient).max(), 1e-3)  # that of the bias before a batch norm is zero
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=5e-5 * size, err_msg=name)
    for schema, old, new in zip(step.state, before, both.halves, strict=True):
        if schema.role == "running_stat":
            assert relative_error(new.numpy(), reference.values[schema.name]) < 5e-5
        else:
            np.testing.assert_array_equal(old, new.numpy(), err_msg=schema.name)


def test_apply_updates_the_state_where_it_lies() -> None:
    step = build_step(from_module(relax_module(BATCH), parameters=weights()), split=True, **MOMENTUM)
    both = Both(step, linked(compile_step(step, native_target())))
    places = [np.from_dlpack(value).ctypes.data for value in both.halves]
    flat = np.ones(step.flat.size, "float32")
    kept = flat.copy()
    both.halves = both.machine["apply"](tensor(flat), tensor(np.float32(0.1)), both.halves)
    np.testing.assert_array_equal(flat, kept)
    assert [np.from_dlpack(value).ctypes.data for value in both.halves] == places


def test_evaluate_gives_the_loss_of_predictions() -> None:
    """With running statistics and without dropout, which the loss of a step has not."""
    step = build_step(from_module(relax_module(BATCH, 0.5), parameters=weights()), split=True, accumulate=2)
    both = Both(step, quick_step(step))
    x, labels = data(2 * BATCH)
    loss, predictions = (each.numpy() for each in both.machine["evaluate"](tensor(x), tensor(labels), both.halves))
    logits = predictions.astype("float64")
    shifted = logits - logits.max(1, keepdims=True)
    expected = -(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))[np.arange(len(x)), labels].mean()
    assert abs(float(loss) - expected) < 1e-5


def test_a_parameter_of_another_type_is_refused() -> None:
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((4, 4), "float64")) for name in "xw")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(output)
    model = from_module(builder.get(), parameters={"w": np.eye(4)})
    assert build_step(model, loss="mse").flat is None
    with pytest.raises(UnsupportedError, match=r"one float32 buffer, but 'w' of .* is float64; convert the model"):
        build_step(model, loss="mse", split=True)


def test_the_layout_survives_its_manifest() -> None:
    layout = FlatLayout.of([("a", (3, 5)), ("scalar", ()), ("b", (16,)), ("empty", (0, 4)), ("c", (17,))])
    assert [entry.offset for entry in layout.entries] == [0, 16, 32, 48, 48]
    assert layout.size == 80
    assert FlatLayout.from_json(layout.to_json()) == layout
    buffer = np.arange(80, dtype="float32")
    views = layout.views(buffer)
    assert [view.shape for view in views.values()] == [(3, 5), (), (16,), (0, 4), (17,)]
    views["c"][:] = -1
    assert (buffer[48:65] == -1).all()
    assert buffer[65] == 65
