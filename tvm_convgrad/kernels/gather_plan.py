# SPDX-License-Identifier: Apache-2.0
"""How forward and dgrad are cut: depthwise or implicit GEMM, the register tile, slabs, and what threads share."""

from __future__ import annotations

from typing import Any

from tvm_convgrad.kernels.gather import GatherTiling
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.spec import Gather, Phase, data_gather, forward_gather, split_line
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tile import balanced, tile_rows
from tvm_convgrad.problem import ConvProblem

DEPTHWISE_PANEL = 1 << 17
"""Bytes of a depthwise kernel's panel: a part of the core's own cache."""


def plan_gather(problem: ConvProblem, face: str, machine: Machine) -> Choice:
    """The choice for forward or dgrad."""
    gather = forward_gather(problem) if face == "forward" else data_gather(problem)
    refusal = _depthwise_refusal(gather, machine)
    if not refusal:
        columns = gather.source.extents[2] + 2 * len(gather.phases[0][0][2].taps)
        lines = max(1, DEPTHWISE_PANEL // (columns * machine.vector_bytes * max(gather.in_step[1], 1)))
        return Choice(f"depthwise {face}", "one channel a group, channels are neighbours", detail=(gather, lines))
    gather = split_line(gather, 512)
    tilings = tuple(_tile_phase(gather, phases, machine) for phases in gather.phases)
    kind = f"implicit GEMM {face}"
    return Choice(kind, "covers the problem", refused={f"depthwise {face}": refusal}, detail=(gather, tilings))


def _depthwise_refusal(gather: Gather, machine: Machine) -> str:
    """Why the kernel with channels as lanes does not serve a gather, or nothing."""
    if gather.groups == 1 or gather.source_channels != 1 or gather.result_channels != 1:
        return "not one channel a group on both sides"
    if gather.source.channel != 1 or gather.result.channel != 1:
        return "channels are not neighbours in memory"
    if {gather.source.dtype, gather.result.dtype} != {gather.dtype}:
        return f"tensors are not of the type of the sums, {gather.dtype}"
    if not machine.has_masks:
        return f"{machine.name} has no masked loads"
    if sum(map(len, gather.phases)) > 16:
        return "more than 16 phases"
    return ""


def _tile_phase(gather: Gather, phases: tuple[Phase, ...], machine: Machine) -> Any:
    lanes = machine.lanes(gather.dtype)
    d, h, w = (axis.count for axis in phases[0])
    over_channels = gather.result.channel == 1 and gather.result_channels >= lanes // 2
    taps = [max(len(phase[axis].taps) for phase in phases) for axis in range(3)]
    step = gather.in_step[1]
    offsets = [o // step for phase in phases for _, o in phase[1].taps] or [0]
    residues = max(1, max(len({o % step for _, o in phase[1].taps}) for phase in phases))
    shift = taps[1] > residues
    copies = taps[0] * taps[2] * (residues if shift else taps[1])
    reach = max(offsets) - min(offsets) if shift else 0
    budget = machine.l2_bytes * 2 // 5
    element = 8 if gather.dtype == "float64" else 4
    pool = h if shift else h * d if h * d * w >= 4 * lanes else gather.batch * h * d
    others = gather.batch * d * h // pool * gather.groups * len(phases)
    best = 1
    for lines in (n for n in range(1, pool + 1) if pool % n == 0):
        panel = copies * gather.source_channels * (lines + reach) * w * element
        items = pool // lines * others
        if lines == 1 or (panel <= budget and (items % machine.parts == 0 or items >= 4 * machine.parts)):
            best = lines
    items = pool // best * others
    channels = gather.result_channels
    if over_channels:
        columns = min((1, 2, 3), key=lambda c: (_waste(channels, c * lanes) * (1.15 if c == 1 else 1.0), c))
        rows = balanced(best * w, min(tile_rows(machine, columns), best * w))
        blocks = -(-channels // (columns * lanes))
    else:
        columns = min(
            (c for c in (2, 1, 3) if tile_rows(machine, c) > 0),
            key=lambda c: _waste(best * w, c * lanes) * _waste(channels, min(tile_rows(machine, c), channels)),
        )
        rows = balanced(channels, min(tile_rows(machine, columns), channels))
        blocks = -(-channels // rows)
    splits = 1
    if items < machine.parts:
        splits = min(blocks, -(-machine.parts // items))
    return GatherTiling("channels" if over_channels else "pixels", rows, columns, best, shift, splits)


def _waste(total: int, piece: int) -> float:
    """How many times more than `total` whole pieces hold."""
    return -(-total // piece) * piece / total


__all__ = ["plan_gather"]
