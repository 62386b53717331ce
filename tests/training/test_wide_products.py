# SPDX-License-Identifier: Apache-2.0
"""Products of 16-bit operands that no convolution kernel computes: sums in float32, rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.linked import quick_module
from tvm_convgrad.core.dtypes import numpy_dtype

LONG = 2051
"""A sum of as many ones in float16 stops at 2048, one in bfloat16 at 256."""
SHAPES = {
    "batches": ((2, 3, LONG), (2, LONG, 5)),
    "batch and matrix": ((2, 3, LONG), (LONG, 5)),
    "any batch": (("n", 3, LONG), ("n", LONG, 5)),
    "row": ((1, LONG), (LONG, 5)),
    "column": ((3, LONG), (LONG, 1)),
    "columns": ((2, 3, LONG), (2, LONG, 1)),
    "vectors": ((LONG,), (LONG,)),
}


@pytest.fixture(scope="module")
def machine():
    """A function for each type and pair of shapes."""
    builder = relax.BlockBuilder()
    for dtype in ("float16", "bfloat16"):
        for number, shapes in enumerate(SHAPES.values()):
            batch = tvm.tirx.Var("n", "int64")
            extents = [[batch if extent == "n" else extent for extent in shape] for shape in shapes]
            operands = [relax.Var(name, relax.TensorType(e, dtype)) for name, e in zip("ab", extents, strict=True)]
            with builder.function(f"{dtype}_{number}", operands):
                with builder.dataflow():
                    output = builder.emit_output(relax.op.matmul(*operands, out_dtype=dtype))
                builder.emit_func_output(output)
    return quick_module(builder.get())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", SHAPES)
def test_sums_are_rounded_once(machine, kind, dtype):
    rng = np.random.default_rng(0)
    shapes = [[2 if extent == "n" else extent for extent in shape] for shape in SHAPES[kind]]
    a, b = (rng.integers(0, 3, shape).astype(numpy_dtype(dtype)) for shape in shapes)
    found = machine[f"{dtype}_{list(SHAPES).index(kind)}"](*map(tvm.runtime.tensor, (a, b))).numpy()
    exact = (a.astype("float32") @ b.astype("float32")).astype(numpy_dtype(dtype))  # integers below 2**24
    np.testing.assert_array_equal(found.astype("float32"), exact.astype("float32"))
