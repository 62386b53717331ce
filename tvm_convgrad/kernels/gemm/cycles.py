# SPDX-License-Identifier: Apache-2.0
"""The estimate of the implicit GEMM: cycles of the loop nest of a tiling, fitted on an AVX-512 machine."""

from __future__ import annotations

from dataclasses import replace

from tvm_convgrad.codegen.hardware import Machine, beyond_near_pages
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.costs import GEMM, overlapped
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling, blocking_of
from tvm_convgrad.kernels.spec import ConvSpec, Phase, View, WeightView
from tvm_convgrad.kernels.vectors import converts_halves

FAR_VECTOR_CYCLES = 3.3
"""Cycles to load a vector of pixels of one channel: channels lie far apart, so that no hardware prefetcher predicts it,
and the vector may straddle two cache lines."""

NEAR_CHANNELS, NEAR_VECTOR_CYCLES, STRIDED_NEAR_VECTOR_CYCLES = 4, 1.65, 2.4
"""The most channels of a panel, such as those of an image, whose rows prefetchers follow, and the cycles then, without
and with a stride of the columns, whose residues lie apart. The latter was fitted to stems of 32 and 48 channels on a
Zen 5: tiles of 3 x 7 vectors, which a smaller number chose, took 1.4 (bfloat16) and 1.9 times as long (float32)."""

FAR_PAGE_CYCLES = 1.0
"""Additional cycles of a step whose channels lie in more pages than are near: each pass over them misses the TLB."""

WEIGHT_VECTOR_CYCLES = 0.3
"""Additional cycles of a step for each vector of W, if a block of W does not fit the first-level cache."""

PIXEL_VECTOR_CYCLES = 0.5
"""Additional cycles of a step for each vector of pixels of a panel, if what a tile reads of it does not fit there."""

SPLIT_LINE_CYCLES = 1.9
"""Additional cycles of a vector of pixels, if the bytes of a channel are not a multiple of a cache line: most vectors
then straddle two lines."""

SHORT_REDUCTION = 64
"""A reduction of fewer steps is short: the start of the next register tile has to hide the end of this one."""

WIDE_TILE_PENALTY = 0.01
"""The relative additional cost of a step of a short reduction for each accumulator beyond 16, as out-of-order execution
then reaches less far into the next tile."""

WORD_WIDE_TILE_PENALTY = 0.025
"""The same where pairs of bfloat16 are words: a dot product takes longer than a multiply-add."""

FEW_STEPS, FEW_STEPS_CYCLES = 8, 1.0
"""A loop over fewer channels than FEW_STEPS costs so many additional cycles a step."""

FAR_COPY_CYCLES = 0.8
"""Cycles to pack an element in the order of memory where channels lie far apart."""

FETCH_CYCLES = 0.6
"""Additional cycles to pack an element from beyond the core's own cache before anything is summed."""

TOUCH_CYCLES = 8.0
"""Cycles of the first vectors that a tile reads of a channel of the unpacked source."""

TOUCH_AGAIN_CYCLES = 2.0
"""Cycles of either kind of touch if the core still holds the source, from an earlier block of channels."""

PIXELS_TOUCHED, PIXEL_TOUCH_CYCLES, FAR_TOUCH_CYCLES = 14, 8.0, 28.0
"""Reading pixels one by one costs PIXEL_TOUCH_CYCLES a channel for each PIXELS_TOUCHED columns that a tile spans, and
FAR_TOUCH_CYCLES more if the channels lie in more pages than are near."""

RATE_WHILE_STORING = 0.75
"""The share of the shared cache's rate that remains for reads while results are stored."""

EXPOSED = 0.15
"""The share of the time of a stream from the shared cache that the arithmetic of a tile never hides."""

RATE_WHILE_PACKING = 5 / 3
"""The rate of panels that all cores pack before they compute, as far as their own caches do not hold them, relative to
the shared cache's rate; it is above 1 because packing and reading overlap with other work."""

SAME_SET_PENALTY = 0.3
"""The relative additional cost of the arithmetic if the pixels of a tile, or the channels of vectors of pixels, lie
whole pages apart, and thus in the same cache sets."""

NEAR_WEIGHT_BYTES = 2 << 20
"""The most bytes of W that every tile can read again without waiting: measured on a CPU whose L2 has as many, and
assumed for others."""

ITEM_CYCLES = 1500.0
"""Cycles to start and end a work item."""

WORD_TRANSPOSE, FAR_WORD = 0.5, 0.6
"""Factors where pairs of bfloat16 are words: of the cycles to pack by squares, as fewer bytes are moved, and of those
to pack a word in the order of memory where channels lie far apart, as each word has two channels."""

CONVERT_CYCLES = 0.75
"""Cycles by which converting a vector of an unpacked source delays a step."""


def block_bytes(spec: ConvSpec, blocking: Blocking, tiling: GemmTiling) -> int:
    """Bytes of the source that a spatial block reads, from its panel or in place."""
    element = DTYPE_BYTES[spec.dtype]
    if not tiling.unpacked:
        return int(blocking.panel_size * element * blocking.read_share(tiling.block_h, spec.source.extents[1]))
    return blocking.block_w * tiling.block_h * spec.in_step[1] * spec.in_step[2] * spec.source_channels * element


def estimate(
    spec: ConvSpec,
    phases: tuple[Phase, ...],
    tiling: GemmTiling,
    machine: Machine,
    step: float | None = None,
    stored: float = GEMM.store,
) -> float:
    """Cycles until the last core is done: arithmetic, packing, stores, and traffic beyond the core's own cache.

    `step` has the cycles of one step of the reduction of a tile, if it is not one of vector registers, and `stored`
    those to store a vector of sums whose elements are contiguous in the result.
    """
    blocking = blocking_of(spec, phases, tiling, machine)
    lanes, element = machine.lanes(spec.dtype), DTYPE_BYTES[spec.dtype]
    depth, h, _ = (axis.count for axis in phases[0])
    channels, groups, parts = spec.source_channels, spec.groups, machine.parts
    images = spec.batch * depth
    tiles = images * groups * blocking.channel_blocks * (h // tiling.tile_h) * blocking.tiles_w
    accumulators = tiling.tile_m * tiling.tile_n
    step_of_vectors = step is None
    if step is None:
        step = _vector_step(spec, phases, tiling, blocking, machine)
        if blocking.last_vectors < tiling.tile_n:
            narrow = replace(tiling, tile_n=blocking.last_vectors)
            last = _vector_step(spec, phases, narrow, blocking, machine)
            step += (last - step) / blocking.channel_blocks
        if blocking.ranges.pixels is not None:
            step *= _share_of_pixels(spec, phases, tiling, blocking, machine)
    arithmetic = tiles * blocking.tap_count * blocking.ranges.share * channels * step
    transposed = not tiling.over_pixels and spec.result.channel != 1
    scattered = tiling.over_pixels and spec.result.spatial[2] * spec.out_step[2] != 1
    scattered = scattered or (tiling.channel_parts > 1 and not transposed)
    store = machine.transposed_store if transposed else lanes * GEMM.scalar if scattered else stored
    work = arithmetic + tiles * len(phases) * (accumulators * store + GEMM.tile)
    # The source.
    blocks = images * groups * blocking.spatial_blocks
    panels = spec.batch * groups * blocking.panels(depth) * (1.0 if blocking.whole_depth else blocking.ranges.share_d)
    copied = GEMM.copy
    if tiling.over_pixels or spec.source.channel != 1:
        copied = FAR_COPY_CYCLES if tiling.over_pixels and spec.source.channel != 1 else GEMM.transpose
        copied *= blocking.interleaved / len(blocking.residues)  # columns that no tap reads are loaded as well
    made = spec.pairs is not None and spec.pairs.source != 0
    if made and spec.source.spatial[2] == 1:
        copied *= FAR_WORD if tiling.over_pixels else WORD_TRANSPOSE
    as_numbers = spec.source.dtype == spec.dtype or converts_halves(machine, spec.source.dtype, spec.dtype)
    if not (as_numbers or made) or not machine.has_masks:
        copied = GEMM.scalar
    splits, copies = (tiling.splits, 1) if tiling.order == "source" else (1, tiling.splits)
    panel = 0 if tiling.unpacked else blocking.panel_size * blocking.packed_share(spec, tiling.block_h)
    if bytes_of(spec.source) > machine.l2_bytes and tiling.order == "weights":
        copied += FETCH_CYCLES
    work += panels * splits * panel * copied
    if tiling.unpacked and spec.source.channel != 1:
        work += _touches(spec, tiling, blocking, tiles / blocking.channel_blocks, machine)
    # W.
    weights = groups * blocking.channel_blocks * blocking.channel_block * blocking.tap_count * channels
    contiguous = spec.weight_result_stride == 1
    transposable = spec.weight_source_stride == 1 or spec.weight_source_stride == blocking.tap_count
    per_weight = GEMM.copy if contiguous else GEMM.transpose if transposable else 2 * GEMM.transpose
    work += weights * copies * per_weight
    # Streams from beyond the core's own cache: W for the first tile of each spatial block, the source for every tile.
    weight_bytes = blocking.channel_block * blocking.tap_count * channels * element
    source_bytes: float = block_bytes(spec, blocking, tiling)
    if blocking.whole_depth:  # of all depth slices, a block reads those that its taps reach
        source_bytes *= min(1.0, len(phases[0][0].taps) / len(blocking.panel_slices))
    tile_bytes = source_bytes * blocks * blocking.channel_blocks / tiles
    if tiling.order == "source":
        items, largest = (
            blocks * tiling.splits,
            -(-blocking.channel_blocks // tiling.splits) / (blocking.channel_blocks * blocks),
        )
        work += _handover(weights * element, machine)
        beyond_w = _beyond(weights / groups * element, source_bytes, machine)
        beyond_source = _beyond(source_bytes, weight_bytes, machine)
    else:
        pieces = images * blocking.spatial_blocks
        items, largest = (
            groups * blocking.channel_blocks * copies,
            -(-pieces // copies) / (pieces * groups * blocking.channel_blocks),
        )
        beyond_w = _beyond(weight_bytes, source_bytes, machine)
        whole = panels * panel * element / groups if blocking.whole_depth else pieces * source_bytes
        beyond_source = _beyond(whole, weight_bytes, machine)
        work += 0 if tiling.unpacked else _handover(panels * panel * element, machine)
        far = step_of_vectors and phase_weight_bytes(spec, blocking) > NEAR_WEIGHT_BYTES * tiling.channel_parts
        if far:  # in the other order to pack so large a W and to hand it over decides
            again = weight_bytes * blocking.ranges.share
            work += tiles * EXPOSED * again / (RATE_WHILE_STORING * machine.shared_rate)
        work += tiles * len(phases) * (tiling.channel_parts - 1) * accumulators * 2 * GEMM.store
    for beyond, times, bytes_ in (
        (beyond_w, blocks * blocking.channel_blocks, weight_bytes),
        (beyond_source, tiles, tile_bytes),
    ):
        stream = beyond * bytes_ / (RATE_WHILE_STORING * machine.shared_rate)
        work += times * max(EXPOSED * stream, stream - arithmetic / tiles)
    apart = (spec.source.channel if tiling.over_pixels else blocking.step_w) * element
    if tiling.unpacked and apart % machine.page_bytes == 0:
        work += arithmetic * SAME_SET_PENALTY
    work += items * ITEM_CYCLES
    total = work * min(1.0, -(-items // parts) * largest)
    memory = (bytes_of(spec.source) + bytes_of(spec.weight) + bytes_of(spec.result)) / parts / machine.mixed_rate
    if tiling.order == "weights" and spec.result.channel == 1 and groups == 1 < blocking.channel_blocks:
        # Each core stores a part of every pixel, and fetches neighbouring lines that others store.
        twice = memory + bytes_of(spec.result) / parts / machine.mixed_rate
        return overlapped(total, memory) + max(0.0, twice - max(total, memory))
    return overlapped(total, memory)


def _vector_step(
    spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, blocking: Blocking, machine: Machine
) -> float:
    """Cycles of one step of the reduction of a tile of vector registers."""
    channels, element, accumulators = spec.source_channels, DTYPE_BYTES[spec.dtype], tiling.tile_m * tiling.tile_n
    latency, cost = (machine.fma_latency, 1) if spec.pairs is None else (machine.dot_latency, machine.dot_cost)
    step = max(accumulators * cost / machine.fmas, (tiling.tile_m + tiling.tile_n) * GEMM.load, latency) + GEMM.step
    if not (tiling.over_pixels or tiling.exact_columns) and channels * blocking.run < FEW_STEPS:
        step += FEW_STEPS_CYCLES
    if blocking.tap_count * channels < SHORT_REDUCTION * len(phases):
        penalty = WIDE_TILE_PENALTY if spec.pairs is None else WORD_WIDE_TILE_PENALTY
        step *= 1 + penalty * max(0, accumulators - 16)
    if tiling.over_pixels:
        near = channels <= NEAR_CHANNELS and not tiling.unpacked
        of_image = NEAR_VECTOR_CYCLES if spec.in_step[2] == 1 else STRIDED_NEAR_VECTOR_CYCLES
        vector = of_image if near else FAR_VECTOR_CYCLES
        step = max(step, vector * tiling.tile_n + tiling.tile_m * cost / machine.fmas + GEMM.step)
    if tiling.unpacked and spec.source.dtype != spec.dtype:
        step += CONVERT_CYCLES * tiling.tile_n
    if tiling.over_pixels and tiling.unpacked:
        step += FAR_PAGE_CYCLES * beyond_near_pages(channels, spec.source.channel * element)
        if spec.source.channel * element % machine.line_bytes:
            step += SPLIT_LINE_CYCLES * tiling.tile_n
    if tiling.over_pixels and not tiling.unpacked:
        rows = blocking.tap_count / (len(phases) * max(1, len(phases[0][2].taps)))  # a phase may have no taps
        far = channels * rows * tiling.tile_n * machine.vector_bytes > machine.l1_bytes
        step += PIXEL_VECTOR_CYCLES * tiling.tile_n if far else 0
    if (
        not tiling.over_pixels
        and blocking.channel_block * blocking.tap_count * channels * element > machine.l1_bytes * len(phases)
    ):
        step += WEIGHT_VECTOR_CYCLES * tiling.tile_n
    return step


def _touches(spec: ConvSpec, tiling: GemmTiling, blocking: Blocking, tiles: float, machine: Machine) -> float:
    """Cycles to step from channel to channel of an unpacked source; `tiles` are those of one block of channels."""
    channels = spec.source_channels
    touch = TOUCH_CYCLES
    if not tiling.over_pixels:
        far = beyond_near_pages(channels, spec.source.channel * DTYPE_BYTES[spec.dtype])
        columns = tiling.tile_m * spec.in_step[2]
        touch = (PIXEL_TOUCH_CYCLES + FAR_TOUCH_CYCLES * far) * columns / PIXELS_TOUCHED
    if tiling.order == "source":
        return tiles * channels * touch
    # Each core goes over the source for each of its blocks of result channels.
    passes = blocking.channel_blocks
    if bytes_of(spec.source) <= machine.l2_bytes:
        passes = min(machine.parts, passes)
    return tiles * channels * (passes * touch + (blocking.channel_blocks - passes) * TOUCH_AGAIN_CYCLES)


def _share_of_pixels(
    spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, blocking: Blocking, machine: Machine
) -> float:
    """The time of the taps of a row relative to that for all pixels, where tiles at its ends sum those in bounds."""
    ends = blocking.ranges.pixels or ()
    pixels = [end - first for taps in ends for first, end in taps]
    steps = {
        count: _vector_step(spec, phases, replace(tiling, tile_m=count * tiling.tile_h), blocking, machine)
        for count in {*pixels, blocking.tile_w} - {0}
    }
    whole, taps = steps[blocking.tile_w], len(phases[0][2].taps)
    between = (blocking.tiles_w - len(ends)) * taps * whole
    return (sum(steps.get(count, 0.0) for count in pixels) + between) / (blocking.tiles_w * taps * whole)


def phase_weight_bytes(spec: ConvSpec, blocking: Blocking) -> int:
    """Bytes of W that each tile of the phase with most taps reads."""
    taps = max(map(len, blocking.taps))
    return taps * spec.source_channels * blocking.channel_block * DTYPE_BYTES[spec.dtype]


def _handover(bytes_: float, machine: Machine) -> float:
    """Cycles to write and read a panel of so many bytes that all cores pack before they compute.

    What the cores' own caches still hold comes from another core, which may be slower than from the shared cache.
    """
    kept = min(bytes_, machine.parts * machine.l2_bytes)
    return 2 * (kept / machine.handover_rate + (bytes_ - kept) / (RATE_WHILE_PACKING * machine.shared_rate))


def bytes_of(view: View | WeightView) -> int:
    """Bytes of a tensor."""
    return view.size * DTYPE_BYTES[view.dtype]


def _beyond(streamed: float, kept: float, machine: Machine) -> float:
    """The share of `streamed` bytes, read repeatedly, that the core's own cache does not hold besides `kept` bytes."""
    return min(1.0, max(0.0, (streamed + kept - machine.l2_bytes) / streamed)) if streamed else 0.0


__all__ = ["NEAR_WEIGHT_BYTES", "block_bytes", "bytes_of", "estimate", "phase_weight_bytes"]
