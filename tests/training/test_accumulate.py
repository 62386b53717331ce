# SPDX-License-Identifier: Apache-2.0
"""Steps of several micro-batches: PyTorch's accumulation in numbers, one buffer for the gradients of a convolution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.training.harness import Runner, relative_error
from tests.training.small_models import Reference, data, relax_module, weights
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.offload.partition import offload
from tvm_convgrad.training.compile.lower import LowerStep, plan_of, simplified
from tvm_convgrad.training.ir.graph import bindings_of
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step

BATCH = 4


def small(batch=BATCH, dropout=0.0):
    return from_module(relax_module(batch, dropout), parameters=weights())


@pytest.mark.parametrize("count", [2, 3])
def test_steps_equal_accumulation_by_hand(count):
    """Gradients of the mean loss; each micro-batch has its own statistics and leaves running ones to the next."""
    runner = Runner(build_step(small(), momentum=0.9, accumulate=count))
    reference, buffers = Reference(), {}
    for number in range(3):
        x, labels = data(count * BATCH, seed=number)
        loss, predictions = runner.step(x, labels, lr=0.05)
        losses, total = [], {}
        for part in range(count):
            rows = slice(part * BATCH, (part + 1) * BATCH)
            own, gradients, statistics = reference.loss_and_gradients(x[rows], labels[rows])
            losses.append(own)
            total = {key: total.get(key, 0.0) + gradient / count for key, gradient in gradients.items()}
            reference.values.update(statistics)
        for key, gradient in total.items():
            buffers[key] = 0.9 * buffers.get(key, 0.0) + gradient
            reference.values[key] = reference.values[key] - 0.05 * buffers[key]
        assert abs(loss - np.mean(losses)) < 2e-5
        assert predictions.shape == (count * BATCH, 5)
    for key, value in runner.named("parameter", "running_stat").items():
        assert relative_error(value, reference.values[key]) < 5e-5, key
    x, _ = data(count * BATCH, seed=9)
    single = Runner(build_step(small(), momentum=0.9))
    single.state = runner.state
    parts = [single.predict(x[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    np.testing.assert_allclose(runner.predict(x), np.concatenate(parts), rtol=1e-6)


def test_equals_pytorch_s_accumulation():
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(2, 6, 3, padding=1),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.Conv2d(6, 8, 3, stride=2),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 3 * 2, 5),
    ).train()
    x, labels = (torch.tensor(array) for array in data(3 * BATCH))
    model = from_exported_program(torch.export.export(network, (x[:BATCH],)))
    runner = Runner(build_step(model, optimizer="adam", lr=0.01, accumulate=3))
    network.double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(3):
        losses = []
        for rows in range(0, 3 * BATCH, BATCH):
            value = torch.nn.functional.cross_entropy(
                network(x[rows : rows + BATCH].double()), labels[rows : rows + BATCH]
            )
            (value / 3).backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        loss, _ = runner.step(x.numpy(), labels.numpy(), lr=0.01)
        assert abs(loss - np.mean(losses)) < 2e-4
    wanted = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    for key, value in runner.named("parameter", "running_stat").items():
        if key not in ("0.bias", "1.running_mean"):  # before a batch norm its gradient is zero, and Adam divides by it
            assert relative_error(value, wanted[key]) < 2e-3, key


def _scaled(samples, channels=3, extent=4):
    """A convolution whose result is scaled and moved by vectors over channels, which are parameters seen as 4-D."""
    builder = relax.BlockBuilder()
    wide = channels * extent * extent
    shapes = {"weight": (channels, channels, 3, 3), "scale": (channels,), "shift": (channels,), "last": (wide, 4)}
    x = relax.Var("x", relax.TensorType((samples, channels, extent, extent), "float32"))
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, p["weight"], padding=1))
            y = builder.emit(relax.op.multiply(y, relax.op.reshape(p["scale"], (1, channels, 1, 1))))
            y = builder.emit(relax.op.tanh(relax.op.add(y, relax.op.reshape(p["shift"], (1, channels, 1, 1)))))
            y = builder.emit(relax.op.reshape(y, (samples, wide)))
            result = builder.emit_output(relax.op.matmul(y, p["last"]))
        builder.emit_func_output(result)
    rng = np.random.default_rng(0)
    values = {name: (0.3 * rng.standard_normal(shape)).astype("float32") for name, shape in shapes.items()}
    return from_module(builder.get(), parameters=values)


def test_micro_batches_of_one_sample_read_views_of_parameters_before_they_are_overwritten():
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((2, 3, 4, 4)).astype("float32"), rng.integers(0, 4, 2)
    several, one = Runner(build_step(_scaled(1), accumulate=2)), Runner(build_step(_scaled(2)))
    assert abs(several.step(x, labels, lr=0.5)[0] - one.step(x, labels, lr=0.5)[0]) < 1e-6
    for name, value in several.named("parameter").items():
        assert relative_error(value, one.named("parameter")[name]) < 1e-5, name


def test_gradients_of_vectors_over_channels_are_added_in_place_for_one_sample():
    """The axis of the samples, of one element, stays in their sums."""
    module, _, _ = _allocated(build_step(_scaled(1), accumulate=2), ("none",))
    assert sum(name.startswith("add_gradient") for name in _called(module)) == 3  # scale, shift and the last weight


def test_micro_batches_drop_different_elements():
    """The same samples twice give two losses whose mean is not the loss of one."""
    x, labels = data(BATCH)
    twice = Runner(build_step(small(dropout=0.5), seed=1, accumulate=2))
    once = Runner(build_step(small(dropout=0.5), seed=1))
    _, predictions = twice.step(np.concatenate([x, x]), np.concatenate([labels, labels]), lr=0.0)
    np.testing.assert_allclose(predictions[:BATCH], once.step(x, labels, lr=0.0)[1], rtol=1e-5)
    assert not np.allclose(predictions[BATCH:], predictions[:BATCH])


SHAPES = {
    "first": (24, 16, 3, 3),
    "first_bias": (24,),
    "second": (40, 24, 3, 3),
    "second_bias": (1, 40, 1, 1),
    "hidden": (96, 360),
    "hidden_bias": (96,),
    "last": (96, 10),
    "last_bias": (10,),
}
SAMPLES = 8


def _layers():
    """Two convolutions, a linear layer that runs on kernels and a small one, all with biases."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((SAMPLES, 16, 5, 5), "float32"))
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in SHAPES.items()}
    relu = relax.op.nn.relu
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, p["first"], padding=1))
            y = builder.emit(relu(relax.op.add(y, relax.op.reshape(p["first_bias"], (1, 24, 1, 1)))))
            y = builder.emit(relax.op.nn.conv2d(y, p["second"]))
            y = builder.emit(relax.op.reshape(relu(relax.op.add(y, p["second_bias"])), (SAMPLES, 360)))
            y = builder.emit(relax.op.matmul(y, relax.op.permute_dims(p["hidden"])))
            y = builder.emit(relu(relax.op.add(y, p["hidden_bias"])))
            scores = builder.emit(relax.op.matmul(y, p["last"]))
            result = builder.emit_output(relax.op.add(scores, p["last_bias"]))
        builder.emit_func_output(result)
    rng = np.random.default_rng(0)
    values = {name: (0.1 * rng.standard_normal(shape)).astype("float32") for name, shape in SHAPES.items()}
    return from_module(builder.get(), parameters=values)


def _allocated(step, backends):
    """The compiled step, shapes of the tensors that it allocates, and the bytes of storage planned for them."""
    target = native_target()
    with target:
        module = LowerStep(target)(offload(simplified(step.module), backends, target).module)
    tensors, storage = Counter(), 0
    for binding in bindings_of(module["step"]):
        call = binding.value
        name = str(getattr(getattr(call, "op", None), "name", ""))
        if name == "relax.vm.alloc_tensor":
            if str(call.args[3].value) == "float32":  # as gradients are; others are operands
                tensors[tuple(int(extent) for extent in call.args[2].values)] += 1
        elif name == "relax.vm.alloc_storage":
            storage += int(call.args[0].values[0])
    return module, tensors, storage


def _called(module):
    """Names of the TIR functions that the step calls."""
    calls = (getattr(binding.value, "op", None) for binding in bindings_of(module["step"]))
    return [op.name_hint for op in calls if isinstance(op, tvm.ir.GlobalVar)]


@pytest.mark.parametrize(
    ("dtype", "backends"),
    [("float32", ("none",)), ("bfloat16", ("none",)), pytest.param("float32", ("onednn",), marks=pytest.mark.onednn)],
)
def test_no_gradient_has_a_second_buffer(dtype, backends):
    bytes_of = {}
    for count in (4, 6):
        step = build_step(_layers(), lr=0.1, dtype=dtype, accumulate=count)
        module, tensors, bytes_of[count] = _allocated(step, backends)
        assert {name: tensors[shape] for name, shape in SHAPES.items() if tensors[shape] > 1} == {}
        fused = [entry.fused for entry in plan_of(step, "native", backends) if entry.op == "conv2d_backward_weight"]
        if dtype == "float32":
            all_three = ("accumulate", "bias_grad", "bias_accumulate")
            assert sorted(fused) == sorted([("bias_grad",)] * 2 + [all_three] * 2 * (count - 1))
        # What no kernel adds begins its sums with what is there; vectors of sums along lines are on the stack.
        adding = [module[name].body for name in _called(module) if name.startswith("add_gradient")]
        products = [body.block for body in adding if hasattr(body, "block")]
        assert len(adding) == (3 if dtype == "float32" else 5) * (count - 1)
        assert len(products) == count - 1
        assert all(buffer.scope() == "local" for block in products for buffer in block.alloc_buffers)
    # One micro-batch more costs its predictions, its share of the loss and the like, but no activation.
    assert bytes_of[6] - bytes_of[4] < 3 * 1024 < 4 * SAMPLES * 24 * 25


@pytest.mark.parametrize("backends", [("none",), pytest.param(("onednn",), marks=pytest.mark.onednn)], ids="".join)
def test_micro_batches_without_statistics_are_one_batch(backends):
    """Three of 8 samples and one of 24 differ by rounding only."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3 * SAMPLES, 16, 5, 5)).astype("float32")
    labels = rng.integers(0, 10, 3 * SAMPLES)
    runner = Runner(build_step(_layers(), momentum=0.9, accumulate=3), "native", backends)
    alone = Runner(build_step(_layers(), momentum=0.9))
    start = alone.named("parameter")
    mean = {name: np.zeros_like(value) for name, value in start.items()}
    for rows in range(0, len(x), SAMPLES):
        alone.reset()
        alone.step(x[rows : rows + SAMPLES], labels[rows : rows + SAMPLES], lr=1.0)
        for name, value in alone.named("parameter").items():
            mean[name] += (value - start[name]) / 3
    runner.step(x, labels, lr=1.0)
    for name, value in runner.named("parameter").items():
        assert relative_error(value - start[name], mean[name]) < 2e-5, name


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(UnsupportedError, match=r"accumulate = 2 needs a fixed batch.*x: float32\[n, 2, 7, 6\]"):
        build_step(small("n"), accumulate=2)
    with pytest.raises(UnsupportedError, match="accumulate = 0; a step takes at least 1"):
        build_step(small(), accumulate=0)
