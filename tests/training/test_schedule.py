# SPDX-License-Identifier: Apache-2.0
"""Loops over contiguous lines: exact on small integers, whatever the extents, and equal with any number of threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import te, topi

from tvm_convgrad.training.schedule.blocks import APART
from tvm_convgrad.training.schedule.cpu import ScheduleForCpu, scheduled

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
SHAPES = [
    (4, 8, 3, 5),
    (8, 32, 7, 7),
    (2, 16, 9, 16),
    (3, 5, 1, 1),
    (2, 20, 70, 30),
    (1, 3, 130, 64),
    (2, 30, 9, 24),
    (3, 40, 7, 144),
]


def window(value, seen):
    """The value where what is seen is between -1 and 3, else 0."""
    low, high, none = (topi.full_like(seen, number) for number in (-1.0, 3.0, 0.0))
    return topi.where(topi.logical_and(topi.greater_equal(seen, low), topi.less_equal(seen, high)), value, none)


def matrix(value):
    """A tensor of four axes as a matrix, a view."""
    n, c, h, w = value.shape
    return topi.reshape(value, (n * c, h * w))


CASES = {
    "views": (
        lambda a, m: [topi.add(matrix(a), matrix(topi.multiply(a, a)))],
        lambda a, m: [(a + a * a).reshape(a.shape[0] * a.shape[1], -1)],
    ),
    "sum of a view": (
        lambda a, m: [topi.sum(topi.multiply(matrix(a), matrix(a)), axis=[1])],
        lambda a, m: [(a * a).reshape(a.shape[0] * a.shape[1], -1).sum(1)],
    ),
    "difference": (
        lambda a, m: [topi.subtract(a, m)],
        lambda a, m: [a - m],
    ),
    "masked": (
        lambda a, m: [topi.where(topi.less_equal(a, m), topi.multiply(a, m), a)],
        lambda a, m: [np.where(a <= m, a * m, a)],
    ),
    "sum of channels": (
        lambda a, m: [topi.sum(topi.multiply(a, topi.subtract(a, m)), axis=[0, 2, 3], keepdims=True)],
        lambda a, m: [(a * (a - m)).sum((0, 2, 3), keepdims=True)],
    ),
    "two sums": (
        lambda a, m: [topi.sum(a, axis=[0, 2, 3]), topi.sum(topi.multiply(a, topi.subtract(a, m)), axis=[0, 2, 3])],
        lambda a, m: [a.sum((0, 2, 3)), (a * (a - m)).sum((0, 2, 3))],
    ),
    "sum of rows": (
        lambda a, m: [topi.sum(topi.multiply(a, m), axis=[3])],
        lambda a, m: [(a * m).sum(3)],
    ),
    "largest of rows": (
        lambda a, m: [topi.max(topi.subtract(a, m), axis=[2, 3])],
        lambda a, m: [(a - m).max((2, 3))],
    ),
    "sum of columns": (
        lambda a, m: [topi.sum(topi.multiply(a, m), axis=[0, 1, 2])],
        lambda a, m: [(a * m).sum((0, 1, 2))],
    ),
    "sums over pixels, channels last": (
        lambda a, m: [topi.sum(topi.multiply(a, a), axis=[0, 1, 2]), topi.sum(topi.add(a, m), axis=[1])],
        lambda a, m: [(a * a).sum((0, 1, 2)), (a + m).sum(1)],
    ),
    "window": (
        # The sum is read by both comparisons, and is not made in memory.
        lambda a, m: [window(a, topi.add(topi.multiply(a, m), m))],
        lambda a, m: [np.where((a * m + m >= -1) & (a * m + m <= 3), a, 0)],
    ),
    "transposed": (
        lambda a, m: [topi.transpose(topi.add(a, m), [0, 2, 3, 1])],
        lambda a, m: [(a + m).transpose(0, 2, 3, 1)],
    ),
    "centred": (
        lambda a, m: [topi.subtract(topi.multiply(a, m), topi.sum(topi.multiply(a, m), axis=[2, 3], keepdims=True))],
        lambda a, m: [a * m - (a * m).sum((2, 3), keepdims=True)],
    ),
}


def compiled(name: str, shape):
    """The function with its schedule, which must be that of lines."""
    a = te.placeholder(shape, name="a")
    m = te.placeholder((1, shape[1], 1, 1), name="m")
    with TARGET:
        function = scheduled(te.create_prim_func([a, m, *CASES[name][0](a, m)]))
    assert "p0_flat" in str(function)
    return tvm.compile(tvm.IRModule({"main": function}), TARGET)


def run(library, a, m, shapes):
    results = [tvm.runtime.tensor(np.full(shape, np.nan, "float32")) for shape in shapes]
    library["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(m), *results)
    return [result.numpy() for result in results]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", CASES)
def test_lines_are_exact(name, shape):
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, shape).astype("float32")
    m = rng.integers(-2, 3, (1, shape[1], 1, 1)).astype("float32")
    wanted = CASES[name][1](a, m)
    found = run(compiled(name, shape), a, m, [value.shape for value in wanted])
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", ["two sums", "sum of columns", "centred", "sums over pixels, channels last"])
def test_lines_do_not_depend_on_threads(name):
    shape = (2, 20, 70, 30)
    rng = np.random.default_rng(1)
    a = rng.standard_normal(shape).astype("float32")
    m = rng.standard_normal((1, shape[1], 1, 1)).astype("float32")
    library = compiled(name, shape)
    shapes = [value.shape for value in CASES[name][1](a, m)]
    configure = tvm.get_global_func("runtime.config_threadpool")
    results = []
    for threads in (1, 2, 3):
        configure(1, threads)
        results.append(run(library, a, m, shapes))
    configure(1, 0)
    for other in results[1:]:
        for have, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("shape", [(12, 5, 5, 6), (64, 7, 7), (640,), (6, 400, 1), (3, 7, 401), (2, 8192)])
def test_a_thread_has_many_iterations_of_a_free_batch(shape):
    """LLVM vectorises a thread's share of loops that are unrolled whole, and its last iterations round otherwise.

    tanhshrink's gradient had other bits on two threads: its vectors have no multiply-add where their ends have one.
    """
    n = te.var("n", "int64")
    extents = [n, *(tvm.tirx.IntImm("int64", extent) for extent in shape)]
    slope, t = te.placeholder(extents[:2], name="slope"), te.placeholder(extents, name="t")
    whole = topi.broadcast_to(topi.expand_dims(slope, 2, len(shape) - 1), extents) if len(shape) > 1 else slope
    result = topi.add(whole, topi.multiply(whole, topi.subtract(1.0, topi.multiply(t, t))))
    function = scheduled(te.create_prim_func([slope, t, result]))
    inside = []

    def visit(node, share=None):
        if isinstance(node, tvm.tirx.For):
            is_parallel = node.kind == tvm.tirx.ForKind.PARALLEL
            share = 1 if is_parallel else share and share * int(node.extent)
            visit(node.body, share)
        elif isinstance(node, tvm.tirx.SeqStmt):
            for part in node.seq:
                visit(part, share)
        elif hasattr(node, "block"):
            if share:
                inside.append(share)
            visit(node.block.body)

    visit(function.body)
    assert len(inside) == 1
    assert inside[0] >= min(APART, math.prod(shape))


def test_scatters_compile_without_a_warning(capfd):
    data, places, added = (
        te.placeholder((4, 3), t, name=n) for n, t in [("a", "float32"), ("i", "int64"), ("b", "float32")]
    )
    result = topi.scatter_elements(data, places, added, 1, "add")
    twice = te.compute(
        result.shape, lambda *i: result[i] * 2, name="twice"
    )  # a second block: a sequence below the root
    module = tvm.IRModule({"main": te.create_prim_func([data, places, added, twice])})
    assert "pragma_scope" in str(module)
    with TARGET:
        library = tvm.compile(ScheduleForCpu()(module), TARGET)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (4, 3)).astype("float32") for _ in range(2))
    i = rng.integers(0, 3, (4, 3))
    found = tvm.runtime.tensor(np.full((4, 3), np.nan, "float32"))
    library["main"](*map(tvm.runtime.tensor, (a, i, b)), found)
    wanted = a.copy()
    np.add.at(wanted, (np.arange(4)[:, None], i), b)
    np.testing.assert_array_equal(found.numpy(), wanted * 2)
    assert "pragma" not in capfd.readouterr().err
