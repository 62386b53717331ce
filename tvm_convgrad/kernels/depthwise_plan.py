# SPDX-License-Identifier: Apache-2.0
"""When depthwise kernels serve a problem, and how they are cut."""

from __future__ import annotations

import math
from dataclasses import replace

from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.depthwise_gather import DepthwiseTiling, emitted_products
from tvm_convgrad.kernels.depthwise_planes_plan import (
    at_least_roofline,
    kernel_of,
    plan_planes,
    plan_planes_weight,
    planes_kind,
)
from tvm_convgrad.kernels.depthwise_weight import DepthwiseWeightTiling
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.spec import Gather, axes_of, views
from tvm_convgrad.kernels.target import CLOCK, MOST_PIECES, NEAR_PAGES, PAGE_BYTES, Machine
from tvm_convgrad.problem import ConvProblem

MAX_PRODUCTS = 1500
"""Multiply-adds that a kernel's code may have: compile time."""

MOST_PHASES = 16
"""Of dgrad: each has code of its own."""

SLAB_SHARE = 16
"""The part of the core's own cache for the result's lines of a work item; their source is there as well."""

WEIGHT_SLAB_SHARE = 32
"""The part of it for X and dY, of a vector of channels, in a slab of wgrad: each kernel line reads them again."""

TURN_COST, GROUP_TURN_COST = 0.55, 0.8
"""Cycles to turn an element in registers, on its way to a panel or from one; of small groups, measured."""

SUM_OVERHEAD, SHUFFLED_SUM_OVERHEAD = 1.4, 2.2
"""Cycles of a piece of a line beside its multiply-adds, as a factor; of one that shuffles what it multiplies."""

PREFETCH_FROM = 16 << 20
"""Bytes of tensors that come from memory: from a shared cache, vectors of channels come as fast without asking."""

WEIGHT_PREFETCH_FROM = 24 << 20
"""The same for wgrad, which asks for whole slabs and has no result to write."""

PIECE = 8
"""Pixels of a line in wgrad's code without a loop."""

SMALL_GROUPS = "small groups"
"""The kernels whose vectors span the channels of several groups."""

SMALL_GROUPS_WHY = "vectors span several groups"
"""What `explain` says of them."""


def plan_depthwise_gather(problem: ConvProblem, face: str, gather: Gather, machine: Machine) -> Choice | str:
    """The choice for forward or dgrad, or why no depthwise kernel serves it."""
    refusal = gather_refusal(problem, gather, machine)
    together = min(gather.source_channels, gather.result_channels)
    planes: Choice | str = f"groups of {together} channels"
    if together == 1 and gather.groups > 1 and sum(map(len, gather.phases)) <= MOST_PHASES:
        planes = plan_planes(problem, face, gather, machine)
    if refusal:
        return planes if isinstance(planes, Choice) else refusal
    lanes = machine.lanes(gather.dtype)
    pixels = _pixels(gather, machine)
    direct = _direct(gather, machine)
    estimate = _estimate(problem, machine, direct)
    if isinstance(planes, Choice) and planes.estimate <= estimate:
        return at_least_roofline(planes, problem, machine)
    _, height, width = gather.result.extents
    step = gather.out_step[1]
    element = 8 if gather.dtype == "float64" else 4
    line_bytes = width * element * (gather.groups * together if direct else lanes)
    lines = max(1, machine.l2_bytes // SLAB_SHARE // (line_bytes * step)) * step
    blocks = -(-gather.groups * together // lanes)
    wanted = 4 * machine.parts
    chunks = 1
    if direct:
        images = gather.batch * -(-gather.result.extents[0] // gather.out_step[0])
        slabs = -(-wanted // images)
        lines = min(lines, max(1, height // (slabs * step)) * step)
        items = images * -(-height // lines)
        chunks = min(blocks, -(-wanted // items))
    lines = min(lines, -(-height // step) * step)
    # Slabs of equal size.
    count = -(-height // lines)
    lines = -(-height // (count * step)) * step
    tiling = DepthwiseTiling(direct, pixels, lines, chunks, direct and _from_memory(problem, PREFETCH_FROM))
    reason = "one channel a group, channels are neighbours" if direct else "one channel a group, turned in panels"
    refused = {planes_kind(face): planes if isinstance(planes, str) else "narrow planes leave lanes empty"}
    if together > 1:
        return Choice(f"{SMALL_GROUPS} {face}", SMALL_GROUPS_WHY, estimate, {}, (gather, tiling, kernel_of(problem)))
    choice = Choice(f"depthwise {face}", reason, estimate, refused, (gather, tiling, kernel_of(problem)))
    return at_least_roofline(choice, problem, machine)


def gather_refusal(problem: ConvProblem, gather: Gather, machine: Machine) -> str:
    """Why vectors of channels do not serve forward or dgrad, or nothing."""
    if gather.groups == 1:
        return "not one channel a group"
    if sum(map(len, gather.phases)) > MOST_PHASES:
        return f"more than {MOST_PHASES} phases"
    together = min(gather.source_channels, gather.result_channels)
    refusal = (_small_group_refusal(problem, machine) if together > 1 else "") or _gather_refusal(gather, machine)
    products = 0 if refusal else emitted_products(gather, _pixels(gather, machine)) * together
    if products > MAX_PRODUCTS:
        return f"borders and phases would take {products} multiply-adds of code"
    return refusal


def plan_depthwise_weight(problem: ConvProblem, machine: Machine) -> Choice | str:
    """The choice for wgrad, or why no depthwise kernel serves it."""
    if not problem.is_depthwise:
        return _plan_small_groups(problem, machine)
    planes = plan_planes_weight(problem, machine)
    refusal = weight_refusal(problem, machine)
    if refusal:
        return planes if isinstance(planes, Choice) else refusal
    direct = _weight_direct(problem, machine)
    estimate = _estimate(problem, machine, direct)
    if isinstance(planes, Choice) and planes.estimate <= estimate:
        return at_least_roofline(planes, problem, machine)
    tiling = _weight_tiling(problem, machine, direct)
    reason = "one channel a group, channels are neighbours" if direct else "one channel a group, turned in panels"
    refused = {planes_kind("wgrad"): planes if isinstance(planes, str) else "narrow planes leave lanes empty"}
    return at_least_roofline(Choice("depthwise wgrad", reason, estimate, refused, tiling), problem, machine)


def _plan_small_groups(problem: ConvProblem, machine: Machine) -> Choice | str:
    """The choice for wgrad of groups of which several fill a vector, or why this does not serve it."""
    refusal = weight_refusal(problem, machine)
    if refusal:
        return refusal
    direct = _weight_direct(problem, machine)
    tiling = _weight_tiling(problem, machine, direct)
    return Choice(f"{SMALL_GROUPS} wgrad", SMALL_GROUPS_WHY, _estimate(problem, machine, direct), {}, tiling)


def faster_of(choice: Choice, other: Choice | str, name: str) -> Choice:
    """A choice, or one of small groups of lower estimate; `other` may be the reason why `name` does not serve."""
    if isinstance(other, str):
        return replace(choice, refused={name: other})
    if other.estimate <= choice.estimate:
        return replace(other, refused={choice.kind: "vectors would hold channels of one group only, or be slower"})
    return replace(choice, refused={other.kind: "estimated to be slower"})


def _small_group_refusal(problem: ConvProblem, machine: Machine) -> str:
    """Why vectors do not span the channels of several groups, or nothing."""
    each, lanes = problem.in_channels // problem.groups, machine.lanes(problem.accumulator)
    if problem.out_channels != problem.in_channels:
        return "groups of several channels need as many output as input channels"
    return f"groups of {each} channels do not divide vectors of {lanes}" if lanes % each else ""


def _weight_tiling(problem: ConvProblem, machine: Machine, direct: bool) -> DepthwiseWeightTiling:
    """How the kernel over vectors of channels is cut."""
    kernel, strides, _, _ = axes_of(problem)
    x, _, dy = views(problem)
    depth, height, width = dy.extents
    multiplier, lanes = problem.out_channels // problem.groups, machine.lanes(problem.accumulator)
    multiples = max(
        m
        for m in range(1, multiplier + 1)
        if multiplier % m == 0 and (m == 1 or m * (kernel[2] + 1) + 2 <= machine.registers)
    )
    budget = machine.l2_bytes // WEIGHT_SLAB_SHARE * (1 if direct else 4)
    panels = multiples if problem.is_depthwise else 1
    line_bytes = (width * panels + x.extents[2] * strides[1]) * machine.vector_bytes
    prefetched = direct and _from_memory(problem, WEIGHT_PREFETCH_FROM)
    lines = min(height, max(1, budget // line_bytes))
    if direct:
        lines = 1 if prefetched else min(lines, _near_lines(problem))
    lines = -(-height // -(-height // lines))
    blocks = -(-problem.in_channels // lanes)
    slabs = int(problem.batch) * depth * -(-height // lines)
    parts, even = 1, blocks % machine.parts == 0 or blocks >= 4 * machine.parts
    if direct:  # a single image is small: another piece of sums costs more than lines of half the channels
        even = int(problem.batch) * depth == 1 and blocks % machine.parts == 0 and blocks >= 4 * machine.parts
    if not even:
        parts = min(slabs, machine.parts)
    chunks = blocks if not direct else min(blocks, -(-machine.parts // parts))
    copies = max(1, min(4, 16 // (kernel[2] * multiples)))
    return DepthwiseWeightTiling(direct, PIECE, copies, multiples, lines, parts, chunks, prefetched)


def _near_lines(problem: ConvProblem) -> int:
    """Lines of dY in a slab that is read in place: a line's pixels of a few channels spread over many pages.

    From one kernel line to the next the slab's lines of dY stay, and those of X move on by a line.
    """
    _, strides, _, _ = axes_of(problem)
    x, _, dy = views(problem)
    if sum(view.size * DTYPE_BYTES[view.dtype] for view in (dy, x)) <= NEAR_PAGES * 3 / 2 * PAGE_BYTES:
        return dy.extents[1]  # all of both is near
    dy_pages, x_pages = (
        view.extents[2] * min(1.0, view.spatial[2] * DTYPE_BYTES[view.dtype] / PAGE_BYTES) for view in (dy, x)
    )
    return max(1, int((NEAR_PAGES * 3 / 4 - x_pages) / (dy_pages + strides[1] * x_pages)))


def _weight_direct(problem: ConvProblem, machine: Machine) -> bool:
    """Whether X and dY are read in place: their channels are neighbours, and as many."""
    x, _, dy = views(problem)
    same = x.dtype == dy.dtype == problem.accumulator
    whole = problem.in_channels % machine.lanes(problem.accumulator) == 0
    channels_last = x.channel == dy.channel == 1 and problem.out_channels == problem.in_channels
    return channels_last and (whole or (machine.has_masks and same))


def weight_refusal(problem: ConvProblem, machine: Machine) -> str:
    """Why vectors of channels do not serve wgrad, or nothing."""
    if problem.groups == 1:
        return "not one input channel a group"
    refusal = "" if problem.is_depthwise else _small_group_refusal(problem, machine)
    if refusal:
        return refusal
    if 2 * problem.in_channels < machine.lanes(problem.accumulator):
        return "groups would fill less than half of a vector"
    kernel, _, _, _ = axes_of(problem)
    sums = machine.registers * 5 // 8
    if kernel[2] > sums:
        return f"more than {sums} taps in a kernel line"
    x, _, _ = views(problem)
    if not _weight_direct(problem, machine) and x.extents[2] * kernel[0] * machine.vector_bytes > machine.l2_bytes:
        return "a line of the panel would fill the core's own cache"
    return ""


def invalid_depthwise(gather: Gather, tiling: DepthwiseTiling, machine: Machine) -> str:
    """Why forward or dgrad over vectors of channels cannot be built with a tiling, or nothing."""
    step, together = gather.out_step[1], min(gather.source_channels, gather.result_channels)
    blocks = -(-gather.groups * together // machine.lanes(gather.dtype))
    if tiling.direct and not _direct(gather, machine):
        return "direct needs contiguous channels, as many of them in the source as in the result"
    if tiling.pixels < 1 or emitted_products(gather, tiling.pixels) * together > MAX_PRODUCTS:
        return f"pixels is {tiling.pixels}; it must be at least 1, and the code at most {MAX_PRODUCTS} multiply-adds"
    most = -(-gather.result.extents[1] // step) * step
    if not step <= tiling.lines <= most or tiling.lines % step:
        return f"lines is {tiling.lines}; it must be a multiple of the step {step}, at most {most}"
    if not 1 <= tiling.chunks <= (blocks if tiling.direct else 1):
        return f"chunks is {tiling.chunks}; there are {blocks} blocks of channels, and without direct it must be 1"
    return ""


def invalid_depthwise_weight(problem: ConvProblem, tiling: DepthwiseWeightTiling, machine: Machine) -> str:
    """Why wgrad over vectors of channels cannot be built with a tiling, or nothing."""
    multiplier = problem.out_channels // problem.groups
    blocks = -(-problem.in_channels // machine.lanes(problem.accumulator))
    for name in ("pixels", "copies", "multiples", "lines", "parts", "chunks"):
        if getattr(tiling, name) < 1:
            return f"{name} is {getattr(tiling, name)}; it must be at least 1"
    if tiling.direct and not _weight_direct(problem, machine):
        return "direct needs contiguous channels, as many of X as of dY"
    if tiling.parts > MOST_PIECES:
        return f"parts is {tiling.parts}; it must be at most {MOST_PIECES}"
    if multiplier % tiling.multiples:
        return f"multiples is {tiling.multiples}; it must divide the {multiplier} output channels of an input channel"
    _, height, width = views(problem)[2].extents
    if tiling.lines > height or tiling.pixels > max(PIECE, width):
        return f"lines is {tiling.lines} and pixels is {tiling.pixels}; dY has {height} rows of {width}"
    if tiling.chunks > blocks:
        return f"chunks is {tiling.chunks}; there are {blocks} blocks of channels"
    return ""


def _estimate(problem: ConvProblem, machine: Machine, direct: bool) -> float:
    """Seconds on one core, were memory fast."""
    lanes, each = machine.lanes(problem.accumulator), problem.in_channels // problem.groups
    few = problem.is_depthwise or each == lanes  # repeating the one channel of a vector is part of its load
    cycles = problem.macs / (2 * lanes) * (SUM_OVERHEAD if few else SHUFFLED_SUM_OVERHEAD)
    if not direct:
        shapes = [shape for name, (shape, _) in problem.tensors.items() if name != "weight"]
        cycles += (TURN_COST if problem.is_depthwise else GROUP_TURN_COST) * sum(
            math.prod(int(e) for e in shape) for shape in shapes
        )
    return cycles / CLOCK


def _from_memory(problem: ConvProblem, limit: int) -> bool:
    """Whether memory bounds a problem of at least so many bytes; many taps hide it, and asking would cost them time."""
    return problem.bytes >= limit and problem.macs < 4 * problem.bytes


def _pixels(gather: Gather, machine: Machine) -> int:
    """Accumulators beside one kernel line's weights; 14 hide the adders' latency and divide common widths."""
    width_taps = max(len(phase[2].taps) for phases in gather.phases for phase in phases)
    return max(4, min(14, machine.registers - 2 - min(width_taps, machine.registers // 2)))


def _direct(gather: Gather, machine: Machine) -> bool:
    channels_last = gather.source.channel == gather.result.channel == 1
    alike = gather.source_channels == gather.result_channels
    same = gather.source.dtype == gather.result.dtype == gather.dtype
    whole = gather.groups * gather.result_channels % machine.lanes(gather.dtype) == 0
    return channels_last and alike and (whole or (machine.has_masks and same))


def _gather_refusal(gather: Gather, machine: Machine) -> str:
    """Why vectors over channels do not serve a gather, or nothing."""
    if 2 * gather.groups * min(gather.source_channels, gather.result_channels) < machine.lanes(gather.dtype):
        return "groups would fill less than half of a vector"
    if gather.source.extents[2] * machine.vector_bytes > machine.l2_bytes and not _direct(gather, machine):
        return "a line of the panel would fill the core's own cache"
    return ""


__all__ = [
    "SMALL_GROUPS",
    "faster_of",
    "gather_refusal",
    "invalid_depthwise",
    "invalid_depthwise_weight",
    "plan_depthwise_gather",
    "plan_depthwise_weight",
    "weight_refusal",
]
