# SPDX-License-Identifier: Apache-2.0
"""Operators of steps that TVM's GPU pipeline alone cannot compile, compiled for a GPU without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from relax_ops.dropout import dropout_mask
from relax_ops.pool_backward import max_pool_backward
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.offload.nvrtc import compiled, precise_kernels
from tvm_convgrad.training.compile.lower import compile_module

pytestmark = pytest.mark.cuda

TARGET = Target({"kind": "cuda", "arch": "sm_90"})
POOL = {"pool_size": [3, 3], "strides": [2, 2], "padding": [1, 1, 1, 1], "dilation": [1, 1], "layout": "NCHW"}
WINDOW = {key: POOL[key] for key in ("pool_size", "strides", "padding")}
PLACES = ((7,), "int64")


def kernels_of(make: Callable[..., relax.Expr], *operands: tuple[tuple[int, ...], str]) -> str:
    """The CUDA source of an expression of tensors of these shapes and types, which NVRTC takes."""
    builder = relax.BlockBuilder()
    given = [relax.Var(f"a{i}", relax.TensorType(*each)) for i, each in enumerate(operands)]
    with builder.function("main", given):
        with builder.dataflow():
            result = builder.emit_output(make(*given))
        builder.emit_func_output(result)
    modules = [compile_module(builder.get(), TARGET).mod]
    found = []
    while modules:
        module = modules.pop()
        modules += list(module.imports)
        found += [module.inspect_source("cuda")] if module.kind == "cuda" else []
    for source in found:
        assert compiled(source, "sm_90")
    return "\n".join(found)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_max_pools(dtype: str) -> None:
    x, dy = ((2, 3, 9, 9), dtype), ((2, 3, 5, 5), dtype)
    source = kernels_of(lambda data: relax.op.nn.max_pool2d(data, **WINDOW), x)
    assert "max_pool_kernel" in source
    assert ("inff/*" in source) == (dtype == "bfloat16")  # a name that C++ does not have
    source = kernels_of(lambda grad, data: max_pool_backward(grad, data, **POOL), dy, x)
    assert "max_pool_winner_kernel" in source
    assert "__shared__" not in source  # a window is no work for the threads of a block


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_adaptive_pools(dtype: str) -> None:
    source = kernels_of(lambda x: relax.op.nn.adaptive_avg_pool2d(x, (3, 4)), ((2, 3, 7, 5), dtype))
    assert "adaptive_avg_pool_kernel" in source


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_batches_are_summed_in_float32(dtype: str) -> None:
    """As in attention: in float16 a sum of 5000 ones would be 2048."""
    text = kernels_of(lambda a, b: relax.op.matmul(a, b, out_dtype=dtype), ((4, 64, 128), dtype), ((4, 128, 64), dtype))
    sums = re.findall(r"(\w+) matmul\w*_local_ptr\[", text)
    assert sums, text
    assert {each.rstrip("0123456789") for each in sums} == {"float"}


def test_dropout_is_small() -> None:
    """The key's ten rounds are not repeated in each round of the mask, where they made megabytes."""
    source = kernels_of(lambda like, step: dropout_mask(like, step, rate=0.3), ((64, 300), "float32"), ((), "int64"))
    assert "dropout_key_kernel" in source
    assert len(source) < 100_000


def test_the_gradient_of_take() -> None:
    """A thread for each column, which no other writes."""
    shapes = ((7, 16), "float32"), ((50, 16), "float32"), PLACES
    source = kernels_of(lambda grad, x, places: relax.op.grad.take_backward(grad, x, places, 0), *shapes)
    assert source.count("void __launch_bounds__(256) take_backward_kernel") == 2 * 2  # declared and defined


def test_operators_with_threads_of_their_own() -> None:
    shapes = ((7, 16), "float32"), ((7, 16), "int64"), ((7, 16), "float32")
    assert "atomic" not in kernels_of(lambda x, at, v: relax.op.scatter_elements(x, at, v, 0, "add"), *shapes)


def test_what_has_no_schedule_is_refused() -> None:
    """Such a function would run on the host, with addresses of the GPU's memory."""
    with pytest.raises(UnsupportedError, match="sm_90: TVM has no GPU schedule for index_put"):
        kernels_of(
            lambda x, at, v: relax.op.index_put(x, relax.Tuple([at]), v), ((50,), "float32"), PLACES, ((7,), "float32")
        )


def test_long_formulas_are_not_fused_whole() -> None:
    """Each value is read twice by the next: as one formula they would be 2^16 times as long."""

    def chain(x: relax.Expr) -> relax.Expr:
        for _ in range(16):
            x = relax.op.add(x, relax.op.sin(x))
        return x

    assert len(kernels_of(chain, ((64,), "float32"))) < 100_000


def test_minima_of_many_values_are_short() -> None:
    """As a step with a dynamic loss scale has; each reads its operands twice, so that NaN passes."""

    def least(x: relax.Expr) -> relax.Expr:
        found = x
        for number in range(24):
            found = relax.op.minimum(found, relax.op.multiply(x, relax.const(float(number), "float32")))
        return found

    assert len(kernels_of(least, ((64,), "float32"))) < 100_000


def test_a_long_function_of_symbolic_extents() -> None:
    """It is taken apart again; the pieces have the extents of their caller."""
    n = tirx.Var("n", "int64")

    def chain(x: relax.Expr) -> relax.Expr:
        for _ in range(16):
            x = relax.op.add(x, relax.op.sin(x))
        return relax.op.reshape(x, (n * 8,))

    assert len(kernels_of(chain, ((n, 8), "float32"))) < 100_000


def test_the_gradient_of_a_batch_norm_is_one_function() -> None:
    """In 16 bits: its operands are cast, centred and scaled where they are read."""
    shape = (8, 4, 4, 512)

    def gradient(x: relax.Expr, dy: relax.Expr, mean: relax.Expr, scale: relax.Expr) -> relax.Expr:
        wide, grad = relax.op.astype(x, "float32"), relax.op.astype(dy, "float32")
        centred = relax.op.multiply(relax.op.subtract(wide, mean), scale)
        masked = relax.op.where(relax.op.greater(centred, relax.const(0.0, "float32")), grad, relax.op.zeros_like(grad))
        left = relax.op.subtract(masked, relax.op.multiply(centred, mean))
        return relax.op.astype(relax.op.multiply(left, scale), "float16")

    channels = ((512,), "float32")
    source = kernels_of(gradient, (shape, "float16"), (shape, "float16"), channels, channels)
    assert source.count("__global__") == 2  # its declaration, too


def test_arithmetic_is_that_of_a_cpu() -> None:
    """No approximate instruction but those that exact functions are made of, none that flushes subnormal numbers."""
    source = kernels_of(
        lambda x, y: relax.op.sqrt(relax.op.tanh(relax.op.sin(relax.op.exp(relax.op.log(relax.op.divide(x, y)))))),
        ((7, 16), "float32"),
        ((7, 16), "float32"),
    )
    ptx = compiled(source, "sm_90", ptx=True).decode()
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert not set(
        re.findall(r"\b(?:div|sqrt|lg2|sin|cos|tanh)\.(?:approx|full)[\w.]*|\b(?:add|mul|fma)\.[\w.]*ftz[\w.]*", ptx)
    )


def test_an_error_of_nvrtc_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC: NVRTC_ERROR_COMPILATION; .*identifier \"y\" is undefined"):
        compiled('extern "C" __global__ void f(float* x) { x[0] = y; }', "sm_90")


def test_tvms_own_compiler_is_back_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tvm_callback_cuda_compile"
    source = 'extern "C" __global__ void f(float* x) { x[0] = __expf(x[1]); }'
    calls: list[str] = []
    before = tvm_ffi.get_global_func(name)
    tvm_ffi.register_global_func(name, lambda code, *_: calls.append(str(code)) or b"own", override=True)
    try:
        with precise_kernels("sm_90"):
            assert bytes(tvm_ffi.get_global_func(name)(source))[:4] == b"\x7fELF"
        assert calls == []
        monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")  # the user's choice
        with precise_kernels("sm_90"):
            tvm_ffi.get_global_func(name)(source)
        assert calls == [source]
    finally:
        tvm_ffi.register_global_func(name, before, override=True)


def test_a_toolkit_without_headers_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"CUDA_PATH, .*, has no include/cuda_runtime\.h; correct it, or unset it"):
        kernels_of(relax.op.exp, ((7, 16), "float32"))


def test_other_threads_keep_tvms_compiler() -> None:
    """And the blocks of two threads do not overlap: the compiler that a block restores is TVM's."""
    name = "tvm_callback_cuda_compile"
    source = 'extern "C" __global__ void f(float* x) { x[0] = 1; }'
    before = tvm_ffi.get_global_func(name)
    tvm_ffi.register_global_func(name, lambda code, *_: b"own", override=True)
    other = ThreadPoolExecutor(1)

    def again() -> bytes:
        with precise_kernels("sm_90"):
            return bytes(tvm_ffi.get_global_func(name)(source))

    try:
        with precise_kernels("sm_90"):
            assert other.submit(lambda: bytes(tvm_ffi.get_global_func(name)(source))).result() == b"own"
            waiting = other.submit(again)
            assert bytes(tvm_ffi.get_global_func(name)(source))[:4] == b"\x7fELF"
            assert not waiting.done()
        assert waiting.result()[:4] == b"\x7fELF"
        assert bytes(tvm_ffi.get_global_func(name)(source)) == b"own"
    finally:
        other.shutdown()
        tvm_ffi.register_global_func(name, before, override=True)
