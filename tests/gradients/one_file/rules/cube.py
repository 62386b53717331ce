# SPDX-License-Identifier: Apache-2.0
"""relax.test_cube, an operator that only the tests have: y = x³, with all its rules."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, te
from tvm.relax import op

from relax_ops.layouts.common import unary_layout
from relax_ops.ops import LEVEL
from relax_ops.rules.contract import Legalization, OperatorRules
from relax_ops.vmap.common import elementwise, same_axis

NAME = "relax.test_cube"


def cube(x: relax.Expr) -> relax.Call:
    """The operator's call."""
    return relax.Call(tvm.ir.Op.get(NAME), [x])


def declare() -> None:
    """Register the operator."""
    tvm_ffi.get_global_func("ir.RegisterOp")(NAME, "The third power")
    operator = tvm.ir.Op.get(NAME)
    operator.set_attr("FInferType", lambda call, _builder: call.args[0].ty, LEVEL)
    operator.set_attr("FPurity", True, LEVEL)


def gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """dx = dy·3x²."""
    (x,) = orig_call.args
    return [op.multiply(output_grad, op.multiply(relax.const(3.0, "float32"), op.multiply(x, x)))]


def legalization(_stock: Legalization | None) -> Legalization:
    """One tensor expression."""

    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *place: x(*place) * x(*place) * x(*place))

        return block_builder.call_te(compute, *call.args, primfunc_name_hint="cube")

    return legalize


RULES = (
    OperatorRules(
        (NAME,),
        gradient=gradient,
        layout=unary_layout,
        mapped_axis=same_axis,
        vmap=elementwise,
        legalize=legalization,
        declare=declare,
    ),
)
