# SPDX-License-Identifier: Apache-2.0
"""The only chooser: which kernel computes a face of a problem on a machine, cut how, and why not another.

A kernel that does not cover a problem refuses with a reason; then the composition of stock operators is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.target import CLOCK, Machine
from tvm_convgrad.kernels.tuned import tilings_of, winner
from tvm_convgrad.problem import ConvProblem

if TYPE_CHECKING:  # this module is imported while TVM is, and must not need it
    from tvm_convgrad.kernels.epilogue import Epilogue

COMPOSITION = "composition"
"""The kind of a choice for no kernel."""

BYTES_PER_CYCLE = 4
"""From memory to one core while all of them work, for the roofline: 14 GB/s."""

REPRESENTATIVE_BATCH = 8
"""Images that a kernel for any batch is planned for."""

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


def choose(problem: ConvProblem, face: str, machine: Machine | None, *, symbolic_batch: bool = False) -> Choice:
    """The kernel for a face ("forward", "backward_weight" or "backward_data"), or the composition with the reasons.

    Inside `tuned.use_winners` a measured cut goes before that of the cost model.

    Args:
        symbolic_batch: whether the caller can do with a kernel whose batch is known only at run time; implicit GEMMs
            serve that, planned for REPRESENTATIVE_BATCH images.
    """
    if machine is None:
        return Choice(COMPOSITION, "the target is not a CPU that kernels are made for")
    if symbolic_batch and not isinstance(problem.batch, int):
        choice = _choose(replace(problem, batch=REPRESENTATIVE_BATCH), face, machine)
        if not choice.is_kernel or choice.kind.startswith("implicit GEMM"):
            return choice
        return Choice(COMPOSITION, f"{choice.kind} needs a static batch", refused={choice.kind: "static batch only"})
    return winner(problem, face, machine, _choose(problem, face, machine))


@lru_cache(maxsize=4096)
def _choose(problem: ConvProblem, face: str, machine: Machine) -> Choice:
    refusal = _refusal(problem)
    if refusal:
        return Choice(COMPOSITION, refusal, refused={"generated kernels": refusal})
    if face == "backward_weight":
        from tvm_convgrad.kernels.weight_plan import plan_weight

        return plan_weight(problem, machine)
    from tvm_convgrad.kernels.gather_plan import plan_gather

    return plan_gather(problem, face, machine)


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


def roofline(problem: ConvProblem, machine: Machine) -> float:
    """The seconds that one core needs at the least: two vector multiply-adds a cycle, each tensor moved once."""
    sums = problem.macs / (2 * machine.lanes(problem.accumulator))
    return max(sums, problem.bytes / BYTES_PER_CYCLE) / CLOCK


def in_words(choice: Choice) -> str:
    """How the kernel of a choice is cut: the register tile in vectors, slabs, and every other field that is set."""
    return "; ".join(dict.fromkeys(_tiling_words(tiling) for tiling in tilings_of(choice.detail)))


def _tiling_words(tiling: Any) -> str:
    values = {item.name: getattr(tiling, item.name) for item in fields(tiling)}
    words = [f"tile of {values.pop('rows')} x {values.pop('columns')} vectors"] if "rows" in values else []
    for name, value in values.items():
        if isinstance(value, bool):
            words += [name] if value else []
        elif value not in (0, 1, None):
            words.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def build(
    problem: ConvProblem, face: str, machine: Machine, choice: Choice, name: str, epilogue: Epilogue | None = None
) -> Any:
    """The PrimFunc of a choice; its parameters are the face's operands in order, and the result.

    Args:
        epilogue: what is fused into the store; a bias is the parameter before the result, a bias gradient the one
            after it. Only implicit GEMMs have one.

    A batch known only at run time is a tirx.Var of the problem's name in the parameters' shapes.

    Raises:
        UnsupportedError: the kernel does not have that epilogue.
    """
    return _build(problem, face, machine, choice.kind, choice.detail, name, epilogue)


@lru_cache(maxsize=1024)
def _build(
    problem: ConvProblem, face: str, machine: Machine, kind: str, detail: Any, name: str, given: Epilogue | None
) -> Any:
    from tvm_convgrad.kernels.epilogue import NO_EPILOGUE

    tensors, epilogue = problem.tensors, given or NO_EPILOGUE
    if kind == "implicit GEMM wgrad":
        from tvm_convgrad.kernels.wgrad import weight_kernel

        return weight_kernel(problem, detail, machine, name, epilogue)
    if epilogue != NO_EPILOGUE and not kind.startswith("implicit GEMM"):
        raise UnsupportedError(f"{kind} has no fused epilogue; apply it to the result")
    if kind == "few-channel wgrad":
        from tvm_convgrad.kernels.stem import stem_weight_kernel

        return stem_weight_kernel(problem, detail, machine, name)
    if kind == "depthwise wgrad":
        from tvm_convgrad.kernels.depthwise_weight import depthwise_weight_kernel

        return depthwise_weight_kernel(problem, detail, machine, name)
    from tvm_convgrad.kernels.gather import gather_kernel

    source, result = ("data", "grad") if face == "forward" else ("grad", "data")
    shapes = {"source": tensors[source], "weight": tensors["weight"], "result": tensors[result]}
    if kind.startswith("depthwise"):
        from tvm_convgrad.kernels.depthwise_gather import depthwise_gather_kernel

        return depthwise_gather_kernel(detail, machine, name, shapes)
    gather, tilings = detail
    return gather_kernel(gather, tilings, machine, name, shapes, epilogue)


__all__ = ["COMPOSITION", "REPRESENTATIVE_BATCH", "Choice", "build", "choose", "in_words", "roofline"]
