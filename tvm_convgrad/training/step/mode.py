# SPDX-License-Identifier: Apache-2.0
"""What differs between training and prediction by itself: `relax.nn.by_mode` becomes one of its operands."""

from __future__ import annotations

from tvm import relax

from relax_ops.by_mode import BY_MODE as OP
from tvm_convgrad.training.ir.graph import Environment


def training(_builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
    """The operand of training."""
    return call.args[0]


def predicting(_builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
    """The operand of prediction."""
    return call.args[1]


__all__ = ["OP", "predicting", "training"]
