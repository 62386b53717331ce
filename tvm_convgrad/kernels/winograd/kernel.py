# SPDX-License-Identifier: Apache-2.0
"""Forward and dgrad of 3x3 kernels by Winograd's transform: 16 multiplications where the sum over taps has 36.

For each of the 16 elements of a transformed tile one matrix product: [tiles x source channels] times [source channels x
result channels]. Vectors run over channels everywhere; where channels are not contiguous, squares are transposed in
registers when the source is packed and when the result is stored.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, expr, lanes_below, lanes_of, load, smaller, splat
from tvm_convgrad.codegen.packing import transpose
from tvm_convgrad.codegen.register_tile import Tile
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.epilogue import finished
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.gemm.pairs import Operand
from tvm_convgrad.kernels.gemm.weight import WeightPanel
from tvm_convgrad.kernels.spec import ConvSpec
from tvm_convgrad.kernels.vectors import load_vector, store_vector, where
from tvm_convgrad.kernels.winograd.shape import ELEMENTS, WinogradTiling, padded_pitch
from tvm_convgrad.kernels.winograd.tiles import TransformedTiles, result_rule, source_rule, twice, weight_rule


class WinogradLoops:
    """The loops. The transformed weight U is [element][block][source channel][channel of the block], the products M
    are [element][tile][result channel]."""

    def __init__(self, frame: KernelFrame, spec: ConvSpec, tiling: WinogradTiling, machine: Machine) -> None:
        loops = self.loops = frame.loops
        self.spec, self.tiling, self.bias, self.epilogue = spec, tiling, frame.bias, frame.epilogue
        source, weight, self.result = frame.tensors
        self.dtype, self.lanes = spec.dtype, machine.lanes(spec.dtype)
        self.tiles = TransformedTiles(loops, spec, tiling, machine, source, source_rule, 1)
        self.shape, self.slabs = self.tiles.shape, self.tiles.slabs
        self.weights = WeightPanel(loops, spec, self.shape, machine, False, Operand(weight, spec.dtype))
        block = self.shape.channel_block
        self.u_plane = padded_pitch(self.shape.channel_blocks * spec.source_channels * block, self.lanes, self.lanes)
        self.m_pitch = padded_pitch(self.shape.channel_blocks * block, self.lanes, self.lanes)
        self.m_plane = padded_pitch(self.slabs.tiles * self.m_pitch, self.lanes, self.lanes)

    def emit(self) -> None:
        """All of the work: W, then slab after slab, or slabs side by side."""
        loops, slabs, shared = self.loops, self.slabs, self.tiling.cores_share_slab
        inner, outer = ("parallel", "serial") if shared else ("serial", "parallel")
        u = loops.buffer("u", ELEMENTS * self.u_plane, self.dtype)
        with loops.loop(self.shape.channel_blocks, "block", "parallel") as block:
            self._transform_weight(u, block)
        buffers = self._buffers() if shared else None
        with loops.loop(slabs.number, "slab", outer) as slab:
            panel, tiles, products = buffers or self._buffers()
            image, row = loops.divmod(slab, slabs.per_image)
            image = loops.let(expr(image * self.tiling.slab_images), "image")
            row = loops.let(expr(row * slabs.rows), "row")
            with loops.loop(self.tiles.panel_rows, "number", inner) as number:
                self.tiles.pack(panel, number, image, row)
            with loops.loop(self.tiling.slab_images * slabs.rows, "number", inner) as number:
                self.tiles.transform(panel, tiles, number)
            with loops.loop(ELEMENTS * self.shape.channel_blocks, "product", inner) as product:
                self._multiply(u, tiles, products, product)
            with loops.loop(self.tiling.slab_images * slabs.rows, "number", inner) as number:
                self._store_rows(products, image, row, number)

    def _buffers(self) -> tuple[Buffer, Buffer, Buffer]:
        """A panel, transformed tiles, and products."""
        return (*self.tiles.allocate(), self.loops.buffer("products", ELEMENTS * self.m_plane, self.dtype))

    def _transform_weight(self, u: Buffer, block: Index) -> None:
        """Transform a block of result channels of W."""
        loops, width, lanes, channels = self.loops, self.shape.channel_block, self.lanes, self.spec.source_channels
        panel = loops.buffer("w_panel", self.weights.size, self.dtype)
        self.weights.pack(panel, 0, 0, block)
        tap, into = channels * width, loops.let(expr(block * (channels * width)), "into")
        with loops.loop(tap // lanes, "vector") as vector:
            at = loops.let(expr(vector * lanes), "at")
            rows = [[loops.let(load(panel, at + (3 * y + x) * tap, lanes), "g") for x in range(3)] for y in range(3)]
            for element, value in enumerate(twice(loops, rows, weight_rule)):
                loops.store(u, into + at + element * self.u_plane, value)

    def _multiply(self, u: Buffer, tiles: Buffer, products: Buffer, number: Index) -> None:
        """Multiply one element of all the slab's tiles, for a block of result channels."""
        loops, tiling, lanes, block = self.loops, self.tiling, self.lanes, self.shape.channel_block
        channels, pitch = self.spec.source_channels, self.tiles.pitch
        element, b = loops.divmod(number, self.shape.channel_blocks)
        u_at = loops.let(expr(element * self.u_plane + b * (channels * block)), "u_at")
        v_at = loops.let(expr(element * self.tiles.plane), "v_at")
        m_at = loops.let(expr(element * self.m_plane + b * block), "m_at")
        with loops.loop(-(-self.slabs.tiles // tiling.tile_m), "rows") as row:
            t = loops.let(expr(smaller(row * tiling.tile_m, self.slabs.tiles - tiling.tile_m)), "t")
            tile = Tile(loops, tiling.tile_m, tiling.tile_n, lanes, self.dtype)
            first = loops.let(expr(v_at + t * pitch), "first")
            with loops.loop(channels, "c") as c:
                scalar, vector = loops.let(expr(first + c), "a_at"), loops.let(expr(u_at + c * block), "b_at")
                tile.add(lambda i: load(tiles, scalar + i * pitch), lambda j: load(u, vector + j * lanes, lanes))
            to = loops.let(expr(m_at + t * self.m_pitch), "to")
            for i in range(tiling.tile_m):
                for j in range(tiling.tile_n):
                    loops.store(products, to + i * self.m_pitch + j * lanes, tile.value(i, j))

    # -- the result ---------------------------------------------------------------------------------------------------

    def _store_rows(self, products: Buffer, image: Index, row: Index, number: Index) -> None:
        """Store the two rows of results of row `number` of the slab's tiles, a vector of channels at a time."""
        loops, view, lanes = self.loops, self.spec.result, self.lanes
        i, below = (0, number) if self.tiling.slab_images == 1 else loops.divmod(number, self.slabs.rows)
        y = loops.let(expr(2 * (row + below)), "y")
        base = (image + i) * view.batch + y * view.spatial[1]
        base = loops.let(expr(base), "out")
        first = loops.let(expr(number * (self.slabs.across * self.m_pitch)), "first")
        transposes = view.channel != 1
        strip = loops.buffer("strip", self._strip_row * 2 * lanes, self.dtype) if transposes else None
        with loops.loop(-(-self.spec.result_channels // lanes), "vector") as vector:
            channel = loops.let(expr(vector * lanes), "channel")
            with loops.loop(self.slabs.across, "x") as x:
                at = loops.let(expr(first + x * self.m_pitch + channel), "at")
                rows = [[self._product(products, at, 4 * r + c) for c in range(4)] for r in range(4)]
                for place, value in enumerate(twice(loops, rows, result_rule)):
                    r, c = divmod(place, 2)
                    if transposes:
                        loops.store(strip, (r * self._strip_row + 2 * x + c) * lanes, value)
                    else:
                        with self._inside(y + r, 1, r), self._inside(2 * x + c, 2, c):
                            to = base + r * view.spatial[1] + (2 * x + c) * view.spatial[2] + channel
                            self._store(value, to, channel, self._channel_mask(channel))
            if transposes:
                for r in range(2):
                    with self._inside(y + r, 1, r):
                        self._store_transposed(strip, r, base + r * view.spatial[1], channel)

    @property
    def _strip_row(self) -> int:
        """Pixels that a row of a strip has room for."""
        return round_up(self.spec.result.extents[2], self.lanes) + 1

    def _product(self, products: Buffer, at: Index, element: int) -> Expr:
        return self.loops.let(load(products, at + element * self.m_plane, self.lanes), "p")

    def _channel_mask(self, channel: Index) -> Expr | None:
        channels = self.spec.result_channels
        return lanes_below(channel, channels, self.lanes) if channels % self.lanes else None

    def _inside(self, position: Index, axis: int, second: int) -> AbstractContextManager[None]:
        """Statements for the first or second row or column of a tile; the second may lie outside of an odd extent."""
        extent = self.spec.result.extents[axis]
        return where(self.loops, expr(position) < extent if second and extent % 2 else None)

    def _store_transposed(self, strip: Buffer, r: int, base: Index, first: Index) -> None:
        """Store a strip's row to channels that are not contiguous, by transposing squares of pixels x channels."""
        loops, view, lanes = self.loops, self.spec.result, self.lanes
        width, channels = view.extents[2], self.spec.result_channels
        with loops.loop(-(-width // lanes), "square") as square:
            x = loops.let(expr(square * lanes), "x")
            at = loops.let(expr((r * self._strip_row + x) * lanes), "at")
            rows = [loops.let(load(strip, at + i * lanes, lanes), "row") for i in range(lanes)]
            mask = lanes_below(x, width, lanes) if width % lanes else None
            for i, value in enumerate(transpose(loops, rows)):
                to = base + (first + i) * view.channel + x
                with where(loops, expr(first + i) < channels if channels % lanes else None):
                    self._store(value, to, first + i, mask)

    def _store(self, total: Expr, to: Index, channel: Index, mask: Expr | None) -> None:
        """Store a vector of results with the epilogue."""
        loops, lanes = self.loops, lanes_of(total)
        to = loops.let(expr(to), "to")

        def bias() -> Expr:
            index = expr(channel)
            if self.spec.result.channel == 1:
                return load_vector(self.bias, index, lanes, mask)
            return splat(load(self.bias, index), lanes)

        value = finished(self.epilogue, total, self.dtype, bias, lambda: load_vector(self.result, to, lanes, mask))
        store_vector(loops, self.result, to, value, mask)


__all__ = ["WinogradLoops"]
