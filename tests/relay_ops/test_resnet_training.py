# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 with batch norm, trained by a Relay program in NHWC whose convolutions oneDNN computes.

The program is a whole step: loss, parameters after SGD, running statistics after the batch. It is exported and run in a
process without this package; its losses are compared with those of PyTorch in float64, which the Python that
CONVGRAD_TORCH_PYTHON names must have (`make test-relay` names that of .venv). What oneDNN does not compute is compiled
without LLVM's optimiser, which would be most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.batch_norm import BatchStatistics
from relay_ops.differentiate import value_and_gradients
from relay_ops.layout import ConvertLayout
from relay_ops.partition import partition
from tests.relay_ops.harness import calls, typed

STEPS, RATE, TOLERANCE = 20, 0.05, 1e-4
BATCH, WIDTH, EXTENT, CLASSES = 8, 16, 32, 10
STAGES = [(WIDTH, WIDTH, 1), (WIDTH, 2 * WIDTH, 2), (2 * WIDTH, 4 * WIDTH, 2), (4 * WIDTH, 8 * WIDTH, 2)]
NAMES = ("nn.conv2d", "nn.conv2d_backward_data", "nn.conv2d_backward_weight")


class Network:
    """ResNet-18 in Relay, its parameters and statistics under PyTorch's names."""

    def __init__(self) -> None:
        self.data = relay.var("data", shape=(BATCH, 3, EXTENT, EXTENT))
        self.target = relay.var("target", shape=(BATCH, CLASSES))
        self.parameters: dict[str, relay.Var] = {}
        self.statistics: dict[str, relay.Var] = {}
        self.running: list[relay.Expr] = []

    def parameter(self, name, *shape):
        self.parameters[name] = relay.var(name, shape=shape)
        return self.parameters[name]

    def normalized(self, value, name, norm, inputs, channels, kernel=3, stride=1):
        """A convolution without bias, and batch norm."""
        weight = self.parameter(f"{name}.weight", channels, inputs, kernel, kernel)
        attributes = {"channels": channels, "kernel_size": (kernel, kernel), "strides": (stride, stride)}
        value = relay.nn.conv2d(value, weight, padding=(kernel // 2, kernel // 2), **attributes)
        scale, shift = (self.parameter(f"{norm}.{each}", channels) for each in ("weight", "bias"))
        before = [relay.var(f"{norm}.running_{each}", shape=(channels,)) for each in ("mean", "var")]
        self.statistics |= {var.name_hint: var for var in before}
        made = relay.nn.batch_norm(value, scale, shift, *before)
        self.running += [made[1], made[2]]
        return made[0]

    def block(self, value, name, inputs, channels, stride):
        inner = relay.nn.relu(self.normalized(value, f"{name}.conv1", f"{name}.bn1", inputs, channels, stride=stride))
        inner = self.normalized(inner, f"{name}.conv2", f"{name}.bn2", channels, channels)
        if stride > 1:
            value = self.normalized(value, f"{name}.short.0", f"{name}.short.1", inputs, channels, 1, stride)
        return relay.nn.relu(inner + value)

    def function(self):
        """(data, target, parameters, statistics) -> (loss, running statistics)."""
        value = relay.nn.relu(self.normalized(self.data, "0", "1", 3, WIDTH))
        number = 3
        for inputs, channels, stride in STAGES:
            value = self.block(value, str(number), inputs, channels, stride)
            value = self.block(value, str(number + 1), channels, channels, 1)
            number += 2
        value = relay.nn.batch_flatten(relay.nn.global_avg_pool2d(value))
        value = relay.nn.dense(value, self.parameter("13.weight", CLASSES, 8 * WIDTH))
        value = relay.nn.bias_add(value, self.parameter("13.bias", CLASSES))
        loss = relay.negative(relay.sum(relay.nn.log_softmax(value) * self.target)) / relay.const(float(BATCH))
        arguments = [self.data, self.target, *self.parameters.values(), *self.statistics.values()]
        return relay.Function(arguments, relay.Tuple([loss, *self.running]))


def training_step(network):
    """(loss, parameters after SGD, statistics after the batch) of the arguments of the network's function."""
    program = BatchStatistics()(typed(network.function()))
    gradients = value_and_gradients(program["main"], more=True)["main"]
    first, count = 3, len(network.parameters)  # behind the loss and the gradients of data and target
    fields = gradients.body.fields
    after = [
        old - relay.const(RATE) * new
        for old, new in zip(gradients.params[2 : 2 + count], fields[first : first + count], strict=True)
    ]
    statistics = fields[len(fields) - len(network.statistics) :]
    return typed(relay.Function(gradients.params, relay.Tuple([fields[0], *after, *statistics])))


def values_of(network):
    rng = np.random.default_rng(18)
    values = {}
    for name, var in (network.parameters | network.statistics).items():
        shape = tuple(int(extent) for extent in var.type_annotation.shape)
        if len(shape) > 1:
            values[name] = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        elif name.endswith(("bias", "running_mean")):
            values[name] = rng.normal(0, 0.1, shape)
        else:
            values[name] = rng.uniform(0.7, 1.3, shape)
    return {name: value.astype("float32") for name, value in values.items()}


WITHOUT = """
import json, sys
import numpy as np, tvm
from tvm.contrib import graph_executor
library, arrays, labels, steps = sys.argv[1:]
executor = graph_executor.GraphModule(tvm.runtime.load_module(library)["default"](tvm.cpu()))
values, losses = dict(np.load(arrays)), []
executor.set_input("data", values.pop("data"))
executor.set_input("target", np.load(labels))
values.pop("target")
for _ in range(int(steps)):
    for name, value in values.items():
        executor.set_input(name, value)
    executor.run()
    losses.append(float(executor.get_output(0).numpy()))
    values = {name: executor.get_output(i + 1).numpy() for i, name in enumerate(values)}
assert not [m for m in sys.modules if m.split(".")[0] in ("tvm_convgrad", "relay_ops", "legalize")]
print(json.dumps([*losses, [values["10.bn2.running_mean"].tolist(), values["10.bn2.running_var"].tolist()]]))
"""


def printed(folder, *command):
    """What a process prints as JSON that sees neither this package nor the environment's PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_losses_of_twenty_steps(tmp_path):
    torch_python = os.environ.get("CONVGRAD_TORCH_PYTHON")
    assert torch_python, "set CONVGRAD_TORCH_PYTHON to a Python with PyTorch; make test-relay does"
    network = Network()
    step = ConvertLayout({name: ["NHWC", "OHWI"] for name in NAMES})(training_step(network))
    convolutions = calls(step, *NAMES)
    assert len(convolutions) == 3 * 20 - 1, "forward, wgrad and dgrad of 20, but the data's own gradient"
    assert {str(call.attrs.data_layout) for call in convolutions} == {"NHWC"}
    module = partition(step, ["onednn"])
    assert not calls(tvm.IRModule.from_expr(module["main"]), *NAMES), "every convolution is a region's"
    with tvm.transform.PassContext(opt_level=3):
        relay.build(module, "llvm -opt-level=0").export_library(str(tmp_path / "step.so"))

    rng = np.random.default_rng(3)
    values = values_of(network)
    data = rng.normal(size=(BATCH, 3, EXTENT, EXTENT)).astype("float32")
    target = rng.integers(0, CLASSES, BATCH)
    np.savez(tmp_path / "arrays.npz", data=data, target=target, **values)
    np.save(tmp_path / "labels.npy", np.eye(CLASSES, dtype="float32")[target])
    files = [str(tmp_path / name) for name in ("step.so", "arrays.npz", "labels.npy")]
    found = printed(tmp_path, sys.executable, "-c", WITHOUT, *files, str(STEPS))
    oracle = Path(__file__).with_name("torch_resnet.py")
    wanted = printed(tmp_path, torch_python, str(oracle), files[1], str(STEPS), str(RATE))
    assert wanted[STEPS - 1] < wanted[0] / 2, "it learns"
    np.testing.assert_allclose(found[:STEPS], wanted[:STEPS], rtol=0, atol=TOLERANCE)
    for have, want in zip(found[STEPS], wanted[STEPS], strict=True):
        assert have == pytest.approx(want, abs=1e-3)
