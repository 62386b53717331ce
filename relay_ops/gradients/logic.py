# SPDX-License-Identifier: Apache-2.0
"""Gradients of comparisons and logical operators: zeros. Stock Relay has those of less_equal and not_equal."""

from __future__ import annotations

from tvm import relay

from relay_ops.gradients.contract import Rules


def zeros(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """A zero for each element of each argument."""
    return [relay.zeros_like(arg) for arg in call.args]


RULES: Rules = dict.fromkeys(
    ("less", "greater", "greater_equal", "equal", "logical_and", "logical_or", "logical_xor", "logical_not"), zeros
)
