# SPDX-License-Identifier: Apache-2.0
"""Operators that change nothing, left out before a model is differentiated.

PyTorch writes the product of attention with its values as expand, view, and a product of matrices. An expand to the
extents that a tensor has already would be computed: a copy of all scores that is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax

from relax_ops.expressions import known_shape, same_shape
from relax_ops.ir import shape_values
from tvm_convgrad.training.ir.graph import Environment, Rewrite


def _broadcast_to(_builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
    """The operand of a broadcast to its own extents; all other broadcasts stay."""
    tensor, shape = call.args
    own, wanted = known_shape(tensor.ty), shape_values(shape)
    return tensor if own is not None and wanted is not None and same_shape(own, wanted) else None


IDENTITIES: Mapping[str, Rewrite] = {"relax.broadcast_to": _broadcast_to}
"""Rewrites for `replay`."""

__all__ = ["IDENTITIES"]
