# SPDX-License-Identifier: Apache-2.0
"""nn.by_mode, whose gradient is refused: what holds it has no mode yet."""

from __future__ import annotations

from tvm import relax

from relax_ops.by_mode import BY_MODE, declare
from relax_ops.rules.elementwise import broadcast_rules
from tvm_convgrad.core.errors import UnsupportedError


def _no_mode(
    _orig_var: relax.Var, _orig_call: relax.Call, _output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    raise UnsupportedError(
        f"{BY_MODE}: it is one operand in training and the other in prediction; replace it by one of them before "
        "differentiating (tvm_convgrad.training.build_step does)"
    )


RULES = (broadcast_rules("nn.by_mode", gradient=_no_mode, declare=declare),)
