# SPDX-License-Identifier: Apache-2.0
"""Matrix products as convolutions for a library of a GPU: the numbers, computed without one, and which stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.offload.matrix_product import operands_of, product
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.offload.cudnn.backend import CuDnn
from tvm_convgrad.offload.cutlass.backend import Cutlass
from tvm_convgrad.training.compile.lower import compile_module, for_libraries
from tvm_convgrad.training.ir.graph import calls_of
from tvm_convgrad.training.passes.library_products import ProductsForLibraries

pytestmark = pytest.mark.cuda

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
OPERATORS = {
    "A B": "relax.nn.conv2d_backward_data",
    "A B^T": "relax.nn.conv2d",
    "A^T B": "relax.nn.conv2d_backward_weight",
}


def replaced(module: tvm.IRModule) -> list[str]:
    (function,) = module.functions.values()
    return [str(call.op.name) for call in calls_of(function) if "conv" in str(call.op.name)]


def run(module: tvm.IRModule, *arrays: Any) -> Any:
    machine = relax.VirtualMachine(compile_module(module, "llvm"), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("float32", (97, 40, 24)), ("float32", (8192, 8, 16)), ("float16", (96, 40, 24)), ("bfloat16", (96, 40, 24))],
)
def test_values(form: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = (sizes[1], sizes[0], sizes[2]) if form == "A^T B" else sizes
    module = product(form, m, k, n, dtype)
    changed = ProductsForLibraries(("cudnn",), TARGET)(module)
    assert replaced(changed) == [OPERATORS[form]]
    assert changed["main"].ret_ty == module["main"].ret_ty
    a, b, exact = operands_of(module, form)
    assert np.array_equal(run(changed, a, b).astype("float64"), exact)


def test_symbolic_rows() -> None:
    batch = tvm.tirx.Var("n", "int64")
    for rows, wanted in ((batch, 1), (batch * 196, 1), (batch * 197, 1), (batch * 8192, 1), (batch + 1, 0)):
        changed = ProductsForLibraries(("cudnn",), TARGET)(product("A B^T", rows, 64, 256))
        assert len(replaced(changed)) == wanted
        if rows is batch:
            a = np.random.default_rng(0).integers(-3, 4, (3, 64)).astype("float32")
            b = np.random.default_rng(1).integers(-3, 4, (256, 64)).astype("float32")
            assert np.array_equal(run(changed, a, b), a @ b.T)


@pytest.mark.parametrize(
    ("form", "sizes", "dtype"),
    [
        ("A B", (8, 8, 8), "float32"),  # small
        ("A^T B^T", (64, 64, 64), "float32"),
        ("A B", (64, 64, 64), "int8"),
    ],
)
def test_what_stays(form: str, sizes: tuple[int, int, int], dtype: str) -> None:
    assert replaced(ProductsForLibraries(("cudnn",), TARGET)(product(form, *sizes, dtype))) == []


def test_any_library() -> None:
    """`auto` asks all of the target's."""
    assert replaced(ProductsForLibraries(("auto",), TARGET)(product("A B^T", 96, 40, 24))) == ["relax.nn.conv2d"]


def test_a_library_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` leaves the product; a name is told."""

    def refuse(*_: Any) -> None:
        raise SetupError("no compiler")

    monkeypatch.setattr(CuDnn, "engine", refuse)
    monkeypatch.setattr(Cutlass, "engine", refuse)
    assert replaced(ProductsForLibraries(("auto",), TARGET)(product("A B^T", 96, 40, 24))) == []
    with pytest.raises(SetupError, match="no compiler"):
        ProductsForLibraries(("cudnn",), TARGET)(product("A B^T", 96, 40, 24))


def test_a_transpose_of_another_block() -> None:
    a, b = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("a", (96, 40)), ("b", (24, 40))))
    builder = relax.BlockBuilder()
    with builder.function("main", [a, b]):
        with builder.dataflow():
            doubled = builder.emit(relax.op.add(b, b))
            transposed = builder.emit_output(relax.op.permute_dims(doubled))
        builder.emit_func_output(builder.emit(relax.op.matmul(a, transposed)))
    changed = ProductsForLibraries(("cudnn",), TARGET)(builder.get())
    relax.analysis.well_formed(changed)
    assert replaced(changed) == ["relax.nn.conv2d_backward_data"]


def test_a_linear_layer_does_not_hide_that_every_convolution_is_refused() -> None:
    """CUTLASS takes no convolution in NCHW, and would take the layer."""
    x, w, v = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", (2, 8, 8, 8)), ("w", (8, 8, 3, 3)), ("v", (128, 512)))
    )
    builder = relax.BlockBuilder()
    with builder.function("step", [x, w, v]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, w, padding=1))
            flat = builder.emit(relax.op.reshape(y, (2, 512)))
            output = builder.emit_output(relax.op.matmul(flat, builder.emit(relax.op.permute_dims(v))))
        builder.emit_func_output(output)
    module = builder.get()
    assert replaced(for_libraries(module, ("cudnn",), TARGET)) == ["relax.nn.conv2d", "relax.nn.conv2d"]
    assert replaced(for_libraries(module, ("cutlass",), TARGET)) == ["relax.nn.conv2d"]
