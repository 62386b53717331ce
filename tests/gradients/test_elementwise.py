# SPDX-License-Identifier: Apache-2.0
"""Gradients of arithmetic: broadcast operands, ties, zeros, casts."""

from __future__ import annotations

import numpy as np
import pytest

from relax_ops.active import rules
from relax_ops.rules import near_zero
from tests.gradients.harness import batch, check, gradients, integers, relax, sample

op = relax.op

UNARY = {
    "abs": (op.abs, lambda t: t.abs, False),
    "square": (op.square, lambda t: t.square, False),
    "sqrt": (op.sqrt, lambda t: t.sqrt, True),
    "rsqrt": (op.rsqrt, lambda t: t.rsqrt, True),
    "erf": (op.erf, lambda t: t.erf, False),
    "tan": (lambda x: op.tan(x * relax.const(0.5, "float32")), lambda t: lambda x: t.tan(x / 2), False),
    "log": (op.log, lambda t: t.log, True),
    "exp": (op.exp, lambda t: t.exp, False),
    "log1p": (near_zero.log1p, lambda t: t.log1p, True),
    "expm1": (near_zero.expm1, lambda t: t.expm1, False),
    "erfc": (near_zero.erfc, lambda t: t.erfc, False),
    "softplus": (lambda x: op.nn.softplus(x, 2.0, 3.0), lambda t: lambda x: t.nn.functional.softplus(x, 2, 3), False),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    torch = pytest.importorskip("torch")
    build, oracle, positive = UNARY[name]
    arrays = [sample(3, 4, 5, positive=positive)]
    check(lambda _, x: build(x), oracle(torch), arrays, symbolic=batch(arrays))


@pytest.mark.parametrize("other", [(2, 3, 4, 5), (3, 1, 1), (1, 3, 1, 5), (1,), ()])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
def test_broadcast_operands_are_summed(name, other):
    torch = pytest.importorskip("torch")
    arrays = [integers(2, 3, 4, 5), integers(*other, seed=1)]
    symbolic = batch(arrays, {0: "n", 2: "h"}) if other != (2, 3, 4, 5) else batch(arrays)
    check(lambda _, x, y: getattr(op, name)(x, y), getattr(torch, name), arrays, symbolic=symbolic, exact=True)


def test_two_operands_of_symbolic_extents_that_differ():
    """Neither m = n nor m = 1 can be proven: the sum's axes are found at run time."""
    torch = pytest.importorskip("torch")
    arrays = [integers(2, 3, 4), integers(1, 3, 4, seed=1)]
    check(lambda _, x, y: op.multiply(x, y), torch.multiply, arrays, symbolic={(0, 0): "n"}, exact=True)


def test_divide_and_power():
    torch = pytest.importorskip("torch")
    arrays = [sample(2, 3, 4, positive=True), sample(3, 1, positive=True, seed=5)]
    check(lambda _, x, y: op.divide(x, y), torch.divide, arrays, symbolic=batch(arrays), terms=8)
    check(lambda _, x, y: op.power(x, y), torch.pow, arrays, symbolic=batch(arrays), terms=8)


@pytest.mark.parametrize("exponent", [2, 3, 4])
def test_small_powers_are_products(exponent):
    """Exact on integers, also negative ones; no call of pow is left in what is compiled."""
    pytest.importorskip("torch")
    power = lambda _, x: op.power(x, relax.const(exponent, "float32"))  # noqa: E731
    check(power, lambda x: x**exponent, [integers(2, 3, 4)], symbolic={(0, 0): "n"}, exact=True)
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(power(builder, x)))
    with rules():
        assert "pow(" not in str(relax.transform.LegalizeOps()(builder.get()))


def test_power_at_zero_has_no_nan():
    torch = pytest.importorskip("torch")
    arrays = [np.array([0, 0, 0, 2, -2], "float32"), np.array([0, 1, 2, 0, 0], "float32")]
    check(lambda _, x, y: op.power(x, y), torch.pow, arrays[:1] + arrays[1:], wrt=[0])
    check(lambda _, x, y: op.power(x, y), torch.pow, [arrays[0][:4], arrays[1][:4]], wrt=[1])


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_ties_are_halved(name):
    torch = pytest.importorskip("torch")
    arrays = [integers(2, 3, 4), integers(3, 1, seed=1)]
    check(lambda _, x, y: getattr(op, name)(x, y), getattr(torch, name), arrays, symbolic=batch(arrays), exact=True)


@pytest.mark.parametrize("other", [(3, 4), (3, 1), ()])
def test_where_sums_broadcast_operands(other):
    torch = pytest.importorskip("torch")
    arrays = [integers(2, 3, 4), integers(*other, seed=1)]

    def build(_, x, y):
        return op.where(op.less(x, relax.const(0.0, "float32")), x, y)

    check(build, lambda x, y: torch.where(x < 0, x, y), arrays, symbolic=batch(arrays), exact=True)


def test_multiplication_by_finite_differences():
    arrays = [sample(2, 3), sample(3, seed=1)]
    check(lambda _, x, y: op.multiply(op.square(x), y), lambda x, y: x * x * y, arrays, numeric=True, terms=2)


def test_astype_casts_the_gradient_back():
    (found,), (cot,) = gradients(lambda _, x: op.astype(x, "float16"), [integers(2, 3)])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, cot.astype("float32"))


def test_nothing_flows_through_integers():
    (found,), (cot,) = gradients(
        lambda _, x: op.multiply(op.astype(op.astype(x, "int32"), "float32"), x), [sample(2, 3)]
    )
    np.testing.assert_array_equal(found, cot * np.trunc(sample(2, 3)))


def test_sum_of_float16_operands_is_taken_in_float32():
    """4096 ones: a float16 sum stops at 2048."""
    x, b = np.zeros((4096, 2), "float16"), np.zeros((2,), "float16")

    def build(_, v, w):
        return op.multiply(op.add(v, w), relax.const(np.float16(1)))

    (found,), (cot,) = gradients(build, [x, b], wrt=[1])
    want = cot.astype("float64").sum(0)
    np.testing.assert_allclose(found, want, rtol=2**-10)
    assert np.abs(want).max() > 1
