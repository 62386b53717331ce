# SPDX-License-Identifier: Apache-2.0
"""Short-time Fourier transforms: overlapping frames of a signal, and their sum, by slices of its blocks.

With g the greatest common divisor of the hop and the length of a frame, a frame is a row of blocks of g elements, and
neighbouring frames begin hop / g blocks apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

_BLOCKS = 32
"""Frames of more blocks are read by indices, and added up by a transposed convolution."""


def stft(
    x: Tensor,
    size: int,
    hop: int | None = None,
    width: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """The spectra of a signal's frames, as `torch.stft` of a signal that is padded already: (..., frequency, frame)."""
    import torch

    if x.is_complex() or (window is not None and window.is_complex()) or align_to_window:
        return NotImplemented
    hop, width = hop or size // 4, width or size
    found = frames(x, size, hop)
    shape = _of_size(window, width, size, x)
    found = found if shape is None else found * shape
    half = onesided is None or onesided
    spectra = torch.ops.aten._fft_r2c(found, [found.ndim - 1], int(normalized), half).mT
    return spectra if return_complex else torch.view_as_real(spectra)


def istft(
    x: Tensor,
    size: int,
    hop: int | None = None,
    width: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    """The signal of the spectra of its frames, as `torch.istft`: frames added up, divided by the windows' squares."""
    import torch

    if return_complex or (window is not None and window.is_complex()):
        return NotImplemented
    hop, width = hop or size // 4, width or size
    spectra = x if x.ndim == 3 else x.unsqueeze(0)
    count = spectra.shape[2]
    spectra = spectra.mT.narrow(-1, 0, size // 2 + 1)
    found = torch.ops.aten._fft_c2r(spectra, [2], 1 if normalized else 2, size)
    shape = _of_size(window, width, size, found)
    shape = torch.ones(size, dtype=found.dtype) if shape is None else shape
    signal = added(found * shape, hop)
    weight = added((shape * shape).expand(1, count, size), hop)
    begin, whole = size // 2 if center else 0, size + hop * (count - 1)
    end = begin + length if length else whole - begin
    used = min(end, whole)
    signal = signal.narrow(1, begin, used - begin) / weight.narrow(1, begin, used - begin)
    signal = torch.nn.functional.pad(signal, (0, end - used)) if end > used else signal
    return signal if x.ndim == 3 else signal.squeeze(0)


def frames(x: Tensor, size: int, hop: int) -> Tensor:
    """The frames of a signal along its last axis: (..., frame, element)."""
    import torch

    block = math.gcd(hop, size)
    blocks, step = size // block, hop // block
    count = (x.shape[-1] - size) // hop + 1
    if blocks > _BLOCKS:
        return x.unfold(-1, size, hop)
    rows = x.narrow(-1, 0, (count - 1) * hop + size).unflatten(-1, (-1, block))
    parts = [rows[..., at : at + (count - 1) * step + 1 : step, :] for at in range(blocks)]
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def added(x: Tensor, hop: int) -> Tensor:
    """Frames (samples, frame, element) added up where they overlap: the transpose of `frames`."""
    import torch

    _, count, size = x.shape
    block = math.gcd(hop, size)
    blocks, step = size // block, hop // block
    if blocks > _BLOCKS:
        unit = torch.eye(size, dtype=x.dtype).unsqueeze(1)
        return torch.nn.functional.conv_transpose1d(x.mT, unit, stride=hop).squeeze(1)
    pad = torch.nn.functional.pad
    total = None
    for at in range(blocks):
        part = x.narrow(-1, at * block, block)
        if step > 1:
            part = pad(part.unsqueeze(2), (0, 0, 0, step - 1)).flatten(1, 2)[:, : (count - 1) * step + 1]
        part = pad(part, (0, 0, at, blocks - 1 - at))
        total = part if total is None else total + part
    assert total is not None
    whole = total.flatten(1)
    missing = size + hop * (count - 1) - whole.shape[1]
    return pad(whole, (0, missing)) if missing > 0 else whole


def _of_size(window: Tensor | None, width: int, size: int, like: Tensor) -> Tensor | None:
    """The window with zeros around it up to the size of a frame; None: all ones."""
    import torch

    if window is None and width == size:
        return None
    shape = torch.ones(width, dtype=like.dtype) if window is None else window
    before = (size - width) // 2
    return torch.nn.functional.pad(shape, (before, size - width - before)) if width < size else shape


__all__ = ["added", "frames", "istft", "stft"]
