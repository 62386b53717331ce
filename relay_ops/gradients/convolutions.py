# SPDX-License-Identifier: Apache-2.0
"""Gradients of every convolution of Relay: nn.conv{1,2,3}d, their transposes, and the six operators of this package.

All come from one table, `Direction.gradients` of the catalogue. A transposed convolution is dgrad read forwards. A
partial has the type of the operand that it belongs to.

Relay also takes depthwise convolutions whose weight has the channel multiplier on its I axis. Their gradients are those
of the same convolution with a weight of one input channel a group, which is reshaped on the way in and out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relay

from relay_ops.gradients.contract import Rules
from relay_ops.ir import PREFIX, call_of, multiplied_problem_of, problem_of, transposed_problem_of, types_of, with_batch
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BY_NAME, DIRECTIONS, FORWARD, NEW_OPS, Direction
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.core.problem import ConvProblem


def family_gradient(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """FPrimalGradient of nn.conv{1,2,3}d and of the six operators, so that gradients can be taken again and again.

    Raises:
        UnsupportedError: an unknown extent other than the batch, or a packed layout.
    """
    direction = BY_NAME[str(call.op.name).removeprefix(PREFIX)].direction
    types = with_batch(call.op, call.attrs, types_of(call))
    multiplied = multiplied_problem_of(call.op, call.attrs, types) if direction is FORWARD else None
    if multiplied is not None:
        return _multiplied_gradient(call, multiplied, output_grad)
    return _partials(direction, call.args, problem_of(call.op, call.attrs, types), output_grad)


def _multiplied_gradient(call: relay.Call, problem: ConvProblem, output_grad: relay.Expr) -> list[relay.Expr]:
    """The partials of a depthwise convolution whose weight has the channel multiplier on its I axis."""
    data, weight = call.args
    given, order = str(call.attrs.kernel_layout), problem.kernel_layout
    shape = dict(zip(given, weight.checked_type.concrete_shape, strict=True))
    ordered = relay.transpose(weight, [given.index(letter) for letter in order])
    one_channel = relay.reshape(ordered, problem.weight_shape)
    dx, dw = _partials(FORWARD, [data, one_channel], problem, output_grad)
    apart = relay.reshape(dw, [shape[letter] for letter in order])
    return [dx, relay.transpose(apart, [order.index(letter) for letter in given])]


def transpose_gradient(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """FPrimalGradient of nn.conv{1,2,3}d_transpose.

    Raises:
        UnsupportedError: an unknown extent other than the batch, a packed layout, or output_padding not below the
            strides.
    """
    types = with_batch(call.op, call.attrs, types_of(call))
    return _partials(BACKWARD_DATA, call.args, transposed_problem_of(call.op, call.attrs, types), output_grad)


def _partials(
    direction: Direction, operands: Sequence[relay.Expr], problem: ConvProblem, output_grad: relay.Expr
) -> list[relay.Expr]:
    """One partial for each operand of `direction`."""
    values = dict(zip(direction.operands, operands, strict=True))
    values["result"] = output_grad
    return [
        call_of(DIRECTIONS[gradient_direction], problem, values[first], values[second])
        for gradient_direction, (first, second) in direction.gradients
    ]


RULES: Rules = {
    **{f"{PREFIX}conv{rank}d": family_gradient for rank in SPATIAL},
    **{f"{PREFIX}conv{rank}d_transpose": transpose_gradient for rank in SPATIAL},
    **{PREFIX + entry.name: family_gradient for entry in NEW_OPS},
}
