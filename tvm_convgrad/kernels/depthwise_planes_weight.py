# SPDX-License-Identifier: Apache-2.0
"""Depthwise wgrad where columns are neighbours (NCHW): vectors run over the columns of a plane's lines.

    dW[tap] = sum over pixels of dY[y, x] * X[y * stride + line(tap), x * stride + column(tap)]

Both tensors are read in place. Some lines of one vector of dY's columns stay in registers; each vector of X is read
once for each column tap and meets all of them that it can. Lanes are added at the end of a channel's planes, for all
taps together.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.lanes import pieces_of, valid_taps
from tvm_convgrad.kernels.lines import AHEAD, LineReader, prefetch_ahead
from tvm_convgrad.kernels.loops import (
    Loops,
    ceiling,
    convert,
    expr,
    lanes_below,
    load,
    load_masked,
    load_sum,
    quotient,
    remainder,
    smaller,
    zero,
)
from tvm_convgrad.kernels.packing import shuffle
from tvm_convgrad.kernels.spec import View, WeightView, axes_of, views
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.weight_frame import WeightFrame
from tvm_convgrad.problem import ConvProblem


@dataclass(frozen=True)
class PlaneWeightTiling:
    """How a depthwise wgrad over planes is cut.

    Attributes:
        lines: of dY in a register tile.
        channels: of dY, neighbours, whose planes of an image a work item goes through before the next image.
        parts: pieces of the batch that are summed apart, in their order.
    """

    lines: int
    channels: int
    parts: int


class PlanesWeight:
    """The loops of one kernel; the frame has the parameters, the problem the batch that it is planned for."""

    def __init__(
        self,
        loops: Loops,
        problem: ConvProblem,
        tiling: PlaneWeightTiling,
        machine: Machine,
        frame: WeightFrame,
    ) -> None:
        self.loops, self.tiling, self.batch = loops, tiling, frame.batch
        self.kind = "parallel" if problem.macs >= machine.parallel_from else "serial"
        self.epilogue = frame.epilogue
        self.dy, self.x, self.dw, self.bias = frame.dy, frame.x, frame.dw, frame.bias
        self.x_view: View
        self.dw_view: WeightView
        self.dy_view: View
        self.x_view, self.dw_view, self.dy_view = views(problem)
        self.kernel, self.strides, self.dilation, padding = axes_of(problem)
        self.low = [low for low, _ in padding]
        self.dtype = problem.accumulator
        self.lanes = machine.lanes(self.dtype)
        self.channels = problem.out_channels
        self.multiplier = problem.out_channels // problem.in_channels
        self.taps = self.kernel[0] * self.kernel[1] * self.kernel[2]
        self.sums = self.taps + (self.bias is not None)  # of a channel; the last is the bias gradient's
        self.reader = LineReader(loops, self.lanes, self.strides[2], self.dy_view.extents[2], self.x_view.extents[2])

    # -- work items ---------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """All work items, then parts are added."""
        loops, tiling = self.loops, self.tiling
        chunks = -(-self.channels // tiling.channels)
        size = tiling.channels * self.sums * self.lanes
        parts, apart = tiling.parts, None
        if parts > 1:
            apart = loops.panel("parts", parts * self.channels * self.sums, self.dtype)
        with loops.loop(chunks * parts, "item", self.kind) as item:
            part, chunk = loops.let(quotient(item, chunks), "part"), remainder(item, chunks)
            first = loops.let(expr(chunk * tiling.channels), "c0")
            count = loops.let(smaller(self.channels - first, tiling.channels), "channels")
            sums = loops.panel("sums", size, self.dtype)
            with loops.loop(count * self.sums, "v") as v:
                loops.store(sums, v * self.lanes, zero(self.dtype, self.lanes))
            per_part = loops.let(ceiling(self.batch, parts), "per_part")
            images = loops.let(smaller(self.batch - part * per_part, per_part), "images")
            with loops.loop(images, "image") as image, loops.loop(count, "c") as c:
                n, channel = loops.let(part * per_part + image, "n"), loops.let(first + c, "channel")
                self._plane(sums, loops.let(expr(c * (self.sums * self.lanes)), "sums_at"), n, channel)
            with loops.loop(count, "c") as c:
                at = loops.let(expr(c * (self.sums * self.lanes)), "sums_at")
                channel = loops.let(first + c, "channel")
                self._reduce(sums, at, channel, None if apart is None else (apart, part))
        if apart is not None:
            with loops.loop(self.channels, "channel") as channel, loops.loop(self.sums, "tap") as tap:
                at = loops.let(expr(channel * self.sums + tap), "at")
                total = load_sum(apart, at, 1, parts, self.channels * self.sums)
                self._put(loops.let(total, "total"), channel, tap)

    def _plane(self, sums: Any, at: Any, n: Any, channel: Any) -> None:
        loops, x, dy = self.loops, self.x_view, self.dy_view
        grad = loops.let(expr(n * dy.batch + channel * dy.channel), "grad_plane")
        data = loops.let(expr(n * x.batch + quotient(channel, self.multiplier) * x.channel), "data_plane")
        depth_taps = tuple((k, k * self.dilation[0] - self.low[0]) for k in range(self.kernel[0]))
        line_taps = tuple((k, k * self.dilation[1] - self.low[1]) for k in range(self.kernel[1]))
        pieces = pieces_of(dy.extents[1], self.tiling.lines, line_taps, self.strides[1], x.extents[1])
        vectors = -(-dy.extents[2] // self.lanes)
        with loops.loop(dy.extents[0], "d") as d:
            first, count = valid_taps(loops, depth_taps, dy.extents[0], self.strides[0], x.extents[0], d)
            if self.bias is not None:
                self._bias(sums, at, grad + d * dy.spatial[0])
            with loops.loop(count, "kd") as number:
                kd = loops.let(expr(first + number), "kd")
                z = d * self.strides[0] + kd * self.dilation[0] - self.low[0]
                into = loops.let(expr(at + kd * (self.kernel[1] * self.kernel[2] * self.lanes)), "into")
                for begin, size, repeats, met in pieces:
                    with loops.loop(repeats, "tile") as tile:
                        y = loops.let(expr(begin + tile * size), "y")
                        grad_at = loops.let(expr(grad + d * dy.spatial[0] + y * dy.spatial[1]), "grad_from")
                        from_line = data + z * x.spatial[0] + y * (self.strides[1] * x.spatial[1])
                        data_at = loops.let(expr(from_line), "data_from")
                        self._tile(sums, into, grad_at, data_at, size, vectors, dict(zip(line_taps, met, strict=True)))

    # -- sums ---------------------------------------------------------------------------------------------------

    def _tile(
        self,
        sums: Any,
        into: Any,
        grad: Any,
        data: Any,
        size: int,
        vectors: int,
        met: dict[tuple[int, int], list[int]],
    ) -> None:
        """Adds a tile's products; `met` has the lines that meet each (kernel line, offset)."""
        loops, lanes, width = self.loops, self.lanes, self.kernel[2]
        lines: dict[int, list[tuple[int, int]]] = {}  # a line of X, from the tile's first: (line of dY, kernel line)
        for (k_h, offset), positions in met.items():
            for i in positions:
                lines.setdefault(i * self.strides[1] + offset, []).append((i, k_h))
        offsets = [k * self.dilation[2] - self.low[2] for k in range(width)]
        tile = {
            key: loops.buffer("sum", lanes, self.dtype)
            for key in itertools.product(
                sorted({k_h for (k_h, _), positions in met.items() if positions}), range(width)
            )
        }
        for register in tile.values():
            loops.store(register, 0, zero(self.dtype, lanes))
        with loops.loop(vectors, "v") as v:
            x = loops.let(expr(v * lanes), "x") if vectors > 1 else 0
            x_line, step = self.x_view.spatial[1], self.strides[2]
            dy_line, x_lines = self.dy_view.spatial[1], size * self.strides[1]
            prefetch_ahead(loops, self.dy, grad + x, dy_line, size, 1, lanes, ahead=self._ahead(self.dy_view))
            prefetch_ahead(loops, self.x, data + x * step, x_line, x_lines, step, lanes, ahead=self._ahead(self.x_view))
            grads = [self._grad(grad + i * self.dy_view.spatial[1], x) for i in range(size)]
            for s in sorted(lines):
                values = self.reader.read(self.x, data + s * x_line, x, offsets)
                for k_w, value in enumerate(values):
                    named = loops.let(value, "line")
                    for i, k_h in lines[s]:
                        register = tile[k_h, k_w]
                        loops.store(register, 0, load(register, 0, lanes) + named * grads[i])
        self._flush(sums, into, tile)

    def _ahead(self, view: View) -> int | None:
        """Elements from a plane to the same channel's of the next image, where a work item's planes are few bytes."""
        run = self.tiling.channels * view.channel * DTYPE_BYTES[view.dtype]
        return view.batch if run < 2 * AHEAD else None

    def _flush(self, sums: Any, into: Any, tile: dict[tuple[int, int], Any]) -> None:
        for (k_h, k_w), register in tile.items():
            at = into + (k_h * self.kernel[2] + k_w) * self.lanes
            self.loops.store(sums, at, load(sums, at, self.lanes) + load(register, 0, self.lanes))

    def _grad(self, at: Any, x: Any) -> Any:
        """A vector of a line of dY, zeros behind its end."""
        width, lanes = self.dy_view.extents[2], self.lanes
        if width % lanes == 0:
            return self.loops.let(load(self.dy, at + x, lanes), "grad")
        return self.loops.let(load_masked(self.dy, at + x, lanes_below(x, width, lanes), lanes), "grad")

    def _bias(self, sums: Any, at: Any, grad: Any) -> None:
        """Adds a plane of dY to the channel's last sum."""
        loops, lanes, (_, height, width) = self.loops, self.lanes, self.dy_view.extents
        register = loops.buffer("bias_sum", lanes, self.dtype)
        loops.store(register, 0, zero(self.dtype, lanes))
        with loops.loop(height, "y") as y, loops.loop(-(-width // lanes), "v") as v:
            value = self._grad(grad + y * self.dy_view.spatial[1], v * lanes)
            loops.store(register, 0, load(register, 0, lanes) + value)
        self._flush(sums, at + self.taps * lanes, {(0, 0): register})

    # -- the result ---------------------------------------------------------------------------------------------

    def _reduce(self, sums: Any, at: Any, channel: Any, apart: Any) -> None:
        """Lanes of each sum added, for as many sums at once as a vector has lanes."""
        loops, lanes = self.loops, self.lanes
        for first in range(0, self.sums, lanes):
            count = min(lanes, self.sums - first)
            rows = [loops.let(load(sums, at + (first + i) * lanes, lanes), "row") for i in range(count)]
            total = self._lane_sums(rows)
            if apart is not None:
                buffer, part = apart
                to = (part * self.channels + channel) * self.sums + first
                loops.store_masked(buffer, to, total, lanes_below(0, count, lanes))
                continue
            cell = loops.buffer("totals", lanes, self.dtype)
            loops.store(cell, 0, total)
            for i in range(count):
                self._put(load(cell, i), channel, first + i)

    def _lane_sums(self, rows: list[Any]) -> Any:
        """A vector whose lane i is the sum of row i's lanes: half of a transpose, with additions."""
        loops, lanes = self.loops, self.lanes
        values: list[Any] = [*rows, *[None] * (lanes - len(rows))]
        distance = lanes // 2
        while distance:
            keep_low = [i if not i & distance else lanes + i - distance for i in range(lanes)]
            keep_high = [i + distance if not i & distance else lanes + i for i in range(lanes)]
            paired: list[Any] = []
            for r in range(distance):
                a, b = values[r], values[r + distance]
                if a is None:
                    paired.append(None)
                    continue
                b = zero(self.dtype, lanes) if b is None else b
                paired.append(loops.let(shuffle(a, b, keep_low) + shuffle(a, b, keep_high), "sum"))
            values, distance = paired, distance // 2
        return values[0]

    def _put(self, value: Any, channel: Any, tap: Any) -> None:
        """Store a sum of a channel where it belongs."""
        loops = self.loops
        if not isinstance(tap, int):
            if self.bias is not None:
                with loops.when(expr(tap) >= self.taps):
                    self._put_bias(value, channel)
                with loops.when(expr(tap) < self.taps):
                    self._put_weight(value, channel, tap)
                return
            self._put_weight(value, channel, tap)
            return
        if tap == self.taps:
            self._put_bias(value, channel)
        else:
            self._put_weight(value, channel, tap)

    def _put_bias(self, value: Any, channel: Any) -> None:
        if self.epilogue.bias_accumulate:
            value = convert(load(self.bias, channel), self.dtype) + value
        self.loops.store(self.bias, channel, value)

    def _put_weight(self, value: Any, channel: Any, tap: Any) -> None:
        loops, dw, (_, height, width) = self.loops, self.dw_view, self.kernel
        d, rest = quotient(tap, height * width), remainder(tap, height * width)
        h, w = quotient(rest, width), remainder(rest, width)
        to = channel * dw.out + d * dw.spatial[0] + h * dw.spatial[1] + w * dw.spatial[2]
        to = loops.let(expr(to), "to")
        if self.epilogue.accumulate:
            value = convert(load(self.dw, to), self.dtype) + value
        loops.store(self.dw, to, value)


__all__ = ["PlaneWeightTiling", "PlanesWeight"]
