# SPDX-License-Identifier: Apache-2.0
"""The implicit GEMM of wgrad: dW[m, tap, n] = sum over pixels of dY[pixel, m] * X[pixel * stride + tap * dilation, n].

Vectors run over n: X is packed, a slab at a time, into a panel [depth slice][row][column][n], from which every tap
reads at its own offset, only where it is in bounds: products with padding are skipped, and borders need no zeros. The
scalars of the register tile run over m. A work item is some blocks of n and a share of the blocks of m (and of the
pixels, where there are too few blocks); its sums stay in a buffer of its own. Its last slab stores dW; where pixels are
split into parts, a last pass adds these in their order.

m are output and n input channels, or the other way round in a transposed product. Where pixels of X and dY correspond
one to one (1x1), contiguous channels of X need no panel. Other convolutions with few input channels have im2col rows of
X as m, and their scalars come from a panel with padding.
"""

from __future__ import annotations

from typing import TypeAlias

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import low_half
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    ceiling,
    choose,
    expr,
    lanes_below,
    larger,
    less,
    load,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.codegen.register_tile import Tile
from tvm_convgrad.codegen.tir import Buffer, Expr, PrimFunc
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.frame import KernelFrame, wgrad_frame
from tvm_convgrad.kernels.vectors import load_vector, where
from tvm_convgrad.kernels.wgrad.bias import BiasGradient, bias_gradient
from tvm_convgrad.kernels.wgrad.panels import Slab, WgradPanels
from tvm_convgrad.kernels.wgrad.scalars import Scalars, scalars_of
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, WgradTiling
from tvm_convgrad.kernels.wgrad.store import DwStore

Place: TypeAlias = "tuple[Index, Index, Index, Index]"
"""A tap, the first n of a block, and the number of a block of m, among all and among those of the work item."""

Into: TypeAlias = "tuple[Buffer, Index, Index]"
"""The buffer of sums, where those of a block begin, and the number of the slab in its part."""


def wgrad_kernel(
    problem: ConvProblem, spec: WgradSpec, tiling: WgradTiling, machine: Machine, name: str, epilogue: Epilogue
) -> PrimFunc:
    """The PrimFunc (grad, data, weight's gradient[, bias gradient]).

    The spec's batch is what the tiling is made for; the problem's may be a name, which becomes a variable.
    """
    frame = wgrad_frame(problem, spec.batch, epilogue, halves=spec.dots or "bfloat16" in spec.halves)
    bias = bias_gradient(frame, machine, spec.dy, spec.dtype, problem.out_channels)
    nest_of(frame, spec, tiling, machine).emit(bias)
    return frame.finish(name)


def nest_of(frame: KernelFrame, spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> WgradNest:
    """The loop nest of a tiling over vector registers."""
    dy, x, _ = frame.tensors
    if tiling.transposed:
        spec, dy, x = spec.transposed, x, dy
    return WgradNest(frame, spec, tiling, machine, dy, x)


class WgradNest(WgradPanels):
    """The loop nest of wgrad."""

    def operand(self) -> Scalars:
        """The operand of scalars."""
        return scalars_of(self)

    def begin_item(self) -> None:
        """What is emitted where a work item begins: nothing."""

    def end_item(self) -> None:
        """What is emitted where a work item ends: nothing."""

    def emit(self, bias: BiasGradient | None) -> None:
        """All work items, then the last pass."""
        loops, spec, tiling, frame, blocks = self.loops, self.spec, self.tiling, self.frame, self.blocks
        self.convert_grad()
        if not spec.has_all_taps and not frame.epilogue.accumulate:
            self.clear()
        all_slices = frame.batch * spec.dy.extents[0]
        slabs_of_slice = -(-spec.dy.extents[1] // tiling.slab_h)
        slabs = loops.let(ceiling(all_slices, tiling.slab_d) * slabs_of_slice, "all_slabs")
        per_part = loops.let(ceiling(slabs, tiling.split_k), "per_part")
        parts = tiling.split_k if frame.is_symbolic else -(-slabs // per_part)
        per_split = -(-blocks.out_blocks // tiling.split_m)
        splits = -(-blocks.out_blocks // per_split)
        in_items = -(-blocks.in_blocks // tiling.n_blocks)
        block_size = len(blocks.taps) * blocks.tile_size
        part_size = spec.groups * blocks.in_blocks * blocks.out_blocks * block_size
        scalars = self.operand()
        halves = frame.halves.get("weight")
        store = DwStore(loops, blocks, self.machine, self.dw, frame.epilogue.accumulate, halves)
        if bias is not None:
            bias.allocate(parts)
        shared = loops.buffer("sums", parts * part_size, spec.dtype) if parts > 1 else None
        with loops.loop(spec.groups * in_items * parts * splits, "item", self.kind) as item:
            split, rest = loops.let(remainder(item, splits), "split"), quotient(item, splits)
            part, rest = loops.let(remainder(rest, parts), "part"), loops.let(quotient(rest, parts), "rest")
            group = loops.let(quotient(rest, in_items), "g")
            first_block = loops.let(remainder(rest, in_items) * tiling.n_blocks, "first_block")
            block_count = loops.let(smaller(blocks.in_blocks - first_block, tiling.n_blocks), "block_count")
            first_out = loops.let(split * per_split, "first_out")
            out_count = loops.let(smaller(blocks.out_blocks - first_out, per_split), "out_count")
            panel = None if tiling.vectors_in_place else loops.buffer("x_panel", self.panel_size, spec.dtype)
            scalars.allocate(per_split)
            self.begin_item()
            once = isinstance(slabs, int) and slabs == 1
            kept = 1 if once else tiling.n_blocks * per_split
            sums = loops.buffer("sums", kept * block_size, spec.dtype) if shared is None else shared
            count = loops.let(smaller(slabs - part * per_part, per_part), "slabs")

            def sums_at(b: Index, o: Index) -> Index:
                """Where the sums of local block (b, o) begin."""
                if shared is None:
                    return 0 if once else (b * per_split + o) * block_size
                block = (part * spec.groups + group) * blocks.in_blocks + first_block + b
                return (block * blocks.out_blocks + first_out + o) * block_size

            with loops.loop(count, "s") as s:
                slab = self._slab(part * per_part + s, all_slices, slabs, slabs_of_slice, group, panel)
                if bias is not None:
                    share = loops.let(rest * splits + split, "share")
                    pixels = (slab.first_slice, slab.slices, slab.first_row, slab.rows)
                    bias.add(part, share, spec.groups * in_items * splits, pixels, spec.dy.extents[0])
                scalars.pack(slab, out_count, first_out)
                with loops.loop(block_count, "b") as b:
                    first_in = loops.let((first_block + b) * self.width, "i0")
                    if panel is not None:
                        self.pack_vectors(slab, first_in)
                    for alike, numbers, offsets in scalars.blocks_of_code(out_count):
                        with loops.loop(alike, "o") as index:
                            o = index if numbers is None else loops.let(numbers.at(index), "o")
                            base = loops.let(sums_at(b, o), "sums_at")
                            with loops.loop(len(blocks.taps), "tap") as tap:
                                place = (tap, first_in, loops.let(first_out + o, "out_block"), o)
                                self.add_sums(slab, scalars, offsets, place, (sums, base, s))
                            if shared is None:
                                with loops.when(less(count - 1 - s, 1)):
                                    store.write(sums, base, 1, 0, group, first_out + o, first_in)
            if frame.is_symbolic:  # a part, or a batch, without a slab has sums of zero
                with loops.when(less(count, 1)), loops.loop(block_count, "b") as b, loops.loop(out_count, "o") as o:
                    base = loops.let(sums_at(b, o), "sums_at")
                    with loops.loop(block_size // self.lanes, "v") as v:
                        loops.store(sums, base + v * self.lanes, zero(spec.dtype, self.lanes))
                    if shared is None:
                        store.write(sums, base, 1, 0, group, first_out + o, (first_block + b) * self.width)
            self.end_item()
        if shared is not None:
            with loops.loop(spec.groups * blocks.in_blocks * blocks.out_blocks, "tile", self.kind) as item:
                out_block, block = remainder(item, blocks.out_blocks), quotient(item, blocks.out_blocks)
                group = quotient(block, blocks.in_blocks)
                first_in = remainder(block, blocks.in_blocks) * self.width
                base = loops.let(expr(item * block_size), "sums_at")
                store.write(shared, base, parts, part_size, group, out_block, first_in)
        if bias is not None:
            bias.write()

    def _slab(
        self,
        number: Index,
        all_slices: Index,
        slabs: Index,
        slabs_of_slice: int,
        group: Index,
        panel: Buffer | None,
    ) -> Slab:
        """Slab `number` of `slabs`; of depth slices, or of so many in each depth slice."""
        loops, spec, tiling = self.loops, self.spec, self.tiling

        def begin(slab: Index) -> tuple[Index, Index]:
            return quotient(slab, slabs_of_slice) * tiling.slab_d, remainder(slab, slabs_of_slice) * tiling.slab_h

        number = loops.let(number, "slab")
        d, h = (loops.let(v, name) for v, name in zip(begin(number), ("slice0", "row0"), strict=True))
        even = tiling.slab_d == 1 or (isinstance(all_slices, int) and all_slices % tiling.slab_d == 0)
        slices = tiling.slab_d if even else smaller(all_slices - d, tiling.slab_d)
        to_next = None
        if tiling.prefetch:
            following = begin(loops.let(expr(smaller(number + 1, slabs - 1)), "next"))
            of_dy, of_x = (
                loops.let(expr(self.at(view, *following, scale) - self.at(view, d, h, scale)), "to_next")
                for view, scale in ((spec.dy, 1), (spec.x, spec.strides[1]))
            )
            to_next = (of_dy, of_x)
        height = spec.dy.extents[1]
        rows = tiling.slab_h if height % tiling.slab_h == 0 else smaller(height - h, tiling.slab_h)
        rows = loops.let(rows, "rows")
        return Slab(d, loops.let(slices, "slices"), h, rows, group, panel, to_next)

    # -- sums ---------------------------------------------------------------------------------------------------

    def add_sums(self, slab: Slab, scalars: Scalars, offsets: list[int], place: Place, into: Into) -> None:
        """Add the sums of one tap and block of m over the pixels of a slab; slab 0 sets them."""
        sums, base, slab_number = into
        tile = self._sum(slab, scalars, offsets, *place)
        at = self.loops.let(base + place[0] * self.blocks.tile_size, "tile_at")
        self.add_tile(tile, sums, at, slab_number)

    def _sum(
        self,
        slab: Slab,
        scalars: Scalars,
        offsets: list[int],
        tap: Index,
        first_in: Index,
        out_block: Index,
        local_block: Index,
    ) -> Tile:
        """The register tile of one tap and block of m over the pixels of a slab."""
        loops, spec, tiling, lanes = self.loops, self.spec, self.tiling, self.lanes
        width = spec.dy.extents[2]
        tile = Tile(loops, tiling.tile_m, tiling.tile_n, lanes, spec.dtype, dots=spec.dots)
        source = self.x if slab.panel is None else slab.panel
        (first_d, end_d), (first_h, end_h), (first_w, end_w) = (
            [bound.at(tap if spec.im2col_of is None else out_block) for bound in bounds] for bounds in self.valid
        )
        start, rows = 0, slab.rows
        if not self.all_valid[1]:  # opaque, as these are minima in sums
            start = loops.opaque(larger(expr(first_h - slab.first_row), 0), "start")
            rows = loops.opaque(larger(smaller(end_h - slab.first_row, slab.rows) - start, 0), "valid_rows")
        pixels = loops.let(end_w - first_w, "valid_columns")
        with loops.loop(slab.slices, "d") as d:
            number = loops.let(slab.first_slice + d, "number")
            a_slice, a_row, a_pixel = scalars.at(slab, number, d, out_block, local_block)
            b_slice, b_row, b_pixel = self._vectors_at(slab, number, d, first_in, tap)
            contiguous = a_row == a_pixel * width and b_row == b_pixel * width and self.all_valid[2]
            contiguous = contiguous and not (spec.dots and width % 2)  # a pair lies in one row
            joined = tiling.slab_h == 1 or contiguous
            row_count, pixel_count = (1, rows * pixels) if joined else (rows, pixels)
            a_slice = loops.let(expr(a_slice + start * a_row + first_w * a_pixel), "a_slice")
            b_slice = loops.let(expr(b_slice + start * b_row + first_w * b_pixel), "b_slice")
            if not self.all_valid[0]:
                depth = loops.let(remainder(number, spec.dy.extents[0]), "depth")
                valid = tir.And(depth >= first_d, depth < end_d)
                row_count = loops.let(choose(valid, row_count, 0), "slice_rows")
            with loops.loop(row_count, "h") as h:
                a_from = loops.let(a_slice + h * a_row, "a_row")
                b_from = loops.let(b_slice + h * b_row, "b_row")
                if spec.dots:
                    self._add_pairs(tile, (scalars, a_from, a_pixel, offsets), (source, b_from, b_pixel), pixel_count)
                else:
                    with loops.loop(pixel_count, "w") as w:
                        a = loops.let(a_from + w * a_pixel, "a_at")
                        b = loops.let(b_from + w * b_pixel, "b_at")
                        if slab.to_next is not None:
                            self._prefetch(slab, number, h, w, first_in, out_block)
                        tile.add(
                            lambda i: scalars.read(a + offsets[i]),
                            lambda j: self._vector(source, b, first_in, j, slab.panel is None),
                        )
        return tile

    def _add_pairs(
        self,
        tile: Tile,
        of_scalars: tuple[Scalars, Index, int, list[int]],
        of_vectors: tuple[Buffer, Index, int],
        count: Index,
    ) -> None:
        """Add the dot products of pairs of pixels; the last one of an odd `count` has no partner.

        Args:
            tile: the sums.
            of_scalars: what is read, from where on, the step to the next pixel, and the offsets of a pixel's scalars.
            of_vectors: the panel, from where on, and the step to the next pixel.
            count: pixels.
        """
        loops, lanes = self.loops, self.lanes
        scalars, a_from, a_pixel, offsets = of_scalars
        panel, b_from, b_pixel = of_vectors

        def add(w: Index, alone: bool) -> None:
            a = loops.let(a_from + w * a_pixel, "a_at")
            b = loops.let(b_from + w * b_pixel, "b_at")

            def vector(j: int) -> Expr:
                words = load(panel, b + j * lanes, lanes)
                return low_half(words) if alone else words

            tile.add(lambda i: scalars.read(a + offsets[i], alone), vector)

        with loops.loop(quotient(count, 2), "pair") as pair:
            add(2 * pair, False)
        if not isinstance(count, int) or count % 2:
            last = None if isinstance(count, int) else expr(remainder(count, 2)) > 0
            with where(loops, last):
                add(count - 1, True)

    def _prefetch(self, slab: Slab, number: Index, h: Index, w: Index, first_in: Index, out_block: Index) -> None:
        """Prefetch the cache lines of both operands that lie in the next slab where this pixel lies in its own.

        Where pixels are contiguous, a cache line has as many of them as a vector has lanes: each prefetches the line of
        another channel.
        """
        loops, spec, lanes = self.loops, self.spec, self.lanes
        next_dy, next_x = slab.to_next or (0, 0)
        operands = []
        if spec.im2col_of is None:
            first_out = self.blocks.first_out(out_block) + slab.group * spec.out_channels
            operands.append((self.dy, spec.dy, first_out, self.tiling.tile_m, next_dy))
        if spec.is_pointwise:
            operands.append((self.x, spec.x, first_in + slab.group * spec.in_channels, self.width, next_x))
        for buffer, view, channel, count, to_next in operands:
            at = self.at(view, number, slab.first_row + h) + channel * view.channel + to_next
            for first in range(0, count, lanes):
                if view.channel == 1:
                    loops.prefetch(buffer, at + w * view.spatial[2] + first)
                elif view.spatial[2] == 1:
                    lane = remainder(w, lanes)
                    loops.prefetch(buffer, at + (w - lane) + (first + lane) * view.channel)

    def _vector(self, source: Buffer, at: Index, first_in: Index, j: int, in_place: bool) -> Expr:
        """Vector j of a pixel."""
        lanes, mask = self.lanes, None
        if in_place and self.blocks.ragged:
            mask = lanes_below(first_in + j * lanes, self.spec.in_channels, lanes)
        return load_vector(source, at + j * lanes, lanes, mask)

    def _vectors_at(self, slab: Slab, number: Index, d: Index, first_in: Index, tap: Index) -> tuple[Index, int, int]:
        """Where a depth slice's vectors of a tap begin, and the steps from a row, and from a pixel, to the next."""
        loops, spec, panel = self.loops, self.spec, self.panel
        if slab.panel is None:
            x = spec.x
            at = self.at(x, number, slab.first_row) + slab.group * spec.in_channels + first_in
            return at, x.spatial[1], x.spatial[2]
        of_panel = d * spec.kernel[0]
        if panel.shares_slices:
            depth, extent = spec.dy.extents[0], spec.x.extents[0]
            first, _ = spec.x_slices(slab.first_slice, 1)
            of_panel = quotient(number, depth) * extent + remainder(number, depth) * spec.strides[0]
            of_panel = of_panel - spec.low[0] - first
        at = loops.let(self.shifts.at(tap), "shift") + of_panel * panel.slice_size
        pixel = spec.step_w * self.width // spec.word_columns
        return loops.let(expr(at), "vectors"), spec.step_h * panel.row_size, pixel


__all__ = ["Into", "Place", "WgradNest", "nest_of", "wgrad_kernel"]
