# SPDX-License-Identifier: Apache-2.0
"""log1p, expm1, erfc and softplus keep the digits of small results, in all types."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm

from relax_ops.rules import near_zero
from tests.gradients.harness import load, relax, variable

CASES = {
    # function, the same in float64, and the exponents of 10 of the arguments
    "log1p": (near_zero.log1p, np.log1p, (-5, 4)),
    "expm1": (near_zero.expm1, np.expm1, (-5, 1)),
    "erfc": (near_zero.erfc, np.vectorize(math.erfc, otypes=["float64"]), (-2, 0.5)),
    "softplus": (relax.op.nn.softplus, lambda x: np.log1p(np.exp(x)), (-2, 1)),
}


def forward(build, x):
    builder = relax.BlockBuilder()
    data = variable("x", x)
    with builder.function("main", [data]):
        with builder.dataflow():
            output = builder.emit_output(build(data))
        builder.emit_func_output(output)
    return load(builder.get())["main"](tvm.runtime.tensor(x)).numpy()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_relative_errors_are_some_roundings(name, dtype):
    build, exact, (low, high) = CASES[name]
    sizes = np.logspace(low, high, 60)
    x = np.concatenate([[0.0], sizes, -sizes[sizes < 1] if name == "log1p" else -sizes]).astype(dtype)
    wanted = exact(x.astype("float64"))
    least = float(np.finfo(dtype).tiny)
    np.testing.assert_allclose(forward(build, x).astype("float64"), wanted, rtol=8 * np.finfo(dtype).eps, atol=least)


def test_values_at_infinity_and_beyond():
    x = np.array([math.inf, -math.inf, math.nan, -1.0, -2.0, 200.0, -200.0], "float32")
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(forward(near_zero.log1p, x)[:5], np.log1p(x)[:5])
        np.testing.assert_array_equal(forward(near_zero.expm1, x)[[0, 1, 2, 5, 6]], np.expm1(x)[[0, 1, 2, 5, 6]])
    np.testing.assert_array_equal(forward(near_zero.erfc, x)[[0, 1, 2, 5, 6]], [0, 2, math.nan, 0, 2])
    np.testing.assert_array_equal(forward(relax.op.nn.softplus, x)[[0, 1, 2, 5, 6]], [math.inf, 0, math.nan, 200, 0])
