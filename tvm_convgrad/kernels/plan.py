# SPDX-License-Identifier: Apache-2.0
"""The only chooser: which kernel computes a face of a problem on a machine, cut how, and why not another.

A kernel that does not cover a problem refuses with a reason; then the composition of stock operators is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.loops import MAX_INDEX
from tvm_convgrad.kernels.target import CLOCK, Machine
from tvm_convgrad.kernels.transforms import transforms_allowed
from tvm_convgrad.kernels.tuned import tilings_of, winner
from tvm_convgrad.problem import ConvProblem

COMPOSITION = "composition"
"""The kind of a choice for no kernel."""

WINOGRAD = "winograd"
"""How the kinds of kernels by Winograd's transform begin."""

BYTES_PER_CYCLE = 4
"""From memory to one core while all of them work, for the roofline: 14 GB/s."""

REPRESENTATIVE_BATCH = 8
"""Images that a kernel for any batch is planned for."""

GATHERS = tuple(f"implicit GEMM {face}" for face in ("forward", "backward_data"))
"""The kernels that `gather_plan` cuts."""

_FAMILIES = ("implicit GEMM", "depthwise", "depthwise planes", "small groups", WINOGRAD)

ABLE = {
    **{
        f"{family} {face}": ("bias", "relu", "accumulate")
        for family in _FAMILIES
        for face in ("forward", "backward_data")
    },
    **{f"{family} wgrad": ("accumulate", "bias_grad", "bias_accumulate") for family in _FAMILIES},
}
"""Which fields of an Epilogue each kernel takes."""


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
    """The kernel for a face ("forward", "backward_weight" or "backward_data"), or the composition with the reasons.

    Inside `tuned.use_winners` a measured cut goes before that of the cost model; Winograd's transform is considered
    inside `transforms.allow_transforms` only.
    """
    if machine is None:
        return Choice(COMPOSITION, "the target is not a CPU that kernels are made for")
    own, *others = kernels(problem, face, machine)
    if not own.is_kernel:
        return own
    measured = winner(problem, face, machine, (own, *others))
    if not others:
        return measured or own
    taken = measured or min((winner(problem, face, machine, (own,)) or own, *others), key=lambda each: each.estimate)
    why = "measured to be slower" if measured else "estimated to be slower"
    return replace(taken, refused=own.refused | {each.kind: why for each in (own, *others) if each.kind != taken.kind})


def kernels(problem: ConvProblem, face: str, machine: Machine) -> tuple[Choice, ...]:
    """The kernels of which the plan takes one, each cut as the cost model says; or the composition, with the reasons.

    It is one, or two where Winograd's transform is allowed and covers the problem.
    """
    own = _choose(problem, face, machine)
    if not own.is_kernel or not transforms_allowed():
        return (own,)
    found = _winograd(problem, face, machine)
    return (replace(own, refused=own.refused | {WINOGRAD: found}),) if isinstance(found, str) else (own, found)


def choose_winograd(problem: ConvProblem, face: str, machine: Machine | None) -> Choice:
    """The kernel by Winograd's transform, or the composition with the reason why there is none."""
    found = _winograd(problem, face, machine) if machine is not None else "the target is no CPU of kernels"
    return Choice(COMPOSITION, found, refused={WINOGRAD: found}) if isinstance(found, str) else found


@lru_cache(maxsize=4096)
def _winograd(problem: ConvProblem, face: str, machine: Machine) -> Choice | str:
    from tvm_convgrad.kernels.winograd_plan import plan_winograd

    if isinstance(problem.batch, str):
        return "the batch is known only at run time"
    return _refusal(problem) or plan_winograd(problem, face, machine)


@lru_cache(maxsize=4096)
def _choose(problem: ConvProblem, face: str, machine: Machine) -> Choice:
    if isinstance(problem.batch, str):
        return _for_any_batch(problem, face, machine)
    refusal = _refusal(problem)
    if refusal:
        return Choice(COMPOSITION, refusal, refused={"generated kernels": refusal})
    if face == "backward_weight":
        from tvm_convgrad.kernels.weight_plan import plan_weight

        return plan_weight(problem, machine)
    from tvm_convgrad.kernels.gather_plan import plan_gather

    return plan_gather(problem, face, machine)


def _for_any_batch(problem: ConvProblem, face: str, machine: Machine) -> Choice:
    """The choice for the representative batch: every kernel loops over a batch known only when it runs."""
    choice = _choose(replace(problem, batch=REPRESENTATIVE_BATCH), face, machine)
    if not choice.is_kernel:
        return choice
    if any(layout[0] != "N" for layout in (problem.data_layout, problem.grad_layout)):
        reason = "a batch known only at run time must be the outermost axis"
        return Choice(COMPOSITION, f"{choice.kind}: {reason}", refused={**choice.refused, choice.kind: reason})
    return choice


def _refusal(problem: ConvProblem) -> str:
    """Why no kernel covers the problem, or nothing."""
    if not problem.is_static:
        return "the height or width is known only at run time"
    for name, (shape, _) in problem.tensors.items():
        if 0 in shape:
            return f"{name} has no elements"
        if math.prod(int(e) for e in shape) > MAX_INDEX // 2:
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


def epilogue_refusal(choice: Choice, epilogue: Epilogue) -> str:
    """Why the kernel of a choice cannot do what follows it as well, or nothing."""
    able = ABLE.get(choice.kind, ())
    unable = [item.name for item in fields(epilogue) if getattr(epilogue, item.name) and item.name not in able]
    return f"the kernel {choice.kind} does no {', '.join(unable)}" if unable else ""


def build(
    problem: ConvProblem,
    face: str,
    machine: Machine,
    choice: Choice,
    name: str,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Any:
    """The PrimFunc of a choice: (first operand, second operand, [bias,] result[, bias gradient]).

    Args:
        problem: a batch that is a name becomes a variable in the shapes of data and grad.
        epilogue: what is fused into the store.

    Raises:
        UnsupportedError: the kernel has no such epilogue.
    """
    refusal = epilogue_refusal(choice, epilogue)
    if refusal:
        raise UnsupportedError(f"{face} of {problem.descriptor}: {refusal}; apply it to the result")
    return _build(problem, face, machine, choice.kind, choice.detail, name, epilogue)


@lru_cache(maxsize=1024)
def _build(
    problem: ConvProblem, face: str, machine: Machine, kind: str, detail: Any, name: str, epilogue: Epilogue
) -> Any:
    tensors = problem.tensors
    if kind == f"{WINOGRAD} wgrad":
        from tvm_convgrad.kernels.winograd_weight import winograd_weight_kernel

        return winograd_weight_kernel(problem, detail, machine, name, epilogue)
    if kind == "implicit GEMM wgrad":
        from tvm_convgrad.kernels.wgrad import weight_kernel

        return weight_kernel(problem, detail, machine, name, epilogue)
    if kind in ("depthwise wgrad", "depthwise planes wgrad", "small groups wgrad"):
        from tvm_convgrad.kernels.depthwise_weight import depthwise_weight_kernel

        return depthwise_weight_kernel(problem, detail, machine, name, epilogue)
    from tvm_convgrad.kernels.gather import gather_kernel

    source, result = ("data", "grad") if face == "forward" else ("grad", "data")
    shapes = {"source": tensors[source], "weight": tensors["weight"], "result": tensors[result]}
    if kind.startswith(("depthwise", "small groups")):
        from tvm_convgrad.kernels.depthwise_gather import depthwise_gather_kernel

        return depthwise_gather_kernel(detail, machine, name, shapes, epilogue)
    if kind.startswith(WINOGRAD):
        from tvm_convgrad.kernels.winograd import winograd_kernel
        from tvm_convgrad.kernels.winograd_plan import gather_of

        return winograd_kernel(gather_of(problem, face), detail, machine, name, shapes, epilogue)
    gather, tilings = detail
    return gather_kernel(gather, tilings, machine, name, shapes, epilogue)


__all__ = [
    "COMPOSITION",
    "GATHERS",
    "WINOGRAD",
    "Choice",
    "build",
    "choose",
    "choose_winograd",
    "epilogue_refusal",
    "in_words",
    "kernels",
    "roofline",
]
