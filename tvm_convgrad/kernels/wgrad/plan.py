# SPDX-License-Identifier: Apache-2.0
"""The kernel of wgrad as an implicit GEMM: its tilings, and an estimate of the time of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import MOST_PIECES, Machine, beyond_near_pages
from tvm_convgrad.codegen.register_tile import balanced, fits, tile_rows
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Kernel, Plan, not_one_tiling, planned
from tvm_convgrad.kernels.costs import WGRAD
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.wgrad.kernel import wgrad_kernel
from tvm_convgrad.kernels.wgrad.panel_shapes import Im2colPanel, VectorPanel
from tvm_convgrad.kernels.wgrad.spec import VECTOR, WgradSpec, WgradTiling, wgrad_spec

SLAB_PIXELS = (128, 256, 400, 800)
"""The pixels of a slab that are tried. Larger slabs load and store sums less often; smaller ones stay in the core's own
cache."""

MAX_CANDIDATES = 24
"""The most other plans that are given to the tuner."""

MAX_IM2COL_ROWS, MAX_IM2COL_ROWS_OF_FEW = 512, 2048
"""The most pairs of tap and input channel that are tried as rows of the GEMM: with more of them input channels fill the
lanes of vectors as well. The second one holds where input channels fill few lanes."""

FEW_LANES = 0.8
"""The share of the lanes below which input channels fill few of them."""

MAX_EMITTED_ACCUMULATORS = 128
"""The most accumulators in the code of all kinds of blocks of im2col rows: each kind has code of its own."""

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
"""Cycles of a step to prefetch the next slab."""

PREFETCH_EXPOSED = 0.25
"""The share of the time of a stream that remains if the next slab is prefetched."""

WORD_FACTOR = 1.5
"""The cycles to pack a word of two elements, relative to those of an element."""

WORD_STREAM_CYCLES = 25.0
"""Cycles that a tile of dot products waits at the beginning of a slab for each row of scalars in place: rows lie far
apart, and a row of bfloat16 is so short that hardware prefetchers do not pay for themselves."""


class ImplicitGemmWgrad(Kernel):
    """wgrad: dY as one matrix of a GEMM over pixels, X at all taps as the other. It takes every problem."""

    name = "implicit GEMM"
    directions = (BACKWARD_WEIGHT.name,)
    reason = "covers the problem"

    def tiling_type(self, direction: str) -> type[WgradTiling]:
        """`WgradTiling`."""
        return WgradTiling

    def spec(self, problem: ConvProblem) -> WgradSpec:
        """wgrad of a problem in the terms of the kernel."""
        return wgrad_spec(problem)

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Nothing."""
        return ""

    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The tiling after which the last core is done first."""
        spec, parallel = self.spec(problem), problem.macs >= machine.parallel_from
        return Plan((min(candidates(spec, machine, parallel), key=lambda each: elapsed(spec, each, machine)),))

    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """The time until the last core is done, times the cores."""
        return elapsed(self.spec(problem), plan.only(WgradTiling), machine) * machine.parts

    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why the tiling cannot be built, or nothing."""
        return not_one_tiling(plan) or refusal(self.spec(problem), plan.only(WgradTiling), machine)

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (grad, data, weight's gradient[, bias gradient])."""
        spec = self.spec(planned(problem))
        return wgrad_kernel(problem, spec, plan.only(WgradTiling), machine, name, epilogue)

    def tilings(self, problem: ConvProblem, direction: str, own: Plan, machine: Machine) -> Iterator[Plan]:
        """Tilings packed and unpacked, in place or not, with prefetches or without.

        The best estimate of each kind of tile comes first, then the second best of each, up to MAX_CANDIDATES in all.
        """
        spec, taken = self.spec(problem), own.only(WgradTiling)
        knobs = ("scalars_packed", "vectors_in_place", "prefetch")
        found = {
            varied: elapsed(spec, varied, machine)
            for tiling in candidates(spec, machine, taken.parallel)
            for values in itertools.product((False, True), repeat=len(knobs))
            if not refusal(spec, varied := replace(tiling, **dict(zip(knobs, values, strict=True))), machine)
        }
        ranks: dict[WgradTiling, int] = {}
        ordered: list[tuple[int, float, WgradTiling]] = []
        for tiling, seconds in sorted(found.items(), key=lambda pair: pair[1]):
            kind = replace(tiling, slab_h=1, slab_d=1, split_k=1, split_m=1, n_blocks=1, prefetch=False)
            ranks[kind] = ranks.get(kind, -1) + 1
            if tiling != taken:
                ordered.append((ranks[kind], seconds, tiling))
        for _, _, tiling in sorted(ordered, key=lambda each: each[:2])[:MAX_CANDIDATES]:
            yield Plan((tiling,))


# ---------------------------------------------------------------------------------------------------- candidates


def refusal(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> str:
    """Why a tiling cannot be built, or nothing."""
    for name in ("tile_m", "tile_n", "slab_h", "slab_d", "split_k", "split_m", "n_blocks"):
        if getattr(tiling, name) < 1:
            return f"{name} is {getattr(tiling, name)}; it must be at least 1"
    if tiling.split_k > MOST_PIECES:
        return f"split_k is {tiling.split_k}; it must be at most {MOST_PIECES}"
    reason = swap_refusal(spec) if tiling.transposed else ""
    if reason:
        return reason
    spec = spec.transposed if tiling.transposed else spec
    if tiling.tile_m > spec.out_channels:
        return f"tile_m is {tiling.tile_m}; there are {spec.out_channels} rows"
    if not fits(machine, tiling.tile_m, tiling.tile_n):
        return f"{tiling.tile_m} x {tiling.tile_n} accumulators do not fit into the registers"
    if tiling.slab_d > 1 and tiling.slab_h < spec.dy.extents[1]:
        return "slab_d is more than 1, but slab_h is not the whole height"
    if tiling.scalars_packed and not machine.has_masks and not spec.dots:
        return "scalars_packed needs masked loads and stores"
    if spec.im2col_of is not None:
        if tiling.scalars_packed:
            return "scalars_packed is not for im2col rows, which have a panel of their own"
        kinds = len(_im2col_panel(spec, tiling, machine).blocks_by_offsets())
        if kinds > 1 and (tiling.split_m > 1 or kinds * tiling.tile_m * tiling.tile_n > MAX_EMITTED_ACCUMULATORS):
            return f"tile_m is {tiling.tile_m}; blocks of im2col rows lie in {kinds} ways: too much code, and no splits"
    if spec.dots:
        return _refusal_of_dots(spec, tiling)
    if not tiling.vectors_in_place:
        return ""
    if not spec.is_pointwise or spec.x.channel != 1 or spec.x.dtype != spec.dtype:
        return "vectors_in_place needs a pointwise kernel, and contiguous channels of the accumulator's type"
    if spec.in_channels % (tiling.tile_n * machine.lanes(spec.dtype)) and not machine.has_masks:
        return "vectors_in_place needs masked loads if channels do not fill the vectors"
    return ""


def _refusal_of_dots(spec: WgradSpec, tiling: WgradTiling) -> str:
    """Why a tiling of dot products cannot be built, or nothing."""
    if tiling.vectors_in_place:
        return "vectors_in_place is not for dot products, whose vectors are pairs of pixels"
    if tiling.prefetch:
        return "prefetch is not for dot products"
    if spec.im2col_of is None and not tiling.scalars_packed and spec.dy.spatial[2] != 1:
        return "scalars_packed must be set for dot products, unless pixels are contiguous"
    return ""


def swap_refusal(spec: WgradSpec) -> str:
    """Why the GEMM cannot be transposed, with X as rows and dY as vectors, or nothing."""
    if spec.groups > 1:
        return "transposed needs one group"
    if spec.is_pointwise:
        return ""
    if not spec.im2col_rows:
        return "transposed needs a weight in which pairs of tap and input channel have one stride"
    if not Im2colPanel.runs_of(spec)[0]:
        return "transposed needs rows of X with contiguous pixels"
    return ""


def candidates(spec: WgradSpec, machine: Machine, parallel: bool) -> Iterator[WgradTiling]:
    """Valid tilings that are worth an estimate."""
    slices = spec.batch * spec.dy.extents[0]
    lanes = machine.lanes(spec.dtype)
    few = spec.in_channels < FEW_LANES * lanes * -(-spec.in_channels // lanes)
    most = MAX_IM2COL_ROWS_OF_FEW if few else MAX_IM2COL_ROWS
    orientations: tuple[bool, ...] = (False, True)
    if swap_refusal(spec) or (not spec.is_pointwise and spec.in_channels * math.prod(spec.kernel) > most):
        orientations = (False,)
    height, width = spec.dy.extents[1:]
    for transposed, tile_n in itertools.product(orientations, (2, 1, 3)):
        oriented = spec.transposed if transposed else spec
        tile_m = _tile_m(oriented, tile_n, machine)
        in_blocks = -(-oriented.in_channels // (tile_n * lanes))
        out_blocks = -(-oriented.out_channels // tile_m)
        n_blocks = {1, min(4, in_blocks), min(8, in_blocks), -(-in_blocks // machine.parts), in_blocks}
        m_splits = {1, min(machine.parts, out_blocks), min(4 * machine.parts, out_blocks)}
        large = oriented.is_pointwise and max(spec.x.size, spec.dy.size) * DTYPE_BYTES[spec.dtype] > machine.l2_bytes
        for slab_h, slab_d in dict.fromkeys(_slab(slices, height, width, pixels) for pixels in SLAB_PIXELS):
            slabs = -(-slices // slab_d) * -(-height // slab_h)
            tile = WgradTiling(tile_m, tile_n, slab_h, slab_d, 1, 1, parallel, transposed=transposed)
            # No tiling is refused for split_k, n_blocks or prefetch.
            packings = {
                splits: _packings(spec, oriented, replace(tile, split_m=splits), machine) for splits in m_splits
            }
            useful = slabs > 1 and large and not spec.dots
            # With im2col rows only the vectors are prefetched, which may not be worth its cycles.
            prefetches = (useful,) if oriented.im2col_of is None or not useful else (True, False)
            k_splits = {1, machine.parts if slabs >= machine.parts else 1}
            for split_k, blocks, splits, prefetch in itertools.product(k_splits, n_blocks, m_splits, prefetches):
                for tiling in packings[splits]:
                    yield replace(tiling, split_k=split_k, n_blocks=blocks, prefetch=prefetch)


def _slab(slices: int, height: int, width: int, pixels: int) -> tuple[int, int]:
    """Rows and depth slices of slabs of about so many pixels, all of nearly one size."""
    slab_h = balanced(height, max(1, min(height, pixels // width)))
    if slab_h < height:
        return slab_h, 1
    return slab_h, balanced(slices, max(1, min(slices, pixels // (height * width))))


def _packings(spec: WgradSpec, oriented: WgradSpec, tile: WgradTiling, machine: Machine) -> list[WgradTiling]:
    """The tile with a panel of X or without, with one of dY or without: what is valid and worth an estimate."""
    in_place, packed = replace(tile, vectors_in_place=True), replace(tile, scalars_packed=True)
    found = []
    can_be_in_place = not refusal(spec, in_place, machine)
    if (not can_be_in_place or oriented.im2col_of is None) and not refusal(spec, tile, machine):
        found.append(tile)
        # Beside a panel of X, one of dY costs little more, and its rows are read evenly.
        if _far_pixels(oriented, DTYPE_BYTES[spec.dtype]) and not refusal(spec, packed, machine):
            found.append(packed)
    elif spec.dots and not refusal(spec, packed, machine):
        found.append(packed)
    return [*found, in_place] if can_be_in_place else found


def _beyond_pages(spec: WgradSpec, tiling: WgradTiling, element: int) -> float:
    """How far, from 0 to 1, a slab of dY whose pixels are not contiguous spreads over more pages than are near."""
    return beyond_near_pages(tiling.slab_d * tiling.slab_h * spec.dy.extents[2], spec.dy.spatial[2] * element)


def _far_pixels(spec: WgradSpec, element: int) -> bool:
    """Whether pixels of dY are so far apart that they share few sets of the first-level cache."""
    distance = FAR_PIXEL_BYTES if spec.is_pointwise else FAR_PIXEL_BYTES // 2
    return spec.im2col_of is None and spec.dy.spatial[2] * element >= distance


def _tile_m(spec: WgradSpec, tile_n: int, machine: Machine) -> int:
    """The rows of a tile: blocks of nearly equal size, as few as registers allow; of im2col rows, the fastest."""
    count = spec.out_channels
    if spec.im2col_of is None:
        return balanced(count, min(tile_rows(machine, tile_n), count))
    lanes, latency = machine.lanes(spec.dtype), machine.fmas * machine.fma_latency

    def cost(rows: int) -> tuple[float, int]:
        panel = Im2colPanel.of(spec, rows, (1, 1), lanes)
        kinds = len(panel.blocks_by_offsets())
        if kinds * rows * tile_n > MAX_EMITTED_ACCUMULATORS:
            return (count * tile_n * latency, kinds)
        return (-(-count // rows) * (max(rows * tile_n, latency) + 4) * panel.valid_fraction, kinds)

    return min((rows for rows in range(1, count + 1) if fits(machine, rows, tile_n)), key=cost)


# ---------------------------------------------------------------------------------------------------- cost


def elapsed(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
    """Seconds on all of the machine's parts: what one core needs, and the share of it of the core that has most."""
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
    return estimate(spec, tiling, machine) * min(1.0, -(-items // machine.parts) * largest)


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
    moved = DTYPE_BYTES["bfloat16"] if spec.dots else element
    steps = spec.batch * depth * height * -(-columns // 2) if spec.dots else pixels
    latency = machine.dot_latency if spec.dots else machine.fma_latency
    in_blocks, out_blocks = -(-spec.in_channels // width), -(-spec.out_channels // tile_m)
    tiles = taps * in_blocks * out_blocks * spec.groups
    in_items = -(-in_blocks // tiling.n_blocks)

    loads = WGRAD.load if spec.im2col_of is None else IM2COL_LOAD_CYCLES
    step = max(tile_m * tile_n / machine.fmas, (tile_m + tile_n) * loads, latency)
    step += tile_n * PANEL_VECTOR_CYCLES
    step += PREFETCH_CYCLES if tiling.prefetch else 0
    whole = columns % (lanes * spec.word_columns) == 0
    joined = spec.kernel[1:] == (1, 1) and spec.im2col_of is None and (whole or spec.x.channel == 1)
    exits = slabs if joined else spec.batch * depth * height * spec.valid_fractions[0] * spec.valid_fractions[1]
    sums = tile_m * tile_n * WGRAD.store * (0 if slabs == 1 else 1)
    share = (
        math.prod(spec.valid_fractions)
        if spec.im2col_of is None
        else _im2col_panel(spec, tiling, machine).valid_fraction
    )
    cycles = tiles * (steps * step * share + exits * ROW_CYCLES + slabs * (WGRAD.tile + sums))

    if spec.dots and spec.im2col_of is None and not tiling.scalars_packed:
        cycles += tiles * slabs * tile_m * WORD_STREAM_CYCLES

    panel = _panel(spec, tiling, width).size
    if not tiling.vectors_in_place:
        cycles += slabs * in_blocks * spec.groups * tiling.split_m * panel * _pack_cost(spec, machine)
    if spec.im2col_of is not None:
        plain = machine.has_masks and spec.has_vectors(spec.im2col_of.x)
        size = _im2col_panel(spec, tiling, machine).size
        cycles += slabs * in_items * tiling.split_m * size * (WGRAD.copy if plain else WGRAD.scalar)
    if tiling.scalars_packed:
        cost = WGRAD.transpose if spec.dy.channel != 1 else WGRAD.copy
        cost = cost if machine.has_masks else WGRAD.scalar
        cycles += pixels / spec.word_columns * spec.out_channels * spec.groups * in_items * cost

    # Streams: X once a split; dY once an item of input channels, or once a block of them if the cache loses its slab.
    slab_pixels = tiling.slab_d * tiling.slab_h * columns
    per_split = -(-spec.out_channels // tiling.split_m)
    both = slab_pixels * (per_split + min(tiling.n_blocks * width, spec.in_channels)) * element
    kept = taps * tiling.n_blocks * width * per_split * element if slabs > tiling.split_k else 0
    touched = slab_pixels * per_split * element + panel * element + kept // tiling.n_blocks
    reads = in_items if touched <= kept_bytes else in_blocks
    apart = spec.x.channel == 1  # pixels that no tap reads are then whole cache lines
    read = min(spec.x.size, pixels * spec.in_channels * spec.groups * taps if apart else spec.x.size) * moved
    stream = read * tiling.split_m / _rate(read, machine)
    scattered = spec.im2col_of is None and not tiling.scalars_packed and spec.dy.spatial[2] > 1
    stream += (
        spec.dy.size
        * moved
        * reads
        / min(_rate(spec.dy.size * moved, machine), unpredicted_rate if scattered else shared_rate)
    )
    cycles += stream * (PREFETCH_EXPOSED if tiling.prefetch and 2 * both <= machine.l2_bytes else 1)
    if scattered:
        cycles += (
            tiles
            * pixels
            * (FAR_PAGE_CYCLES * _beyond_pages(spec, tiling, element) + FAR_PIXEL_CYCLES * _far_pixels(spec, element))
        )
    if tiling.vectors_in_place and spec.im2col_of is None:
        distance = spec.x.spatial[2] * element
        cycles += tiles * pixels * FAR_PAGE_CYCLES * beyond_near_pages(slab_pixels, distance)
    if kept and kept + slab_pixels * per_split * element + panel * element > kept_bytes:
        rate = max(
            machine.memory_rate,
            SUMS_RATE * machine.shared_rate * min(1.0, machine.shared_bytes * SUMS_SHARE / (kept * machine.parts)),
        )
        cycles += slabs * tiles * tile_m * width * element * 2 / rate

    dw = spec.dw
    write = SCALAR_WRITE_CYCLES
    if dw.into == 1:
        write = WRITE_CYCLES
    elif machine.has_masks and (dw.out == 1 or dw.spatial[2] == 1):
        transposed = TRANSPOSED_WRITE_CYCLES if dw.size * element <= kept_bytes else FAR_WRITE_CYCLES
        write = WRITE_CYCLES if dw.into * element < FAR_WRITE_BYTES else transposed
    cycles += dw.size * write + dw.size * element * 2 / shared_rate
    if tiling.split_k > 1:
        cycles += dw.size * tiling.split_k * (WGRAD.store / lanes + element * 2 / shared_rate)
    return cycles / machine.clock


def _rate(size: int, machine: Machine) -> float:
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


def _im2col_panel(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> Im2colPanel:
    """The panel of the im2col rows of a spec."""
    return Im2colPanel.of(spec, tiling.tile_m, (tiling.slab_h, tiling.slab_d), machine.lanes(spec.dtype))


def _panel(spec: WgradSpec, tiling: WgradTiling, width: int) -> VectorPanel:
    """The panel of X."""
    return VectorPanel.of(spec, tiling.slab_h, tiling.slab_d, width, VECTOR if spec.transposes_x else 1)


KERNELS = (ImplicitGemmWgrad(),)

__all__ = ["KERNELS", "ImplicitGemmWgrad", "candidates", "elapsed", "estimate", "refusal", "swap_refusal"]
