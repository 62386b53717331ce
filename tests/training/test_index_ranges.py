# SPDX-License-Identifier: Apache-2.0
"""The ranges of inputs that are indices: through what moves elements, for all uses of each, and for nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.linked import quick_module
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.model.ensemble import ensemble
from tvm_convgrad.training.model.index_ranges import index_ranges
from tvm_convgrad.training.model.model import Model, from_module
from tvm_convgrad.training.model.own_loss import OwnLoss
from tvm_convgrad.training.model.trained_part import train_only
from tvm_convgrad.training.step.build import build_step

Emit = Callable[[relax.Expr], relax.Expr]
Body = Callable[[Emit, relax.Var], list[relax.Expr]]
ROWS = {"t": 10, "u": 7}


def table(name: str) -> relax.Expr:
    return relax.const(np.ones((ROWS[name], 2), "float32"))


def function_of(body: Body, shape: tuple[object, ...] = (4, 6), dtype: str = "int64") -> relax.Function:
    """A function of `ids`, whose results are what the body gives."""
    builder = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType(shape, dtype))
    with builder.function("main", [ids]):
        with builder.dataflow():
            outputs = [builder.emit_output(result) for result in body(builder.emit, ids)]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get()["main"]


def found(body: Body, shape: tuple[object, ...] = (4, 6), dtype: str = "int64") -> IndexRange | None:
    function = function_of(body, shape, dtype)
    return index_ranges(function, function.params).get(function.params[0])


def rows(emit: Emit, ids: relax.Expr, name: str = "t") -> relax.Expr:
    return emit(op.take(table(name), ids, 0))


def split(emit: Emit, ids: relax.Expr, *cut: object) -> list[relax.Expr]:
    parts = emit(op.split(ids, *cut))
    return [emit(relax.TupleGetItem(parts, number)) for number in range(len(parts.ty.fields))]


def sliced(ids: relax.Expr, axis: int, begin: int, end: int) -> relax.Expr:
    return op.strided_slice(ids, [axis], [begin], [end])


def without(emit: Emit, ids: relax.Expr, value: int, constant: int) -> relax.Expr:
    """The indices with a constant for one value."""
    other = emit(op.not_equal(ids, relax.const(value, "int64")))
    return emit(op.where(other, ids, relax.const(constant, "int64")))


def wrapped(emit: Emit, ids: relax.Expr, extent: int) -> relax.Expr:
    is_negative = emit(op.less(ids, relax.const(0, "int64")))
    return emit(op.where(is_negative, emit(op.add(ids, relax.const(extent, "int64"))), ids))


LARGE, BOTH = IndexRange.of_rows(10), IndexRange.of_rows(7)
STATIC: dict[str, tuple[Body, IndexRange | None]] = {
    "as it is": (lambda emit, ids: [rows(emit, ids)], LARGE),
    "two tables": (lambda emit, ids: [rows(emit, ids), rows(emit, ids, "u")], BOTH),
    "a mask besides": (lambda emit, ids: [rows(emit, ids), op.not_equal(ids, relax.const(0, "int64"))], LARGE),
    "a mask alone": (lambda emit, ids: [op.not_equal(ids, relax.const(0, "int64"))], None),
    "clip": (lambda emit, ids: [rows(emit, emit(op.clip(ids, 0, 9)))], None),
    "a sum": (lambda emit, ids: [rows(emit, emit(op.add(ids, relax.const(1, "int64"))))], None),
    "by float": (lambda emit, ids: [rows(emit, emit(op.astype(emit(op.astype(ids, "float32")), "int64")))], None),
    "int32": (lambda emit, ids: [rows(emit, emit(op.astype(ids, "int32")))], LARGE),
    "int8": (lambda emit, ids: [rows(emit, emit(op.astype(ids, "int8")))], None),
    "counted from the end": (lambda emit, ids: [rows(emit, wrapped(emit, ids, 10))], LARGE),
    "counted from another end": (lambda emit, ids: [rows(emit, wrapped(emit, ids, 7))], None),
    "one value replaced": (
        lambda emit, ids: [rows(emit, without(emit, ids, -100, 0))],
        IndexRange(-10, 9, "rows", (-100,)),
    ),
    "one value replaced by another": (
        lambda emit, ids: [
            rows(emit, emit(op.where(emit(op.equal(ids, relax.const(40, "int64"))), relax.const(-1, "int64"), ids)))
        ],
        IndexRange(-10, 9, "rows", (40,)),
    ),
    "replaced and counted": (
        lambda emit, ids: [rows(emit, wrapped(emit, without(emit, ids, -100, 0), 10))],
        IndexRange(-10, 9, "rows", (-100,)),
    ),
    "replaced by what is out of range": (lambda emit, ids: [rows(emit, without(emit, ids, -100, 10))], None),
    "replaced here, but not there": (
        lambda emit, ids: [rows(emit, without(emit, ids, -100, 0)), rows(emit, ids, "u")],
        BOTH,
    ),
    "two values replaced": (
        lambda emit, ids: [rows(emit, without(emit, without(emit, ids, -100, 0), -101, 0))],
        None,
    ),
    "many values replaced": (
        lambda emit, ids: [
            rows(emit, emit(op.where(emit(op.less(ids, relax.const(9, "int64"))), ids, relax.const(0, "int64"))))
        ],
        None,
    ),
    "all but one replaced": (
        lambda emit, ids: [
            rows(emit, emit(op.where(emit(op.equal(ids, relax.const(9, "int64"))), ids, relax.const(0, "int64"))))
        ],
        None,
    ),
    "the last and the others": (
        lambda emit, ids: [rows(emit, emit(sliced(ids, 1, 0, -1))), rows(emit, emit(sliced(ids, 1, -1, 6)))],
        LARGE,
    ),
    "half": (lambda emit, ids: [rows(emit, emit(sliced(ids, 1, 0, 3)))], None),
    "two halves": (
        lambda emit, ids: [rows(emit, emit(sliced(ids, 1, 0, 3))), rows(emit, emit(sliced(ids, 1, 3, 6)))],
        LARGE,
    ),
    "a shift": (
        lambda emit, ids: [rows(emit, emit(sliced(ids, 1, 0, 5))), rows(emit, emit(sliced(ids, 1, 1, 6)), "u")],
        LARGE,  # of the first column all ten are in range
    ),
    "two of three parts": (lambda emit, ids: [rows(emit, part) for part in split(emit, ids, 3, 1)[:2]], None),
    "three parts": (lambda emit, ids: [rows(emit, part) for part in split(emit, ids, [1, 4], 1)], LARGE),
    "parts in another order": (
        lambda emit, ids: [rows(emit, emit(op.concat(split(emit, ids, 2, 0)[::-1], 0)))],
        LARGE,
    ),
    "beside constants": (
        lambda emit, ids: [rows(emit, emit(op.concat([relax.const(np.array([[5] * 6]), "int64"), ids], 0)))],
        LARGE,
    ),
    "nothing reads it": (lambda emit, ids: [emit(op.abs(ids))][:1] if rows(emit, ids) is None else [op.abs(ids)], None),
    "clipped rows": (lambda emit, ids: [op.take(table("t"), ids, 0, "clip")], None),
    "an integer table": (lambda emit, ids: [op.take(relax.const(np.arange(7)), ids, 0)], BOTH),
    "an axis that is not the first": (lambda emit, ids: [op.take(table("t"), ids, 1)], IndexRange.of_rows(2)),
    "vectors": (lambda emit, ids: [op.gather_nd(relax.const(np.ones((9, 8, 7, 6, 5, 4), "float32")), ids)], None),
    "elements": (lambda emit, ids: [op.gather_elements(op.ones([4, 7], "float32"), ids, 1)], BOTH),
    "some rows, then all": (
        lambda emit, ids: [rows(emit, emit(op.take(ids, relax.const(np.array([0, 2])), 0)), "u"), rows(emit, ids)],
        LARGE,
    ),
    "labels": (
        lambda emit, ids: [
            op.nn.nll_loss(relax.const(np.ones((24, 5), "float32")), emit(op.reshape(ids, [24])), ignore_index=-7)
        ],
        IndexRange.of_classes(5, -7),
    ),
    "labels and rows": (
        lambda emit, ids: [
            op.nn.nll_loss(relax.const(np.ones((24, 5), "float32")), emit(op.reshape(ids, [24])), ignore_index=-7),
            rows(emit, ids, "u"),
        ],
        IndexRange(0, 4, "values", (-7,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_fixed_extents(name: str) -> None:
    body, expected = STATIC[name]
    if name == "vectors":
        expected = IndexRange(-9, 8, "rows")  # the widest of six axes: elements differ
    assert found(body) == expected


def test_vectors_of_indices() -> None:
    """Each column has its axis; constants beside them count for nothing."""
    data = relax.const(np.ones((9, 5), "float32"))

    def pairs(emit: Emit, ids: relax.Expr) -> relax.Expr:
        column = emit(op.reshape(ids, [24, 1]))
        return emit(op.concat([emit(op.zeros_like(column)), column], 1))

    assert found(lambda emit, ids: [op.gather_nd(data, pairs(emit, ids))]) == IndexRange.of_rows(5)
    assert found(lambda emit, ids: [op.scatter_nd(data, ids, op.ones([4], "float32"))], (4, 2)) == IndexRange.of_rows(9)
    batched = relax.const(np.ones((4, 3, 8), "float32"))
    assert found(lambda emit, ids: [op.gather_nd(batched, ids, 1)], (4, 1)) == IndexRange.of_rows(3)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_other_inputs_have_no_range(dtype: str) -> None:
    assert found(lambda emit, ids: [rows(emit, emit(op.astype(ids, "int64")))], dtype=dtype) is None


N = tvm.tirx.Var("n", "int64")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda emit, ids: [rows(emit, emit(op.reshape(ids, [N * 6])))], LARGE),
        (lambda emit, ids: [rows(emit, emit(sliced(ids, 1, 0, 3)))], None),
        (lambda emit, ids: [rows(emit, emit(sliced(ids, 1, i, i + 3))) for i in (0, 3)], LARGE),
        (lambda emit, ids: [rows(emit, emit(sliced(emit(op.permute_dims(ids)), 0, i, i + 3))) for i in (0, 3)], LARGE),
        # of one sample the first would be all, and the halves of all samples are not those of each
        (lambda emit, ids: [rows(emit, emit(sliced(ids, 0, 0, 1)))], None),
        (lambda emit, ids: [rows(emit, part) for part in split(emit, emit(op.reshape(ids, [2, N * 3])), 2, 0)], None),
        (lambda emit, ids: [rows(emit, emit(op.strided_slice(ids, [0], [0], [N])))], LARGE),
        (lambda emit, ids: [rows(emit, emit(op.broadcast_to(emit(op.expand_dims(ids, 0)), [3, N, 6])))], LARGE),
    ],
)  # fmt: skip
def test_a_free_batch(body: Body, expected: IndexRange | None) -> None:
    assert found(body, (N, 6)) == expected


def move(dice: random.Random, emit: Emit, ids: relax.Expr) -> relax.Expr:
    """One random move of the elements of `ids`, with constants among them or not."""
    shape = [int(extent) for extent in ids.ty.shape.values]
    axis = dice.randrange(len(shape))
    extent = shape[axis]
    begin = dice.randrange(extent)
    constant = relax.const(np.full(shape, -1), "int64")
    moves: list[Callable[[], relax.Expr]] = [
        lambda: op.permute_dims(ids, dice.sample(range(len(shape)), len(shape))),
        lambda: op.reshape(ids, dice.choice([[-1], [*shape, 1], [shape[0], -1]])),
        lambda: sliced(ids, axis, begin, dice.randint(begin + 1, extent)),
        lambda: op.strided_slice(ids, [axis], [0], [extent], [dice.randint(1, 3)]),
        lambda: (
            dice.choice(split(emit, ids, [extent // 2, extent - 1] if extent > 3 else 2, axis)) if extent > 1 else ids
        ),
        lambda: op.concat([ids, ids, constant], axis),
        lambda: op.flip(ids, axis),
        lambda: op.broadcast_to(ids, [2, *shape]),
        lambda: op.expand_dims(ids, axis),
        lambda: op.take(ids, relax.const(np.array([begin])), axis),
    ]
    return emit(dice.choice(moves)())


def moved(seed: float, emit: Emit, ids: relax.Expr) -> relax.Expr:
    """Elements of `ids`, and of constants, after some random moves."""
    dice = random.Random(seed)
    for _ in range(dice.randrange(1, 6)):
        ids = move(dice, emit, ids)
    return ids


def test_what_is_read_by_running_it() -> None:
    """Which elements some random moves leave is what the function gives of 0, 1, 2, …"""
    dice = random.Random(11)
    builder, bodies, shape = relax.BlockBuilder(), [], (4, 6)
    for number in range(60):
        seed = dice.random()
        function = function_of(lambda emit, ids, seed=seed: [moved(seed, emit, ids)])
        builder.add_func(function.with_attr("global_symbol", f"f{number}"), f"f{number}")
        bodies.append(found(lambda emit, ids, seed=seed: [rows(emit, moved(seed, emit, ids))]))
    machine = quick_module(builder.get())
    given = tvm.runtime.tensor(np.arange(24).reshape(shape))
    covered = [set(machine[f"f{number}"](given)[0].numpy().flat) >= set(range(24)) for number in range(len(bodies))]
    assert [range_ is not None for range_ in bodies] == covered
    assert 5 < sum(covered) < 55
    assert {range_ for range_ in bodies if range_ is not None} == {LARGE}


def model_of(seed: int = 0, batch: int = 4) -> Model:
    """Means of rows of a table of ten, into three scores; the table is first in the parameters."""
    builder = relax.BlockBuilder()
    ids = relax.Var("tokens", relax.TensorType([batch, 5], "int64"))
    words = relax.Var("words", relax.TensorType([10, 4], "float32"))
    w = relax.Var("w", relax.TensorType([4, 3], "float32"))
    with builder.function("main", [ids, words, w]):
        with builder.dataflow():
            mean = builder.emit(op.mean(builder.emit(op.take(words, ids, 0)), [1]))
            scores = builder.emit_output(op.matmul(mean, w))
        builder.emit_func_output(scores)
    return from_module(builder.get(), num_inputs=1, seed=seed)


def test_through_what_is_made_of_a_model() -> None:
    """Parts that are trained, ensembles, micro-batches: the schema of the step has the range and the classes."""
    model = model_of()
    assert model.inputs[0].range == LARGE
    for made, classes in ((train_only(model, ["w"]), 3), (ensemble([model, model_of(1)]), 3)):
        step = build_step(made)
        assert (step.inputs[0].range, step.target.range) == (LARGE, IndexRange.of_classes(classes))
    step = build_step(model, accumulate=3, ignore_index=-100)
    assert (step.inputs[0].shape, step.inputs[0].range) == ((12, 5), LARGE)
    assert step.target.range == IndexRange.of_classes(3, -100)
    assert build_step(model, loss="mse").target.range is None


def test_the_target_of_a_models_own_loss() -> None:
    """Class numbers that its nll_loss takes, and the one that this ignores."""
    builder = relax.BlockBuilder()
    ids, y = (relax.Var(name, relax.TensorType([2, 6], "int64")) for name in ("tokens", "labels"))
    words = relax.Var("words", relax.TensorType([10, 10], "float32"))
    with builder.function("main", [ids, y, words], {"num_input": 2}):
        with builder.dataflow():
            scores = builder.emit(op.nn.log_softmax(builder.emit(op.take(words, ids, 0))))
            flat = builder.emit(op.reshape(scores, [12, 10]))
            loss = builder.emit_output(op.nn.nll_loss(flat, builder.emit(op.reshape(y, [12])), ignore_index=-100))
        builder.emit_func_output(loss)
    model = from_module(builder.get(), outputs=OwnLoss())
    step = build_step(model, loss="model")
    assert (step.inputs[0].range, step.target.range) == (LARGE, IndexRange.of_classes(10, -100))
