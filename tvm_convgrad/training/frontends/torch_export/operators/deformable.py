# SPDX-License-Identifier: Apache-2.0
"""Deformable convolutions (torchvision::deform_conv2d, with or without mask) as reads of corners and a 1x1 convolution.

The elements that the taps read between pixels are channels of an image, which a convolution by the weights of all taps
then sums. PyTorch knows the operator only when torchvision is loaded.
"""

from __future__ import annotations

import importlib
import zipfile
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

_NAME = "torchvision::deform_conv2d"
_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask) -> Tensor"
)


def declare_deformable(path: Path | None = None) -> None:
    """Declare the operator if it is missing: a file that names it cannot be read otherwise.

    Args:
        path: a .pt2 file; None: declare it in any case.
    """
    import torch

    if hasattr(torch.ops.torchvision, "deform_conv2d") or (path is not None and not _names_it(path)):
        return
    with suppress(ImportError, OSError, RuntimeError):  # not installed, or its compiled operators do not fit PyTorch
        importlib.import_module("torchvision")
    if not hasattr(torch.ops.torchvision, "deform_conv2d"):
        torch.library.define(_NAME, _SCHEMA)
        torch.library.register_fake(_NAME, deform_conv2d)


def _names_it(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".json") and "weights_config" not in name]
        return any(b"torchvision.deform_conv2d" in archive.read(name) for name in names)


def deform_conv2d(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Tensor:
    """The convolution of x (N, C, H, W), whose taps are moved by an offset (N, 2·offset_groups·taps, h, w).

    Tap t of a group of channels reads at its place plus offset channels 2t (rows) and 2t + 1 (columns); pixels outside
    of the image are 0. What it reads is multiplied by channel t of the mask, if there is one.
    """
    import torch

    _, channels, height, width = x.shape
    rows, columns = weight.shape[2:]
    out_height, out_width = offset.shape[2:]
    taps = rows * columns
    moved = offset.unflatten(1, (offset_groups, taps, 2))
    below = torch.arange(rows, dtype=x.dtype).mul(dilation_h).repeat_interleave(columns).view(taps, 1, 1)
    right = torch.arange(columns, dtype=x.dtype).mul(dilation_w).repeat(rows).view(taps, 1, 1)
    at_row = moved[:, :, :, 0] + (below + torch.arange(out_height, dtype=x.dtype).mul(stride_h).sub(pad_h)[:, None])
    at_column = moved[:, :, :, 1] + (right + torch.arange(out_width, dtype=x.dtype).mul(stride_w).sub(pad_w))
    flat = x.flatten(2).unflatten(1, (offset_groups, channels // offset_groups))
    low_row, low_column = at_row.floor(), at_column.floor()
    found = None
    for up, left in product((0, 1), repeat=2):
        row, column = low_row + up, low_column + left
        share = (at_row - low_row if up else low_row + 1 - at_row) * (
            at_column - low_column if left else low_column + 1 - at_column
        )
        inside = (row >= 0) & (row <= height - 1) & (column >= 0) & (column <= width - 1)
        share = share * inside.to(x.dtype)
        share = share * mask.unflatten(1, (offset_groups, taps)) if use_mask else share
        number = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        number = number.to(torch.int64).flatten(2).unsqueeze(2).expand(-1, -1, flat.shape[2], -1)
        part = flat.gather(3, number) * share.flatten(2).unsqueeze(2)
        found = part if found is None else found + part
    assert found is not None
    read = found.reshape(-1, channels * taps, out_height, out_width)
    return torch.nn.functional.conv2d(read, weight.flatten(1)[:, :, None, None], bias, groups=groups)


__all__ = ["declare_deformable", "deform_conv2d"]
