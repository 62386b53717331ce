# SPDX-License-Identifier: Apache-2.0
"""Steps that keep their activations in 16 bits: which tensors these are, and what the step computes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_convgrad
from tests.training.harness import Runner, relative_error
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name, static_shape
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.model.trained_part import train_only
from tvm_convgrad.training.passes.layer_norm import FuseLayerNorms
from tvm_convgrad.training.passes.products import ProductsAsConvolutions
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.storage import Storage, may_be_mask

TYPES = ("bfloat16", "float16")
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
BATCH, CHANNELS, SIZE, CLASSES = 4, 8, 12, 4
SHAPES = {
    "stem": (CHANNELS, 2, 3, 3),
    "bias": (CHANNELS,),
    "first": (CHANNELS, CHANNELS, 3, 3),
    "second": (CHANNELS, CHANNELS, 1, 1),
    "out": (CHANNELS * 36, CLASSES),
}


def network(batch=BATCH, norm=False):
    """Convolutions with a bias, a residual, a pool and a product.

    With `norm` there is a batch norm, and nothing has a kink: near one, what is rounded may have another gradient.
    """
    batch = tvm.tirx.Var(batch, "int64") if isinstance(batch, str) else batch
    builder = relax.BlockBuilder()
    shapes = SHAPES | (dict.fromkeys(("gamma", "beta", "mean", "var"), (CHANNELS,)) if norm else {})
    x = relax.Var("x", relax.TensorType((batch, 2, SIZE, SIZE), "float32"))
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    emit, op = builder.emit, relax.op
    bend = op.nn.silu if norm else op.nn.relu
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            stem = emit(op.nn.conv2d(x, p["stem"], padding=1))
            h = emit(bend(emit(op.add(stem, emit(op.reshape(p["bias"], [1, CHANNELS, 1, 1]))))))
            inner = emit(op.nn.conv2d(h, p["first"], padding=1))
            if norm:
                inner = emit(op.nn.batch_norm(inner, p["gamma"], p["beta"], p["mean"], p["var"], axis=1)[0])
            inner = emit(op.nn.conv2d(emit(bend(inner)), p["second"]))
            h = emit(bend(emit(op.add(h, inner))))
            pool = op.nn.avg_pool2d if norm else op.nn.max_pool2d
            h = emit(pool(h, pool_size=[3, 3], strides=[2, 2], padding=[1, 1]))
            output = builder.emit_output(op.matmul(emit(op.reshape(h, [batch, CHANNELS * 36])), p["out"]))
        builder.emit_func_output(output)
    return builder.get(), shapes


def model(values, **options):
    module, _ = network(**options)
    return from_module(module, parameters=values)


def integers(seed=0):
    """Weights of which most are 0, so that all that is made of them and of integers fits into 8 bits."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(-1, 2, shape) * (rng.random(shape) < 0.15)).astype("float32")
        for name, shape in SHAPES.items()
    }


def batch(seed=1):
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 3, (BATCH, 2, SIZE, SIZE)).astype("float32")


def targets(predictions, seed=2):
    """What is missed by small integers in some places."""
    rng = np.random.default_rng(seed)
    return predictions + rng.integers(-2, 3, predictions.shape) * (rng.random(predictions.shape) < 0.3)


OPTIONS = {
    "alone": {},
    "channels last": {"layout": "NHWC"},
    "micro-batches": {"accumulate": 2},
    "scaled": {"loss_scale": 8.0},
    "averaged": {"ema": 0.5, "optimizer": "sgd", "momentum": 0.5},
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_small_integers_train_as_in_float32(dtype, options):
    """Nothing is rounded, so that a wrong cast, or a sum in 16 bits, shows to the last bit."""
    count = options.get("accumulate", 1)
    x = np.concatenate([batch(seed) for seed in range(count)])
    runners = [
        Runner(build_step(model(integers()), loss="mse", **kinds, **options))
        for kinds in ({}, {"dtype": dtype, "results": "activations"})
    ]
    y = targets(runners[0].predict(x))
    assert (y != 0).mean() > 0
    for rate in (2.0**-4, 0.0):  # after the first step weights are not integers any more: only what it has done counts
        (loss, predictions), (other, others) = (runner.step(x, y.astype("float32"), lr=rate) for runner in runners)
        if rate:
            assert loss == other > 0
            np.testing.assert_array_equal(predictions, others)
            wanted = runners[0].named()
            assert all(np.any(wanted[name] != value) for name, value in integers().items())
            for name, value in runners[1].named().items():
                np.testing.assert_array_equal(value, wanted[name], err_msg=name)


@pytest.mark.parametrize(("dtype", "unit"), UNITS.items())
@pytest.mark.parametrize("size", [BATCH, "n"])
def test_roundings_are_those_of_what_is_stored(dtype, unit, size):
    """A gradient passes through at most 16 tensors that are rounded once each, to half of `unit`."""
    rng = np.random.default_rng(3)
    _, shapes = network(norm=True)
    values = {name: (rng.standard_normal(shape) / 4).astype("float32") for name, shape in shapes.items()}
    values |= {"var": np.ones(CHANNELS, "float32"), "gamma": 1 + values["gamma"]}
    x = rng.standard_normal((BATCH, 2, SIZE, SIZE)).astype("float32")
    labels = rng.integers(0, CLASSES, BATCH)
    exact, found = (
        Runner(build_step(model(values, batch=size, norm=True), **kinds))
        for kinds in ({}, {"dtype": dtype, "results": "activations"})
    )
    losses = [runner.step(x, labels, lr=1.0)[0] for runner in (exact, found)]
    assert 0 < abs(losses[0] - losses[1]) < 8 * unit * losses[0]
    wanted = exact.named("parameter")
    for name, value in found.named("parameter").items():
        assert relative_error(values[name] - value, values[name] - wanted[name]) < 8 * unit, name


def stored(step):
    """The types of what the calls of the step give, by the extents of those with more than one axis."""
    found = {}
    for binding in bindings_of(step.module["step"]):
        if isinstance(binding.var.ty, relax.TensorType) and len(static_shape(binding.var)) > 1:
            found.setdefault((operator_name(binding.value) if hasattr(binding.value, "op") else ""), set()).add(
                element_type(binding.var)
            )
    return found


def test_weights_statistics_and_scores_stay_float32():
    rng = np.random.default_rng(3)
    values = {name: rng.standard_normal(shape).astype("float32") for name, shape in network(norm=True)[1].items()}
    step = build_step(model(values, norm=True), dtype="bfloat16", results="activations")
    types = stored(step)
    assert types["relax.nn.conv2d"] == types["relax.nn.conv2d_backward_data"] == {"bfloat16"}
    assert types["relax.nn.conv2d_backward_weight"] == types["relax.sum"] == {"float32"}
    assert types["relax.matmul"] == {"float32", "bfloat16"}  # scores and a weight's gradient; the data's gradient
    assert step.prediction.dtype == "float32"
    assert {schema.dtype for schema in step.state} == {"float32"}


def norms_and_products():
    """A convolution, and a block of a layer norm, two products and gelu over channels, as ConvNeXt has it."""
    shapes = {
        "stem": (16, 2, 1, 1),
        "gamma": (16,),
        "beta": (16,),
        "up": (16, 64),
        "bias": (64,),
        "down": (64, CLASSES),
    }
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 2, 8, 8), "float32"))
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    emit, op = builder.emit, relax.op
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            h = emit(op.permute_dims(emit(op.nn.conv2d(x, p["stem"])), [0, 2, 3, 1]))
            h = emit(op.reshape(emit(op.nn.layer_norm(h, p["gamma"], p["beta"], axes=[-1])), [512, 16]))
            h = emit(op.nn.gelu(emit(op.add(emit(op.matmul(h, p["up"])), p["bias"]))))
            h = emit(op.mean(emit(op.reshape(h, [8, 64, 64])), [1]))
            output = builder.emit_output(op.matmul(h, p["down"]))
        builder.emit_func_output(output)
    return builder.get(), shapes


def test_layer_norms_and_products_take_what_is_kept():
    module, shapes = norms_and_products()
    rng = np.random.default_rng(4)
    values = {name: (rng.standard_normal(shape) / 2).astype("float32") for name, shape in shapes.items()}
    network = from_module(module, parameters=values)
    steps = [build_step(network, **kinds) for kinds in ({}, {"dtype": "bfloat16", "results": "activations"})]
    x, labels = rng.standard_normal((8, 2, 8, 8)).astype("float32"), rng.integers(0, CLASSES, 8)
    exact, found = (Runner(step, "native") for step in steps)
    for runner in (exact, found):
        runner.step(x, labels, lr=1.0)
    wanted = exact.named("parameter")
    for name, value in found.named("parameter").items():
        assert relative_error(values[name] - value, values[name] - wanted[name]) < 8 * 2.0**-8, name
    with tvm.target.Target({"kind": "llvm", "mcpu": "cascadelake"}), tvm_convgrad.rules():
        lowered = ProductsAsConvolutions()(FuseLayerNorms()(steps[1].module))
    called = [v.value for v in bindings_of(lowered["step"]) if isinstance(v.value, tvm.ir.Call)]
    kernels = [call.args for call in called if operator_name(call) == "relax.call_tir"]
    read = {gv.name_hint: [element_type(each) for each in operands.fields] for gv, operands in kernels}
    assert read["norm_rows"][0] == read["norm_sums"][1] == "bfloat16"
    assert read["norm_rows_gradient"][:2] == ["bfloat16"] * 2
    for kernel in ("matmul_forward_kernel", "matmul_backward_weight_kernel"):
        assert any(name.startswith(kernel) for name in read), kernel


MASKS = {
    "multiple of -1e9": lambda op, scores, mask: op.add(scores, op.multiply(mask, relax.const(-1e9, "float32"))),
    "where": lambda op, scores, mask: op.where(op.greater(mask, relax.const(0.5)), relax.const(-1e30), scores),
    "where of a table": lambda op, scores, mask: op.where(
        op.greater(mask, relax.const(0.5)),
        op.take(relax.const([1.0, -1e30], "float32"), relax.const(1, "int64")),
        scores,
    ),
    "repeated": lambda op, scores, mask: op.add(
        scores, op.multiply(mask, op.tile(relax.const([[[-1e9]]], "float32"), (1, 1, 4)))
    ),
    "input": lambda op, scores, mask: op.add(scores, mask),
    "input, moved": lambda op, scores, mask: op.permute_dims(op.permute_dims(op.add(scores, mask)), [2, 1, 0]),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", MASKS)
def test_rows_that_are_masked_altogether_are_uniform(kind, dtype):
    """The mask is no number of float16, and the softmax of a row of -inf is NaN; PyTorch's autocast adds in float32."""
    op, builder, batch = relax.op, relax.BlockBuilder(), tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((batch, 4, 4), "float32"))
    mask = relax.Var("mask", relax.TensorType((batch, 1, 4), "float32"))
    p = {name: relax.Var(name, relax.TensorType((4, 4), "float32")) for name in ("key", "value")}
    with builder.function("main", [x, mask, *p.values()], attrs={"num_input": 2}):
        with builder.dataflow():
            keys, values = (builder.emit(op.matmul(x, each)) for each in p.values())
            scores = builder.emit(op.matmul(x, builder.emit(op.permute_dims(keys, [0, 2, 1]))))
            scores = builder.emit(builder.normalize(MASKS[kind](op, scores, mask)))
            mixed = builder.emit(op.matmul(builder.emit(op.nn.softmax(scores, -1)), values))
            output = builder.emit_output(op.matmul(mixed, p["key"]))
        builder.emit_func_output(output)
    values = {name: np.eye(4, dtype="float32") for name in p}
    step = build_step(
        from_module(builder.get(), parameters=values), loss="mse", dtype=dtype, results="activations", momentum=0.5
    )
    runner = Runner(step)
    rows = np.random.default_rng(0).integers(-2, 3, (2, 4, 4)).astype("float32")
    masked = np.array([[[1, 1, 1, 1]], [[0, 0, 0, 1]]], "float32")
    if kind.startswith("input"):
        masked *= np.finfo("float32").min if dtype == "float16" else np.float32(-1e38)
    mean = np.broadcast_to(rows[0].mean(0), (4, 4))
    for _ in range(2):
        loss, scores = runner.step(rows, masked, np.zeros((2, 4, 4), "float32"), lr=0.0)
        np.testing.assert_array_equal(scores[0], mean)
        assert np.isfinite(scores).all()
        assert loss > 0
    assert all(np.isfinite(value).all() and value.any() for value in runner.named().values())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("number", [-1e3, -6e4])
def test_a_buffer_that_masks_whole_rows_takes_no_digits_of_scores(number, dtype):
    """-6e4 is a number of float16, but the next ones are 32 away; a softmax that two kernels read, as in PyTorch's."""
    op, builder = relax.op, relax.BlockBuilder()
    shapes = {"x": (2, 4, 4), "key": (4, 4), "value": (4, 4), "mask": (4, 4)}
    x, key, value, mask = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    with builder.function("main", [x, key, value, mask], attrs={"num_input": 1}):
        with builder.dataflow():
            keys, values = (builder.emit(op.matmul(x, each)) for each in (key, value))
            scores = builder.emit(op.matmul(x, builder.emit(op.permute_dims(keys, [0, 2, 1]))))
            scores = builder.emit(op.add(scores, mask))
            least = builder.emit(op.equal(op.max(scores, -1, keepdims=True), relax.const(-np.inf, "float32")))
            weights = op.nn.softmax(builder.emit(op.where(least, relax.const(0.0), scores)), -1)
            mixed = builder.emit(op.matmul(builder.emit(weights), values))
            output = builder.emit_output(op.matmul(mixed, key))
        builder.emit_func_output(output)
    rows = np.random.default_rng(0).integers(-1, 2, (2, 4, 4)).astype("float32")
    masks = np.zeros((4, 4), "float32")
    masks[2] = number
    values = {"key": np.eye(4, dtype="float32"), "value": np.eye(4, dtype="float32"), "mask": masks}
    model = train_only(from_module(builder.get(), parameters=values), ["key", "value"])
    step = build_step(model, loss="mse", dtype=dtype, results="activations")
    _, found = Runner(step).step(rows, np.zeros((2, 4, 4), "float32"), lr=0.0)
    powers = np.exp(np.einsum("bij,bkj->bik", rows, rows, dtype="float64"))  # a row's mask does not change its softmax
    np.testing.assert_allclose(found, powers / powers.sum(-1, keepdims=True) @ rows, atol=2 * UNITS[dtype])


def test_which_weights_may_be_masks():
    for values in (np.array(40000), np.array([-100.0], "float32"), np.zeros(0, "float32"), np.array([True, False])):
        assert not may_be_mask(values, "bfloat16")
    assert may_be_mask(np.array(-1e4, "float32"), "bfloat16")
    assert may_be_mask(np.array([0, -np.inf, -1e3], "float32"), "float16")


def test_statistics_before_a_softmax_are_no_mask():
    """What is made of products may be kept in 16 bits, through sums as well, which no activation is."""
    op, builder = relax.op, relax.BlockBuilder()
    shapes = {"x": (2, 16, 32, 32), "w": (16, 16, 3, 3)}
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    with builder.function("main", [x, w]):
        with builder.dataflow():
            h = builder.emit(op.nn.conv2d(x, w, padding=1))
            centred = builder.emit(op.subtract(h, builder.emit(op.mean(h, [0, 2, 3], keepdims=True))))
            gated = builder.emit(op.multiply(centred, builder.emit(op.nn.softmax(centred, 1))))
            trunk = builder.emit(op.nn.relu(gated))
            output = builder.emit_output(op.negative(builder.emit(op.nn.conv2d(trunk, w, padding=1))))
        builder.emit_func_output(output)
    function = builder.get()["main"]
    (read,) = [binding.var for binding in bindings_of(function) if operator_name(binding.value) == "relax.nn.relu"]
    assert Storage(function, "bfloat16").keeps(read)
