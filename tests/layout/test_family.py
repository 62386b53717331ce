# SPDX-License-Identifier: Apache-2.0
"""The six operators, and stock convolutions, converted from any layouts to any others, against the reference."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.ops import make_call
from tests.layout.models import calls, run
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, OpEntry
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, flat_padding
from tvm_convgrad.core.problem import ConvProblem

DESCRIPTORS = {
    1: "g2mb2ic4iw9oc6kw3sw2dw1pw1",
    2: "g2mb2ic4ih7iw6oc6kh3kw2sh2sw1dh1ph1pw0",
    3: "g2mb1ic2id4ih5iw6oc4kd2kh3kw1sd2sh1sw1pd1ph0pw0",
}
TRANSPOSED = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}
FORWARD = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}


def shuffled(rng, letters):
    return "".join(rng.sample(letters, len(letters)))


def layouts(rng, rank, kernel="OI"):
    data = "NC" + SPATIAL[rank]
    return shuffled(rng, data), shuffled(rng, kernel + SPATIAL[rank]), shuffled(rng, data)


def problem_in(rank, data, kernel, grad):
    return ConvProblem.from_descriptor(DESCRIPTORS[rank]).with_layouts(data, kernel, grad)


def tensors(problem, seed):
    rng = np.random.default_rng(seed)
    shapes = problem.data_shape, problem.weight_shape, problem.grad_shape
    return [rng.integers(-4, 5, shape).astype("float32") for shape in shapes]


def variables(*arrays):
    return [relax.Var(f"a{i}", relax.TensorType(a.shape, "float32")) for i, a in enumerate(arrays)]


def function(params, *makers):
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            outputs = [builder.emit_output(maker) for maker in makers]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get()


def geometry(problem):
    return {
        "strides": problem.strides,
        "padding": flat_padding(problem.padding),
        "dilation": problem.dilation,
        "groups": problem.groups,
    }


def family_module(problem):
    """main(data, weight, grad): (dW, dX) of one problem, and the arrays and the right results."""
    arrays = tensors(problem, 0)
    data, weight, grad = params = variables(*arrays)
    named = {
        "grad_layout": problem.grad_layout,
        "data_layout": problem.data_layout,
        "kernel_layout": problem.kernel_layout,
        **geometry(problem),
    }
    rank = problem.rank
    module = function(
        params,
        make_call(OpEntry(BACKWARD_WEIGHT, rank), grad, data, kernel_size=problem.kernel, **named),
        make_call(OpEntry(BACKWARD_DATA, rank), grad, weight, data_shape=problem.data_shape, **named),
    )
    want = reference.backward_weight(problem, arrays[2], arrays[0]), reference.backward_data(problem, *arrays[:0:-1])
    return module, arrays, want


@pytest.mark.parametrize("rank", SPATIAL)
@pytest.mark.parametrize("seed", range(3))
def test_any_layouts_to_any_layouts(rank, seed):
    rng = random.Random(100 * rank + seed)
    module, arrays, want = family_module(problem_in(rank, *layouts(rng, rank)))
    desired = {
        f"relax.nn.conv{rank}d_{direction}": list(layouts(rng, rank))
        for direction in ("backward_weight", "backward_data")
    }
    converted = relax.transform.ConvertLayout(desired)(module)
    for name, wanted in desired.items():
        (call,) = calls(converted, "main", name.removeprefix("relax."))
        attrs = call.attrs
        assert [str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.grad_layout)] == wanted
    for have, right in zip(run(converted, "main", arrays), want, strict=True):
        np.testing.assert_array_equal(have, right)


@pytest.mark.parametrize("rank", SPATIAL)
def test_two_layouts_give_grad_the_one_of_the_data(rank):
    data, kernel = "N" + SPATIAL[rank] + "C", "O" + SPATIAL[rank] + "I"
    module, arrays, want = family_module(ConvProblem.from_descriptor(DESCRIPTORS[rank]))
    names = [f"relax.nn.conv{rank}d_{direction}" for direction in ("backward_weight", "backward_data")]
    converted = relax.transform.ConvertLayout({name: [data, kernel] for name in names})(module)
    for call in calls(converted, "main", *(name.removeprefix("relax.") for name in names)):
        assert (str(call.attrs.grad_layout), str(call.attrs.data_layout)) == (data, data)
        assert str(call.attrs.kernel_layout) == kernel
    for have, right in zip(run(converted, "main", arrays), want, strict=True):
        np.testing.assert_array_equal(have, right)


def test_without_an_entry_operands_are_read_as_they_are_stored():
    """relu of a converted convolution feeds wgrad and dgrad, which have no entry: no transpose, and right values."""
    problem = ConvProblem.from_descriptor("mb2ic3ih5iw6oc4kh3kw3ph1pw1")
    arrays = tensors(problem, 1)
    data, weight, _ = params = variables(*arrays)
    builder = relax.BlockBuilder()
    with builder.function("main", params[:2]):
        with builder.dataflow():
            y = builder.emit(op.nn.relu(op.nn.conv2d(data, weight, padding=1)))
            dw = make_call(OpEntry(BACKWARD_WEIGHT, 2), y, y, kernel_size=3, padding=1)
            dx = make_call(OpEntry(BACKWARD_DATA, 2), y, weight, data_shape=problem.data_shape, padding=1)
            outputs = [builder.emit_output(dw), builder.emit_output(dx)]
        builder.emit_func_output(relax.Tuple(outputs))
    module = builder.get()
    converted = relax.transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "OHWI"]})(module)
    wgrad, dgrad = calls(converted, "main", "nn.conv2d_backward_weight", "nn.conv2d_backward_data")
    for call in (wgrad, dgrad):
        assert (str(call.attrs.grad_layout), str(call.attrs.data_layout)) == ("NHWC", "NHWC")
        assert str(call.attrs.kernel_layout) == "OIHW"
    assert len(calls(converted, "main", "permute_dims")) == 3  # data, weight for the convolution, dX
    for have, want in zip(run(converted, "main", arrays[:2]), run(module, "main", arrays[:2]), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("as_parameter", [False, True])
def test_symbolic_extents(as_parameter):
    """Batch and height symbolic; the data's shape written out, or a parameter of the function."""
    problem = ConvProblem.from_descriptor("mb3ic3ih9iw6oc4kh3kw3sh2sw1ph1pw1")
    _, w, y = tensors(problem, 2)
    n, m, h = (tvm.tirx.Var(name, "int64") for name in "nmh")
    grad = relax.Var("grad", relax.TensorType((n, 4, m, 6), "float32"))
    weight = relax.Var("weight", relax.TensorType(w.shape, "float32"))
    shape = relax.ShapeExpr([n, 3, h, 6])
    given = relax.Var("shape", relax.ShapeType([n, 3, h, 6]))
    named = {"strides": (2, 1), "padding": 1}
    dgrad = make_call(OpEntry(BACKWARD_DATA, 2), grad, weight, data_shape=given if as_parameter else shape, **named)
    module = function([grad, weight, given], dgrad)
    converted = relax.transform.ConvertLayout({"relax.nn.conv2d_backward_data": ["NHWC", "HWIO"]})(module)
    (call,) = calls(converted, "main", "nn.conv2d_backward_data")
    assert str(call.attrs.data_layout) == "NHWC"
    machine = relax.VirtualMachine(tvm.compile(converted, "llvm"), tvm.cpu())
    arguments = [tvm.runtime.tensor(y), tvm.runtime.tensor(w), tvm.runtime.ShapeTuple(problem.data_shape)]
    np.testing.assert_array_equal(machine["main"](*arguments)[0].numpy(), reference.backward_data(problem, y, w))


@pytest.mark.parametrize("rank", SPATIAL)
@pytest.mark.parametrize("seed", range(2))
def test_stock_convolutions_are_lowered_in_any_layout(rank, seed):
    """conv and conv_transpose, converted to layouts that stock TVM does not lower, or lowers wrongly."""
    rng = random.Random(1000 * rank + seed)
    problem = ConvProblem.from_descriptor(DESCRIPTORS[rank])
    x, w, y = arrays = tensors(problem, seed)
    params = variables(*arrays)
    named = geometry(problem)
    output_padding = [
        extent - ((out - 1) * s - low - high + (k - 1) * d + 1)
        for extent, out, s, (low, high), k, d in zip(
            x.shape[2:], y.shape[2:], problem.strides, problem.padding, problem.kernel, problem.dilation, strict=True
        )
    ]
    transposed = TRANSPOSED[rank](
        params[2], params[1], **named, output_padding=output_padding, kernel_layout="IO" + SPATIAL[rank]
    )
    module = function(params, FORWARD[rank](*params[:2], **named), transposed)
    desired = {
        f"relax.nn.conv{rank}d": list(layouts(rng, rank)),
        f"relax.nn.conv{rank}d_transpose": list(layouts(rng, rank, "IO")),
    }
    converted = relax.transform.ConvertLayout(desired)(module)
    results = run(converted, "main", arrays)
    np.testing.assert_array_equal(results[0], reference.forward(problem, x, w))
    np.testing.assert_array_equal(results[1], reference.backward_data(problem, y, w))


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        (["NHWC"], UnsupportedError, "2 or 3 layouts"),
        (["NHWC", "OHWI", "NHWC", "NHWC"], UnsupportedError, "2 or 3 layouts"),
        (["NCHW4c", "OHWI"], UnsupportedError, "packed"),
        (["NHWC", "OHWI16o"], UnsupportedError, "packed"),
        (["NHWN", "OHWI"], ProblemError, "data layout"),
    ],
)
def test_impossible_layouts_are_refused(wanted, error, words):
    module, *_ = family_module(ConvProblem.from_descriptor(DESCRIPTORS[2]))
    with pytest.raises(error, match=words) as caught:
        relax.transform.ConvertLayout({"relax.nn.conv2d_backward_weight": wanted})(module)
    assert "conv2d_backward_weight" in str(caught.value)
