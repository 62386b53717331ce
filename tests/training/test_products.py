# SPDX-License-Identifier: Apache-2.0
"""Matrix products on convolution kernels: exact on small integers, in every form that a linear layer takes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_convgrad.training.lower import pipeline

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
SHAPES = [(8, 512, 100), (196, 96, 61), (1, 700, 97), (392, 40, 80)]


@pytest.mark.parametrize(
    "form", ["plain", "right transposed", "right twice", "left transposed", "left and result transposed"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_products_are_exact(form, shape):
    m, k, n = shape
    left, right = (k, m) if form.startswith("left") else (m, k), (n, k) if form == "right transposed" else (k, n)
    a, b = relax.Var("a", relax.TensorType(left, "float32")), relax.Var("b", relax.TensorType(right, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [a, b]):
        with builder.dataflow():
            first = builder.emit(relax.op.permute_dims(a, [1, 0])) if form.startswith("left") else a
            second = builder.emit(relax.op.permute_dims(b, [1, 0])) if form == "right transposed" else b
            if form == "right twice":
                second = builder.emit(relax.op.permute_dims(builder.emit(relax.op.permute_dims(b, [1, 0])), [1, 0]))
            result = builder.emit(relax.op.matmul(first, second))
            if form.endswith("result transposed"):
                result = builder.emit(relax.op.permute_dims(result, [1, 0]))
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    lowered = pipeline(TARGET)(builder.get())
    names = {variable.name_hint for variable in lowered.get_global_vars()}
    assert any(name.startswith("matmul_") and name.endswith("_kernel") for name in names)
    # An operand is never transposed in memory; a result is where nothing asks for its transpose.
    assert not any("transpose" in name for name in names)
    machine = relax.VirtualMachine(tvm.compile(builder.get(), TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-4, 5, extents).astype("float32") for extents in (left, right))
    found = machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
    wanted = (x.T if form.startswith("left") else x) @ (y.T if form == "right transposed" else y)
    np.testing.assert_array_equal(found, wanted.T if form.endswith("result transposed") else wanted)
