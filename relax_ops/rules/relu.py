# SPDX-License-Identifier: Apache-2.0
"""relu, whose gradient is computed from its result, so that its operand need not be kept.

As in PyTorch the gradient is 0 at 0, and passes at NaN, which relu keeps: TVM lowers relu to max(x, 0), which gives 0
for NaN, so that a sample with a NaN has a finite loss while the weights before the relu become NaN. Stock lets the
gradient pass at 0, and its `where` stops layouts.
"""

from __future__ import annotations

from tvm import relax, te, tirx
from tvm.relax import op

from relax_ops.gradients.common import FLOATS, dtype_of, scalar
from relax_ops.rules.contract import Legalization
from relax_ops.rules.elementwise import unary_rules
from tvm_convgrad.codegen.extrema import at_least


def relu(
    orig_var: relax.Var, _orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = max(x, 0): dx = 0 where y ≤ 0, else dy."""
    zero = scalar(0, dtype_of(orig_var))
    return [op.where(op.less_equal(orig_var, zero), zero, output_grad)]


def _legalization(stock: Legalization) -> Legalization:
    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        dtype = dtype_of(call)
        if dtype not in FLOATS:
            return stock(block_builder, call)

        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *place: at_least(x(*place), tirx.const(0.0, dtype)), name="relu")

        return block_builder.call_te(compute, call.args[0], primfunc_name_hint="relu")

    return legalize


RULES = (unary_rules("nn.relu", gradient=relu, legalize=_legalization),)
