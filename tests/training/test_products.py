# SPDX-License-Identifier: Apache-2.0
"""Matrix products on convolution kernels: exact on small integers, in every form that a linear layer takes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_convgrad.training.compile.lower import LowerStep

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
    lowered = LowerStep(TARGET)(builder.get())
    names = {variable.name_hint for variable in lowered.get_global_vars()}
    assert any(name.startswith("matmul_") and name.endswith("_kernel") for name in names)
    # An operand is never transposed in memory; a result is where nothing asks for its transpose.
    assert not any("transpose" in name for name in names)
    machine = relax.VirtualMachine(tvm.compile(builder.get(), TARGET, relax_pipeline=LowerStep(TARGET)), tvm.cpu())
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-4, 5, extents).astype("float32") for extents in (left, right))
    found = machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
    wanted = (x.T if form.startswith("left") else x) @ (y.T if form == "right transposed" else y)
    np.testing.assert_array_equal(found, wanted.T if form.endswith("result transposed") else wanted)


def linear(m, k: int, n: int, late: bool, batch=None) -> tvm.IRModule:
    """x w^T + b and the gradients of w and b by dy; the sum of dy's rows comes before the product, or after it.

    A vector of `batch` elements comes first, if there is one: it gives the symbolic extent its value.
    """
    shapes = {"x": (m, k), "w": (n, k), "b": (n,), "dy": (m, n)}
    variables = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    x, w, b, dy = variables.values()
    first = [] if batch is None else [relax.Var("samples", relax.TensorType((batch,), "float32"))]
    builder = relax.BlockBuilder()
    with builder.function("main", [*first, x, w, b, dy]):
        with builder.dataflow():
            y = builder.emit(relax.op.add(b, relax.op.matmul(x, builder.emit(relax.op.permute_dims(w, [1, 0])))))
            db = None if late else builder.emit(relax.op.sum(dy, axis=[0]))
            product = builder.emit(relax.op.matmul(builder.emit(relax.op.permute_dims(x, [1, 0])), dy))
            dw = builder.emit(relax.op.permute_dims(product, [1, 0]))
            db = builder.emit(relax.op.sum(dy, axis=[0])) if db is None else db
            output = builder.emit_output(relax.Tuple([y, dw, db]))
        builder.emit_func_output(output)
    return builder.get()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", [(196, 48, 61), (100, 33, 300), (392, 40, 512)], ids=str)
def test_bias_and_its_gradient_are_parts_of_the_kernels(shape, late):
    module = linear(*shape, late)
    lowered = LowerStep(TARGET)(module)
    names = {variable.name_hint for variable in lowered.get_global_vars()} - {"main"}
    assert {name for name in names if "reshape" not in name and not name.startswith("convgrad_entry")} == {
        f"matmul_{f}_kernel" for f in ("forward", "backward_weight")
    }
    assert not any(word in name for name in names for word in ("add", "sum", "transpose"))
    machine = relax.VirtualMachine(tvm.compile(module, TARGET, relax_pipeline=LowerStep(TARGET)), tvm.cpu())
    rng = np.random.default_rng(0)
    m, k, n = shape
    x, w, b, dy = (rng.integers(-4, 5, e).astype("float32") for e in ((m, k), (n, k), (n,), (m, n)))
    y, dw, db = (tensor.numpy() for tensor in machine["main"](*map(tvm.runtime.tensor, (x, w, b, dy))))
    np.testing.assert_array_equal(y, x @ w.T + b)
    np.testing.assert_array_equal(dw, dy.T @ x)
    np.testing.assert_array_equal(db, dy.sum(0))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("each", "k", "n"), [(1, 520, 97), (5, 61, 300), (49, 64, 33), (64, 96, 40)], ids=str)
def test_rows_of_a_symbolic_batch(each, k, n, late):
    """One row a sample, as behind a pool, and several, as tokens are; exact for any batch."""
    batch = tvm.tirx.Var("n", "int64")
    module = linear(batch if each == 1 else each * batch, k, n, late, batch)
    lowered = LowerStep(TARGET)(module)
    names = {variable.name_hint for variable in lowered.get_global_vars()} - {"main", "shape_func"}
    assert {name for name in names if "reshape" not in name and not name.startswith("convgrad_entry")} == {
        f"matmul_{f}_kernel" for f in ("forward", "backward_weight")
    }
    machine = relax.VirtualMachine(tvm.compile(module, TARGET, relax_pipeline=LowerStep(TARGET)), tvm.cpu())
    rng = np.random.default_rng(0)
    for samples in (1, 3, 16):
        m = samples * each
        x, w, b, dy = (rng.integers(-4, 5, e).astype("float32") for e in ((m, k), (n, k), (n,), (m, n)))
        samples_given = np.zeros(samples, "float32")
        given = map(tvm.runtime.tensor, (samples_given, x, w, b, dy))
        y, dw, db = (tensor.numpy() for tensor in machine["main"](*given))
        np.testing.assert_array_equal(y, x @ w.T + b)
        np.testing.assert_array_equal(dw, dy.T @ x)
        np.testing.assert_array_equal(db, dy.sum(0))


@pytest.mark.parametrize("inner", [False, True])
def test_other_symbolic_extents_stay_products(inner):
    """A sum of two symbolic extents as rows; a symbolic extent that is not a row count."""
    p, q = tvm.tirx.Var("p", "int64"), tvm.tirx.Var("q", "int64")
    left, right = ((32, p), (p, 512)) if inner else ((p + q, 512), (512, 64))
    a, b = relax.Var("a", relax.TensorType(left, "float32")), relax.Var("b", relax.TensorType(right, "float32"))
    extra = relax.Var("c", relax.TensorType((p, q), "float32"))  # gives the extents values
    builder = relax.BlockBuilder()
    with builder.function("main", [a, b, extra]):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(relax.op.matmul(a, b)))
        builder.emit_func_output(output)
    lowered = LowerStep(TARGET)(builder.get())
    assert not any(variable.name_hint.startswith("matmul_forward") for variable in lowered.get_global_vars())
    machine = relax.VirtualMachine(tvm.compile(builder.get(), TARGET, relax_pipeline=LowerStep(TARGET)), tvm.cpu())
    rng = np.random.default_rng(0)
    x, y = (
        rng.integers(-4, 5, e).astype("float32") for e in (((32, 7), (7, 512)) if inner else ((12, 512), (512, 64)))
    )
    found = machine["main"](*map(tvm.runtime.tensor, (x, y, np.zeros((7, 5), "float32")))).numpy()
    np.testing.assert_array_equal(found, x @ y)
