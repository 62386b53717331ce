# SPDX-License-Identifier: Apache-2.0
"""Gradients of operators that stock Relay has none of, in float64 against differences, in both modes of Relay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relay
from tvm.contrib import graph_executor

from relay_ops.differentiate import value_and_gradients
from relay_ops.gradients import GRADIENTS
from tests.relay_ops.harness import execute, typed
from tvm_convgrad.core.errors import UnsupportedError

STEP = 1e-4
WEIGHTS = {1: 8 / 12, -1: -8 / 12, 2: -1 / 12, -2: 1 / 12}  # of the first derivative (Fornberg 1988)
TOLERANCE = 1e-7  # relative to the gradient: the difference's error is about STEP**4 + 1e-16 / STEP


@dataclass(frozen=True)
class Case:
    """A tensor, or a tuple of them, made of variables of these shapes; the values of `positive` are in [1, 2]."""

    make: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    positive: tuple[int, ...] = ()


def batch_norm(*results: int, **attributes: Any) -> Callable[..., Any]:
    def make(*operands: Any) -> Any:
        call = relay.nn.batch_norm(*operands, **attributes)
        return relay.Tuple([call[i] for i in results])

    return make


def second(make: Callable[..., Any]) -> Callable[..., Any]:
    """The first partial of the sum of squares of `make`: its gradient is one of second order."""

    def partial(*operands: Any) -> Any:
        value = make(*operands)
        step = value_and_gradients(relay.Function(list(operands), relay.sum(value * value)))["main"]
        return relay.bind(step.body.fields[1], dict(zip(step.params, operands, strict=True)))

    return partial


def ids(*values: int) -> Any:
    return relay.const(np.array(values, "int32"))


X, C = (2, 3, 4, 5), (3,)
LAST = (2, 4, 5, 3)
POOL = {"pool_size": (3, 2), "strides": (2, 1), "padding": (1, 0, 1, 1)}
CASES = {
    "batch_norm": Case(batch_norm(0), (X, C, C, C, C), (4,)),
    "batch_norm all results": Case(batch_norm(0, 1, 2), (X, C, C, C, C), (4,)),
    "batch_norm last axis": Case(batch_norm(0, 2, axis=-1, epsilon=0.5), (LAST, C, C, C, C), (4,)),
    "batch_norm without scale": Case(batch_norm(0, 1, scale=False), (X, C, C, C, C), (4,)),
    "batch_norm without center": Case(batch_norm(0, center=False), (X, C, C, C, C), (4,)),
    "batch_norm of a matrix": Case(batch_norm(0), ((7, 3), C, C, C, C), (4,)),
    "dropout": Case(lambda x: relay.nn.dropout(x) * x, (X,)),
    "split": Case(lambda x: relay.split(x, 3, axis=1)[0] * relay.split(x, 3, axis=1)[2], (X,)),
    "split at": Case(lambda x: relay.split(x, (1, 4), axis=-1).astuple(), (X,)),
    "pad": Case(lambda x, v: relay.nn.pad(x, ((0, 0), (1, 2), (0, 3), (0, 0)), v), (X, ())),
    "pad nothing": Case(lambda x, v: relay.nn.pad(x, ((0, 0),) * 4, v), (X, ())),
    "tile": Case(lambda x: relay.tile(x, (3, 1, 2)), ((2, 5),)),
    "tile fewer": Case(lambda x: relay.tile(x, (2,)), ((3, 2, 2),)),
    "reverse": Case(lambda x: relay.reverse(x, 1) * x, (X,)),
    "dilate": Case(lambda x, y: relay.nn.dilate(x, (1, 2, 3)) * y, ((2, 3, 2), (2, 5, 4))),
    "layout_transform": Case(lambda x: relay.layout_transform(x, "NCHW", "NHWC"), (X,)),
    "layout_transform packed": Case(lambda x: relay.layout_transform(x, "NCHW", "NCHW4c"), ((2, 8, 3, 2),)),
    "broadcast_to_like": Case(lambda x, y: relay.broadcast_to_like(x, y) * y, ((3, 1), (2, 3, 4))),
    "broadcast_to": Case(lambda x: relay.broadcast_to(x, (2, 3, 4)), ((3, 1),)),
    "less": Case(lambda x, y: relay.where(relay.less(x, y), x * x, y), (X, X)),
    "greater": Case(lambda x, y: relay.where(relay.greater(x, y), x * x, y), (X, X)),
    "greater_equal": Case(lambda x, y: relay.where(relay.greater_equal(x, y), x * x, y), (X, X)),
    "take": Case(lambda x: relay.take(x, ids(2, 0, 2), axis=1), (X,)),
    "take one": Case(lambda x: relay.take(x, relay.const(1), axis=-1), (X,)),
    "take of all": Case(lambda x: relay.take(x, ids(7, 0, 7)), (X,)),
    "take beyond the end": Case(lambda x: relay.take(x, ids(9, 1, -5), axis=0), ((3, 2),)),
    "take around": Case(lambda x: relay.take(x, ids(4, -1), axis=0, mode="wrap"), ((3, 2),)),
    "take of a matrix of indices": Case(
        lambda x: relay.take(x, relay.const(np.array([[0, 3], [3, 1]], "int32")), axis=1), ((2, 4, 3),)
    ),
    "equal and logical": Case(
        lambda x, y: relay.where(
            relay.logical_or(
                relay.logical_and(relay.equal(x, x), relay.less(x, y)), relay.logical_not(relay.less(y, x))
            ),
            x * x,
            y,
        ),
        (X, X),
    ),
    "adaptive_avg_pool1d": Case(lambda x: relay.nn.adaptive_avg_pool1d(x, (3,)), ((2, 3, 7),)),
    "adaptive_avg_pool2d": Case(lambda x: relay.nn.adaptive_avg_pool2d(x, (2, 5), layout="NHWC"), ((2, 7, 5, 3),)),
    "adaptive_avg_pool3d": Case(lambda x: relay.nn.adaptive_avg_pool3d(x, (1, 2, 4)), ((2, 3, 3, 4, 5),)),
    "relu again": Case(second(lambda x, y: relay.nn.relu(x * x - y)), (X, X), (1,)),
    "avg_pool2d again": Case(second(lambda x: relay.nn.avg_pool2d(x * x, count_include_pad=True, **POOL)), (X,)),
    "avg_pool2d again without padding": Case(
        second(lambda x: relay.nn.avg_pool2d(x * x, layout="NHWC", ceil_mode=True, **POOL)), ((2, 6, 5, 2),)
    ),
    "max_pool2d again": Case(second(lambda x: relay.nn.max_pool2d(x * x, **POOL)), (X,)),
    "max_pool2d again in ceil mode": Case(
        second(lambda x: relay.nn.max_pool2d(x * x, (3, 3), (2, 2), (1, 1), layout="NHWC", ceil_mode=True)),
        ((2, 6, 5, 2),),
    ),
    "batch_norm again": Case(
        second(lambda x, g, b, m, v: relay.nn.batch_norm(x, g, b, m, v)[0]), (X, C, C, C, C), (4,)
    ),
    "split again": Case(second(lambda x: relay.split(x * x, 2)[1]), ((4, 3),)),
    "pad and dilate again": Case(
        second(lambda x: relay.nn.pad(relay.nn.dilate(x * x, (2, 2)), ((1, 0), (0, 2)))), ((3, 2),)
    ),
    "adaptive_avg_pool2d again": Case(second(lambda x: relay.nn.adaptive_avg_pool2d(x * x, (2, 3))), (X,)),
}


class _Fixture:
    """All cases, or some, as one function that returns a number for each: the results times random tensors, summed."""

    def __init__(self, cases: dict[str, Case]) -> None:
        rng = np.random.default_rng(0)
        self.cases = cases
        self.variables: list[Any] = []
        self.values: dict[str, Any] = {}
        self.own: dict[str, list[str]] = {}
        losses = []
        for number, (name, case) in enumerate(cases.items()):
            names = [f"v{number}_{i}" for i in range(len(case.shapes))]
            own = [relay.var(n, shape=shape, dtype="float64") for n, shape in zip(names, case.shapes, strict=True)]
            for i, (n, shape) in enumerate(zip(names, case.shapes, strict=True)):
                self.values[n] = rng.uniform(1, 2, shape) if i in case.positive else rng.standard_normal(shape)
            self.variables += own
            self.own[name] = names
            losses.append(self._loss(case.make(*own), own, rng))
        self.losses = losses

    @staticmethod
    def _loss(made: Any, own: list[Any], rng: Any) -> Any:
        made = made.astuple() if isinstance(made, relay.expr.TupleWrapper) else made
        kind = typed(relay.Function(own, made))["main"].ret_type
        parts = [made]
        if isinstance(kind, relay.TupleType):
            parts = [relay.TupleGetItem(made, i) for i in range(len(kind.fields))]
        kinds = kind.fields if isinstance(kind, relay.TupleType) else [kind]
        total = relay.const(0.0, "float64")
        for part, its in zip(parts, kinds, strict=True):
            total = total + relay.sum(part * relay.const(rng.standard_normal(its.concrete_shape), "float64"))
        return total

    def differences(self) -> dict[str, list[tuple[Any, float]]]:
        """For each variable of each case a direction, and the derivative of the case's number along it."""
        module = typed(relay.Function(self.variables, relay.Tuple(self.losses)))
        with tvm.transform.PassContext(opt_level=0):
            executor = graph_executor.GraphModule(relay.build(module, "llvm -opt-level=0")["default"](tvm.cpu()))
        rng = np.random.default_rng(1)
        found: dict[str, list[tuple[Any, float]]] = {name: [] for name in self.cases}
        for position in range(max(len(case.shapes) for case in self.cases.values())):
            moved = [names[position] for names in self.own.values() if position < len(names)]
            directions = {name: rng.standard_normal(self.values[name].shape) for name in moved}
            directions = {name: d / max(np.linalg.norm(d), 1e-9) for name, d in directions.items()}
            total: Any = 0.0
            for steps, weight in WEIGHTS.items():
                for name, value in self.values.items():
                    executor.set_input(name, value + steps * STEP * directions.get(name, 0.0))
                executor.run()
                numbers = [executor.get_output(i).numpy() for i in range(len(self.losses))]
                total = total + weight / STEP * np.array(numbers)
            for i, (name, names) in enumerate(self.own.items()):
                if position < len(names):
                    found[name].append((directions[names[position]], float(total[i])))
        return found

    def check(self, gradients: list[Any]) -> None:
        by_name = {var.name_hint: g for var, g in zip(self.variables, gradients, strict=True)}
        for name, pairs in self.differences().items():
            for variable, (direction, difference) in zip(self.own[name], pairs, strict=True):
                gradient = by_name[variable]
                assert gradient.shape == self.values[variable].shape, (name, variable)
                scale = max(np.linalg.norm(gradient), 1.0)
                assert abs(float((gradient * direction).sum()) - difference) <= TOLERANCE * scale, (name, variable)


def total(losses: list[Any]) -> Any:
    whole = losses[0]
    for loss in losses[1:]:
        whole = whole + loss
    return whole


PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_first_order(part):
    fixture = _Fixture(dict(list(CASES.items())[part::PARTS]))
    program = value_and_gradients(relay.Function(fixture.variables, total(fixture.losses)))
    with tvm.transform.PassContext(opt_level=0):
        factory = relay.build(program, "llvm -opt-level=0")
    fixture.check(execute(factory, fixture.values)[1:])


@pytest.mark.parametrize("part", range(PARTS))
def test_higher_order(part):
    once = {name: case for name, case in CASES.items() if "again" not in name}
    del once["dropout"]  # no code: SimplifyInference takes it away, but not out of A-normal form
    fixture = _Fixture(dict(list(once.items())[part::PARTS]))
    body = relay.transform.ToANormalForm()(typed(relay.Function(fixture.variables, total(fixture.losses))))
    body = relay.transform.InferType()(body)
    made = typed(relay.transform.gradient(body["main"], body, mode="higher_order"))
    # TVM 0.17 raises an internal error (bounds of a common subexpression) in code of a packed layout_transform.
    with tvm.transform.PassContext(opt_level=0, config={"tir.disable_cse_tir": True}):
        run = relay.create_executor("debug", mod=made, device=tvm.cpu(), target="llvm").evaluate()
        result = run(*(fixture.values[var.name_hint] for var in fixture.variables))
    fixture.check([part.numpy() for part in result[1]])


def test_stock_has_none_of_these():
    """Nothing that stock has is replaced, but convolutions, and sums, means and takes where stock's raises."""
    program = (
        "import tvm, sys\n"
        "print(*(n for n in sys.argv[1:] if n in tvm.ir.Op.list_op_names() "
        "and tvm.ir.Op.get(n).get_attr('FPrimalGradient')))"
    )
    stock = subprocess.run(
        [sys.executable, "-c", program, *GRADIENTS],
        env=os.environ | {"TVM_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(stock.stdout.split()) == {"nn.conv2d", "sum", "mean", "take", *DILATED}


DILATED = ("nn.max_pool2d", "nn.avg_pool2d")


@pytest.mark.parametrize("name", DILATED)
def test_dilated_pools_are_refused(name):
    """Stock ignores the dilation and gives another pool's gradient."""
    x = relay.var("x", shape=X)
    pool = {"nn.max_pool2d": relay.nn.max_pool2d, "nn.avg_pool2d": relay.nn.avg_pool2d}[name]
    with pytest.raises(UnsupportedError, match="dilation"):
        value_and_gradients(relay.Function([x], pool(x, (2, 2), (1, 1), (2, 2))))


@pytest.mark.parametrize(
    ("make", "shape", "says"),
    [
        (lambda x: relay.nn.pad(x, ((0, 0), (1, 1)), pad_mode="edge"), (2, 5), "pad_mode='edge'"),
        (lambda x: relay.nn.pad(x, ((1, 1), (0, 0))), (relay.Any(), 5), "the padded axis 0 of the data is Any"),
        (lambda x: relay.tile(x, (2, 1)), (relay.Any(), 5), "the repeated axis 0 is Any"),
        (lambda x: relay.nn.dilate(x, (2, 1)), (relay.Any(), 5), "the dilated axis 0 is Any"),
        (lambda x: relay.nn.adaptive_avg_pool1d(x, (2,)), (1, 2, relay.Any()), "axis 2 of the data is Any"),
    ],
)
def test_what_is_not_served_says_so(make, shape, says):
    x = relay.var("x", shape=shape)
    with pytest.raises(UnsupportedError, match=says):
        value_and_gradients(relay.Function([x], make(x)))
