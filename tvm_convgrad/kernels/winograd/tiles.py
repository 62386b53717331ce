# SPDX-License-Identifier: Apache-2.0
"""Winograd's transforms of 2x2 tiles, as rules on lists of values, and the transformed tiles of a slab.

    Y = A' [ (G W G') * (B' S B) ] A         results of 2x2, from 4x4 of the source, for kernels of 3x3
    dW = C' [ (H Y H') * (B' S B) ] C        gradients of 3x3, from 4x4 of the source, for 2x2 of dY

A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks" (2015); the second is Toom and Cook's scheme for
the same points 0, 1, -1 and infinity. Small integers could be rounded in a product of two elements only, as all
factors are 1 or 1/2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, Loops, dtype_of, expr, lanes_of, load, splat
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.gemm.pairs import Operand
from tvm_convgrad.kernels.gemm.source import SourcePanel, SpatialBlock
from tvm_convgrad.kernels.spec import ConvSpec
from tvm_convgrad.kernels.winograd.shape import ELEMENTS, WinogradTiling, padded_pitch, panel_shape, slabs_of

Values = Sequence["Expr"]
Rule = Callable[[Values], list["Expr"]]
"""A one-dimensional transform."""


def source_rule(d: Values) -> list[Expr]:
    """B' d: four values of the source."""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def weight_rule(g: Values) -> list[Expr]:
    """G g: three values of a kernel."""
    ends, middle = _half(g[0] + g[2]), _half(g[1])
    return [g[0], ends + middle, ends - middle, g[2]]


def result_rule(m: Values) -> list[Expr]:
    """A' m: two results."""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def grad_rule(y: Values) -> list[Expr]:
    """H y: two values of dY. The last has the opposite sign, as has the source's last of `source_rule`."""
    return [y[0], _half(y[0] + y[1]), _half(y[0] - y[1]), -y[1]]


def kernel_rule(m: Values) -> list[Expr]:
    """C' m: three gradients."""
    return [m[0] + m[1] + m[2], m[1] - m[2], m[1] + m[2] + m[3]]


def twice(loops: Loops, rows: Sequence[Values], rule: Rule) -> list[Expr]:
    """A rule along the rows of a tile, then along its columns; the result is row after row."""
    along = [[loops.let(value, "t") for value in rule(row)] for row in rows]
    columns = [[loops.let(v, "t") for v in rule([row[j] for row in along])] for j in range(len(along[0]))]
    return [column[i] for i in range(len(columns[0])) for column in columns]


def _half(value: Expr) -> Expr:
    return value * splat(tir.const(0.5, dtype_of(value).partition("x")[0]), lanes_of(value))


class TransformedTiles:
    """The tiles of a slab, transformed: [element][tile][channel].

    Attributes:
        pitch, plane: elements between tiles, and between elements of a tile; size: of all.
    """

    def __init__(
        self,
        loops: Loops,
        spec: ConvSpec,
        tiling: WinogradTiling,
        machine: Machine,
        source: Buffer,
        rule: Rule,
        multiple: int,
    ) -> None:
        """Lay the tiles out.

        Args:
            spec: whose source has the tiles: of 4x4 pixels, or, where it has one tap, of 2x2.
            source: its tensor, flat.
            rule: the transform.
            multiple: channels that are read at once.
        """
        self.loops, self.spec, self.tiling, self.rule = loops, spec, tiling, rule
        self.lanes = machine.lanes(spec.dtype)
        self.shape, self.slabs = panel_shape(spec, tiling, machine), slabs_of(spec, tiling)
        self._panels = SourcePanel(loops, spec, self.shape, machine, False, Operand(source, spec.dtype))
        self._reach = self.shape.panel_h - 2 * tiling.slab_rows + 2
        self.pitch = padded_pitch(spec.source_channels, max(multiple, self.lanes), self.lanes)
        self.plane = padded_pitch(self.slabs.tiles * self.pitch, self.lanes, self.lanes)
        self.size = ELEMENTS * self.plane + multiple

    def allocate(self) -> tuple[Buffer, Buffer]:
        """A panel, and transformed tiles."""
        panel = self.loops.buffer("panel", self.tiling.slab_images * self.shape.panel_size, self.spec.dtype)
        return panel, self.loops.buffer("tiles", self.size, self.spec.dtype)

    def pack(self, panel: Buffer, number: Index, image: Index, row: Index) -> None:
        """Pack row `number` of the panel of a slab that begins at an image and a row of tiles."""
        loops, rows = self.loops, self.shape.panel_h
        i, at = (0, number) if self.tiling.slab_images == 1 else loops.divmod(number, rows)
        slab = SpatialBlock(image + i, 0, 0, loops.let(expr(2 * row), "top"), 0, 0, 1)
        self._panels.pack_row(panel, loops.let(expr(i * self.shape.panel_size), "of_image"), slab, at)

    @property
    def panel_rows(self) -> int:
        """Rows of the panels of a slab."""
        return self.tiling.slab_images * self.shape.panel_h

    def transform(self, panel: Buffer, tiles: Buffer, number: Index) -> None:
        """Transform row `number` of the slab's tiles."""
        loops, shape, lanes, reach = self.loops, self.shape, self.lanes, self._reach
        i, row = (0, number) if self.tiling.slab_images == 1 else loops.divmod(number, self.tiling.slab_rows)
        base = loops.let(expr(i * shape.panel_size + row * (2 * shape.stride_h)), "from")
        into = loops.let(expr(number * (self.slabs.across * self.pitch)), "into")
        channels = -(-self.spec.source_channels // lanes)
        with loops.loop(self.slabs.across, "x") as x, loops.loop(channels, "c") as c:
            at = loops.let(expr(base + x * (2 * shape.stride_w) + c * lanes), "at")
            rows = [
                [
                    loops.let(load(panel, at + (y * shape.stride_h + j * shape.stride_w), lanes), "d")
                    for j in range(reach)
                ]
                for y in range(reach)
            ]
            to = loops.let(expr(into + x * self.pitch + c * lanes), "to")
            for element, value in enumerate(twice(loops, rows, self.rule)):
                loops.store(tiles, to + element * self.plane, value)


__all__ = ["TransformedTiles", "grad_rule", "kernel_rule", "result_rule", "source_rule", "twice", "weight_rule"]
