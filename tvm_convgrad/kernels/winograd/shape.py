# SPDX-License-Identifier: Apache-2.0
"""Extents of Winograd's kernels that the plan and the kernels share: tiles of 2x2 results, and slabs of tiles.

Tiles are numbered row by row, image by image. A *slab* is some rows of one image's tiles, or all rows of some images:
it is transformed, multiplied and transformed back as a whole. Its *panel* has the source's pixels with channels
innermost, and zeros as padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.contract import Tiling
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling, blocking_of, spread
from tvm_convgrad.kernels.spec import ConvSpec, Phase

ELEMENTS = 16
"""Elements of a transformed tile, of 4x4."""


@dataclass(frozen=True)
class WinogradTiling(Tiling):
    """How Winograd's kernels are tiled. A "tile" of the transform is 2x2 results; tile_m and tile_n are the register
    tile of the matrix products.

    Attributes:
        tile_m: rows of the register tile: tiles of 2x2, or output channels in wgrad.
        tile_n: its columns, in vectors: result channels, or input channels in wgrad.
        slab_images: images of a slab.
        slab_rows: rows of tiles of each image of a slab: all of them if there is more than one image.
        cores_share_slab: whether all cores work on one slab, else each on one of its own.
    """

    tile_m: int
    tile_n: int
    slab_images: int
    slab_rows: int
    cores_share_slab: bool = True


@dataclass(frozen=True)
class TileSlabs:
    """The tiles of 2x2 pixels of a tensor, in slabs.

    Attributes:
        across, down: tiles of a row, rows of tiles of an image.
        rows: rows of tiles of each image of a slab; per_image: slabs of an image; number: of all slabs.
        tiles: of a slab.
    """

    across: int
    down: int
    rows: int
    per_image: int
    number: int
    tiles: int


def slabs_of(spec: ConvSpec, tiling: WinogradTiling) -> TileSlabs:
    """The slabs of a result."""
    _, h, w = (axis.count for axis in spec.phases[0][0])
    down, across = -(-h // 2), -(-w // 2)
    per_image = -(-down // tiling.slab_rows)
    number = per_image * (spec.batch // tiling.slab_images)
    tiles = tiling.slab_images * tiling.slab_rows * across
    return TileSlabs(across, down, tiling.slab_rows, per_image, number, tiles)


def panel_shape(spec: ConvSpec, tiling: WinogradTiling, machine: Machine) -> Blocking:
    """The source panel of one image of a slab, and the blocks of W, as those of an implicit GEMM of such a tiling."""
    axes = spec.phases[0][0]
    even: Phase = (axes[0], *(replace(axis, count=axis.count + axis.count % 2) for axis in axes[1:]))  # type: ignore[assignment]
    # Register tiles of two rows: a 2x2 tile is transformed with its padding, which is then zeros.
    own = GemmTiling("channels", 2 * even[2].count, tiling.tile_n, 2 * tiling.slab_rows, 1, tile_h=2)
    return blocking_of(spec, (even,), own, machine)


def padded_pitch(channels: int, multiple: int, lanes: int) -> int:
    """The distance of rows of so many channels."""
    return spread(round_up(channels, multiple), lanes)


__all__ = ["ELEMENTS", "TileSlabs", "WinogradTiling", "padded_pitch", "panel_shape", "slabs_of"]
