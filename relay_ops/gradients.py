# SPDX-License-Identifier: Apache-2.0
"""Gradients of every convolution of Relay: nn.conv{1,2,3}d, their transposes, and the six operators of this package.

All come from one table, `Face.gradients` of the catalogue. A transposed convolution is dgrad read forwards. A partial
has the type of the operand that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relay_ops.ir import PREFIX, call_of, problem_of, transposed_problem_of, types_of
from tvm_convgrad.catalogue import BACKWARD_DATA, BY_NAME, FACES, NEW_OPS, Face
from tvm_convgrad.geometry import SPATIAL
from tvm_convgrad.problem import ConvProblem


def family_gradient(call: Any, output_grad: Any) -> list[Any]:
    """FPrimalGradient of nn.conv{1,2,3}d and of the six operators, so that gradients can be taken again and again.

    Raises:
        UnsupportedError: an unknown extent, or a packed layout.
    """
    face = BY_NAME[str(call.op.name).removeprefix(PREFIX)].face
    return _partials(face, call, problem_of(call.op, call.attrs, types_of(call)), output_grad)


def transpose_gradient(call: Any, output_grad: Any) -> list[Any]:
    """FPrimalGradient of nn.conv{1,2,3}d_transpose.

    Raises:
        UnsupportedError: an unknown extent, a packed layout, or output_padding not below the strides.
    """
    return _partials(BACKWARD_DATA, call, transposed_problem_of(call.op, call.attrs, types_of(call)), output_grad)


def _partials(face: Face, call: Any, problem: ConvProblem, output_grad: Any) -> list[Any]:
    """One partial for each operand of `face`."""
    values = dict(zip(face.operands, call.args, strict=True))
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
