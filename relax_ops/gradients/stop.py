# SPDX-License-Identifier: Apache-2.0
"""Where gradients end: stock TVM knows `no_grad` as a mark in rules only and fails when it meets one in a program."""

from __future__ import annotations

from typing import Any

from tvm import relax


def no_grad(_orig_var: Any, orig_call: Any, _output_grad: Any, _ctx: Any) -> list[Any]:
    """y = no_grad(x): nothing flows to x, nor to what x was made of by operators without gradient."""
    return [relax.op.grad.no_grad(orig_call.args[0])]


GRADIENTS = {"relax.grad.no_grad": no_grad}
