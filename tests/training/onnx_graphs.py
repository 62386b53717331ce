# SPDX-License-Identifier: Apache-2.0
"""Graphs of ONNX in the making, functions of one tensor that make nodes, and a model of several of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import helper, numpy_helper

SHAPE = (2, 4, 4, 4)
"""Of the tensor that each function gets: samples, channels, height, width."""


class Graph:
    """A graph in the making; floating constants have its dtype."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.nodes = []

    def name(self):
        return f"t{len(self.nodes)}"

    def constant(self, value):
        """A Constant of Python numbers (floats in the graph's dtype) or an array."""
        array = np.asarray(value)
        if array.dtype.kind == "f":
            array = array.astype(self.dtype)
        name = self.name()
        self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
        return name

    def __call__(self, kind, *operands, outputs=1, **attributes):
        """A node; what is not a name of a tensor becomes a constant, and of several outputs all names are given."""
        names = [operand if isinstance(operand, str) else self.constant(operand) for operand in operands]
        name = self.name()
        results = [f"{name}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, results, name=f"node_{kind}_{name}", **attributes))
        return results[0] if outputs == 1 else results


Function = Callable[[Graph, str], str]


def row(g, x):
    """(samples, 4, 16)."""
    return g("Reshape", x, [0, 4, 16])


def volume(g, x):
    """(samples, 2, 2, 4, 4)."""
    return g("Reshape", x, [0, 2, 2, 4, 4])


def weight(*shape):
    """A weight without symmetry."""
    return np.sin(np.arange(np.prod(shape, dtype=int), dtype="float64") * 1.7 + 0.3).reshape(shape)


def conv(mode, kernel, stride=1):
    return lambda g, x: g("Conv", x, weight(3, 4, *kernel), auto_pad=mode, strides=[stride] * len(kernel))


def transposed(rank, groups=1, bias=False, **attributes):
    """ConvTranspose of 4 channels (2 in volumes), kernels of 3, 2 and 3."""

    def function(g, x):
        data = {1: row, 2: lambda _, x: x, 3: volume}[rank](g, x)
        channels = 2 if rank == 3 else 4
        kernel = weight(channels, 3, *[3, 2, 3][:rank])
        operands = [weight(3 * groups)] if bias else []
        return g("ConvTranspose", data, kernel, *operands, group=groups, **attributes)

    return function


def resize(rank, scales=None, sizes=None, **attributes):
    def function(g, x):
        data = {1: row, 2: lambda _, x: x, 3: volume}[rank](g, x)
        if scales is not None:
            return g("Resize", data, "", g.constant(np.array([1, 1, *scales], "float32")), **attributes)
        return g("Resize", data, "", "", np.array([2, 2 if rank == 3 else 4, *sizes]), **attributes)

    return function


def scatter_nd(reduction, repeated):
    """Rows of 16 written into channels 2 and 0 (or 2 twice) of each sample."""
    places = np.array([[[0, 2], [0, 2 if repeated else 0]], [[1, 2], [1, 3]]])
    return lambda g, x: g(
        "ScatterND", row(g, x), places, g("Slice", g("Sin", row(g, x)), [1], [3], [1]), reduction=reduction
    )


def scatter_elements(reduction, repeated=False):
    places = np.array([[2, 2, 3] if repeated else [2, 0, -1]] * 2)[:, :, None] + np.zeros((2, 3, 16), "int64")
    update = lambda g, x: g("Slice", g("Sin", row(g, x)), [0], [3], [1])  # noqa: E731
    return lambda g, x: g(
        "ScatterElements", row(g, x), places.astype("int64"), update(g, x), axis=1, reduction=reduction
    )


def reduced(kind, axes=(2, 3), keepdims=1):
    return lambda g, x: g(kind, g("Add", g("Abs", x), 0.3), list(axes), keepdims=keepdims)


def chained(*kinds):
    """Unary operators, the sum of their results."""

    def function(g, x):
        total = x
        for kind in kinds:
            total = g("Add", total, g(kind, x))
        return total

    return function


def of(kind, *operands, scale=1.0, shape=None, **attributes):
    """An operator of scale·x."""

    def function(g, x):
        data = g("Mul", x, scale) if scale != 1 else x
        return g(kind, shape(g, data) if shape else data, *operands, **attributes)

    return function


def two(kind, **attributes):
    """A binary operator of x and of itself transposed."""
    return lambda g, x: g(kind, x, g("Transpose", x, perm=[0, 1, 3, 2]), **attributes)


def halves(g, x):
    """(samples, 2, 32)."""
    return g("Reshape", x, [0, 2, 32])


def recurrent(kind, gates, directions=1, optional=(), result=0, **attributes):
    """A recurrent layer of 3 units over two steps of 32 numbers; `optional` operands begin at sequence_lens."""

    def function(g, x):
        steps = halves(g, x) if attributes.get("layout") else g("Transpose", halves(g, x), perm=[1, 0, 2])
        operands = [weight(directions, gates * 3, 32), weight(directions, gates * 3, 3), weight(directions, gates * 6)]
        rest = [operand(g, x) if callable(operand) else operand for operand in optional]
        outputs = 3 if kind == "LSTM" else 2
        return g(kind, steps, *operands, *rest, outputs=outputs, hidden_size=3, **attributes)[result]

    return function


def initial(g, x):
    """(1, samples, 3), which depends on x."""
    return g("Unsqueeze", g("Slice", g("Flatten", x), [0], [3], [1]), [0])


def model(functions, opset, dtype, parameters=True, batch=SHAPE[0]):
    """A model of functions of one tensor, each of x plus a parameter of its own; the results stand in a row."""
    g = Graph(dtype)
    results = []
    for name, function in functions.items():
        y = g("Add", "x", f"offsets.{name}") if parameters else g("Identity", "x")
        results.append(g("Reshape", function(g, y), [SHAPE[0], -1] if batch == SHAPE[0] else [0, -1]))
    g.nodes.append(helper.make_node("Concat", results, ["y"], axis=1))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    zeros = np.zeros(SHAPE[1:], dtype)
    stored = [numpy_helper.from_array(zeros, f"offsets.{name}") for name in functions] if parameters else []
    inputs = [helper.make_tensor_value_info("x", kind, [batch, *SHAPE[1:]])]
    outputs = [helper.make_tensor_value_info("y", kind, [None, None])]
    graph = helper.make_graph(g.nodes, "operators", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
