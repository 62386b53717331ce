# SPDX-License-Identifier: Apache-2.0
"""Max and average pools with arguments that TVM's importer does not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.places import name_of
from tvm_convgrad.training.ir.graph import element_type

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def max_pool(
    node: torch.fx.Node, importer: ExportedProgramImporter, pool: Callable[[torch.fx.Node], relax.Expr]
) -> relax.Expr:
    """A max pool; an empty list of strides, which TVM's importer passes on, means the extents of the window."""
    if len(node.args) > 2 and not node.args[2]:
        node.update_arg(2, node.args[1])
    return pool(node)


def average_pool(
    node: torch.fx.Node, importer: ExportedProgramImporter, pool: Callable[[torch.fx.Node], relax.Expr]
) -> relax.Expr:
    """An average pool; `divisor_override`, which TVM's importer drops, replaces the number of its elements."""
    divisor = node.args[6] if len(node.args) > 6 else node.kwargs.get("divisor_override")
    if divisor is None:
        return pool(node)
    kernel, *others = node.args[1:6]
    if np.any(others[2]):
        raise UnsupportedError(
            f"aten.{node.target.__name__}: divisor_override={divisor} with ceil_mode is not imported; multiply the "
            "result of a pool without it"
        )
    if len(node.args) > 5:
        node.update_arg(5, True)  # all windows are divided by their number of elements
    pooled = importer.block_builder.emit(pool(node))
    rank = int(name_of(node).partition("pool")[2][0])
    elements = float(np.prod(np.broadcast_to(kernel, rank)))
    return importer.block_builder.emit(op.multiply(pooled, relax.const(elements / divisor, element_type(pooled))))


__all__ = ["average_pool", "max_pool"]
