# SPDX-License-Identifier: Apache-2.0
"""NaN, inf and -inf go through operators and their gradients as in PyTorch; forward also by formulas in numpy.

All operators are one module, compiled as other tests do; a part of them also with vectors and all of LLVM's optimiser
for this CPU, which may prefer other instructions for a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.gradients.harness import variable, weights_for
from tests.linked import linked, quick_module
from tvm_convgrad.kernels.transforms import allow_transforms
from tvm_convgrad.training.compile.lower import compile_module

op = relax.op
NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    """An operator: in Relax (of a builder and a variable), in numpy (None where only PyTorch tells), in PyTorch."""

    build: Callable[[Any, Any], Any]
    formula: Callable[[np.ndarray], np.ndarray] | None
    oracle: Callable[[Any, Any], Any]
    x: np.ndarray
    symbolic: bool = False


def strewn(*shape: int, dtype: str = "float32", values: tuple[float, ...] = (NAN, INF, -INF)) -> np.ndarray:
    """Numbers in (-4, 4), off the kinks of activations; three of each of the values that are not finite among them."""
    rng = np.random.default_rng(len(shape))
    x = rng.integers(-32, 32, shape).astype("float32") / 8 + 1 / 16
    x.reshape(-1)[rng.permutation(x.size)[: 3 * len(values)]] = np.repeat(values, 3)
    return x.astype(dtype)


def const(value: float) -> Any:
    return relax.const(value, "float32")


def other() -> np.ndarray:
    """A second operand with values that are not finite at other places, and some at the same ones."""
    return strewn(6, 7)[::-1].copy()


def windows(x: np.ndarray, kernel: int, stride: int, low: int) -> np.ndarray:
    """The windows of the last two axes, padded with -inf."""
    padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(low, low)] * 2, constant_values=-INF)
    view = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (-2, -1))
    return view[..., ::stride, ::stride, :, :]


def convolved(x: np.ndarray, weight: np.ndarray, groups: int = 1) -> np.ndarray:
    """A 3x3 convolution with padding 1, NCHW."""
    padded = np.pad(x.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    view = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    parts = zip(np.split(view, groups, 1), np.split(weight.astype("float64"), groups), strict=True)
    with np.errstate(invalid="ignore"):
        return np.concatenate([np.einsum("nchwij,ocij->nohw", part, w) for part, w in parts], 1)


def pooled(kernel: int, stride: int, low: int, **options: Any) -> Callable[[Any, Any], Any]:
    both = (kernel, kernel), (stride, stride), (low, low)
    return lambda _, x: op.nn.max_pool2d(x, *both, **options)


IMAGES, FILTERS, BIAS = strewn(2, 8, 6, 6), strewn(16, 8, 3, 3, values=()), np.arange(-8, 8, dtype="float32")
DEPTHWISE = strewn(8, 1, 3, 3, values=())


def relu_of_conv(builder: Any, x: Any) -> Any:
    y = builder.emit(op.nn.conv2d(x, relax.const(FILTERS), padding=1))
    return op.nn.relu(builder.emit(op.add(y, relax.const(BIAS.reshape(1, 16, 1, 1)))))


def relu_of_conv_channels_last(builder: Any, x: Any) -> Any:
    x = builder.emit(op.permute_dims(x, [0, 2, 3, 1]))
    kernel = relax.const(np.ascontiguousarray(FILTERS.transpose(0, 2, 3, 1)))
    y = builder.emit(op.nn.conv2d(x, kernel, padding=1, data_layout="NHWC", kernel_layout="OHWI"))
    y = builder.emit(op.nn.relu(builder.emit(op.add(y, relax.const(BIAS)))))
    return op.permute_dims(y, [0, 3, 1, 2])


def relu_of_depthwise(builder: Any, x: Any) -> Any:
    return op.nn.relu(builder.emit(op.nn.conv2d(x, relax.const(DEPTHWISE), padding=1, groups=8)))


def relu_of_transposed(builder: Any, x: Any) -> Any:
    kernel = relax.const(np.ascontiguousarray(FILTERS.transpose(1, 0, 2, 3)))
    return op.nn.relu(builder.emit(op.nn.conv2d_transpose(x, kernel, padding=1)))


def tensor(like: Any, array: np.ndarray) -> Any:
    """The array as a tensor of the same package and type."""
    return like.new_tensor(array)


def torch_conv(torch: Any, x: Any) -> Any:
    bias = tensor(x, BIAS)
    return torch.relu(torch.nn.functional.conv2d(x, tensor(x, FILTERS), bias, padding=1))


def pool_case(
    layout: str = "NCHW", dtype: str = "float32", symbolic: bool = False, values: Any = (NAN, INF, -INF)
) -> Case:
    """A max pool of 3x3 windows, with padding."""
    shape, order = ((2, 3, 9, 9), (0, 1, 2, 3)) if layout == "NCHW" else ((2, 9, 9, 3), (0, 3, 1, 2))
    back = (0, 1, 2, 3) if layout == "NCHW" else (0, 2, 3, 1)
    return Case(
        pooled(3, 2, 1, layout=layout),
        lambda x: windows(x.transpose(order), 3, 2, 1).max((-2, -1)).transpose(back),
        lambda torch, x: torch.nn.functional.max_pool2d(x.permute(order), 3, 2, 1).permute(back),
        strewn(*shape, dtype=dtype, values=values) if values else np.full(shape, -INF, dtype),
        symbolic,
    )


CASES = {
    "relu": Case(lambda _, x: op.nn.relu(x), lambda x: np.maximum(x, 0), lambda t, x: t.relu(x), strewn(6, 7)),
    "relu, any batch": Case(
        lambda _, x: op.nn.relu(x), lambda x: np.maximum(x, 0), lambda t, x: t.relu(x), strewn(6, 7), True
    ),
    "relu, long": Case(lambda _, x: op.nn.relu(x), lambda x: np.maximum(x, 0), lambda t, x: t.relu(x), strewn(64, 64)),
    "clip": Case(
        lambda _, x: op.clip(x, -1, 2), lambda x: np.clip(x, -1, 2), lambda t, x: x.clamp(-1, 2), strewn(64, 7)
    ),
    "relu6": Case(lambda _, x: op.nn.relu6(x), lambda x: np.clip(x, 0, 6), lambda t, x: x.clamp(0, 6), strewn(6, 7)),
    "leakyrelu": Case(
        lambda _, x: op.nn.leakyrelu(x, 0.25),
        lambda x: np.where(x > 0, x, x * np.float32(0.25)),
        lambda t, x: t.nn.functional.leaky_relu(x, 0.25),
        strewn(6, 7),
    ),
    "hardsigmoid": Case(
        lambda _, x: op.divide(op.clip(op.add(x, const(3.0)), 0, 6), const(6.0)),
        lambda x: np.clip(x + 3, 0, 6) / 6,
        lambda t, x: t.nn.functional.hardsigmoid(x),
        strewn(6, 7),
    ),
    "hardswish": Case(
        lambda _, x: op.divide(op.multiply(x, op.clip(op.add(x, const(3.0)), 0, 6)), const(6.0)),
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
        lambda t, x: t.nn.functional.hardswish(x),
        strewn(6, 7, values=(NAN, INF)),
    ),
    "gelu": Case(lambda _, x: op.nn.gelu(x), None, lambda t, x: t.nn.functional.gelu(x), strewn(6, 7)),
    "silu": Case(lambda _, x: op.nn.silu(x), None, lambda t, x: t.nn.functional.silu(x), strewn(6, 7)),
    "selu": Case(lambda _, x: op.nn.selu(x), None, lambda t, x: t.nn.functional.selu(x), strewn(6, 7)),
    "softplus": Case(lambda _, x: op.nn.softplus(x), None, lambda t, x: t.nn.functional.softplus(x), strewn(6, 7)),
    "sigmoid": Case(lambda _, x: op.sigmoid(x), lambda x: 1 / (1 + np.exp(-x)), lambda t, x: x.sigmoid(), strewn(6, 7)),
    "tanh": Case(lambda _, x: op.tanh(x), np.tanh, lambda t, x: x.tanh(), strewn(6, 7)),
    "maximum with a number": Case(
        lambda _, x: op.maximum(const(0.5), x),
        lambda x: np.maximum(x, 0.5),
        lambda t, x: t.maximum(x, tensor(x, np.array(0.5))),
        strewn(6, 7),
    ),
    "minimum with NaN": Case(
        lambda _, x: op.minimum(x, const(NAN)),
        lambda x: np.minimum(x, NAN),
        lambda t, x: t.minimum(x, tensor(x, np.array(NAN))),
        strewn(6, 7),
    ),
    "maximum": Case(
        lambda _, x: op.maximum(x, relax.const(other())),
        lambda x: np.maximum(x, other()),
        lambda t, x: t.maximum(x, tensor(x, other())),
        strewn(6, 7),
    ),
    "minimum": Case(
        lambda _, x: op.minimum(relax.const(other()), x),
        lambda x: np.minimum(x, other()),
        lambda t, x: t.minimum(x, tensor(x, other())),
        strewn(6, 7),
    ),
    "maximum, broadcast": Case(
        lambda _, x: op.maximum(x, relax.const(other()[:1, :])),
        lambda x: np.maximum(x, other()[:1]),
        lambda t, x: t.maximum(x, tensor(x, other()[:1])),
        strewn(6, 7),
    ),
    "max of rows": Case(lambda _, x: op.max(x, [1]), lambda x: x.max(1), lambda t, x: t.amax(x, 1), strewn(64, 80)),
    "min of columns": Case(lambda _, x: op.min(x, [0]), lambda x: x.min(0), lambda t, x: t.amin(x, 0), strewn(64, 80)),
    "max of images": Case(
        lambda _, x: op.max(x, [-2, -1], keepdims=True),
        lambda x: x.max((2, 3), keepdims=True),
        lambda t, x: t.amax(x, (2, 3), True),
        strewn(2, 5, 8, 8),
    ),
    "max of all": Case(
        lambda _, x: op.max(x), lambda x: x.max(), lambda t, x: t.amax(x), strewn(6, 7, values=(INF, -INF))
    ),
    "max, any batch": Case(
        lambda _, x: op.max(x, [0]), lambda x: x.max(0), lambda t, x: t.amax(x, 0), strewn(6, 7), True
    ),
    "softmax": Case(lambda _, x: op.nn.softmax(x, -1), None, lambda t, x: x.softmax(-1), strewn(6, 7)),
    "log_softmax": Case(lambda _, x: op.nn.log_softmax(x, -1), None, lambda t, x: x.log_softmax(-1), strewn(6, 7)),
    "log_softmax, masked": Case(
        lambda _, x: op.nn.log_softmax(x, -1), None, lambda t, x: x.log_softmax(-1), strewn(6, 7, values=(-INF,))
    ),
    "comparison": Case(
        lambda _, x: op.where(op.less_equal(x, const(0.0)), const(0.0), x),
        lambda x: np.where(x <= 0, np.float32(0), x),
        lambda t, x: t.where(x <= 0, t.zeros_like(x), x),
        strewn(6, 7),
    ),
    "mask": Case(
        lambda _, x: op.multiply(x, relax.const((other() > 0).astype("float32"))),
        lambda x: x * (other() > 0),
        lambda t, x: x * tensor(x, (other() > 0).astype("float32")),
        strewn(6, 7),
    ),
    "layer_norm": Case(
        lambda _, x: op.nn.layer_norm(x, relax.const(np.ones(7, "float32")), relax.const(np.zeros(7, "float32")), [-1]),
        None,
        lambda t, x: t.nn.functional.layer_norm(x, (7,)),
        strewn(6, 7, values=(NAN, INF)),
    ),
    "max pool": pool_case(),
    "max pool, any batch": pool_case(symbolic=True),
    "max pool, float16": pool_case(dtype="float16"),
    "max pool, float64": pool_case(dtype="float64"),
    "max pool, channels last": pool_case("NHWC"),
    "max pool, channels last, any batch": pool_case("NHWC", symbolic=True),
    "max pool, channels last, float64": pool_case("NHWC", "float64"),
    "max pool of -inf": pool_case(values=()),
    "max pool of -inf, any batch": pool_case(values=(), symbolic=True),
    "max pool of -inf, channels last": pool_case("NHWC", values=()),
    "max pool, dilated": Case(
        lambda _, x: op.nn.max_pool2d(x, (2, 2), (1, 1), (0, 0), (2, 2)),
        None,
        lambda t, x: t.nn.functional.max_pool2d(x, 2, 1, 0, 2),
        strewn(2, 3, 9, 9),
    ),
    "max pool, 1-d": Case(
        lambda _, x: op.nn.max_pool1d(x, 3, 2, 1),
        None,
        lambda t, x: t.nn.functional.max_pool1d(x, 3, 2, 1),
        strewn(2, 3, 9),
    ),
    "max pool, 3-d": Case(
        lambda _, x: op.nn.max_pool3d(x, (2, 2, 2), (2, 2, 2)),
        None,
        lambda t, x: t.nn.functional.max_pool3d(x, 2, 2),
        strewn(1, 2, 6, 6, 6),
    ),
    "average pool": Case(
        lambda _, x: op.nn.avg_pool2d(x, (2, 2), (2, 2)),
        None,
        lambda t, x: t.nn.functional.avg_pool2d(x, 2, 2),
        strewn(2, 3, 6, 6),
    ),
    "adaptive average pool": Case(
        lambda _, x: op.nn.adaptive_avg_pool2d(x, (3, 3)),
        None,
        lambda t, x: t.nn.functional.adaptive_avg_pool2d(x, 3),
        strewn(2, 3, 6, 6),
    ),
    "resize, nearest": Case(
        lambda _, x: op.image.resize2d(
            x,
            relax.ShapeExpr([12, 12]),
            layout="NCHW",
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        ),
        lambda x: x.repeat(2, axis=2).repeat(2, axis=3),
        lambda t, x: t.nn.functional.interpolate(x, size=(12, 12), mode="nearest"),
        strewn(2, 3, 6, 6),
    ),
    "relu of a convolution": Case(
        relu_of_conv, lambda x: np.maximum(convolved(x, FILTERS) + BIAS.reshape(16, 1, 1), 0), torch_conv, IMAGES
    ),
    "relu of a convolution, channels last": Case(
        relu_of_conv_channels_last,
        lambda x: np.maximum(convolved(x, FILTERS) + BIAS.reshape(16, 1, 1), 0),
        torch_conv,
        IMAGES,
    ),
    "relu of a depthwise convolution": Case(
        relu_of_depthwise,
        lambda x: np.maximum(convolved(x, DEPTHWISE, 8), 0),
        lambda t, x: t.relu(t.nn.functional.conv2d(x, tensor(x, DEPTHWISE), padding=1, groups=8)),
        IMAGES,
    ),
    "relu of a transposed convolution": Case(
        relu_of_transposed,
        lambda x: np.maximum(convolved(x, FILTERS[:, :, ::-1, ::-1]), 0),
        lambda t, x: t.relu(
            t.nn.functional.conv_transpose2d(x, tensor(x, FILTERS.transpose(1, 0, 2, 3).copy()), padding=1)
        ),
        IMAGES,
    ),
}
UNSETTLED = ("selu", "hardswish")
"""PyTorch's gradients of these at NaN are NaN in its vectors, and numbers in the rest of a line; ours are NaN."""

LOOSE = {"float16": 1e-2, "float32": 1e-5, "float64": 1e-12}


def functions_of(case: Case) -> tuple[Any, Any]:
    """forward(x) -> y, and gradient(x, w) -> dx of the sum of y * w."""
    symbols = {0: tvm.tirx.Var("n", "int64")} if case.symbolic else None
    builder, x = relax.BlockBuilder(), variable("x", case.x, symbols)
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(case.build(builder, x))
        builder.emit_func_output(y)
    forward = builder.get()["main"]
    builder, x = relax.BlockBuilder(), variable("x", case.x, symbols)
    with builder.function("main"):
        with builder.dataflow():
            y = builder.emit(case.build(builder, x))
            w = relax.Var("w", y.ty)
            loss = builder.emit_output(op.sum(op.astype(op.multiply(y, w), "float32")))
        builder.emit_func_output(loss, [x, w])
    module = relax.transform.Gradient("main", require_grads=[x])(builder.get())
    return forward, module["main_adjoint"]


VECTORS = [name for name in CASES if name.startswith(("relu", "clip", "maximum", "minimum", "max of"))]
VECTORS += ["max pool", "max pool, channels last", "max pool, any batch"]
"""Operators that are compiled with vectors, too."""

BOTH = [("plain", name) for name in CASES] + [("vectors", name) for name in VECTORS]


@cache
def machine(kind: str) -> Any:
    """The operators, compiled in the one way or the other."""
    functions = {}
    for number, (name, case) in enumerate(CASES.items()):
        if kind == "vectors" and name not in VECTORS:
            continue
        for what, function in zip(("forward", "gradient"), functions_of(case), strict=True):
            name = f"{what}{number}"
            functions[tvm.ir.GlobalVar(name)] = function.with_attr("global_symbol", name)
    module = tvm.IRModule(functions)
    return quick_module(module) if kind == "plain" else linked(compile_module(module, "native"))


def run(kind: str, what: str, name: str, *arrays: np.ndarray) -> Any:
    return machine(kind)[f"{what}{list(CASES).index(name)}"](*map(tvm.runtime.tensor, arrays))


def assert_same(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    limit = LOOSE[dtype]
    np.testing.assert_allclose(found.astype("float64"), wanted.astype("float64"), limit, limit, equal_nan=True)


@pytest.mark.parametrize(("kind", "name"), [each for each in BOTH if CASES[each[1]].formula is not None])
def test_forward_by_numpy(kind: str, name: str) -> None:
    case = CASES[name]
    with np.errstate(all="ignore"):
        wanted = np.asarray(case.formula(case.x))
    found = run(kind, "forward", name, case.x).numpy()
    assert np.isnan(wanted).any() == np.isnan(case.x).any()  # none of these loses one
    assert_same(found, wanted, str(case.x.dtype))


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_forward_and_gradient_by_pytorch(kind: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    case, dtype = CASES[name], str(CASES[name].x.dtype)
    x = torch.tensor(case.x.astype("float32" if dtype == "float16" else "float64"), requires_grad=True)
    wanted = case.oracle(torch, x)
    weights = weights_for(wanted.shape, dtype)
    (wanted * torch.tensor(weights).to(wanted.dtype)).sum().backward()
    assert_same(run(kind, "forward", name, case.x).numpy(), wanted.detach().numpy(), dtype)
    expected = x.grad.numpy()
    if name in UNSETTLED:
        expected[np.isnan(case.x)] = NAN
    assert_same(run(kind, "gradient", name, case.x, weights)[1][0].numpy(), expected, dtype)


def test_relu_by_winograd_keeps_nan() -> None:
    """Winograd's transform spreads a NaN over its tile; it must not lose it."""
    builder, x = relax.BlockBuilder(), variable("x", IMAGES)
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relu_of_conv(builder, x))
        builder.emit_func_output(y)
    with allow_transforms(True):
        found = linked(compile_module(builder.get(), "native"))["main"](tvm.runtime.tensor(IMAGES)).numpy()
    wanted = convolved(IMAGES, FILTERS)
    assert np.isnan(wanted).any()
    assert np.isnan(found[np.isnan(wanted)]).all()


def test_integers_are_left_to_tvm() -> None:
    """They have no NaN, and no conversion to floats may creep in."""
    x = np.array([[-(2**24) - 1, 3], [2**24 + 1, -5]], "int32")
    builder, v = relax.BlockBuilder(), variable("x", x)
    with builder.function("main", [v]):
        with builder.dataflow():
            outputs = [builder.emit_output(each) for each in (op.nn.relu(v), op.max(v, [1]), op.maximum(v, v))]
        builder.emit_func_output(relax.Tuple(outputs))
    found = quick_module(builder.get())["main"](tvm.runtime.tensor(x))
    for tensor_, wanted in zip(found, (np.maximum(x, 0), x.max(1), x), strict=True):
        np.testing.assert_array_equal(tensor_.numpy(), wanted)
