# SPDX-License-Identifier: Apache-2.0
"""Max pools with the indices of their elements, adaptive and fractional ones, and average pools that TVM has not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from tvm_convgrad.training.frontends.torch_export.aliases import with_own_graph
from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # an optional package
    import torch
    from torch import Tensor


def with_used_places(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in which each max pool whose indices are used (max_unpool) is an operator that computes them."""
    import torch

    if not hasattr(torch.ops.convgrad, "max_pool_with_places"):
        ints = "int[] kernel, int[] stride=[], int[] padding=[0], int[] dilation=[1], bool ceil_mode=False"
        for name, arguments, function in (
            ("max_pool_with_places", ints, _max_pool_with_places),
            ("adaptive_max_pool_with_places", "int[] size", _adaptive_max_with_places),
        ):
            torch.library.define(f"convgrad::{name}", f"(Tensor x, {arguments}) -> (Tensor, Tensor)")
            torch.library.impl(f"convgrad::{name}", "CompositeImplicitAutograd", function)
    program = with_own_graph(program)
    for node in program.graph.nodes:
        used = any(name_of(user) == "getitem" and user.args[1] == 1 and user.users for user in node.users)
        if node.op != "call_function" or "max_pool" not in name_of(node) or "fractional" in name_of(node) or not used:
            continue  # `fractional_max` has the indices
        own = torch.ops.convgrad
        is_adaptive = "adaptive" in name_of(node)
        node.target = (own.adaptive_max_pool_with_places if is_adaptive else own.max_pool_with_places).default
    return program


def _max_pool_with_places(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and its index in the flattened image, from one slice for each tap."""
    import torch

    rank = max(x.ndim - 2, len(kernel))  # a tensor without a batch has one axis less
    taps, pads, dilations = ([*given] * (rank // len(given)) for given in (kernel, padding, dilation))
    steps = [*stride] * (rank // len(stride)) if stride else taps
    extents = x.shape[x.ndim - rank :]
    axes = zip(extents, taps, steps, pads, dilations, strict=True)
    counts, ends = zip(*(_windows(*axis, ceil_mode) for axis in axes), strict=True)
    widths = [width for pair in zip(reversed(pads), reversed(ends), strict=True) for width in pair]
    places = torch.arange(math.prod(extents)).reshape(*([1] * (x.ndim - rank)), *extents)
    whole, numbers = (torch.nn.functional.pad(each, widths, value=low) for each, low in ((x, -math.inf), (places, 0)))
    windows = [
        (
            ...,
            *(
                slice(at * dilated, at * dilated + (count - 1) * step + 1, step)
                for at, dilated, count, step in zip(tap, dilations, counts, steps, strict=True)
            ),
        )
        for tap in product(*(range(count) for count in taps))
    ]
    values, numbers = (torch.stack([tensor[window] for window in windows]) for tensor in (whole, numbers))
    largest, found = values.max(0)
    return largest, numbers.expand(values.shape).gather(0, found.unsqueeze(0))[0]


def _windows(extent: int, tap: int, step: int, pad: int, dilation: int, ceil_mode: bool) -> tuple[int, int]:
    """The number of windows along an axis, and the elements behind it that the last one reads."""
    free = extent + 2 * pad - dilation * (tap - 1) - 1
    count = (-(-free // step) if ceil_mode else free // step) + 1
    count -= ceil_mode and (count - 1) * step >= extent + pad  # the last window begins inside
    return count, max((count - 1) * step + dilation * (tap - 1) + 1 - extent - pad, 0)


def _adaptive_max_with_places(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first one of the largest elements of each window, and its index in the flattened image."""
    import torch

    rank = len(size)
    extents = list(x.shape[x.ndim - rank :])
    if not all(isinstance(extent, int) for extent in extents):
        return _adaptive_max_of_free(x, size)
    before = x.ndim - rank
    values, numbers = x, torch.arange(math.prod(extents)).reshape([1] * before + extents)
    outside = torch.zeros([], dtype=torch.bool)
    for axis, (extent, wanted) in enumerate(zip(extents, size, strict=True)):
        cells = torch.arange(wanted)
        begins, ends = cells * extent // wanted, ((cells + 1) * extent + wanted - 1) // wanted
        width = max(-(-extent * (cell + 1) // wanted) - extent * cell // wanted for cell in range(wanted))
        read = begins[:, None] + torch.arange(width)
        shape = [1] * (2 * rank)
        shape[2 * axis : 2 * axis + 2] = [wanted, width]
        outside = outside | (read >= ends[:, None]).reshape(shape)
        places, at = read.clamp(max=extent - 1).flatten(), before + 2 * axis
        values, numbers = (each.index_select(at, places).unflatten(at, (wanted, width)) for each in (values, numbers))
    order = [*range(before), *(before + 2 * axis + part for part in (0, 1) for axis in range(rank))]
    values = torch.where(outside, -math.inf, values).permute(order).flatten(before + rank)
    numbers = numbers.permute(order).flatten(before + rank).expand(values.shape)
    largest, found = values.max(-1)
    return largest, numbers.gather(-1, found.unsqueeze(-1)).squeeze(-1)


def adaptive_max(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Max pools; the indices are not computed (see `with_used_places`).

    Where the windows of an axis differ, one axis after the other, the last one first: so the first of equal elements,
    line by line, has the gradient, as in PyTorch.
    """
    import torch

    rank = len(size)
    pool = {2: torch.nn.functional.max_pool2d, 3: torch.nn.functional.max_pool3d}[rank]
    extents = x.shape[-rank:]
    if not all(isinstance(extent, int) for extent in extents):
        return _adaptive_max_of_free(x, size)
    if all(extent % wanted == 0 for extent, wanted in zip(extents, size, strict=True)):
        kernel = [extent // wanted for extent, wanted in zip(extents, size, strict=True)]
        x = pool(x, kernel) if max(kernel) > 1 else x
        return x, torch.zeros(x.shape, dtype=torch.int64)
    for axis in reversed(range(rank)):
        extent, wanted = extents[axis], size[axis]
        windows = [(extent * cell // wanted, -(-extent * (cell + 1) // wanted)) for cell in range(wanted)]
        if extent % wanted == 0:
            windows = [(0, extent)]
        parts = []
        for begin, end in windows:
            kernel = [1] * rank
            kernel[axis] = extent // wanted if extent % wanted == 0 else end - begin
            part = x.narrow(axis - rank, begin, end - begin)
            parts.append(pool(part, kernel) if kernel[axis] > 1 else part)
        x = torch.cat(parts, axis - rank)
    return x, torch.zeros(x.shape, dtype=torch.int64)


def _adaptive_max_of_free(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Adaptive max pools of free extents, of which windows are no numbers: each takes the whole axis, or -inf outside.

    One axis after the other, as in `adaptive_max`; the indices are those in the flattened image.
    """
    import torch

    rank = len(size)
    values, numbers = x, None
    for axis in reversed(range(rank)):
        at, wanted = x.ndim - rank + axis, size[axis]
        extent = torch.scalar_tensor(x.shape[at], dtype=torch.int64)
        places, cells = torch.arange(x.shape[at]), torch.arange(wanted)[:, None]
        inside = ((places + 1) * wanted > extent * cells) & (places * wanted < extent * (cells + 1))
        lines = values.movedim(at, -1)
        largest, found = torch.where(inside, lines.unsqueeze(-2), -math.inf).max(-1)
        is_empty = torch.isinf(largest) & (largest < 0)  # the window has -inf only, of which the first is taken
        found = torch.where(is_empty, cells[:, 0] * extent // wanted, found)
        values, found = (each.movedim(-1, at) for each in (lines.gather(-1, found), found))
        if numbers is None:
            numbers = found
        else:
            behind = torch.scalar_tensor(math.prod(x.shape[at + 1 :]), dtype=torch.int64)
            numbers = found * behind + numbers.gather(at, found)
    return values, numbers if numbers is not None else torch.zeros_like(x, dtype=torch.int64)


def fractional_max(x: Tensor, kernel: Sequence[int], size: Sequence[int], samples: Tensor) -> tuple[Tensor, Tensor]:
    """Max pools of windows at pseudo-random places (Graham, "Fractional max-pooling", 2014), and the maxima's indices.

    Window i of an axis begins at floor((i + u) a) - floor(u a), where a is the quotient of the elements and the windows
    that the last one leaves over; the last one ends with the axis.

    Args:
        samples: u, (batch, channels, axes); of two axes PyTorch has the last one first.
    """
    import torch

    rank = len(size)
    before = x.ndim - rank
    drawn = samples.reshape([*x.shape[:before], rank])
    indices = torch.zeros([], dtype=torch.int64)
    for axis, (extent, taps, windows) in enumerate(zip(x.shape[before:], kernel, size, strict=True)):
        sample = drawn.narrow(-1, rank - 1 - axis if rank == 2 else axis, 1)
        begins = torch.full_like(sample, extent - taps, dtype=torch.int64)
        if windows > 1:
            step = torch.full([], extent - taps, dtype=x.dtype) / (windows - 1)
            others = (torch.arange(windows - 1) + sample) * step
            begins = torch.cat([others.to(torch.int64) - (sample * step).to(torch.int64), begins], -1)
        shape = [*x.shape[:before], *([1] * (2 * rank))]
        shape[before + axis], shape[before + rank + axis] = windows, taps
        indices = indices * extent + (begins.unsqueeze(-1) + torch.arange(taps)).reshape(shape)
    indices = indices.flatten(before + rank)
    values = x.flatten(before).gather(-1, indices.flatten(before)).reshape(indices.shape)
    largest, found = values.max(-1)
    return largest, indices.gather(-1, found.unsqueeze(-1)).squeeze(-1)


def max_unpool(x: Tensor, places: Tensor, size: Sequence[int], *_window: Sequence[int]) -> Tensor:
    """An image of zeros with x at the places that a max pool gave, which number its pixels."""
    line = x.ndim - len(size)
    values = x.flatten(line)
    zeros = x.new_zeros([*values.shape[:-1], math.prod(size)])
    return zeros.scatter(line, places.flatten(line), values).unflatten(line, size)


def average_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    include_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    """An average pool with `divisor_override` whose last windows may reach beyond the padding: of more zeros."""
    import torch

    if not ceil_mode or divisor is None:
        return NotImplemented
    rank = max(x.ndim - 2, len(kernel))
    taps, pads = ([*given] * (rank // len(given)) for given in (kernel, padding))
    steps = [*stride] * (rank // len(stride)) if stride else taps
    widths: list[int] = []
    for extent, tap, step, pad in zip(x.shape[x.ndim - rank :], taps, steps, pads, strict=True):
        widths = [pad, _windows(extent, tap, step, pad, 1, True)[1], *widths]
    pool = {2: torch.ops.aten.avg_pool2d.default, 3: torch.ops.aten.avg_pool3d.default}[rank]
    return pool(torch.nn.functional.pad(x, widths), taps, steps, [0] * rank, False, True, divisor)


__all__ = ["adaptive_max", "average_pool", "fractional_max", "max_unpool", "with_used_places"]
