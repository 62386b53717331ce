# SPDX-License-Identifier: Apache-2.0
"""Seeded dropout: the generator's published vectors, the operator against numpy, statistics, gradient, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from relax_ops.dropout import dropout_mask, philox, reference_mask
from relax_ops.passes.dropout import seed_dropouts
from tests.gradients.harness import load, relax, sample, tvm
from tvm_convgrad.core.errors import DTypeError, ProblemError


@pytest.mark.parametrize(
    ("low", "high", "key", "words"),
    [
        (0, 0, 0, (0xFF1DAE59, 0x6CD10DF2)),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_known_answers_of_philox(low, high, key, words):
    assert philox(low, high, key) == words


def _module(rates, *, seed, shape=("n", 50)):
    builder = relax.BlockBuilder()
    dims = [tvm.tirx.Var(d, "int64") if isinstance(d, str) else d for d in shape]
    x = relax.Var("x", relax.TensorType(dims, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for rate in rates:
                value = builder.emit(relax.TupleGetItem(builder.emit(relax.op.nn.dropout(value, rate)), 0))
            output = builder.emit_output(relax.op.sum(relax.op.multiply(value, value)))
        builder.emit_func_output(output)
    return seed_dropouts(builder.get(), seed=seed)


def test_forward_and_gradient_have_the_reference_masks():
    """Compiled with LLVM's optimiser, which would use any undefined behaviour of the generator."""
    module = _module([0.3, 0.5], seed=2**40 + 5)
    machine = load(relax.transform.Gradient("main", require_grads=[module["main"].params[0]])(module), "llvm")
    x = sample(60, 50)
    for step in (0, 7, 2**33):
        arguments = tvm.runtime.tensor(x), tvm.runtime.tensor(np.array(step, "int64"))
        loss, (found,) = machine["main_adjoint"](*arguments)
        masks = [reference_mask((60, 50), step, rate=r, seed=2**40 + 5, stream=s) for s, r in enumerate((0.3, 0.5))]
        factor = masks[0] * masks[1] / (0.7 * 0.5)
        np.testing.assert_allclose(found.numpy(), 2 * x * factor**2, rtol=1e-5)
        np.testing.assert_allclose(float(loss.numpy()), ((x * factor) ** 2).sum(), rtol=1e-5)
        assert 0 < masks[0].mean() < 1


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_mean(rate):
    """Within five standard deviations of a binomial mean; exactly 1 or 0 at the ends."""
    count = 2**18
    kept = reference_mask((count,), 3, rate=rate, seed=1).mean()
    assert abs(kept - (1 - rate)) <= 5 * np.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize("change", [{"seed": 2}, {"stream": 1}, {"step": 4}, {"seed": 1 + 2**32}, {"step": 3 + 2**32}])
def test_other_seeds_streams_and_steps_are_independent(change):
    """Correlation of 2^16 pairs below five standard deviations, and along the places of one mask as well."""
    first = {"seed": 1, "stream": 0, "step": 3}
    a, b = (
        reference_mask((2**16,), k["step"], rate=0.5, seed=k["seed"], stream=k["stream"]) - 0.5
        for k in (first, {**first, **change})
    )
    limit = 5 * 0.25 / 2**8
    assert abs((a * b).mean()) < limit
    for lag in (1, 2, 7, 64, 256, 4096):
        assert abs((a[lag:] * a[:-lag]).mean()) < limit


def test_rate_one_gives_zeros_and_no_nan():
    machine = load(_module([1.0], seed=0))
    result = machine["main"](tvm.runtime.tensor(sample(4, 50)), tvm.runtime.tensor(np.array(0, "int64")))
    assert float(result.numpy()) == 0.0


def test_a_function_without_dropout_stays_as_it_is():
    module = tvm.IRModule({"main": _module([], seed=0)["main"]})
    assert len(module["main"].params) == 1


def test_wrong_arguments_are_refused():
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    step = relax.Var("step", relax.TensorType((), "int32"))
    with pytest.raises(ProblemError, match=r"rate 1\.5"):
        dropout_mask(x, step, rate=1.5)
    with pytest.raises(DTypeError, match="int64"):
        relax.BlockBuilder().normalize(dropout_mask(x, step, rate=0.5))
