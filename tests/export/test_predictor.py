# SPDX-License-Identifier: Apache-2.0
"""Inference functions: batch norms are folded where a convolution allows it, and predictions are those of the step.

Weights and data are small integers and the factors of batch norms powers of two, so that both are exact.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.linked import quick_module
from tests.training.harness import Runner, relative_error
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import bindings_of, element_type, is_call, operator_counts
from tvm_convgrad.training.model.ensemble import ensemble
from tvm_convgrad.training.model.model import Model, from_module
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.options import StepOptions
from tvm_convgrad.training.step.predictor import build_predictor

BATCH, CHANNELS = 2, 4
EPSILON, VARIANCE = 0.25, 3.75  # 1 / sqrt(4) is exact


class Network:
    """A builder of a model: layers with parameters of small integers."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.builder = shape, relax.BlockBuilder()
        self.x = relax.Var("x", relax.TensorType(shape, "float32"))
        self.parameters: list[relax.Var] = []
        self.values: dict[str, np.ndarray] = {}
        self._random = np.random.default_rng(0)

    def parameter(self, name: str, shape: tuple[int, ...], value: np.ndarray | None = None) -> relax.Var:
        drawn = self._random.integers(-3, 4, shape).astype("float32")
        self.values[name] = drawn if value is None else value
        self.parameters.append(relax.Var(name, relax.TensorType(shape, "float32")))
        return self.parameters[-1]

    def norm(self, data: relax.Expr, name: str, channels: int = CHANNELS, axis: int = 1, **attributes: bool):
        powers = 2.0 ** self._random.integers(-1, 2, channels).astype("float32")
        given = {"gamma": powers, "beta": None, "mean": None, "var": np.full(channels, VARIANCE, "float32")}
        vectors = [self.parameter(f"{name}.{key}", (channels,), value) for key, value in given.items()]
        call = relax.op.nn.batch_norm(data, *vectors, axis=axis, epsilon=EPSILON, **attributes)
        return self.builder.emit(relax.TupleGetItem(self.builder.emit(call), 0))

    def convolution(self, data: relax.Expr, name: str, shape: tuple[int, ...], bias: bool = False, **attributes):
        weight = self.parameter(f"{name}.weight", shape)
        result = self.builder.emit(relax.op.nn.conv2d(data, weight, padding=1, **attributes))
        if bias:
            vector = self.parameter(f"{name}.bias", (shape[0],))
            result = self.builder.emit(
                relax.op.add(result, self.builder.emit(relax.op.reshape(vector, (1, shape[0], 1, 1))))
            )
        return result

    def model(self, body: Callable[[Network], relax.Expr]) -> Model:
        with self.builder.function("main"):
            with self.builder.dataflow():
                result = self.builder.emit_output(relax.op.sum(body(self), [2, 3]))
            self.builder.emit_func_output(result, [self.x, *self.parameters])
        return from_module(self.builder.get(), parameters=self.values)


def plain(net: Network) -> relax.Expr:
    return net.norm(net.convolution(net.x, "c", (CHANNELS, 3, 3, 3)), "n")


def with_bias(net: Network) -> relax.Expr:
    return relax.op.nn.relu(net.norm(net.convolution(net.x, "c", (CHANNELS, 3, 3, 3), bias=True, strides=2), "n"))


def grouped(net: Network) -> relax.Expr:
    first = net.convolution(net.x, "c", (CHANNELS, 3, 3, 3))
    return net.norm(net.convolution(first, "d", (CHANNELS, 2, 3, 3), bias=True, groups=2), "n")


def transposed(net: Network) -> relax.Expr:
    """The weight has inputs, and outputs of one group: 3 groups of 1 and 2 channels."""
    weight = net.parameter("t.weight", (3, 2, 3, 3))
    return net.norm(net.builder.emit(relax.op.nn.conv2d_transpose(net.x, weight, groups=3)), "n", 6)


def channels_last_kernel(net: Network) -> relax.Expr:
    weight = net.parameter("c.weight", (3, 3, 3, CHANNELS))
    return net.norm(net.builder.emit(relax.op.nn.conv2d(net.x, weight, kernel_layout="HWIO")), "n")


def without_affine(net: Network) -> relax.Expr:
    return net.norm(net.convolution(net.x, "c", (CHANNELS, 3, 3, 3)), "n", scale=False, center=False)


def two_in_a_row(net: Network) -> relax.Expr:
    """The second one has no convolution before it."""
    return net.norm(plain(net), "m")


def read_twice(net: Network) -> relax.Expr:
    """Something else reads the convolution, too."""
    first = net.convolution(net.x, "c", (CHANNELS, 3, 3, 3))
    return net.builder.emit(relax.op.add(net.norm(first, "n"), first))


def residual_sum(net: Network) -> relax.Expr:
    """What is added to the convolution is not a bias."""
    first = net.convolution(net.x, "c", (CHANNELS, 3, 3, 3))
    second = net.convolution(first, "d", (CHANNELS, CHANNELS, 3, 3))
    return net.norm(net.builder.emit(relax.op.add(second, first)), "n")


def along_another_axis(net: Network) -> relax.Expr:
    """A batch norm along the rows is none of the convolution's channels."""
    return net.norm(net.convolution(net.x, "c", (CHANNELS, 3, 3, 3)), "n", 6, axis=2)


def computed_scale(net: Network) -> relax.Expr:
    """The scale is computed in the forward pass, as that of a momentum encoder is."""
    vectors = [net.parameter(f"n.{key}", (CHANNELS,)) for key in ("gamma", "beta", "mean")]
    vectors.append(net.parameter("n.var", (CHANNELS,), np.full(CHANNELS, VARIANCE, "float32")))
    vectors[0] = net.builder.emit(relax.op.multiply(vectors[0], relax.const(0.5, "float32")))
    data = net.convolution(net.x, "c", (CHANNELS, 3, 3, 3))
    call = net.builder.emit(relax.op.nn.batch_norm(data, *vectors, axis=1, epsilon=EPSILON))
    return net.builder.emit(relax.TupleGetItem(call, 0))


def shared_statistics(net: Network) -> relax.Expr:
    """One layer, called twice."""
    vectors = [net.parameter(f"n.{key}", (CHANNELS,)) for key in ("gamma", "beta", "mean")]
    vectors.append(net.parameter("n.var", (CHANNELS,), np.full(CHANNELS, VARIANCE, "float32")))
    data = net.convolution(net.x, "c", (CHANNELS, 3, 3, 3))
    for name in ("d", "e"):
        call = net.builder.emit(relax.op.nn.batch_norm(data, *vectors, axis=1, epsilon=EPSILON))
        data = net.convolution(net.builder.emit(relax.TupleGetItem(call, 0)), name, (CHANNELS, CHANNELS, 3, 3))
    return data


FOLDED = {plain, with_bias, grouped, transposed, channels_last_kernel, without_affine, shared_statistics}


@pytest.mark.parametrize(
    "body",
    [
        *sorted(FOLDED, key=lambda each: each.__name__),
        *(two_in_a_row, read_twice, residual_sum, along_another_axis, computed_scale),
    ],
    ids=lambda body: body.__name__,
)
def test_predictions_are_those_of_the_step(body: Callable[[Network], relax.Expr]) -> None:
    model = Network((BATCH, 3, 6, 6)).model(body)
    before = {name: value.copy() for name, value in {**model.parameters, **model.states}.items()}
    predictor = build_predictor(model, before)
    counts = operator_counts(predictor.module["predict"])
    assert "relax.nn.batch_norm" not in counts
    assert ("relax.multiply" in counts) == (body not in FOLDED)
    assert counts["relax.nn.conv2d"] + counts["relax.nn.conv2d_transpose"] == sum("weight" in name for name in before)
    x = np.random.default_rng(1).integers(-3, 4, (BATCH, 3, 6, 6)).astype("float32")
    found = quick_module(predictor.module)["predict"](tvm.runtime.tensor(x)).numpy()
    expected = Runner(build_step(model, lr=0.1)).predict(x)
    assert np.abs(expected).max() < 2**22  # so that sums are exact
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(found, expected)
    for name, value in {**model.parameters, **model.states}.items():
        np.testing.assert_array_equal(value, before[name])


def layers(net: Network) -> relax.Expr:
    """A convolution and two linear layers, and a product with a table, which no precision changes."""
    data = net.builder.emit(relax.op.nn.relu(net.convolution(net.x, "c", (CHANNELS, 3, 3, 3), bias=True)))
    rows = net.builder.emit(relax.op.reshape(data, (BATCH * CHANNELS * 3, 12)))
    for name in ("first", "second"):
        weight = net.builder.emit(relax.op.permute_dims(net.parameter(f"{name}.weight", (12, 12))))
        rows = net.builder.emit(relax.op.matmul(rows, weight))
        rows = net.builder.emit(relax.op.nn.gelu(net.builder.emit(relax.op.add(rows, net.parameter(name, (12,))))))
    table = relax.const(np.cos(np.arange(144.0)).reshape(12, 12).astype("float32"))
    rows = net.builder.emit(relax.op.matmul(rows, table))
    return net.builder.emit(relax.op.reshape(rows, (BATCH, CHANNELS, 6, 6)))


@pytest.mark.parametrize("results", ["float32", "operands", "activations"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_round_as_those_of_the_step(dtype: str, results: str) -> None:
    """Weights are constants there, too, but they are narrowed as a step's are."""
    model = Network((BATCH, 3, 6, 6)).model(layers)
    random = np.random.default_rng(2)
    for name, value in model.parameters.items():
        model.parameters[name] = (random.standard_normal(value.shape) / 3).astype("float32")
    options = StepOptions(dtype=dtype, results=results)
    x = random.standard_normal((BATCH, 3, 6, 6)).astype("float32")
    predictor = build_predictor(model, model.parameters, options)
    products = [
        [element_type(operand) for operand in binding.value.args]
        for binding in bindings_of(predictor.module["predict"])
        if is_call(binding.value, "relax.matmul")
    ]
    assert products == [[dtype, dtype], [dtype, dtype], ["float32", "float32"]]
    found = quick_module(predictor.module)["predict"](tvm.runtime.tensor(x)).numpy()
    unit = 2.0**-11 if dtype == "float16" else 2.0**-8
    assert relative_error(found, Runner(build_step(model, options)).predict(x)) < unit


def test_values_decide_and_not_the_model() -> None:
    model = Network((BATCH, 3, 6, 6)).model(plain)
    values = {name: value * 2 for name, value in {**model.parameters, **model.states}.items()}
    values["n.var"] = model.states["n.var"]
    x = tvm.runtime.tensor(np.ones((BATCH, 3, 6, 6), "float32"))
    found = quick_module(build_predictor(model, values | {"more": np.ones(1)}).module)["predict"](x).numpy()
    runner = Runner(build_step(model, lr=0.1))
    runner.state = tuple(tvm.runtime.tensor(values[schema.name]) for schema in runner.step_module.state)
    np.testing.assert_array_equal(found, runner.predict(x.numpy()))


def test_values_that_do_not_fit_are_named() -> None:
    model = Network((BATCH, 3, 6, 6)).model(plain)
    values = {**model.parameters, **model.states}
    with pytest.raises(ModelError, match=r"no values of their shapes are given for c.weight, n.mean;"):
        build_predictor(model, {**values, "c.weight": values["n.var"], "n.mean": values["n.mean"].astype("float64")})


def test_an_ensemble_is_refused() -> None:
    model = ensemble([Network((BATCH, 3, 6, 6)).model(plain)] * 2)
    with pytest.raises(ModelError, match="an ensemble has no inference library"):
        build_predictor(model, {})
