# SPDX-License-Identifier: Apache-2.0
"""The upper or lower triangle of matrices: triu and tril."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.expressions import ndim_of
from relax_ops.gradients.common import no_grads
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.common import elementwise
from relax_ops.vmap.mapped_axis import Axes


def triangle(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = upper or lower triangle of x: dx = the same triangle of dy. (Stock returns too few partials for triu.)"""
    make = {"relax.triu": op.triu, "relax.tril": op.tril}[str(orig_call.op.name)]
    return [make(output_grad, orig_call.args[1]), *no_grads(orig_call.args[1:])]


def triangle_axis(call: relax.Call, axes: Axes) -> int | str:
    """Triangles of the last two axes."""
    return axes.first if axes.first < ndim_of(call) - 2 else "it runs along the samples"


def _stock_gradient_fails(_call: relax.Call) -> str:
    return "TVM's rule of triu returns one partial for two arguments"


RULES = (
    OperatorRules(
        named("triu", "tril"),
        gradient=triangle,
        stock_fails=_stock_gradient_fails,
        mapped_axis=triangle_axis,
        vmap=elementwise,
        linear=((0,),),
    ),
)
