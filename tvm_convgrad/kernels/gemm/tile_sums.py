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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm_convgrad.codegen import tile_product
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Expr, Index, Loops, expr, load
from tvm_convgrad.codegen.register_tile import Sums
from tvm_convgrad.codegen.tile_product import REGISTERS, ROWS, WORDS, TileGrid
from tvm_convgrad.codegen.tir import Buffer
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.gemm.cycles import block_bytes
from tvm_convgrad.kernels.gemm.kernel import Panels, PhaseGroup
from tvm_convgrad.kernels.gemm.taps import TilePosition
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling
from tvm_convgrad.kernels.spec import ConvSpec, Phase

OPEN_LOADS = 0.1
"""The share of the time of loads that products do not hide. It is no measured number."""

GRID_FACTORS = {(1, 2): 1.0, (2, 1): 1.07, (2, 2): 1.18, (1, 3): 1.18, (1, 1): 1.29, (3, 1): 1.29}
"""The relative time of a product in each grid (pieces, columns) that is planned: the mean of a core whose products are
fast and of one whose are slow, over 29 layers in three directions on an Emerald Rapids. Others were not timed."""

KEPT_PANEL = 0.75
"""The share of the first-level cache that W's panel may take to stay there while a spatial block is computed."""

STORED, STORED_PAIR = 3.0, 1.75
"""Cycles to store a vector of complete sums by way of memory, alone and with its neighbour; on an Emerald Rapids."""


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


def invalid_tile(tiling: GemmTiling) -> str:
    """Why the sums of a tiling, which is valid but for that, cannot be kept in tile registers, or nothing."""
    if tiling.over_pixels:
        return "vector_axis is pixels; rows of tiles are pixels, so that it must be channels"
    if tiling.exact_columns:
        return "exact_columns is set; the rows of tile registers are always computed, so that it must not be"
    if tiling.channel_parts > 1:
        return f"channel_parts is {tiling.channel_parts}; tile registers begin with zeros, so that it must be 1"
    tile_w = tiling.tile_m // tiling.tile_h
    of_row = -(-tile_w // ROWS)
    if tile_w % of_row:
        return f"a row of the tile has {tile_w} pixels; they must make {of_row} equal pieces of at most {ROWS}"
    used = TileGrid(of_row * tiling.tile_h, tiling.tile_n).count
    if used > REGISTERS:
        return f"{of_row * tiling.tile_h} x {tiling.tile_n} tiles of sums take {used} registers; there are {REGISTERS}"
    return ""


class TileSums:
    """The complete sums of a tile, in tile registers; `complete` stores them to a buffer for the values."""

    def __init__(self, loops: Loops, registers: list[list[int]], rows: int, buffer: Buffer) -> None:
        self._loops, self._registers, self._rows, self._buffer = loops, registers, rows, buffer
        self.columns = len(registers[0])
        self._width = self.columns * WORDS

    def complete(self) -> None:
        """Store the registers to the buffer."""
        self.store(self._buffer, 0, [i * self._width for i in range(len(self._registers) * self._rows)])

    def value(self, row: int, column: int) -> Expr:
        """A vector of sums."""
        return load(self._buffer, row * self._width + column * WORDS, WORDS)

    def store(self, buffer: Buffer, at: Index, offsets: Sequence[int]) -> None:
        """Store all registers; the rows of a piece are equally far apart."""
        for piece, row in enumerate(self._registers):
            first, *others = offsets[piece * self._rows : (piece + 1) * self._rows]
            stride = others[0] - first if others else self._width
            for j, register in enumerate(row):
                tile_product.store_tile(self._loops, register, buffer, at + first + j * WORDS, stride)


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
        self._grid = TileGrid(shape.pieces, tiling.tile_n)
        self._stored: Buffer = None

    def begin_item(self) -> None:
        """Set the shapes of the tile registers, and allocate where complete sums are stored for their values."""
        super().begin_item()
        if not self.results.uses_staging:
            self._stored = self.loops.buffer("tile_sums", self.tiling.tile_m * self.tiling.tile_n * WORDS, self.dtype)
        tile_product.configure(self.loops, self._grid.shapes(self.shape.rows, self.shape.words))

    def end_item(self) -> None:
        """Clear the tile registers."""
        tile_product.release(self.loops)

    def widths(self, channel_block: Index) -> Iterator[int]:
        """All columns of every block: the tile registers have them anyway."""
        yield self.tiling.tile_n

    def sum(
        self,
        panels: Panels,
        position: TilePosition,
        next_block: list[Index],
        next_tile: Index | None,
        columns: int,
    ) -> Sums:
        """The sum of a tile over taps and channels, in steps of `shape.words` words; nothing is prefetched."""
        loops, blocking, shape = self.loops, self.blocking, self.shape
        for row in self._grid.sums:
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

                def load_pixels(register: int, piece: int, s: Index = s) -> None:
                    down, right = divmod(piece * shape.rows, blocking.tile_w)
                    at = s + (down * blocking.step_h + right * blocking.step_w)
                    tile_product.load_tile(loops, register, panels.source, at, blocking.step_w)

                def load_weights(register: int, j: int, w: Index = w) -> None:
                    tile_product.load_tile(loops, register, panels.weights, w + j * WORDS, block)

                self._grid.add_products(loops, load_pixels, load_weights, self._multiplied)
        return TileSums(loops, self._grid.sums, shape.rows, self._stored)


def step_cycles(
    spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, blocking: Blocking, machine: Machine
) -> float:
    """Cycles of the reduction of a tile for each word: products, or loads, or the latency of a register of sums.

    W's panel is near from the second tile on that reads it, and the source of a spatial block if both fit the
    first-level cache. A line that is loaded from afar serves all taps of a row of the kernel;
    their number is taken as the root of the number of taps.
    """
    shape, element = TileShape.of(spec, tiling, blocking), DTYPE_BYTES[spec.dtype]
    panel = blocking.channel_block * blocking.tap_count * spec.source_channels * element
    source = block_bytes(spec, blocking, tiling)
    in_source_order = tiling.order == "source"
    far_w = 1.0
    if panel <= machine.l1_bytes * KEPT_PANEL:
        far_w = len(phases) / (tiling.block_h // tiling.tile_h * tiling.block_tiles) if in_source_order else 0.0
    kept = in_source_order and source + panel <= machine.l1_bytes
    far_source = 0.0 if kept else max(1, blocking.tap_count) ** -0.5
    near, far = machine.tile_load, machine.tile_load_far
    loads = shape.pieces * shape.rows * (near + (far - near) * far_source)
    loads += tiling.tile_n * shape.words * (near + (far - near) * min(1.0, far_w))
    return grid_cycles(TileGrid(shape.pieces, tiling.tile_n), shape.rows, loads, machine) / shape.words


def grid_cycles(grid: TileGrid, rows: int, loads: float, machine: Machine) -> float:
    """Cycles of a step of a grid whose pieces have `rows` rows, and whose operands take `loads` cycles to load."""
    factor = GRID_FACTORS.get((grid.pieces, grid.columns), max(GRID_FACTORS.values()))
    products = grid.pieces * grid.columns * rows / machine.tile_rate * factor
    return max(products, loads, machine.tile_latency) + loads * OPEN_LOADS


def stored_cycles(spec: ConvSpec, tiling: GemmTiling) -> float:
    """Cycles to store a vector of complete sums to a result with contiguous channels, as `ResultStore` does."""
    ragged = spec.result_channels % (tiling.tile_n * WORDS) != 0
    share = tiling.tile_n // 2 * 2 / tiling.tile_n if spec.result.dtype == "bfloat16" and not ragged else 0.0
    return STORED + (STORED_PAIR - STORED) * share


__all__ = [
    "GRID_FACTORS",
    "TilePhaseGroup",
    "TileShape",
    "grid_cycles",
    "invalid_tile",
    "step_cycles",
    "stored_cycles",
    "words_of",
]
