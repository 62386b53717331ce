# SPDX-License-Identifier: Apache-2.0
"""im2col and col2im (nn.Unfold and nn.Fold): the sliding blocks of an image, and their sum, one axis after the other.

PyTorch's own decompositions read and write by tables of indices, which need a fixed batch. Here kh slices along the
rows and kw along the columns do the same, and their gradients are pads and slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    from torch import Tensor


def im2col(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """The blocks (N, C·kh·kw, blocks) of an image (N, C, H, W), as `torch.nn.functional.unfold`."""
    import torch

    image = x if x.ndim == 4 else x.unsqueeze(0)
    image = torch.nn.functional.pad(image, (padding[1], padding[1], padding[0], padding[0]))
    for axis in (0, 1):  # (N, C, H, W) -> (N, C, kh, rows, W) -> (N, C, kh, kw, rows, columns)
        along, step, last = 2 + 2 * axis, stride[axis], dilation[axis] * (kernel[axis] - 1)
        reach = (image.shape[along] - last - 1) // step * step + 1
        begins = range(0, last + 1, dilation[axis])
        parts = [torch.ops.aten.slice.Tensor(image, along, begin, begin + reach, step) for begin in begins]
        image = torch.stack(parts, 2 + axis)
    found = image.flatten(4).flatten(1, 3)
    return found if x.ndim == 4 else found.squeeze(0)


def col2im(
    x: Tensor,
    extents: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """The image (N, C, H, W) to which blocks (N, C·kh·kw, blocks) add up, as `torch.nn.functional.fold`."""
    whole = [extent + 2 * width for extent, width in zip(extents, padding, strict=True)]
    counts = [
        (extent - apart * (size - 1) - 1) // step + 1
        for extent, apart, size, step in zip(whole, dilation, kernel, stride, strict=True)
    ]
    image = x if x.ndim == 3 else x.unsqueeze(0)
    image = image.unflatten(2, counts).unflatten(1, (-1, *kernel))
    for axis in (0, 1):  # (N, C, kh, kw, rows, columns) -> (N, C, kw, H, columns) -> (N, C, H, W)
        image = _added(image, stride[axis], dilation[axis], whole[axis])
    for axis in (0, 1):
        image = image.narrow(2 + axis, padding[axis], extents[axis])
    return image if x.ndim == 3 else image.squeeze(0)


def _added(x: Tensor, step: int, apart: int, whole: int) -> Tensor:
    """Blocks along axis 4 with their elements along axis 2, added up along axis 3 of the result, of size `whole`."""
    size, count = x.shape[2], x.shape[4]
    if size == step and apart == 1:  # blocks that do not overlap
        return _padded(x.movedim(2, 4).flatten(3, 4), 0, whole)
    total = None
    for number in range(size):
        part = x.select(2, number).unsqueeze(4)
        if step > 1:
            part = _padded(part, 0, step, axis=4)
        part = part.flatten(3, 4).narrow(3, 0, (count - 1) * step + 1)
        part = _padded(part, number * apart, whole)
        total = part if total is None else total + part
    assert total is not None, "a block has an element"
    return total


def _padded(x: Tensor, before: int, whole: int, axis: int = 3) -> Tensor:
    """A tensor with zeros around it along an axis, which then has `whole` elements."""
    import torch

    widths = [0, 0] * (x.ndim - 1 - axis) + [before, whole - before - x.shape[axis]]
    return torch.nn.functional.pad(x, widths) if any(widths) else x
