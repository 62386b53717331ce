# SPDX-License-Identifier: Apache-2.0
"""The chooser takes the kernel of least estimated time of those that do not refuse a direction of a problem.

A kernel that does not take a problem refuses with a reason; if all refuse, the composition of stock operators is used.
A forced kernel comes before a tuned plan, and a tuned plan before the estimate.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import lru_cache

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import MAX_INDEX
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.exact import Array
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.choice import COMPOSITION, Choice
from tvm_convgrad.kernels.contract import Kernel, Plan, planned
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.registry import kernels_of
from tvm_convgrad.kernels.transforms import transforms_allowed
from tvm_convgrad.kernels.tuned import winner


def choose(problem: ConvProblem, direction: str, machine: Machine | None, forced: Kernel | None = None) -> Choice:
    """The kernel for a direction ("forward", "backward_weight" or "backward_data"), or the composition with reasons.

    Args:
        problem: if its batch is a name, the choice is made for a representative batch.
        machine: None if no kernels are made for the target.
        forced: the only kernel to consider, even if it is not exact.
    """
    if machine is None:
        return Choice(COMPOSITION, "the target is not a CPU that kernels are made for")
    found = choices(problem, direction, machine, forced)
    if not found[0].is_kernel:
        return found[0]
    measured = winner(problem, direction, machine, found)
    if measured is None and len(found) > 1:
        measured_own = winner(problem, direction, machine, found[:1])
        found = (measured_own or found[0], *found[1:])
    taken = measured or min(found, key=lambda choice: choice.estimate)
    why = "measured to be slower" if measured else "estimated to be slower"
    passed = {choice.name: why for choice in found if choice.name != taken.name}
    return replace(taken, refused={**found[0].refused, **passed})


def choices(problem: ConvProblem, direction: str, machine: Machine, forced: Kernel | None = None) -> tuple[Choice, ...]:
    """The exact kernel of least estimate, then all that are not exact; or the composition, with the reasons.

    Each has its own plan. Kernels that are not exact are considered inside `allow_transforms`, or if forced.
    """
    able, refused = [], {}
    for kernel in kernels_of(direction):
        if forced is None and not kernel.exact and not transforms_allowed():
            continue
        if forced is not None and kernel is not forced:
            continue
        found = _planned(kernel, problem, direction, machine)
        if isinstance(found, str):
            refused[kernel.label(direction)] = found
        else:
            able.append(found)
    if not able:
        reasons = list(dict.fromkeys(refused.values()))
        return (Choice(COMPOSITION, "; ".join(reasons) or "no kernel computes it", refused=refused),)
    exact = [choice for choice in able if choice.kernel is not None and choice.kernel.exact] or able
    first = min(exact, key=lambda choice: choice.estimate)
    slower = {choice.name: "estimated to be slower" for choice in exact if choice is not first}
    others = [choice for choice in able if choice not in exact]
    return replace(first, refused={**refused, **slower}), *others


@lru_cache(maxsize=16384)
def _planned(kernel: Kernel, problem: ConvProblem, direction: str, machine: Machine) -> Choice | str:
    """A kernel with its own plan, or why it does not take the problem."""
    if isinstance(problem.batch, str) and not kernel.any_batch:
        return "the batch is known only at run time"
    static = planned(problem)
    reason = refusal(problem) or kernel.refusal(static, direction, machine)
    if reason:
        return reason
    plan = kernel.plan(static, direction, machine)
    estimate = kernel.estimate(static, direction, plan, machine)
    return Choice(kernel.label(direction), kernel.reason, estimate, kernel=kernel, plan=plan)


def refusal(problem: ConvProblem) -> str:
    """Why no kernel takes a problem, or nothing."""
    if isinstance(problem.batch, str) and any(name[0] != "N" for name in (problem.data_layout, problem.grad_layout)):
        return "a batch known only at run time must be the outermost axis"
    static = planned(problem)
    if not static.is_static:
        return "the height or width is known only at run time"
    for name, (shape, _) in static.tensors.items():
        if 0 in shape:
            return f"{name} has no elements"
        if math.prod(int(e) for e in shape) > MAX_INDEX // 2:
            return f"{name} has more than {MAX_INDEX // 2} elements, half of what an int32 index reaches"
    return ""


def epilogue_refusal(choice: Choice, direction: str, epilogue: Epilogue) -> str:
    """Why the kernel of a choice cannot fuse an epilogue, or nothing."""
    able = choice.kernel.epilogues(direction) if choice.kernel is not None else ()
    unable = [item.name for item in fields(epilogue) if getattr(epilogue, item.name) and item.name not in able]
    return f"the kernel {choice.name} does no {', '.join(unable)}" if unable else ""


def build(
    problem: ConvProblem,
    direction: str,
    machine: Machine,
    choice: Choice,
    name: str,
    epilogue: Epilogue = NO_EPILOGUE,
    packed: bool = False,
) -> tir.PrimFunc:
    """The PrimFunc of a choice: (first operand, second operand, [bias,] result[, bias gradient]).

    Args:
        problem: a batch that is a name becomes a variable in the shapes of data and grad.
        epilogue: what is fused into the store.
        packed: whether W's place is that of what `packed_weight` gives.

    Raises:
        UnsupportedError: the choice is no kernel, or the kernel has no such epilogue.
    """
    reason = epilogue_refusal(choice, direction, epilogue) if choice.is_kernel else f"{choice.name} is no kernel"
    if choice.kernel is None or choice.plan is None or reason:
        raise UnsupportedError(f"{direction} of {problem.descriptor}: {reason}; apply it to the result")
    return _build(choice.kernel, problem, direction, choice.plan, machine, name, epilogue, packed)


def packed_weight(
    problem: ConvProblem, direction: str, machine: Machine, choice: Choice, weight: Array
) -> Array | None:
    """W, whose values are known, as the kernel of a choice would pack it in each call; None if it packs nothing."""
    if choice.kernel is None or choice.plan is None or direction == BACKWARD_WEIGHT.name:
        return None
    return choice.kernel.packed_weight(problem, direction, choice.plan, machine, weight)


@lru_cache(maxsize=1024)
def _build(
    kernel: Kernel,
    problem: ConvProblem,
    direction: str,
    plan: Plan,
    machine: Machine,
    name: str,
    epilogue: Epilogue,
    packed: bool,
) -> tir.PrimFunc:
    emit = kernel.emit_packed if packed else kernel.emit
    return emit(problem, direction, plan, machine, name, epilogue)


__all__ = ["COMPOSITION", "Choice", "build", "choices", "choose", "epilogue_refusal", "packed_weight", "refusal"]
