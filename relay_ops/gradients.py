# SPDX-License-Identifier: Apache-2.0
"""Gradients of every convolution of Relay: nn.conv{1,2,3}d, their transposes, and the six operators of this package.

All come from one table, `Face.gradients` of the catalogue. A transposed convolution is dgrad read forwards. A partial
has the type of the operand that it belongs to.

Relay also takes depthwise convolutions whose weight has the channel multiplier on its I axis. Their gradients are those
of the same convolution with a weight of one input channel a group, which is reshaped on the way in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relay

from relay_ops.ir import PREFIX, call_of, multiplied_problem_of, problem_of, transposed_problem_of, types_of
from tvm_convgrad.catalogue import BACKWARD_DATA, BY_NAME, FACES, FORWARD, NEW_OPS, Face
from tvm_convgrad.geometry import SPATIAL
from tvm_convgrad.problem import ConvProblem


def family_gradient(call: Any, output_grad: Any) -> list[Any]:
    """FPrimalGradient of nn.conv{1,2,3}d and of the six operators, so that gradients can be taken again and again.

    Raises:
        UnsupportedError: an unknown extent, or a packed layout.
    """
    face = BY_NAME[str(call.op.name).removeprefix(PREFIX)].face
    types = types_of(call)
    multiplied = multiplied_problem_of(call.op, call.attrs, types) if face is FORWARD else None
    if multiplied is not None:
        return _multiplied_gradient(call, multiplied, output_grad)
    return _partials(face, call.args, problem_of(call.op, call.attrs, types), output_grad)


def _multiplied_gradient(call: Any, problem: ConvProblem, output_grad: Any) -> list[Any]:
    """The partials of a depthwise convolution whose weight has the channel multiplier on its I axis."""
    data, weight = call.args
    given, order = str(call.attrs.kernel_layout), problem.kernel_layout
    shape = dict(zip(given, weight.checked_type.concrete_shape, strict=True))
    ordered = relay.transpose(weight, [given.index(letter) for letter in order])
    one_channel = relay.reshape(ordered, problem.weight_shape)
    dx, dw = _partials(FORWARD, [data, one_channel], problem, output_grad)
    apart = relay.reshape(dw, [shape[letter] for letter in order])
    return [dx, relay.transpose(apart, [order.index(letter) for letter in given])]


def transpose_gradient(call: Any, output_grad: Any) -> list[Any]:
    """FPrimalGradient of nn.conv{1,2,3}d_transpose.

    Raises:
        UnsupportedError: an unknown extent, a packed layout, or output_padding not below the strides.
    """
    return _partials(BACKWARD_DATA, call.args, transposed_problem_of(call.op, call.attrs, types_of(call)), output_grad)


def _partials(face: Face, operands: Sequence[Any], problem: ConvProblem, output_grad: Any) -> list[Any]:
    """One partial for each operand of `face`."""
    values = dict(zip(face.operands, operands, strict=True))
    values["result"] = output_grad
    return [
        call_of(FACES[gradient_face], problem, values[first], values[second])
        for gradient_face, (first, second) in face.gradients
    ]


GRADIENTS: dict[str, Callable[[Any, Any], list[Any]]] = {
    **{f"{PREFIX}conv{rank}d": family_gradient for rank in SPATIAL},
    **{f"{PREFIX}conv{rank}d_transpose": transpose_gradient for rank in SPATIAL},
    **{PREFIX + entry.name: family_gradient for entry in NEW_OPS},
}
"""Gradient rules by operator."""
