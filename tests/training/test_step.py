# SPDX-License-Identifier: Apache-2.0
"""The training step on a small network against hand-written gradients in float64; needs no PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.threads import run_with_threads
from tests.training.harness import Runner, relative_error
from tests.training.small_models import Reference, data, onnx_model, relax_module, weights
from tvm_convgrad import ConvProblem
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.compile.lower import plan_of
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step


def small(batch="n", **options):
    return from_module(relax_module(batch, **options), parameters=weights())


def reference_update(name, settings, step, parameter, gradient, slots, lr):
    """The update rules of torch.optim's documentation, in float64."""
    decay = settings.get("weight_decay", 0.0)
    if name == "sgd":
        gradient = gradient + decay * parameter
        momentum = settings.get("momentum", 0.0)
        if momentum:
            slots["buffer"] = momentum * slots.get("buffer", 0.0) + gradient
            gradient = gradient + momentum * slots["buffer"] if settings.get("nesterov") else slots["buffer"]
        return parameter - lr * gradient
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    if name == "adamw":
        parameter = parameter * (1 - lr * decay)
    else:
        gradient = gradient + decay * parameter
    slots["m"] = beta1 * slots.get("m", 0.0) + (1 - beta1) * gradient
    slots["v"] = beta2 * slots.get("v", 0.0) + (1 - beta2) * gradient**2
    m, v = slots["m"] / (1 - beta1**step), slots["v"] / (1 - beta2**step)
    return parameter - lr * m / (np.sqrt(v) + settings.get("eps", 1e-8))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
        ("sgd", {"momentum": 0.8, "nesterov": True}),
        ("adam", {"weight_decay": 0.02, "betas": (0.8, 0.95), "eps": 1e-4}),
        ("adamw", {"weight_decay": 0.1, "eps": 1e-4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_optimizers_over_several_steps(name, settings):
    runner = Runner(build_step(small(), optimizer=name, lr=0.05, **settings), "native" if name == "adamw" else None)
    reference = Reference()
    slots = {}
    for number in range(1, 6):
        x, labels = data(8, seed=number)
        lr = 0.05 / number  # a schedule: the rate is an argument of the step
        loss, _ = runner.step(x, labels, lr=lr)
        expected, gradients, statistics = reference.loss_and_gradients(x, labels)
        assert abs(loss - expected) < 2e-5
        noise = runner.named("parameter")["conv_bias"]
        for key, gradient in gradients.items():
            own = slots.setdefault(key, {})
            reference.values[key] = reference_update(name, settings, number, reference.values[key], gradient, own, lr)
        reference.values.update(statistics)
        if name != "sgd":
            # The gradient of conv_bias is zero before a batch norm, so Adam divides noise by noise there; that bias is
            # in the running mean, which then must be that of the step's own bias.
            assert abs(noise - reference.values["conv_bias"]).max() < 2.1 * lr
            reference.values["conv_bias"] = noise.astype("float64")
    for key, value in runner.named("parameter", "running_stat").items():
        assert relative_error(value, reference.values[key]) < 5e-5, key


def test_fixed_and_symbolic_batch_agree():
    runners = [Runner(build_step(small(batch), momentum=0.9)) for batch in (8, "n")]
    x, labels = data(8)
    for _ in range(3):
        losses = [runner.step(x, labels, lr=0.1)[0] for runner in runners]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    fixed, symbolic = (runner.named() for runner in runners)
    assert (
        max(relative_error(symbolic[key], value) for key, value in fixed.items() if key != "conv_bias.momentum") < 1e-4
    )
    # The symbolic one takes any batch.
    other, other_labels = data(3, seed=5)
    assert runners[1].step(other, other_labels, lr=0.0)[1].shape == (3, 5)


@pytest.mark.parametrize("results", ["float32", "operands"])
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 4e-3), ("bfloat16", 5e-2)])
def test_half_precision_stays_near_float32(dtype, bound, results):
    x, labels = data(8)
    exact, gradients, _ = Reference().loss_and_gradients(x, labels)
    step = build_step(small(8), lr=1.0, dtype=dtype, results=results)
    assert all(schema.dtype == "float32" for schema in step.state)
    stored = {entry.problem.tensors[DIRECTIONS[entry.direction].result][1] for entry in plan_of(step)}
    assert stored == {"float32" if results == "float32" else dtype}
    assert dtype in step.module["step"].script(show_meta=False)
    runner = Runner(step)
    loss, _ = runner.step(x, labels, lr=1.0)
    assert abs(loss - exact) < bound
    after = runner.named("parameter")
    for key, gradient in gradients.items():
        if key != "conv_bias":  # zero in exact arithmetic
            assert relative_error(weights()[key] - after[key], gradient) < 2 * bound, key


def test_predict_uses_running_statistics_and_no_dropout():
    runner = Runner(build_step(small("n", dropout=0.5), seed=3))
    x, _ = data(4)
    values = weights()
    reference = Reference(values)
    # Evaluate by hand: batch norm with running statistics is an affine map of each channel.
    padded = np.pad(x.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    v = reference.values
    conv = np.einsum("nchwij,ocij->nohw", windows, v["conv_weight"]) + v["conv_bias"][:, None, None]
    scale = v["bn_weight"] / np.sqrt(v["bn_var"] + 1e-5)
    normed = (conv - v["bn_mean"][:, None, None]) * scale[:, None, None] + v["bn_bias"][:, None, None]
    expected = np.maximum(normed, 0).mean((2, 3)) @ v["fc_weight"].T + v["fc_bias"]
    assert relative_error(runner.predict(x), expected) < 1e-5


def test_dropout_is_real_seeded_and_changes_with_the_step():
    x, labels = data(64)
    step = build_step(small("n", dropout=0.5), lr=0.0, seed=7)
    assert step.state[-1].role == "counter"
    first, second = Runner(step), Runner(build_step(small("n", dropout=0.5), lr=0.0, seed=8))
    losses = [first.step(x, labels, lr=0.0)[0] for _ in range(3)]
    assert len(set(losses)) == 3
    first.reset()
    assert [first.step(x, labels, lr=0.0)[0] for _ in range(3)] == losses
    assert second.step(x, labels, lr=0.0)[0] != losses[0]
    without = Runner(build_step(small("n", dropout=0.5), lr=0.0, dropout_mode="off"))
    exact, _, _ = Reference().loss_and_gradients(x, labels)
    assert without.step(x, labels, lr=0.0)[0] == pytest.approx(exact, rel=1e-5)


def test_frozen_batch_norm_keeps_its_statistics():
    runner = Runner(build_step(small(), bn="frozen", lr=0.1))
    before = runner.named("running_stat")
    x, labels = data(8)
    loss, predictions = runner.step(x, labels, lr=0.1)
    assert math.isfinite(loss)
    assert all((value == before[key]).all() for key, value in runner.named("running_stat").items())
    fresh = Runner(build_step(small(), bn="frozen"))
    assert relative_error(predictions, fresh.predict(x)) < 1e-6


def test_mean_squared_error():
    runner = Runner(build_step(small(), loss="mse", lr=0.0))
    x, _ = data(4)
    target = np.random.default_rng(2).standard_normal((4, 5)).astype("float32")
    loss, predictions = runner.step(x, target, lr=0.0)
    assert loss == pytest.approx(float(((predictions - target) ** 2).mean()), rel=1e-5)


def with_cast(cast):
    """x @ w, cast to another type of itself, relu, @ v."""
    x, w, v = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", (4, 6)), ("w", (6, 6)), ("v", (6, 5))))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, v]):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, w))
            y = y if cast is None else builder.match_cast(y, cast)
            output = builder.emit_output(relax.op.matmul(relax.op.nn.relu(y), v))
        builder.emit_func_output(output)
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype("float32") for name, shape in (("w", (6, 6)), ("v", (6, 5)))}
    return from_module(builder.get(), parameters=values)


def test_gradients_pass_through_match_cast():
    results = []
    for cast in (None, relax.TensorType((4, 6), "float32")):
        runner = Runner(build_step(with_cast(cast), lr=1.0))
        x = np.random.default_rng(1).standard_normal((4, 6)).astype("float32")
        losses = [runner.step(x, np.arange(4), lr=1.0)[0] for _ in range(3)]
        results.append((losses, {name: value.tobytes() for name, value in runner.named("parameter").items()}))
    assert results[0] == results[1]
    assert results[0][0][2] < results[0][0][0]
    with pytest.raises(ModelError, match="extents are unknown"):
        build_step(with_cast(relax.TensorType(None, "float32", ndim=2)))


def test_onnx_network_equals_the_reference(tmp_path):
    pytest.importorskip("onnx")
    path = tmp_path / "small.onnx"
    onnx_model(path, momentum=0.8)  # running = 0.8 * running + 0.2 * batch
    model = load_model(path)
    assert set(model.states) == {"bn_mean", "bn_var"}
    assert model.inputs[0].shape == ("n", 2, 7, 6)
    runner = Runner(build_step(model, lr=1.0), "native")
    x, labels = data(8)
    loss, _ = runner.step(x, labels, lr=1.0)
    expected, gradients, statistics = Reference(momentum=0.2).loss_and_gradients(x, labels)
    assert abs(loss - expected) < 1e-5
    for key, value in runner.named("running_stat").items():
        assert relative_error(value, statistics[key]) < 1e-5, key
    for key, value in runner.named("parameter").items():
        assert np.abs((weights()[key] - value) - gradients[key]).max() < 1e-5, key


PROGRAM = """
from tests.threads import check_same_bits
from tests.training.test_step import *
runner = Runner(build_step(small(), momentum=0.9))
x, labels = data(64)
def run():
    runner.reset()
    for _ in range(3):
        runner.step(x, labels, lr=0.1)
    return runner.named().values()
check_same_bits(run)
"""


def test_thread_count_does_not_change_results():
    run_with_threads(PROGRAM, checks=1)


def test_gradients_are_listed_by_descriptor():
    step = build_step(small(8))
    assert [name for name, _ in step.gradients] == ["conv2d_backward_weight"]  # nobody wants that of x
    problem = ConvProblem.from_descriptor(step.gradients[0][1])
    assert (problem.batch, problem.in_channels, problem.out_channels) == (8, 2, 6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss": "hinge"}, "loss = 'hinge' is unknown"),
        ({"optimizer": "lion"}, "optimizer = 'lion' is unknown"),
        ({"optimizer": "adam", "momentum": 0.9}, "adam has no setting 'momentum'"),
        ({"momentum": -0.1}, "momentum >= 0"),
        ({"lr": float("nan")}, "lr >= 0"),
        ({"nesterov": True}, "nesterov needs a momentum"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "betas"),
        ({"dtype": "float8"}, "dtype = 'float8' is unknown"),
        ({"results": "float16"}, "results = 'float16' is unknown"),
        (
            {"results": "activations"},
            "stores 16-bit numbers, but dtype is 'float32'; give dtype 'float16' or 'bfloat16'",
        ),
        ({"layout": "NCWH"}, "layout = 'NCWH' is unknown"),
        ({"bn": "eval"}, "bn = 'eval' is unknown"),
        ({"dtype": "float16", "loss_scale": 0}, "loss_scale must be a positive number"),
    ],
)
def test_unknown_options_are_refused(options, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        build_step(small(8), **options)


def test_operators_without_gradient_are_all_named():
    builder = tvm.relax.BlockBuilder()
    x = tvm.relax.Var("x", tvm.relax.TensorType((4, 5), "float32"))
    w = tvm.relax.Var("w", tvm.relax.TensorType((5, 3), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit(tvm.relax.op.matmul(x, w))
            y = builder.emit(tvm.relax.op.cumprod(builder.emit(tvm.relax.op.cumprod(y, 0)), 1))
            output = builder.emit_output(tvm.relax.op.erf(y))
        builder.emit_func_output(output)
    model = from_module(builder.get())
    with pytest.raises(ModelError, match=r"no gradient: relax\.cumprod \(2x\)"):
        build_step(model)


def test_a_single_value_for_each_channel_is_refused(capfd):
    builder = tvm.relax.BlockBuilder()
    x = tvm.relax.Var("x", tvm.relax.TensorType((1, 3), "float32"))
    names = ["gamma", "beta", "mean", "var"]
    params = [tvm.relax.Var(name, tvm.relax.TensorType((3,), "float32")) for name in names]
    with builder.function("main", [x, *params]):
        with builder.dataflow():
            normed = builder.emit(tvm.relax.op.nn.batch_norm(x, *params, axis=1))
            output = builder.emit_output(normed[0])
        builder.emit_func_output(output)
    model = from_module(builder.get())
    assert (model.parameters["gamma"] == 1).all()
    assert (model.states["mean"] == 0).all()
    with pytest.raises(ModelError, match="more than one value for each channel"):
        build_step(model)
    assert capfd.readouterr().err == ""  # TVM would warn of open blocks


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bn", ["train", "frozen"])
def test_loss_of_a_sample_that_is_not_finite_is_nan(bn, value):
    """As in PyTorch, of the step and of its weights; relu would hide it if it took the maximum of NaN and 0 as 0."""
    runner = Runner(build_step(small(), bn=bn, lr=0.1))
    x, labels = data(8)
    x[3, 1, 2, 2] = value
    loss, _ = runner.step(x, labels, lr=0.1)
    assert math.isnan(loss)
    assert all(np.isnan(array).any() for array in runner.named("parameter").values())


def test_score_of_minus_infinity_for_another_class():
    """The mask of an impossible class: its logarithm is -inf, and takes no part in the loss."""
    builder, shape = relax.BlockBuilder(), (4, 3)
    x, w = relax.Var("x", relax.TensorType(shape, "float32")), relax.Var("w", relax.TensorType((3, 3), "float32"))
    mask = relax.const(np.array([0, -np.inf, 0], "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            scores = builder.emit_output(relax.op.add(builder.emit(relax.op.matmul(x, w)), mask))
        builder.emit_func_output(scores)
    model = from_module(builder.get(), parameters={"w": np.eye(3, dtype="float32")})
    runner = Runner(build_step(model, lr=1.0))
    inputs, labels = np.random.default_rng(0).standard_normal(shape).astype("float32"), np.array([0, 2, 2, 0])
    loss, _ = runner.step(inputs, labels, lr=1.0)
    kept = np.exp(inputs[:, [0, 2]].astype("float64"))
    picked = kept[np.arange(4), labels // 2] / kept.sum(1)
    assert loss == pytest.approx(-np.log(picked).mean(), rel=1e-6)
    assert np.isfinite(runner.named("parameter")["w"]).all()
    assert (runner.named("parameter")["w"][:, 1] == np.eye(3)[:, 1]).all()
