# SPDX-License-Identifier: Apache-2.0
"""Linear layers of tensors of three and more axes as products of two matrices, before they are differentiated.

Formats such as ONNX write a linear layer as MatMul of [batch, ..., rows, inner] by a matrix, and Add of a bias. The
gradient of such a product with respect to the matrix is a batch of products that is then summed. All rows in one matrix
make it one product, which the kernels compute (`training.passes.products`), together with the bias and its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tvm import relax
from tvm.relax import op

from relax_ops.compat import Constant
from relax_ops.expressions import known_extents
from tvm_convgrad.training.ir.graph import Environment, Rewrite, element_type, is_call


def _matmul(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
    """A product by a matrix as reshape(reshape(left) · right); all other products stay."""
    left, right = call.args
    if not (_has_extents(left) and _has_extents(right)):
        return None
    (*leading, inner), matrix = known_extents(left), known_extents(right)
    if len(leading) < 2 or len(matrix) != 2:
        return None
    numbers_first = sorted(leading, key=lambda extent: not isinstance(extent, int))  # 196 * batch, which kernels take
    rows = builder.emit(op.reshape(left, relax.ShapeExpr([prod(numbers_first), inner])))
    product = builder.emit(relax.Call(call.op, [rows, right], call.attrs, list(call.ty_args)))
    return op.reshape(product, relax.ShapeExpr([*leading, matrix[1]]))


def _add(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
    """A vector over the columns of such a product is added to its matrix, where kernels add it; all other sums stay."""
    for tensor, bias in (call.args, reversed(call.args)):
        product = _flat_product(builder, tensor)
        if product is None or not _has_extents(bias) or element_type(bias) != element_type(product):
            continue
        if known_extents(bias) == known_extents(product)[1:]:
            return op.reshape(builder.emit(op.add(product, bias)), tensor.ty.shape)
    return None


def _flat_product(builder: relax.BlockBuilder, tensor: relax.Expr) -> relax.Var | None:
    """The product of two matrices that a tensor of three or more axes is a view of with the same columns, or None."""
    view = builder.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None
    if view is None or not is_call(view, "relax.reshape") or not isinstance(view.args[0], relax.Var):
        return None
    product = view.args[0]
    if not is_call(builder.lookup_binding(product), "relax.matmul") or len(known_extents(product)) != 2:
        return None
    return product if known_extents(tensor)[-1:] == known_extents(product)[1:] else None


def _has_extents(expr: relax.Expr) -> bool:
    return isinstance(expr, (relax.Var, Constant)) and isinstance(getattr(expr.ty, "shape", None), relax.ShapeExpr)


FLAT_PRODUCTS: Mapping[str, Rewrite] = {"relax.matmul": _matmul, "relax.add": _add}
"""Rewrites for `replay`."""

__all__ = ["FLAT_PRODUCTS"]
