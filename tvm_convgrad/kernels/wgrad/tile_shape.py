# SPDX-License-Identifier: Apache-2.0
"""The sizes of wgrad's tile registers and of their two panels, which the plan and the kernel share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from tvm_convgrad.codegen.tile_product import REGISTERS, ROWS, WORDS, TileGrid
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, WgradTiling

FEW_CHANNELS = WORDS // 2
"""The most input channels of which all taps along the width are columns of the product: they fill few by themselves."""


@dataclass(frozen=True)
class TileShape:
    """What tile registers hold, and the panels that they are loaded from, of a spec and a tiling.

        A: [block of m][depth slice][m][row][word],                               words of dY, rows of `grad_pitch`
        B: [depth slice][tap along d][tap along w][row modulo stride][row][word][n],    words of X

    A word of a row of A is two pixels of dY, and the same word of B the two pixels of X that a tap multiplies them
    with: zeros where X has none, and where the row of dY ends. The words of all rows of a slab and a tap are contiguous
    in both, so that steps of the reduction run across rows. Sizes are in words.

    Attributes:
        pieces: of the m of a tile; with them there are pieces x tile_n registers of sums.
        rows: m of a piece.
        words: of a step of the reduction; they divide the words of every slab.
        pitch: words of a row of dY; those behind its last pixel are zeros.
        grad_pitch: words of a slice of an m: an odd number of cache lines, so that rows of a tile lie in other sets.
        phases: the rows of X modulo the stride that taps read; each phase has its rows together.
        phase_rows: rows of a phase; reach: those of them beyond the slab's own.
        width: n of a block.
        tap_size: of a tap along the width; slice_size: of a slice of dY in B.
        panel_size: of B. Packed vectors reach behind the last row.
    """

    pieces: int
    rows: int
    words: int
    pitch: int
    grad_pitch: int
    phases: tuple[int, ...]
    phase_rows: int
    reach: int
    width: int
    tap_size: int
    slice_size: int
    panel_size: int

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(spec: WgradSpec, tiling: WgradTiling) -> TileShape:
        """The shape of a tiling that is valid."""
        pieces = -(-tiling.tile_m // ROWS)
        height, columns = spec.dy.extents[1:]
        pitch, words = steps_of(-(-columns // 2), math.gcd(tiling.slab_h, height))
        lines = -(-(tiling.slab_h * pitch + WORDS) // WORDS)
        stride, offsets = spec.strides[1], [k * spec.dilation[1] for k in range(spec.kernel[1])]
        phases = tuple(sorted({offset % stride for offset in offsets}))
        reach = offsets[-1] // stride
        width = tiling.tile_n * WORDS
        tap_size = len(phases) * (tiling.slab_h + reach) * pitch * width
        slice_size = spec.kernel[0] * spec.kernel[2] * tap_size
        return TileShape(
            pieces=pieces,
            rows=tiling.tile_m // pieces,
            words=words,
            pitch=pitch,
            grad_pitch=(lines + 1 - lines % 2) * WORDS,
            phases=phases,
            phase_rows=tiling.slab_h + reach,
            reach=reach,
            width=width,
            tap_size=tap_size,
            slice_size=slice_size,
            panel_size=tiling.slab_d * slice_size + WORDS * width,
        )

    def tap_shift(self, spec: WgradSpec, tap: tuple[int, ...]) -> int:
        """Where in a slice of B the words of a tap begin."""
        d, h, w = tap
        row, phase = divmod(h * spec.dilation[1], spec.strides[1])
        rows = self.phases.index(phase) * self.phase_rows + row
        return (d * spec.kernel[2] + w) * self.tap_size + rows * self.pitch * self.width


@lru_cache(maxsize=4096)
def steps_of(words: int, rows: int) -> tuple[int, int]:
    """The words of a row with zeros behind its own, and of a step, so that steps divide `rows` rows.

    As few steps as possible, then as few zeros: rows of 7 words are not changed if there are two of them.
    """
    found = []
    for step in range(1, WORDS + 1):
        unit = step // math.gcd(step, rows)
        pitch = round_up(words, unit)
        found.append((Fraction(pitch, step), pitch, step))
    _, pitch, step = min(found)
    return pitch, step


def registers_refusal(tiling: WgradTiling) -> str:
    """Why the sums of a tiling cannot be kept in tile registers, or nothing."""
    pieces = -(-tiling.tile_m // ROWS)
    if tiling.tile_m % pieces:
        return f"tile_m is {tiling.tile_m}; it must make {pieces} equal pieces of at most {ROWS}"
    used = TileGrid(pieces, tiling.tile_n).count
    if used > REGISTERS:
        return f"{pieces} x {tiling.tile_n} tiles of sums take {used} registers; there are {REGISTERS}"
    return ""


def with_few_taps(spec: WgradSpec) -> WgradSpec:
    """The spec; of few input channels, one whose n are pairs of tap along the width and input channel.

    Where channels are contiguous in X, the pairs of a pixel must be so as well, as they are packed by vectors.
    """
    apart = spec.x.channel == 1 and (spec.dilation[2] != 1 or spec.x.spatial[2] != spec.in_channels)
    if spec.in_channels > FEW_CHANNELS or spec.kernel[2] == 1 or apart:
        return spec
    d, h, _ = spec.kernel
    return replace(spec, kernel=(d, h, 1), in_channels=spec.kernel[2] * spec.in_channels, taps_of=spec)


__all__ = ["TileShape", "registers_refusal", "steps_of", "with_few_taps"]
