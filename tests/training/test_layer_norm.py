# SPDX-License-Identifier: Apache-2.0
"""Layer norms and their gradients row by row: against float64, on any number of threads, and where they stay TVM's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.threads import run_with_threads
from tvm_convgrad.training.autodiff.differentiate import RULE
from tvm_convgrad.training.compile.lower import LowerStep

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
EPSILON = 1e-3
SHAPES = [(8, 28, 28, 96), (3, 7, 5, 99), (2, 65, 33), (5000, 8), (3, 4097), (70, 5000)]


def program(shape: tuple[int, ...], dtype: str = "float32", scale: float = EPSILON) -> tvm.IRModule:
    """y, and the partials of x, gamma and beta by dy."""
    whole, vector = relax.TensorType(shape, dtype), relax.TensorType(shape[-1:], dtype)
    x, gamma, beta, dy = (relax.Var(n, t) for n, t in zip("xgbd", (whole, vector, vector, whole), strict=True))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, gamma, beta, dy]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=scale))
            call = builder.lookup_binding(y)
            partials = [builder.emit(part) for part in call.op.get_attr(RULE)(y, call, dy, builder)]
            output = builder.emit_output(relax.Tuple([y, *partials]))
        builder.emit_func_output(output)
    return builder.get()


def operands(shape: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(extents).astype(dtype) for extents in (shape, shape[-1:], shape[-1:], shape)]


def wanted(x, gamma, beta, dy):
    """The formulas in float64, and the sum of the magnitudes of each result's terms."""
    x, gamma, beta, dy = (array.astype("float64") for array in (x, gamma, beta, dy))
    n = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((n * n).mean(-1, keepdims=True) + EPSILON)
    n, e = n * r, dy * gamma
    dx = r * (e - e.mean(-1, keepdims=True) - n * (e * n).mean(-1, keepdims=True))
    size = r * (abs(e) + abs(e).mean(-1, keepdims=True) + abs(n) * abs(e * n).mean(-1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    values = [n * gamma + beta, dx, (dy * n).sum(rows), dy.sum(rows)]
    return values, [abs(n * gamma) + abs(beta) + 1, size * 4 + 1, abs(dy * n).sum(rows) * 2 + 1, abs(dy).sum(rows)]


def names(module: tvm.IRModule) -> set[str]:
    return {variable.name_hint for variable in LowerStep(TARGET)(module).get_global_vars()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_and_gradients_are_close_to_float64(shape, dtype):
    module = program(shape, dtype)
    assert {"norm_rows", "norm_rows_gradient", "norm_sums"} <= names(module)
    machine = relax.VirtualMachine(tvm.compile(module, TARGET, relax_pipeline=LowerStep(TARGET)), tvm.cpu())
    given = operands(shape, dtype)
    found = [tensor.numpy() for tensor in machine["main"](*map(tvm.runtime.tensor, given))]
    terms = (shape[-1], shape[-1], np.prod(shape[:-1]), np.prod(shape[:-1]))
    for value, right, size, length in zip(found, *wanted(*given), terms, strict=True):
        # A sum of k terms is off by at most k roundings of its magnitudes; the row's statistics add those of a row.
        bound = (int(length) + 2 * shape[-1] + 8) * np.finfo(dtype).eps / 2 * size
        assert value.dtype == dtype
        assert value.shape == right.shape
        assert (abs(value - right) <= bound).all()


def test_a_small_error_is_seen():
    """The bound is no room for a wrong formula: without the mean of e n, dx is far beyond it."""
    given = operands((70, 96))
    values, sizes = wanted(*given)
    x, gamma, _, dy = (array.astype("float64") for array in given)
    e = dy * gamma
    deviation = np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    wrong = (e - e.mean(-1, keepdims=True)) / deviation
    assert (abs(wrong - values[1]) > (3 * 96 + 8) * np.finfo("float32").eps / 2 * sizes[1]).mean() > 0.9


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    [((8, 8), "float32", EPSILON), ((80, 96), "float16", EPSILON)],
    ids=["small", "float16"],
)
def test_others_stay_as_they_were(shape, dtype, scale):
    assert not any(name.startswith("norm_") for name in names(program(shape, dtype, scale)))


def test_a_gradient_of_another_epsilon_is_not_taken():
    module = program((80, 96))
    text = module.script().replace("epsilon=0.001", "epsilon=0.01")
    assert text != module.script()
    found = names(tvm.script.from_source(text))
    assert "norm_rows" in found
    assert "norm_rows_gradient" not in found


PROGRAM = """
import tvm
from tests.threads import check_same_bits
from tests.training.test_layer_norm import TARGET, operands, program
from tvm import relax
from tvm_convgrad.training.compile.lower import LowerStep
for shape in ((8, 28, 28, 96), (3, 7, 5, 99)):
    executable = tvm.compile(program(shape), TARGET, relax_pipeline=LowerStep(TARGET))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    given = list(map(tvm.runtime.tensor, operands(shape)))
    check_same_bits(lambda: [tensor.numpy() for tensor in machine["main"](*given)])
"""


def test_results_do_not_depend_on_threads():
    run_with_threads(PROGRAM, 2)
