# SPDX-License-Identifier: Apache-2.0
"""Comparisons, logic, and `where`, on tensors that broadcast against each other.

Stock forgets to sum the gradients of the broadcast operands of `where`.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.gradients.common import dtype_of, fit, no_grads, scalar
from relax_ops.rules.elementwise import broadcast_rules, no_gradients


def where(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """z = x where the condition holds, else y; all three may be broadcast."""
    condition, x, y = orig_call.args
    zero = scalar(0, dtype_of(x))
    return [
        *no_grads([condition]),
        fit(ctx, op.where(condition, output_grad, zero), x),
        fit(ctx, op.where(condition, zero, output_grad), y),
    ]


RULES = (
    broadcast_rules("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_xor"),
    broadcast_rules("logical_and", "logical_or", gradient=no_gradients),
    broadcast_rules("where", gradient=where),
)
