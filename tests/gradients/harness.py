# SPDX-License-Identifier: Apache-2.0
"""Differentiate a small Relax function with TVM, run it, and compare with PyTorch or finite differences in float64."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

with warnings.catch_warnings():
    # While the package is being built up, its entry point may not load yet; `register` below reports that.
    warnings.simplefilter("ignore")
    import tvm
from tvm import relax

from relax_ops.compat import arithmetic
from tests.linked import PLAIN, linked

Build = Callable[..., Any]


def register() -> None:
    """Put the gradient rules in, whether or not importing TVM has done it."""
    importlib.import_module("tvm_convgrad").register()


register()


def _differentiable(arrays: Sequence[Any]) -> list[int]:
    """The arguments to differentiate by default: those of floats."""
    return [i for i, a in enumerate(arrays) if np.issubdtype(a.dtype, np.floating)]


def weights_for(shape: Sequence[int], dtype: str = "float32") -> np.ndarray:
    """Cotangents that differ from element to element: multiples of 1/8 in [-1, 1], exact in every float type."""
    rng = np.random.default_rng(len(shape) + int(np.prod(shape)))
    return (rng.integers(-8, 9, size=tuple(shape)) / 8.0).astype(dtype)


def variable(name: str, array: Any, symbols: dict[int, Any] | None = None) -> Any:
    """A Relax variable with the array's type; `symbols` makes the named axes symbolic."""
    shape = [int(extent) for extent in array.shape]
    dims: list[Any] = [(symbols or {}).get(axis, extent) for axis, extent in enumerate(shape)]
    return relax.Var(name, relax.TensorType(dims, str(array.dtype)))


def module_of(build: Build, params: list[Any], wrt: Sequence[int]) -> tuple[Any, Any]:
    """IRModule with `main(*params, *cotangents) -> loss`, loss = Σ y·w over all outputs y, and its adjoint.

    Returns the differentiated module and the number of outputs.
    """
    builder = relax.BlockBuilder()
    cotangents: list[Any] = []
    with builder.function("main"):
        with builder.dataflow():
            result = build(builder, *params)
            outputs = list(result) if isinstance(result, list | tuple) else [result]
            loss: Any = None
            for index, output in enumerate(outputs):
                y = builder.emit(output)
                w = relax.Var(f"w{index}", relax.TensorType(y.ty.shape, y.ty.dtype))
                cotangents.append(w)
                product = builder.emit(relax.op.multiply(y, w))
                if str(y.ty.dtype) != "float32":
                    product = builder.emit(relax.op.astype(product, "float32"))
                term = builder.emit(relax.op.sum(product))
                loss = term if loss is None else builder.emit(relax.op.add(loss, term))
            result_var = builder.emit_output(loss)
        builder.emit_func_output(result_var, [*params, *cotangents])
    module = builder.get()
    required = [params[i] for i in wrt]
    return relax.transform.Gradient("main", require_grads=required)(module), len(outputs)


def _concrete(shape: Any, bindings: dict[Any, int]) -> list[int]:
    """The extents of a symbolic shape under an assignment of its variables."""
    analyzer = arithmetic.Analyzer()
    for var, size in bindings.items():
        analyzer.bind(var, tvm.tirx.IntImm("int64", size))
    return [int(analyzer.simplify(extent)) for extent in shape]


def load(module: Any, target: Any = None) -> Any:
    """A virtual machine with the compiled module.

    Without optimisation by LLVM unless a target is given, since each kernel runs once.
    """
    return linked(tvm.compile(module, target=tvm.target.Target(PLAIN if target is None else target)))


def gradients(
    build: Build,
    arrays: Sequence[np.ndarray],
    wrt: Sequence[int] | None = None,
    symbolic: dict[tuple[int, int], str] | None = None,
    target: Any = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of Σ build(*arrays)·w in the arrays named by `wrt`, computed by TVM, and the cotangents w used.

    `symbolic` maps (argument, axis) to the name of a shape variable; equal names are one variable.
    """
    names = {name: tvm.tirx.Var(name, "int64") for name in (symbolic or {}).values()}
    params = [
        variable(f"x{i}", array, {ax: names[nm] for (a, ax), nm in (symbolic or {}).items() if a == i})
        for i, array in enumerate(arrays)
    ]
    wrt = _differentiable(arrays) if wrt is None else list(wrt)
    module, count = module_of(build, params, wrt)
    machine = load(module, target)
    inputs = [tvm.runtime.tensor(array) for array in arrays]
    # The adjoint has fresh shape variables: read them from its parameters.
    bindings = {
        extent: size
        for param, array in zip(module["main_adjoint"].params, arrays, strict=False)
        for extent, size in zip(param.ty.shape, array.shape, strict=True)
        if isinstance(extent, tvm.tirx.Var)
    }
    shapes = [_concrete(param.ty.shape, bindings) for param in module["main_adjoint"].params[len(arrays) :][:count]]
    dtypes = [str(param.ty.dtype) for param in module["main_adjoint"].params[len(arrays) :][:count]]
    cots = [weights_for(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    result = machine["main_adjoint"](*inputs, *[tvm.runtime.tensor(c) for c in cots])
    return [np.asarray(value.numpy()) for value in result[1]], cots


def torch_gradients(
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    cotangents: Sequence[np.ndarray],
    wrt: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """The same gradients by PyTorch in float64."""
    import torch

    wrt = _differentiable(arrays) if wrt is None else list(wrt)
    tensors = []
    for index, array in enumerate(arrays):
        floating = np.issubdtype(array.dtype, np.floating)
        tensor = torch.tensor(array.astype("float64") if floating else array)
        tensors.append(tensor.requires_grad_() if index in wrt else tensor)
    result = function(*tensors)
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    loss = sum((y * torch.tensor(w.astype("float64"))).sum() for y, w in zip(outputs, cotangents, strict=True))
    found = torch.autograd.grad(loss, [tensors[i] for i in wrt])
    return [g.numpy() for g in found]


def numeric_gradients(
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    cotangents: Sequence[np.ndarray],
    wrt: Sequence[int] | None = None,
    step: float = 1e-5,
) -> list[np.ndarray]:
    """The same gradients by central differences of a float64 numpy function; error about 1e-9 for smooth ones."""
    wrt = _differentiable(arrays) if wrt is None else list(wrt)
    values = [a.astype("float64") if np.issubdtype(a.dtype, np.floating) else a for a in arrays]

    def loss() -> float:
        result = function(*values)
        outputs = list(result) if isinstance(result, list | tuple) else [result]
        return float(sum((y * w.astype("float64")).sum() for y, w in zip(outputs, cotangents, strict=True)))

    found = []
    for index in wrt:
        gradient = np.zeros(values[index].shape)
        for place in np.ndindex(*values[index].shape):
            kept = values[index][place]
            values[index][place] = kept + step
            high = loss()
            values[index][place] = kept - step
            low = loss()
            values[index][place] = kept
            gradient[place] = (high - low) / (2 * step)
        found.append(gradient)
    return found


def sample(*shape: int, seed: int = 0, positive: bool = False) -> np.ndarray:
    """Float32 values in about [-2, 2] (or [0.5, 2.5]), none on a kink, no two near enough to tie by rounding."""
    rng = np.random.default_rng(seed + sum(shape))
    values = rng.permutation(int(np.prod(shape))).reshape(shape) / max(int(np.prod(shape)), 1)
    values = values * 2 + 0.5 if positive else values * 4 - 2 + 1 / 1024
    return values.astype("float32")


def integers(*shape: int, low: int = -2, high: int = 2, seed: int = 0) -> np.ndarray:
    """Small integers as float32, with many ties and many values on kinks; sums of them are exact."""
    return np.random.default_rng(seed + sum(shape)).integers(low, high + 1, size=shape).astype("float32")


def batch(arrays: Sequence[np.ndarray], axes: dict[int, str] | None = None) -> dict[tuple[int, int], str]:
    """The named axes (axis 0 as "n" by default) of every argument of the first one's rank made symbolic."""
    axes = {0: "n"} if axes is None else axes
    first = arrays[0]
    return {
        (i, axis): name
        for i, array in enumerate(arrays)
        for axis, name in axes.items()
        if array.ndim == first.ndim and array.shape[axis] == first.shape[axis]
    }


def bound(terms: int, magnitude: float, dtype: str = "float32", slack: float = 8.0) -> float:
    """Absolute error allowed for a sum of `terms` products of size `magnitude`: γ_n = n·u, times a small slack
    for the elementary functions (a few units in the last place each)."""
    unit = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}[dtype]
    return slack * (terms + 4) * unit * max(magnitude, 1.0)


def check(
    build: Build,
    oracle: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    *,
    wrt: Sequence[int] | None = None,
    symbolic: dict[tuple[int, int], str] | None = None,
    terms: int = 1,
    exact: bool = False,
    numeric: bool = False,
    dtype: str = "float32",
) -> None:
    """Assert that TVM's gradients of `build` are those of `oracle`, a float64 function (torch, or numpy if `numeric`).

    `terms` is the longest sum behind one gradient element; `exact` demands equality.
    """
    found, cots = gradients(build, arrays, wrt, symbolic)
    expected = (numeric_gradients if numeric else torch_gradients)(oracle, arrays, cots, wrt)
    indices = _differentiable(arrays) if wrt is None else list(wrt)
    for position, (index, have, want) in enumerate(zip(indices, found, expected, strict=True)):
        assert have.shape == arrays[index].shape, f"argument {index}: {have.shape}"
        assert have.dtype == arrays[index].dtype, f"argument {index}: {have.dtype}"
        want = np.asarray(want)
        if exact:
            np.testing.assert_array_equal(have.astype("float64"), want, err_msg=f"argument {position}")
            continue
        limit = bound(terms, float(np.abs(want).max(initial=0.0)), dtype)
        np.testing.assert_allclose(
            have.astype("float64"), want, rtol=0, atol=limit + (1e-7 if numeric else 0), err_msg=f"argument {position}"
        )
