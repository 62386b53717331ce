# SPDX-License-Identifier: Apache-2.0
"""Exponentials of matrices, and the orthogonal matrices of reflections: products of matrices, of any size.

`torch.nn.utils.parametrizations.orthogonal` makes its weights of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.torch_export.operators.linalg import check_size, stopped, triangular_inverse

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

_RADIUS = 0.58
"""The largest norm at which eight terms of the series have float32's digits (Bader, Blanes and Casas, "Computing the
matrix exponential with an optimized Taylor polynomial approximation", 2019)."""

_HALVINGS = 16
"""The most times that a matrix is halved: norms of up to 38,000. Of a larger one the result is NaN."""


def matrix_exp(matrix: Tensor) -> Tensor:
    """`aten.linalg_matrix_exp`: the series of the matrix halved until its norm is small, squared as often."""
    import torch

    norm = stopped(matrix.abs().sum(-2).amax(-1)).unsqueeze(-1).unsqueeze(-1)
    halved = [norm > _RADIUS * 2**time for time in range(_HALVINGS)]
    scale = torch.ones_like(norm)
    for is_halved in halved:
        scale = torch.where(is_halved, scale * 0.5, scale)
    unit, small = torch.eye(matrix.shape[-1], dtype=matrix.dtype), matrix * scale
    square = small @ small
    cube = square @ small
    # Paterson and Stockmeyer: the terms of three powers at a time.
    high = unit / math.factorial(6) + small / math.factorial(7) + square / math.factorial(8)
    middle = unit / math.factorial(3) + small / math.factorial(4) + square / math.factorial(5)
    result = unit + small + square / 2 + cube @ (middle + cube @ high)
    for is_halved in halved:
        result = torch.where(is_halved, result @ result, result)
    return torch.where(norm > _RADIUS * 2**_HALVINGS, math.nan, result)


def householder_product(vectors: Tensor, factors: Tensor) -> Tensor:
    """`aten.linalg_householder_product`: the first columns of the product of reflections, one for each factor."""
    import torch

    count = factors.shape[-1]
    unit = torch.eye(vectors.shape[-2], dtype=vectors.dtype)
    return _reflected(vectors.narrow(-1, 0, count).tril(-1) + unit[:, :count], factors, vectors.shape[-1])


def qr(matrix: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """`aten.linalg_qr` by a reflection for each column; the signs on R's diagonal are LAPACK's."""
    import torch

    rows, columns = matrix.shape[-2:]
    count = min(rows, columns)
    check_size(f"linalg_qr of {rows} x {columns} elements", count)
    numbers = torch.arange(rows).unsqueeze(-1)
    one, none = torch.ones((), dtype=matrix.dtype), torch.zeros((), dtype=matrix.dtype)
    vectors, factors = [], []
    for at in range(count):
        first = matrix.narrow(-1, at, 1).narrow(-2, at, 1)
        below = torch.where(numbers > at, matrix.narrow(-1, at, 1), none)
        size = below.square().sum(-2, keepdim=True)
        is_kept = size == 0  # nothing to reflect: LAPACK leaves the sign, too
        norm = torch.sqrt(torch.where(is_kept, one, first.square() + size))
        target = torch.where(first > 0, -norm, norm)
        vectors.append(below / (first - target) + (numbers == at).to(matrix.dtype))
        factors.append(torch.where(is_kept, none, (target - first) / target))
        matrix = matrix - factors[-1] * vectors[-1] * (vectors[-1] * matrix).sum(-2, keepdim=True)
    height = rows if mode == "complete" else count
    upper = matrix.narrow(-2, 0, height).triu()
    if mode == "r":
        return upper.new_zeros((0,)), upper
    return _reflected(torch.cat(vectors, -1), torch.cat(factors, -1).squeeze(-2), height), upper


def _reflected(v: Tensor, factors: Tensor, columns: int) -> Tensor:
    """The first columns of I - V T V^T (Schreiber and Van Loan, "A storage-efficient WY representation for products of
    Householder transformations", 1989): T is the inverse of a triangular matrix."""
    import torch

    scaled = factors.unsqueeze(-1)
    unit = torch.eye(factors.shape[-1], dtype=v.dtype)
    inverse = triangular_inverse((v.mT @ v).triu(1) * scaled + unit, upper=True)
    return torch.eye(v.shape[-2], dtype=v.dtype)[:, :columns] - v @ (inverse @ (scaled * v.narrow(-2, 0, columns).mT))
