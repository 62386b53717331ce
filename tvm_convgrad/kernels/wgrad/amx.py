# SPDX-License-Identifier: Apache-2.0
"""The kernels of wgrad of 16-bit numbers by products of tiles, for CPUs with AMX: which tilings, and their estimate.

A function has two loop nests: that of tiles (`tile_nest.py`), and one for processes that may not use tiles, as forward
and dgrad have (`kernels.gemm.amx`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

from tvm_convgrad.codegen import tile_product, tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.register_tile import balanced
from tvm_convgrad.codegen.tile_product import ROWS, WORDS, TileGrid
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem, planned
from tvm_convgrad.kernels.contract import Plan
from tvm_convgrad.kernels.costs import WGRAD
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.frame import wgrad_frame
from tvm_convgrad.kernels.gemm.amx import tiles_refusal
from tvm_convgrad.kernels.gemm.tile_sums import GRID_FACTORS, grid_cycles
from tvm_convgrad.kernels.wgrad.bias import bias_gradient
from tvm_convgrad.kernels.wgrad.cycles import (
    KEPT_SHARE,
    WORD_FACTOR,
    busiest,
    store_cycles,
    stream_rate,
    sums_rate,
)
from tvm_convgrad.kernels.wgrad.dot import DotWgrad
from tvm_convgrad.kernels.wgrad.kernel import nest_of
from tvm_convgrad.kernels.wgrad.plan import ImplicitGemmWgrad, most_parts, sizes_refusal, slab_of
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, WgradTiling
from tvm_convgrad.kernels.wgrad.tile_nest import TileWgradNest
from tvm_convgrad.kernels.wgrad.tile_shape import TileShape, registers_refusal, with_few_taps

SLAB_PIXELS = (128, 256, 512, 1024)
"""The pixels of a slab that are tried."""

SUM_ROW_CYCLES = 2.0
"""Cycles to load a row of a tile of sums before a slab and to store it after. It is no measured number."""


class TileWgrad(DotWgrad):
    """wgrad with dY and X of bfloat16, multiplied in tiles and summed in float32."""

    name = "AMX GEMM"
    reason = "multiplies tiles of bfloat16"

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """No tiles, or other types."""
        return tiles_refusal(problem, direction, machine, *self.dtypes)

    def spec(self, problem: ConvProblem, machine: Machine) -> WgradSpec:
        """wgrad in the terms of the kernel; with few input channels taps along the width are columns."""
        return _spec(super().spec(problem, machine))

    def candidates(self, spec: WgradSpec, machine: Machine, parallel: bool) -> Iterator[WgradTiling]:
        """Valid tilings that are worth an estimate; there is always one."""
        return tile_candidates(spec, machine, parallel)

    def elapsed(self, spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
        """Seconds on all of the machine's parts until the last core is done."""
        return tile_cycles(spec, tiling, machine) / machine.clock * busiest(spec, tiling, machine)

    def tiling_refusal(self, spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> str:
        """Why a tiling cannot be built, or nothing."""
        for name in ("transposed", "vectors_in_place", "scalars_packed", "prefetch"):
            if getattr(tiling, name):
                return f"{name} is not for tiles, which have panels of their own"
        return sizes_refusal(spec, tiling, tiling.tile_n * WORDS) or registers_refusal(tiling)

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (grad, data, weight's gradient[, bias gradient]), with loop nests with and without tiles."""
        known, tiling = planned(problem), plan.only(WgradTiling)
        (dtype,) = self.dtypes
        spec, converting = self.spec(known, machine), ImplicitGemmWgrad()
        other, instead = converting.spec(known, machine), converting.plan(known, direction, machine).only(WgradTiling)
        frame = wgrad_frame(problem, spec.batch, epilogue, halves=True, dtype=dtype)
        numbers = frame.converted()
        ready = tile_product.ready(frame.loops, dtype)
        with frame.loops.when(ready):
            bias = bias_gradient(numbers, machine, spec.dy, spec.dtype, problem.out_channels)
            TileWgradNest(frame, spec, tiling, machine, dtype).emit(bias)
        with frame.loops.otherwise(ready):
            bias = bias_gradient(numbers, machine, other.dy, other.dtype, problem.out_channels)
            nest_of(numbers, other, instead, machine).emit(bias)
        return frame.finish(name)


class HalfTileWgrad(TileWgrad):
    """wgrad with dY and X of float16, multiplied in tiles and summed in float32."""

    name = "AMX-FP16 GEMM"
    dtypes = ("float16",)
    reason = "multiplies tiles of float16"


@lru_cache(maxsize=1024)
def _spec(spec: WgradSpec) -> WgradSpec:
    return with_few_taps(spec)


def tile_candidates(spec: WgradSpec, machine: Machine, parallel: bool) -> Iterator[WgradTiling]:
    """Tiles of sums of the grids that were timed, with slabs and work items of several sizes."""
    slices, (height, width) = spec.batch * spec.dy.extents[0], spec.dy.extents[1:]
    slabs = set()
    for pixels in SLAB_PIXELS:
        rows, depth = slab_of(slices, height, width, pixels)
        # Slabs of equal height have longer steps of the reduction.
        even = max(n for n in range(1, rows + 1) if height % n == 0)
        slabs |= {(rows, depth), (even, 1)}
    shapes = set()
    for pieces, tile_n in GRID_FACTORS:
        if (tile_n - 1) * WORDS >= spec.in_channels:
            continue
        tile_m = balanced(spec.out_channels, min(spec.out_channels, pieces * ROWS))
        shapes.add((tile_m - tile_m % -(-tile_m // ROWS), tile_n))
    for (tile_m, tile_n), (slab_h, slab_d) in itertools.product(sorted(shapes), sorted(slabs)):
        in_blocks, out_blocks = -(-spec.in_channels // (tile_n * WORDS)), -(-spec.out_channels // tile_m)
        count = -(-slices // slab_d) * -(-height // slab_h)
        parts = min(machine.parts, most_parts(spec, tile_m, tile_n * WORDS))
        k_splits = {1, parts if count >= parts else 1}
        n_blocks = {1, min(4, in_blocks), -(-in_blocks // machine.parts), in_blocks}
        m_splits = {1, min(machine.parts, out_blocks), min(4 * machine.parts, out_blocks)}
        for split_k, blocks, splits in itertools.product(sorted(k_splits), sorted(n_blocks), sorted(m_splits)):
            yield WgradTiling(tile_m, tile_n, slab_h, slab_d, split_k, splits, parallel, n_blocks=blocks)


def tile_cycles(spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
    """Cycles on one core: products, sums, packing, writing, and the streams that caches do not hold."""
    shape, element = TileShape.of(spec, tiling), DTYPE_BYTES[spec.dtype]
    depth, height, _ = spec.dy.extents
    slices, taps = spec.batch * depth, math.prod(spec.kernel)
    slabs = -(-slices // tiling.slab_d) * -(-height // tiling.slab_h)
    in_blocks, out_blocks = -(-spec.in_channels // shape.width), -(-spec.out_channels // tiling.tile_m)
    in_items = -(-in_blocks // tiling.n_blocks)
    tiles = taps * in_blocks * out_blocks * spec.groups
    # The sums.
    tile_rows = shape.pieces * shape.rows
    slab_words = tiling.slab_d * tiling.slab_h * shape.pitch
    near = (tiling.tile_m + shape.width) * slab_words * element <= machine.l1_bytes
    # Tiles of X are contiguous, and are taken to be prefetched by the hardware; rows of dY lie in lines far apart.
    loads = tile_rows * (machine.tile_load if near else machine.tile_load_far)
    loads += tiling.tile_n * shape.words * machine.tile_load
    step = grid_cycles(TileGrid(shape.pieces, tiling.tile_n), shape.rows, loads, machine)
    steps = slices * height * shape.pitch / shape.words * spec.valid_fractions[0]
    cycles = tiles * (steps * step + slabs * (WGRAD.tile + tile_rows * tiling.tile_n * SUM_ROW_CYCLES))
    # Panels: each word is packed as often as its block is read by different work items.
    rows = -(-height // tiling.slab_h) * len(shape.phases) * shape.phase_rows * spec.kernel[0] * spec.kernel[2]
    packed = slices * rows * shape.pitch * in_blocks * shape.width * spec.groups * tiling.split_m
    cycles += packed * _data_cost(spec) + (
        slices * height * shape.pitch * out_blocks * tiling.tile_m * spec.groups * in_items * _grad_cost(spec)
    )
    # Streams: X once a split, dY once an item of input channels.
    read, grads = (view.size * DTYPE_BYTES[view.dtype] for view in (spec.x, spec.dy))
    cycles += read * tiling.split_m / stream_rate(read, machine) + grads * in_items / stream_rate(grads, machine)
    per_split = -(-spec.out_channels // tiling.split_m)
    kept = taps * tiling.n_blocks * shape.width * per_split * element if slabs > tiling.split_k else 0
    if kept + (slab_words * per_split + shape.panel_size) * element > machine.l2_bytes * KEPT_SHARE and kept:
        cycles += slabs * tiles * tile_rows * shape.width * element * 2 / sums_rate(kept, machine)
    return cycles + store_cycles(spec, tiling, machine)


def _grad_cost(spec: WgradSpec) -> float:
    """Cycles to pack a word of dY."""
    if spec.dy.channel == 1:
        return WGRAD.transpose * WORD_FACTOR
    return WGRAD.copy if spec.dy.spatial[2] == 1 else WGRAD.scalar * WORD_FACTOR


def _data_cost(spec: WgradSpec) -> float:
    """Cycles to pack a word of X."""
    if spec.x.channel == 1:
        return WGRAD.copy * WORD_FACTOR
    step = (spec.taps_of or spec).strides[2] * spec.x.spatial[2]
    if step in (1, 2):
        return WGRAD.transpose * (1 if step == 1 else WORD_FACTOR)
    return WGRAD.scalar * WORD_FACTOR


KERNELS = (TileWgrad(), HalfTileWgrad())

__all__ = ["KERNELS", "HalfTileWgrad", "TileWgrad", "tile_candidates", "tile_cycles"]
