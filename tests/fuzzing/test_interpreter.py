# SPDX-License-Identifier: Apache-2.0
"""The interpreter computes what TVM's code computes, and names the faults that results may hide."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_convgrad.codegen.loops import (
    Loops,
    choose,
    convert,
    lanes_below,
    load,
    load_masked,
    make_parameter,
    ramp,
    splat,
    zero,
)
from tvm_convgrad.verify.interpreter import execute


def _function(body, *parameters):
    """A PrimFunc of parameters (name, size, dtype), whose body is written with a `Loops`."""
    loops = Loops()
    buffers = [make_parameter(name, (size,), dtype) for name, size, dtype in parameters]
    flat = [loops.flat(buffer, size) for buffer, (_, size, _) in zip(buffers, parameters, strict=True)]
    body(loops, *flat)
    return loops.finish(buffers, "main")


def _blank(size, dtype="float32"):
    return np.full(size, np.nan, dtype)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_access_out_of_bounds_is_named(index):
    def body(loops, x, y):
        loops.store(y, 0, load(x, index))

    function = _function(body, ("x", 4, "float32"), ("y", 1, "float32"))
    found = execute(function, [np.ones(4, "float32"), _blank(1)])
    assert found == f"a load of x_flat[{index}], which has 4 elements"


def test_a_vector_that_ends_out_of_bounds_is_named():
    def body(loops, x, y):
        loops.store(y, 2, load(x, 0, 4))

    function = _function(body, ("x", 4, "float32"), ("y", 4, "float32"))
    assert execute(function, [np.ones(4, "float32"), _blank(4)]) == "a store to y_flat[2 to 5], which has 4 elements"


def test_local_buffers_have_bounds():
    def body(loops, x, y):
        panel = loops.panel("panel", 3, "float32")
        loops.store(panel, 3, load(x, 0))
        loops.store(y, 0, load(panel, 0))

    function = _function(body, ("x", 1, "float32"), ("y", 1, "float32"))
    assert "panel_flat[3], which has 3 elements" in execute(function, [np.ones(1, "float32"), _blank(1)])


def test_lanes_that_are_masked_are_not_read_or_written():
    def body(loops, x, y):
        mask = lanes_below(0, 3, 8)
        loops.store_masked(y, 0, load_masked(x, 0, mask, 8), mask)

    function = _function(body, ("x", 3, "float32"), ("y", 3, "float32"))
    y = _blank(3)
    assert execute(function, [np.arange(3, dtype="float32"), y]) == ""
    assert y.tolist() == [0, 1, 2]


def test_what_was_never_written_is_nan():
    def body(loops, x, y):
        sums = loops.buffer("sums", 2, "float32")
        loops.store(sums, 0, load(x, 0))
        loops.store(y, 0, load(sums, 1))

    function = _function(body, ("x", 1, "float32"), ("y", 1, "float32"))
    y = np.ones(1, "float32")
    assert execute(function, [np.ones(1, "float32"), y]) == ""
    assert math.isnan(y[0])


def _parallel(store):
    def body(loops, x, y):
        with loops.loop(3, "i", "parallel") as i:
            store(loops, x, y, i)

    return _function(body, ("x", 3, "float32"), ("y", 4, "float32"))


RACES = {
    "two store": (lambda loops, x, y, i: loops.store(y, 0, load(x, i)), "two iterations store different values"),
    "one loads what another stored": (
        lambda loops, x, y, i: loops.store(y, i + 1, load(y, i)),
        "one iteration loads what another stores",
    ),
    "one stores what another loaded": (
        lambda loops, x, y, i: loops.store(y, i, load(y, i + 1)),
        "one iteration stores what another loads",
    ),
    "a sum": (
        lambda loops, x, y, i: loops.store(y, 0, load(y, 0) + load(x, i)),
        "one iteration loads what another stores",
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_a_data_race_is_named(name):
    store, words = RACES[name]
    found = execute(_parallel(store), [np.arange(3, dtype="float32"), np.zeros(4, "float32")])
    assert "a data race: " + words in found


@pytest.mark.parametrize(
    "store",
    [
        lambda loops, x, y, i: loops.store(y, i, load(x, i)),
        lambda loops, x, y, i: loops.store(y, 0, zero("float32")),  # the same bytes
        lambda loops, x, y, i: loops.store(y, i, load(x, 0)),  # all load one element
    ],
    ids=("apart", "same bytes", "shared operand"),
)
def test_iterations_that_are_independent_pass(store):
    assert execute(_parallel(store), [np.ones(3, "float32"), np.zeros(4, "float32")]) == ""


def test_buffers_of_an_iteration_are_its_own():
    def store(loops, x, y, i):
        own = loops.buffer("own", 1, "float32")
        loops.store(own, 0, load(x, i))
        loops.store(y, i, load(own, 0))

    y = _blank(4)
    assert execute(_parallel(store), [np.arange(3, dtype="float32"), y]) == ""
    assert y[:3].tolist() == [0, 1, 2]


def test_an_index_that_overflows_is_named():
    def body(loops, x, y):
        with loops.loop(3, "i") as i:
            loops.store(y, i * 0, load(x, (i * 1_500_000_000) * 2 - (i * 1_500_000_000) * 2))

    function = _function(body, ("x", 1, "float32"), ("y", 1, "float32"))
    assert "an int32 index overflows: 3000000000" in execute(function, [np.ones(1, "float32"), _blank(1)])


def test_arguments_have_to_fit():
    function = _function(lambda loops, x: None, ("x", 4, "float32"))
    assert "the argument x has 3 elements, not 4" in execute(function, [np.ones(3, "float32")])
    with pytest.raises(ValueError, match="contiguous"):
        execute(function, [np.ones((4, 2), "float32")[:, 0]])


def test_what_kernels_do_not_have_is_refused():
    @T.prim_func
    def unrolled(x: T.Buffer((4,), "float32")):
        for i in T.unroll(4):
            x[i] = T.exp(x[i])

    with pytest.raises(ValueError, match="cannot run this function: it has"):
        execute(unrolled, [np.ones(4, "float32")])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_it_rounds_as_compiled_code_does(dtype):
    """Elements of each type, converted to float32, combined, compared, selected and converted back."""

    def body(loops, x, y):
        with loops.loop(32, "i") as i:
            value = convert(load(x, i), "float32")
            doubled = loops.let(value + value * value, "v")
            loops.store(y, i, choose(doubled < 3.0, doubled, value / tvm.tirx.const(3.0, "float32")))

    function = _function(body, ("x", 32, dtype), ("y", 32, dtype))
    rng = np.random.default_rng(1)
    numpy_type = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = rng.standard_normal(32).astype(numpy_type)
    found = np.full(32, np.nan, numpy_type)
    assert execute(function, [x, found]) == ""
    wanted = tvm.runtime.tensor(np.full(32, np.nan, numpy_type))
    tvm.compile(function, "llvm")["main"](tvm.runtime.tensor(x), wanted)
    assert found.tobytes() == wanted.numpy().tobytes()


def test_vectors_of_indices():
    def body(loops, x, y):
        inside = ramp(0, 8) < splat(tvm.tirx.const(5, "int32"), 8)
        loops.store(y, 0, tvm.tirx.Select(inside, load(x, 0, 8), zero("float32", 8)))

    function = _function(body, ("x", 8, "float32"), ("y", 8, "float32"))
    y = _blank(8)
    assert execute(function, [np.ones(8, "float32"), y]) == ""
    assert y.tolist() == [1] * 5 + [0] * 3
