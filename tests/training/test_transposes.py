# SPDX-License-Identifier: Apache-2.0
"""Squares that are transposed in registers: exact, for every instruction set, extent and number of operands."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, topi

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.training.schedule.cpu import scheduled

CPUS = ("x86-64", "x86-64-v3", tvm.target.codegen.llvm_get_system_cpu())  # 4 and 8 lanes, and those of this machine
SHAPES = [
    # of what is read: rows, columns of the squares' plane lie second and last
    (2, 64, 32),
    (3, 70, 16),
    (2, 196, 48),
    (1, 300, 37),
    (2, 513, 65),
    (5, 64, 17),
]


def compiled(cpu, result, *operands):
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    with target:
        function = scheduled(te.create_prim_func([*operands, *result]))
    return tvm.compile(tvm.IRModule({"main": function}), target), "transposed" in str(function)


def run(library, operands, wanted):
    results = [tvm.runtime.tensor(np.full(each.shape, np.nan, "float32")) for each in wanted]
    library["main"](*map(tvm.runtime.tensor, operands), *results)
    for found, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(found.numpy(), want)


def numbers(*shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    return [rng.integers(-4, 5, list(map(int, shape))).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("cpu", dict.fromkeys(CPUS))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_transpose_with_operands_of_both_orders_is_exact(shape, cpu):
    n, rows, columns = shape
    a, b = (te.placeholder(shape, name=name) for name in "ab")
    c, w = te.placeholder((n, columns, rows), name="c"), te.placeholder((columns,), name="w")
    swapped = topi.transpose(topi.subtract(topi.multiply(a, w), b), [0, 2, 1])
    library, has_squares = compiled(cpu, [topi.add(swapped, c)], a, b, c, w)
    assert has_squares
    values = numbers(shape, shape, (n, columns, rows), (columns,))
    run(library, values, [(values[0] * values[3] - values[1]).transpose(0, 2, 1) + values[2]])


def test_pixels_of_two_axes_are_one():
    a = te.placeholder((2, 14, 14, 40), name="a")
    library, has_squares = compiled(CPUS[-1], [topi.transpose(a, [0, 3, 1, 2])], a)
    assert has_squares
    (value,) = numbers(a.shape)
    run(library, [value], [value.transpose(0, 3, 1, 2)])


def test_integers_become_floats():
    a = te.placeholder((96, 80), dtype="int32", name="a")
    library, has_squares = compiled(CPUS[-1], [topi.cast(topi.transpose(a), "float32")], a)
    assert has_squares
    (value,) = numbers(a.shape, dtype="int32")
    run(library, [value], [value.T.astype("float32")])


def test_two_results_of_one_operand_share_its_squares():
    a = te.placeholder((96, 80), name="a")
    results = [
        te.compute((80, 96), lambda i, j: a[j, i] * 2, name="twice"),
        te.compute((80, 96), lambda i, j: a[j, i] * 3, name="thrice"),
    ]
    library, has_squares = compiled(CPUS[-1], results, a)
    assert has_squares
    (value,) = numbers(a.shape)
    run(library, [value], [value.T * 2, value.T * 3])


NO_SQUARES = {
    "two axes": ((64, 64, 64), lambda a, i, j, k: a[i, k, j] + a[j, k, i]),
    "every second element": ((48, 32, 128), lambda a, i, j, k: a[i, k, 2 * j]),
    "three columns": ((48, 3, 128), lambda a, i, j, k: a[i, k, j]),
    "few rows": ((48, 64, 3), lambda a, i, j, k: a[i, k, j]),
}


@pytest.mark.parametrize("name", NO_SQUARES)
def test_what_has_no_squares_is_exact_as_well(name):
    shape, reading = NO_SQUARES[name]
    a = te.placeholder((64, 128, 64), name="a")
    result = te.compute(shape, lambda *place: reading(a, *place), name="r")
    library, has_squares = compiled(CPUS[-1], [result], a)
    assert not has_squares
    (value,) = numbers(a.shape)
    run(library, [value], [reading(value, *np.indices(shape))])


@pytest.mark.parametrize("cpu", dict.fromkeys(CPUS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_16_bits(dtype, cpu):
    """Alone, in as many lanes as they have, and beside float32."""
    shape = (2, 150, 67)
    a, b = te.placeholder(shape, dtype, name="a"), te.placeholder(shape, dtype, name="b")
    w = te.placeholder((67, 150), name="w")
    wide = topi.multiply(topi.transpose(topi.cast(topi.add(a, b), "float32"), [0, 2, 1]), w)
    values = [each.astype(numpy_dtype(dtype)) for each in numbers(shape, shape)]
    (factor,) = numbers((67, 150))
    total = values[0].astype("float32") + values[1].astype("float32")
    for result, operands, arrays, wanted in (
        (topi.transpose(a, [0, 2, 1]), (a,), values[:1], values[0].transpose(0, 2, 1)),
        (topi.cast(wide, dtype), (a, b, w), [*values, factor], total.transpose(0, 2, 1) * factor),
    ):
        library, has_squares = compiled(cpu, [result], *operands)
        assert has_squares
        found = tvm.runtime.tensor(np.full(wanted.shape, np.nan, numpy_dtype(dtype)))
        library["main"](*map(tvm.runtime.tensor, arrays), found)
        np.testing.assert_array_equal(found.numpy().astype("float32"), wanted.astype("float32"))
