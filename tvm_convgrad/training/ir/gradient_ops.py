# SPDX-License-Identifier: Apache-2.0
"""Which convolutions a function performs, as problem descriptors."""

from __future__ import annotations

import re

from tvm import relax

from relax_ops.ir import TRANSPOSED, problem_of, transposed_problem_of
from tvm_convgrad.training.ir.graph import calls_of, operator_name

_CONVOLUTION = re.compile(r"relax\.nn\.(conv[123]d(?:_backward_weight|_backward_data|_transpose|))")


def convolution_descriptors(function: relax.Function) -> list[tuple[str, str]]:
    """(operator name without `relax.nn.`, descriptor) of every convolution, in order of execution."""
    found = []
    for call in calls_of(function):
        match = _CONVOLUTION.fullmatch(operator_name(call))
        if match:
            name = match.group(1)
            problem = transposed_problem_of(call) if name in TRANSPOSED else problem_of(call)
            found.append((name, problem.descriptor))
    return found


def gradient_descriptors(function: relax.Function) -> list[tuple[str, str]]:
    """The backward ones among the `convolution_descriptors`."""
    return [(name, text) for name, text in convolution_descriptors(function) if "backward" in name]
