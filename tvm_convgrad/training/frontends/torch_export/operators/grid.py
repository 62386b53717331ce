# SPDX-License-Identifier: Apache-2.0
"""affine_grid, and grid_sample written out as reads of corners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

_NEAREST, _BICUBIC = 1, 2
"""Modes of interpolation; 0 is linear."""

_BORDER, _REFLECTION = 1, 2
"""Modes of padding; 0 is zeros."""


def affine_grid(theta: Tensor, size: Sequence[int], aligned: bool) -> Tensor:
    """The places of an image's or volume's pixels under the affine maps theta, in [-1, 1].

    PyTorch's own decomposition makes a constant of an extent of 1, which run_decompositions fails at.
    """
    import torch

    count, _, *extents = size
    rank = len(extents)
    columns = []
    for axis in reversed(range(rank)):
        extent = extents[axis]
        end = 0.0 if extent == 1 else 1.0 if aligned else (extent - 1) / extent
        shape = [extent if other == axis else 1 for other in range(rank)]
        columns.append(torch.linspace(-end, end, extent, dtype=theta.dtype).view(shape).expand(extents))
    base = torch.stack([*columns, torch.ones(extents, dtype=theta.dtype)], -1).view(-1, rank + 1, 1)
    return (base * theta.mT.unsqueeze(1)).sum(-2).view(count, *extents, rank)


def grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    """x (N, C, *extents) at the places that a grid (N, *extents, rank) has in [-1, 1], as `torch.grid_sampler_3d`.

    PyTorch's own decomposition of images needs a fixed batch; bicubic sampling, which only images have, is left to it.
    """
    import torch

    if mode == _BICUBIC:
        found: Tensor = torch._decomp.decompositions.grid_sampler_2d(x, grid, mode, padding, aligned)
        return found
    extents = x.shape[2:]
    places = []
    for axis, extent in enumerate(extents):
        at = grid[..., len(extents) - 1 - axis]
        at = (at + 1) * ((extent - 1) / 2) if aligned else (at + 1) * (extent / 2) - 0.5
        if padding == _REFLECTION:
            at = _reflected(at, extent, aligned)
        if padding in (_BORDER, _REFLECTION):
            at = at.clamp(0, extent - 1)
        places.append(at)
    flat = x.flatten(2)

    def read(corner: list[Tensor]) -> Tensor:
        """The elements at whole places; 0 outside."""
        inside = torch.ones_like(corner[0], dtype=torch.bool)
        number = torch.zeros_like(corner[0], dtype=torch.int64)
        for at, extent in zip(corner, extents, strict=True):
            inside = inside & (at >= 0) & (at <= extent - 1)
            number = number * extent + at.clamp(0, extent - 1).to(torch.int64)
        number = number.flatten(1).unsqueeze(1).expand(-1, flat.shape[1], -1)
        values = flat.gather(2, number).unflatten(2, corner[0].shape[1:])
        return values * inside.unsqueeze(1).to(x.dtype)

    if mode == _NEAREST:
        return read([at.round() for at in places])
    low = [at.floor() for at in places]
    result = torch.zeros((), dtype=x.dtype)
    for upper in product((False, True), repeat=len(extents)):
        corner = [at + 1 if one else at for at, one in zip(low, upper, strict=True)]
        weight = torch.ones((), dtype=x.dtype)
        for at, below, one in zip(places, low, upper, strict=True):
            weight = weight * (at - below if one else below + 1 - at)
        result = result + read(corner) * weight.unsqueeze(1)
    return result


def _reflected(at: Tensor, extent: int, aligned: bool) -> Tensor:
    """Places reflected at the first and last element, or at their outer edges."""
    import torch

    low, span = (0.0, float(extent - 1)) if aligned else (-0.5, float(extent))
    if span == 0:
        return torch.zeros_like(at)
    distance = (at - low).abs()
    extra = torch.fmod(distance, span)
    flips = torch.floor(distance / span)
    even = torch.remainder(flips, 2.0) == 0
    return torch.where(even, extra + low, span - extra + low)
