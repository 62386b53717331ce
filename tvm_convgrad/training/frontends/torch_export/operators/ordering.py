# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch that order, count or select elements, written out as others that the translator has.

`cummax`, `median` and the like send their gradients where PyTorch does: they gather at places.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import UnsupportedError

if TYPE_CHECKING:  # an optional package
    from torch import Tensor


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest elements along an axis, and their indices."""
    places = x.argsort(dim).narrow(dim, k - 1, 1)
    values = x.gather(dim, places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def median(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of two medians, and its index; the first NaN if there is one."""
    import torch

    if x.ndim == 0:
        return kthvalue(x, 1, dim, keepdim)
    if isinstance(x.shape[dim], int):
        places = kthvalue(x, (x.shape[dim] + 1) // 2, dim, True)[1]
    else:
        middle = (torch.scalar_tensor(x.shape[dim], dtype=torch.int64) - 1) // 2  # a tensor in the place of a symbol
        places = x.argsort(dim).index_select(dim, middle.reshape(1))
    if x.is_floating_point():
        is_nan = torch.isnan(x).to(torch.int64)
        places = torch.where(is_nan.sum(dim, keepdim=True) > 0, is_nan.argmax(dim, keepdim=True), places)
    values = x.gather(dim, places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def median_of_all(x: Tensor) -> Tensor:
    """The median of all elements, whose gradient goes to all that equal it in equal parts, as in PyTorch."""
    import torch

    value = median(x.flatten(), 0)[0]
    if not x.is_floating_point():
        return value
    equal = x == value
    count = equal.to(x.dtype).sum()
    finite = torch.where(equal & ~x.isinf(), x - value, torch.zeros_like(x)).sum() / count  # zeros, with gradients
    infinite = torch.where(equal, x, torch.zeros_like(x)).sum() / count
    return torch.where(value.isinf(), infinite, value + finite)


def nanmedian(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of two medians of the elements that are no NaN, and its index; NaN where there are none."""
    import torch

    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    is_nan = torch.isnan(x)
    count = (~is_nan).to(torch.int64).sum(dim, keepdim=True)
    order = torch.where(is_nan, math.inf, x).argsort(dim)
    places = order.gather(dim, ((count - 1) // 2).clamp(min=0))
    values = x.gather(dim, places)
    values = torch.where(torch.isnan(values) & (count > 0), math.inf, values)  # infinity, which a NaN stands before
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def nanmedian_of_all(x: Tensor) -> Tensor:
    """The median of all elements that are no NaN; its gradient goes to all that equal it in equal parts."""
    import torch

    value = torch.ops.convgrad.stop_gradient(nanmedian(x.flatten(), 0)[0])
    equal = x == value
    count = equal.to(x.dtype).sum().clamp(min=1)
    finite = torch.where(equal & ~x.isinf(), x - value, torch.zeros_like(x)).sum() / count  # zeros, with gradients
    return value + finite


def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The most frequent elements along an axis, the least of equally frequent ones, and their last indices."""
    import torch

    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    rows = x.movedim(dim, -1)
    counts = (rows.unsqueeze(-1) == rows.unsqueeze(-2)).to(torch.int64).sum(-1)
    most = counts == counts.amax(-1, keepdim=True)
    highest = rows.amax(-1, keepdim=True)
    least = torch.where(most, rows, highest).amin(-1, keepdim=True)
    numbers = torch.arange(rows.shape[-1]).expand(rows.shape)
    places = torch.where(rows == least, numbers, torch.zeros_like(numbers)).amax(-1, keepdim=True)
    values, places = (each.movedim(-1, dim) for each in (rows.gather(-1, places), places))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def cumulative_extremum(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The largest or smallest elements so far, and their indices: the last of equal ones, as in PyTorch."""
    import torch

    if x.ndim and not isinstance(x.shape[dim], int):
        name = "aten.cummax" if largest else "aten.cummin"
        raise UnsupportedError(
            f"{name} along an axis of a free extent is not imported, as it is written out; export with it fixed"
        )
    values = [x.narrow(dim, 0, 1)]
    places = [torch.zeros_like(values[0], dtype=torch.int64)]
    for at in range(1, x.shape[dim]):
        here = x.narrow(dim, at, 1)
        taken = here >= values[-1] if largest else here <= values[-1]
        values.append(torch.where(taken, here, values[-1]))
        places.append(torch.where(taken, torch.full_like(places[-1], at), places[-1]))
    return torch.cat(values, dim), torch.cat(places, dim)


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """The logarithm of a sum of exponentials; two equal infinities are 0 apart."""
    import torch

    x, y = torch.broadcast_tensors(x, y)
    apart = torch.where(x == y, torch.zeros_like(x), x - y)
    return torch.maximum(x, y) + torch.log1p(torch.exp(-apart.abs()))


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The logarithms of cumulative sums of exponentials, one after the other; along a free axis of all pairs."""
    import torch

    if x.ndim and not isinstance(x.shape[dim], int):
        rows, places = x.movedim(dim, -1), torch.arange(x.shape[dim])
        terms = torch.where(places[:, None] >= places, rows.unsqueeze(-2), -math.inf)
        return terms.logsumexp(-1).movedim(-1, dim)
    parts = [x.narrow(dim, 0, 1)]
    for at in range(1, x.shape[dim]):
        parts.append(logaddexp(x.narrow(dim, at, 1), parts[-1]))
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
    last = torch.ones_like(source, dtype=torch.int64).sum() - 1  # as a tensor, since the batch may be symbolic
    places = places.clamp_min(0).minimum(last)
    return torch.where(mask, source.flatten().index_select(0, places).view(x.shape), x)
