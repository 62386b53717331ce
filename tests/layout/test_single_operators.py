# SPDX-License-Identifier: Apache-2.0
"""Each operator with a layout rule, on an operand stored in every order of axes, against the unconverted program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from relax_ops import pool_backward as pooling
from relax_ops.passes.layout import ConvertLayout
from tests.layout.models import calls, run, transforms

N, C, H, W = SHAPE = (2, 4, 3, 5)
LAYOUTS = ["".join(names) for names in itertools.permutations("NCHW")]


def sizes(k, s, p):
    return {"pool_size": (k, k), "strides": (s, s), "padding": (p,) * 4}


def stock_pool_backward(make, grad, y, k, s, p):
    return make(grad, y, (k, k), (s, s), (p,) * 4, (1, 1), False, False, "NCHW", "NCHW")


def first(q):
    """A scale for each place of the last three axes."""
    return op.reshape(op.strided_slice(q, [0], [0], [1]), (C, H, W))


def single(norm):
    """A norm in float32, the only type in which TVM lowers some."""
    return lambda y, p, q: norm(*(op.astype(each, "float32") for each in (y, p, first(q))))


# name -> expression of y (SHAPE, stored in the layout under test), a parameter p of shape (C,), and q, an operand of
# SHAPE that is stored as the program writes it
CASES = {
    "add": lambda y, p, q: op.add(y, y),
    "add_scalar": lambda y, p, q: op.add(relax.const(2.0, "float64"), y),
    "broadcast_first": lambda y, p, q: op.multiply(op.reshape(p, (1, C, 1, 1)), y),
    "broadcast_second": lambda y, p, q: op.subtract(y, op.expand_dims(p, [0, 2, 3])),
    "broadcast_three_axes": lambda y, p, q: op.add(y, op.reshape(p, (C, 1, 1))),
    "broadcast_one_element": lambda y, p, q: op.add(op.reshape(op.max(p), (1,)), y),
    "gate": lambda y, p, q: op.multiply(op.sum(y, [2, 3], keepdims=True), y),
    "where": lambda y, p, q: op.where(op.greater(y, relax.const(0.0, "float64")), y, relax.const(-1.0, "float64")),
    "where_broadcast": lambda y, p, q: op.where(
        op.less(op.reshape(p, (1, C, 1, 1)), y), op.reshape(p, (1, C, 1, 1)), y
    ),
    "clip": lambda y, p, q: op.clip(y, -1, 2),
    "relu": lambda y, p, q: op.nn.relu(y),
    "leakyrelu": lambda y, p, q: op.nn.leakyrelu(y, 0.5),
    "zeros_like": lambda y, p, q: op.add(y, op.zeros_like(y)),
    "full_like": lambda y, p, q: op.add(y, op.full_like(y, relax.const(3.0, "float64"))),
    "astype": lambda y, p, q: op.astype(y, "float32"),
    "sum": lambda y, p, q: op.sum(y, [0, 2, 3]),
    "sum_one": lambda y, p, q: op.sum(y, [1]),
    "sum_keepdims": lambda y, p, q: op.sum(y, [-2, 0], keepdims=True),
    "sum_all": lambda y, p, q: op.multiply(op.sum(y), relax.const(2.0, "float64")),
    "sum_all_keepdims": lambda y, p, q: op.sum(y, keepdims=True),
    "max": lambda y, p, q: op.max(y, [1, -1]),
    "cumsum": lambda y, p, q: op.cumsum(y, 2),
    "argmax": lambda y, p, q: op.argmax(op.multiply(y, op.cumsum(op.ones_like(y), 3)), 3),
    "argmin_keepdims": lambda y, p, q: op.argmin(op.multiply(y, op.cumsum(op.ones_like(y), 1)), 1, keepdims=True),
    "repeat": lambda y, p, q: op.repeat(y, 2, -1),
    "take": lambda y, p, q: op.take(y, relax.const([2, 0], "int64"), 2),
    "take_one": lambda y, p, q: op.take(y, relax.const(1, "int64"), 1),
    "flip": lambda y, p, q: op.flip(y, 3),
    "tile": lambda y, p, q: op.tile(y, [1, 2, 1, 3]),
    "strided_slice": lambda y, p, q: op.strided_slice(y, [1, 3], [1, 0], [4, 5], [2, 2]),
    "slice_scatter": lambda y, p, q: op.slice_scatter(y, op.strided_slice(y, [3], [0], [2]), 1, 5, 2, axis=3),
    "expand_dims": lambda y, p, q: op.expand_dims(y, [0, -1]),
    "squeeze": lambda y, p, q: op.squeeze(op.sum(y, [1, 3], keepdims=True), [-1, 1]),
    "squeeze_all": lambda y, p, q: op.squeeze(op.sum(y, [0, 2], keepdims=True)),
    "reshape_vector": lambda y, p, q: op.reshape(op.sum(y, [0, 2, 3], keepdims=True), (C,)),
    "reshape_split": lambda y, p, q: op.reshape(y, (N, 2, C // 2, H, W)),
    "reshape_and_back": lambda y, p, q: op.reshape(op.reshape(y, (N, 2, C // 2, H, W)), SHAPE),
    "flatten_vector": lambda y, p, q: op.flatten(op.max(y, [0, 2, 3], keepdims=True)),
    "broadcast_to": lambda y, p, q: op.broadcast_to(op.sum(y, [2, 3], keepdims=True), SHAPE),
    "broadcast_scalar": lambda y, p, q: op.add(y, op.broadcast_to(op.max(p), SHAPE)),
    "collapse_sum_to": lambda y, p, q: op.collapse_sum_to(y, (1, C, 1, W)),
    "collapse_sum_like": lambda y, p, q: op.collapse_sum_like(y, op.sum(y, [0, 3], keepdims=True)),
    "pad": lambda y, p, q: op.nn.pad(y, [0, 1, 2, 0, 1, 1, 0, 2], pad_value=7.0),
    "concat": lambda y, p, q: op.concat([y, q, y], 1),
    "stack": lambda y, p, q: op.stack([y, y], 2),
    "split": lambda y, p, q: op.split(y, 2, 1)[1],
    "max_pool2d": lambda y, p, q: op.nn.max_pool2d(y, (3, 2), (1, 2), (1, 0)),
    "avg_pool2d": lambda y, p, q: op.nn.avg_pool2d(y, (2, 3), (1, 2), (0, 1)),
    "adaptive_avg_pool2d": lambda y, p, q: op.nn.adaptive_avg_pool2d(y, (1, 1)),
    "max_pool2d_backward": lambda y, p, q: stock_pool_backward(
        op.grad.max_pool2d_backward, op.nn.max_pool2d(y, (2, 2), (1, 1), (1, 1)), y, 2, 1, 1
    ),
    "avg_pool2d_backward": lambda y, p, q: stock_pool_backward(
        op.grad.avg_pool2d_backward, op.nn.avg_pool2d(y, (2, 2), (1, 1), (1, 1)), y, 2, 1, 1
    ),
    "max_pool_backward": lambda y, p, q: pooling.max_pool_backward(
        op.nn.max_pool2d(y, (2, 2), (2, 2), (1, 1)), y, **sizes(2, 2, 1), dilation=(1, 1), layout="NCHW"
    ),
    "avg_pool_backward": lambda y, p, q: pooling.avg_pool_backward(
        op.nn.avg_pool2d(y, (2, 2), (2, 2), (1, 1)), y, **sizes(2, 2, 1), dilation=(1, 1), layout="NCHW"
    ),
    "resize2d": lambda y, p, q: op.image.resize2d(
        y,
        (6, 10),
        layout="NCHW",
        method="nearest_neighbor",
        coordinate_transformation_mode="asymmetric",
        rounding_method="floor",
    ),
    "batch_norm": lambda y, p, q: op.nn.batch_norm(y, p, p, p, op.abs(p), axis=1, training=False)[0],
    "layer_norm": single(lambda y, p, q: op.nn.layer_norm(y, q, op.negative(q), [1, 2, 3])),
    "layer_norm_two_axes": single(lambda y, p, q: op.nn.layer_norm(y, op.max(q, [2]), op.min(q, [2]), [1, 2])),
    "layer_norm_channels": single(lambda y, p, q: op.nn.layer_norm(y, p, op.negative(p), [1])),
    "rms_norm": single(lambda y, p, q: op.nn.rms_norm(y, q, [1, 2, 3])),
    "rms_norm_columns": single(lambda y, p, q: op.nn.rms_norm(y, op.max(q, [0, 1]), [-1])),
    "group_norm": single(lambda y, p, q: op.nn.group_norm(y, p, op.negative(p), 2, 1, [2, 3])),
    "instance_norm": single(lambda y, p, q: op.nn.instance_norm(y, p, op.negative(p), 1, [2, 3])),
    "log_softmax": lambda y, p, q: op.nn.log_softmax(y, 1),
    "mean": lambda y, p, q: op.mean(y, [2, 3]),
    "variance": lambda y, p, q: op.variance(y, [0, 2, 3], keepdims=True),
}
INEXACT = {
    "batch_norm",
    "log_softmax",
    "mean",
    "variance",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "avg_pool2d_backward",
    "avg_pool_backward",
}
SINGLE = {
    "layer_norm",
    "layer_norm_two_axes",
    "layer_norm_channels",
    "rms_norm",
    "rms_norm_columns",
    "group_norm",
    "instance_norm",
}
TRANSPOSES = {
    "permute_dims": lambda y, p, q: op.permute_dims(y, [0, 1, 3, 2]),
    "permute_back_and_forth": lambda y, p, q: op.permute_dims(op.abs(op.permute_dims(y, [0, 2, 3, 1])), [0, 3, 1, 2]),
}
# Elements have to move, so these must see the operand as the program writes it.
TRANSPOSED = {
    "broadcast_last_axis": lambda y, p, q: op.add(
        y, op.reshape(op.strided_slice(q, [0, 1, 2], [0] * 3, [1] * 3), (W,))
    ),
    "repeat_flat": lambda y, p, q: op.repeat(y, 2),
    "argmax_flat": lambda y, p, q: op.argmax(op.multiply(y, q)),
    "flatten": lambda y, p, q: op.flatten(y),
    "batch_flatten": lambda y, p, q: op.nn.batch_flatten(y),
    "reshape_mixed": lambda y, p, q: op.reshape(y, (H, N * W, C)),
    "collapse_fewer_axes": lambda y, p, q: op.collapse_sum_to(y, (H, W)),
    "matmul": lambda y, p, q: op.matmul(y, op.permute_dims(q, [0, 1, 3, 2])),
}

ALL = {**CASES, **TRANSPOSES, **TRANSPOSED}


def program(cases):
    """main(x, identity, p, q): every case on y, the copy of x that a 1x1 backward_data convolution makes."""
    types = (SHAPE, (C, C, 1, 1), (C,), SHAPE)
    params = [relax.Var(name, relax.TensorType(shape, "float64")) for name, shape in zip("xipq", types, strict=True)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            y = builder.emit(op.nn.conv2d_backward_data(*params[:2], relax.ShapeExpr(SHAPE)), "y")
            results = [builder.emit(case(y, *params[2:]), name) for name, case in cases.items()]
            outputs = [builder.emit_output(result) for result in results]
        builder.emit_func_output(relax.Tuple(outputs))
    return relax.transform.CanonicalizeBindings()(builder.get())


def convert(module, layout):
    return relax.transform.ConvertLayout({"relax.nn.conv2d_backward_data": [layout, "OIHW"]})(module)


def inputs():
    rng = np.random.default_rng(3)
    x, q = (rng.integers(-4, 5, SHAPE).astype("float64") for _ in range(2))
    return [x, np.eye(C)[:, :, None, None].copy(), rng.integers(-4, 5, C).astype("float64"), q]


@pytest.fixture(scope="module")
def expected():
    return dict(zip(ALL, run(program(ALL), "main", inputs()), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_in_every_layout(layout, expected):
    # Building is slow: every eighth operator in each layout, other ones in the next; all of them in three.
    number = LAYOUTS.index(layout)
    names = [name for i, name in enumerate(ALL) if layout in ("NHWC", "CHWN", "HWNC") or (i + number) % 8 == 0]
    results = run(convert(program({name: ALL[name] for name in names}), layout), "main", inputs())
    for name, have in zip(names, results, strict=True):
        if name in INEXACT | SINGLE:
            bound = 1e-12 if name in INEXACT else 2e-6
            np.testing.assert_allclose(have, expected[name], rtol=bound, atol=bound, err_msg=name)
        else:
            np.testing.assert_array_equal(have, expected[name], err_msg=name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["NHWC", "CHWN", "HWNC"])
def test_operand_is_not_transposed(name, layout):
    if name == "resize2d" and layout != "NHWC":
        pytest.skip("TVM lowers resize2d in NCHW and NHWC only")
    if name == "broadcast_three_axes" and layout != "NHWC":
        pytest.skip("(C, 1, 1) broadcasts against the last three axes, which must be stored last")
    module = convert(program({name: CASES[name]}), layout)
    (source,) = calls(module, "main", "nn.conv2d_backward_data")
    assert str(source.attrs.data_layout) == layout
    if name.startswith("rms_norm") and (name, layout) != ("rms_norm", "NHWC"):
        pytest.skip("TVM lowers rms_norm over the axes that are stored last only")
    made_of = _made_of if name in SINGLE else _bound_to  # the cast in front of a norm
    between = [c for c in calls(module, "main", "permute_dims") if made_of(module, c.args[0]) == source]
    assert not between, module.script()


def test_axes_in_another_order_than_stored():
    """TVM alone takes the scale for one over sorted axes."""

    def norm(axes, order):
        def made(y, p, q):
            return op.nn.layer_norm(y, *(op.permute_dims(each(q, [0]), order) for each in (op.max, op.min)), axes)

        return single(made)

    module = convert(program({"sorted": norm([2, 3], [0, 1]), "other": norm([3, 2], [1, 0])}), "NHWC")
    np.testing.assert_allclose(*run(module, "main", inputs()), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_operand_is_transposed_where_elements_move(name):
    module = convert(program({name: TRANSPOSED[name]}), "NHWC")
    (source,) = calls(module, "main", "nn.conv2d_backward_data")
    assert any(_bound_to(module, c.args[0]) == source for c in calls(module, "main", "permute_dims"))


def test_a_program_s_own_transposes_are_absorbed():
    cases = {"permute_back_and_forth": TRANSPOSES["permute_back_and_forth"]}
    module = ConvertLayout({"relax.nn.conv2d_backward_data": ["NHWC", "OIHW"]})(program(cases))
    assert transforms(module, "main") == 2  # x and the result
    np.testing.assert_array_equal(run(module, "main", inputs())[0], abs(inputs()[0]))


def _bound_to(module, var):
    return {b.var: b.value for block in module["main"].body.blocks for b in block.bindings}.get(var)


def _made_of(module, var):
    """What a variable is bound to, before casts."""
    value = _bound_to(module, var)
    while isinstance(value, relax.Call) and value.op.name == "relax.astype":
        value = _bound_to(module, value.args[0])
    return value
