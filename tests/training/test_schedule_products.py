# SPDX-License-Identifier: Apache-2.0
"""Batched products of matrices: exact on small integers, and in vectors whatever the extents."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import tvm
from tvm import te, topi

from tvm_convgrad.training.schedule.cpu import scheduled

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
EXTENTS = [
    (3, 197, 64, 197),
    (2, 49, 32, 49),
    (1, 65, 65, 17),
    (4, 50, 9, 33),
    (2, 31, 401, 7),
    (2, 64, 16, 32),
    (5, 1, 7, 101),
]
"""Batch, rows, inner extent and columns."""
TRANSPOSED = [(False, False), (True, False), (False, True), (True, True)]


def matrices(batch, rows, columns, transposed, name):
    shape = (batch, columns, rows) if transposed else (batch, rows, columns)
    return te.placeholder(shape, "float32", name)


@pytest.mark.parametrize("epilogue", [False, True], ids=["plain", "scaled and added to"])
@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("extents", EXTENTS, ids=lambda extents: "x".join(map(str, extents)))
def test_products_are_exact(extents, transposed, epilogue):
    """An infinity stays in its row, and a NaN in its column: what is padded reaches no element of the result."""
    batch, rows, inner, columns = extents
    a = matrices(batch, rows, inner, transposed[0], "a")
    b = matrices(batch, inner, columns, transposed[1], "b")
    left = topi.transpose(a, (0, 2, 1)) if transposed[0] else a
    right = topi.transpose(b, (0, 2, 1)) if transposed[1] else b
    axis = te.reduce_axis((0, inner), "k")
    product = te.compute(
        (batch, rows, columns), lambda n, i, j: te.sum(left[n, i, axis] * right[n, axis, j], axis=axis)
    )
    result = topi.add(topi.multiply(product, 0.5), 3.0) if epilogue else product
    function = scheduled(te.create_prim_func([a, b, result]))
    assert "vectorized" in function.script() or batch * rows * inner * columns < 1 << 16
    library = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), target=TARGET)
    generator = np.random.default_rng(zlib.crc32(repr((extents, transposed)).encode()))
    x, y = (generator.integers(-3, 4, [int(e) for e in each.shape]).astype("float32") for each in (a, b))
    x[0, 0, 0], y[-1, -1, -1] = np.inf, np.nan
    found = tvm.runtime.tensor(np.full((batch, rows, columns), np.nan, "float32"))
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), found)
    with np.errstate(invalid="ignore"):
        wanted = np.matmul(x.swapaxes(1, 2) if transposed[0] else x, y.swapaxes(1, 2) if transposed[1] else y)
    np.testing.assert_array_equal(found.numpy(), wanted * 0.5 + 3 if epilogue else wanted)
