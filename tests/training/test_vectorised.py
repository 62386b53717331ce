# SPDX-License-Identifier: Apache-2.0
"""Polynomials in the place of erf, exp and tanh: how far they are from float64, and what they are used for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.rules.gelu import GELU_DERIVATIVE
from relax_ops.rules.near_zero import EXPM1
from tvm_convgrad.training.compile.lower import LowerStep
from tvm_convgrad.training.passes.vectorised import FUNCTIONS, SMALL

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
BOUND = 4e-7
"""What the module promises: of exp relative, of erf and tanh absolute; of exp(x) - 1 twice that, relative."""

erf = np.vectorize(math.erf)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


EXACT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # operator: the function in float64, and the error that is allowed at x
    "relax.erf": (erf, lambda x: BOUND + 0 * x),
    "relax.exp": (np.exp, lambda x: BOUND * np.exp(x)),
    EXPM1: (np.expm1, lambda x: 2 * BOUND * np.abs(np.expm1(x))),
    "relax.tanh": (np.tanh, lambda x: BOUND + 0 * x),
    "relax.sigmoid": (sigmoid, lambda x: 2 * BOUND + 0 * x),
    "relax.nn.gelu": (lambda x: x * (1 + erf(x / math.sqrt(2))) / 2, lambda x: BOUND * (1 + np.abs(x))),
    GELU_DERIVATIVE: (
        lambda x: (1 + erf(x / math.sqrt(2))) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
        lambda x: BOUND + 0 * x,
    ),
    "relax.nn.silu": (lambda x: x * sigmoid(x), lambda x: 2 * BOUND * (1 + np.abs(x))),
}


def program(name: str, count: int, dtype: str = "float32") -> Any:
    x = relax.Var("x", relax.TensorType((count,), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(relax.Call(tvm.ir.Op.get(name), [x]))
        builder.emit_func_output(output)
    return builder.get()


def run(name: str, x: np.ndarray) -> np.ndarray:
    executable = tvm.compile(program(name, len(x)), TARGET, relax_pipeline=LowerStep(TARGET))
    return relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()


def test_every_function_has_a_bound() -> None:
    assert set(EXACT) == set(FUNCTIONS)


@pytest.mark.parametrize("name", EXACT)
def test_they_are_close_to_float64(name: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 20001), np.linspace(-85, 85, 2001), [0.0, 1e-6, -1e-6]]).astype("float32")
    exact, allowed = EXACT[name]
    x64 = x.astype("float64")
    error = np.abs(run(name, x).astype("float64") - exact(x64))
    assert np.isfinite(error).all()
    worst = int((error - allowed(x64)).argmax())
    assert error[worst] <= allowed(x64)[worst], x[worst]


@pytest.mark.parametrize("name", EXACT)
def test_not_a_number_stays_one(name: str) -> None:
    x = np.zeros(SMALL + 16, "float32")
    x[::3] = np.nan
    np.testing.assert_array_equal(np.isnan(run(name, x)), np.isnan(x))


def test_exp_overflows_and_vanishes_where_it_does() -> None:
    x = np.zeros(SMALL + 16, "float32")
    edges = np.array([88.0, 88.3, 88.5, 88.72, 88.73, 100.0, np.inf, -87.0, -104.0, -np.inf], "float32")
    x[: len(edges)] = edges
    with np.errstate(over="ignore"):
        wanted = np.exp(edges.astype("float64")).astype("float32")
    np.testing.assert_allclose(run("relax.exp", x)[: len(edges)], wanted, rtol=BOUND, atol=0)
    np.testing.assert_allclose(run(EXPM1, x)[: len(edges)], wanted - 1, rtol=2 * BOUND, atol=0)


@pytest.mark.parametrize(
    ("count", "dtype", "is_replaced"),
    [(SMALL + 1, "float32", True), (SMALL, "float32", False), (SMALL + 1, "float64", False)],
)
def test_only_large_float32_tensors_are_changed(count: int, dtype: str, is_replaced: bool) -> None:
    text = LowerStep(TARGET)(program("relax.erf", count, dtype)).script()
    assert ("T.erf" not in text) == is_replaced
