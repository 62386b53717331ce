# SPDX-License-Identifier: Apache-2.0
"""Forward and dgrad of 3x3 kernels by Winograd's transform: 16 multiplications where the sum over taps has 36.

For each of the 16 elements of a transformed tile one matrix product: [tiles x source channels] times [source channels x
result channels]. Vectors run over channels everywhere; where channels are planes, squares are turned in registers when
the source is packed and when the result is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gather_frame import GatherFrame
from tvm_convgrad.kernels.gather_source import divided
from tvm_convgrad.kernels.gather_weight import WeightPanel
from tvm_convgrad.kernels.loops import Loops, Shapes, expr, lanes_below, lanes_of, load, load_masked, smaller, splat
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.spec import Gather
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import Tile
from tvm_convgrad.kernels.winograd_shape import ELEMENTS, WinogradTiling, padded
from tvm_convgrad.kernels.winograd_tiles import TransformedTiles, result_rule, source_rule, twice, weight_rule


def winograd_kernel(
    gather: Gather, tiling: WinogradTiling, machine: Machine, name: str, shapes: Shapes, epilogue: Epilogue
) -> Any:
    """The PrimFunc (source, weight, [bias,] result)."""
    loops = Loops()
    frame = GatherFrame(loops, gather, shapes, epilogue)
    _Winograd(loops, gather, tiling, machine, frame).emit()
    return loops.finish(frame.parameters, name)


class _Winograd:
    """The loops. The transformed weight U is [element][block][source channel][channel of the block], the products M
    are [element][tile][result channel]."""

    def __init__(
        self, loops: Loops, gather: Gather, tiling: WinogradTiling, machine: Machine, frame: GatherFrame
    ) -> None:
        self.loops, self.gather, self.tiling = loops, gather, tiling
        self.result, self.bias, self.epilogue = frame.result, frame.bias, frame.epilogue
        self.dtype, self.lanes = gather.dtype, machine.lanes(gather.dtype)
        self.tiles = TransformedTiles(loops, gather, tiling, machine, frame.source, source_rule, 1)
        self.shape, self.chunks = self.tiles.shape, self.tiles.chunks
        self.weights = WeightPanel(loops, gather, self.shape, machine, False, frame.weight)
        block = self.shape.block
        self.u_plane = padded(self.shape.blocks * gather.source_channels * block, self.lanes, self.lanes)
        self.m_pitch = padded(self.shape.blocks * block, self.lanes, self.lanes)
        self.m_plane = padded(self.chunks.tiles * self.m_pitch, self.lanes, self.lanes)

    def emit(self) -> None:
        """All of the work: W, then chunk after chunk, or chunks side by side."""
        loops, chunks = self.loops, self.chunks
        together = self.tiling.together
        inner, outer = ("parallel", "serial") if together else ("serial", "parallel")
        u = loops.buffer("u", ELEMENTS * self.u_plane, self.dtype)
        with loops.loop(self.shape.blocks, "block", "parallel") as block:
            self._transform_weight(u, block)
        buffers = self._buffers() if together else None
        with loops.loop(chunks.number, "chunk", outer) as chunk:
            panel, tiles, products = buffers or self._buffers()
            image, line = divided(loops, chunk, chunks.per_image)
            image = loops.let(expr(image * self.tiling.images), "image")
            line = loops.let(expr(line * chunks.lines), "line")
            with loops.loop(self.tiles.lines, "number", inner) as number:
                self.tiles.pack(panel, number, image, line)
            with loops.loop(self.tiling.images * chunks.lines, "number", inner) as number:
                self.tiles.transform(panel, tiles, number)
            with loops.loop(ELEMENTS * self.shape.blocks, "product", inner) as product:
                self._multiply(u, tiles, products, product)
            with loops.loop(self.tiling.images * chunks.lines, "number", inner) as number:
                self._store_line(products, image, line, number)

    def _buffers(self) -> tuple[Any, Any, Any]:
        """Panel, transformed tiles, and products."""
        return (*self.tiles.allocate(), self.loops.buffer("products", ELEMENTS * self.m_plane, self.dtype))

    def _transform_weight(self, u: Any, block: Any) -> None:
        loops, width, lanes, channels = self.loops, self.shape.block, self.lanes, self.gather.source_channels
        panel = loops.buffer("w_panel", self.weights.size, self.dtype)
        self.weights.pack(panel, 0, 0, block)
        tap, into = channels * width, loops.let(expr(block * (channels * width)), "into")
        with loops.loop(tap // lanes, "vector") as vector:
            at = loops.let(expr(vector * lanes), "at")
            rows = [[loops.let(load(panel, at + (3 * y + x) * tap, lanes), "g") for x in range(3)] for y in range(3)]
            for element, value in enumerate(twice(loops, rows, weight_rule)):
                loops.store(u, into + at + element * self.u_plane, value)

    def _multiply(self, u: Any, tiles: Any, products: Any, number: Any) -> None:
        """One element of all the chunk's tiles, for a block of result channels."""
        loops, tiling, lanes, block = self.loops, self.tiling, self.lanes, self.shape.block
        channels, pitch = self.gather.source_channels, self.tiles.pitch
        element, b = divided(loops, number, self.shape.blocks)
        u_at = loops.let(expr(element * self.u_plane + b * (channels * block)), "u_at")
        v_at = loops.let(expr(element * self.tiles.plane), "v_at")
        m_at = loops.let(expr(element * self.m_plane + b * block), "m_at")
        with loops.loop(-(-self.chunks.tiles // tiling.rows), "rows") as row:
            t = loops.let(expr(smaller(row * tiling.rows, self.chunks.tiles - tiling.rows)), "t")
            tile = Tile(loops, tiling.rows, tiling.columns, lanes, self.dtype)
            first = loops.let(expr(v_at + t * pitch), "first")
            with loops.loop(channels, "c") as c:
                scalar, vector = loops.let(expr(first + c), "a_at"), loops.let(expr(u_at + c * block), "b_at")
                tile.add(lambda i: load(tiles, scalar + i * pitch), lambda j: load(u, vector + j * lanes, lanes))
            to = loops.let(expr(m_at + t * self.m_pitch), "to")
            for i in range(tiling.rows):
                for j in range(tiling.columns):
                    loops.store(products, to + i * self.m_pitch + j * lanes, tile.value(i, j))

    # -- the result ---------------------------------------------------------------------------------------------------

    def _store_line(self, products: Any, image: Any, line: Any, number: Any) -> None:
        """The two lines of results that a line of tiles makes, a vector of channels at a time."""
        loops, view, lanes = self.loops, self.gather.result, self.lanes
        i, below = (0, number) if self.tiling.images == 1 else divided(loops, number, self.chunks.lines)
        y = loops.let(expr(2 * (line + below)), "y")
        base = (image + i) * view.batch + y * view.spatial[1]
        base = loops.let(expr(base), "out")
        first = loops.let(expr(number * (self.chunks.across * self.m_pitch)), "first")
        planes = view.channel != 1
        strip = loops.buffer("strip", self._strip_line * 2 * lanes, self.dtype) if planes else None
        with loops.loop(-(-self.gather.result_channels // lanes), "vector") as vector:
            channel = loops.let(expr(vector * lanes), "channel")
            with loops.loop(self.chunks.across, "x") as x:
                at = loops.let(expr(first + x * self.m_pitch + channel), "at")
                rows = [[self._product(products, at, 4 * r + c) for c in range(4)] for r in range(4)]
                for place, value in enumerate(twice(loops, rows, result_rule)):
                    r, c = divmod(place, 2)
                    if planes:
                        loops.store(strip, (r * self._strip_line + 2 * x + c) * lanes, value)
                    else:
                        with self._inside(y + r, 1, r), self._inside(2 * x + c, 2, c):
                            to = base + r * view.spatial[1] + (2 * x + c) * view.spatial[2] + channel
                            self._store(value, to, channel, self._channel_mask(channel))
            if planes:
                for r in range(2):
                    with self._inside(y + r, 1, r):
                        self._turn(strip, r, base + r * view.spatial[1], channel)

    @property
    def _strip_line(self) -> int:
        """Pixels that a line of a strip has room for."""
        return -(-self.gather.result.extents[2] // self.lanes) * self.lanes + 1

    def _product(self, products: Any, at: Any, element: int) -> Any:
        return self.loops.let(load(products, at + element * self.m_plane, self.lanes), "p")

    def _channel_mask(self, channel: Any) -> Any:
        channels = self.gather.result_channels
        return lanes_below(channel, channels, self.lanes) if channels % self.lanes else None

    @contextmanager
    def _inside(self, position: Any, axis: int, second: int) -> Iterator[None]:
        """The second line or column of a tile may lie outside of a result of odd extent."""
        extent = self.gather.result.extents[axis]
        if not second or extent % 2 == 0:
            yield
            return
        with self.loops.when(expr(position) < extent):
            yield

    def _turn(self, strip: Any, r: int, base: Any, first: Any) -> None:
        """A strip's line to planes: squares of pixels x channels, turned."""
        loops, view, lanes = self.loops, self.gather.result, self.lanes
        width, channels = view.extents[2], self.gather.result_channels
        with loops.loop(-(-width // lanes), "square") as square:
            x = loops.let(expr(square * lanes), "x")
            at = loops.let(expr((r * self._strip_line + x) * lanes), "at")
            rows = [loops.let(load(strip, at + i * lanes, lanes), "row") for i in range(lanes)]
            mask = lanes_below(x, width, lanes) if width % lanes else None
            for i, value in enumerate(transpose(loops, rows)):
                to = base + (first + i) * view.channel + x
                if channels % lanes == 0:
                    self._store(value, to, first + i, mask)
                    continue
                with loops.when(expr(first + i) < channels):
                    self._store(value, to, first + i, mask)

    def _store(self, total: Any, to: Any, channel: Any, mask: Any) -> None:
        loops, lanes = self.loops, lanes_of(total)
        to = loops.let(expr(to), "to")

        def read(buffer: Any, index: Any) -> Any:
            return load_masked(buffer, index, mask, lanes) if mask is not None else load(buffer, index, lanes)

        def bias() -> Any:
            index = expr(channel)
            return read(self.bias, index) if self.gather.result.channel == 1 else splat(load(self.bias, index), lanes)

        value = self.epilogue.apply(total, self.dtype, bias, lambda: read(self.result, to))
        if mask is None:
            loops.store(self.result, to, value)
        else:
            loops.store_masked(self.result, to, value, mask)


__all__ = ["winograd_kernel"]
