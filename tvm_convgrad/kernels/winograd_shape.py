# SPDX-License-Identifier: Apache-2.0
"""Numbers of Winograd's kernels that the plan and the kernels share: tiles of 2x2 results, and chunks of them.

Tiles are numbered line by line, image by image. A *chunk* is some lines of one image's tiles, or all lines of some
images: it is transformed, multiplied and transformed back at once. Its *panel* has the source's pixels with channels
innermost, borders as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_convgrad.kernels.gather_shape import GatherTiling, Shape, shape_of, spread
from tvm_convgrad.kernels.spec import Gather, Phase
from tvm_convgrad.kernels.target import Machine

ELEMENTS = 16
"""Of a transformed tile."""


@dataclass(frozen=True)
class WinogradTiling:
    """How the work is cut.

    Attributes:
        rows, columns: of the register tile: rows of tiles (of wgrad: of output channels) by vectors of channels.
        images, lines: of a chunk; lines are all of an image's if there is more than one image.
        together: all cores work on one chunk, else each on one of its own.
    """

    rows: int
    columns: int
    images: int
    lines: int
    together: bool = True


@dataclass(frozen=True)
class Chunks:
    """Tiles of 2x2 pixels of a tensor, cut into chunks.

    Attributes:
        across, down: tiles of a line, lines of an image.
        lines: of a chunk, of each of its images; per_image: chunks of an image; number: of all chunks.
        tiles: of a chunk.
    """

    across: int
    down: int
    lines: int
    per_image: int
    number: int
    tiles: int


def chunks_of(gather: Gather, tiling: WinogradTiling) -> Chunks:
    """The chunks of a gather's result."""
    _, h, w = (axis.count for axis in gather.phases[0][0])
    down, across = -(-h // 2), -(-w // 2)
    per_image = -(-down // tiling.lines)
    number = per_image * (gather.batch // tiling.images)
    return Chunks(across, down, tiling.lines, per_image, number, tiling.images * tiling.lines * across)


def panel_shape(gather: Gather, tiling: WinogradTiling, machine: Machine) -> Shape:
    """The source panel of one image's part of a chunk, and W's blocks, as those of a gather that is cut so."""
    axes = gather.phases[0][0]
    even: Phase = (axes[0], *(replace(axis, count=axis.count + axis.count % 2) for axis in axes[1:]))  # type: ignore[assignment]
    # Tiles of two lines: they are transformed with their borders, which are zeros then.
    cut = GatherTiling("channels", 2 * even[2].count, tiling.columns, 2 * tiling.lines, 1, tile_lines=2)
    return shape_of(gather, (even,), cut, machine)


def padded(channels: int, multiple: int, lanes: int) -> int:
    """The distance of rows of so many channels."""
    return spread(-(-channels // multiple) * multiple, lanes)


__all__ = ["ELEMENTS", "Chunks", "WinogradTiling", "chunks_of", "padded", "panel_shape"]
