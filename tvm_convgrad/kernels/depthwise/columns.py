# SPDX-License-Identifier: Apache-2.0
"""Depthwise forward and dgrad over columns, where these are contiguous (NCHW): vectors run over a row's columns.

    out[q, x] = sum over taps of source[q * step + offset_h(tap), x * step + offset_w(tap)] * W[tap]

Both tensors are read and written in place, but for sources of 16 bits that are converted into a panel first. The
register tile is one vector of columns of some result rows; each vector of the source is read once for each column tap
and serves all rows of the tile. Rows outside of the source are skipped by the code of border tiles, columns outside are
zeros of masked loads. Strides of two separate even and odd lanes in forward, and interleave those of two phases in
dgrad. Where the CPU has dot products of bfloat16, two column taps are one term: lanes are words of a column and of that
of the next tap.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import as_number, word_at, words
from tvm_convgrad.codegen.loops import (
    Index,
    ceiling,
    expr,
    lanes_below,
    load,
    quotient,
    remainder,
    smaller,
    splat,
)
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.contract import Tiling
from tvm_convgrad.kernels.depthwise.base import DepthwiseKernel
from tvm_convgrad.kernels.depthwise.column_terms import Term, Terms, column_terms, uses_dots
from tvm_convgrad.kernels.depthwise.row_vectors import (
    PREFETCH_BYTES,
    MultiRowReader,
    RowReader,
    convert_run,
    interleave,
    prefetch_rows,
)
from tvm_convgrad.kernels.depthwise.taps import Piece, border_pieces, tap_run, valid_taps, vector_piece
from tvm_convgrad.kernels.epilogue import finished
from tvm_convgrad.kernels.spec import AxisPhase, ConvSpec
from tvm_convgrad.kernels.vectors import (
    accumulate,
    accumulate_words,
    accumulators,
    converts_halves,
    element_bytes,
)

UNROLLED_TAPS = 16
"""Taps of a kernel's (h, w) up to which each has code of its own; of more, column taps are a loop."""

UNROLLED_PRODUCTS = 200
"""The same for the multiply-adds of vectors of several rows, whose masks are constants without a loop."""


@dataclass(frozen=True)
class ColumnsTiling(Tiling):
    """How depthwise forward or dgrad over columns is tiled; h are rows of the result.

    Attributes:
        tile_h: vectors of rows of a register tile, of one phase; a vector has one row, or `rows_per_vector`.
        split_h: parts of a depth slice's tiles that are work items of their own.
        rows_per_vector: rows in one vector; more than one only where all of a depth slice is one tile.
        converted: whether a work item converts its source, of 16 bits, into a panel first; else rows are converted
            where they are read.
        block_channels: the channels of a work item; more than one only where it converts them.
    """

    tile_h: int
    split_h: int
    rows_per_vector: int
    converted: bool = False
    block_channels: int = 1


@dataclass(frozen=True)
class _Slice:
    """A depth slice of the result in a work item.

    Attributes:
        split: the number of the work item among those of the slice.
        qd: the position along the depth; taps: (first, count) of the depth taps that are in bounds there.
        source, result, weight: where the channel's source and the filter (0 in a panel) and the result's slice begin.
        bias: a vector of the channel's bias, or None.
    """

    split: Index
    qd: Index
    taps: tuple[Index, Index]
    source: Index
    result: Index
    weight: Index
    bias: Expr | None


class ColumnsKernel(DepthwiseKernel):
    """The loops of one kernel."""

    tiling: ColumnsTiling
    rows: Buffer
    """What rows are read from: the source, or a panel of its channels as numbers."""
    factors: Buffer
    """What weights are read from: the weight, or a panel of a channel's weights as numbers."""

    def emit(self) -> None:
        """All work items: parts of the result's depth slices, or blocks of channels, in their order in memory."""
        self.rows, self.factors = self.source, self.weight
        if self.tiling.converted:
            self._emit_blocks()
            return
        loops, spec, splits = self.loops, self.spec, self.tiling.split_h
        depths = -(-spec.result.extents[0] // spec.out_step[0])
        channels = spec.groups * self.outputs
        with loops.loop(self.frame.batch * (channels * depths * splits), "item", self.kind) as item:
            split, rest = loops.let(remainder(item, splits), "split"), quotient(item, splits)
            qd, rest = loops.let(remainder(rest, depths), "qd"), loops.let(quotient(rest, depths), "rest")
            channel, n = loops.let(remainder(rest, channels), "channel"), loops.let(quotient(rest, channels), "n")
            source = n * spec.source.batch + quotient(channel, self.outputs) * (self.inputs * spec.source.channel)
            self._channel(split, qd, n, channel, loops.let(expr(source), "at"))

    def _emit_blocks(self) -> None:
        """Work items of some channels, whose slices of the source are converted into a panel."""
        loops, spec, channels, block = self.loops, self.spec, self.spec.groups, self.tiling.block_channels
        total, size = self.frame.batch * channels, spec.source.channel
        with loops.loop(ceiling(total, block), "item", self.kind) as item:
            first = loops.let(expr(item * block), "first")
            count = loops.let(smaller(total - first, block), "count")
            self.rows = loops.panel("numbers", round_up(block * size, self.lanes), self.dtype)
            ahead = PREFETCH_BYTES // element_bytes(self.source)
            convert_run(loops, self.source, first * size, count * size, self.rows, self.dtype, self.lanes, ahead)
            with loops.loop(count, "c") as c:
                index = loops.let(expr(first + c), "index")
                channel, n = loops.let(remainder(index, channels), "channel"), loops.let(quotient(index, channels), "n")
                self._channel(0, 0, n, channel, loops.let(expr(c * size), "at"))

    def _converts_factors(self) -> bool:
        """Whether a channel's weights are converted into a panel: of 16 bits, contiguous, and not words."""
        spec, (_, height, width) = self.spec, self.kernel
        if not converts_halves(self.machine, spec.weight.dtype, self.dtype) or uses_dots(spec, self.machine):
            return False
        strides = (height * width, width, 1)
        joined = all(s == t for s, t, k in zip(spec.weight.spatial, strides, self.kernel, strict=True) if k > 1)
        return joined and (self.inputs == 1 or spec.weight_source_stride == self.taps)

    def _channel(self, split: Index, qd: Index, n: Index, channel: Index, source: Index) -> None:
        """All phases of a channel's depth slices at position qd; the channel's source begins at index `source`."""
        loops, spec, bias = self.loops, self.spec, None
        group, m = quotient(channel, self.outputs), remainder(channel, self.outputs)
        weight = loops.let(expr(group * spec.weight_group_stride + m * spec.weight_result_stride), "filter")
        if self._converts_factors():
            count = self.inputs * self.taps
            self.factors = loops.panel("factors", round_up(count, self.lanes), self.dtype)
            convert_run(loops, self.weight, weight, count, self.factors, self.dtype, self.lanes)
            weight = 0
        result = loops.let(expr(n * spec.result.batch + channel * spec.result.channel), "to_channel")
        if self.frame.epilogue.bias:
            bias = loops.let(splat(self.biases.load(channel), self.lanes), "bias")
        for depth in dict.fromkeys(phase[0] for phase in self.phases):
            with loops.when(expr(qd) < depth.count):
                at = result + (qd * spec.out_step[0] + depth.base) * spec.result.spatial[0]
                at = loops.let(expr(at), "to_slice")
                taps = valid_taps(loops, depth.taps, depth.count, spec.in_step[0], spec.source.extents[0], qd)
                place = _Slice(split, qd, taps, source, at, weight, bias)
                for row in dict.fromkeys(phase[1] for phase in self.phases if phase[0] == depth):
                    columns = [phase[2] for phase in self.phases if phase[:2] == (depth, row)]
                    _Rows(self, depth, row, columns).emit(place)


class _Rows:
    """The rows of one phase of a depth slice, with all its phases of columns."""

    def __init__(self, kernel: ColumnsKernel, depth: AxisPhase, row: AxisPhase, columns: list[AxisPhase]) -> None:
        self.kernel, self.loops, self.spec = kernel, kernel.loops, kernel.spec
        self.depth, self.row, self.columns = depth, row, columns
        spec = self.spec
        self.lanes, self.dtype = kernel.lanes, kernel.dtype
        self.count = max(column.count for column in columns)
        self.dots = uses_dots(spec, kernel.machine)
        self.terms = [column_terms(column.taps, self.dots) for column in columns]
        self.per_vector = kernel.tiling.rows_per_vector
        taps = len(row.taps) * sum(len(column.taps) for column in columns)
        self.is_rolled = is_rolled(spec, taps)
        self.pieces = row_pieces(spec, row, kernel.tiling.tile_h, self.per_vector)
        self.has_loop = has_loop(self.pieces, self.terms[0], self.per_vector)
        widths = self.count, spec.source.extents[2]
        self.reader = RowReader(self.loops, self.lanes, self.dtype, spec.in_step[2], *widths)
        self.is_single = kernel.inputs == 1 and len(depth.taps) == 1  # then a slice's weights are read once
        self.is_empty = not (depth.taps and row.taps and any(self.terms))

    def emit(self, place: _Slice) -> None:
        """Tiles of rows, in runs that have the same code."""
        loops, splits = self.loops, self.kernel.tiling.split_h
        tiles = sum(piece.repeats for piece in self.pieces)
        per_split = -(-tiles // splits)
        before = 0
        factors = None
        if self.is_single and not self.is_rolled and not self.is_empty:
            factors = self._factors(self._weights_at(place.weight, 0, place.taps[0]))
        for piece in self.pieces:
            first, count = 0, piece.repeats
            if splits > 1:
                first = loops.let(tir.max(expr(place.split * per_split - before), expr(0)), "first_tile")
                count = loops.let(smaller((place.split + 1) * per_split - before, piece.repeats) - first, "tiles")
            with loops.loop(count, "tile") as tile:
                q = loops.let(expr(piece.first + (first + tile) * piece.size), "q")
                vectors = -(-self.count // self.lanes)
                with loops.loop(vectors, "v") as v:
                    x = loops.let(expr(v * self.lanes), "x") if vectors > 1 else 0
                    self._tile(q, x, piece, place, factors)
            before += piece.repeats

    def _tile(
        self, q: Index, x: Index, piece: Piece, place: _Slice, factors: dict[tuple[int, Term], Expr] | None
    ) -> None:
        """The register tile of a piece's rows from q on, at the vector of columns from x on."""
        loops, spec, lanes, kernel = self.loops, self.spec, self.lanes, self.kernel
        places = [(i, number) for i in range(piece.size) for number in range(len(self.columns))]
        tile = accumulators(loops, places, lanes, self.dtype)
        if not self.is_empty:
            first_d, count_d = place.taps
            run = tap_run(self.depth.taps)
            with loops.loop(kernel.inputs, "j") as j, loops.loop(count_d, "kd") as kd:
                z = place.qd * spec.in_step[0] + run.offset + (first_d + kd) * run.offset_step
                at = place.source + j * spec.source.channel + z * spec.source.spatial[0]
                at = loops.let(expr(at + q * (spec.in_step[1] * spec.source.spatial[1])), "from")
                if self.row.base == 0 and not kernel.tiling.converted:
                    rows, vectors = piece.size * spec.in_step[1], spec.in_step[2]
                    pitch = self.per_vector * spec.source.spatial[1]
                    prefetch_rows(loops, kernel.source, at + x * vectors, pitch, rows, vectors, lanes)
                self._sum(tile, piece, at, x, self._weights_at(place.weight, j, first_d + kd), factors)
        step = self.per_vector * spec.out_step[1] * spec.result.spatial[1]
        to = loops.let(expr(place.result + q * step + self.row.base * spec.result.spatial[1]), "to")
        vectors = spec.out_step[2]
        prefetch_rows(loops, kernel.result, to + x * vectors, step, piece.size, vectors, lanes, write=True)
        for i in range(piece.size):
            width = spec.result.extents[2]
            if self.per_vector > 1:
                width *= min(self.per_vector, self.row.count - i * self.per_vector)
            registers = [tile[i, number] for number in range(len(self.columns))]
            values = [loops.let(load(register, 0, lanes), "total") for register in registers]
            self._store(values, to + i * step, x, width, place.bias)

    # -- sums ---------------------------------------------------------------------------------------------------

    def _weights_at(self, weight: Index, j: Index, td: Index) -> Index:
        """Where the weights of an input and a depth tap begin."""
        spec, run = self.spec, tap_run(self.depth.taps)
        at = weight + j * spec.weight_source_stride + (run.k + td * run.k_step) * spec.weight.spatial[0]
        return self.loops.let(expr(at), "weights")

    def _factor(self, at: Index, k_h: int, term: Term) -> Expr:
        """A weight in all lanes, or a word of two."""
        _, height, width = self.spec.weight.spatial
        weight, place, step = self.kernel.factors, at + k_h * height + term.k * width, term.k_step * width
        if not term.apart:
            value = as_number(load(weight, place), self.dtype)
        elif step == 1:
            value = word_at(weight, place)
        else:
            value = words(load(weight, place), load(weight, place + step))
        return self.loops.let(splat(value, self.lanes), "factor")

    def _factors(self, at: Index) -> dict[tuple[int, Term], Expr]:
        """All weights of the phase, by the kernel's row and the term of columns."""
        every = {term for column in self._each_term() for term in column}
        return {(k_h, term): self._factor(at, k_h, term) for k_h, _ in self.row.taps for term in sorted(every)}

    def _each_term(self) -> list[list[Term]]:
        """The terms of each phase of columns, one by one."""
        return [[terms.at(i) for terms in column for i in range(terms.number)] for column in self.terms]

    def _sum(
        self,
        tile: dict[tuple[int, int], Expr],
        piece: Piece,
        at: Index,
        x: Index,
        weights: Index,
        factors: dict[tuple[int, Term], Expr] | None,
    ) -> None:
        """Add the products of an input and a depth tap."""
        loops, spec = self.loops, self.spec
        ordered = sorted(self.row.taps, key=lambda tap: tap[1])
        rows: dict[int, list[tuple[int, int]]] = {}  # a source row, from the tile's first: (result row, kernel row)
        for (k_h, offset), positions in zip(ordered, piece.valid, strict=True):
            for i in positions:
                rows.setdefault(i * self.per_vector * spec.in_step[1] + offset, []).append((i, k_h))
        pitch = spec.source.spatial[1]
        if self.is_rolled:
            (of_columns,) = self.terms
            for terms in of_columns:
                if self.has_loop:
                    with loops.loop(terms.number, "kw") as kw:
                        term = terms.at(kw)
                        term = term._replace(offset=loops.let(expr(term.offset), "offset"))
                        self._sum_term(tile, rows, at, x, weights, term)
                    continue
                for number in range(terms.number):
                    self._sum_term(tile, rows, at, x, weights, terms.at(number))
            return
        factors = self._factors(weights) if factors is None else factors
        columns = self._each_term()
        read = sorted({(term.offset, term.apart) for column in columns for term in column})
        for s in sorted(rows):
            values = self._read(s, at + s * pitch, x, [Term(0, offset, 0, apart) for offset, apart in read])
            for wanted, value in zip(read, values, strict=True):
                for number, column in enumerate(columns):
                    for term in column:
                        if (term.offset, term.apart) == wanted:
                            for i, k_h in rows[s]:
                                self._add_product(tile[i, number], value, factors[k_h, term], term)

    def _sum_term(
        self,
        tile: dict[tuple[int, int], Expr],
        rows: dict[int, list[tuple[int, int]]],
        at: Index,
        x: Index,
        weights: Index,
        term: Term,
    ) -> None:
        """Add the products of a term of columns; `rows` are those of `_sum`."""
        of_row = {k_h: self._factor(weights, k_h, term) for k_h, _ in self.row.taps}
        for s in sorted(rows):
            (value,) = self._read(s, at + s * self.spec.source.spatial[1], x, [term])
            for i, k_h in rows[s]:
                self._add_product(tile[i, 0], value, of_row[k_h], term)

    def _add_product(self, register: Buffer, value: Expr, factor: Expr, term: Term) -> None:
        """Add the product of a term, or its dot product."""
        loops = self.loops
        if term.apart:
            accumulate_words(loops, register, value, factor)
        else:
            accumulate(loops, register, value * factor)

    def _read(self, row: int, at: Index, x: Index, terms: list[Term]) -> list[Expr]:
        """A row of the source, or those of a vector, for each of some terms, in ascending order of offsets."""
        loops, source = self.loops, self.kernel.rows
        if self.per_vector == 1:
            offsets = [term.offset for term in terms if not term.apart]
            singles = iter(self.reader.read(source, at, x, offsets))
            values = [
                self.reader.words(source, at, x, term.offset, term.apart) if term.apart else next(singles)
                for term in terms
            ]
        else:
            _, height, width = self.spec.source.extents
            reader = MultiRowReader(self.lanes, self.dtype, self.per_vector, height, width)
            values = [
                reader.words(source, at, row, term.offset, term.apart)
                if term.apart
                else reader.read(source, at, row, term.offset)
                for term in terms
            ]
        return [loops.let(value, "row") for value in values]

    # -- the result ---------------------------------------------------------------------------------------------

    def _store(self, values: list[Expr], to: Index, x: Index, width: int, bias: Expr | None) -> None:
        """Store a row's vector of each phase of columns, from column x of each on, with the epilogue."""
        loops, lanes, kernel = self.loops, self.lanes, self.kernel
        if len(values) == 2:
            values = list(interleave(loops, values[0], values[1], lanes))
        whole = width % (lanes * len(values)) == 0
        for number, value in enumerate(values):
            first = x * len(values) + number * lanes
            mask = lanes_below(first, width, lanes)
            place = to + first
            total = finished(
                kernel.frame.epilogue,
                value,
                self.dtype,
                lambda: bias,
                lambda p=place, m=mask: kernel.results.load(p, lanes, m),
            )
            kernel.results.store(place, total, None if whole else mask, single=width % lanes == 1)


def row_pieces(spec: ConvSpec, row: AxisPhase, tile_h: int, per_vector: int) -> list[Piece]:
    """The tiles of a phase's rows, or of vectors of `per_vector` rows, which are one tile."""
    height = spec.source.extents[1]
    if per_vector == 1:
        return border_pieces(row.count, tile_h, row.taps, spec.in_step[1], height)
    return [vector_piece(row.count, per_vector, row.taps, height)]


def rows_per_vector(spec: ConvSpec, lanes: int) -> int:
    """How many rows of a depth slice fit into a vector: more than one only where both tensors have them contiguous."""
    width = spec.result.extents[2]
    same = spec.source.extents[2] == width and spec.in_step[1:] == spec.out_step[1:] == (1, 1)
    joined = spec.source.spatial[1] == spec.result.spatial[1] == width
    return max(1, min(lanes // width, spec.result.extents[1])) if same and joined else 1


def products_of(spec: ConvSpec, tile_h: int, per_vector: int, dots: bool) -> tuple[int, int]:
    """(multiply-adds that the code has, those that a vector of columns takes through a depth slice) of a depth tap.

    With `dots`, a dot product is one of them.
    """
    emitted = run = 0
    for phase in (phase for phases in spec.phases for phase in phases):
        _, row, column = phase
        terms = column_terms(column.taps, dots)
        columns, rolled = sum(each.number for each in terms), is_rolled(spec, len(row.taps) * len(column.taps))
        pieces = row_pieces(spec, row, tile_h, per_vector)
        in_code = len(terms) if rolled and has_loop(pieces, terms, per_vector) else columns
        for piece in pieces:
            products = sum(map(len, piece.valid))
            emitted += products * in_code
            run += products * piece.repeats * columns
    return emitted, run


def has_loop(pieces: list[Piece], terms: list[Terms], per_vector: int) -> bool:
    """Whether the terms of columns are a loop where they follow each other: not in little code of vectors of rows."""
    products = sum(len(valid) for piece in pieces for valid in piece.valid)
    return per_vector == 1 or products * sum(each.number for each in terms) > UNROLLED_PRODUCTS


def is_rolled(spec: ConvSpec, taps: int) -> bool:
    """Whether column taps follow each other, in a loop or without; else rows of the source do."""
    return taps > UNROLLED_TAPS and spec.in_step[2] == spec.out_step[2] == 1


__all__ = ["ColumnsKernel", "ColumnsTiling", "is_rolled", "products_of", "row_pieces", "rows_per_vector"]
