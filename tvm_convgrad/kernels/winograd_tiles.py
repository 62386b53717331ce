# SPDX-License-Identifier: Apache-2.0
"""Winograd's transforms of 2x2 tiles, as rules on lists of values, and the tiles of a chunk in the transformed domain.

    Y = A' [ (G W G') * (B' S B) ] A         results of 2x2, from 4x4 of the source, for kernels of 3x3
    dW = C' [ (H Y H') * (B' S B) ] C        gradients of 3x3, from 4x4 of the source, for 2x2 of dY

A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks" (2015); the second is Toom and Cook's scheme for
the same points 0, 1, -1 and infinity. A product of two elements is the only rounding that small integers could meet, as
all factors are 1 or 1/2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from tvm_convgrad.kernels.gather_shape import Shape
from tvm_convgrad.kernels.gather_source import Slab, SourcePanel, divided
from tvm_convgrad.kernels.loops import Loops, dtype_of, expr, lanes_of, load, splat
from tvm_convgrad.kernels.spec import Gather
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.winograd_shape import ELEMENTS, Chunks, WinogradTiling, chunks_of, padded, panel_shape

Values = Sequence[Any]
Rule = Callable[[Values], list[Any]]


def source_rule(d: Values) -> list[Any]:
    """B' d: four values of the source."""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def weight_rule(g: Values) -> list[Any]:
    """G g: three values of a kernel."""
    ends, middle = _half(g[0] + g[2]), _half(g[1])
    return [g[0], ends + middle, ends - middle, g[2]]


def result_rule(m: Values) -> list[Any]:
    """A' m: two results."""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def grad_rule(y: Values) -> list[Any]:
    """H y: two values of dY. The sign of the last is that of the source's last, which `source_rule` has turned."""
    return [y[0], _half(y[0] + y[1]), _half(y[0] - y[1]), -y[1]]


def kernel_rule(m: Values) -> list[Any]:
    """C' m: three gradients."""
    return [m[0] + m[1] + m[2], m[1] - m[2], m[1] + m[2] + m[3]]


def twice(loops: Loops, rows: Sequence[Values], rule: Rule) -> list[Any]:
    """A rule along the lines of a tile, then along its columns; line after line."""
    along = [[loops.let(value, "t") for value in rule(row)] for row in rows]
    columns = [[loops.let(v, "t") for v in rule([row[j] for row in along])] for j in range(len(along[0]))]
    return [column[i] for i in range(len(columns[0])) for column in columns]


def _half(value: Any) -> Any:
    return value * splat(tirx.const(0.5, dtype_of(value).partition("x")[0]), lanes_of(value))


class TransformedTiles:
    """The tiles of a chunk, transformed: [element][tile][channel].

    Attributes:
        pitch, plane: elements between tiles, and between elements of a tile; size: of all.
    """

    def __init__(
        self,
        loops: Loops,
        gather: Gather,
        tiling: WinogradTiling,
        machine: Machine,
        source: Any,
        rule: Rule,
        multiple: int,
    ) -> None:
        """Args:
        gather: whose source has the tiles: of 4x4 pixels, or, where it has one tap, of 2x2.
        source: its tensor, flat.
        rule: the transform.
        multiple: of channels that are read at once.
        """
        self.loops, self.gather, self.tiling, self.rule = loops, gather, tiling, rule
        self.lanes = machine.lanes(gather.dtype)
        self.shape: Shape = panel_shape(gather, tiling, machine)
        self.chunks: Chunks = chunks_of(gather, tiling)
        self._panels = SourcePanel(loops, gather, self.shape, machine, False, source)
        self._reach = self.shape.panel_lines - 2 * tiling.lines + 2
        self.pitch = padded(gather.source_channels, max(multiple, self.lanes), self.lanes)
        self.plane = padded(self.chunks.tiles * self.pitch, self.lanes, self.lanes)
        self.size = ELEMENTS * self.plane + multiple

    def allocate(self) -> tuple[Any, Any]:
        """Memory of a panel and of transformed tiles."""
        panel = self.loops.buffer("panel", self.tiling.images * self.shape.panel_size, self.gather.dtype)
        return panel, self.loops.buffer("tiles", self.size, self.gather.dtype)

    def pack(self, panel: Any, number: Any, image: Any, line: Any) -> None:
        """Line `number` of the panel of a chunk that begins at an image and a line of tiles."""
        loops, lines = self.loops, self.shape.panel_lines
        i, at = (0, number) if self.tiling.images == 1 else divided(loops, number, lines)
        slab = Slab(image + i, 0, 0, loops.let(expr(2 * line), "top"), 0, 0, 1)
        self._panels.pack_line(panel, loops.let(expr(i * self.shape.panel_size), "of_image"), slab, at)

    @property
    def lines(self) -> int:
        """Of a chunk's panels."""
        return self.tiling.images * self.shape.panel_lines

    def transform(self, panel: Any, tiles: Any, number: Any) -> None:
        """Line `number` of the chunk's tiles."""
        loops, shape, lanes, reach = self.loops, self.shape, self.lanes, self._reach
        i, line = (0, number) if self.tiling.images == 1 else divided(loops, number, self.tiling.lines)
        base = loops.let(expr(i * shape.panel_size + line * (2 * shape.line_pitch)), "from")
        into = loops.let(expr(number * (self.chunks.across * self.pitch)), "into")
        channels = -(-self.gather.source_channels // lanes)
        with loops.loop(self.chunks.across, "x") as x, loops.loop(channels, "c") as c:
            at = loops.let(expr(base + x * (2 * shape.pitch) + c * lanes), "at")
            rows = [
                [
                    loops.let(load(panel, at + (y * shape.line_pitch + j * shape.pitch), lanes), "d")
                    for j in range(reach)
                ]
                for y in range(reach)
            ]
            to = loops.let(expr(into + x * self.pitch + c * lanes), "to")
            for element, value in enumerate(twice(loops, rows, self.rule)):
                loops.store(tiles, to + element * self.plane, value)


__all__ = ["TransformedTiles", "grad_rule", "kernel_rule", "result_rule", "source_rule", "twice", "weight_rule"]
