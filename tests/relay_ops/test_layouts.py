# SPDX-License-Identifier: Apache-2.0
"""Layout conversion of training steps: layout_transforms at the borders of the graph only, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relay
from tvm.relay import testing

import tvm_convgrad
from relay_ops.differentiate import value_and_gradients
from relay_ops.layout import ConvertLayout
from relay_ops.simplify import simplify_gradients
from tests.relay_ops.harness import calls, run, typed

CONVOLUTIONS = ("nn.conv2d", "nn.conv2d_backward_data", "nn.conv2d_backward_weight")
NHWC = {name: ["NHWC", "HWIO"] for name in CONVOLUTIONS}
NCHW = {name: ["NCHW", "OIHW"] for name in CONVOLUTIONS}


def step_of(body):
    """Value and gradients of sum(body * upstream)."""
    body = typed(relay.Function(relay.analysis.free_vars(body), body))["main"]
    upstream = relay.var("upstream", type_annotation=body.ret_type)
    loss = relay.sum(relay.multiply(body.body, upstream))
    return value_and_gradients(relay.Function([*body.params, upstream], loss))


def convolution(value, name, channels, inputs, kernel=3, layout="NCHW", **attributes):
    shape = (channels, inputs, kernel, kernel) if layout == "NCHW" else (kernel, kernel, inputs, channels)
    weight, bias = relay.var(f"{name}_weight", shape=shape), relay.var(f"{name}_bias", shape=(channels,))
    letters = {"data_layout": layout, "kernel_layout": "OIHW" if layout == "NCHW" else "HWIO"}
    value = relay.nn.conv2d(
        value, weight, channels=channels, kernel_size=(kernel,) * 2, padding=(kernel // 2,) * 2, **letters, **attributes
    )
    return relay.nn.bias_add(value, bias, axis=layout.index("C"))


def plain(layout="NCHW"):
    """Convolutions with bias and relu, both poolings, a dense layer."""
    extents = (2, 3, 12, 12) if layout == "NCHW" else (2, 12, 12, 3)
    value = relay.nn.relu(convolution(relay.var("data", shape=extents), "first", 4, 3, layout=layout))
    value = relay.nn.max_pool2d(value, pool_size=(2, 2), strides=(2, 2), layout=layout)
    value = relay.nn.relu(convolution(value, "second", 6, 4, layout=layout, strides=(2, 2)))
    value = relay.nn.avg_pool2d(value, pool_size=(3, 3), strides=(1, 1), layout=layout)
    return relay.nn.dense(relay.nn.batch_flatten(value), relay.var("dense_weight", shape=(5, 6)))


def residual(layout="NCHW"):
    """Two blocks with shortcuts, the second by a strided 1x1; scales and shifts along the channels; a concatenation."""
    extents = (2, 3, 8, 8) if layout == "NCHW" else (2, 8, 8, 3)
    axis = layout.index("C")

    def scaled(value, name, channels):
        gamma, beta = (relay.var(f"{name}_{each}", shape=(channels,)) for each in ("gamma", "beta"))
        for each, function in ((gamma, relay.multiply), (beta, relay.add)):
            value = function(value, relay.expand_dims(each, 1, 2) if layout == "NCHW" else each)
        return value

    value = relay.nn.relu(convolution(relay.var("data", shape=extents), "stem", 4, 3, layout=layout))
    inner = relay.nn.relu(scaled(convolution(value, "one", 4, 4, layout=layout), "one", 4))
    value = relay.nn.relu(relay.add(convolution(inner, "two", 4, 4, layout=layout), value))
    inner = scaled(convolution(value, "three", 6, 4, layout=layout, strides=(2, 2)), "three", 6)
    short = convolution(value, "short", 6, 4, kernel=1, layout=layout, strides=(2, 2))
    value = relay.concatenate([relay.nn.relu(relay.add(inner, short)), relay.sigmoid(short)], axis=axis)
    return relay.nn.batch_flatten(relay.nn.global_avg_pool2d(value, layout=layout))


def borders(module):
    """(of parameters, of results, elsewhere): layout_transforms by where they stand."""
    main = module["main"]
    users = {}

    def visit(node):
        operands = node.args if isinstance(node, relay.Call) else node.fields if isinstance(node, relay.Tuple) else []
        for operand in operands:
            users.setdefault(operand, []).append(node)

    relay.analysis.post_order_visit(main.body, visit)
    places = {"parameters": 0, "results": 0, "elsewhere": 0}
    for call in calls(module, "layout_transform"):
        if call.args[0] in set(main.params):
            places["parameters"] += 1
        else:
            places["results" if users[call] == [main.body] else "elsewhere"] += 1
    return tuple(places.values())


@pytest.mark.parametrize("network", [plain, residual])
@pytest.mark.parametrize("source", ["NCHW", "NHWC"])
def test_transforms_stay_at_the_borders(network, source):
    step = step_of(network(source))
    convolutions = len(calls(step, "nn.conv2d"))
    there, back = (NHWC, NCHW) if source == "NCHW" else (NCHW, NHWC)
    found = ConvertLayout(there)(step)
    # data and every weight; their gradients; what is flattened has one element in height and width
    assert borders(found) == (convolutions + 1, convolutions + 1, 0)
    for name in CONVOLUTIONS:
        assert {str(call.attrs.data_layout) for call in calls(found, name)} == {there[name][0]}
    assert borders(ConvertLayout(back)(found)) == (0, 0, 0)


@pytest.mark.parametrize(("rank", "data", "kernel"), [(1, "NWC", "WIO"), (2, "NHWC", "OHWI"), (3, "NDHWC", "DHWIO")])
def test_clip_and_mean_in_every_rank(rank, data, kernel):
    """Their gradients stretch scalars and means; TVM itself converts no nn.conv1d."""
    value, inputs, extents = relay.var("data", shape=(2, 3) + (5,) * rank), 3, tuple(range(2, 2 + rank))
    for name in ("first", "second"):
        weight, bias = (
            relay.var(f"{name}_weight", shape=(4, inputs) + (3,) * rank),
            relay.var(f"{name}_bias", shape=(4,)),
        )
        function = getattr(relay.nn, f"conv{rank}d")
        value = function(value, weight, channels=4, kernel_size=(3,) * rank, padding=(1,) * rank)
        value, inputs = relay.clip(relay.nn.bias_add(value, bias), 0.0, 6.0), 4
    step = step_of(relay.mean(value, axis=extents))
    names = [name.replace("2", str(rank)) for name in CONVOLUTIONS]
    found = ConvertLayout({name: [data, kernel] for name in names})(step)
    assert borders(found) == (3, 3, 0)
    assert {str(call.attrs.data_layout) for call in calls(found, *names)} == {data}
    channels_first = data[0] + "C" + data[1:-1]
    back = {name: [channels_first, "OI" + channels_first[2:]] for name in names}
    assert borders(ConvertLayout(back)(found)) == (0, 0, 0)


def test_resnet_18():
    """The numbers of docs/RELAY.md."""
    inference = tvm.transform.Sequential([relay.transform.SimplifyInference(), relay.transform.InferType()])
    step = step_of(inference(testing.resnet.get_workload(1, 10, 18, (3, 32, 32))[0])["main"].body)
    assert len(calls(step, "nn.conv2d")) == 21
    # data is scaled in front of its convolution, so that its transform is elsewhere
    assert borders(tvm_convgrad.ConvertLayout(NHWC)(step)) == (22, 22, 1)
    assert sum(borders(relay.transform.ConvertLayout(NHWC)(step))) == 82


def test_converted_conv1d_is_the_same():
    x, w = relay.var("x", shape=(2, 3, 7)), relay.var("w", shape=(4, 3, 3))
    program = typed(relay.Function([x, w], relay.nn.conv1d(x, w, channels=4, kernel_size=(3,), padding=(1, 0))))
    rng = np.random.default_rng(1)
    arrays = {"x": rng.integers(-3, 4, (2, 3, 7)).astype("float32"), "w": rng.integers(-3, 4, (4, 3, 3))}
    arrays["w"] = arrays["w"].astype("float32")
    wanted = run(program, arrays)[0]
    for desired in (["NWC", "WIO"], ["NWC", "default"], ["NCW", "default"]):
        found = ConvertLayout({"nn.conv1d": desired})(program)
        (call,) = calls(found, "nn.conv1d")
        assert (call.attrs.data_layout, call.attrs.kernel_layout) == (desired[0], "OIW" if "NCW" in desired else "WIO")
        np.testing.assert_array_equal(run(found, arrays)[0], wanted)


def test_stocks_own_pass_stays_at_the_borders():
    """relay.transform.ConvertLayout by itself; a transform before the flattening of 2 by 2 elements, and one after."""
    value = relay.nn.relu(convolution(relay.var("data", shape=(2, 3, 8, 8)), "first", 4, 3))
    value = relay.nn.max_pool2d(relay.nn.relu(convolution(value, "second", 6, 4)), (4, 4), (4, 4))
    step = step_of(relay.nn.batch_flatten(value))
    assert borders(relay.transform.ConvertLayout(NHWC)(step)) == (3, 3, 2)


def test_the_numbers_are_the_same():
    value = relay.nn.relu(convolution(relay.var("data", shape=(2, 3, 6, 6)), "first", 4, 3))
    value = relay.nn.max_pool2d(value, (2, 2), (2, 2))
    scale = relay.expand_dims(relay.var("scale", shape=(4,)), 1, 2)
    inner = relay.multiply(relay.sigmoid(convolution(value, "second", 4, 4)), scale)
    value = relay.nn.avg_pool2d(relay.concatenate([relay.add(inner, value), value], axis=1), (2, 2))
    step = step_of(relay.nn.batch_flatten(value))
    found = ConvertLayout(NHWC)(step)
    assert calls(found, "nn.max_pool2d_grad")[0].attrs.layout == "NHWC"
    assert calls(found, "nn.avg_pool2d_grad")[0].attrs.layout == "NHWC"
    rng = np.random.default_rng(5)
    arrays = {p.name_hint: rng.normal(size=p.checked_type.concrete_shape) for p in step["main"].params}
    arrays = {name: array.astype("float32") for name, array in arrays.items()}
    for this, other in zip(run(found, arrays, 0), run(step, arrays, 0), strict=True):
        # the longest sums have 72 terms, in another order
        assert np.linalg.norm(this - other) <= 72 * np.finfo("float32").eps * np.linalg.norm(other)


def test_where_that_broadcasts_and_packed_layouts_end_the_conversion():
    condition, x, y = (relay.var(name, shape=shape) for name, shape in (("c", (1,)), ("x", (2, 4)), ("y", (2, 4))))
    types = [typed(relay.Function([value], value))["main"].ret_type for value in (condition, x, y)]
    infer = tvm.ir.Op.get("where").get_attr("FInferCorrectLayout")
    layouts = [tvm.tir.layout(name) for name in ("C", "NC", "NC")]
    assert infer(None, None, layouts, types).output_layouts[0] is None
    packed = [tvm.tir.layout("NCHW4c")] * 3
    assert infer(None, packed, packed, [types[1]] * 3).output_layouts[0] is None
    bias = tvm.ir.Op.get("nn.bias_add").get_attr("FInferCorrectLayout")
    attrs = relay.nn.bias_add(x, relay.var("b", shape=(4,))).attrs
    old = [tvm.tir.layout("NCHW"), None]
    assert bias(attrs, [tvm.tir.layout("NCHW4c"), None], old, types).output_layouts[0] is None
    assert bias(attrs, [tvm.tir.layout("NHWC"), None], old, types).new_attrs.axis == 3


def body_after(body):
    return simplify_gradients()(tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body)))[
        "main"
    ].body


def test_simplification_of_gradients():
    x, wide = relay.var("x", shape=(2, 3)), relay.var("wide", shape=(4, 2, 3))
    row = relay.var("row", shape=(1, 3))
    for identity in (
        relay.add(relay.zeros_like(x), x),
        relay.add(x, relay.const(0.0)),
        relay.multiply(relay.ones((2, 3), "float32"), x),
        relay.collapse_sum_like(x, x),
        relay.broadcast_to_like(x, x),
        relay.reshape_like(x, x),
        relay.TupleGetItem(relay.Tuple([relay.add(x, relay.zeros_like(x)), x]), 0),
    ):
        assert isinstance(body_after(identity), relay.Var), identity
    for kept in (
        relay.add(relay.zeros_like(wide), x),  # it broadcasts
        relay.add(x, relay.const(1.0)),
        relay.multiply(x, relay.zeros_like(x)),
        relay.broadcast_to_like(row, x),
    ):
        assert tvm.ir.structural_equal(body_after(kept), typed(kept)["main"].body), kept
    array = np.arange(24, dtype="float32").reshape(4, 2, 3)
    for like, axes in ((x, 0), (row, (0, 1)), (relay.var("one", shape=(4, 1, 1)), (1, 2))):
        total = relay.collapse_sum_like(wide, like)
        shown = simplify_gradients()(tvm.IRModule.from_expr(relay.Function([wide, like], total)))
        assert not calls(shown, "collapse_sum_like")
        shape = tuple(int(extent) for extent in like.type_annotation.shape)
        found = run(shown, {"wide": array}, 0)[0]
        np.testing.assert_array_equal(found, array.sum(axes).reshape(shape))


def test_simplification_leaves_unknown_and_empty_extents():
    for batch in (relay.Any(), 0):
        x = relay.var("x", shape=(batch, 3))
        body = relay.reshape_like(relay.collapse_sum_like(x, x), x)
        assert body_after(body).op.name == "reshape_like"
