# SPDX-License-Identifier: Apache-2.0
"""Inverses, solutions, determinants and Cholesky factors of small matrices, written out as eliminations; triangular
ones of any size.

The inverse is found outside of differentiation, by Gauss and Jordan with row exchanges; one Newton step with it then
has the gradient of the inverse, and so has what is made of it (Giles, "An extended collection of matrix derivative
results for forward and reverse mode algorithmic differentiation", 2008). A singular matrix gives infinities or NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import UnsupportedError

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

LARGEST = 16
"""The most rows of a matrix that are written out: each is some ten operators."""


def inverse(matrix: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """`aten.linalg_inv_ex`; the second result, the number of the row where it failed, is always 0."""
    import torch

    size = _size(matrix, "linalg_inv_ex")
    unit = torch.eye(size, dtype=matrix.dtype)
    found = _inverse(matrix)
    return found @ (2 * unit - matrix @ found), _no_failure(matrix)


def solve(
    matrix: Tensor, right: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`aten._linalg_solve_ex`; its LU factors, which only PyTorch's own gradient reads, are not computed."""
    _size(matrix, "_linalg_solve_ex")
    is_vector = right.ndim == 1 or (right.ndim == matrix.ndim - 1 and right.shape == matrix.shape[:-1])
    wide = right.unsqueeze(-1) if is_vector else right
    found = _inverse(matrix)
    if left:
        start = stopped(found @ wide)
        result = start + found @ (wide - matrix @ start)
    else:
        start = stopped(wide @ found)
        result = start + (wide - start @ matrix) @ found
    return result.squeeze(-1) if is_vector else result, *_no_factors(matrix), _no_failure(matrix)


def determinant(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`aten._linalg_det`; up to three rows as products, whose gradient is right at singular matrices, too."""
    size = _size(matrix, "_linalg_det")
    if size <= 3:
        return _expanded(matrix), *_no_factors(matrix)
    found, pivots, sign = _eliminated(stopped(matrix))
    value = sign
    for pivot in pivots:
        value = value * pivot
    return stopped(value) * (1 + _relative(matrix, found)), *_no_factors(matrix)


def log_determinant(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`aten._linalg_slogdet`: sign, and logarithm of the size."""
    import torch

    _size(matrix, "_linalg_slogdet")
    found, pivots, sign = _eliminated(stopped(matrix))
    logarithm = torch.zeros_like(sign)
    for pivot in pivots:
        sign, logarithm = sign * torch.sign(pivot), logarithm + torch.log(pivot.abs())
    return stopped(sign), stopped(logarithm) + _relative(matrix, found), *_no_factors(matrix)


def cholesky(matrix: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """`aten.linalg_cholesky_ex` of the lower triangle; the gradient is symmetric, as PyTorch's."""
    import torch

    size = _size(matrix, "linalg_cholesky_ex")
    half = matrix.triu(1).mT if upper else matrix.tril(-1)
    whole = half + half.mT + matrix * torch.eye(size, dtype=matrix.dtype)
    symmetric = (matrix + matrix.mT) * 0.5
    rest = symmetric + stopped(whole - symmetric)
    columns = []
    for at in range(size):
        column = rest.narrow(-1, at, 1) / torch.sqrt(rest.narrow(-1, at, 1).narrow(-2, at, 1))
        column = column * (torch.arange(size) >= at).to(matrix.dtype).unsqueeze(-1)
        columns.append(column)
        rest = rest - column * column.mT
    factor = torch.cat(columns, -1)
    return factor.mT if upper else factor, _no_failure(matrix)


def solve_triangular(
    matrix: Tensor, right: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """`aten.linalg_solve_triangular`, by the inverse."""
    import torch

    half = matrix.triu() if upper else matrix.tril()
    if unitriangular:
        half = torch.where(torch.eye(matrix.shape[-1], dtype=torch.bool), torch.ones_like(half), half)
    inverse = triangular_inverse(half, upper=upper)
    return inverse @ right if left else right @ inverse


def old_solve_triangular(
    right: Tensor, matrix: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """`aten.triangular_solve`, which has the operands in the other order; the second result is the matrix."""
    used, is_upper = (matrix.mT, not upper) if transpose else (matrix, upper)
    found = solve_triangular(used, right, upper=is_upper, unitriangular=unitriangular)
    return found, matrix.expand(*found.shape[:-2], *matrix.shape[-2:]) * 1


def cholesky_solve(right: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """`aten.cholesky_solve`: the solution for the matrix of which the factor is given."""
    inverse = triangular_inverse(factor.triu() if upper else factor.tril(), upper=upper)
    return inverse @ (inverse.mT @ right) if upper else inverse.mT @ (inverse @ right)


def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    """`aten.cholesky_inverse`: the inverse of the matrix of which the factor is given."""
    inverse = triangular_inverse(factor.triu() if upper else factor.tril(), upper=upper)
    return inverse @ inverse.mT if upper else inverse.mT @ inverse


def triangular_inverse(matrix: Tensor, *, upper: bool) -> Tensor:
    """The inverse of a triangular matrix, whose other half is 0: of its diagonal, then of blocks of 2, 4, ... rows.

    The inverse of [[A, B], [0, C]] is [[a, -a B c], [0, c]] with those of A and C: two products for each doubling.
    """
    import torch

    size = matrix.shape[-1]
    if not isinstance(size, int):
        raise UnsupportedError(
            f"triangular systems are written out for the number of rows, which is free ({size}); fix it in the export"
        )
    numbers = torch.arange(size)
    row, column = numbers.unsqueeze(-1), numbers
    inverse = torch.where(row == column, 1 / torch.diagonal(matrix, dim1=-2, dim2=-1).unsqueeze(-1), 0.0)
    block = 1
    while block < size:
        is_beside = (row // (2 * block) == column // (2 * block)) & (row // block != column // block)
        inverse = inverse - inverse @ torch.where(is_beside, matrix, torch.zeros_like(matrix)) @ inverse
        block *= 2
    return inverse


def _size(matrix: Tensor, name: str) -> int:
    size = matrix.shape[-1]
    check_size(f"{name} of {size} rows", size)
    return size


def check_size(what: str, size: int) -> None:
    """Refuse an operator that is written out, row by row, if it has more than LARGEST rows.

    Args:
        what: the operator and its size, for the message.
        size: how many rows there are.
    """
    if not isinstance(size, int) or size > LARGEST:
        raise UnsupportedError(
            f"aten.{what} is not imported, of up to {LARGEST} it is: written out, a larger one makes a "
            "step that compiles for minutes; give the model its result as an input"
        )


def stopped(x: Tensor) -> Tensor:
    """The tensor as a constant of differentiation."""
    import torch

    constant: Tensor = torch.ops.convgrad.stop_gradient.default(x)
    return constant


def _inverse(matrix: Tensor) -> Tensor:
    return _eliminated(stopped(matrix))[0]


def _relative(matrix: Tensor, found: Tensor) -> Tensor:
    """0, with the gradient of the logarithm of a determinant: the trace of inverse times change."""
    return (found.mT * (matrix - stopped(matrix))).sum((-2, -1))


def _eliminated(matrix: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """The inverse, the pivots, and the sign of the row exchanges."""
    import torch

    size = matrix.shape[-1]
    unit = torch.eye(size, dtype=matrix.dtype).expand(matrix.shape)
    rows, numbers = torch.cat([matrix, unit], -1), torch.arange(size).unsqueeze(-1)
    sign, pivots = torch.ones_like(matrix.select(-1, 0).select(-1, 0)), []
    for at in range(size):
        if at < size - 1:
            column = rows.narrow(-1, at, 1).narrow(-2, at, size - at).abs()
            place = column.argmax(-2, keepdim=True) + at
            exchanged = torch.where(numbers == at, place, torch.where(numbers == place, at, numbers))
            rows = rows.gather(-2, exchanged.expand(rows.shape))
            sign = sign * (1 - 2 * (place != at).to(matrix.dtype)).squeeze((-2, -1))
        pivot = rows.narrow(-2, at, 1).narrow(-1, at, 1)
        pivots.append(pivot.squeeze((-2, -1)))
        row = rows.narrow(-2, at, 1) / pivot
        rows = torch.where(numbers == at, row, rows - rows.narrow(-1, at, 1) * row)
    return stopped(rows.narrow(-1, size, size)), pivots, sign


def _expanded(matrix: Tensor) -> Tensor:
    """The determinant of at most three rows, expanded by the first one."""
    if matrix.shape[-1] == 1:
        return matrix.squeeze((-2, -1))
    total = None
    for column in range(matrix.shape[-1]):
        others = [other for other in range(matrix.shape[-1]) if other != column]
        rest = matrix[..., 1:, others[0] : others[-1] + 1 : max(others[-1] - others[0], 1)]
        term = matrix[..., 0, column] * _expanded(rest)
        total = term if total is None else total - term if column % 2 else total + term
    assert total is not None
    return total


def _no_factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    return torch.full_like(matrix, math.nan), torch.zeros(matrix.shape[:-1], dtype=torch.int32)


def _no_failure(matrix: Tensor) -> Tensor:
    import torch

    return torch.zeros(matrix.shape[:-2], dtype=torch.int32)
