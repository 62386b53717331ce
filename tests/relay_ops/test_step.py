# SPDX-License-Identifier: Apache-2.0
"""A training step whose convolutions oneDNN computes, in a process without this package, against float64 numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import tvm
from tvm import relay

from relay_ops.differentiate import value_and_gradients
from relay_ops.partition import partition
from relay_ops.patterns import OPS
from tests.relay_ops.harness import calls
from tvm_convgrad import ConvProblem
from tvm_convgrad.core import reference

STEPS, RATE, TOLERANCE = 12, 0.1, 1e-4
FIRST = ConvProblem(4, 3, 8, (12, 12), (3, 3), (1, 1), ((1, 1), (1, 1)))
SECOND = ConvProblem(4, 8, 12, (6, 6), (3, 3), (2, 2), ((0, 1), (0, 1)), groups=2)
CLASSES = 5
SHAPES = {
    "first": FIRST.weight_shape,
    "first_bias": (8,),
    "second": SECOND.weight_shape,
    "second_bias": (12,),
    "dense": (CLASSES, 108),
}


def program():
    """conv, bias, relu, max pool, strided grouped conv, bias, relu, dense, cross entropy: loss and gradients."""
    data, target = relay.var("data", shape=FIRST.data_shape), relay.var("target", shape=(4, CLASSES))
    weights = [relay.var(name, shape=shape) for name, shape in SHAPES.items()]
    first, first_bias, second, second_bias, dense = weights

    def convolution(value, weight, bias, problem):
        padding = [pair[0] for pair in problem.padding] + [pair[1] for pair in problem.padding]
        made = relay.nn.conv2d(
            value, weight, channels=problem.out_channels, kernel_size=(3, 3), strides=problem.strides,
            padding=padding, groups=problem.groups,
        )  # fmt: skip
        return relay.nn.relu(relay.nn.bias_add(made, bias))

    value = relay.nn.max_pool2d(convolution(data, first, first_bias, FIRST), (2, 2), (2, 2))
    value = relay.nn.dense(relay.nn.batch_flatten(convolution(value, second, second_bias, SECOND)), dense)
    loss = relay.negative(relay.sum(relay.nn.log_softmax(value) * target)) / relay.const(4.0)
    return value_and_gradients(relay.Function([*weights, data, target], loss))


def numpy_losses(weights, data, target):
    """The same in float64, gradients by hand."""
    w = {name: value.astype("float64") for name, value in weights.items()}
    losses = []
    for _ in range(STEPS):
        a = reference.forward(FIRST, data, w["first"]) + w["first_bias"][:, None, None]
        windows = a.clip(min=0).reshape(4, 8, 6, 2, 6, 2).transpose(0, 1, 2, 4, 3, 5).reshape(4, 8, 6, 6, 4)
        pooled = windows.max(-1)
        b = reference.forward(SECOND, pooled, w["second"]) + w["second_bias"][:, None, None]
        flat = b.clip(min=0).reshape(4, -1)
        z = flat @ w["dense"].T
        log = z - z.max(1, keepdims=True)
        log -= np.log(np.exp(log).sum(1, keepdims=True))
        losses.append(-(log * target).sum() / 4)
        dz = (np.exp(log) * target.sum(1, keepdims=True) - target) / 4
        db = (dz @ w["dense"]).reshape(b.shape) * (b > 0)
        dpool = reference.backward_data(SECOND, db, w["second"])
        spread = (np.arange(4) == windows.argmax(-1)[..., None]) * dpool[..., None]
        da = spread.reshape(4, 8, 6, 6, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(a.shape) * (a > 0)
        w["dense"] = w["dense"] - RATE * dz.T @ flat
        w["second"] = w["second"] - RATE * reference.backward_weight(SECOND, db, pooled)
        w["second_bias"] = w["second_bias"] - RATE * db.sum((0, 2, 3))
        w["first"] = w["first"] - RATE * reference.backward_weight(FIRST, da, data)
        w["first_bias"] = w["first_bias"] - RATE * da.sum((0, 2, 3))
    return losses


WITHOUT = """
import json, sys
import numpy as np, tvm
from tvm.contrib import graph_executor
library, arrays, names, steps, rate = sys.argv[1:]
executor = graph_executor.GraphModule(tvm.runtime.load_module(library)["default"](tvm.cpu()))
values, names, losses = dict(np.load(arrays)), names.split(","), []
for _ in range(int(steps)):
    for name, value in values.items():
        executor.set_input(name, value)
    executor.run()
    losses.append(float(executor.get_output(0).numpy()))
    for i, name in enumerate(names):
        values[name] = values[name] - np.float32(rate) * executor.get_output(i + 1).numpy()
assert not [m for m in sys.modules if m.split(".")[0] in ("tvm_convgrad", "relay_ops", "legalize")]
print(json.dumps(losses))
"""


def test_losses_of_a_step_with_onednn(tmp_path):
    rng = np.random.default_rng(3)
    weights = {name: rng.normal(0, 0.3, shape).astype("float32") for name, shape in SHAPES.items()}
    data = rng.normal(size=FIRST.data_shape).astype("float32")
    target = np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, 4)]
    module = partition(program(), ["onednn"])
    assert not calls(tvm.IRModule.from_expr(module["main"]), *OPS), "every convolution is a region's"
    with tvm.transform.PassContext(opt_level=3):
        relay.build(module, "llvm").export_library(str(tmp_path / "step.so"))
    np.savez(tmp_path / "arrays.npz", data=data, target=target, **weights)
    arguments = [str(tmp_path / "step.so"), str(tmp_path / "arrays.npz"), ",".join(weights), str(STEPS), str(RATE)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments], check=True, capture_output=True, text=True, cwd=tmp_path,
        env=environment,
    )  # fmt: skip
    losses, wanted = json.loads(done.stdout), numpy_losses(weights, data.astype("float64"), target.astype("float64"))
    assert wanted[-1] < wanted[0] / 2, "it learns"
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=TOLERANCE)
