# SPDX-License-Identifier: Apache-2.0
"""Sums of wgrad into dW's own layout: parts added in their order, transposed in registers where dW is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tvm_convgrad.kernels.loops import (
    Loops,
    Numbers,
    choose,
    convert,
    expr,
    lanes_below,
    lanes_within,
    load,
    load_masked,
    load_sum,
    smaller,
    zero,
)
from tvm_convgrad.kernels.packing import transpose
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.weight_spec import WeightSpec


class Blocks(Protocol):
    """What the writer needs of a kernel.

    Attributes:
        dw: the flat result.
        taps: (depth, height, width) of each.
        rows, columns, lanes, width: output channels of a block, and its input channels in vectors, of a vector, in all.
        tile_size: of a tap of a block; ragged: whether the last block has input channels beyond the last.
    """

    loops: Loops
    spec: WeightSpec
    machine: Machine
    dw: Any
    taps: list[tuple[int, ...]]
    rows: int
    columns: int
    lanes: int
    width: int
    tile_size: int
    ragged: bool

    def first_out(self, block: Any) -> Any:
        """The first output channel of a block."""
        ...


class WeightWriter:
    """Writes the sums [tap][row][lane] of a block of input and one of output channels.

    Three orders of dW are written by vectors: input channels innermost (OHWI, and 1x1 of OIHW), taps innermost (OIHW),
    and output channels innermost (HWIO); the last two by transposing squares of registers. Others go one by one.
    """

    def __init__(self, kernel: Blocks, accumulate: bool = False) -> None:
        self.kernel, self.loops, self.accumulate = kernel, kernel.loops, accumulate
        spec = kernel.spec
        offsets = [sum(k * s for k, s in zip(tap, spec.dw.spatial, strict=True)) for tap in kernel.taps]
        self.offsets = Numbers(self.loops, "dw_taps", offsets)
        vectors = spec.dw.dtype == spec.dtype
        masks = kernel.machine.has_masks
        self.by_lanes = vectors and spec.dw.into == 1 and (masks or not kernel.ragged)
        self.by_taps = vectors and masks and offsets == list(range(len(offsets)))
        self.by_rows = vectors and masks and spec.dw.out == 1

    def write(
        self, sums: Any, base: Any, parts: int, part_size: int, group: Any, out_block: Any, first_in: Any
    ) -> None:
        """All taps of a block, from `base` on in each of the parts, which lie `part_size` apart."""
        kernel, loops, spec = self.kernel, self.loops, self.kernel.spec
        dw, taps, width = spec.dw, len(kernel.taps), kernel.width
        rows = kernel.rows
        first_in = loops.let(expr(first_in), "i0")
        first_out = loops.let(expr(kernel.first_out(out_block)), "o0")
        # Rows that the block before has too are written twice, with the same value; they must not be added twice.
        overlaps = self.accumulate and spec.out_channels % rows != 0
        skip = loops.let(expr(out_block * rows - first_out), "skip") if overlaps else 0
        to = (group * spec.out_channels + first_out) * dw.out + first_in * dw.into + spec.first
        to = loops.let(expr(to), "to")

        def total(index: Any, lanes: int) -> Any:
            return load_sum(sums, index, lanes, parts, part_size)

        if self.by_lanes:
            with loops.loop(taps, "tap") as tap, loops.loop(rows - skip, "o") as later:
                o = later + skip
                at = loops.let(base + (tap * rows + o) * width, "at")
                into = loops.let(to + o * dw.out + self.offsets.at(tap), "into")
                for j in range(kernel.columns):
                    self._store_lanes(into, first_in, j, total(at + j * kernel.lanes, kernel.lanes))
        elif self.by_taps:
            with loops.loop(rows - skip, "o") as later, loops.loop(kernel.columns, "j") as j:
                o = later + skip
                at = loops.let(base + o * width + j * kernel.lanes, "at")
                into = loops.let(to + o * dw.out + j * kernel.lanes * dw.into, "into")
                values = [lambda k=k: total(at + k * kernel.tile_size, kernel.lanes) for k in range(taps)]
                self._store_transposed(into, first_in + j * kernel.lanes, values, 0)
        elif self.by_rows:
            with loops.loop(taps, "tap") as tap, loops.loop(kernel.columns, "j") as j:
                at = loops.let(base + tap * kernel.tile_size + j * kernel.lanes, "at")
                into = loops.let(to + self.offsets.at(tap) + j * kernel.lanes * dw.into, "into")
                values = [lambda k=k: total(at + k * width, kernel.lanes) for k in range(rows)]
                self._store_transposed(into, first_in + j * kernel.lanes, values, skip)
        else:
            count = loops.let(smaller(spec.in_channels - first_in, width), "count")
            with loops.loop(rows - skip, "o") as later, loops.loop(count, "i") as i, loops.loop(taps, "tap") as tap:
                o = later + skip
                value = total(base + (tap * rows + o) * width + i, 1)
                at = loops.let(expr(to + o * dw.out + i * dw.into + self.offsets.at(tap)), "into")
                if self.accumulate:
                    value = convert(load(kernel.dw, at), spec.dtype) + value
                loops.store(kernel.dw, at, value)

    def _store_lanes(self, into: Any, first_in: Any, column: int, value: Any) -> None:
        kernel, lanes = self.kernel, self.kernel.lanes
        mask = None
        if kernel.ragged:
            mask = lanes_below(first_in + column * lanes, kernel.spec.in_channels, lanes)
        self._store(into + column * lanes, value, mask)

    def _store_transposed(self, into: Any, first_in: Any, values: Sequence[Any], skip: Any) -> None:
        """Lane l of value k goes to into + l * (step of input channels) + k, from k = skip on."""
        kernel, loops, lanes = self.kernel, self.loops, self.kernel.lanes
        for first in range(0, len(values), lanes):
            chunk = [loops.let(value(), "row") for value in values[first : first + lanes]]
            count = len(chunk)
            chunk += [zero(kernel.spec.dtype, lanes)] * (lanes - count)
            for lane, value in enumerate(transpose(loops, chunk)):
                at = into + lane * kernel.spec.dw.into + first
                limit: Any = count
                if kernel.ragged:
                    limit = choose(expr(first_in + lane) < kernel.spec.in_channels, count, 0)
                if not isinstance(skip, int):
                    # Lanes from skip on: counted from there, those before it are negative.
                    mask = lanes_within(first - skip, limit + (first - skip), lanes)
                elif isinstance(limit, int) and limit == lanes:
                    mask = None
                else:
                    mask = lanes_below(0, limit, lanes)
                self._store(at, value, mask)

    def _store(self, at: Any, value: Any, mask: Any) -> None:
        loops, dw, lanes = self.loops, self.kernel.dw, self.kernel.lanes
        at = loops.let(expr(at), "to")
        if mask is None:
            loops.store(dw, at, load(dw, at, lanes) + value if self.accumulate else value)
        else:
            loops.store_masked(dw, at, load_masked(dw, at, mask, lanes) + value if self.accumulate else value, mask)


__all__ = ["WeightWriter"]
