# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models, steps compiled of them in a few seconds, and the error that rounding may make in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from relax_ops.single_run import QUICK_CONFIG
from tests.linked import PLAIN
from tvm_convgrad.report.gradients import describe_convolutions
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.trained_part import train_only
from tvm_convgrad.training.runtime.origin import Origin
from tvm_convgrad.training.step.build import build_step

BATCH, CLASSES = 4, 3
_ABSOLUTE = {"BatchNormalization": (3,)}
"""Operands that enter a bound with a minus: |x - mean| is at most |x| + |mean|."""


def values(seed: int = 0) -> dict[str, np.ndarray]:
    """The parameters and statistics of `network`, away from the values that they begin with in PyTorch."""
    random = np.random.default_rng(seed)
    shapes = {
        "conv.weight": (4, 2, 3, 3),
        "norm.weight": (4,),
        "norm.bias": (4,),
        "norm.running_mean": (4,),
        "norm.running_var": (4,),
        "deep.weight": (4, 1, 3, 3),
        "deep.bias": (4,),
        "fc.weight": (CLASSES, 4),
        "fc.bias": (CLASSES,),
    }
    return {name: random.uniform(0.2, 1.0, shape).astype("float32") for name, shape in shapes.items()}


def network(
    tensors: dict[str, np.ndarray], batch: int | str = BATCH, training: bool = False, producer: str = "pytorch"
) -> onnx.ModelProto:
    """conv, batch norm, relu, a depthwise convolution with bias that is added, pool, linear; two inputs are joined."""
    norm = ["conv", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    moved = ["norm.mean_out", "norm.var_out"] if training else []
    mode = {"training_mode": 1} if training else {}
    nodes = [
        helper.make_node("Concat", ["x", "z"], ["joined"], "joined", axis=1),
        helper.make_node("Conv", ["joined", "conv.weight"], ["conv"], "conv", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", norm, ["norm", *moved], "norm", epsilon=1e-3, **mode),
        helper.make_node("Relu", ["norm"], ["relu"], "relu"),
        helper.make_node("Conv", ["relu", "deep.weight", "deep.bias"], ["deep"], "deep", pads=[1, 1, 1, 1], group=4),
        helper.make_node("Add", ["deep", "relu"], ["sum"], "sum"),
        helper.make_node("GlobalAveragePool", ["sum"], ["pool"], "pool"),
        helper.make_node("Flatten", ["pool"], ["flat"], "flat"),
        helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["scores"], "fc", transB=1),
        helper.make_node("Softmax", ["scores"], ["shares"], "shares"),
    ]
    floats = onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info(name, floats, [batch, 1, 6, 6]) for name in ("x", "z")]
    outputs = [helper.make_tensor_value_info(name, floats, [batch, CLASSES]) for name in ("scores", "shares")]
    stored = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 15)]
    return helper.make_model(graph, producer_name=producer, opset_imports=opsets, ir_version=8)


def batch_of(seed: int, samples: int = BATCH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two inputs and class numbers."""
    random = np.random.default_rng(seed)
    x, z = (random.standard_normal((samples, 1, 6, 6)).astype("float32") for _ in range(2))
    return x, z, random.integers(0, CLASSES, samples)


def build(
    model: Path, output: Path, trained: tuple[str, ...] = (), outputs=None, batch=None, **options: object
) -> Path:
    """The step of a model file, as `convgrad build` makes it, without LLVM's optimiser."""
    loaded = load_model(model, outputs=outputs, batch=batch)
    step = build_step(train_only(loaded, trained) if trained else loaded, **options)
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        executable, plan = compile_with_plan(step, PLAIN)
    manifest = make_manifest(step, parse_target("llvm"), describe_convolutions(plan), Origin.of(str(model)))
    save_artifact(executable, manifest, output)
    return output


def rounding_bound(proto: onnx.ModelProto, output: str, inputs: dict[str, np.ndarray], length: int) -> np.ndarray:
    """How far two float32 evaluations of a graph of sums, products and relu may be apart, element by element.

    With n roundings on the way of each term the error of an evaluation is at most gamma_n times the value that the
    graph has for the absolute values of inputs and parameters (Higham, Accuracy and Stability, 3.1), gamma_n = n u /
    (1 - n u), u = 2^-24. `length` is n: the lengths of all sums on the longest way, and 8 for each batch norm.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    negative = {node.input[place] for node in copy.graph.node for place in _ABSOLUTE.get(node.op_type, ())}
    for tensor in copy.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            sign = -1 if tensor.name in negative else 1
            tensor.CopyFrom(numpy_helper.from_array(sign * np.abs(array), tensor.name))
    (largest,) = ReferenceEvaluator(copy).run([output], {name: np.abs(value) for name, value in inputs.items()})
    unit = 2.0**-24
    gamma = length * unit / (1 - length * unit)
    return 2 * gamma * largest.astype("float64") * 1.001  # the bound itself is rounded
