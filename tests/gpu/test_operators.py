# SPDX-License-Identifier: Apache-2.0
"""Operators of steps whose GPU functions are made here, on a GPU: equal to the last bit to those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.dropout import dropout_mask, reference_mask
from relax_ops.pool_backward import avg_pool_backward, max_pool_backward
from relax_ops.program import directions_module
from tests.offload.matrix_product import operands_of, product
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.partition import partition
from tvm_convgrad.offload.registry import backend, load_runtime
from tvm_convgrad.training.compile.lower import compile_module
from tvm_convgrad.training.passes.library_products import ProductsForLibraries

pytestmark = pytest.mark.gpu

HWIO = "_lay=NHWC:HWIO:NHWC"
POOL = {"pool_size": [3, 3], "strides": [2, 2], "padding": [1, 1, 1, 1], "dilation": [1, 1], "layout": "NCHW"}
WINDOW = {key: POOL[key] for key in ("pool_size", "strides", "padding")}


@pytest.fixture(scope="module")
def target() -> Any:
    return local_target()  # a sentence where there is no GPU


def run(target: Any, arrays: list[Any], make: Callable[..., relax.Expr]) -> Any:
    """The result of an expression of the arrays, compiled for a target."""
    builder = relax.BlockBuilder()
    given = [relax.Var(f"a{i}", relax.TensorType(each.shape, str(each.dtype))) for i, each in enumerate(arrays)]
    with builder.function("main", given):
        with builder.dataflow():
            result = builder.emit_output(make(*given))
        builder.emit_func_output(result)
    device = tvm.cuda(0) if target != "llvm" else tvm.cpu()
    machine = relax.VirtualMachine(compile_module(builder.get(), target), device)
    return machine["main"](*(tvm.runtime.tensor(each, device) for each in arrays)).numpy()


def numbers(dtype: str, *shape: int, most: int = 4) -> Any:
    return np.random.default_rng(len(shape)).integers(-most, most, shape).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pools(target: Any, dtype: str) -> None:
    """Ties go to the first place; NaN stays, and gets the gradient."""
    x, dy = numbers(dtype, 2, 3, 9, 9), numbers(dtype, 2, 3, 5, 5)
    x[0, 0, 4, 4] = np.nan
    for make, arrays in (
        (lambda data: relax.op.nn.max_pool2d(data, **WINDOW), [x]),
        (lambda grad, data: max_pool_backward(grad, data, **POOL), [dy, x]),
        (lambda grad, data: avg_pool_backward(grad, data, **POOL), [dy * 36, x]),
    ):
        found, wanted = (run(each, arrays, make) for each in (target, "llvm"))
        assert np.array_equal(found.astype("float64"), wanted.astype("float64"), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [(3, 4), (7, 2), (1, 1)])
def test_adaptive_pools(target: Any, dtype: str, size: tuple[int, int]) -> None:
    """Windows of up to 9 places, or of all 35: means of multiples of their extents are exact."""
    x = numbers(dtype, 2, 3, 7, 5) * (36 if size != (1, 1) else 35)
    found, wanted = (run(each, [x], lambda x: relax.op.nn.adaptive_avg_pool2d(x, size)) for each in (target, "llvm"))
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(50, 16), (2, 50), (2, 50, 3)])
@pytest.mark.parametrize("axis", [0, 1])
def test_gradient_of_take(target: Any, shape: tuple[int, ...], axis: int) -> None:
    """Places that occur several times."""
    places = np.random.default_rng(1).integers(0, shape[axis], 70)
    grad = numbers("float32", *shape[:axis], 70, *shape[axis + 1 :])
    wanted = np.zeros(shape, "float32")
    np.add.at(np.moveaxis(wanted, axis, 0), places, np.moveaxis(grad, axis, 0))
    arrays = [grad, np.zeros(shape, "float32"), places]
    found = run(target, arrays, lambda grad, x, places: relax.op.grad.take_backward(grad, x, places, axis))
    assert np.array_equal(found, wanted)


def test_dropout(target: Any) -> None:
    """The mask of a seed is the same on all devices."""
    like, step = np.zeros((5, 300), "float32"), np.array(7, "int64")
    found = run(target, [like, step], lambda like, step: dropout_mask(like, step, rate=0.3, seed=11, stream=2))
    assert np.array_equal(found, reference_mask(like.shape, 7, rate=0.3, seed=11, stream=2))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "descriptor", [f"mb2ic8ih9oc12kh3ph1{HWIO}", "g2mb2ic8ih9oc12kh3sh2ph1", "mb2ic8iw9oc12kw3pw1"]
)
def test_convolutions_without_a_library(target: Any, direction: str, descriptor: str) -> None:
    """TVM's own operators, such as for the layout HWIO, which cuDNN is not given."""
    problem = ConvProblem.from_descriptor(descriptor)
    operands, wanted = numbers_of(problem, direction)
    module = directions_module([("main", DIRECTIONS[direction], problem)])
    machine = relax.VirtualMachine(compile_module(module, target), tvm.cuda(0))
    found = machine["main"](*(tvm.runtime.tensor(operand, tvm.cuda(0)) for operand in operands)).numpy()
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axes"), [((8, 28, 28, 48), [0, 1, 2]), ((4096, 48), [0]), ((8, 48, 28, 28), [0, 2, 3])]
)
def test_sums(target: Any, dtype: str, shape: tuple[int, ...], axes: list[int]) -> None:
    """Sums of float32 in one call and in two: every sum of such integers is exact."""
    x = numbers(dtype, *shape)
    found = run(target, [x], lambda x: relax.op.sum(relax.op.astype(x, "float32"), axes))
    assert np.array_equal(found, x.astype("float64").sum(tuple(axes)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", ["A B", "A B^T", "A^T B"])
def test_products(target: Any, dtype: str, form: str) -> None:
    """Linear layers and their gradients, which cuDNN computes."""
    module = product(form, *((40, 96, 24) if form == "A^T B" else (96, 40, 24)), dtype)
    a, b, wanted = operands_of(module, form)
    module = partition(ProductsForLibraries(("cudnn",), target)(module), ["cudnn"], target)
    load_runtime("cudnn", backend("cudnn").library())
    machine = relax.VirtualMachine(compile_module(module, target), tvm.cuda(0))
    found = machine["main"](*(tvm.runtime.tensor(each, tvm.cuda(0)) for each in (a, b))).numpy()
    assert np.array_equal(found.astype("float64"), wanted)
