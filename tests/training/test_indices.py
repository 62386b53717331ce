# SPDX-License-Identifier: Apache-2.0
"""Indices that a model computes from its inputs: those in range as numpy has them, NaN for all others, and no crash.

Compiled steps are called without `Session`, which refuses inputs that are indices out of range: see
test_index_ranges.py and tests/artifact/test_ranges.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tests.training.harness import Runner
from tvm_convgrad.training.ir.graph import calls_of
from tvm_convgrad.training.model.model import Model, from_module
from tvm_convgrad.training.step.build import build_step

ROWS, WIDTH, BATCH = 10, 4, 2
BAD = (ROWS, -ROWS - 1, 10**6, -(2**40), np.iinfo("int64").max, np.iinfo("int64").min)
"""Behind the last row, before the first as counted from the end, and far away."""

Expr = relax.Expr


@dataclass(frozen=True)
class Access:
    """Rows of a table by `ids`, (BATCH,): as expressions of Relax, and what numpy has.

    Attributes:
        spoils: whether an index out of range spoils the whole result, not its row alone.
    """

    relax: Callable[[Callable[[Expr], Expr], Expr, Expr], Expr]
    numpy: Callable[[np.ndarray, np.ndarray], np.ndarray]
    spoils: bool = False


def _columns(emit: Callable[[Expr], Expr], ids: Expr) -> Expr:
    return emit(op.expand_dims(ids, 1))


def _pairs(emit: Callable[[Expr], Expr], ids: Expr) -> Expr:
    """(id, 1) for each id."""
    columns = _columns(emit, ids)
    return emit(op.concat([columns, emit(op.ones_like(columns))], 1))


def _of_elements(emit: Callable[[Expr], Expr], ids: Expr) -> Expr:
    """The row of each element that is written."""
    return emit(op.broadcast_to(_columns(emit, ids), [BATCH, WIDTH]))


def _written(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    table = table.copy()
    table[ids] = 1.0
    return table[:BATCH]


ONES = relax.const(np.ones((BATCH, WIDTH), "float32"))
COLUMNS = relax.const(np.tile(np.arange(WIDTH), (BATCH, 1)))
ACCESSES = {
    "take": Access(lambda emit, table, ids: op.take(table, ids, 0), lambda table, ids: table[ids]),
    "computed": Access(
        lambda emit, table, ids: op.take(
            table, emit(op.multiply(emit(op.reshape(ids, [BATCH])), relax.const(1, "int64"))), 0
        ),
        lambda table, ids: table[ids],
    ),
    "gather_elements": Access(
        lambda emit, table, ids: op.gather_elements(table, _of_elements(emit, ids), 0),
        lambda table, ids: table[ids],
    ),
    "gather_nd": Access(lambda emit, table, ids: op.gather_nd(table, _columns(emit, ids)), lambda t, ids: t[ids]),
    "gather_nd, elements": Access(
        lambda emit, table, ids: emit(op.expand_dims(emit(op.gather_nd(table, _pairs(emit, ids))), 1)),
        lambda table, ids: table[ids, 1][:, None],
    ),
    "scatter_nd": Access(
        lambda emit, table, ids: op.strided_slice(
            emit(op.scatter_nd(table, _columns(emit, ids), ONES, "update")), [0], [0], [BATCH]
        ),
        _written,
        spoils=True,
    ),
    "scatter_elements": Access(
        lambda emit, table, ids: op.strided_slice(
            emit(op.scatter_elements(table, _of_elements(emit, ids), ONES, 0)),
            [0],
            [0],
            [BATCH],
        ),
        _written,
        spoils=True,
    ),
    "index_put": Access(
        lambda emit, table, ids: op.strided_slice(
            emit(op.index_put(table, relax.Tuple([_of_elements(emit, ids), COLUMNS]), ONES)), [0], [0], [BATCH]
        ),
        _written,
        spoils=True,
    ),
}


def model_of(access: Access, dtype: str = "int64") -> Model:
    builder = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType([BATCH], dtype))
    table = relax.Var("table", relax.TensorType([ROWS, WIDTH], "float32"))
    with builder.function("main", [ids, table]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(access.relax(builder.emit, table, ids)))
        builder.emit_func_output(result)
    values = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype("float32")
    return from_module(builder.get(), num_inputs=1, parameters={"table": values})


@pytest.mark.parametrize("name", ACCESSES)
def test_indices_in_range_and_beyond(name: str) -> None:
    access = ACCESSES[name]
    model = model_of(access)
    table = model.parameters["table"]
    runner = Runner(build_step(model, loss="mse"))
    for ids in ([0, ROWS - 1], [-1, -ROWS]):
        wanted = access.numpy(table, np.array(ids))
        found = runner.predict(np.array(ids, "int64"))
        np.testing.assert_array_equal(found, wanted)
    for bad in BAD:
        found = runner.predict(np.array([3, bad], "int64"))
        assert np.isnan(found[1]).all()
        assert np.isnan(found[0]).all() == access.spoils
    wanted = access.numpy(table, np.array([3, 0]))
    loss, _ = runner.step(np.array([3, BAD[2]], "int64"), np.zeros_like(wanted), lr=0.1)  # the gradient writes, too
    assert np.isnan(loss)


@pytest.mark.parametrize(("dtype", "bad"), [("uint8", ROWS), ("uint8", 255), ("int8", -ROWS - 1), ("int16", 300)])
def test_narrow_types_of_indices(dtype: str, bad: int) -> None:
    """Those that do not have the bounds of the check, such as -10, among them."""
    model = model_of(ACCESSES["take"], dtype)
    runner = Runner(build_step(model, loss="mse"))
    found = runner.predict(np.array([ROWS - 1, bad], dtype))
    np.testing.assert_array_equal(found[0], model.parameters["table"][ROWS - 1])
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("mode", ["clip", "wrap"])
@pytest.mark.parametrize("dtype", ["int64", "uint8", "int8"])
def test_modes_of_take_that_bound_indices(mode: str, dtype: str) -> None:
    """Forward, and in the gradient of the row that is read."""
    model = model_of(Access(lambda emit, table, ids: op.take(table, ids, 0, mode), lambda t, ids: t[ids]), dtype)
    table = np.arange(ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH)
    runner = Runner(build_step(replace(model, parameters={"table": table}), loss="mse", optimizer="sgd"))
    for ids in ([3, 12], [0, 100], *([[-1, -12], [-100, 9]] if dtype != "uint8" else [])):
        wanted = np.take(table, ids, 0, mode=mode)
        np.testing.assert_array_equal(runner.predict(np.array(ids, dtype)), wanted)
        runner.step(np.array(ids, dtype), wanted - 4, lr=1.0)  # the gradient of each of the 8 elements is 8 / 8
        moved = table.copy()
        np.subtract.at(moved, np.clip(ids, 0, 9) if mode == "clip" else np.mod(ids, 10), 1.0)
        np.testing.assert_array_equal(runner.named("parameter")["table"], moved)
        runner.reset()


def test_indices_that_are_bounded_are_not_checked() -> None:
    """Constants, and what clip or argmax give: the lookup costs no comparison."""
    for bounded in (
        lambda ids: relax.const(np.array([1, 2])),
        lambda ids: op.clip(ids, 0, ROWS - 1),
        lambda ids: op.argmax(op.broadcast_to(op.astype(ids, "float32"), [3, BATCH]), 0),
    ):
        access = Access(lambda emit, table, ids, of=bounded: op.take(table, emit(of(ids)), 0), lambda t, ids: t[ids])
        function = model_of(access).relax_function
        assert not list(calls_of(function, "relax.where"))
