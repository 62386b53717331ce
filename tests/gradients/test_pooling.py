# SPDX-License-Identifier: Apache-2.0
"""Gradients of pools: ranks, layouts, dilation, ceil_mode, both ways of counting, ties, symbolic extents."""

from __future__ import annotations

import numpy as np
import pytest

from relax_ops.rules.pooling import adaptive_matrix
from tests.gradients.harness import batch, check, gradients, integers, load, relax, sample, tvm
from tvm_convgrad.core.errors import UnsupportedError

op = relax.op
SHAPES = {1: (2, 3, 9), 2: (2, 2, 7, 6), 3: (1, 2, 5, 6, 4)}


def _last(rank):
    """Permutations from NCHW to NHWC, and back."""
    return (0, *range(2, rank + 2), 1), (0, rank + 1, *range(1, rank + 1))


@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 2},
        {"kernel_size": 2, "stride": 3, "padding": 0, "ceil_mode": True},
    ],
    ids=["plain", "dilated", "ceil"],
)
def test_max_pool(rank, options, last):
    """Integers with many ties: the first one of a window gets the gradient."""
    functional = pytest.importorskip("torch").nn.functional
    forward, back = _last(rank)
    layout = {1: "NCW", 2: "NCHW", 3: "NCDHW"}[rank]
    x = integers(*SHAPES[rank])
    x = np.ascontiguousarray(x.transpose(forward)) if last else x

    def oracle(v):
        v = v.permute(back) if last else v
        y = getattr(functional, f"max_pool{rank}d")(v, **options)
        return y.permute(forward) if last else y

    def build(_, v):
        return getattr(op.nn, f"max_pool{rank}d")(
            v,
            options["kernel_size"],
            options["stride"],
            options["padding"],
            options.get("dilation", 1),
            options.get("ceil_mode", False),
            layout="N" + layout[2:] + "C" if last else layout,
        )

    # The type of a ceil_mode pool over symbolic extents has an expression that TVM's Gradient pass does not take.
    axes = [0] if "ceil_mode" in options else range(rank + 1)
    symbolic = batch([x], {i: f"d{i}" for i in axes}) if last else {}
    check(build, oracle, [x], symbolic=symbolic, exact=True)


@pytest.mark.parametrize("counted", [False, True], ids=["valid", "with_padding"])
@pytest.mark.parametrize("ceil", [False, True], ids=["floor", "ceil"])
@pytest.mark.parametrize("rank", SHAPES)
def test_average_pool(rank, ceil, counted):
    functional = pytest.importorskip("torch").nn.functional
    x = sample(*SHAPES[rank])

    def build(_, v):
        return getattr(op.nn, f"avg_pool{rank}d")(v, 3, 2, 1, 1, ceil, counted)

    def oracle(v):
        return getattr(functional, f"avg_pool{rank}d")(v, 3, 2, 1, ceil, counted)

    check(build, oracle, [x], symbolic=batch([x]) if ceil else {}, terms=27)


def _pool_by_numpy(x, kernel, stride, padding, dilation, counted):
    """Average pool of the last axis, padding (low, high)."""
    low, high = padding
    extent = x.shape[-1]
    result = []
    for start in range(-low, extent + high - (kernel - 1) * dilation, stride):
        places = [start + k * dilation for k in range(kernel)]
        inside = [p for p in places if 0 <= p < extent]
        result.append(x[..., inside].sum(-1) / (len(places) if counted else max(len(inside), 1)))
    return np.stack(result, -1)


@pytest.mark.parametrize("counted", [False, True], ids=["valid", "with_padding"])
def test_dilated_average_pool_with_uneven_padding(counted):
    arrays = [sample(2, 3, 11)]
    check(
        lambda _, x: op.nn.avg_pool1d(x, 3, 2, (1, 3), 2, False, counted),
        lambda x: _pool_by_numpy(x, 3, 2, (1, 3), 2, counted),
        arrays,
        numeric=True,
        symbolic=batch(arrays, {0: "n", 2: "w"}),
        terms=6,
    )


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (4, 5), (7, 6), (9, 8)], ids=str)
def test_adaptive_average_pool(size):
    functional = pytest.importorskip("torch").nn.functional
    arrays = [sample(2, 3, 7, 6)]
    symbolic = batch(arrays, {0: "n", 2: "h", 3: "w"} if size in ((1, 1), (4, 5)) else {0: "n"})
    check(
        lambda _, x: op.nn.adaptive_avg_pool2d(x, size),
        lambda x: functional.adaptive_avg_pool2d(x, size),
        arrays,
        symbolic=symbolic,
        terms=42,
    )


def test_adaptive_average_pool_of_other_ranks_and_layouts():
    functional = pytest.importorskip("torch").nn.functional
    x1, x2, x3 = sample(2, 3, 7), sample(2, 7, 6, 3), sample(1, 2, 5, 6, 4)
    check(
        lambda _, x: op.nn.adaptive_avg_pool1d(x, 4),
        lambda x: functional.adaptive_avg_pool1d(x, 4),
        [x1],
        symbolic=batch([x1]),
        terms=7,
    )
    check(
        lambda _, x: op.nn.adaptive_avg_pool2d(x, (4, 2), layout="NHWC"),
        lambda x: functional.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), (4, 2)).permute(0, 2, 3, 1),
        [x2],
        terms=42,
    )
    check(
        lambda _, x: op.nn.adaptive_avg_pool3d(x, (2, 3, 4)),
        lambda x: functional.adaptive_avg_pool3d(x, (2, 3, 4)),
        [x3],
        terms=120,
    )


def test_rows_of_the_adaptive_matrix_sum_to_one():
    for source in range(1, 12):
        for result in range(1, 12):
            matrix = adaptive_matrix(source, result)
            np.testing.assert_allclose(matrix.sum(1), 1)
            assert (matrix.sum(0) > 0).all()


def test_own_operators_round_trip_through_text():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3, 9), "float32"))
    g = relax.Var("g", relax.TensorType((2, 3, 5), "float32"))
    attributes = {"pool_size": [3], "strides": [2], "padding": [1, 1], "dilation": [1], "layout": "NCW"}
    with builder.function("main", [x, g]):
        with builder.dataflow():
            a = builder.emit(op.nn.max_pool_backward(g, x, **attributes))
            b = builder.emit(op.nn.avg_pool_backward(g, x, count_include_pad=True, **attributes))
            result = builder.emit_output(op.add(a, b))
        builder.emit_func_output(result)
    module = builder.get()
    tvm.ir.assert_structural_equal(tvm.script.from_source(module.script()), module)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_gradient_of_an_average_pool_gradient():
    """Σ (dX)² for dX = avg_pool_backward(dY): its gradient in dY is 2·avg_pool(dX)."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3, 9), "float32"))
    g = relax.Var("g", relax.TensorType((2, 3, 5), "float32"))
    attributes = {"pool_size": [3], "strides": [2], "padding": [1, 1], "dilation": [1], "layout": "NCW"}
    with builder.function("main", [g, x]):
        with builder.dataflow():
            dx = builder.emit(op.nn.avg_pool_backward(g, x, **attributes))
            result = builder.emit_output(op.sum(op.multiply(dx, dx)))
        builder.emit_func_output(result)
    machine = load(relax.transform.Gradient("main", require_grads=[g])(builder.get()))
    gv, xv = sample(2, 3, 5), sample(2, 3, 9)
    _, (found,) = machine["main_adjoint"](tvm.runtime.tensor(gv), tvm.runtime.tensor(xv))
    matrix = np.stack([_pool_by_numpy(row, 3, 2, (1, 1), 1, False) for row in np.eye(9)], 1)
    dx = gv.astype("float64") @ matrix
    np.testing.assert_allclose(found.numpy(), 2 * dx @ matrix.T, atol=1e-5)


def test_second_derivative_of_a_max_pool_is_refused():
    def build(_, g, x):
        return op.nn.max_pool_backward(g, x, pool_size=[2], strides=[2], padding=[0, 0], dilation=[1], layout="NCW")

    with pytest.raises(UnsupportedError, match="average pool"):
        gradients(build, [sample(1, 2, 4), sample(1, 2, 8)], wrt=[0])
