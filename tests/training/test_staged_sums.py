# SPDX-License-Identifier: Apache-2.0
"""Sums over leading axes in two calls: the same numbers, and where a sum stays one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.training.compile.lower import compile_module
from tvm_convgrad.training.ir.graph import calls_of
from tvm_convgrad.training.passes.staged_sums import SumInStages


def program(
    shape: tuple[Any, ...], axes: list[int] | None, name: str = "sum", *, keep: bool = False, rows: bool = False,
    dtype: str = "float32",
) -> tvm.IRModule:  # fmt: skip
    """A sum or mean of x * x; with `rows` of its view as a matrix."""
    x = relax.Var("x", relax.TensorType(shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.multiply(x, x))
            if rows:
                value = builder.emit(relax.op.reshape(value, (-1, shape[-1])))
            output = builder.emit_output(getattr(relax.op, name)(value, axes, keep))
        builder.emit_func_output(output)
    return builder.get()


def sums(module: tvm.IRModule) -> list[tuple[list[int], list[Any]]]:
    """The axes and the operand's shape of each sum."""
    calls = [call for name in ("sum", "mean") for call in calls_of(module["main"], f"relax.{name}")]
    return [([int(axis) for axis in call.attrs.axis], list(call.args[0].ty.shape.values)) for call in calls]


def run(module: tvm.IRModule, x: Any) -> Any:
    machine = relax.VirtualMachine(compile_module(module, "llvm"), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


CASES = [
    ((4, 13, 11, 6), [0, 1, 2], {"keep": True}, [([1, 2], (4, 13, 11, 6)), ([0], (4, 6))]),
    ((4, 13, 11, 6), [-2, 0, 1], {}, [([1, 2], (4, 13, 11, 6)), ([0], (4, 6))]),
    ((4, 13, 11, 6), [0, 1, 2], {"name": "mean", "keep": True}, [([1, 2], (4, 13, 11, 6)), ([0], (4, 6))]),
    ((1, 26, 22, 6), [0, 1, 2], {}, [([0, 2], (1, 26, 22, 6)), ([0], (26, 6))]),
    ((4, 300, 5, 6), [0, 1], {}, [([1], (4, 300, 5, 6)), ([0], (4, 5, 6))]),
    ((4, 13, 11, 6), [0], {"rows": True}, [([1, 2], (4, 13, 11, 6)), ([0], (4, 6))]),
    ((4096, 6), [0], {}, [([1], (2048, 2, 6)), ([0], (2048, 6))]),
    ((4, 13, 11, 6), [0, 1, 2], {"dtype": "float16"}, [([1, 2], (4, 13, 11, 6)), ([0], (4, 6))]),
]
"""Shape, axes, how the program is made, and the sums that it has then. Small integers: sums below 256 are exact."""


@pytest.mark.parametrize(("shape", "axes", "how", "wanted"), CASES)
def test_two_calls(shape: tuple[int, ...], axes: list[int], how: dict[str, Any], wanted: list[Any]) -> None:
    module = program(shape, axes, **how)
    staged = SumInStages()(module)
    assert [(axes, tuple(map(int, shape))) for axes, shape in sums(staged)] == wanted
    assert staged["main"].ret_ty == module["main"].ret_ty
    x = (np.random.default_rng(0).random(shape) < 0.1).astype(numpy_dtype(how.get("dtype", "float32")))
    x.flat[0] = 0
    exact = (x.astype("float64") ** 2).reshape(-1, shape[-1]) if how.get("rows") else x.astype("float64") ** 2
    exact = getattr(np, how.get("name", "sum"))(exact, axis=tuple(axes), keepdims=how.get("keep", False))
    found = run(staged, x)
    assert found.shape == exact.shape
    # Sums are exact; a mean of means is rounded at both divisions, and at its sum.
    np.testing.assert_allclose(found, exact.astype(found.dtype), rtol=2.0**-22 if how.get("name") == "mean" else 0)
    x.flat[0] = np.nan
    assert np.isnan(run(staged, x).astype("float64")).any()


@pytest.mark.parametrize(
    ("shape", "axes", "how"),
    [
        ((2, 5, 5, 6), [0, 1, 2], {}),  # few summands
        ((4, 13, 11, 8192), [0, 1, 2], {}),  # results enough for a GPU
        ((4, 6, 13, 11), [0, 2, 3], {}),  # a block of threads for each result
        ((4, 13, 11, 6), None, {}),
        ((4, 13, 11, 6), [1, 2], {}),
        ((4097, 6), [0], {}),  # 17 x 241: no divisor gives blocks enough
        ((4, 13, 11, 6), [0, 1, 2], {"dtype": "int32"}),
        ((1, 600, 1, 6), [0, 1, 2], {}),
        ((4096, 0), [0], {}),
    ],
)
def test_one_call(shape: tuple[int, ...], axes: list[int] | None, how: dict[str, Any]) -> None:
    module = program(shape, axes, **how)
    assert tvm_ffi.structural_equal(SumInStages()(module), module)


def test_symbolic_batch() -> None:
    batch = tvm.tirx.Var("n", "int64")
    staged = SumInStages()(program((batch, 13, 11, 6), [0, 1, 2]))
    assert [axes for axes, _ in sums(staged)] == [[1, 2], [0]]
    x = np.random.default_rng(0).integers(-3, 4, (5, 13, 11, 6)).astype("float32")
    assert np.array_equal(run(staged, x), (x * x).sum((0, 1, 2)))
    mean = SumInStages()(program((batch, 13, 11, 6), [0, 1, 2], "mean"))
    assert [axes for axes, _ in sums(mean)] == [[1, 2], [0]]
    np.testing.assert_allclose(run(mean, x), (x * x).mean((0, 1, 2)), rtol=1e-6)


def test_a_count_that_float16_does_not_hold() -> None:
    """Means of the images, of which each counts 12,544 and not 100,352."""
    module = SumInStages()(program((8, 112, 112, 4), [0, 1, 2], "mean", dtype="float16"))
    x = np.zeros((8, 112, 112, 4), "float16")
    x[:, ::2, ::2] = 2
    found = run(module, x)
    assert np.array_equal(found, np.ones(4, "float16"))


def test_a_view_of_another_block_is_no_operand() -> None:
    x = relax.Var("x", relax.TensorType((4, 13, 11, 6), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            images = builder.emit(relax.op.add(x, x))
            rows = builder.emit_output(relax.op.reshape(images, (572, 6)))
        builder.emit_func_output(builder.emit(relax.op.sum(rows, [0])))
    staged = SumInStages()(builder.get())
    relax.analysis.well_formed(staged)
    array = np.random.default_rng(0).integers(-3, 4, (4, 13, 11, 6)).astype("float32")
    assert np.array_equal(run(staged, array), 2 * array.sum((0, 1, 2)))
