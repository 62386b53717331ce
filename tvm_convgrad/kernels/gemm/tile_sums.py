# SPDX-License-Identifier: Apache-2.0
"""The loop nest of the implicit GEMM over words with its sums in tile registers (`codegen.tile_product`).

It is that of `kernel.py` with vectors of channels. The pixels of a tile are in pieces of one row each, of up to ROWS
pixels: a piece and some words of W make one product of tiles. The panels are those that dot products read as well:

    A: a piece of the pixels, `rows` x `words`,             in a panel of the source, or in the source itself
    B: the same words of W of WORDS result channels,        in a panel of W

A step of the reduction are `words` words of a tap, or of a run of taps: as many as a register has room for and as
divide them all, so that there is no other last step.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_convgrad.codegen import tile_product
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Expr, Index, Loops, expr, load
from tvm_convgrad.codegen.register_tile import Sums
from tvm_convgrad.codegen.tile_product import REGISTERS, ROWS, WORDS
from tvm_convgrad.codegen.tir import Buffer
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.gemm.kernel import Panels, PhaseGroup
from tvm_convgrad.kernels.gemm.taps import TilePosition
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling
from tvm_convgrad.kernels.spec import ConvSpec, Phase

OPEN_LOADS = 0.1
"""The share of the time of loads that products do not hide. It is no measured number."""


@dataclass(frozen=True)
class TileShape:
    """What the tile registers of a loop nest hold.

    Attributes:
        pieces: of the pixels of a tile; with them there are pieces x tile_n registers of sums.
        rows: pixels of a piece.
        words: of a step of the reduction.
    """

    pieces: int
    rows: int
    words: int

    @classmethod
    def of(cls, spec: ConvSpec, tiling: GemmTiling, blocking: Blocking) -> TileShape:
        """The shape of a tiling that is valid."""
        of_row = -(-blocking.tile_w // ROWS)
        return cls(of_row * tiling.tile_h, blocking.tile_w // of_row, words_of(spec.source_channels * blocking.run))


def words_of(count: int) -> int:
    """The words of a step of the reduction, of `count` in all: their largest divisor of at most WORDS."""
    return max(n for n in range(1, WORDS + 1) if count % n == 0)


def registers_of(pieces: int, tile_n: int) -> int:
    """The tile registers that a step takes: the sums, and all of its operands."""
    return pieces * tile_n + pieces + tile_n


def invalid_tile(tiling: GemmTiling) -> str:
    """Why the sums of a tiling, which is valid but for that, cannot be kept in tile registers, or nothing."""
    if tiling.over_pixels:
        return "vector_axis is pixels; rows of tiles are pixels, so that it must be channels"
    tile_w = tiling.tile_m // tiling.tile_h
    of_row = -(-tile_w // ROWS)
    if tile_w % of_row:
        return f"a row of the tile has {tile_w} pixels; they must make {of_row} equal pieces of at most {ROWS}"
    used = registers_of(of_row * tiling.tile_h, tiling.tile_n)
    if used > REGISTERS:
        return f"{of_row * tiling.tile_h} x {tiling.tile_n} tiles of sums take {used} registers; there are {REGISTERS}"
    return ""


class TileSums:
    """The sums of a tile, which were stored to memory; made once they are complete."""

    def __init__(self, loops: Loops, registers: list[list[int]], rows: int, buffer: Buffer) -> None:
        self._buffer, self._width = buffer, len(registers[0]) * WORDS
        for piece, row in enumerate(registers):
            for j, register in enumerate(row):
                tile_product.store_tile(loops, register, buffer, piece * rows * self._width + j * WORDS, self._width)

    def value(self, row: int, column: int) -> Expr:
        """A vector of sums."""
        return load(self._buffer, row * self._width + column * WORDS, WORDS)


class TilePhaseGroup(PhaseGroup):
    """The loop nest of a group of phases over tile registers, whose shapes a work item sets once."""

    def __init__(
        self,
        frame: KernelFrame,
        spec: ConvSpec,
        phases: tuple[Phase, ...],
        tiling: GemmTiling,
        machine: Machine,
        dtype: str,
    ) -> None:
        """Describe the loop nest; `dtype` is that of the operands."""
        super().__init__(frame, spec, phases, tiling, machine)
        self._multiplied = dtype
        shape = self.shape = TileShape.of(spec, tiling, self.blocking)
        # The steps of these prefetches are single words: there is nothing to measure others on.
        self.block_prefetch.useful = self.tile_prefetch.of_rows = False
        pieces, columns = shape.pieces, tiling.tile_n
        numbers = iter(range(registers_of(pieces, columns)))
        self._sums = [[next(numbers) for _ in range(columns)] for _ in range(pieces)]
        self._pixels, self._weights = [next(numbers) for _ in range(pieces)], [next(numbers) for _ in range(columns)]
        sums, a, b = (shape.rows, WORDS), (shape.rows, shape.words), (shape.words, WORDS)
        self._shapes = [*[sums] * (pieces * columns), *[a] * pieces, *[b] * columns]
        self._stored: Buffer = None

    def begin_item(self) -> None:
        """Set the shapes of the tile registers, and allocate where sums are stored when they are complete."""
        super().begin_item()
        self._stored = self.loops.buffer("tile_sums", self.tiling.tile_m * self.tiling.tile_n * WORDS, self.dtype)
        tile_product.configure(self.loops, self._shapes)

    def end_item(self) -> None:
        """Clear the tile registers."""
        tile_product.release(self.loops)

    def sum(self, panels: Panels, position: TilePosition, next_block: list[Index], next_tile: Index | None) -> Sums:
        """The sum of a tile over taps and channels, in steps of `shape.words` words; nothing is prefetched."""
        loops, blocking, shape = self.loops, self.blocking, self.shape
        for row in self._sums:
            for register in row:
                tile_product.clear(loops, register)
        steps, block = self.spec.source_channels * blocking.run, blocking.channel_block
        first = loops.let(expr(self.tap_first.at(position.phase)), "first_tap")
        with self.taps.each(position) as tap:
            s_at = loops.let(expr(panels.source_at + self.start.at(first + tap)), "s_at")
            w_at = loops.let(expr(panels.weights_at + tap * (steps * block)), "w_at")
            with loops.loop(steps // shape.words, "c") as c:
                s = loops.let(expr(s_at + c * shape.words), "s")
                w = loops.let(expr(w_at + c * (shape.words * block)), "w")
                for j, register in enumerate(self._weights):
                    tile_product.load_tile(loops, register, panels.weights, w + j * WORDS, block)
                for piece, a in enumerate(self._pixels):
                    down, right = divmod(piece * shape.rows, blocking.tile_w)
                    at = s + (down * blocking.step_h + right * blocking.step_w)
                    tile_product.load_tile(loops, a, panels.source, at, blocking.step_w)
                    for register, b in zip(self._sums[piece], self._weights, strict=True):
                        tile_product.add_product(loops, register, a, b, self._multiplied)
        return TileSums(loops, self._sums, shape.rows, self._stored)


def step_cycles(spec: ConvSpec, tiling: GemmTiling, blocking: Blocking, machine: Machine) -> float:
    """Cycles of the reduction of a tile for each word: products, or loads, or the latency of a register of sums."""
    shape = TileShape.of(spec, tiling, blocking)
    products = shape.pieces * tiling.tile_n * shape.rows / machine.tile_rate
    loads = (shape.pieces * shape.rows + tiling.tile_n * shape.words) * machine.tile_load
    return (max(products, loads, machine.tile_latency) + loads * OPEN_LOADS) / shape.words


__all__ = ["TilePhaseGroup", "TileShape", "invalid_tile", "step_cycles", "words_of"]
