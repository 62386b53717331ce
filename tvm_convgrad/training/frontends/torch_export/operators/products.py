# SPDX-License-Identifier: Apache-2.0
"""Products of matrices and of batches of them. TVM's importer computes all products in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.torch_export.places import name_of
from tvm_convgrad.training.ir.graph import element_type

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


def product(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """A product of two matrices."""
    return _product(importer, *(importer.env[operand] for operand in node.args))


def added_product(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """beta x + alpha y z; x is not read if beta is 0."""
    x, y, z = (importer.env[operand] for operand in node.args)
    emit = importer.block_builder.emit
    found = _scaled(importer, _product(importer, y, z), node.kwargs.get("alpha", 1))
    beta = node.kwargs.get("beta", 1)
    return found if beta == 0 else emit(op.add(_scaled(importer, x, beta), found))


def _product(importer: ExportedProgramImporter, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """The product, of numbers of 16 bits with sums in float32."""
    wide = None if element_type(left) == "float64" else "float32"
    return importer.block_builder.emit(op.matmul(left, right, wide))


def _scaled(importer: ExportedProgramImporter, x: relax.Expr, factor: float) -> relax.Expr:
    return x if factor == 1 else importer.block_builder.emit(op.multiply(x, relax.const(factor, element_type(x))))


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


__all__ = ["added_product", "batched_product", "product"]
