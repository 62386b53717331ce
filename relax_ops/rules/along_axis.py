# SPDX-License-Identifier: Apache-2.0
"""Operators along one axis that keep the shape: softmax, log_softmax, cumsum, cumprod, flip."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_ops.layouts.common import along_axis_layout
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.common import along_axis, shifted_axes


def flip(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x backwards along an axis: dx = dy backwards."""
    return [op.flip(output_grad, int(orig_call.attrs.axis))]


RULES = (
    OperatorRules(
        named("nn.softmax", "nn.log_softmax"), layout=along_axis_layout, mapped_axis=along_axis, vmap=shifted_axes
    ),
    OperatorRules(named("cumsum", "cumprod"), layout=along_axis_layout, mapped_axis=along_axis),
    OperatorRules(named("flip"), gradient=flip, mapped_axis=along_axis, vmap=shifted_axes),
)
