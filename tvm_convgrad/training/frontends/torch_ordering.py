# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch that order, count or select elements, written out as others that the translator has.

`cummax`, `median` and the like send their gradients where PyTorch does: they gather at places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    from torch import Tensor


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest elements along an axis, and their places."""
    places = x.argsort(dim).narrow(dim, k - 1, 1)
    values = x.gather(dim, places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def median(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of two medians, and its place."""
    return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def median_of_all(x: Tensor) -> Tensor:
    """The median of all elements, whose gradient goes to all that equal it in equal parts, as in PyTorch."""
    import torch

    value = median(x.flatten(), 0)[0]
    if not x.is_floating_point():
        return value
    equal = x == value
    differences = torch.where(equal, x - value, torch.zeros_like(x))  # zeros, with gradients
    return value + differences.sum() / equal.to(x.dtype).sum()


def cumulative_extremum(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The largest or smallest elements so far, and their places: the last of equal ones, as in PyTorch."""
    import torch

    values = [x.narrow(dim, 0, 1)]
    places = [torch.zeros_like(values[0], dtype=torch.int64)]
    for at in range(1, x.shape[dim]):
        here = x.narrow(dim, at, 1)
        taken = here >= values[-1] if largest else here <= values[-1]
        values.append(torch.where(taken, here, values[-1]))
        places.append(torch.where(taken, torch.full_like(places[-1], at), places[-1]))
    return torch.cat(values, dim), torch.cat(places, dim)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The logarithms of cumulative sums of exponentials, one after the other."""
    import torch

    parts = [x.narrow(dim, 0, 1)]
    for at in range(1, x.shape[dim]):
        here, before = x.narrow(dim, at, 1), parts[-1]
        parts.append(torch.maximum(here, before) + torch.log1p(torch.exp(-(here - before).abs())))
    return torch.cat(parts, dim)


def bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """How many of the boundaries are below each element, or, with `right`, not above it."""
    import torch

    counted = boundaries <= x.unsqueeze(-1) if right else boundaries < x.unsqueeze(-1)
    return counted.to(torch.int32 if out_int32 else torch.int64).sum(-1, dtype=torch.int32 if out_int32 else None)


def searchsorted(
    boundaries: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """`bucketize` with boundaries of each row, if they have as many axes as x."""
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    rows = boundaries if boundaries.ndim == 1 else boundaries.unsqueeze(-2)
    return bucketize(x, rows, out_int32=out_int32, right=right or side == "right")


def heaviside(x: Tensor, values: Tensor) -> Tensor:
    """0 below zero, 1 above it, and the given values at it."""
    import torch

    return torch.where(x == 0, values, (x > 0).to(x.dtype))


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The tensor with the elements of `source`, one after the other, where the mask is true."""
    import torch

    x, mask = torch.broadcast_tensors(x, mask)
    places = mask.flatten().to(torch.int64).cumsum(0) - 1
    places = places.clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten().index_select(0, places).view(x.shape), x)
