# SPDX-License-Identifier: Apache-2.0
"""How wgrad is cut: the register tile, slabs, and what threads share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tvm_convgrad.kernels.loops import PARALLEL_FROM
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import balanced, tile_rows
from tvm_convgrad.kernels.weight_spec import WeightSpec, WeightTiling, weight_spec
from tvm_convgrad.problem import ConvProblem

SLAB_PIXELS = 800
"""The most pixels of a slab: enough to make little of loading and storing sums, few enough for the core's own cache."""

MAX_ROWS = 256
"""(tap, channel) pairs that the few-channel kernel has code for."""


def plan_weight(problem: ConvProblem, machine: Machine) -> Choice:
    """The choice for wgrad."""
    if problem.is_depthwise:
        return _plan_depthwise(problem, machine)
    spec = weight_spec(problem)
    rows = problem.in_channels * math.prod(problem.kernel)
    if problem.groups == 1 and 2 * problem.in_channels <= machine.lanes(spec.dtype) and rows <= MAX_ROWS:
        return _plan_few_channels(problem, machine)
    detail = (spec, tiling_of(spec, machine, problem.macs))
    return Choice("implicit GEMM wgrad", "covers the problem", detail=detail)


def _plan_depthwise(problem: ConvProblem, machine: Machine) -> Choice:
    """Depthwise: the channels of all groups as one, cut into vectors."""
    spec = replace(weight_spec(problem), groups=1, in_channels=problem.in_channels, out_channels=1)
    tiling = replace(tiling_of(spec, machine, problem.macs, columns=1), rows=1, splits=1)
    if spec.x.channel == 1:
        height, line = spec.dy.extents[1:]
        lines = max(n for n in _divisors(height) if n == 1 or n * line <= SLAB_PIXELS // 3)
        tiling = replace(tiling, lines=lines, planes=1, parts=machine.parts)
    multiplier = problem.out_channels // problem.in_channels
    return Choice("depthwise wgrad", "one input channel a group", detail=(spec, tiling, multiplier))


def _plan_few_channels(problem: ConvProblem, machine: Machine) -> Choice:
    """Few input channels: the spec's in_channels become those that lanes run over, dY's."""
    spec = replace(weight_spec(problem), in_channels=problem.out_channels, out_channels=1)
    tiling = replace(tiling_of(spec, machine, problem.macs, columns=1), rows=1, splits=1, parts=machine.parts)
    detail = (spec, tiling, problem.in_channels)
    return Choice("few-channel wgrad", "input channels would fill less than half of a vector", detail=detail)


def tiling_of(spec: WeightSpec, machine: Machine, macs: int, columns: int = 0) -> WeightTiling:
    """The cut that the cost model likes best, of all or of those with `columns`."""
    lanes = machine.lanes(spec.dtype)
    columns = columns or min((2, 1, 3), key=lambda c: _tile_cost(spec, machine, c, lanes))
    width = columns * lanes
    rows = balanced(spec.out_channels, min(tile_rows(machine, columns), spec.out_channels))
    depth, height, line = spec.dy.extents
    element = 8 if spec.dtype == "float64" else 4
    budget = machine.l2_bytes // 3

    def panel(lines: int, planes: int) -> int:
        panel_lines = (
            (lines - 1) * (spec.strides[1] if spec.kernel[1] > 1 else 1) + (spec.kernel[1] - 1) * spec.dilation[1] + 1
        )
        pitch = (line - 1) * (spec.strides[2] if spec.kernel[2] > 1 else 1) + (spec.kernel[2] - 1) * spec.dilation[2]
        return planes * spec.kernel[0] * panel_lines * (pitch + 1) * width * element

    lines = max(n for n in _divisors(height) if n == 1 or (n * line <= SLAB_PIXELS and panel(n, 1) <= budget))
    planes = 1
    if lines == height:
        planes = max(
            n
            for n in _divisors(spec.batch * depth)
            if n == 1 or (n * height * line <= SLAB_PIXELS and panel(lines, n) <= budget)
        )
    in_blocks = -(-spec.in_channels // width) * spec.groups
    out_blocks = -(-spec.out_channels // rows)
    slabs = spec.batch * depth // planes * (height // lines)
    parts = splits = 1
    if in_blocks % machine.parts and in_blocks < 4 * machine.parts:
        if slabs >= machine.parts:
            parts = machine.parts
        else:
            splits = min(out_blocks, machine.parts)
    return WeightTiling(rows, columns, lines, planes, parts, splits, macs >= PARALLEL_FROM)


def _tile_cost(spec: WeightSpec, machine: Machine, columns: int, lanes: int) -> tuple[float, int]:
    """Relative time of the sums: lanes and rows that do nothing, and loads that a narrow tile repeats."""
    width = columns * lanes
    waste = -(-spec.in_channels // width) * width / spec.in_channels
    most = min(tile_rows(machine, columns), spec.out_channels)
    rows = balanced(spec.out_channels, most)
    waste *= -(-spec.out_channels // rows) * rows / spec.out_channels
    loads = (rows + columns) / 2  # two loads a cycle
    sums = max(rows * columns / 2, 4)  # two multiply-adds a cycle, four cycles of latency
    return waste * max(loads, sums) / (rows * columns), columns


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


__all__: list[Any] = ["plan_weight", "tiling_of", "weight_spec"]
