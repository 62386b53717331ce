# SPDX-License-Identifier: Apache-2.0
"""The kernels of forward and dgrad of 16-bit numbers by products of tiles, for CPUs with AMX-BF16 and AMX-FP16.

They are the implicit GEMM over words (`pairs.py`) with sums in tile registers (`tile_sums.py`). A function has two loop
nests: that one, and, for processes that may not use tiles, that of the implicit GEMM, which converts to float32: on
these CPUs dot products compute half as many products (`Machine.dot_cost`). The first call in a process finds out which
(`codegen.tile_product.ready`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from tvm_convgrad.codegen import tile_product, tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.register_tile import balanced
from tvm_convgrad.codegen.tile_product import ROWS, WORDS
from tvm_convgrad.core.problem import ConvProblem, planned
from tvm_convgrad.kernels.contract import Plan
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.frame import conv_frame
from tvm_convgrad.kernels.gemm.cycles import estimate
from tvm_convgrad.kernels.gemm.dot import DotGemm, channels_refusal, types_refusal
from tvm_convgrad.kernels.gemm.kernel import PhaseGroup, largest_panel
from tvm_convgrad.kernels.gemm.pairs import paired
from tvm_convgrad.kernels.gemm.plan import ImplicitGemm, blocked, invalid_blocks, regions_of, tilings_of
from tvm_convgrad.kernels.gemm.tile_sums import (
    GRID_FACTORS,
    TilePhaseGroup,
    invalid_tile,
    step_cycles,
    stored_cycles,
    words_of,
)
from tvm_convgrad.kernels.gemm.tiling import GemmTiling, blocking_of
from tvm_convgrad.kernels.spec import ConvSpec, Phase, shapes_of

FEWEST_WORDS = 8
"""Words of a step from which on no words of zeros are added: these are packed one by one."""


class TileGemm(DotGemm):
    """Forward and dgrad with operands of bfloat16, multiplied in tiles and summed in float32."""

    name = "AMX GEMM"
    reason = "multiplies tiles of bfloat16"

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """No tiles, other types, or channels that have no pairs."""
        return tiles_refusal(problem, direction, machine, *self.dtypes) or channels_refusal(problem, direction)

    def regions(self, problem: ConvProblem, direction: str) -> tuple[ConvSpec, ...]:
        """Those of the implicit GEMM, over words in equal steps of at most WORDS."""
        return _regions(problem, direction)

    def candidates(self, spec: ConvSpec, phases: tuple[Phase, ...], machine: Machine) -> Iterator[GemmTiling]:
        """Valid tilings of a group of phases that are worth an estimate; there is always one."""
        return blocked(spec, phases, machine, _tiles(phases), self.nest_invalid)

    def nest_cycles(self, spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> float:
        """Cycles of the loop nest of a group of phases until the last core is done."""
        step = step_cycles(spec, phases, tiling, blocking_of(spec, phases, tiling, machine), machine)
        return estimate(spec, phases, tiling, machine, step, stored_cycles(spec, tiling))

    def nest_invalid(self, spec: ConvSpec, phases: tuple[Phase, ...], tiling: GemmTiling, machine: Machine) -> str:
        """Why a tiling cannot be built for a group of phases, or nothing."""
        return invalid_blocks(spec, phases, tiling, machine) or invalid_tile(tiling)

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (source, weight, [bias,] result), with loop nests with and without tiles."""
        known, tilings = planned(problem), tilings_of(plan)
        spec = self.regions(known, direction)[plan.region]
        (dtype,) = self.dtypes
        converting = ImplicitGemm()
        instead = converting.plan(known, direction, machine)
        region = converting.regions(known, direction)[instead.region]
        panel = max(largest_panel(spec, tilings, machine), largest_panel(region, tilings_of(instead), machine))
        frame = conv_frame(spec, shapes_of(problem, direction), epilogue, panel)
        loops = frame.loops
        ready = tile_product.ready(loops, dtype)
        with loops.when(ready):
            for phases, tiling in zip(spec.phases, tilings, strict=True):
                TilePhaseGroup(frame, spec, phases, tiling, machine, dtype).emit()
        with loops.otherwise(ready):
            frame = frame.converted()
            for phases, tiling in zip(region.phases, tilings_of(instead), strict=True):
                PhaseGroup(frame, region, phases, tiling, machine).emit()
        return frame.finish(name)


class HalfTileGemm(TileGemm):
    """Forward and dgrad with operands of float16, multiplied in tiles and summed in float32."""

    name = "AMX-FP16 GEMM"
    dtypes = ("float16",)
    reason = "multiplies tiles of float16"


def tiles_refusal(problem: ConvProblem, direction: str, machine: Machine, dtype: str) -> str:
    """Why the operands of a direction cannot be multiplied in tiles of a type, or nothing."""
    if dtype not in machine.tiles:
        return f"{machine.name} has no tiles of {dtype}"
    return types_refusal(problem, direction, dtype)


def _tiles(phases: tuple[Phase, ...]) -> Iterator[GemmTiling]:
    """Tiles of sums of the grids that were timed, of pixels of one row or of several whole rows."""
    _, h, w = (axis.count for axis in phases[0])
    seen: set[tuple[int, int]] = set()
    for pieces, tile_n in GRID_FACTORS:
        row = balanced(w, min(w, pieces * ROWS))
        row -= row % -(-row // ROWS)
        if (row, tile_n) not in seen:
            seen.add((row, tile_n))
            yield GemmTiling("channels", row, tile_n, 1, 1)
        if 1 < pieces <= h and h % pieces == 0 and w <= ROWS:
            yield GemmTiling("channels", pieces * w, tile_n, pieces, 1, tile_h=pieces)


@lru_cache(maxsize=1024)
def _regions(problem: ConvProblem, direction: str) -> tuple[ConvSpec, ...]:
    return tuple(paired(spec, _words(spec)) for spec in regions_of(problem, direction))


def _words(spec: ConvSpec) -> int:
    """The words of a spec's channels: with words of zeros, if they make no equal steps of at least FEWEST_WORDS.

    The zeros would be in the channels of the next group: with groups there are none.
    """
    own = -(-spec.source_channels // 2)
    if spec.groups > 1 or own <= WORDS or words_of(own) >= FEWEST_WORDS:
        return own
    steps = -(-own // WORDS)
    return steps * -(-own // steps)


KERNELS = (TileGemm(), HalfTileGemm())

__all__ = ["KERNELS", "HalfTileGemm", "TileGemm", "tiles_refusal"]
