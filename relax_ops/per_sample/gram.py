# SPDX-License-Identifier: Apache-2.0
"""Squared norms of the terms of a sum from Gram matrices of its factors ("ghost norms"), without the terms."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from relax_ops.expressions import ndim_of
from relax_ops.ir import dtype_of
from relax_ops.vmap.unfolded import UnfoldingBuilder

GHOST = 2
"""Norms are taken from Gram matrices if that takes fewer products by this factor."""


def pays(pixels: int, rows: int, columns: int) -> bool:
    """Whether Gram matrices over T pixels are cheaper: T·(rows + columns) products instead of rows·columns."""
    return GHOST * pixels * (rows + columns) <= rows * columns


def sum_of_gram_products(own: UnfoldingBuilder, left: relax.Expr, right: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """The sum over `axes` of the product of two tensors' Gram matrices; they are (…, length, pixels)."""
    grams = []
    for value in (left, right):
        wide = own.cast(value, "float64" if dtype_of(value.ty) == "float64" else "float32")
        ndim = ndim_of(wide)
        grams.append(own.matmul(own.transpose(wide, [*range(ndim - 2), ndim - 1, ndim - 2]), wide))
    return own.sum_of_products(grams[0], grams[1], axes)
