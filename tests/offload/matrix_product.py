# SPDX-License-Identifier: Apache-2.0
"""A matrix product as a module, with or without transposes, and operands for which it is exact in all types."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_convgrad.core.dtypes import numpy_dtype


def product(form: str, m: Any, k: Any, n: Any, dtype: str = "float32", result: str = "") -> tvm.IRModule:
    """The product of an m x k and a k x n matrix, in which those with ^T are transposes."""
    left, right = ([k, m] if "A^T" in form else [m, k]), ([n, k] if "B^T" in form else [k, n])
    given = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in (("a", left), ("b", right))]
    builder = relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            a, b = (
                builder.emit(relax.op.permute_dims(matrix)) if f"{letter}^T" in form else matrix
                for letter, matrix in zip("AB", given, strict=True)
            )
            output = builder.emit_output(relax.op.matmul(a, b, out_dtype=result or dtype))
        builder.emit_func_output(output)
    return builder.get()


def operands_of(module: tvm.IRModule, form: str) -> tuple[Any, Any, Any]:
    """The operands of such a product of constant extents, and the product in float64."""
    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(-1, 2, [int(extent) for extent in each.ty.shape.values]).astype(numpy_dtype(str(each.ty.dtype)))
        for each in module["main"].params
    )
    if form == "A^T B":  # few summands that are not 0: sums stay below 256
        a[64:] = 0
    left, right = (each.astype("float64") for each in (a, b))
    return a, b, (left.T if "A^T" in form else left) @ (right.T if "B^T" in form else right)
