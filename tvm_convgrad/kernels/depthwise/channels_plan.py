# SPDX-License-Identifier: Apache-2.0
"""The depthwise kernels over vectors of channels: which problems they take, their tilings, and their estimates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tvm_convgrad.codegen.hardware import MOST_PARTIAL_SUMS, MOST_PIECES, Machine
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.contract import Plan, not_one_tiling
from tvm_convgrad.kernels.depthwise.base import GroupedKernel
from tvm_convgrad.kernels.depthwise.channels import ChannelsKernel, ChannelsTiling, emitted_products
from tvm_convgrad.kernels.depthwise.channels_wgrad import ChannelsWgrad, ChannelsWgradTiling
from tvm_convgrad.kernels.depthwise.column_terms import has_dots, has_wgrad_dots
from tvm_convgrad.kernels.depthwise.columns_plan import MAX_PHASES, ONE_GROUP
from tvm_convgrad.kernels.roofline import with_memory
from tvm_convgrad.kernels.spec import ConvSpec, axes_of, conv_spec, views
from tvm_convgrad.kernels.vectors import moves_vectors

MAX_PRODUCTS = 1500
"""The most multiply-adds in the code of a kernel: they take time to compile."""

SLAB_SHARE = 16
"""One part in so many of the core's own cache is for the rows of the result of a work item, beside those of the
source."""

WGRAD_SLAB_SHARE = 32
"""One part in so many of the cache is for a vector of channels of X and dY in a slab of wgrad: each row of taps reads
them again."""

TRANSPOSE_CYCLES, GROUP_TRANSPOSE_CYCLES, SLOW_TRANSPOSED_STORE = 0.55, 0.8, 12.0
"""Cycles to transpose an element in registers, on its way to a panel or from one, of depthwise kernels and of small
groups. Those of depthwise kernels are fewer where `Machine.transposed_store` is below SLOW_TRANSPOSED_STORE: 0.25 to
0.37 were measured on an AMD Zen 5."""

CONVERTED_TRANSPOSE = 1.1
"""The factor of small groups' where elements of 16 bits are converted on that way."""

SUM_OVERHEAD, GROUP_SUM_OVERHEAD = 1.05, 1.4
"""The time of a piece of a row relative to its multiply-adds, for depthwise kernels, and for groups of a vector's
lanes, where repeating a channel is part of its load."""

SHUFFLED_SUM_OVERHEAD, SHUFFLED_WGRAD_OVERHEAD = 2.2, 1.75
"""The same for smaller groups, which shuffle vectors. That of their wgrad was fitted on an AMD Zen 5, where it is up
to 1.8 times as fast as the implicit GEMM that a larger one chose; on an Emerald Rapids that GEMM had a third of the
peak for the same layer."""

DOTS_SHARE, WGRAD_DOTS_SHARE = 0.4, 0.7
"""The time of small groups' dot products of bfloat16, in place, relative to that of multiply-adds: for forward and
dgrad, and for wgrad, which joins pixels to words. Fitted to ResNeXt's layers on an AMD Zen 5."""

PREFETCH_FROM = 2 * Machine.shared_bytes
"""The bytes of all tensors from which on they come from memory and are prefetched; from the shared cache vectors of
channels come as fast without."""

WGRAD_PREFETCH_FROM = 3 * Machine.shared_bytes
"""The same for wgrad, which prefetches whole slabs and has no result to write."""

FAR_FROM, FAR_PRODUCTS = 3 * Machine.shared_bytes, 2
"""Forward, and dgrad without strides, compute all channels of a pixel before the next pixels from so many bytes of
tensors on, if there are fewer products for each byte."""

FAR_TILE_W = 4
"""Pixels of their register tile, divided by the step: few pixels side by side are few streams, which memory serves
best. Tiles of 14 pixels, one block of channels after the other, took up to 1.7 times as long for 3x3 layers on an AMD
Zen 4 (0.95 times for rows of 28 columns), whatever was prefetched."""

GROUPS_FAR_PRODUCTS, GROUPS_FAR_TILE_W = 12, 7
"""Small groups compute all channels of so many pixels before the next, and prefetch, from PREFETCH_FROM bytes on, if
there are fewer products for each byte and rows are longer than a tile. Tiles of 14 pixels, one block of channels after
the other, took 1.6 to 2.7 times as long on an AMD Zen 5."""

STRIDED_PRODUCTS, STRIDED_TILE_W = 1, 7
"""Strided depthwise convolutions with fewer products for each byte (3x3, not 5x5) compute all channels of so many
pixels before the next, with the prefetchers of the CPU: the pixels of one block of channels lie too far apart for them.
Tiles of 14, one block of channels after the other, took 1.1 to 1.7 times as long on an Emerald Rapids. From memory
dgrad prefetches, and keeps its tile."""

TILE_WIDTHS, SLAB_HEIGHTS = (7, 4, 14), (14, 7)
"""Pixels of a register tile, and rows of a slab, that are given to the tuner."""

ALIASED_BYTES, ALIASED_TILE_W = 1024, 4
"""Pixels that are a multiple of so many bytes apart, such as those of 256 or 512 channels, share 4 sets or fewer of the
first-level cache. Strided depthwise convolutions then compute all channels of so many pixels before the next: tiles of
14, one block of channels after the other, took 1.3 (256 channels) to 3 times as long (512 and 1024) on an AMD Zen 5.
Strided dgrad of small groups does the same with GROUPS_FAR_TILE_W pixels; their forward does not gain by it."""

PIECE = 8
"""Pixels of a piece of a row in wgrad, whose code has no loop."""

GROUPS_FAR_PIECE, GROUPS_FAR_ROWS, GROUPS_FAR_WIDTH = 4, 7, 28
"""The piece, and the rows of a slab, in wgrad of small groups from memory (WGRAD_PREFETCH_FROM, GROUPS_FAR_PRODUCTS) if
rows of dY are longer than GROUPS_FAR_WIDTH: 1.15 to 1.45 times as fast on an AMD Zen 5, no faster for 28 columns."""


class DepthwiseChannels(GroupedKernel):
    """Vectors of channels, with one channel a group on one side: depthwise convolutions with a multiplier."""

    name = "depthwise"
    reason = "one channel a group"
    conv = ChannelsTiling, ChannelsKernel
    wgrad = ChannelsWgradTiling, ChannelsWgrad

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Why vectors of channels cannot be used, or nothing."""
        if problem.groups == 1:
            return ONE_GROUP
        if direction == BACKWARD_WEIGHT.name:
            return "not one input channel a group" if not problem.is_depthwise else wgrad_refusal(problem, machine)
        spec = conv_spec(problem, direction)
        if group_width(spec) > 1:
            return "not one channel a group"
        return conv_refusal(problem, spec, machine)

    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The one tiling that it has for a problem."""
        if direction == BACKWARD_WEIGHT.name:
            return Plan((_wgrad_tiling(problem, machine),))
        return Plan((_conv_tiling(problem, conv_spec(problem, direction), machine),))

    def tilings(self, problem: ConvProblem, direction: str, own: Plan, machine: Machine) -> Iterator[Plan]:
        """In place: tiles of other widths, prefetched or not, in either order of the loops, in slabs of other heights.

        Then the plans for other machines: memory and caches decide, which the estimate does not see.
        """
        seen = [own]
        if direction != BACKWARD_WEIGHT.name and own.only(ChannelsTiling).in_place:
            tiling = own.only(ChannelsTiling)
            orders = [(inner, prefetch) for inner in (True, False) for prefetch in (True, False)]
            heights = (tiling.slab_h, *SLAB_HEIGHTS)
            for (inner, prefetch), tile_w, slab_h in itertools.product(orders, TILE_WIDTHS, heights):
                other = replace(tiling, channels_inner=inner, prefetch=prefetch, tile_w=tile_w, slab_h=slab_h)
                plan = Plan((other,))
                if plan not in seen and not self.invalid(problem, direction, plan, machine):
                    seen.append(plan)
                    yield plan
        yield from (plan for plan in super().tilings(problem, direction, own, machine) if plan not in seen)

    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """The time of the multiply-adds and of memory; it depends on the tiling by `in_place` only."""
        (tiling,) = plan.tilings
        assert isinstance(tiling, (ChannelsTiling, ChannelsWgradTiling))
        return with_memory(_estimate(problem, direction, machine, tiling.in_place), problem)

    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why the tiling cannot be built, or nothing."""
        reason = not_one_tiling(plan)
        if reason:
            return reason
        if direction == BACKWARD_WEIGHT.name:
            return invalid_wgrad(problem, plan.only(ChannelsWgradTiling), machine)
        return invalid_conv(conv_spec(problem, direction), plan.only(ChannelsTiling), machine)


class SmallGroups(DepthwiseChannels):
    """Vectors that span the channels of several groups, of as many channels on both sides."""

    name = "small groups"
    reason = "vectors span several groups"

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Why vectors cannot span the channels of several groups, or nothing."""
        if problem.groups == 1:
            return ONE_GROUP
        if direction == BACKWARD_WEIGHT.name:
            return "one input channel a group" if problem.is_depthwise else wgrad_refusal(problem, machine)
        spec = conv_spec(problem, direction)
        if group_width(spec) == 1:
            return "one channel a group"
        return conv_refusal(problem, spec, machine)


def group_width(spec: ConvSpec) -> int:
    """The channels of a group, of the source or the result, whichever has fewer."""
    return min(spec.source_channels, spec.result_channels)


def _conv_tiling(problem: ConvProblem, spec: ConvSpec, machine: Machine) -> ChannelsTiling:
    """How forward or dgrad over vectors of channels is tiled."""
    each, lanes = group_width(spec), machine.lanes(spec.dtype)
    pixels = _pixels(spec, machine)
    in_place = _conv_in_place(spec, machine)
    _, height, width = spec.result.extents
    step = spec.out_step[1]
    element = DTYPE_BYTES[spec.dtype]
    row_bytes = width * element * (spec.groups * each if in_place else lanes)
    # Smaller elements spread over as many rows and pages, which hardware prefetchers do not follow either.
    limit = PREFETCH_FROM * DTYPE_BYTES[spec.source.dtype] // element
    prefetch = in_place and _from_memory(problem, limit)
    is_bound = problem.bytes >= FAR_FROM and problem.macs < FAR_PRODUCTS * problem.bytes
    far = prefetch and spec.out_step[2] == 1 and is_bound
    groups_far = in_place and each > 1 and width > pixels and problem.bytes >= limit
    groups_far &= problem.macs < GROUPS_FAR_PRODUCTS * problem.bytes
    slab_h = height if far else max(1, machine.l2_bytes // SLAB_SHARE // (row_bytes * step)) * step
    blocks = -(-spec.groups * each // lanes)
    wanted = 4 * machine.parts
    channel_splits = 1
    if in_place:
        images = spec.batch * -(-spec.result.extents[0] // spec.out_step[0])
        slabs = -(-wanted // images)
        slab_h = min(slab_h, max(1, height // (slabs * step)) * step)
        items = images * -(-height // slab_h)
        channel_splits = min(blocks, -(-wanted // items))
    slab_h = min(slab_h, -(-height // step) * step)
    # Slabs of equal size.
    count = -(-height // slab_h)
    slab_h = -(-height // (count * step)) * step
    if far:
        pixels = min(pixels, FAR_TILE_W // spec.in_step[2] or 1)
    if groups_far:
        pixels = min(pixels, GROUPS_FAR_TILE_W)
    aliased = in_place and _pixels_share_sets(spec) and (each == 1 or step > 1)
    if aliased:
        pixels = min(pixels, ALIASED_TILE_W if each == 1 else GROUPS_FAR_TILE_W)
    strided = in_place and each == 1 and not far and spec.in_step[2] * spec.out_step[2] > 1
    strided &= problem.macs < STRIDED_PRODUCTS * problem.bytes
    if strided and (not prefetch or spec.in_step[2] > 1):
        pixels, prefetch = min(pixels, STRIDED_TILE_W), False
    inner = far or groups_far or aliased or strided
    return ChannelsTiling(in_place, pixels, slab_h, channel_splits, prefetch or groups_far, channels_inner=inner)


def _pixels_share_sets(spec: ConvSpec) -> bool:
    """Whether pixels lie so far apart that a strided convolution finds them in few sets of the first-level cache."""
    if spec.in_step[2] == spec.out_step[2] == 1:
        return False
    strides = (view.spatial[2] * DTYPE_BYTES[view.dtype] for view in (spec.source, spec.result))
    return any(stride % ALIASED_BYTES == 0 for stride in strides)


def conv_refusal(problem: ConvProblem, spec: ConvSpec, machine: Machine) -> str:
    """Why vectors of channels cannot be used for forward or dgrad, or nothing."""
    if sum(map(len, spec.phases)) > MAX_PHASES:
        return f"more than {MAX_PHASES} phases"
    each = group_width(spec)
    refusal = (_small_group_refusal(problem, machine) if each > 1 else "") or _conv_refusal(spec, machine)
    products = 0 if refusal else emitted_products(spec, _pixels(spec, machine)) * each
    if products > MAX_PRODUCTS:
        return f"borders and phases would take {products} multiply-adds of code"
    return refusal


def _small_group_refusal(problem: ConvProblem, machine: Machine) -> str:
    """Why vectors cannot span the channels of several groups, or nothing."""
    each, lanes = problem.in_channels // problem.groups, machine.lanes(problem.accumulator)
    if problem.out_channels != problem.in_channels:
        return "groups of several channels need as many output as input channels"
    return f"groups of {each} channels do not divide vectors of {lanes}" if lanes % each else ""


def _wgrad_tiling(problem: ConvProblem, machine: Machine) -> ChannelsWgradTiling:
    """How wgrad over vectors of channels is tiled."""
    in_place = _wgrad_in_place(problem, machine)
    kernel, strides, _, _ = axes_of(problem)
    x, _, dy = views(problem)
    depth, height, width = dy.extents
    multiplier, lanes = problem.out_channels // problem.groups, machine.lanes(problem.accumulator)
    multiples = max(
        m
        for m in range(1, multiplier + 1)
        if multiplier % m == 0 and (m == 1 or m * (kernel[2] + 1) + 2 <= machine.registers)
    )
    budget = machine.l2_bytes // WGRAD_SLAB_SHARE * (1 if in_place else 4)
    panels = multiples if problem.is_depthwise else 1
    row_bytes = (width * panels + x.extents[2] * strides[1]) * machine.vector_bytes
    prefetch = in_place and _from_memory(problem, WGRAD_PREFETCH_FROM)
    slab_h = min(height, max(1, budget // row_bytes))
    if in_place:
        slab_h = 1 if prefetch else min(slab_h, _near_rows(problem))
    piece = PIECE
    if in_place and not problem.is_depthwise and not prefetch and width > GROUPS_FAR_WIDTH:
        far = problem.bytes >= WGRAD_PREFETCH_FROM and problem.macs < GROUPS_FAR_PRODUCTS * problem.bytes
        if far:
            piece, slab_h = GROUPS_FAR_PIECE, min(height, GROUPS_FAR_ROWS)
    slab_h = -(-height // -(-height // slab_h))
    blocks = -(-problem.in_channels // lanes)
    slabs = int(problem.batch) * depth * -(-height // slab_h)
    split_k, even = 1, blocks % machine.parts == 0 or blocks >= 4 * machine.parts
    if in_place:  # a single image is small: one more part of sums costs more than rows of half the channels
        even = int(problem.batch) * depth == 1 and blocks % machine.parts == 0 and blocks >= 4 * machine.parts
    if not even:
        split_k = min(slabs, machine.parts, MOST_PARTIAL_SUMS // _sums_of_a_part(problem, machine))
    channel_splits = blocks if not in_place else min(blocks, -(-machine.parts // split_k))
    copies = max(1, min(4, 16 // (kernel[2] * multiples)))
    return ChannelsWgradTiling(in_place, piece, copies, multiples, slab_h, split_k, channel_splits, prefetch)


def _near_rows(problem: ConvProblem) -> int:
    """Rows of dY in a slab that is read in place: the pixels of a row spread over many pages.

    From one row of taps to the next, the slab reads the same rows of dY again, and rows of X that are one further.
    """
    _, strides, _, _ = axes_of(problem)
    x, _, dy = views(problem)
    if sum(view.size * DTYPE_BYTES[view.dtype] for view in (dy, x)) <= Machine.near_pages * 3 / 2 * Machine.page_bytes:
        return dy.extents[1]  # all of both is near
    dy_pages, x_pages = (
        view.extents[2] * min(1.0, view.spatial[2] * DTYPE_BYTES[view.dtype] / Machine.page_bytes) for view in (dy, x)
    )
    return max(1, int((Machine.near_pages * 3 / 4 - x_pages) / (dy_pages + strides[1] * x_pages)))


def _wgrad_in_place(problem: ConvProblem, machine: Machine) -> bool:
    """Whether X and dY are read in place: their channels are contiguous, and equal in number."""
    x, _, dy = views(problem)
    masked = all(moves_vectors(machine, view.dtype, problem.accumulator) for view in (x, dy))
    whole = problem.in_channels % machine.lanes(problem.accumulator) == 0
    channels_last = x.channel == dy.channel == 1 and problem.out_channels == problem.in_channels
    return channels_last and (whole or masked)


def wgrad_refusal(problem: ConvProblem, machine: Machine) -> str:
    """Why vectors of channels cannot be used for wgrad, or nothing."""
    refusal = "" if problem.is_depthwise else _small_group_refusal(problem, machine)
    if refusal:
        return refusal
    if 2 * problem.in_channels < machine.lanes(problem.accumulator):
        return "groups would fill less than half of a vector"
    kernel, _, _, _ = axes_of(problem)
    sums = machine.registers * 5 // 8
    if kernel[2] > sums:
        return f"more than {sums} taps in a row of the kernel"
    x, _, _ = views(problem)
    if not _wgrad_in_place(problem, machine) and x.extents[2] * kernel[0] * machine.vector_bytes > machine.l2_bytes:
        return "a row of the panel would fill the core's own cache"
    if _sums_of_a_part(problem, machine) > MOST_PARTIAL_SUMS:
        return f"it would keep more than {MOST_PARTIAL_SUMS} sums"
    return ""


def _sums_of_a_part(problem: ConvProblem, machine: Machine) -> int:
    """The elements of dW with its input channels in whole vectors."""
    kernel, _, _, _ = axes_of(problem)
    channels = round_up(problem.in_channels, machine.lanes(problem.accumulator))
    return channels * (problem.out_channels // problem.groups) * math.prod(kernel)


def invalid_conv(spec: ConvSpec, tiling: ChannelsTiling, machine: Machine) -> str:
    """Why forward or dgrad over vectors of channels cannot be built with a tiling, or nothing."""
    step, each = spec.out_step[1], group_width(spec)
    blocks = -(-spec.groups * each // machine.lanes(spec.dtype))
    if tiling.in_place and not _conv_in_place(spec, machine):
        return "in_place needs contiguous channels, as many of them in the source as in the result"
    if tiling.tile_w < 1 or emitted_products(spec, tiling.tile_w) * each > MAX_PRODUCTS:
        return f"tile_w is {tiling.tile_w}; it must be at least 1, and the code at most {MAX_PRODUCTS} multiply-adds"
    most = round_up(spec.result.extents[1], step)
    if not step <= tiling.slab_h <= most or tiling.slab_h % step:
        return f"slab_h is {tiling.slab_h}; it must be a multiple of the step {step}, at most {most}"
    if tiling.channels_inner and not tiling.in_place:
        return "channels_inner needs in_place"
    if not 1 <= tiling.channel_splits <= (blocks if tiling.in_place else 1):
        return f"channel_splits is {tiling.channel_splits}; it must be 1 to {blocks if tiling.in_place else 1}"
    return ""


def invalid_wgrad(problem: ConvProblem, tiling: ChannelsWgradTiling, machine: Machine) -> str:
    """Why wgrad over vectors of channels cannot be built with a tiling, or nothing."""
    multiplier = problem.out_channels // problem.groups
    blocks = -(-problem.in_channels // machine.lanes(problem.accumulator))
    for name in ("tile_w", "copies", "multiples", "slab_h", "split_k", "channel_splits"):
        if getattr(tiling, name) < 1:
            return f"{name} is {getattr(tiling, name)}; it must be at least 1"
    if tiling.in_place and not _wgrad_in_place(problem, machine):
        return "in_place needs contiguous channels, as many of X as of dY"
    if tiling.split_k > MOST_PIECES:
        return f"split_k is {tiling.split_k}; it must be at most {MOST_PIECES}"
    if tiling.split_k * (size := _sums_of_a_part(problem, machine)) > MOST_PARTIAL_SUMS:
        return f"split_k is {tiling.split_k}; parts of {size} sums must be at most {MOST_PARTIAL_SUMS} sums in all"
    if multiplier % tiling.multiples:
        return f"multiples is {tiling.multiples}; it must divide the {multiplier} output channels of an input channel"
    _, height, width = views(problem)[2].extents
    if tiling.slab_h > height or tiling.tile_w > max(PIECE, width):
        return f"slab_h is {tiling.slab_h} and tile_w is {tiling.tile_w}; dY has {height} rows of {width}"
    if tiling.channel_splits > blocks:
        return f"channel_splits is {tiling.channel_splits}; there are {blocks} blocks of channels"
    return ""


def _estimate(problem: ConvProblem, direction: str, machine: Machine, in_place: bool) -> float:
    """Seconds on one core, without memory."""
    lanes, each = machine.lanes(problem.accumulator), problem.in_channels // problem.groups
    if direction == BACKWARD_WEIGHT.name:
        shuffled, share, has = SHUFFLED_WGRAD_OVERHEAD, WGRAD_DOTS_SHARE, has_wgrad_dots(problem, machine)
    else:
        shuffled, share, has = SHUFFLED_SUM_OVERHEAD, DOTS_SHARE, has_dots(conv_spec(problem, direction), machine)
    overhead = SUM_OVERHEAD if problem.is_depthwise else GROUP_SUM_OVERHEAD if each == lanes else shuffled
    cycles = problem.macs / (machine.fmas * lanes) * overhead
    if in_place and each > 1 and has:
        cycles *= share
    if not in_place:
        shapes = [shape for name, (shape, _) in problem.tensors.items() if name != "weight"]
        if problem.is_depthwise:
            transposed = TRANSPOSE_CYCLES * min(1.0, machine.transposed_store / SLOW_TRANSPOSED_STORE)
        else:
            transposed = GROUP_TRANSPOSE_CYCLES
            transposed *= 1.0 if problem.data_dtype == problem.accumulator else CONVERTED_TRANSPOSE
        cycles += transposed * sum(math.prod(int(e) for e in shape) for shape in shapes)
    filled = problem.in_channels / round_up(problem.in_channels, lanes)  # of the last vector, lanes may be empty
    return cycles / filled / Machine.clock


def _from_memory(problem: ConvProblem, limit: int) -> bool:
    """Whether memory limits a problem of at least `limit` bytes: many taps hide it, and prefetches would cost time."""
    return problem.bytes >= limit and problem.macs < 4 * problem.bytes


def _pixels(spec: ConvSpec, machine: Machine) -> int:
    """Accumulators beside the weights of one row of taps; 14 hide the latency of adders and divide common widths."""
    width_taps = max(len(phase[2].taps) for phases in spec.phases for phase in phases)
    return max(4, min(14, machine.registers - 2 - min(width_taps, machine.registers // 2)))


def _conv_in_place(spec: ConvSpec, machine: Machine) -> bool:
    """Whether source and result are read and written in place."""
    channels_last = spec.source.channel == spec.result.channel == 1
    alike = spec.source_channels == spec.result_channels
    masked = all(moves_vectors(machine, view.dtype, spec.dtype) for view in (spec.source, spec.result))
    whole = spec.groups * spec.result_channels % machine.lanes(spec.dtype) == 0
    return channels_last and alike and (whole or masked)


def _conv_refusal(spec: ConvSpec, machine: Machine) -> str:
    """Why vectors of channels cannot be used, whatever the groups, or nothing."""
    if 2 * spec.groups * min(spec.source_channels, spec.result_channels) < machine.lanes(spec.dtype):
        return "groups would fill less than half of a vector"
    if spec.source.extents[2] * machine.vector_bytes > machine.l2_bytes and not _conv_in_place(spec, machine):
        return "a row of the panel would fill the core's own cache"
    return ""


KERNELS = (DepthwiseChannels(), SmallGroups())

__all__ = ["KERNELS", "DepthwiseChannels", "SmallGroups", "invalid_conv", "invalid_wgrad"]
