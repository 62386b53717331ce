# SPDX-License-Identifier: Apache-2.0
"""When depthwise kernels over planes serve a problem, how they are cut, and what they cost."""

from __future__ import annotations

import math
from dataclasses import replace

from tvm_convgrad.kernels.depthwise_planes import PlaneTiling, is_rolled, lines_of_a_vector, plane_products
from tvm_convgrad.kernels.depthwise_planes_weight import PlaneWeightTiling
from tvm_convgrad.kernels.lanes import pieces_of
from tvm_convgrad.kernels.plan import Choice, roofline
from tvm_convgrad.kernels.spec import Gather, Three, axes_of, views
from tvm_convgrad.kernels.target import CLOCK, Machine
from tvm_convgrad.problem import ConvProblem

MAX_PRODUCTS = 600
"""Multiply-adds that the code may have: compile time."""

LINES = 14
"""Of a tile at the most: they hide the adders' latency, and divide common heights."""

WEIGHT_LINES = 8
"""Of a tile of wgrad where a plane takes several: borders are code of their own."""

WEIGHT_TAPS = 9
"""Of a kernel's plane for wgrad: each has a sum in a register."""

VECTOR_CYCLES = 3.0
"""Of a vector of results beside its multiply-adds: loads across cache lines, the store."""

SUMS_BYTES = 6 << 10
"""Of the sums of a work item of wgrad: a part of the first-level cache."""

REASON = "one channel a group, columns are neighbours"


def planes_kind(face: str) -> str:
    """The kernel's name."""
    return f"depthwise planes {face}"


def plan_planes(problem: ConvProblem, face: str, gather: Gather, machine: Machine) -> Choice | str:
    """The choice for forward or dgrad with one channel a group, or why vectors over columns do not serve it.

    Its estimate knows nothing of memory, see `at_least_roofline`.
    """
    if not machine.has_masks or not gather.source.dtype == gather.result.dtype == gather.dtype:
        return "elements would have to be converted, or there are no masks"
    if gather.source.spatial[2] != 1 or gather.result.spatial[2] != 1:
        return "columns are not neighbours"
    if max(gather.in_step[2], gather.out_step[2]) > 2:
        return "strides of more than two"
    if gather.out_step[2] > gather.result.extents[2]:
        return "a single column"
    kernel = kernel_of(problem)
    phases = [phase for phases in gather.phases for phase in phases]
    height = max(phase[1].count for phase in phases)
    kept = kernel[1] if is_rolled(gather, kernel[1] * kernel[2]) else kernel[1] * kernel[2]
    room = machine.registers - min(kept, machine.registers // 2) - 4
    lines = min(height, LINES // gather.in_step[2], room) // gather.out_step[2] or 1
    lanes = machine.lanes(gather.dtype)
    folded = lines_of_a_vector(gather, lanes)
    if -(-height // folded) > lines:
        folded = 1
    while folded == 1 and plane_products(gather, lines, folded)[0] > MAX_PRODUCTS and lines > 1:
        lines -= 1
    emitted, run = plane_products(gather, lines, folded)
    if emitted > MAX_PRODUCTS:
        return f"borders and phases would take {emitted} multiply-adds of code"
    depths = -(-gather.result.extents[0] // gather.out_step[0])
    items = gather.batch * gather.groups * gather.result_channels * depths
    slabs = min(-(-height // lines), -(-4 * machine.parts // items)) if folded == 1 else 1
    vectors = -(-max(phase[2].count for phase in phases) // lanes)
    cycles = (
        run / 2 * kernel[0] * gather.source_channels
        + VECTOR_CYCLES * gather.result.extents[1] / folded * gather.out_step[2]
    )
    seconds = items * vectors * cycles / CLOCK
    return Choice(planes_kind(face), REASON, seconds, detail=(gather, PlaneTiling(lines, slabs, folded), kernel))


def plan_planes_weight(problem: ConvProblem, machine: Machine) -> Choice | str:
    """The choice for wgrad with one input channel a group, or why vectors over columns do not serve it."""
    x, _, dy = views(problem)
    if not machine.has_masks or not x.dtype == dy.dtype == problem.accumulator:
        return "elements would have to be converted, or there are no masks"
    if x.spatial[2] != 1 or dy.spatial[2] != 1:
        return "columns are not neighbours"
    kernel, strides, dilation, padding = axes_of(problem)
    if strides[2] > 2:
        return "strides of more than two"
    if kernel[1] * kernel[2] > min(WEIGHT_TAPS, machine.registers // 2):
        return "more sums than registers"
    _, height, width = dy.extents
    room = max(1, machine.registers - kernel[1] * kernel[2] - 4)
    limit = LINES // strides[2]
    lines = min(height, room, limit if height <= limit else max(1, WEIGHT_LINES // strides[2]))
    lanes, channels = machine.lanes(problem.accumulator), problem.out_channels
    sums = (math.prod(kernel) + 1) * machine.vector_bytes
    together = max(1, min(SUMS_BYTES // sums, channels // (4 * machine.parts)))
    chunks = -(-channels // (together * machine.parts)) * machine.parts
    together = -(-channels // chunks)  # as many for each core
    parts = 1 if channels >= 2 * machine.parts else min(int(problem.batch), machine.parts)
    taps = tuple((k, k * dilation[1] - padding[1][0]) for k in range(kernel[1]))
    products = sum(
        sum(map(len, met)) * repeats for _, _, repeats, met in pieces_of(height, lines, taps, strides[1], x.extents[1])
    )
    vectors = int(problem.batch) * channels * dy.extents[0] * -(-width // lanes)
    seconds = vectors * (products * kernel[2] * kernel[0] / 2 + VECTOR_CYCLES * height) / CLOCK
    return Choice(planes_kind("wgrad"), REASON, seconds, detail=PlaneWeightTiling(lines, together, parts))


def invalid_planes(gather: Gather, tiling: PlaneTiling, machine: Machine) -> str:
    """Why forward or dgrad over vectors of columns cannot be built with a tiling, or nothing."""
    if tiling.lines < 1 or tiling.slabs < 1:
        return f"lines is {tiling.lines} and slabs is {tiling.slabs}; both must be at least 1"
    folded = lines_of_a_vector(gather, machine.lanes(gather.dtype))
    if tiling.folded not in (1, folded):
        return f"folded is {tiling.folded}; it must be 1 or {folded}"
    height = max(phase[1].count for phases in gather.phases for phase in phases)
    if tiling.folded > 1 and (-(-height // tiling.folded) > tiling.lines or tiling.slabs > 1):
        return "folded needs a plane that is one tile, in one slab"
    if plane_products(gather, tiling.lines, tiling.folded)[0] > MAX_PRODUCTS:
        return f"the code would have more than {MAX_PRODUCTS} multiply-adds"
    return ""


def invalid_planes_weight(problem: ConvProblem, tiling: PlaneWeightTiling) -> str:
    """Why wgrad over vectors of columns cannot be built with a tiling, or nothing."""
    for name, most in (
        ("lines", views(problem)[2].extents[1]),
        ("channels", problem.out_channels),
        ("parts", int(problem.batch)),
    ):
        if not 1 <= getattr(tiling, name) <= most:
            return f"{name} is {getattr(tiling, name)}; it must be from 1 to {most}"
    return ""


def at_least_roofline(choice: Choice, problem: ConvProblem, machine: Machine) -> Choice:
    """The choice with an estimate that is not below what memory allows."""
    return replace(choice, estimate=max(choice.estimate, roofline(problem, machine)))


def kernel_of(problem: ConvProblem) -> Three:
    """Taps along depth, height and width."""
    d, h, w = (1,) * (3 - problem.rank) + problem.kernel
    return d, h, w


__all__ = [
    "at_least_roofline",
    "invalid_planes",
    "invalid_planes_weight",
    "kernel_of",
    "plan_planes",
    "plan_planes_weight",
    "planes_kind",
]
