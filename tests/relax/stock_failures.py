# SPDX-License-Identifier: Apache-2.0
"""Gradients that TVM's own rules refuse or get wrong, as a program: prints what came of each case as JSON.

    TVM_DEVICE_BACKEND_AUTOLOAD=0 python -m tests.relax.stock_failures      TVM alone
    python -m tests.relax.stock_failures                                    with this package

Each case is a scalar function; its gradients by relax.transform.Gradient are compared with central differences of the
compiled function itself, or with what is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

Array = np.ndarray[Any, Any]
CASES: dict[str, Callable[[], str]] = {}
ROWS = tvm.tirx.Var("n", "int64")
RANDOM = np.random.default_rng(7)


def case(
    make: Callable[..., relax.Expr],
    *inputs: Array,
    wanted: list[Array] | None = None,
    differentiated: int | None = None,
    symbolic: bool = False,
    error: float = 1e-5,
) -> Callable[[], str]:
    """A case: `make(*parameters)` summed; the gradients of the first `differentiated` inputs, all if None."""

    def run() -> str:
        shapes = [(ROWS, *value.shape[1:]) if symbolic else value.shape for value in inputs]
        params = [
            relax.Var(f"p{i}", relax.TensorType(shape, str(value.dtype)))
            for i, (shape, value) in enumerate(zip(shapes, inputs, strict=True))
        ]
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                value = builder.emit(make(*params))
                if value.ty.ndim:
                    value = builder.emit(op.sum(value))
                value = builder.emit_output(value)
            builder.emit_func_output(value)
        required = params[:differentiated]
        try:
            module = relax.transform.Gradient("main", require_grads=required)(builder.get())
            machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
            _, found = machine["main_adjoint"](*map(tvm.runtime.tensor, inputs))
        except Exception as problem:  # whatever TVM raises is the outcome
            return f"raises {type(problem).__name__}"
        expected = wanted or [differences(machine["main"], list(inputs), i) for i in range(len(required))]
        worst = max(
            float(np.abs(got.numpy().astype("float64") - want).max()) if got.numpy().shape == want.shape else np.inf
            for got, want in zip(found, expected, strict=True)
        )
        return "right" if worst <= error else f"wrong by {worst}"

    return run


def differences(function: Callable[..., Any], inputs: list[Array], which: int) -> Array:
    """Central differences of a compiled scalar function in one of its inputs."""
    result = np.zeros(inputs[which].shape)
    step = 2.0**-10
    for place in np.ndindex(*inputs[which].shape):
        ends = []
        for sign in (1, -1):
            moved = [value.copy() for value in inputs]
            moved[which][place] += sign * step
            ends.append(float(function(*map(tvm.runtime.tensor, moved)).numpy()))
        result[place] = (ends[0] - ends[1]) / (2 * step)
    return result


def numbers(*shape: int, dtype: str = "float64") -> Array:
    """Multiples of 1/16, of which no two in a row are equal."""
    return (RANDOM.permutation(int(np.prod(shape))).reshape(shape) / 16 - 1).astype(dtype)


X, Y = numbers(2, 3), numbers(2, 3)
IMAGE = numbers(1, 2, 6, 6)
CONDITION = np.array([[True, False, True], [False, False, True]])
ZERO = np.zeros((2,))

CASES |= {
    "relax.nn.conv2d": case(lambda x, w: op.nn.conv2d(x, w, dilation=2), IMAGE, numbers(2, 2, 2, 2)),
    "relax.mean": case(lambda x: op.mean(x, axis=[0]), X, symbolic=True),
    "relax.variance": case(lambda x: op.variance(x, axis=[0]), X, symbolic=True),
    "relax.where": case(lambda x, y, c: op.where(c, x, y), X[:1], Y, CONDITION, differentiated=2),
    "relax.triu": case(op.triu, numbers(3, 3)),
    "relax.power": case(op.power, ZERO, ZERO, wanted=[ZERO, ZERO]),
    "relax.nn.cross_entropy_with_logits": case(op.nn.cross_entropy_with_logits, X, Y, symbolic=True),
    "relax.nn.nll_loss": case(
        lambda p, w, t: op.nn.nll_loss(p, t, w, "sum"), X, numbers(3), np.array([2, 0]), differentiated=2
    ),
    "relax.matmul": case(
        lambda a, b: op.matmul(a, b, out_dtype="float32"),
        numbers(2, 3, dtype="float16"),
        numbers(3, 2, dtype="float16"),
        error=1e-2,
    ),
    "relax.nn.max_pool2d": case(lambda x: op.nn.max_pool2d(x, (2, 2), dilation=(2, 2)), IMAGE),
    "relax.nn.avg_pool2d": case(
        lambda x: op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), ceil_mode=True, count_include_pad=True), IMAGE
    ),
    "relax.astype": case(lambda x: op.astype(op.astype(x, "int32"), "float64"), X + 0.03, wanted=[np.zeros((2, 3))]),
    "relax.nn.softplus": case(op.nn.softplus, X),
    "relax.nn.conv1d": case(op.nn.conv1d, numbers(1, 2, 6), numbers(2, 2, 3)),
    "relax.cumsum": case(lambda x: op.multiply(op.cumsum(x, 1, exclusive=True), x), X),
    "relax.concat": case(lambda x: op.concat([x]), X),
}


if __name__ == "__main__":
    print(json.dumps({name: run() for name, run in CASES.items()}))
