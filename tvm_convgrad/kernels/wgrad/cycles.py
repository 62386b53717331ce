# SPDX-License-Identifier: Apache-2.0
"""The estimate of wgrad as an implicit GEMM: seconds of a tiling over vector registers, fitted on AVX-512."""

from __future__ import annotations

import math

from tvm_convgrad.codegen.hardware import Machine, beyond_near_pages
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.costs import WGRAD
from tvm_convgrad.kernels.wgrad.panel_shapes import Im2colPanel, VectorPanel
from tvm_convgrad.kernels.wgrad.spec import VECTOR, WgradSpec, WgradTiling

PANEL_VECTOR_CYCLES = 0.25
"""Cycles by which a vector of a panel beyond the first-level cache delays a step."""

IM2COL_LOAD_CYCLES = 0.5
"""Cycles to load a vector or a broadcast where rows are im2col rows."""

ROW_CYCLES = 5
"""Cycles to leave the loop over the pixels of a row: its exit is sometimes mispredicted, and the pipeline drains."""

WRITE_CYCLES, TRANSPOSED_WRITE_CYCLES, FAR_WRITE_CYCLES, SCALAR_WRITE_CYCLES = 0.2, 3.0, 10.0, 2.5
"""Cycles to write an element of dW: as part of a vector; of a transposed vector; of a transposed vector if the core's
own cache does not hold dW; by itself."""

FAR_WRITE_BYTES = 256
"""The distance of input channels in dW from which on transposed vectors cost more than contiguous ones."""

EXPOSED = 0.15
"""The share of the time of a stream from the shared cache that the arithmetic never hides."""

UNPREDICTED_RATE, SUMS_RATE = 5 / 3, 2.0
"""Rates relative to the shared cache's: of cache lines that no hardware prefetcher predicts, and of sums that the
core's own cache does not hold. They are above 1 because arithmetic hides part of both."""

KEPT_SHARE = 3 / 4
"""The share of the core's own cache that sums and slabs may fill and stay in it."""

SUMS_SHARE = 3 / 8
"""The share of the shared cache that the sums of all cores may fill and stay in it."""

FAR_PAGE_CYCLES = 14.0
"""Cycles of a pixel whose scalars lie in a page of its own, if there are many: TLB misses and cache conflicts."""

FAR_PIXEL_CYCLES, FAR_PIXEL_BYTES = 1.0, 512
"""Cycles of a pixel whose scalars come from the second-level cache, and the distance of pixels in bytes from which on
they do; half of it where each tap reads them again."""

PREFETCH_CYCLES = 0.5
"""Cycles of a step to prefetch the next slab or, without prefetches, to wait for data beyond the core's own cache."""

PREFETCH_EXPOSED = 0.25
"""The share of the time of a stream that remains if the next slab is prefetched."""

PREFETCHED_BYTES = 1 << 20
"""The most bytes of a slab and the next one together, for the next one to be prefetched in time. On an Emerald Rapids,
whose L2 has 2 MiB, slabs twice as large took 6 % longer (geometric mean of 44 layers)."""

WORD_FACTOR = 1.5
"""The cycles to pack a word of two elements, relative to those of an element."""

WORD_STREAM_CYCLES = 25.0
"""Cycles that a tile of dot products waits at the beginning of a slab for each row of scalars in place: rows lie far
apart, and a row of bfloat16 is so short that hardware prefetchers do not pay for themselves."""


def elapsed(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
    """Seconds on all of the machine's parts: what one core needs, and the share of it of the core that has most."""
    return estimate(spec, tiling, machine) * busiest(spec, tiling, machine)


def busiest(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
    """The share of the work of the core that has most."""
    oriented = spec.transposed if tiling.transposed else spec
    depth, height, _ = oriented.dy.extents
    in_blocks = -(-oriented.in_channels // (tiling.tile_n * machine.lanes(spec.dtype)))
    out_blocks = -(-oriented.out_channels // tiling.tile_m)
    slabs = -(-spec.batch * depth // tiling.slab_d) * -(-height // tiling.slab_h)
    items, largest = spec.groups, 1 / spec.groups
    for count, size in (
        (in_blocks, min(tiling.n_blocks, in_blocks)),
        (out_blocks, -(-out_blocks // tiling.split_m)),
        (slabs, -(-slabs // tiling.split_k)),
    ):
        items *= -(-count // size)
        largest *= size / count
    return min(1.0, -(-items // machine.parts) * largest)


def estimate(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
    """Seconds on one core: multiply-adds, sums, packing and writing, and the streams that caches do not hold."""
    spec = spec.transposed if tiling.transposed else spec
    lanes = machine.lanes(spec.dtype)
    element = DTYPE_BYTES[spec.dtype]
    shared_rate, unpredicted_rate = machine.shared_rate / EXPOSED, UNPREDICTED_RATE * machine.shared_rate
    kept_bytes = int(machine.l2_bytes * KEPT_SHARE)
    tile_m, tile_n, width = tiling.tile_m, tiling.tile_n, tiling.tile_n * lanes
    depth, height, columns = spec.dy.extents
    taps = math.prod(spec.kernel)
    slabs = -(-spec.batch * depth // tiling.slab_d) * -(-height // tiling.slab_h)
    pixels = spec.batch * depth * height * columns
    moved_x, moved_dy = (
        DTYPE_BYTES[view.dtype] if spec.dots or spec.converts(view) else element for view in (spec.x, spec.dy)
    )
    steps = spec.batch * depth * height * -(-columns // 2) if spec.dots else pixels
    latency, each = (machine.dot_latency, machine.dot_cost) if spec.dots else (machine.fma_latency, 1)
    in_blocks, out_blocks = -(-spec.in_channels // width), -(-spec.out_channels // tile_m)
    tiles = taps * in_blocks * out_blocks * spec.groups
    in_items = -(-in_blocks // tiling.n_blocks)

    loads = WGRAD.load if spec.im2col_of is None else IM2COL_LOAD_CYCLES
    step = max(tile_m * tile_n * each / machine.fmas, (tile_m + tile_n) * loads, latency)
    step += tile_n * PANEL_VECTOR_CYCLES
    step += PREFETCH_CYCLES if tiling.prefetch or from_beyond(spec, machine) else 0
    whole = columns % (lanes * spec.word_columns) == 0
    joined = spec.kernel[1:] == (1, 1) and spec.im2col_of is None and (whole or spec.x.channel == 1)
    exits = slabs if joined else spec.batch * depth * height * spec.valid_fractions[0] * spec.valid_fractions[1]
    sums = tile_m * tile_n * WGRAD.store * (0 if slabs == 1 else 1)
    share = (
        math.prod(spec.valid_fractions)
        if spec.im2col_of is None
        else im2col_panel(spec, tiling, machine).valid_fraction
    )
    cycles = tiles * (steps * step * share + exits * ROW_CYCLES + slabs * (WGRAD.tile + sums))

    if spec.dots and spec.im2col_of is None and not tiling.scalars_packed:
        cycles += tiles * slabs * tile_m * WORD_STREAM_CYCLES

    panel = _panel(spec, tiling, width).size
    if not tiling.vectors_in_place:
        cycles += slabs * in_blocks * spec.groups * tiling.split_m * panel * _pack_cost(spec, machine)
    if spec.im2col_of is not None:
        plain = machine.has_masks and spec.has_vectors(spec.im2col_of.x)
        size = im2col_panel(spec, tiling, machine).size
        cycles += slabs * in_items * tiling.split_m * size * (WGRAD.copy if plain else WGRAD.scalar)
    if tiling.scalars_packed:
        cost = WGRAD.transpose if spec.dy.channel != 1 else WGRAD.copy
        cost = cost if machine.has_masks else WGRAD.scalar
        cycles += pixels / spec.word_columns * spec.out_channels * spec.groups * in_items * cost

    if spec.converts_all(tiling):
        moved_dy = element
        cycles += spec.dy.size * (WGRAD.copy + 2 * element / stream_rate(spec.dy.size * element, machine))

    # Streams: X once a split; dY once an item of input channels, or once a block of them if the cache loses its slab.
    slab_pixels = tiling.slab_d * tiling.slab_h * columns
    per_split = -(-spec.out_channels // tiling.split_m)
    kept = taps * tiling.n_blocks * width * per_split * element if slabs > tiling.split_k else 0
    touched = slab_pixels * per_split * element + panel * element + kept // tiling.n_blocks
    reads = in_items if touched <= kept_bytes else in_blocks
    apart = spec.x.channel == 1  # pixels that no tap reads are then whole cache lines
    read = min(spec.x.size, pixels * spec.in_channels * spec.groups * taps if apart else spec.x.size) * moved_x
    stream = read * tiling.split_m / stream_rate(read, machine)
    scattered = spec.im2col_of is None and not tiling.scalars_packed and spec.dy.spatial[2] > 1
    stream += (
        spec.dy.size
        * moved_dy
        * reads
        / min(stream_rate(spec.dy.size * moved_dy, machine), unpredicted_rate if scattered else shared_rate)
    )
    cycles += stream * (PREFETCH_EXPOSED if tiling.prefetch and in_time(spec, tiling, machine) else 1)
    if scattered:
        cycles += (
            tiles
            * pixels
            * (FAR_PAGE_CYCLES * _beyond_pages(spec, tiling, element) + FAR_PIXEL_CYCLES * far_pixels(spec, element))
        )
    if tiling.vectors_in_place and spec.im2col_of is None:
        distance = spec.x.spatial[2] * element
        cycles += tiles * pixels * FAR_PAGE_CYCLES * beyond_near_pages(slab_pixels, distance)
    if kept and kept + slab_pixels * per_split * element + panel * element > kept_bytes:
        cycles += slabs * tiles * tile_m * width * element * 2 / sums_rate(kept, machine)
    return (cycles + store_cycles(spec, tiling, machine)) / machine.clock


def from_beyond(spec: WgradSpec, machine: Machine) -> bool:
    """Whether each element is read for one tap only, from beyond the core's own cache."""
    size = max(spec.x.size, spec.dy.size) * DTYPE_BYTES[spec.dtype]
    return spec.is_pointwise and size > machine.l2_bytes and not spec.dots


def in_time(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> bool:
    """Whether a slab that is prefetched stays in the core's own cache until it is read; of an oriented spec."""
    pixels = tiling.slab_d * tiling.slab_h * spec.dy.extents[2]
    rows = min(tiling.n_blocks * tiling.tile_n * machine.lanes(spec.dtype), spec.in_channels)
    rows += -(-spec.out_channels // tiling.split_m)
    return 2 * pixels * rows * DTYPE_BYTES[spec.dtype] <= min(machine.l2_bytes, PREFETCHED_BYTES)


def sums_rate(kept: float, machine: Machine) -> float:
    """Bytes a cycle of sums that the core's own cache does not hold, of which a work item has `kept` bytes."""
    in_shared = min(1.0, machine.shared_bytes * SUMS_SHARE / (kept * machine.parts))
    return max(machine.memory_rate, SUMS_RATE * machine.shared_rate * in_shared)


def store_cycles(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
    """Cycles to write dW, and to add the parts of its sums."""
    element, kept_bytes = DTYPE_BYTES[spec.dtype], int(machine.l2_bytes * KEPT_SHARE)
    dw = spec.dw
    write = SCALAR_WRITE_CYCLES
    if dw.into == 1:
        write = WRITE_CYCLES
    elif machine.has_masks and (dw.out == 1 or dw.spatial[2] == 1):
        transposed = TRANSPOSED_WRITE_CYCLES if dw.size * element <= kept_bytes else FAR_WRITE_CYCLES
        write = WRITE_CYCLES if dw.into * element < FAR_WRITE_BYTES else transposed
    shared_rate = machine.shared_rate / EXPOSED
    cycles = dw.size * write + dw.size * element * 2 / shared_rate
    if tiling.split_k > 1:
        cycles += dw.size * tiling.split_k * (WGRAD.store / machine.lanes(spec.dtype) + element * 2 / shared_rate)
    return cycles


def stream_rate(size: int, machine: Machine) -> float:
    """Bytes a cycle of a stream that arithmetic hides: from the shared cache, or from memory if it is larger."""
    return machine.shared_rate / EXPOSED if size <= machine.shared_bytes else machine.memory_rate


def _pack_cost(spec: WgradSpec, machine: Machine) -> float:
    """Cycles to pack an element of X."""
    if not spec.has_vectors(spec.x):
        return WGRAD.scalar
    made = WORD_FACTOR if spec.dots else 1.0
    if spec.x.channel == 1:
        return WGRAD.copy * made
    made = 1.0 if spec.even_pairs else made  # contiguous pixels are words already
    if not spec.transposes_x or not machine.has_masks:
        return WGRAD.scalar * made
    return made * WGRAD.transpose * (1 if spec.x.spatial[2] * spec.packed_stride_w == 1 else 1.5)


def im2col_panel(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> Im2colPanel:
    """The panel of the im2col rows of a spec."""
    return Im2colPanel.of(spec, tiling.tile_m, (tiling.slab_h, tiling.slab_d), machine.lanes(spec.dtype))


def _panel(spec: WgradSpec, tiling: WgradTiling, width: int) -> VectorPanel:
    """The panel of X."""
    return VectorPanel.of(spec, tiling.slab_h, tiling.slab_d, width, VECTOR if spec.transposes_x else 1)


def _beyond_pages(spec: WgradSpec, tiling: WgradTiling, element: int) -> float:
    """How far, from 0 to 1, a slab of dY whose pixels are not contiguous spreads over more pages than are near."""
    return beyond_near_pages(tiling.slab_d * tiling.slab_h * spec.dy.extents[2], spec.dy.spatial[2] * element)


def far_pixels(spec: WgradSpec, element: int) -> bool:
    """Whether pixels of dY are so far apart that they share few sets of the first-level cache."""
    distance = FAR_PIXEL_BYTES if spec.is_pointwise else FAR_PIXEL_BYTES // 2
    return spec.im2col_of is None and spec.dy.spatial[2] * element >= distance


__all__ = [
    "KEPT_SHARE",
    "WORD_FACTOR",
    "busiest",
    "elapsed",
    "estimate",
    "far_pixels",
    "from_beyond",
    "im2col_panel",
    "in_time",
    "store_cycles",
    "stream_rate",
    "sums_rate",
]
