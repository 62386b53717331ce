# SPDX-License-Identifier: Apache-2.0
"""The kernel of wgrad as an implicit GEMM: its tilings, and which are worth an estimate (`cycles.py`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import MOST_PARTIAL_SUMS, MOST_PIECES, Machine
from tvm_convgrad.codegen.register_tile import balanced, fits, tile_rows
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.kernels.contract import Kernel, Plan, not_one_tiling, planned
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.vectors import moves_vectors
from tvm_convgrad.kernels.wgrad.cycles import elapsed, far_pixels, from_beyond, im2col_panel, in_time
from tvm_convgrad.kernels.wgrad.kernel import wgrad_kernel
from tvm_convgrad.kernels.wgrad.panel_shapes import Im2colPanel
from tvm_convgrad.kernels.wgrad.spec import HALVES, WgradSpec, WgradTiling, wgrad_spec

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


class ImplicitGemmWgrad(Kernel):
    """wgrad: dY as one matrix of a GEMM over pixels, X at all taps as the other. It takes every problem."""

    name = "implicit GEMM"
    directions = (BACKWARD_WEIGHT.name,)
    reason = "covers the problem"

    def tiling_type(self, direction: str) -> type[WgradTiling]:
        """`WgradTiling`."""
        return WgradTiling

    def spec(self, problem: ConvProblem, machine: Machine) -> WgradSpec:
        """wgrad of a problem in the terms of the kernel."""
        spec = wgrad_spec(problem)
        types = (spec.x.dtype, spec.dy.dtype, spec.dw.dtype)
        return replace(spec, halves=tuple(t for t in HALVES if t in types and moves_vectors(machine, t, spec.dtype)))

    def candidates(self, spec: WgradSpec, machine: Machine, parallel: bool) -> Iterator[WgradTiling]:
        """Valid tilings that are worth an estimate; there is always one."""
        return candidates(spec, machine, parallel)

    def elapsed(self, spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> float:
        """Seconds on all of the machine's parts until the last core is done."""
        return elapsed(spec, tiling, machine)

    def tiling_refusal(self, spec: WgradSpec, tiling: WgradTiling, machine: Machine) -> str:
        """Why a tiling cannot be built, or nothing."""
        return refusal(spec, tiling, machine)

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Nothing."""
        return ""

    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The tiling after which the last core is done first."""
        spec, parallel = self.spec(problem, machine), problem.macs >= machine.parallel_from
        found = self.candidates(spec, machine, parallel)
        return Plan((min(found, key=lambda each: self.elapsed(spec, each, machine)),))

    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """The time until the last core is done, times the cores."""
        return self.elapsed(self.spec(problem, machine), plan.only(WgradTiling), machine) * machine.parts

    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why the tiling cannot be built, or nothing."""
        return not_one_tiling(plan) or self.tiling_refusal(self.spec(problem, machine), plan.only(WgradTiling), machine)

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (grad, data, weight's gradient[, bias gradient])."""
        spec = self.spec(planned(problem), machine)
        return wgrad_kernel(problem, spec, plan.only(WgradTiling), machine, name, epilogue)

    def tilings(self, problem: ConvProblem, direction: str, own: Plan, machine: Machine) -> Iterator[Plan]:
        """Tilings packed and unpacked, in place or not, with prefetches or without.

        The best estimate of each kind of tile comes first, then the second best of each, up to MAX_CANDIDATES in all.
        """
        spec, taken = self.spec(problem, machine), own.only(WgradTiling)
        knobs = ("scalars_packed", "vectors_in_place", "prefetch")
        found = {
            varied: self.elapsed(spec, varied, machine)
            for tiling in self.candidates(spec, machine, taken.parallel)
            for values in itertools.product((False, True), repeat=len(knobs))
            if not self.tiling_refusal(
                spec, varied := replace(tiling, **dict(zip(knobs, values, strict=True))), machine
            )
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
    reason = swap_refusal(spec) if tiling.transposed else ""
    if reason:
        return reason
    spec = spec.transposed if tiling.transposed else spec
    reason = sizes_refusal(spec, tiling, tiling.tile_n * machine.lanes(spec.dtype))
    if reason:
        return reason
    if not fits(machine, tiling.tile_m, tiling.tile_n):
        return f"{tiling.tile_m} x {tiling.tile_n} accumulators do not fit into the registers"
    if tiling.scalars_packed and not machine.has_masks and not spec.dots:
        return "scalars_packed needs masked loads and stores"
    if spec.im2col_of is not None:
        if tiling.scalars_packed:
            return "scalars_packed is not for im2col rows, which have a panel of their own"
        kinds = len(im2col_panel(spec, tiling, machine).blocks_by_offsets())
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


def most_parts(spec: WgradSpec, tile_m: int, width: int) -> int:
    """The largest `split_k` by the memory of the parts' sums; of an oriented spec.

    Args:
        width: input channels of a tile.
    """
    size = (
        spec.groups * round_up(spec.out_channels, tile_m) * round_up(spec.in_channels, width) * math.prod(spec.kernel)
    )
    return max(1, MOST_PARTIAL_SUMS // size)


def sizes_refusal(spec: WgradSpec, tiling: WgradTiling, width: int) -> str:
    """Why the numbers of a tiling do not fit a spec, whatever registers there are, or nothing.

    Args:
        width: input channels of a tile.
    """
    for name in ("tile_m", "tile_n", "slab_h", "slab_d", "split_k", "split_m", "n_blocks"):
        if getattr(tiling, name) < 1:
            return f"{name} is {getattr(tiling, name)}; it must be at least 1"
    if tiling.split_k > MOST_PIECES:
        return f"split_k is {tiling.split_k}; it must be at most {MOST_PIECES}"
    if tiling.tile_m > spec.out_channels:
        return f"tile_m is {tiling.tile_m}; there are {spec.out_channels} rows"
    if tiling.split_k > (most := most_parts(spec, tiling.tile_m, width)):
        return f"split_k is {tiling.split_k}; it must be at most {most}, for {MOST_PARTIAL_SUMS} sums in all"
    if tiling.slab_d > 1 and tiling.slab_h < spec.dy.extents[1]:
        return "slab_d is more than 1, but slab_h is not the whole height"
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
        for slab_h, slab_d in dict.fromkeys(slab_of(slices, height, width, pixels) for pixels in SLAB_PIXELS):
            slabs = -(-slices // slab_d) * -(-height // slab_h)
            tile = WgradTiling(tile_m, tile_n, slab_h, slab_d, 1, 1, parallel, transposed=transposed)
            # No tiling is refused for n_blocks or prefetch.
            packings = {
                splits: _packings(spec, oriented, replace(tile, split_m=splits), machine) for splits in m_splits
            }
            useful = slabs > 1 and from_beyond(oriented, machine)
            parts = min(machine.parts, most_parts(oriented, tile_m, tile_n * lanes))
            k_splits = {1, parts if slabs >= parts else 1}
            for split_k, blocks, splits in itertools.product(k_splits, n_blocks, m_splits):
                for tiling in packings[splits]:
                    plain = replace(tiling, split_k=split_k, n_blocks=blocks)
                    prefetches = useful and in_time(oriented, plain, machine)
                    # With im2col rows only the vectors are prefetched, which may not be worth its cycles.
                    if not prefetches or oriented.im2col_of is not None:
                        yield plain
                    if prefetches:
                        yield replace(plain, prefetch=True)


def slab_of(slices: int, height: int, width: int, pixels: int) -> tuple[int, int]:
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
        # Another type is converted on the way to the panel, and not in all of dY.
        worth = far_pixels(oriented, DTYPE_BYTES[spec.dtype]) or oriented.converts(oriented.dy)
        if worth and not refusal(spec, packed, machine):
            found.append(packed)
    elif spec.dots and not refusal(spec, packed, machine):
        found.append(packed)
    return [*found, in_place] if can_be_in_place else found


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


KERNELS = (ImplicitGemmWgrad(),)

__all__ = [
    "KERNELS",
    "ImplicitGemmWgrad",
    "candidates",
    "most_parts",
    "refusal",
    "sizes_refusal",
    "slab_of",
    "swap_refusal",
]
