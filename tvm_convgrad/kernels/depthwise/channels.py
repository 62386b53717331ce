# SPDX-License-Identifier: Apache-2.0
"""Depthwise forward and dgrad over channels.

    out[q, c] = sum over taps of source[q * step + offset(tap), c] * W[tap, c]

Vectors run over channels. Where channels are contiguous (NHWC) pixels are read and written in place; elsewhere (NCHW) a
slab of rows is transposed into a panel [row][column][lane], and the result back. The register tile is a piece of a
result row; the weights of a kernel row stay in registers. Nothing is padded: the taps that are in bounds in a row are
the bounds of a loop, and the code of pieces near the left and right border skips the products with padding.

In small groups, of as many source as result channels, a vector spans the channels of several groups: each of a group's
source channels in turn is repeated, by a shuffle, in the places of all of the group's result channels. In place, dot
products of bfloat16 take two of them at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import (
    Index,
    expr,
    lanes_below,
    lanes_of,
    load,
    quotient,
    remainder,
    smaller,
    splat,
)
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.contract import Tiling
from tvm_convgrad.kernels.depthwise.base import DepthwiseKernel
from tvm_convgrad.kernels.depthwise.channel_panels import ChannelMap, Finish, PanelMover, pack_weights, repeat_member
from tvm_convgrad.kernels.depthwise.channel_words import add_pairs, member_words, pack_member_words, pack_words
from tvm_convgrad.kernels.depthwise.column_terms import has_dots
from tvm_convgrad.kernels.depthwise.taps import border_pieces, rows_in_bounds, tap_run, valid_taps
from tvm_convgrad.kernels.epilogue import finished
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.spec import DHW, AxisPhase, ConvSpec, Phase
from tvm_convgrad.kernels.vectors import Numbers, accumulate, accumulate_words, accumulators, load_vector

PREFETCH_TILES = 8
"""Register tiles from what is summed to what is prefetched: some rows of a block of channels."""


@dataclass(frozen=True)
class ChannelsTiling(Tiling):
    """How depthwise forward or dgrad over channels is tiled; h and w are rows and columns of the result.

    Attributes:
        in_place: whether the tensors are read and written in place; else through panels.
        tile_w: pixels of the register tile, which is one vector of channels wide.
        slab_h: rows of a slab, the work item: a multiple of the step between a phase's rows.
        channel_splits: parts of the blocks of channels that are work items of their own (in place only).
        prefetch: whether later tiles are prefetched (in place only).
        channels_inner: whether a tile's pixels are computed for all channels of the work item before the next tile (in
            place only); else a slab for one block of channels before the next block.
    """

    in_place: bool
    tile_w: int
    slab_h: int
    channel_splits: int
    prefetch: bool
    channels_inner: bool


@dataclass(frozen=True)
class _Rows:
    """Where rows of a tensor are: in itself or in a panel.

    `origin` is row 0, column 0; the others are the elements to the next multiple, depth slice, row, and column.
    """

    tensor: Numbers
    origin: Index
    multiple: int
    depth: int
    row: int
    column: int


@dataclass(frozen=True)
class _Block:
    """A vector of channels: where its source, result and weights are.

    `mask` has the lanes that are channels, None for all; `number` is the block's where it is stored in place.
    """

    source: _Rows
    result: _Rows
    weights: Index
    mask: Expr | None = None
    number: Index | None = None


ForEachBlock = Callable[[Callable[[_Block], None]], None]
"""Emits the statements that a function emits for a block, for each of some blocks of channels."""


def _only(block: _Block) -> ForEachBlock:
    """Of one block."""
    return lambda body: body(block)


class ChannelsKernel(DepthwiseKernel):
    """The loops of one kernel.

    A vector spans groups of `each` contiguous channels, 1 unless they are small groups; the side of more channels a
    group has `multiple` of them for each channel of the vector. W has `members` vectors for each tap of a block: one
    for each of a group's source channels, or for two of them where they are words.
    """

    tiling: ChannelsTiling

    def __init__(self, frame: KernelFrame, spec: ConvSpec, tiling: Tiling, kernel: DHW, machine: Machine) -> None:
        super().__init__(frame, spec, tiling, kernel, machine)
        self.each, self.multiple = min(self.inputs, self.outputs), max(self.inputs, self.outputs)
        self.members = self.inputs
        if self.each > 1:
            self.outputs = 1
        self.channels = spec.groups * self.each
        self.blocks = -(-self.channels // self.lanes)
        self.slabs = -(-spec.result.extents[1] // self.tiling.slab_h)

    # -- work items ---------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Pack W, then the work items: slabs of an image, and in panels blocks of channels."""
        loops, spec, tiling = self.loops, self.spec, self.tiling
        inner = spec.weight_result_stride if self.outputs > 1 else spec.weight_source_stride
        within = spec.weight_result_stride if self.each > 1 else 0
        channels = ChannelMap(self.channels, self.multiple, spec.weight_group_stride, inner, self.each, within)
        self.packed = pack_weights(loops, self.machine, self.weight, spec.weight, self.kernel, self.dtype, channels)
        self.words: Buffer | None = None
        if tiling.in_place and has_dots(spec, self.machine):
            if self.each == 1:
                self.words = pack_words(loops, self.packed, spec, self.kernel, self.blocks, self.lanes)
            else:
                step = self.taps * self.lanes
                self.members //= 2
                self.words = pack_member_words(loops, self.packed, self.blocks * self.members, step, self.lanes)
        depths = -(-spec.result.extents[0] // spec.out_step[0])
        splits = -(-self.blocks // self._blocks_per_split()) if tiling.in_place else self.blocks
        with loops.loop(self.frame.batch * (depths * self.slabs * splits), "item", self.kind) as item:
            split, rest = loops.let(remainder(item, splits), "split"), quotient(item, splits)
            slab, rest = loops.let(remainder(rest, self.slabs), "slab"), quotient(rest, self.slabs)
            qd, n = loops.let(remainder(rest, depths), "qd"), loops.let(quotient(rest, depths), "n")
            if tiling.in_place:
                self._in_place(n, qd, slab, split)
            else:
                self._through_panels(n, qd, slab, split)

    def _blocks_per_split(self) -> int:
        """Blocks of channels of a work item that reads and writes in place."""
        return -(-self.blocks // self.tiling.channel_splits)

    def _in_place(self, n: Index, qd: Index, slab: Index, split: Index) -> None:
        def rows(each: ForEachBlock) -> None:
            for phase in self.phases:
                with self._if_depth(phase, qd):
                    self._emit_rows(phase, qd, slab, each)

        if self.tiling.channels_inner:
            rows(lambda body: self._blocks_in_place(n, split, body))
        else:
            self._blocks_in_place(n, split, lambda block: rows(_only(block)))

    def _blocks_in_place(self, n: Index, split: Index, body: Callable[[_Block], None]) -> None:
        """The blocks of channels of a work item: the whole ones in a loop, then one that is not."""
        loops, lanes = self.loops, self.lanes
        whole = self.channels // lanes
        per_split = self._blocks_per_split()
        first = loops.let(expr(split * per_split), "first_block")
        with loops.loop(smaller(whole - first, per_split), "b") as b:
            body(self._block_in_place(n, loops.let(first + b, "block"), None))
        if self.channels % lanes:
            last = expr(first + per_split) > whole
            with loops.when(last):
                body(self._block_in_place(n, whole, lanes_below(0, self.channels % lanes, lanes)))

    def _block_in_place(self, n: Index, block: Index, mask: Expr | None) -> _Block:
        loops, spec = self.loops, self.spec
        origin = loops.let(expr(n * spec.source.batch + block * self.lanes), "from")
        to = loops.let(expr(n * spec.result.batch + block * self.lanes), "to")
        source = _Rows(Numbers(loops, self.source, self.dtype), origin, 0, *spec.source.spatial)
        result = _Rows(self.results, to, 0, *spec.result.spatial)
        weights = loops.let(expr(block * (self.members * self.taps * self.lanes)), "w")
        return _Block(source, result, weights, mask, block)

    def _if_depth(self, phase: Phase, qd: Index) -> contextlib.AbstractContextManager[None]:
        """Statements that run only if the phase has this depth."""
        return self.loops.when(expr(qd) < phase[0].count)

    def _through_panels(self, n: Index, qd: Index, slab: Index, block: Index) -> None:
        loops, spec, lanes, slab_h = self.loops, self.spec, self.lanes, self.tiling.slab_h
        view, to = spec.source, spec.result
        first = loops.let(expr(block * lanes), "c0")
        panels = self.inputs // self.each
        tensor = Numbers(loops, self.source, self.dtype)
        reader = PanelMover(loops, self.machine, tensor, view, self.channels, panels * view.channel)
        writer = PanelMover(loops, self.machine, self.results, to, self.channels, self.outputs * to.channel)
        row, rows, most = self._source_rows(slab)
        size = reader.room(most)
        offsets = sorted({offset for phase in self.phases for _, offset in phase[0].taps})
        offsets = list(range(offsets[0], offsets[-1] + 1)) if offsets else []
        panel = loops.panel("panel", max(1, panels * len(offsets)) * size, self.dtype)
        out = loops.panel("out_panel", writer.room(slab_h), self.dtype)
        positions = -(-to.extents[0] // spec.out_step[0])
        # Whether all results' taps are in bounds along the depth, as those of 2-D convolutions are.
        in_bounds = (
            bool(offsets) and offsets[0] >= 0 and (positions - 1) * spec.in_step[0] + offsets[-1] < view.extents[0]
        )
        if len(offsets) == 1 and in_bounds:
            with loops.loop(panels, "j") as j:
                depth = (qd * spec.in_step[0] + offsets[0]) * view.spatial[0]
                reader.prefetch(n * view.batch + j * view.channel + depth, first, row, rows)
            with loops.loop(self.outputs, "j") as j:
                start = slab * slab_h
                room = smaller(to.extents[1] - start, slab_h)
                writer.prefetch(n * to.batch + j * to.channel, first, start, room, write=True)
        # Loops, as there may be thousands of results to a channel, whose gradients all have a panel.
        with loops.loop(panels, "j") as j:
            for i, offset in enumerate(offsets):
                depth = qd * spec.in_step[0] + offset
                base = loops.let(expr(n * view.batch + depth * view.spatial[0] + j * view.channel), "image")
                into = (j * len(offsets) + i) * size
                if in_bounds:
                    reader.pack(base, first, row, rows, panel, into)
                    continue
                inside = loops.let(expr(depth) >= 0, "above") & loops.let(expr(depth) < view.extents[0], "below")
                with loops.when(inside):
                    reader.pack(base, first, row, rows, panel, into)
        low = offsets[0] if offsets else 0
        # The panel's depth 0 is `low` below the position: depths are counted from there.
        row_size, result_row = view.extents[2] * lanes, to.extents[2] * lanes
        origin = loops.opaque(expr(-(row * row_size) - (qd * spec.in_step[0] + low) * size), "origin")
        panel_rows = Numbers(loops, panel, self.dtype)
        source = _Rows(panel_rows, origin, len(offsets) * size, size, row_size, lanes)
        start = loops.let(expr(slab * slab_h), "row")
        result = _Rows(
            Numbers(loops, out, self.dtype),
            loops.opaque(expr(-(start * result_row)), "out_origin"),
            0,
            0,
            result_row,
            lanes,
        )
        count = loops.let(smaller(to.extents[1] - start, slab_h), "rows")
        for residue in sorted({phase[0].base for phase in self.phases}):
            depth = qd * spec.out_step[0] + residue
            phases = [phase for phase in self.phases if phase[0].base == residue]
            with self._if_depth(phases[0], qd), loops.loop(self.outputs, "m") as m:
                weights = loops.let(expr((block * self.multiple + m) * (self.taps * lanes)), "w")
                alone = _only(_Block(source, result, weights))
                for phase in phases:
                    self._emit_rows(phase, qd, slab, alone)
                base = n * to.batch + depth * to.spatial[0] + m * to.channel
                writer.unpack(loops.let(expr(base), "image"), first, start, count, out, self._finish(m))

    def _source_rows(self, slab: Index) -> tuple[Index, Index, int]:
        """(first, count, the most) of the source's rows that a slab's result rows read."""
        loops, spec = self.loops, self.spec
        extent, step = spec.source.extents[1], spec.in_step[1]
        offsets = [offset for phase in self.phases for _, offset in phase[1].taps] or [0]
        if self.slabs == 1:
            return 0, extent, extent
        per_slab = self.tiling.slab_h // spec.out_step[1]
        start = slab * (per_slab * step) + min(offsets)
        reach = (per_slab - 1) * step + max(offsets) - min(offsets) + 1
        return *rows_in_bounds(loops, expr(start), reach, extent), min(reach, extent)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _emit_rows(self, phase: Phase, qd: Index, slab: Index, each: ForEachBlock) -> None:
        """A phase's rows of a slab, piece after piece, for each block of channels."""
        loops, spec = self.loops, self.spec
        per_slab = self.tiling.slab_h // spec.out_step[1]
        first = loops.let(expr(slab * per_slab), "q0")
        axis_d, axis_h, axis_w = phase
        extent_d, extent_h, extent_w = spec.source.extents
        with loops.loop(smaller(axis_h.count - first, per_slab), "h") as number:
            q = loops.let(first + number, "q")
            taps_d = valid_taps(loops, axis_d.taps, axis_d.count, spec.in_step[0], extent_d, qd)
            taps_h = valid_taps(loops, axis_h.taps, axis_h.count, spec.in_step[1], extent_h, q)
            pieces = border_pieces(axis_w.count, self.tiling.tile_w, axis_w.taps, spec.in_step[2], extent_w)
            for begin, size, repeats, valid in pieces:
                with loops.loop(repeats, "piece") as number:
                    x = loops.let(begin + number * size, "x")

                    def piece(block: _Block, x: Index = x, size: int = size, valid: list[list[int]] = valid) -> None:
                        self._piece(phase, block, size, valid, (qd, q, x), (taps_d, taps_h))

                    each(piece)

    def _piece(
        self,
        phase: Phase,
        block: _Block,
        size: int,
        valid: list[list[int]],
        position: tuple[Index, Index, Index],
        taps: tuple[tuple[Index, Index], tuple[Index, Index]],
    ) -> None:
        """A piece of a row for a block of channels, which is stored in place with the epilogue."""
        loops, spec, result = self.loops, self.spec, block.result
        (qd, q, x), bases = position, [axis.base for axis in phase]
        tile = list(accumulators(loops, range(size), self.lanes, self.dtype).values())
        if all(axis.taps for axis in phase):
            self._sum(tile, phase, valid, position, block, taps)
        step = spec.out_step[2] * result.column
        at = result.origin + (qd * spec.out_step[0] + bases[0]) * result.depth
        at = loops.let(expr(at + (q * spec.out_step[1] + bases[1]) * result.row), "out")
        to = loops.opaque(expr(at + x * step + bases[2] * result.column), "to")
        if block.number is not None and self.tiling.prefetch:
            self._prefetch(phase, size, (q, x), block.source, to)
        for i, register in enumerate(tile):
            value = load(register, 0, self.lanes)
            if block.number is not None:
                value = self._finish_in_place(value, result.tensor, to + i * step, block.number, block.mask)
            result.tensor.store(to + i * step, value, block.mask)

    def _prefetch(self, phase: Phase, size: int, position: tuple[Index, Index], source: _Rows, to: Index) -> None:
        """Prefetch what a later tile reads and writes in place: its last source rows, and the result."""
        loops, spec, view = self.loops, self.spec, self.spec.result
        step = spec.out_step[2] * view.spatial[2]
        pixels = PREFETCH_TILES * size
        for i in range(size):
            loops.prefetch(self.result, to + (i + pixels) * step, write=True, near=True)
        if phase is not self.phases[0] or not phase[1].taps:
            return
        q, x = position
        first = q * spec.in_step[1] + (max(offset for _, offset in phase[1].taps) - spec.in_step[1] + 1)
        at = source.origin + first * source.row + (x + pixels) * (spec.in_step[2] * source.column)
        at = loops.let(expr(at), "prefetched")
        for row in range(spec.in_step[1]):
            for i in range(size * spec.in_step[2]):
                loops.prefetch(self.source, at + (row * source.row + i * source.column), near=True)

    def _finish_in_place(self, value: Expr, tensor: Numbers, place: Index, block: Index, mask: Expr | None) -> Expr:
        """The epilogue of contiguous channels of a pixel."""
        return finished(
            self.frame.epilogue,
            value,
            self.dtype,
            lambda: self.biases.load(block * self.lanes, self.lanes, mask),
            lambda: tensor.load(place, self.lanes, mask),
        )

    def _finish(self, m: Index) -> Finish:
        """The epilogue of the m-th multiple, for `PanelMover.unpack`."""

        def bias(channel: Index, mask: Expr | None, lanes: int) -> Expr:
            if mask is not None:
                return self.biases.load(channel, lanes, mask)
            return splat(self.biases.load(channel * self.outputs + m), lanes)

        def finish(value: Expr, before: Callable[[], Expr], channel: Index, mask: Expr | None) -> Expr:
            lanes = lanes_of(value)
            return finished(self.frame.epilogue, value, self.dtype, lambda: bias(channel, mask, lanes), before)

        return finish

    def _sum(
        self,
        tile: list[Buffer],
        phase: Phase,
        valid: list[list[int]],
        position: tuple[Index, Index, Index],
        block: _Block,
        taps: tuple[tuple[Index, Index], tuple[Index, Index]],
    ) -> None:
        """Add the products of a piece; `valid` has, for each column tap, the pixels where it is in bounds."""
        loops, spec, lanes = self.loops, self.spec, self.lanes
        (first_d, count_d), (first_h, count_h) = taps
        _, kernel_h, kernel_w = self.kernel
        run_d, run_h, run_w = (tap_run(axis.taps) for axis in phase)
        qd, q, x = position
        source, weights, mask = block.source, block.weights, block.mask
        with contextlib.ExitStack() as stack:
            j = stack.enter_context(loops.loop(self.inputs, "j")) if self.each == 1 else 0
            kd, kh = (stack.enter_context(loops.loop(n, k)) for n, k in ((count_d, "kd"), (count_h, "kh")))
            td, th = first_d + kd, first_h + kh
            d = qd * spec.in_step[0] + run_d.offset + td * run_d.offset_step
            h = q * spec.in_step[1] + run_h.offset + th * run_h.offset_step
            at = source.origin + j * source.multiple + d * source.depth + h * source.row
            at = loops.opaque(expr(at + x * (spec.in_step[2] * source.column)), "at")
            w = j * self.taps
            w = w + ((run_d.k + td * run_d.k_step) * kernel_h + run_h.k + th * run_h.k_step) * kernel_w
            w = loops.let(expr(weights + w * lanes), "w_row")

            def factor(tap: int, member: int = 0, packed: Buffer | None = None) -> Expr:
                place = member * self.taps + run_w.k + tap * run_w.k_step
                return loops.let(load(self.packed if packed is None else packed, w + place * lanes, lanes), "factor")

            def read(column: int) -> Expr:
                return source.tensor.load(at + column * source.column, lanes, mask)

            columns = {
                (tap, i): i * spec.in_step[2] + run_w.offset + tap * run_w.offset_step
                for tap, pixels in enumerate(valid)
                for i in pixels
            }
            halves, words = source.tensor.buffer, self.words
            if words is not None and self.each == 1:
                add_pairs(
                    loops,
                    tile,
                    valid,
                    columns,
                    lambda column: load_vector(halves, at + column * source.column, lanes, mask),
                    (factor, lambda tap: factor(tap, packed=words)),
                )
                return
            if self.each == 1:
                for tap, pixels in enumerate(valid):
                    by = factor(tap) if pixels else None
                    for i in pixels:
                        accumulate(loops, tile[i], read(columns[tap, i]) * by)
                return
            for member in range(self.members):
                factors = {tap: factor(tap, member, words) for tap, pixels in enumerate(valid) if pixels}
                for column in sorted(set(columns.values())):
                    if words is None:
                        value = repeat_member(read(column), member, self.each, lanes)
                    else:
                        value = member_words(loops, halves, at + column * source.column, member, self.each, lanes, mask)
                    value = loops.let(value, "member")
                    for (tap, i), its in columns.items():
                        if its != column:
                            continue
                        if words is None:
                            accumulate(loops, tile[i], value * factors[tap])
                        else:
                            accumulate_words(loops, tile[i], value, factors[tap])


def emitted_products(spec: ConvSpec, tile_w: int) -> int:
    """How many multiply-adds of the register tiles the code has."""
    total = 0
    for phase in (phase for phases in spec.phases for phase in phases):
        axis: AxisPhase = phase[2]
        pieces = border_pieces(axis.count, tile_w, axis.taps, spec.in_step[2], spec.source.extents[2])
        total += sum(len(pixels) for piece in pieces for pixels in piece.valid)
    return total


__all__ = ["ChannelsKernel", "ChannelsTiling", "emitted_products"]
