# SPDX-License-Identifier: Apache-2.0
"""Backward graphs of whole networks in float64, against finite differences of their forward graphs.

The forward graphs hold stock operators only, so that the oracle knows nothing of this package. One difference along one
direction for each weight and for the data: <gradient, direction> = d loss / d direction. The direction has length 1, so
that hardly any relu changes sides, and is half random, half the gradient's own, so that what is compared is not small.
ResNet-18 is in test_resnet_training.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relay
from tvm.contrib import graph_executor
from tvm.relay import testing

from relay_ops.cpu_kernels import without_kernels
from relay_ops.differentiate import value_and_gradients
from relay_ops.partition import partition
from tests.relay_ops.harness import calls

STEP = 1e-4
TOLERANCE = 1e-6  # relative; the error of the difference of four values is about STEP**4 + 1e-16 / STEP
WEIGHTS = {1: 8 / 12, -1: -8 / 12, 2: -1 / 12, -2: 1 / 12}
"""Of the values at so many steps, for the first derivative (Fornberg 1988)."""


class _Smooth(relay.ExprMutator):
    """tanh in the place of relu: a difference across the kink of a relu is not a derivative."""

    def visit_call(self, call):
        if call.op == relay.op.get("nn.relu"):
            return relay.tanh(self.visit(call.args[0]))
        return super().visit_call(call)


def smooth(module):
    return relay.transform.InferType()(tvm.IRModule.from_expr(_Smooth().visit(module["main"])))


def mobilenet():
    return smooth(testing.mobilenet.get_workload(2, 4, (3, 32, 32), dtype="float64")[0])


def dilated_grouped():
    """Dilation, groups, a channel multiplier, strides that hide elements, asymmetric padding; NHWC at the end."""

    def convolution(value, name, shape, **attributes):
        weight = relay.var(name, shape=shape, dtype="float64")
        kernel, out = (shape[:2], shape[3]) if "kernel_layout" in attributes else (shape[2:], shape[0])
        return relay.nn.conv2d(value, weight, channels=out, kernel_size=kernel, **attributes)

    value = relay.var("data", shape=(2, 4, 20, 19), dtype="float64")
    value = relay.tanh(convolution(value, "dilated_weight", (8, 4, 3, 3), padding=(2, 2), dilation=(2, 2)))
    grouped = {"groups": 4, "padding": (0, 1, 1, 0), "strides": (2, 2)}
    value = relay.tanh(convolution(value, "grouped_weight", (12, 2, 3, 3), **grouped))
    both = {"groups": 2, "padding": (3, 3), "dilation": (3, 2), "strides": (1, 2)}
    value = relay.tanh(convolution(value, "both_weight", (8, 6, 3, 3), **both))
    depthwise = {"groups": 8, "padding": (1, 1), "dilation": (1, 2)}
    value = relay.tanh(convolution(value, "depthwise_weight", (16, 1, 3, 3), **depthwise))
    value = relay.transpose(value, (0, 2, 3, 1))
    last = {"data_layout": "NHWC", "kernel_layout": "HWIO", "strides": (3, 3)}
    value = convolution(value, "last_weight", (3, 3, 16, 4), **last)
    value = relay.sum(relay.tanh(value), axis=(1, 2))
    return tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(value), value))


def loss_of(module):
    """sum(network * upstream) over one sample in each row, batch norm in its inference form."""
    plain = tvm.transform.Sequential([relay.transform.SimplifyInference(), relay.transform.InferType()])
    function = plain(module)["main"]
    upstream = relay.var("upstream", type_annotation=function.ret_type)
    body = relay.sum(relay.multiply(function.body, upstream))
    return relay.Function([*function.params, upstream], body)


def executor_of(module):
    """Without LLVM's optimiser, which takes a quarter of the time: tests/relay_ops/test_cpu_kernels.py has it."""
    with tvm.transform.PassContext(opt_level=2):
        return graph_executor.GraphModule(relay.build(module, "llvm -opt-level=0")["default"](tvm.cpu()))


def numbers(function):
    rng = np.random.default_rng(7)
    arrays = {}
    for parameter in function.params:
        name, shape = parameter.name_hint, parameter.checked_type.concrete_shape
        spread = 1 / np.sqrt(np.prod(shape[1:])) if name.endswith("weight") else 1.0
        # A gain above one, or the gradient of the data would vanish in the rounding of the result.
        positive = {"gamma": (1.5, 2.5), "var": (0.5, 1.5)}.get(name.rpartition("_")[2])
        arrays[name] = rng.uniform(*positive, shape) if positive else rng.normal(0, spread, shape)
    return arrays


def results(executor, arrays):
    for name, array in arrays.items():
        executor.set_input(name, array)
    executor.run()
    return [executor.get_output(i).numpy() for i in range(executor.get_num_outputs())]


def check_differences(forward, arrays, gradients):
    with without_kernels():
        executor = executor_of(forward)
    rng = np.random.default_rng(11)
    checked = 0
    for name, array in arrays.items():
        if not (name == "data" or name.endswith("weight")):
            continue
        scale = float(np.linalg.norm(gradients[name]))
        assert scale > 0, name
        random = rng.normal(size=array.shape)
        direction = gradients[name] / scale + random / np.linalg.norm(random)
        direction /= np.linalg.norm(direction)
        values = {n: results(executor, {**arrays, name: array + n * STEP * direction})[0] for n in WEIGHTS}
        difference = float(sum(WEIGHTS[n] * value for n, value in values.items())) / STEP
        found = float(np.sum(gradients[name] * direction))
        assert abs(found - difference) < TOLERANCE * scale, name
        checked += 1
    return checked


@pytest.mark.parametrize(
    ("network", "way"),
    [
        (mobilenet, "legalized"),
        (dilated_grouped, "legalized"),
        (dilated_grouped, "NHWC"),
        (dilated_grouped, "library"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_backward_graph(network, way, tmp_path):
    function = loss_of(network())
    program = value_and_gradients(function)
    typed = relay.transform.InferType()(tvm.IRModule.from_expr(function))
    convolutions = len(calls(typed, "nn.conv2d"))
    assert len(calls(program, "nn.conv2d_backward_weight", "nn.conv2d_backward_data")) == 2 * convolutions
    arrays = numbers(typed["main"])
    if way == "NHWC":
        wanted = {f"nn.conv2d{direction}": ["NHWC", "HWIO"] for direction in ("", "_backward_weight", "_backward_data")}
        with tvm.transform.PassContext(opt_level=3):
            program = relay.transform.ConvertLayout(wanted)(program)
    if way == "library":
        path = str(tmp_path / "network.so")
        with tvm.transform.PassContext(opt_level=2):
            relay.build(partition(program, ["c"]), "llvm").export_library(path)
        executor = graph_executor.GraphModule(tvm.runtime.load_module(path)["default"](tvm.cpu()))
    else:
        executor = executor_of(program)
    _, *partials = results(executor, arrays)
    gradients = dict(zip(arrays, partials, strict=True))
    assert check_differences(typed, arrays, gradients) > convolutions
