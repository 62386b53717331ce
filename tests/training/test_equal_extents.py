# SPDX-License-Identifier: Apache-2.0
"""Programs in which all extents are equal: which axis is which is told by its place, never by its extent.

Small integers, so that float32 is exact: what goes through all passes of a step equals numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.lowering import recorded_choices
from relax_ops.ops import make_call
from tests.linked import quick_module
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BY_NAME
from tvm_convgrad.core.geometry import flat_padding
from tvm_convgrad.core.problem import ConvProblem

LAYOUTS = {"NCHW": ("NCHW", "OIHW", "NCHW"), "NHWC": ("NHWC", "OHWI", "NHWC"), "CNHW": ("CNHW", "IOHW", "CNHW")}


class Program:
    """A function under construction, and what numpy gives for each of its outputs."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        self.arrays = {name: rng.integers(-3, 4, shape).astype("float32") for name, shape in shapes.items()}
        self.params = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
        self.outputs: list[Callable[[Any], Any]] = []
        self.wanted: list[np.ndarray] = []

    def gives(self, value: Callable[[Any], Any], wanted: np.ndarray) -> None:
        """One output: value(builder) emits it."""
        self.outputs.append(value)
        self.wanted.append(wanted)

    def check(self) -> set[tuple[str, ...]]:
        """Compile as a step is, and compare; what kernels of convolutions do besides."""
        builder = relax.BlockBuilder()
        with builder.function("main", list(self.params.values())):
            with builder.dataflow():
                output = builder.emit_output(relax.Tuple([builder.emit(value(builder)) for value in self.outputs]))
            builder.emit_func_output(output)
        with recorded_choices() as record:
            main = quick_module(builder.get())["main"]
        found = main(*(tvm.runtime.tensor(array) for array in self.arrays.values()))
        assert len(found) == len(self.wanted) > 0
        for number, (have, want) in enumerate(zip(found, self.wanted, strict=True)):
            np.testing.assert_array_equal(have.numpy(), want.astype("float32"), err_msg=f"output {number}")
        return {entry.fused for entry in record}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extent", [1, 3])
def test_what_is_added_to_a_convolution(extent: int, layout: str) -> None:
    """A vector is a bias where it lies along the channels, and nowhere else."""
    data, kernel, grad = LAYOUTS[layout]
    e = extent
    problem = ConvProblem(
        e, e, e, (e, e), (3, 3), (), 1, data_layout=data, kernel_layout=kernel, grad_layout=grad
    )  # fmt: skip
    program = Program(x=problem.data_shape, w=problem.weight_shape, v=(e,), m=(e, e), full=(e, e, e, e))
    x, w, v, m, full = program.params.values()
    arrays = program.arrays
    y = reference.forward(problem, arrays["x"], arrays["w"])

    def conv(builder: Any) -> Any:
        return builder.emit(relax.op.nn.conv2d(x, w, padding=1, data_layout=data, kernel_layout=kernel))

    def add(shape: tuple[int, ...], vector: Any, array: np.ndarray) -> None:
        program.gives(
            lambda builder: relax.op.nn.relu(relax.op.add(conv(builder), relax.op.reshape(vector, shape))),
            np.maximum(y + array.reshape(shape), 0),
        )

    for axis in range(4):
        add(tuple(e if place == axis else 1 for place in range(4)), v, arrays["v"])
    program.gives(lambda builder: relax.op.add(conv(builder), v), y + arrays["v"])
    program.gives(lambda builder: relax.op.add(conv(builder), m), y + arrays["m"])
    program.gives(lambda builder: relax.op.add(full, conv(builder)), y + arrays["full"])
    assert ("bias", "relu") in program.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extent", [1, 4])
def test_sums_of_the_gradient_beside_wgrad(extent: int, layout: str) -> None:
    """The sum over everything but channels is the bias gradient; others, of the same shape, are not."""
    e, (data, kernel, grad) = extent, LAYOUTS[layout]
    problem = ConvProblem(
        e, e, e, (e, e), (1, 1), data_layout=data, kernel_layout=kernel, grad_layout=grad
    )  # fmt: skip
    program = Program(dy=problem.grad_shape, x=problem.data_shape)
    dy, x = program.params.values()
    dw = reference.backward_weight(problem, program.arrays["dy"], program.arrays["x"])
    geometry = {"strides": (1, 1), "padding": flat_padding(problem.padding), "dilation": (1, 1), "groups": 1}
    layouts = {"grad_layout": grad, "data_layout": data, "kernel_layout": kernel}
    entry = BY_NAME["conv2d_backward_weight"]
    for kept in range(4):
        axes = [axis for axis in range(4) if axis != kept]
        for keep in (False, True):
            program.gives(
                lambda builder, axes=axes, keep=keep: relax.op.sum(dy, axes, keep),
                program.arrays["dy"].sum(tuple(axes), keepdims=keep),
            )
        program.gives(
            lambda builder, kept=kept: relax.op.collapse_sum_to(
                dy, relax.ShapeExpr([e if axis == kept else 1 for axis in range(4)])
            ),
            program.arrays["dy"].sum(tuple(axes), keepdims=True),
        )
        program.gives(
            lambda builder: make_call(entry, dy, x, kernel_size=(1, 1), out_dtype=None, **geometry, **layouts), dw
        )
    assert ("bias_grad",) in program.check()


def test_products_of_square_matrices() -> None:
    """Bias and its gradient, and sums of weight gradients, of which one may be transposed."""
    e = 64
    program = Program(a=(e, e), b=(e, e), c=(e, e), v=(e,), column=(e, 1))
    a, b, c, v, column = program.params.values()
    x, y, z, vector, tall = (array.astype("float64") for array in program.arrays.values())

    def turned(builder: Any, value: Any) -> Any:
        return builder.emit(relax.op.permute_dims(value, [1, 0]))

    def product(builder: Any, left: Any, right: Any) -> Any:
        return builder.emit(relax.op.matmul(left, right))

    program.gives(lambda builder: relax.op.add(product(builder, a, b), v), x @ y + vector)
    program.gives(lambda builder: relax.op.add(product(builder, a, turned(builder, b)), column), x @ y.T + tall)
    program.gives(
        lambda builder: relax.op.add(product(builder, b, a), relax.op.reshape(v, (e, 1))), y @ x + vector[:, None]
    )
    wgrads = {
        (False, False): lambda builder: product(builder, turned(builder, a), c),
        (True, False): lambda builder: turned(builder, product(builder, turned(builder, a), c)),
        (False, True): lambda builder: product(builder, turned(builder, b), c),
        (True, True): lambda builder: turned(builder, product(builder, turned(builder, b), c)),
    }
    values = {
        (False, False): x.T @ z,
        (True, False): (x.T @ z).T,
        (False, True): y.T @ z,
        (True, True): (y.T @ z).T,
    }
    for first, second in itertools.product((False, True), repeat=2):
        keys = (first, False), (second, True)
        program.gives(
            lambda builder, keys=keys: relax.op.add(*(wgrads[key](builder) for key in keys)),
            values[keys[0]] + values[keys[1]],
        )
    for axis in (0, 1):
        program.gives(lambda builder, axis=axis: relax.op.sum(c, [axis]), z.sum(axis))
        program.gives(lambda builder, axis=axis: relax.op.sum(c, [axis], True), z.sum(axis, keepdims=True))
    program.gives(wgrads[False, False], values[False, False])
    program.check()


@pytest.mark.parametrize("extent", [1, 2, 4, 16, 17])
def test_sums_and_broadcasts_of_cubes(extent: int) -> None:
    """Schedules of what memory bounds: sums along each axis, transposes, and what follows them."""
    e = extent
    program = Program(t=(e, e, e), v=(e,), m=(e, e))
    t, v, m = program.params.values()
    cube, vector, matrix = program.arrays.values()
    for count in (1, 2):
        for axes in itertools.combinations(range(3), count):
            program.gives(lambda builder, axes=axes: relax.op.sum(t, list(axes)), cube.sum(axes))
            program.gives(
                lambda builder, axes=axes: relax.op.subtract(t, relax.op.max(t, list(axes), True)),
                cube - cube.max(axes, keepdims=True),
            )
    for axis in range(3):
        shape = [e if place == axis else 1 for place in range(3)]
        program.gives(
            lambda builder, shape=shape: relax.op.multiply(t, relax.op.reshape(v, shape)), cube * vector.reshape(shape)
        )
        program.gives(
            lambda builder, axis=axis: relax.op.add(t, relax.op.expand_dims(m, axis)),
            cube + np.expand_dims(matrix, axis),
        )
    for order in itertools.permutations(range(3)):
        program.gives(lambda builder, order=order: relax.op.permute_dims(t, list(order)), cube.transpose(order))
        program.gives(
            lambda builder, order=order: relax.op.sum(relax.op.multiply(relax.op.permute_dims(t, list(order)), t), [0]),
            (cube.transpose(order) * cube).sum(0),
        )
    program.check()
