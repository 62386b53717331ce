# SPDX-License-Identifier: Apache-2.0
"""Gradients around dropout: none through a mask, and a refusal for nn.dropout itself, which TVM lowers to nothing."""

from __future__ import annotations

from typing import Any

from relax_ops import dropout
from relax_ops.gradients.common import no_grads
from tvm_convgrad.errors import UnsupportedError


def declare_ops() -> None:
    """Register nn.dropout_mask."""
    dropout.declare()


def bare(_orig_var: Any, _orig_call: Any, _output_grad: Any, _ctx: Any) -> list[Any]:
    """A gradient of nn.dropout would be that of the identity, as TVM drops nothing.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "relax.nn.dropout: TVM lowers it to the identity, so a gradient would train without dropout; make it real with "
        "relax_ops.dropout.seed_dropouts(module, seed=...) before differentiating, or remove it"
    )


def mask(_orig_var: Any, orig_call: Any, _output_grad: Any, _ctx: Any) -> list[Any]:
    """Nothing flows into a mask's shape and seed."""
    return no_grads(orig_call.args)


GRADIENTS = {dropout.DROPOUT: bare, dropout.MASK: mask}
"""Gradient rules by operator."""
