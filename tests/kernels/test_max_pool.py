# SPDX-License-Identifier: Apache-2.0
"""Kernels of max pools and their gradients: every window, tie and padding against PyTorch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.op.grad import max_pool2d_backward

import tvm_convgrad
from tvm_convgrad.core.dtypes import numpy_dtype

torch = pytest.importorskip("torch")

CASES = {
    "resnet": ((2, 5, 17, 23), 3, 2, 1),
    "halves": ((1, 3, 16, 8), 2, 2, 0),
    "overlapping": ((2, 2, 9, 7), 3, 1, 1),
    "wide": ((1, 4, 6, 40), (2, 5), (1, 3), (1, 2)),
    "gaps": ((1, 2, 11, 13), 2, 3, 0),
    "many planes": ((4, 64, 14, 14), 3, 2, 1),
    "some channels": ((2, 24, 12, 9), 3, 2, 1),
    "no window reaches the end": ((3, 16, 8, 8), 2, 3, 0),
    "long odd rows": ((1, 3, 9, 71), 3, 2, 1),
    "long rows": ((1, 2, 5, 70), (2, 3), (3, 1), (0, 1)),
    "many taps": ((1, 3, 14, 15), 7, 1, 3),
    "several blocks of channels": ((1, 96, 6, 7), 3, 2, 1),
}


def compiled(shape, kernel, stride, padding, layout="NCHW", dtype="float32"):
    builder = relax.BlockBuilder()
    pair = lambda value: value if isinstance(value, tuple) else (value, value)  # noqa: E731
    x = relax.Var("x", relax.TensorType(shape, dtype))
    options = {"pool_size": pair(kernel), "strides": pair(stride), "padding": pair(padding), "layout": layout}
    with builder.function("forward", [x]):
        with builder.dataflow():
            result = builder.emit(relax.op.nn.max_pool2d(x, **options))
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    grad, data = relax.Var("grad", result.ty), relax.Var("data", x.ty)
    with builder.function("backward", [grad, data]):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(max_pool2d_backward(grad, data, **options)))
        builder.emit_func_output(output)
    module = builder.get()
    target = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
    with target, tvm_convgrad.rules():
        legal = relax.transform.LegalizeOps()(module)
    assert {v.name_hint for v in legal.get_global_vars()} >= {"max_pool", "max_pool_backward"}
    with tvm_convgrad.rules():
        return relax.VirtualMachine(tvm.compile(module, target), tvm.cpu())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("values", [3, 1000])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_max_pool_equals_pytorch(name, values, layout):
    to = (lambda array: np.ascontiguousarray(array.transpose(0, 2, 3, 1))) if layout == "NHWC" else np.asarray
    shape, *options = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.integers(-values, values, shape).astype("float32")  # with 3, most windows have ties
    machine = compiled(to(np.empty(shape)).shape, *options, layout)
    x[0, 0, :2, :2] = -np.inf  # a window of nothing else has a first place too
    leaf = torch.tensor(x, requires_grad=True)
    wanted = torch.nn.functional.max_pool2d(leaf, *options)
    grad = rng.integers(-8, 9, tuple(wanted.shape)).astype("float32")
    wanted.backward(torch.tensor(grad))
    found = machine["forward"](tvm.runtime.tensor(to(x))).numpy()
    np.testing.assert_array_equal(found, to(wanted.detach().numpy()))
    found = machine["backward"](tvm.runtime.tensor(to(grad)), tvm.runtime.tensor(to(x))).numpy()
    np.testing.assert_array_equal(found, to(leaf.grad.numpy()))


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_other_types_and_nan_equal_pytorch(number, layout):
    """Small integers are exact in every type; the last NaN of a window wins."""
    to = (lambda array: np.ascontiguousarray(array.transpose(0, 2, 3, 1))) if layout == "NHWC" else np.asarray
    dtype = ("bfloat16", "float16", "float64")[number % 3]
    shape, *options = list(CASES.values())[number]
    rng = np.random.default_rng(number)
    x = rng.integers(-4, 5, shape).astype("float64")
    x[rng.random(shape) < 0.02] = np.nan
    leaf = torch.tensor(x, requires_grad=True)
    wanted = torch.nn.functional.max_pool2d(leaf, *options)
    grad = rng.integers(-2, 3, tuple(wanted.shape)).astype("float64")
    wanted.backward(torch.tensor(grad))
    machine = compiled(to(x).shape, *options, layout, dtype)
    tensor = lambda array: tvm.runtime.tensor(to(array).astype(numpy_dtype(dtype)))  # noqa: E731
    found = machine["forward"](tensor(x)).numpy().astype("float64")
    np.testing.assert_array_equal(found, to(wanted.detach().numpy()))
    found = machine["backward"](tensor(grad), tensor(x)).numpy().astype("float64")
    np.testing.assert_array_equal(found, to(leaf.grad.numpy()))


@pytest.mark.parametrize(("dtype", "base"), [("bfloat16", 256), ("float16", 2048)])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sixteen_bits_are_summed_in_float32(dtype, base, layout):
    """Overlapping windows share a maximum; to `base` the type adds eight ones at once, but not one by one."""
    last = layout == "NHWC"
    shape = (1, 5, 5, 16) if last else (1, 16, 5, 5)
    x = np.zeros(shape, "float32")
    x[(0, 2, 2) if last else (0, slice(None), 2, 2)] = 7
    machine = compiled(shape, 3, 1, 1, layout, dtype)
    to = lambda array: tvm.runtime.tensor(array.astype(numpy_dtype(dtype)))  # noqa: E731
    forward = machine["forward"](to(x)).numpy().astype("float32")
    assert (forward.max(), (forward == 7).sum()) == (7, 9 * 16)
    grad = np.zeros(shape, "float32")
    inner = (0, slice(1, 4), slice(1, 4)) if last else (0, slice(None), slice(1, 4), slice(1, 4))
    grad[inner] = 1
    grad[(0, 1, 1) if last else (0, slice(None), 1, 1)] = base
    found = machine["backward"](to(grad), to(x)).numpy().astype("float32")
    assert np.unique(found).tolist() == [0, base + 8]
