# SPDX-License-Identifier: Apache-2.0
"""Reductions along free extents: exact on small integers for several extents, with the free axis as the inner loop."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from relax_ops.compat import nodes_within
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.training.passes.internal_calls import PIPELINE
from tvm_convgrad.training.schedule.blocks import kinds_of, opened, root_blocks
from tvm_convgrad.training.schedule.cpu import scheduled
from tvm_convgrad.training.schedule.streams import Stream, choose_stream

CHANNELS = 8


def forward(x, w, stride, padding, dilation):
    """The convolution in float64."""
    x = np.pad(x.astype("float64"), [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    reach = (w.shape[2] - 1) * dilation + 1
    windows = np.lib.stride_tricks.sliding_window_view(x, (reach, reach), (2, 3))
    return np.einsum("ncyxij,ocij->noyx", windows[:, :, ::stride, ::stride, ::dilation, ::dilation], w)


GEOMETRIES = {
    "plain": (3, 1, 1, 1, Stream(3, False, 1, 4, 6)),
    "without padding": (3, 1, 0, 1, Stream(3, False, 1, 4, 6)),
    "strided": (3, 2, 1, 1, Stream(3, False, 1, 4, 6)),
    "dilated": (3, 1, 2, 2, Stream(3, False, 1, 4, 6)),
    "one place": (1, 1, 0, 1, Stream(3, False, 1, 4, 4)),
}


def stream_of(function):
    """The stream of the function's reduction."""
    schedule = opened(function)
    blocks = [block for block in root_blocks(schedule) if "R" in kinds_of(schedule, block)]
    return choose_stream(schedule, *blocks)


def compiled(function, name):
    """The scheduled function, compiled by LLVM's optimiser for this CPU."""
    target = native_target()
    with target:
        function = scheduled(function).with_attrs({"global_symbol": name, "tirx.noalias": True})
    return tvm.tirx.build(tvm.IRModule({name: function}), target, PIPELINE)


def run(library, name, shape, *operands):
    result = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    library[name](*map(tvm.runtime.tensor, operands), result)
    return result.numpy()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_convolutions_are_exact(geometry):
    kernel, stride, padding, dilation, stream = GEOMETRIES[geometry]
    n, h, w = (tirx.Var(name, "int64") for name in "nhw")
    x = te.placeholder((n, 3, h, w), name="x")
    weight = te.placeholder((CHANNELS, 3, kernel, kernel), name="weight")
    function = te.create_prim_func([x, weight, topi.nn.conv2d(x, weight, stride, padding, dilation)])
    assert stream_of(function) == stream
    library = compiled(function, "convolution")
    rng = np.random.default_rng(0)
    for extents in ((2, 9, 17), (1, 5, 5), (3, 12, 40)):
        a = rng.integers(-4, 5, (extents[0], 3, *extents[1:])).astype("float32")
        b = rng.integers(-4, 5, (CHANNELS, 3, kernel, kernel)).astype("float32")
        wanted = forward(a, b, stride, padding, dilation)
        np.testing.assert_array_equal(run(library, "convolution", wanted.shape, a, b), wanted)


def test_sums_over_a_free_axis_are_exact():
    """dW of a convolution: the free axis is reduced over, and its places are added at the end."""
    n, h, w = (tirx.Var(name, "int64") for name in "nhw")
    x, dy = (te.placeholder((n, channels, h, w), name=name) for name, channels in (("x", 3), ("dy", CHANNELS)))
    padded = topi.nn.pad(x, (0, 0, 1, 1), name="padded")
    over = [te.reduce_axis((0, extent), name=name) for extent, name in ((n, "rn"), (h, "ry"), (w, "rx"))]
    dw = te.compute(
        (CHANNELS, 3, 3, 3),
        lambda o, i, ky, kx: te.sum(
            padded[over[0], i, over[1] + ky, over[2] + kx] * dy[over[0], o, over[1], over[2]], axis=over
        ),
        name="dw",
    )
    function = te.create_prim_func([x, dy, dw])
    assert stream_of(function) == Stream(6, True)
    library = compiled(function, "wgrad")
    rng = np.random.default_rng(0)
    for extents in ((2, 9, 17), (1, 1, 1), (3, 12, 40)):
        a, g = (
            rng.integers(-4, 5, (extents[0], channels, *extents[1:])).astype("float32") for channels in (3, CHANNELS)
        )
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(a, [(0, 0), (0, 0), (1, 1), (1, 1)]), (3, 3), (2, 3))
        wanted = np.einsum("nciyab,noiy->ocab", windows.astype("float64"), g)
        np.testing.assert_array_equal(run(library, "wgrad", wanted.shape, a, g), wanted)


def test_tiles_beside_an_extent_that_is_a_formula_are_exact():
    """Their outer loops are not fused; the sums are of one tile still."""
    n, h = (tirx.Var(name, "int64") for name in "nh")
    x, whole = te.placeholder((n, h - 1, 24), name="x"), te.placeholder((h,), name="whole")
    w = te.placeholder((24, 32), name="w")
    over = te.reduce_axis((0, 24), name="r")
    y = te.compute((n, h - 1, 32), lambda a, b, o: te.sum(x[a, b, over] * w[over, o], axis=over), name="y")
    function = te.create_prim_func([x, whole, w, y])
    with native_target():
        loops = nodes_within(scheduled(function).body, tirx.For)
    assert {int(loop.extent) for loop in loops if loop.kind == tirx.ForKind.VECTORIZED} == {16}
    library = compiled(function, "product")
    rng = np.random.default_rng(0)
    for extents in ((2, 9), (1, 1), (3, 40)):
        a = rng.integers(-4, 5, (*extents, 24)).astype("float32")
        b = rng.integers(-4, 5, (24, 32)).astype("float32")
        length = np.zeros(extents[1] + 1, "float32")
        np.testing.assert_array_equal(run(library, "product", (*extents, 32), a, length, b), a.astype("float64") @ b)


def test_constant_extents_have_no_stream():
    x, w = te.placeholder((2, 3, 9, 9), name="x"), te.placeholder((CHANNELS, 3, 3, 3), name="w")
    assert stream_of(te.create_prim_func([x, w, topi.nn.conv2d(x, w, 1, 1, 1)])) is None
