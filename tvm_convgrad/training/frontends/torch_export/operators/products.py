# SPDX-License-Identifier: Apache-2.0
"""Products of batches of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def batched_product(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Products of a batch of matrices; if all have the same second matrix, a product of the batch by that one.

    PyTorch writes so a linear layer of a tensor that is not contiguous, such as the heads of an attention. A product of
    all rows is made of it later (`training.model.flat_products`).
    """
    emit, left = importer.block_builder.emit, importer.env[node.args[0]]
    repeated = _repeated_matrix(node.args[1])
    if repeated is None:
        return emit(op.matmul(left, importer.env[node.args[1]]))
    matrix = importer.env[repeated]
    if len(matrix.ty.shape) > 2:
        matrix = emit(op.reshape(matrix, relax.ShapeExpr(matrix.ty.shape.values[-2:])))
    return emit(op.matmul(left, matrix))


def _repeated_matrix(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node of the one matrix, with axes of extent 1 before its own, that a batch of matrices repeats, or None."""
    views = ("expand.default", "view.default", "_unsafe_view.default", "reshape.default")
    while node.op == "call_function" and name_of(node) in views:
        source, shape = node.args[0], list(node.meta["val"].shape)
        before = list(source.meta["val"].shape)
        if before[-2:] != shape[-2:]:
            return None
        if all(extent == 1 for extent in before[:-2]):
            return source
        node = source
    return None


__all__ = ["batched_product"]
