# SPDX-License-Identifier: Apache-2.0
"""Puts the folder `rules` beside relax_ops.rules, and checks its operator's rules; run with TVM's plugins off."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

import tvm_convgrad
from relax_ops import rules
from relax_ops.vmap.mapped_axis import Axes, MappedAxis
from tvm_convgrad.training.autodiff.per_sample import PerSampleGradients
from tvm_convgrad.training.model.ensemble import ensemble
from tvm_convgrad.training.model.model import from_module

rules.__path__.append(str(Path(__file__).with_name("rules")))
tvm_convgrad.register()
cube = importlib.import_module("relax_ops.rules.cube").cube


def module_of(build: Callable[..., Any], **shapes: tuple[int, ...]) -> tvm.IRModule:
    """main(tensors) -> build(emit, *tensors)."""
    builder = relax.BlockBuilder()
    variables = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    with builder.function("main", variables):
        with builder.dataflow():
            output = builder.emit_output(build(builder.emit, *variables))
        builder.emit_func_output(output)
    return builder.get()


def run(module: tvm.IRModule, function: str, *arrays: Any) -> Any:
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    return machine[function](*map(tvm.runtime.tensor, arrays))


def layer(emit: Callable[[Any], Any], x: Any, w: Any) -> Any:
    return emit(cube(emit(op.matmul(x, w))))


def ints(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype("float32")


x, w = ints(0, 4, 3), ints(1, 3, 2)
y = x @ w

# Gradient and legalization.
total = module_of(lambda emit, x, w: emit(op.sum(layer(emit, x, w))), x=x.shape, w=w.shape)
_, (_, dw) = run(relax.transform.Gradient("main")(total), "main_adjoint", x, w)
np.testing.assert_array_equal(dw.numpy(), x.T @ (3 * y**2))

# Layout: no transpose between the convolution and the operator.
images = module_of(lambda emit, x, w: emit(cube(emit(op.nn.conv2d(x, w)))), x=(1, 4, 5, 5), w=(4, 4, 3, 3))
converted = relax.transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "OHWI"]})(images)
values = {b.var: b.value for block in converted["main"].body.blocks for b in block.bindings}
(call,) = (value for value in values.values() if str(value.op.name) == "relax.test_cube")
assert str(values[call.args[0]].op.name) == "relax.nn.conv2d", converted.script()

# The mapped axis, and vmap over parameters.
assert rules.mapped_axis(call, Axes((2,))) == MappedAxis(2)
model = module_of(layer, x=x.shape, w=w.shape)
both = ensemble([from_module(model, parameters={"w": w}), from_module(model, parameters={"w": w + 1})])
predictions = run(both.module, "main", x, np.stack([w, w + 1]))
np.testing.assert_array_equal(predictions[0].numpy(), np.stack([y**3, (x @ (w + 1)) ** 3], 1))

# Per-sample analysis.
losses = module_of(lambda emit, x, w: emit(op.sum(layer(emit, x, w), [1])), x=x.shape, w=w.shape)
each = run(PerSampleGradients(parameters=["w"], samples=["x"])(losses), "main_per_sample", x, w)[1].numpy()
np.testing.assert_array_equal(each, x[:, :, None] * (3 * y**2)[:, None, :])
