# SPDX-License-Identifier: Apache-2.0
"""Marks in a program: where gradients end, and where checkpoints of recomputation start and end.

Stock TVM has `no_grad` as a mark in gradient rules only, and fails at one in a program.
"""

from __future__ import annotations

from tvm import relax

from relax_ops.layouts.common import unary_layout
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.rules.elementwise import unary_rules


def no_grad_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, _output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = no_grad(x): nothing flows to x, nor to what x was made of by operators without gradient."""
    return [relax.op.grad.no_grad(orig_call.args[0])]


RULES = (
    unary_rules("grad.no_grad", gradient=no_grad_gradient, layout=unary_layout, linear=((0,),)),
    OperatorRules(named("grad.start_checkpoint", "grad.end_checkpoint"), layout=unary_layout),
)
