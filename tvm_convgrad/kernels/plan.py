# SPDX-License-Identifier: Apache-2.0
"""The only chooser: which kernel computes a face of a problem on a machine, cut how, and why not another.

A kernel that does not cover a problem refuses with a reason; then the composition of stock operators is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tvm_convgrad.kernels.spec import Gather, Phase, data_gather, forward_gather, split_line
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.problem import ConvProblem

COMPOSITION = "composition"
"""The kind of a choice for no kernel."""

DEPTHWISE_PANEL = 1 << 17
"""Bytes of a depthwise kernel's panel: a part of the core's own cache."""

MAX_ELEMENTS = 2**31 - 1
"""Kernels count elements in int32."""


@dataclass(frozen=True)
class Choice:
    """What computes a face of a problem.

    Attributes:
        kind: a kernel's name, or "composition".
        reason: why it was taken.
        estimate: seconds on one core, by the cost model; 0 for the composition.
        refused: the reason of each kernel that was not taken, by its name.
        detail: the kernel's own plan.
    """

    kind: str
    reason: str
    estimate: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    detail: Any = None

    @property
    def is_kernel(self) -> bool:
        """Whether a generated kernel was taken."""
        return self.kind != COMPOSITION


def choose(problem: ConvProblem, face: str, machine: Machine | None) -> Choice:
    """The kernel for a face ("forward", "backward_weight" or "backward_data"), or the composition with the reasons."""
    if machine is None:
        return Choice(COMPOSITION, "the target is not a CPU that kernels are made for")
    return _choose(problem, face, machine)


@lru_cache(maxsize=4096)
def _choose(problem: ConvProblem, face: str, machine: Machine) -> Choice:
    refusal = _refusal(problem)
    if refusal:
        return Choice(COMPOSITION, refusal, refused={"generated kernels": refusal})
    if face == "backward_weight":
        from tvm_convgrad.kernels.weight_plan import plan_weight

        return plan_weight(problem, machine)
    gather = forward_gather(problem) if face == "forward" else data_gather(problem)
    return _choose_gather(gather, machine, face)


def _refusal(problem: ConvProblem) -> str:
    """Why no kernel covers the problem, or nothing."""
    if not problem.is_static:
        return "an extent is known only at run time"
    for name, (shape, _) in problem.tensors.items():
        if 0 in shape:
            return f"{name} has no elements"
        if math.prod(int(e) for e in shape) > MAX_ELEMENTS // 2:
            return f"{name} has more elements than half of what an int32 index reaches"
    return ""


def build(problem: ConvProblem, face: str, machine: Machine, choice: Choice, name: str) -> Any:
    """The PrimFunc of a choice; its parameters are the face's operands in order, and the result."""
    return _build(problem, face, machine, choice.kind, choice.detail, name)


@lru_cache(maxsize=1024)
def _build(problem: ConvProblem, face: str, machine: Machine, kind: str, detail: Any, name: str) -> Any:
    tensors = problem.tensors
    if kind == "implicit GEMM wgrad":
        from tvm_convgrad.kernels.wgrad import weight_kernel

        return weight_kernel(problem, detail, machine, name)
    if kind == "few-channel wgrad":
        from tvm_convgrad.kernels.stem import stem_weight_kernel

        return stem_weight_kernel(problem, detail, machine, name)
    if kind == "depthwise wgrad":
        from tvm_convgrad.kernels.depthwise import depthwise_weight_kernel

        return depthwise_weight_kernel(problem, detail, machine, name)
    from tvm_convgrad.kernels.gather import gather_kernel

    source, result = ("data", "grad") if face == "forward" else ("grad", "data")
    shapes = {"source": tensors[source], "weight": tensors["weight"], "result": tensors[result]}
    gather, tilings = detail
    if kind.startswith("depthwise"):
        from tvm_convgrad.kernels.depthwise import depthwise_gather_kernel

        return depthwise_gather_kernel(gather, tilings, machine, name, shapes)
    return gather_kernel(gather, tilings, machine, name, shapes)


# ------------------------------------------------------------------------------------------------- gathers


def _choose_gather(gather: Gather, machine: Machine, face: str) -> Choice:
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
    from tvm_convgrad.kernels.gather import GatherTiling
    from tvm_convgrad.kernels.tile import balanced, tile_rows

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


__all__ = ["COMPOSITION", "Choice", "build", "choose"]
