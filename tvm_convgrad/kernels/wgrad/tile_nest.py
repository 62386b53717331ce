# SPDX-License-Identifier: Apache-2.0
"""The loop nest of wgrad over words with its sums in tile registers (`codegen.tile_product`).

It is that of `kernel.py` with panels of its own (`tile_panels.py`). The m of a tile are in equal pieces of up to ROWS:

    A: some words of the pixels of a slab, of a piece of m,         in a panel of dY
    B: the X of the same pixels at a tap, of WORDS n,               in a panel of X

The sums of a tap and a block stay in registers over a slab, and in the work item's buffer from slab to slab: registers
are loaded from there and stored to it.
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm_convgrad.codegen import tile_product, tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, choose, expr, quotient, remainder
from tvm_convgrad.codegen.tile_product import WORDS, TileGrid
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.wgrad.kernel import Into, Place, WgradNest
from tvm_convgrad.kernels.wgrad.panels import Slab
from tvm_convgrad.kernels.wgrad.scalars import Scalars
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, WgradTiling
from tvm_convgrad.kernels.wgrad.tile_panels import DataTiles, GradTiles
from tvm_convgrad.kernels.wgrad.tile_shape import TileShape


class TileWgradNest(WgradNest):
    """The loop nest over tile registers, whose shapes a work item sets once."""

    def __init__(self, frame: KernelFrame, spec: WgradSpec, tiling: WgradTiling, machine: Machine, dtype: str) -> None:
        """Describe the loop nest; `dtype` is that of the operands."""
        self.shape = shape = TileShape.of(spec, tiling)
        dy, x, _ = frame.tensors
        super().__init__(frame, spec, tiling, machine, dy, x)
        self._data, self._multiplied = DataTiles(self, shape), dtype
        self._grid = TileGrid(shape.pieces, tiling.tile_n)

    @property
    def panel_size(self) -> int:
        """Words of the panel of X."""
        return self.shape.panel_size

    def _tap_shifts(self) -> list[int]:
        """Where in a slice of the panel of X each tap's words begin."""
        return [self.shape.tap_shift(self.spec, tap) for tap in self.blocks.taps]

    def operand(self) -> Scalars:
        """The panel of dY."""
        return GradTiles(self, self.shape)

    def begin_item(self) -> None:
        """Set the shapes of the tile registers."""
        tile_product.configure(self.loops, self._grid.shapes(self.shape.rows, self.shape.words))

    def end_item(self) -> None:
        """Clear the tile registers."""
        tile_product.release(self.loops)

    def pack_vectors(self, slab: Slab, first_in: Index) -> None:
        """Pack the rows and columns of X that the taps of a block of n read."""
        self._data.pack(slab, first_in)

    def add_sums(self, slab: Slab, scalars: Scalars, offsets: list[int], place: Place, into: Into) -> None:
        """Add the products of one tap and block of m over the pixels of a slab; slab 0 begins with zeros."""
        loops, shape, spec = self.loops, self.shape, self.spec
        (tap, _, out_block, local_block), (sums, base, slab_number) = place, into
        at = loops.let(base + tap * self.blocks.tile_size, "tile_at")
        places = [
            (register, (piece * shape.rows * self.tiling.tile_n + j) * WORDS)
            for piece, row in enumerate(self._grid.sums)
            for j, register in enumerate(row)
        ]
        adds = None if isinstance(slab_number, int) else slab_number > 0
        if adds is not None:
            with loops.when(adds):
                for register, offset in places:
                    tile_product.load_tile(loops, register, sums, at + offset, shape.width)
        with loops.otherwise(adds) if adds is not None else nullcontext():
            for register, _ in places:
                tile_product.clear(loops, register)
        with loops.loop(slab.slices, "d") as d:
            number = loops.let(slab.first_slice + d, "number")
            a_slice, _, _ = scalars.at(slab, number, d, out_block, local_block)
            a_slice = loops.let(a_slice, "a_slice")
            b_slice = loops.let(expr(self.shifts.at(tap) + d * shape.slice_size), "b_slice")
            steps = quotient(slab.rows * shape.pitch, shape.words)
            if not self.all_valid[0]:
                first, end = (bound.at(tap) for bound in self.valid[0])
                depth = loops.let(remainder(number, spec.dy.extents[0]), "depth")
                steps = choose(tir.And(depth >= first, depth < end), steps, 0)
            with loops.loop(loops.let(steps, "steps"), "k") as k:
                a = loops.let(expr(a_slice + k * shape.words), "a")
                b = loops.let(expr(b_slice + k * (shape.words * shape.width)), "b")

                def load_grad(register: int, piece: int, a: Index = a) -> None:
                    start = a + piece * shape.rows * shape.grad_pitch
                    tile_product.load_tile(loops, register, scalars.buffer, start, shape.grad_pitch)

                def load_data(register: int, j: int, b: Index = b) -> None:
                    tile_product.load_tile(loops, register, slab.panel, b + j * WORDS, shape.width)

                self._grid.add_products(loops, load_grad, load_data, self._multiplied)
        for register, offset in places:
            tile_product.store_tile(loops, register, sums, at + offset, shape.width)


__all__ = ["TileWgradNest"]
