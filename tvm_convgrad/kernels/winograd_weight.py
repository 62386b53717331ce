# SPDX-License-Identifier: Apache-2.0
"""wgrad of 3x3 kernels by Winograd's transform: 16 multiplications for each 2x2 pixels of dY where the sum has 36.

For each of the 16 elements of a transformed tile one matrix product: [output channels x tiles] times [tiles x input
channels], added up over all chunks of tiles. At the end the sums are transformed to dW, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gather_source import divided
from tvm_convgrad.kernels.loops import Loops, choose, expr, load, load_sum, smaller, zero
from tvm_convgrad.kernels.spec import AxisPhase, Gather, forward_gather
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile
from tvm_convgrad.kernels.weight_frame import WeightFrame
from tvm_convgrad.kernels.weight_spec import WeightSpec, weight_spec
from tvm_convgrad.kernels.weight_write import WeightWriter
from tvm_convgrad.kernels.winograd_shape import ELEMENTS, WinogradTiling
from tvm_convgrad.kernels.winograd_tiles import TransformedTiles, grad_rule, kernel_rule, source_rule, twice
from tvm_convgrad.problem import ConvProblem

TAPS = 9


def winograd_weight_kernel(
    problem: ConvProblem, tiling: WinogradTiling, machine: Machine, name: str, epilogue: Epilogue
) -> Any:
    """The PrimFunc (grad, data, weight's gradient[, bias gradient])."""
    loops = Loops()
    spec = weight_spec(problem)
    frame = WeightFrame(loops, problem, spec, epilogue)
    _WinogradWeight(loops, forward_gather(problem), spec, tiling, machine, frame).emit()
    return loops.finish(frame.parameters, name)


def of_grad(gather: Gather, spec: WeightSpec) -> Gather:
    """dY read where it is: a forward gather's result as the source of a 1x1 kernel."""
    axes = tuple(AxisPhase(axis.count, 0, ((0, 0),)) for axis in gather.phases[0][0])
    return replace(gather, source=spec.dy, source_channels=spec.out_channels, phases=((axes,),))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Tiles:
    """The transformed tiles of X and of dY, with the memory of their panels."""

    x_panel: Any
    x: Any
    dy_panel: Any
    dy: Any


class _WinogradWeight:
    """The loops. Sums are [part][element][block of input channels][block of output channels][row][lane]."""

    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        spec: WeightSpec,
        tiling: WinogradTiling,
        machine: Machine,
        frame: WeightFrame,
    ) -> None:
        self.loops, self.spec, self.tiling, self.machine, self.frame = loops, spec, tiling, machine, frame
        self.dtype, self.lanes, self.dw = gather.dtype, machine.lanes(gather.dtype), frame.dw
        self.rows, self.columns, self.width = tiling.rows, tiling.columns, tiling.columns * self.lanes
        self.in_blocks = -(-spec.in_channels // self.width)
        self.out_blocks = -(-spec.out_channels // tiling.rows)
        self.tile_size = tiling.rows * self.width
        self.x = TransformedTiles(loops, gather, tiling, machine, frame.x, source_rule, self.width)
        self.dy = TransformedTiles(loops, of_grad(gather, spec), tiling, machine, frame.dy, grad_rule, self.lanes)
        self.plane = self.in_blocks * self.out_blocks * self.tile_size
        most = 1 if tiling.together else machine.parts
        self.per_part = -(-self.x.chunks.number // most)
        self.parts = -(-self.x.chunks.number // self.per_part)
        self.taps: list[tuple[int, ...]] = [(0, y, x) for y in range(3) for x in range(3)]
        self.ragged = spec.in_channels % self.width != 0

    def first_out(self, block: Any) -> Any:
        """The first output channel of a block; the last one overlaps the one before it."""
        return smaller(block * self.tiling.rows, self.spec.out_channels - self.tiling.rows)

    def emit(self) -> None:
        """The sums of all chunks, then dW."""
        loops, parts, chunks = self.loops, self.parts, self.x.chunks
        inner, outer = ("parallel", "serial") if self.tiling.together else ("serial", "parallel")
        size = ELEMENTS * self.plane
        sums = loops.buffer("sums", parts * size, self.dtype)
        bias = self.frame.bias_sum(self.machine)
        if bias is not None:
            bias.allocate(parts)
        with loops.loop(parts, "part", outer) as part:
            tiles = _Tiles(*self.x.allocate(), *self.dy.allocate())
            first = loops.let(expr(part * self.per_part), "first_chunk")
            with loops.loop(smaller(self.per_part, chunks.number - first), "number") as number:
                image, line = divided(loops, first + number, chunks.per_image)
                image = loops.let(expr(image * self.tiling.images), "image")
                line = loops.let(expr(line * chunks.lines), "line")
                self._transform(tiles, image, line, inner)
                with loops.loop(ELEMENTS * self.in_blocks, "product", inner) as product:
                    self._multiply(tiles, sums, part * size, product, number)
                if bias is not None:
                    height = self.spec.dy.extents[1]
                    lines = smaller(2 * chunks.lines, height - 2 * line)
                    slab = (image, self.tiling.images, loops.let(expr(2 * line), "y"), lines)
                    shares = self.machine.parts if self.tiling.together else 1
                    with loops.loop(shares, "share", inner) as share:
                        bias.add(part, share, shares, slab, 1)
        with loops.loop(self.in_blocks * self.out_blocks, "block", "parallel") as block:
            self._write(sums, size, block)
        if bias is not None:
            bias.write()

    def _transform(self, tiles: _Tiles, image: Any, line: Any, kind: str) -> None:
        """A chunk's tiles of X and of dY."""
        loops = self.loops
        for side, panel in ((self.x, tiles.x_panel), (self.dy, tiles.dy_panel)):
            with loops.loop(side.lines, "number", kind) as number:
                side.pack(panel, number, image, line)
        with loops.loop(self.tiling.images * self.x.chunks.lines, "number", kind) as number:
            self.x.transform(tiles.x_panel, tiles.x, number)
            self.dy.transform(tiles.dy_panel, tiles.dy, number)

    def _multiply(self, tiles: _Tiles, sums: Any, of_part: Any, number: Any, chunk: Any) -> None:
        """One element of the chunk's tiles, for a block of input channels and all of output channels."""
        loops, tiling, lanes = self.loops, self.tiling, self.lanes
        element, block = divided(loops, number, self.in_blocks)
        x_at = loops.let(expr(element * self.x.plane + block * self.width), "x_at")
        with loops.loop(self.out_blocks, "out_block") as out_block:
            dy_at = loops.let(expr(element * self.dy.plane + self.first_out(out_block)), "dy_at")
            tile = Tile(loops, tiling.rows, tiling.columns, lanes, self.dtype)
            with loops.loop(self.x.chunks.tiles, "t") as t:
                scalar = loops.let(expr(dy_at + t * self.dy.pitch), "a_at")
                vector = loops.let(expr(x_at + t * self.x.pitch), "b_at")
                tile.add(lambda i: load(tiles.dy, scalar + i), lambda j: load(tiles.x, vector + j * lanes, lanes))
            to = loops.let(expr(of_part + (number * self.out_blocks + out_block) * self.tile_size), "to")
            for i in range(tiling.rows):
                for j in range(tiling.columns):
                    at = to + (i * self.width + j * lanes)
                    # What the first chunk finds is no sum.
                    before = choose(expr(chunk) > 0, load(sums, at, lanes), zero(self.dtype, lanes))
                    loops.store(sums, at, before + tile.value(i, j))

    def _write(self, sums: Any, size: int, number: Any) -> None:
        """A block's sums over parts, transformed to the gradients of its taps."""
        loops, lanes = self.loops, self.lanes
        block, out_block = divided(loops, number, self.out_blocks)
        found = loops.buffer("taps", TAPS * self.tile_size, self.dtype)
        base = loops.let(expr(number * self.tile_size), "base")
        with loops.loop(self.tile_size // lanes, "vector") as vector:
            at = loops.let(expr(base + vector * lanes), "at")
            rows = [
                [
                    loops.let(load_sum(sums, at + (4 * y + x) * self.plane, lanes, self.parts, size), "s")
                    for x in range(4)
                ]
                for y in range(4)
            ]
            for tap, value in enumerate(twice(loops, rows, kernel_rule)):
                loops.store(found, tap * self.tile_size + vector * lanes, value)
        writer = WeightWriter(self, self.frame.epilogue.accumulate)
        writer.write(found, 0, 1, 0, 0, out_block, block * self.width)


__all__ = ["of_grad", "winograd_weight_kernel"]
