# SPDX-License-Identifier: Apache-2.0
"""Gradient of relu, computed from its result, so that its operand need not be kept.

As in PyTorch it is 0 at 0, and passes the gradient at NaN, which relu keeps (see relax_ops.lowering_extrema).
Stock lets the gradient pass at 0, and its `where` stops layouts; this one goes through the rule in relax_ops.layouts.
"""

from __future__ import annotations

from typing import Any

from tvm.relax import op

from relax_ops.gradients.common import dtype_of, scalar


def relu(orig_var: Any, _orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = max(x, 0): dx = 0 where y ≤ 0, else dy."""
    zero = scalar(0, dtype_of(orig_var))
    return [op.where(op.less_equal(orig_var, zero), zero, output_grad)]


GRADIENTS = {"relax.nn.relu": relu}
"""Gradient rules by operator."""
