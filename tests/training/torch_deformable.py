# SPDX-License-Identifier: Apache-2.0
"""Deformable convolutions of one tensor, for `torch_operators`, and a reference that reads each tap by grid_sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.torch_topics import Function
from tvm_convgrad.training.frontends.torch_export.operators.deformable import declare_deformable

declare_deformable()


@dataclass(frozen=True)
class Geometry:
    """Extents and groups of a deformable convolution."""

    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    offset_groups: int = 1

    def extents(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the result."""
        sizes = zip(x.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((extent + 2 * pad - far * (tap - 1) - 1) // step + 1 for extent, tap, step, pad, far in sizes)
        return height, width


def deformed(
    x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """The operator as torchvision.ops.deform_conv2d calls it; the reference where nothing is exported."""
    if not torch.compiler.is_exporting():
        return reference(x, weight, offset, mask, bias, geometry)
    none = torch.zeros((x.shape[0], 1), dtype=x.dtype)
    bias = torch.zeros(weight.shape[0], dtype=x.dtype) if bias is None else bias
    numbers = (*geometry.stride, *geometry.padding, *geometry.dilation, geometry.groups, geometry.offset_groups)
    given = none if mask is None else mask
    return torch.ops.torchvision.deform_conv2d(x, weight, offset, given, bias, *numbers, mask is not None)


def reference(
    x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """Each tap's image by grid_sample, in pixels scaled to [-1, 1], then a sum over taps and channels by group."""
    rows, columns = geometry.kernel
    height, width = geometry.extents(x)
    parts = []
    for number, channels in enumerate(x.chunk(geometry.offset_groups, 1)):
        taps = []
        for tap in range(rows * columns):
            at = number * rows * columns + tap
            y = torch.arange(height, dtype=x.dtype)[:, None] * geometry.stride[0] - geometry.padding[0]
            z = torch.arange(width, dtype=x.dtype) * geometry.stride[1] - geometry.padding[1]
            y = y + tap // columns * geometry.dilation[0] + offset[:, 2 * at]
            z = z + tap % columns * geometry.dilation[1] + offset[:, 2 * at + 1]
            grid = torch.stack([z * 2 / (x.shape[3] - 1) - 1, y * 2 / (x.shape[2] - 1) - 1], -1)
            read = F.grid_sample(channels, grid, align_corners=True)
            taps.append(read if mask is None else read * mask[:, at : at + 1])
        parts.append(torch.stack(taps, 2))
    read = torch.cat(parts, 1).unflatten(1, (geometry.groups, -1))  # samples, groups, channels, taps, rows, columns
    found = torch.einsum("ngcthw,gkct->ngkhw", read, weight.flatten(2).unflatten(0, (geometry.groups, -1)))
    found = found.flatten(1, 2)
    return found if bias is None else found + bias.view(-1, 1, 1)


def _case(geometry: Geometry, outputs: int, masked: bool, reach: float = 1.7, biased: bool = True) -> Function:
    def function(x: Tensor) -> Tensor:
        samples, channels = x.shape[:2]
        height, width = geometry.extents(x)
        taps = geometry.kernel[0] * geometry.kernel[1] * geometry.offset_groups
        line = x.flatten(1)

        def drawn(count: int, seed: int) -> Tensor:
            """Values of each sample that all of x has a part in."""
            places = torch.arange(count) * (2 * seed + 1) % line.shape[1]
            return torch.sin(line[:, places] * 2 + torch.arange(count, dtype=x.dtype) % 7)

        offset = drawn(2 * taps * height * width, 3).view(samples, 2 * taps, height, width) * reach
        mask = torch.sigmoid(drawn(taps * height * width, 8)).view(samples, taps, height, width) if masked else None
        count = outputs * channels // geometry.groups * geometry.kernel[0] * geometry.kernel[1]
        weight = drawn(count, 1)[0].view(outputs, channels // geometry.groups, *geometry.kernel)
        return deformed(x, weight, offset, mask, drawn(outputs, 5)[1] if biased else None, geometry)

    return function


DEFORMABLE: dict[str, dict[str, Function]] = {
    "deformable": {
        "plain": _case(Geometry(), 3, False),
        "masked": _case(Geometry(padding=(1, 1)), 5, True),
        "of_groups": _case(Geometry(padding=(1, 0), groups=2, offset_groups=4), 4, True),
        "strided": _case(Geometry((3, 2), (2, 1), (1, 2), (1, 2), 1, 2), 3, True, biased=False),
        "depthwise": _case(Geometry((2, 3), (1, 2), (0, 1), groups=4), 8, False),
        "one_tap": _case(Geometry((1, 1), (2, 3)), 2, True),
        "far_outside": _case(Geometry((3, 3), padding=(3, 3), dilation=(2, 3)), 2, True, reach=9.3),
        "of_whole_offsets": lambda x: deformed(
            x,
            x[:, :, :3, :3],
            torch.zeros(2, 18, 6, 6, dtype=x.dtype),
            x[0, 0, 0, 0].expand(2, 9, 6, 6),
            None,
            Geometry(padding=(1, 1)),
        ),
    }
}
