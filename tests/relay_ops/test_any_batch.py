# SPDX-License-Identifier: Apache-2.0
"""Programs whose batch is Any: gradients, and their code in Relay's virtual machine, at several batches."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.differentiate import value_and_gradients
from relay_ops.ir import call_of
from relay_ops.symbolic import bind_batch
from tests.relay_ops.harness import assert_equal, run, typed
from tvm_convgrad import ConvProblem
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import NEW_OPS
from tvm_convgrad.core.errors import ModelError, UnsupportedError

LAYOUTS = {1: ("NWC", "WIO"), 2: ("NHWC", "HWIO"), 3: ("NCDHW", "OIDHW")}


def machine(module):
    # Stock's SimplifyExpr raises for some graphs with Any: it takes their parameters for free variables.
    with tvm.transform.PassContext(opt_level=3, disabled_pass=["SimplifyExpr"]):
        return relay.create_executor("vm", mod=module, device=tvm.cpu(), target="llvm").evaluate()


def problem_of(rank, batch):
    data, kernel = LAYOUTS[rank]
    return ConvProblem(
        batch,
        4,
        6,
        {1: (9,), 2: (8, 7), 3: (5, 4, 6)}[rank],
        (2,) * rank,
        (2,) * rank,
        ((0, 1),) * rank,
        (2,) * rank,
        groups=2,
        data_layout=data,
        kernel_layout=kernel,
        grad_layout=data,
    )


def any_batch(shape, layout):
    return [relay.Any() if letter == "N" else extent for letter, extent in zip(layout, shape, strict=True)]


def test_the_six_operators():
    """One program of all six, at two batches; strided, dilated, grouped, with something hidden."""
    variables, results = [], []
    for number, entry in enumerate(NEW_OPS):
        problem = problem_of(entry.rank, 1)
        layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
        own = [
            relay.var(f"{name}_{number}", shape=any_batch(problem.tensors[name][0], layouts[name]))
            for name in entry.direction.operands
        ]
        variables += own
        results.append(call_of(entry.direction, problem, *own))
    execute = machine(typed(relay.Function(variables, relay.Tuple(results))))
    rng = np.random.default_rng(0)
    for batch in (1, 3):
        arrays, wanted = [], []
        for entry in NEW_OPS:
            problem = problem_of(entry.rank, batch)
            own = [rng.integers(-3, 4, problem.tensors[name][0]).astype("float32") for name in entry.direction.operands]
            arrays += own
            wanted.append(reference.DIRECTIONS[entry.direction.name](problem, *(a.astype("float64") for a in own)))
        for found, want in zip(execute(*arrays), wanted, strict=True):
            assert_equal(found.numpy(), want)


def network(batch):
    """Convolutions (grouped, strided), batch norm, dropout, pools, a transposed convolution, dense, cross-entropy."""
    shapes = {"x": (batch, 2, 8, 8), "w": (4, 2, 3, 3), "b": (4,), "g": (4, 2, 2, 2), "t": (4, 3, 2, 2)}
    shapes |= {"c": (4,), "d": (5, 12), "e": (5,), "y": (batch, 5)}
    v = {name: relay.var(name, shape=shape) for name, shape in shapes.items()}
    value = relay.nn.conv2d(v["x"], v["w"], channels=4, kernel_size=(3, 3), padding=(1, 1))
    value = relay.tanh(relay.nn.bias_add(value, v["b"]))
    value = relay.nn.batch_norm(value, v["c"], v["c"], v["c"], v["c"])[0]
    value = relay.nn.conv2d(value, v["g"], channels=4, kernel_size=(2, 2), strides=(2, 2), groups=2)
    value = relay.nn.dropout(relay.nn.relu(value))
    value = relay.nn.max_pool2d(value, (2, 2), (2, 2))
    value = relay.nn.conv2d_transpose(value, v["t"], channels=3, kernel_size=(2, 2), strides=(2, 2))
    value = relay.nn.batch_flatten(relay.nn.avg_pool2d(value, (2, 2), (2, 2)))
    value = relay.nn.bias_add(relay.nn.dense(value, v["d"]), v["e"])
    loss = relay.nn.cross_entropy_with_logits(relay.nn.log_softmax(value), v["y"])
    return relay.Function(list(v.values()), loss + relay.const(0.1) * relay.mean(value * value))


def test_a_step_equals_that_of_a_known_batch():
    """The batch is Any, against the same program with a number, which other tests compare with float64."""
    execute = machine(value_and_gradients(network(relay.Any())))
    rng = np.random.default_rng(0)
    batch = 3
    static = bind_batch(network(relay.Any()), batch)
    tvm.ir.assert_structural_equal(static, typed(network(batch))["main"])
    arrays = {
        p.name_hint: rng.uniform(0.5, 1.5, p.checked_type.concrete_shape).astype("float32") - 0.5 * (p.name_hint == "x")
        for p in static.params
    }
    arrays["w"] *= 0.05  # where tanh is 1, its derivative is rounding, which differs from code to code
    arrays["b"] -= 1
    wanted = run(value_and_gradients(static), arrays, opt_level=1)
    for found, want in zip(execute(*arrays.values()), wanted, strict=True):
        scale = max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(found.numpy(), want, rtol=0, atol=1e-5 * scale)


def test_the_result_itself_may_have_the_batch():
    x, w = relay.var("x", shape=(relay.Any(), 2, 5, 5)), relay.var("w", shape=(4, 2, 3, 3))
    function = relay.Function([x, w], relay.nn.conv2d(x, w, channels=4, kernel_size=(3, 3)))
    execute = machine(value_and_gradients(function))
    problem = ConvProblem(3, 2, 4, (5, 5), (3, 3), (1, 1), ((0, 0),) * 2)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, shape).astype("float32") for shape in (problem.data_shape, problem.weight_shape)]
    _, dx, dw = execute(*arrays)
    wide = [array.astype("float64") for array in arrays]
    assert_equal(dx.numpy(), reference.backward_data(problem, np.ones(problem.grad_shape), wide[1]))
    assert_equal(dw.numpy(), reference.backward_weight(problem, np.ones(problem.grad_shape), wide[0]))


def test_what_cannot_be_says_what_to_bind():
    x, w = relay.var("x", shape=(2, 3, relay.Any(), 8)), relay.var("w", shape=(4, 3, 3, 3))
    with pytest.raises(UnsupportedError, match="all but perhaps the batch"):
        value_and_gradients(relay.Function([x, w], relay.nn.conv2d(x, w, channels=4, kernel_size=(3, 3))))
    x = relay.var("x", shape=(relay.Any(), relay.Any()))
    with pytest.raises(UnsupportedError, match="more than one extent"):
        value_and_gradients(relay.Function([x], relay.sum(x)))
    x = relay.var("x", shape=(relay.Any(), 4))
    with pytest.raises(UnsupportedError, match=r"bind_batch\(function, 8\)"):
        value_and_gradients(relay.Function([x], relay.split(x, 2, axis=1)[0]))
    with pytest.raises(ModelError, match="at least 1"):
        bind_batch(relay.Function([x], x), 0)
