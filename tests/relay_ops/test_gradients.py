# SPDX-License-Identifier: Apache-2.0
"""Gradients of every convolution of Relay, and of the six operators, equal to float64."""

from __future__ import annotations

import pytest
import tvm
from tvm import relay

from relay_ops.differentiate import value_and_gradients
from relay_ops.ir import call_of
from tests.relay_ops.harness import assert_equal, calls, integers, run, variables
from tvm_convgrad import ConvProblem
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, DIRECTIONS, FORWARD, NEW_OPS, OpEntry
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, hidden_extent

ENTRIES = [*NEW_OPS, *(OpEntry(FORWARD, rank) for rank in SPATIAL)]


def problem_of_rank(rank: int) -> ConvProblem:
    """Grouped, strided, dilated, with something hidden, padded on one side."""
    extents = {1: (14,), 2: (8, 9), 3: (6, 5, 6)}[rank]
    return ConvProblem(2, 4, 6, extents, (2,) * rank, (2,) * rank, ((0, 1),) * rank, (2,) * rank, groups=2)


def check(problem, direction, call, operands, upstream):
    """The gradients of <call, upstream> in both operands, against the reference of the catalogue's table."""
    program = value_and_gradients(relay.Function([*operands, upstream], relay.multiply(call, upstream)))
    arrays = {**integers(problem), "upstream": integers(problem, 1)[direction.result]}
    arrays.pop(direction.result)
    _, *found = run(program, arrays)
    values = {**arrays, "result": arrays["upstream"]}
    for partial, (name, of) in zip(found, direction.gradients, strict=False):
        assert_equal(partial, reference.DIRECTIONS[name](problem, *(values[operand] for operand in of)))
    assert_equal(
        found[2], reference.DIRECTIONS[direction.name](problem, *(arrays[name] for name in direction.operands))
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_family(entry):
    problem, direction = problem_of_rank(entry.rank), entry.direction
    operands = variables(problem, *direction.operands)
    upstream = relay.var("upstream", shape=problem.tensors[direction.result][0])
    check(problem, direction, call_of(direction, problem, *operands), operands, upstream)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_stock_transposed_convolutions(rank, groups):
    extents, pad = {1: (8,), 2: (8, 7), 3: (6, 5, 6)}[rank], ((1, 0),) * rank
    problem = ConvProblem(2, 4, 6, extents, (3,) * rank, (2,) * rank, pad, groups=groups)
    operands = variables(problem, "grad", "weight")
    upstream = relay.var("upstream", shape=problem.data_shape)
    lows, highs = [1] * rank, [0] * rank
    stock = (relay.nn.conv1d_transpose, relay.nn.conv2d_transpose, relay.nn.conv3d_transpose)[rank - 1](
        *operands,
        strides=problem.strides,
        padding=(*lows, *highs),
        output_padding=tuple(hidden_extent(int(x), 3, 2, 1, 1, 0) for x in problem.data_extents),
        groups=groups,
        channels=problem.in_channels,
        kernel_size=problem.kernel,
    )
    program = value_and_gradients(relay.Function([*operands, upstream], relay.multiply(stock, upstream)))
    # Only the gradients: Relay cannot build every transposed convolution that it can write.
    partials = program["main"].body.fields[1:3]
    arrays = {**integers(problem), "upstream": integers(problem, 1)["data"]}
    del arrays["data"]
    found = run(tvm.IRModule.from_expr(relay.Function(program["main"].params, relay.Tuple(partials))), arrays)
    values = {**arrays, "result": arrays["upstream"]}
    for partial, (name, of) in zip(found, BACKWARD_DATA.gradients, strict=True):
        assert_equal(partial, reference.DIRECTIONS[name](problem, *(values[operand] for operand in of)))


def test_gradients_are_the_dedicated_operators():
    problem = problem_of_rank(2).with_layouts("NHWC", "HWIO", "NHWC")
    x, w = variables(problem, "data", "weight")
    program = value_and_gradients(relay.Function([x, w], call_of(FORWARD, problem, x, w)))
    (wgrad,) = calls(program, "nn.conv2d_backward_weight")
    (dgrad,) = calls(program, "nn.conv2d_backward_data")
    assert (wgrad.attrs.data_layout, wgrad.attrs.kernel_layout, wgrad.attrs.out_layout) == ("NHWC", "NHWC", "HWIO")
    assert (dgrad.attrs.data_layout, dgrad.attrs.kernel_layout) == ("NHWC", "HWIO")
    assert not calls(program, "nn.conv2d_transpose", "transpose", "layout_transform")


def test_what_is_not_served_says_so():
    x, w = relay.var("x", shape=(1, 2, 8, 8, 4)), relay.var("w", shape=(2, 2, 3, 3, 4, 4))
    packed = relay.nn.conv2d(x, w, channels=8, kernel_size=(3, 3), data_layout="NCHW4c", kernel_layout="OIHW4i4o")
    with pytest.raises(UnsupportedError, match="packed layouts"):
        value_and_gradients(relay.Function([x, w], packed))
    with pytest.raises(ModelError, match="one tensor"):
        value_and_gradients(relay.Function([x], relay.Tuple([x, x])))


def test_every_entry_of_the_catalogue_has_a_rule():
    for entry in ENTRIES:
        assert tvm.ir.Op.get(f"nn.{entry.name}").get_attr("FPrimalGradient") is not None, entry.name
    assert set(DIRECTIONS) == {"forward", "backward_weight", "backward_data"}
