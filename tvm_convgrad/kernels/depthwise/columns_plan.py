# SPDX-License-Identifier: Apache-2.0
"""The depthwise kernels over vectors of columns: which problems they take, their tilings, and their estimates."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Plan, not_one_tiling
from tvm_convgrad.kernels.depthwise.base import GroupedKernel
from tvm_convgrad.kernels.depthwise.column_terms import uses_dots, uses_wgrad_dots
from tvm_convgrad.kernels.depthwise.columns import ColumnsKernel, ColumnsTiling, is_rolled, products_of, rows_per_vector
from tvm_convgrad.kernels.depthwise.columns_wgrad import ColumnsWgrad, ColumnsWgradTiling, row_groups
from tvm_convgrad.kernels.depthwise.row_vectors import CONVERTED_BYTES
from tvm_convgrad.kernels.depthwise.taps import border_pieces, vector_piece
from tvm_convgrad.kernels.roofline import with_memory
from tvm_convgrad.kernels.spec import DHW, ConvSpec, View, axes_of, conv_spec, views
from tvm_convgrad.kernels.vectors import moves_vectors

MAX_PHASES = 16
"""The most phases of dgrad: each has code of its own."""

MAX_PRODUCTS = 600
"""The most multiply-adds in the code of a kernel: they take time to compile."""

MAX_TILE_H = 14
"""The most rows of a tile: they hide the latency of adders, and divide common heights."""

WGRAD_TILE_H = 8
"""Rows of a tile of wgrad where a depth slice takes several tiles: the tiles at borders have code of their own."""

FAR_TILE_H, FAR_TILE_BYTES, FAR_SHARE = 4, 512, 1.7
"""The most rows of a tile, or, of short rows, bytes, where tensors come from memory and that takes at least FAR_SHARE
times as long as the arithmetic: of 3x3 layers on an AMD Zen 4, tiles of 14 rows took up to 1.9 times as long, and those
of wgrad, of 8 rows, 1.2 times, whatever was prefetched: memory serves the few streams of few rows side by side best.
Where elements are converted, small tiles take longer."""

CONVERTED_CHANNELS = 8
"""The most channels of that panel where a vector has several rows: what is read at once was not stored just before."""

CONVERTED_TAPS = 5
"""The fewest column taps with which a row is converted before it is read. On an Emerald Rapids layers of 5 and 7 taps
take 0.78 to 0.93 times as long so (wgrad of 5 taps 0.71 to 0.84 times); of 3 taps 1.0 to 1.1 times, and with strides of
the source 1.2 to 1.4 times."""

VECTOR_CYCLES = 2.6
"""Cycles of a vector of results besides its multiply-adds: loads that straddle cache lines, and the store."""

STRIDED_CYCLES = 1.35
"""Cycles of a vector of products where columns of the source have a stride of 2, and no dot products sum two of them:
vectors are taken apart by shuffles. Fitted to 3 to 7 taps on an AMD Zen 5, in float32 and float16: half a cycle, as
without strides, took up to 3 times as long as vectors of channels."""

CONVERTED_CYCLES, CONVERTED_ROWS_CYCLES = 0.6, 1.0
"""The same without a stride where elements of 16 bits are converted, of one row and of several rows a vector."""

READ_CYCLES = {1: 1.6, 2: 2.2}
"""Cycles to read a vector of X in wgrad, by the stride."""

ROWS_CYCLES = 1.2
"""Cycles of a dot product of wgrad with a vector of several rows, whose vector of X is read for it alone.

On an AMD Zen 4, layers of 3x3 taps with 7x7 and 14x14 pixels in bfloat16 are 1.4 times as fast by them. In float32,
and with 7x7 taps, which are summed in groups, other kernels are faster."""

SUMS_BYTES = Machine.l1_bytes * 3 // 16
"""The most bytes of the sums of a work item of wgrad: a part of the first-level cache."""

ONE_GROUP = "there is one group"
"""The refusal of all kernels for depthwise convolutions and small groups where there are none."""

NOT_CONVERTED = "its elements are not of 16 bits, or multiplied as such"
"""The refusal where the vectors that are multiplied are not those of numbers that are converted."""

NOT_CONTIGUOUS = "slices of channels do not follow each other in memory"
"""The refusal where a run of contiguous elements is not that of whole channels."""

NO_VECTORS = "there are no masked loads and stores of elements of these types"
"""The refusal where vectors that reach over the end of a row cannot be moved."""


class DepthwiseColumns(GroupedKernel):
    """Vectors of columns of a row, with one channel a group: depthwise convolutions in NCHW."""

    name = "depthwise columns"
    reason = "one channel a group, columns are contiguous"
    conv = ColumnsTiling, ColumnsKernel
    wgrad = ColumnsWgradTiling, ColumnsWgrad

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Why vectors of columns cannot be used, or nothing."""
        if problem.groups == 1:
            return ONE_GROUP
        if direction == BACKWARD_WEIGHT.name:
            return _wgrad_refusal(problem, machine)
        return _conv_refusal(conv_spec(problem, direction), axes_of(problem)[0], machine)

    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The one tiling that it has for a problem."""
        if direction == BACKWARD_WEIGHT.name:
            return Plan((_wgrad_tiling(problem, machine),))
        return Plan((_conv_tiling(conv_spec(problem, direction), axes_of(problem)[0], machine),))

    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """The time of the vectors that are computed, and of memory."""
        if direction == BACKWARD_WEIGHT.name:
            cycles = _wgrad_cycles(problem, plan.only(ColumnsWgradTiling), machine)
        else:
            spec, kernel = conv_spec(problem, direction), axes_of(problem)[0]
            cycles = _conv_cycles(spec, kernel, plan.only(ColumnsTiling), machine)
        return with_memory(cycles / Machine.clock, problem)

    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why the tiling cannot be built, or nothing."""
        reason = not_one_tiling(plan)
        if reason:
            return reason
        if direction == BACKWARD_WEIGHT.name:
            return invalid_wgrad(problem, plan.only(ColumnsWgradTiling), machine)
        return invalid_conv(conv_spec(problem, direction), plan.only(ColumnsTiling), machine)


def _conv_refusal(spec: ConvSpec, kernel: DHW, machine: Machine) -> str:
    """Why vectors of columns cannot be used for forward or dgrad, or nothing."""
    if min(spec.source_channels, spec.result_channels) > 1:
        return "not one channel a group"
    if sum(map(len, spec.phases)) > MAX_PHASES:
        return f"more than {MAX_PHASES} phases"
    if not all(moves_vectors(machine, view.dtype, spec.dtype) for view in (spec.source, spec.result)):
        return NO_VECTORS
    if spec.source.spatial[2] != 1 or spec.result.spatial[2] != 1:
        return "columns are not contiguous"
    if max(spec.in_step[2], spec.out_step[2]) > 2:
        return "strides of more than two"
    if spec.out_step[2] > spec.result.extents[2]:
        return "a single column"
    tiling = _conv_tiling(spec, kernel, machine)
    emitted, _ = products_of(spec, tiling.tile_h, tiling.rows_per_vector, uses_dots(spec, machine))
    return f"borders and phases would take {emitted} multiply-adds of code" if emitted > MAX_PRODUCTS else ""


@lru_cache(maxsize=1024)
def _conv_tiling(spec: ConvSpec, kernel: DHW, machine: Machine) -> ColumnsTiling:
    """How forward or dgrad over vectors of columns is tiled."""
    height = max(phase[1].count for phases in spec.phases for phase in phases)
    dots = uses_dots(spec, machine)
    kept = (
        kernel[1] if is_rolled(spec, kernel[1] * kernel[2]) else kernel[1] * (-(-kernel[2] // 2) if dots else kernel[2])
    )
    room = machine.registers - min(kept, machine.registers // 2) - 4
    tile_h = min(height, MAX_TILE_H // spec.in_step[2], room) // spec.out_step[2] or 1
    per_vector = rows_per_vector(spec, machine.lanes(spec.dtype))
    if -(-height // per_vector) > tile_h:
        per_vector = 1
    while per_vector == 1 and products_of(spec, tile_h, per_vector, dots)[0] > MAX_PRODUCTS and tile_h > 1:
        tile_h -= 1
    if per_vector == 1:
        bytes_ = sum(view.size * DTYPE_BYTES[view.dtype] for view in (spec.source, spec.result))
        cycles = _conv_cycles(spec, kernel, ColumnsTiling(tile_h, 1, 1), machine)
        if spec.source.dtype == spec.dtype and _is_far(bytes_, cycles, machine):
            tile_h = min(tile_h, _far_tile_h(spec.source, spec.in_step[2] * spec.out_step[2]))
    split_h = min(-(-height // tile_h), -(-4 * machine.parts // _items(spec))) if per_vector == 1 else 1
    tiling = ColumnsTiling(tile_h, split_h, per_vector)
    return _converted(spec, kernel, tiling, machine)


def not_converted(spec: ConvSpec, tiling: ColumnsTiling, machine: Machine) -> str:
    """Why the source is not converted into a panel, or nothing."""
    source = spec.source
    if source.dtype == spec.dtype or uses_dots(spec, machine):
        return NOT_CONVERTED
    if spec.source_channels * spec.result_channels > 1 or source.extents[0] * spec.result.extents[0] > 1:
        return "a slice of the source is not that of one slice of the result"
    if source.batch != spec.groups * source.channel:
        return NOT_CONTIGUOUS
    if tiling.split_h > 1:
        return "several work items read a slice of the source"
    return _slice_refusal(source, spec.dtype)


def _slice_refusal(view: View, dtype: str) -> str:
    """Why a channel's slice of a tensor is not converted into numbers of a type at once, or nothing."""
    _, height, width = view.extents
    if (view.spatial[1], view.channel) != (width, height * width):
        return NOT_CONTIGUOUS
    size = height * width * DTYPE_BYTES[dtype]
    return f"a channel has more than {CONVERTED_BYTES} bytes of numbers" if size > CONVERTED_BYTES else ""


def _converted(spec: ConvSpec, kernel: DHW, tiling: ColumnsTiling, machine: Machine) -> ColumnsTiling:
    """The tiling with the source converted into a panel first, where that takes less time."""
    several = tiling.rows_per_vector > 1
    if not_converted(spec, tiling, machine) or spec.in_step[2] > 1 or not (several or kernel[2] >= CONVERTED_TAPS):
        return tiling
    block = min(CONVERTED_CHANNELS, spec.groups, _items(spec) // (4 * machine.parts)) if several else 1
    return replace(tiling, converted=True, block_channels=max(1, block))


def _is_far(bytes_: int, cycles: float, machine: Machine) -> bool:
    """Whether tensors of so many bytes come from memory, and these cycles of arithmetic are few beside that."""
    return bytes_ > machine.shared_bytes and bytes_ / machine.memory_rate >= FAR_SHARE * cycles


def _far_tile_h(view: View, step: int) -> int:
    """The most rows of a tile where these rows come from memory; of every `step`-th one."""
    return max(FAR_TILE_H, FAR_TILE_BYTES // (view.extents[2] * DTYPE_BYTES[view.dtype])) // step


def _items(spec: ConvSpec) -> int:
    """Slices of the result that are work items: one for each image, channel and position along the depth."""
    depths = -(-spec.result.extents[0] // spec.out_step[0])
    return spec.batch * spec.groups * spec.result_channels * depths


def _conv_cycles(spec: ConvSpec, kernel: DHW, tiling: ColumnsTiling, machine: Machine) -> float:
    """Cycles of forward or dgrad on one core, without memory."""
    dots = uses_dots(spec, machine)
    _, run = products_of(spec, tiling.tile_h, tiling.rows_per_vector, dots)
    each = 1 / machine.fmas
    if not dots:
        if spec.in_step[2] > 1:
            each = STRIDED_CYCLES
        elif spec.source.dtype != spec.dtype:
            each = CONVERTED_CYCLES if tiling.rows_per_vector == 1 else CONVERTED_ROWS_CYCLES
    columns = max(phase[2].count for phases in spec.phases for phase in phases)
    cycles = (
        run * each * kernel[0] * spec.source_channels
        + VECTOR_CYCLES * spec.result.extents[1] / tiling.rows_per_vector * spec.out_step[2]
    )
    return _items(spec) * -(-columns // machine.lanes(spec.dtype)) * cycles


def _wgrad_refusal(problem: ConvProblem, machine: Machine) -> str:
    """Why vectors of columns cannot be used for wgrad, or nothing."""
    if not problem.is_depthwise:
        return "not one input channel a group"
    x, _, dy = views(problem)
    if not all(moves_vectors(machine, view.dtype, problem.accumulator) for view in (x, dy)):
        return NO_VECTORS
    if x.spatial[2] != 1 or dy.spatial[2] != 1:
        return "columns are not contiguous"
    kernel, strides, _, _ = axes_of(problem)
    if strides[2] > 2:
        return "strides of more than two"
    return "" if row_groups(kernel, machine) else "more sums than registers"


def _wgrad_tiling(problem: ConvProblem, machine: Machine) -> ColumnsWgradTiling:
    """How wgrad over vectors of columns is tiled."""
    x, _, dy = views(problem)
    (kernel, strides, _, _), height = axes_of(problem), dy.extents[1]
    room = _rows_at_once(problem, machine)
    limit = MAX_TILE_H // strides[2]
    tile_h = min(height, room, limit if height <= limit else max(1, WGRAD_TILE_H // strides[2]))
    cycles = _wgrad_cycles(problem, ColumnsWgradTiling(tile_h, 1, 1, 1), machine)
    is_gainful = uses_wgrad_dots(problem, machine) and len(row_groups(kernel, machine)) == 1
    per_vector = wgrad_rows_per_vector(problem, machine) if is_gainful else 1
    several = ColumnsWgradTiling(-(-height // per_vector), 1, 1, per_vector)
    if several.tile_h <= room and _wgrad_cycles(problem, several, machine) < cycles:
        tile_h = several.tile_h
    else:
        per_vector = 1
        if x.dtype == problem.accumulator and _is_far(problem.bytes, cycles, machine):
            tile_h = min(tile_h, _far_tile_h(x, strides[2]))
    channels = problem.out_channels
    sums = (math.prod(kernel) + 1) * machine.vector_bytes
    block = max(1, min(SUMS_BYTES // sums, channels // (4 * machine.parts)))
    blocks = -(-channels // (block * machine.parts)) * machine.parts
    block = -(-channels // blocks)  # as many blocks for each core
    split_k = 1 if channels >= 2 * machine.parts else min(int(problem.batch), machine.parts)
    tiling = ColumnsWgradTiling(tile_h, block, split_k, per_vector)
    often = kernel[2] >= CONVERTED_TAPS or wgrad_rows_per_vector(problem, machine) > 1  # rows are read for each tap
    gains = often and (strides[2] == 1 or x.dtype == "float16")  # columns of bfloat16 are separated by a shift
    return replace(tiling, converted=gains and not x_not_converted(problem, machine))


def x_not_converted(problem: ConvProblem, machine: Machine) -> str:
    """Why X is not converted into a panel in wgrad, or nothing."""
    x, _, dy = views(problem)
    if x.dtype == problem.accumulator or uses_wgrad_dots(problem, machine):
        return NOT_CONVERTED
    if problem.out_channels > problem.in_channels or x.extents[0] * dy.extents[0] > 1:
        return "a slice of X is not that of one slice of dY"
    return _slice_refusal(x, problem.accumulator)


def _rows_at_once(problem: ConvProblem, machine: Machine) -> int:
    """The most vectors of dY that registers have room for, beside the sums."""
    kernel = axes_of(problem)[0]
    return max(1, machine.registers - len(row_groups(kernel, machine)[0]) * kernel[2] - 4)


def wgrad_rows_per_vector(problem: ConvProblem, machine: Machine) -> int:
    """How many rows fit into a vector of wgrad: more than one only where both tensors have them contiguous."""
    x, _, dy = views(problem)
    width, columns = dy.extents[2], machine.lanes(problem.accumulator) * (1 + uses_wgrad_dots(problem, machine))
    same = x.extents[2] == width and axes_of(problem)[1][1:] == (1, 1)
    joined = x.spatial[1] == dy.spatial[1] == width
    return max(1, min(columns // width, dy.extents[1])) if same and joined else 1


def _wgrad_cycles(problem: ConvProblem, tiling: ColumnsWgradTiling, machine: Machine) -> float:
    """Cycles of wgrad on one core, without memory."""
    kernel, strides, dilation, padding = axes_of(problem)
    x, _, dy = views(problem)
    _, height, width = dy.extents
    taps = tuple((k, k * dilation[1] - padding[1][0]) for k in range(kernel[1]))
    groups = len(row_groups(kernel, machine))
    if tiling.rows_per_vector > 1:
        pieces, row_vectors = [vector_piece(height, tiling.rows_per_vector, taps, x.extents[1])], tiling.tile_h
    else:
        pieces, row_vectors = border_pieces(height, tiling.tile_h, taps, strides[1], x.extents[1]), height
    products = sum(sum(map(len, valid)) * repeats for _, _, repeats, valid in pieces)
    columns = machine.lanes(problem.accumulator) * (1 + uses_wgrad_dots(problem, machine)) // tiling.rows_per_vector
    vectors = int(problem.batch) * problem.out_channels * dy.extents[0] * -(-width // columns)
    sums = products / machine.fmas
    if tiling.rows_per_vector > 1:
        sums = ROWS_CYCLES * products
    elif groups > 1:  # few sums share a vector of X
        sums = max(sums, READ_CYCLES[strides[2]] * height * groups)
    return vectors * (sums * kernel[2] * kernel[0] + VECTOR_CYCLES * row_vectors * groups)


def invalid_conv(spec: ConvSpec, tiling: ColumnsTiling, machine: Machine) -> str:
    """Why forward or dgrad over vectors of columns cannot be built with a tiling, or nothing."""
    if tiling.tile_h < 1 or tiling.split_h < 1:
        return f"tile_h is {tiling.tile_h} and split_h is {tiling.split_h}; both must be at least 1"
    most = rows_per_vector(spec, machine.lanes(spec.dtype))
    if tiling.rows_per_vector not in (1, most):
        return f"rows_per_vector is {tiling.rows_per_vector}; it must be 1 or {most}"
    height = max(phase[1].count for phases in spec.phases for phase in phases)
    if tiling.rows_per_vector > 1 and (-(-height // tiling.rows_per_vector) > tiling.tile_h or tiling.split_h > 1):
        return "rows_per_vector needs depth slices of one tile, and no split_h"
    most = spec.groups if tiling.converted else 1
    if not 1 <= tiling.block_channels <= most:
        return f"block_channels is {tiling.block_channels}; it must be from 1 to {most}"
    if tiling.converted and (reason := not_converted(spec, tiling, machine)):
        return f"the source cannot be converted: {reason}"
    if products_of(spec, tiling.tile_h, tiling.rows_per_vector, uses_dots(spec, machine))[0] > MAX_PRODUCTS:
        return f"the code would have more than {MAX_PRODUCTS} multiply-adds"
    return ""


def invalid_wgrad(problem: ConvProblem, tiling: ColumnsWgradTiling, machine: Machine) -> str:
    """Why wgrad over vectors of columns cannot be built with a tiling, or nothing."""
    height = views(problem)[2].extents[1]
    for name, most in (("tile_h", height), ("block_channels", problem.out_channels), ("split_k", int(problem.batch))):
        if not 1 <= getattr(tiling, name) <= most:
            return f"{name} is {getattr(tiling, name)}; it must be from 1 to {most}"
    most = wgrad_rows_per_vector(problem, machine)
    if tiling.rows_per_vector not in (1, most):
        return f"rows_per_vector is {tiling.rows_per_vector}; it must be 1 or {most}"
    if tiling.converted and (reason := x_not_converted(problem, machine)):
        return f"X cannot be converted: {reason}"
    if tiling.rows_per_vector > 1 and tiling.tile_h != -(-height // tiling.rows_per_vector):
        return f"tile_h is {tiling.tile_h}; with {tiling.rows_per_vector} rows in a vector it must be all vectors"
    return ""


KERNELS = (DepthwiseColumns(),)

__all__ = [
    "KERNELS",
    "DepthwiseColumns",
    "invalid_conv",
    "invalid_wgrad",
    "not_converted",
    "wgrad_rows_per_vector",
    "x_not_converted",
]
