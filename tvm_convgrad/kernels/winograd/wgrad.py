# SPDX-License-Identifier: Apache-2.0
"""wgrad of 3x3 kernels by Winograd's transform: 16 multiplications for each 2x2 pixels of dY where the sum has 36.

For each of the 16 elements of a transformed tile one matrix product: [output channels x tiles] times [tiles x input
channels], added up over all slabs of tiles. At the end the sums are transformed to dW, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, choose, expr, load, load_sum, smaller, zero
from tvm_convgrad.codegen.register_tile import Tile
from tvm_convgrad.codegen.tir import Buffer
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.spec import AxisPhase, ConvSpec
from tvm_convgrad.kernels.wgrad.bias import bias_gradient
from tvm_convgrad.kernels.wgrad.spec import WgradSpec
from tvm_convgrad.kernels.wgrad.store import DwBlocks, DwStore
from tvm_convgrad.kernels.winograd.shape import ELEMENTS, WinogradTiling
from tvm_convgrad.kernels.winograd.tiles import TransformedTiles, grad_rule, kernel_rule, source_rule, twice


def grad_source(forward: ConvSpec, spec: WgradSpec) -> ConvSpec:
    """dY as the source of a 1x1 kernel: it is the result of `forward`."""
    axes = tuple(AxisPhase(axis.count, 0, ((0, 0),)) for axis in forward.phases[0][0])
    return replace(forward, source=spec.dy, source_channels=spec.out_channels, phases=((axes,),))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Tiles:
    """The transformed tiles of X and of dY, with the memory of their panels."""

    x_panel: Buffer
    x: Buffer
    dy_panel: Buffer
    dy: Buffer


class WinogradWgrad:
    """The loops. Sums are [part][element][block of input channels][block of output channels][output][input channel]."""

    def __init__(
        self, frame: KernelFrame, forward: ConvSpec, spec: WgradSpec, tiling: WinogradTiling, machine: Machine
    ) -> None:
        loops = self.loops = frame.loops
        self.frame, self.spec, self.tiling, self.machine = frame, spec, tiling, machine
        self.dtype, self.lanes = forward.dtype, machine.lanes(forward.dtype)
        self.blocks = DwBlocks(spec, tiling.tile_m, tiling.tile_n, self.lanes)
        dy, x, self.dw = frame.tensors
        self.x = TransformedTiles(loops, forward, tiling, machine, x, source_rule, self.blocks.width)
        self.dy = TransformedTiles(loops, grad_source(forward, spec), tiling, machine, dy, grad_rule, self.lanes)
        self.slabs = self.x.slabs
        self.plane = self.blocks.in_blocks * self.blocks.out_blocks * self.blocks.tile_size
        most = 1 if tiling.cores_share_slab else machine.parts
        self.per_part = -(-self.slabs.number // most)
        self.parts = -(-self.slabs.number // self.per_part)

    def emit(self) -> None:
        """The sums of all slabs, then dW."""
        loops, parts, slabs, blocks = self.loops, self.parts, self.slabs, self.blocks
        inner, outer = ("parallel", "serial") if self.tiling.cores_share_slab else ("serial", "parallel")
        size = ELEMENTS * self.plane
        sums = loops.buffer("sums", parts * size, self.dtype)
        bias = bias_gradient(self.frame, self.machine, self.spec.dy, self.spec.dtype, self.spec.out_channels)
        if bias is not None:
            bias.allocate(parts)
        with loops.loop(parts, "part", outer) as part:
            tiles = _Tiles(*self.x.allocate(), *self.dy.allocate())
            first = loops.let(expr(part * self.per_part), "first_slab")
            with loops.loop(smaller(self.per_part, slabs.number - first), "number") as number:
                image, row = loops.divmod(first + number, slabs.per_image)
                image = loops.let(expr(image * self.tiling.slab_images), "image")
                row = loops.let(expr(row * slabs.rows), "row")
                self._transform(tiles, image, row, inner)
                with loops.loop(ELEMENTS * blocks.in_blocks, "product", inner) as product:
                    self._multiply(tiles, sums, part * size, product, number)
                if bias is not None:
                    height = self.spec.dy.extents[1]
                    rows = smaller(2 * slabs.rows, height - 2 * row)
                    slab = (image, self.tiling.slab_images, loops.let(expr(2 * row), "y"), rows)
                    shares = self.machine.parts if self.tiling.cores_share_slab else 1
                    with loops.loop(shares, "share", inner) as share:
                        bias.add(part, share, shares, slab, 1)
        with loops.loop(blocks.in_blocks * blocks.out_blocks, "block", "parallel") as block:
            self._write(sums, size, block)
        if bias is not None:
            bias.write()

    def _transform(self, tiles: _Tiles, image: Index, row: Index, kind: str) -> None:
        """Transform a slab's tiles of X and of dY."""
        loops = self.loops
        for side, panel in ((self.x, tiles.x_panel), (self.dy, tiles.dy_panel)):
            with loops.loop(side.panel_rows, "number", kind) as number:
                side.pack(panel, number, image, row)
        with loops.loop(self.tiling.slab_images * self.slabs.rows, "number", kind) as number:
            self.x.transform(tiles.x_panel, tiles.x, number)
            self.dy.transform(tiles.dy_panel, tiles.dy, number)

    def _multiply(self, tiles: _Tiles, sums: Buffer, of_part: Index, number: Index, slab: Index) -> None:
        """Multiply one element of the slab's tiles, for a block of input channels and all of output channels."""
        loops, tiling, lanes, blocks = self.loops, self.tiling, self.lanes, self.blocks
        element, block = loops.divmod(number, blocks.in_blocks)
        x_at = loops.let(expr(element * self.x.plane + block * blocks.width), "x_at")
        with loops.loop(blocks.out_blocks, "out_block") as out_block:
            dy_at = loops.let(expr(element * self.dy.plane + blocks.first_out(out_block)), "dy_at")
            tile = Tile(loops, tiling.tile_m, tiling.tile_n, lanes, self.dtype)
            with loops.loop(self.slabs.tiles, "t") as t:
                scalar = loops.let(expr(dy_at + t * self.dy.pitch), "a_at")
                vector = loops.let(expr(x_at + t * self.x.pitch), "b_at")
                tile.add(lambda i: load(tiles.dy, scalar + i), lambda j: load(tiles.x, vector + j * lanes, lanes))
            to = loops.let(expr(of_part + (number * blocks.out_blocks + out_block) * blocks.tile_size), "to")
            for i in range(tiling.tile_m):
                for j in range(tiling.tile_n):
                    at = to + (i * blocks.width + j * lanes)
                    # The buffer has no sums before the first slab.
                    before = choose(expr(slab) > 0, load(sums, at, lanes), zero(self.dtype, lanes))
                    loops.store(sums, at, before + tile.value(i, j))

    def _write(self, sums: Buffer, size: int, number: Index) -> None:
        """Add a block's sums over parts, transform them to the gradients of its taps, and store these."""
        loops, lanes, blocks, tile_size = self.loops, self.lanes, self.blocks, self.blocks.tile_size
        block, out_block = loops.divmod(number, blocks.out_blocks)
        found = loops.buffer("taps", len(blocks.taps) * tile_size, self.dtype)
        base = loops.let(expr(number * tile_size), "base")
        with loops.loop(tile_size // lanes, "vector") as vector:
            at = loops.let(expr(base + vector * lanes), "at")
            rows = [
                [
                    loops.let(load_sum(sums, at + (4 * y + x) * self.plane, lanes, self.parts, size), "s")
                    for x in range(4)
                ]
                for y in range(4)
            ]
            for tap, value in enumerate(twice(loops, rows, kernel_rule)):
                loops.store(found, tap * tile_size + vector * lanes, value)
        store = DwStore(loops, blocks, self.machine, self.dw, self.frame.epilogue.accumulate)
        store.write(found, 0, 1, 0, 0, out_block, block * blocks.width)


__all__ = ["WinogradWgrad", "grad_source"]
