# SPDX-License-Identifier: Apache-2.0
"""Steps of several micro-batches: PyTorch's accumulation in numbers, one buffer for the gradients of a convolution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tvm import relax

from tests.training.harness import Runner, relative_error
from tests.training.small_models import Reference, data, relax_module, weights
from tvm_convgrad.bulk import native_target
from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.training.graph import bindings_of
from tvm_convgrad.training.lower import pipeline, plan_of
from tvm_convgrad.training.model import from_module
from tvm_convgrad.training.step import build_step

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
    from tvm_convgrad.training.frontends.torch_export import from_exported_program

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


def test_micro_batches_drop_different_elements():
    """The same samples twice give two losses whose mean is not the loss of one."""
    x, labels = data(BATCH)
    twice = Runner(build_step(small(dropout=0.5), seed=1, accumulate=2))
    once = Runner(build_step(small(dropout=0.5), seed=1))
    _, predictions = twice.step(np.concatenate([x, x]), np.concatenate([labels, labels]), lr=0.0)
    np.testing.assert_allclose(predictions[:BATCH], once.step(x, labels, lr=0.0)[1], rtol=1e-5)
    assert not np.allclose(predictions[BATCH:], predictions[:BATCH])


def _convolutions():
    """Two convolutions of different weights, whose gradients are larger than what lies between."""
    builder = relax.BlockBuilder()
    shapes = {"x": (2, 16, 5, 5), "first": (16, 16, 3, 3), "second": (10, 16, 3, 3)}
    x, first, second = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    with builder.function("main", [x, first, second]):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.relu(relax.op.nn.conv2d(x, first, padding=1)))
            scores = builder.emit(relax.op.nn.conv2d(hidden, second))
            result = builder.emit_output(relax.op.mean(scores, [2, 3]))
        builder.emit_func_output(result)
    return from_module(builder.get())


def _allocated(step):
    """Shapes of the tensors that the compiled step allocates, and the bytes of storage that is planned for them."""
    target = native_target()
    with target:
        module = pipeline(target)(step.module)
    tensors, storage = Counter(), 0
    for binding in bindings_of(module["step"]):
        call = binding.value
        name = str(getattr(getattr(call, "op", None), "name", ""))
        if name == "relax.vm.alloc_tensor":
            tensors[tuple(int(extent) for extent in call.args[2].values)] += 1
        elif name == "relax.vm.alloc_storage":
            storage += int(call.args[0].values[0])
    return tensors, storage


def test_no_second_buffer_for_the_gradient_of_a_convolution():
    gradients = [(16, 16, 3, 3), (10, 16, 3, 3)]
    bytes_of = {}
    for count in (1, 2, 5):
        step = build_step(_convolutions(), lr=0.1, accumulate=count)
        tensors, bytes_of[count] = _allocated(step)
        assert [tensors[shape] for shape in gradients] == [1, 1]
        fused = [entry.fused for entry in plan_of(step, "native") if entry.op == "conv2d_backward_weight"]
        assert sorted(fused) == sorted([()] * 2 + [("accumulate",)] * 2 * (count - 1))
    # One micro-batch more costs its predictions, its share of the loss and the like, but no activation.
    assert bytes_of[5] - bytes_of[2] < 3 * 1024 < 2 * 16 * 5 * 5 * 4


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(UnsupportedError, match=r"accumulate = 2 needs a fixed batch.*x: float32\[n, 2, 7, 6\]"):
        build_step(small("n"), accumulate=2)
    with pytest.raises(UnsupportedError, match="accumulate = 0; a step takes at least 1"):
        build_step(small(), accumulate=0)
