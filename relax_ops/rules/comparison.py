# SPDX-License-Identifier: Apache-2.0
"""Comparisons, logic, and `where`, on tensors that broadcast against each other.

Stock forgets to sum the gradients of the broadcast operands of `where`, and lowers its condition to `0 < int64(...)`:
TVM's simplifier takes exponentially long for such conditions in one another, as a running maximum has.
"""

from __future__ import annotations

from tvm import relax, tirx
from tvm.relax import op

from relax_ops.expressions import known_shape, same_shape
from relax_ops.gradients.common import dtype_of, fit, no_grads, scalar
from relax_ops.rules.contract import Legalization
from relax_ops.rules.elementwise import broadcast_rules, emit_elementwise, no_gradients


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


def _where_broadcasts(call: relax.Call) -> str:
    result = known_shape(call.ty)
    shapes = [known_shape(operand.ty) for operand in call.args[1:]]
    equal = result is not None and all(shape is not None and same_shape(shape, result) for shape in shapes)
    return "" if equal else "TVM's rule gives a broadcast operand a gradient of the result's shape"


def _choice(stock: Legalization) -> Legalization:
    """Legalization of `where`: the condition as it is, if it is a bool."""

    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if dtype_of(call.args[0]) != "bool" or getattr(call.ty.shape, "values", None) is None:
            return stock(block_builder, call)
        return emit_elementwise(block_builder, call, call.args, tirx.Select)

    return legalize


RULES = (
    broadcast_rules("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    broadcast_rules("logical_and", "logical_or", "logical_xor", gradient=no_gradients),
    broadcast_rules("where", linear=((1, 2),), gradient=where, stock_fails=_where_broadcasts, legalize=_choice),
)
