# SPDX-License-Identifier: Apache-2.0
"""Which backward convolutions a function performs, as problem descriptors."""

from __future__ import annotations

import re
from typing import Any

from relax_ops.ir import problem_of
from tvm_convgrad.training.graph import calls_of, operator_name

_BACKWARD = re.compile(r"relax\.nn\.(conv[123]d_backward_(?:weight|data))")


def gradient_descriptors(function: Any) -> list[tuple[str, str]]:
    """(operator name without `relax.nn.`, descriptor) of every backward convolution, in order of execution."""
    found = []
    for call in calls_of(function):
        match = _BACKWARD.fullmatch(operator_name(call))
        if match:
            found.append((match.group(1), problem_of(call).descriptor))
    return found
