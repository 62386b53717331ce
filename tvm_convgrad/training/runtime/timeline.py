# SPDX-License-Identifier: Apache-2.0
"""How long each kernel call of a step takes, measured around each call of the virtual machine.

The virtual machine calls the same functions in the same order in each step of one batch size, so a call is known by its
place. What a call belongs to follows from what it is given: those of the optimizer take the learning rate or the
optimizer's state, those up to the one that reads the target are the forward pass and the loss, and all others the
backward pass, also what it computes again of the forward pass.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.training.runtime.schema import Array
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.vm_code import is_kernel, without_hash

FORWARD, BACKWARD, OPTIMIZER, MACHINE = "forward", "backward", "optimizer", "virtual machine"
PHASES = (FORWARD, BACKWARD, OPTIMIZER, MACHINE)


@dataclass(frozen=True)
class TimedCall:
    """One kernel call of a step.

    Attributes:
        name: of the function in the library, without the hash of its code.
        phase: one of PHASES.
        shapes: of the tensors that it is given, its result among them.
        bytes: of these tensors, each counted once.
        begin: seconds from the start of the step to its start, of the last step that was measured.
        seconds: the median of all steps.
    """

    name: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    begin: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """The kernel calls of a step in their order.

    Attributes:
        calls: without those of the virtual machine itself.
        machine: seconds of these in a step, the median.
        step: seconds of a whole step while nothing is measured inside it, the median.
    """

    calls: tuple[TimedCall, ...]
    machine: float
    step: float


@dataclass
class _Seen:
    """The record of a call in the step whose pointers are read."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    pointers: frozenset[int]
    bytes: int


def record(session: Session, inputs: tuple[Array, ...], target: Array, steps: int = 10, warm: int = 3) -> Timeline:
    """Run steps on one batch and measure them; the session's state moves on.

    Args:
        session: of the step.
        inputs, target: one batch.
        steps: to be measured, as many again without measuring inside.
        warm: steps before that.
    """
    x = inputs if len(inputs) > 1 else inputs[0]

    def run() -> float:
        begin = time.perf_counter()
        session.step(x, target)
        return time.perf_counter() - begin

    for _ in range(warm):
        run()
    whole = [run() for _ in range(steps)]
    seen, target_at, updated = _look(session, run)
    times: list[list[float]] = []
    begins: list[float] = []
    for _ in range(steps):
        begins, found = _time(session, run)
        times.append(found)
    medians = [statistics.median(of_call) for of_call in zip(*times, strict=True)]
    phases = _phases(seen, target_at, updated)
    calls = [
        TimedCall(without_hash(each.name), phase, each.shapes, each.bytes, begin, seconds)
        for each, phase, begin, seconds in zip(seen, phases, begins, medians, strict=True)
        if phase != MACHINE
    ]
    machine = sum(s for phase, s in zip(phases, medians, strict=True) if phase == MACHINE)
    return Timeline(tuple(calls), machine, statistics.median(whole))


def _look(session: Session, run: Callable[[], float]) -> tuple[list[_Seen], int, set[int]]:
    """One step: what each call is given; the places in memory of the target, and of what only updates read."""
    seen: list[_Seen] = []
    given: list[Any] = []

    def note(_function: object, name: str, before: bool, result: Any, *arguments: Any) -> int:
        if not before:
            tensors = [each for each in (*arguments, result) if hasattr(each, "data_ptr")]
            pointers = {int(each.data_ptr()): each for each in tensors}
            shapes = tuple(tuple(int(extent) for extent in each.shape) for each in tensors)
            sizes = [math.prod(each.shape) * numpy_dtype(str(each.dtype)).itemsize for each in pointers.values()]
            seen.append(_Seen(str(name), shapes, frozenset(pointers), sum(sizes)))
        return 0

    roles = {spec.name: spec.role for spec in session.artifact.state}
    own = [tensor for name, tensor in session.tensors.items() if roles[name] in ("optimizer", "counter")]
    with session.instrumented(note, given):
        run()
    target, rate = given
    return seen, int(target.data_ptr()), {int(each.data_ptr()) for each in (rate, *own)}


def _time(session: Session, run: Callable[[], float]) -> tuple[list[float], list[float]]:
    """One step: when each call began, in seconds from the first one, and how long it took."""
    begins: list[int] = []
    ends: list[int] = []
    clock = time.perf_counter_ns

    def note(_function: object, _name: str, before: bool, _result: object, *_arguments: object) -> int:
        session.wait()  # a GPU computes on after a call has returned
        (begins if before else ends).append(clock())
        return 0

    with session.instrumented(note, []):
        run()
    first = begins[0]
    seconds = [(end - begin) * 1e-9 for begin, end in zip(begins, ends, strict=True)]
    return [(begin - first) * 1e-9 for begin in begins], seconds


def _phases(seen: list[_Seen], target: int, updated: set[int]) -> list[str]:
    """The phase of each call, from the places in memory of the target and of what only updates read."""
    real = [is_kernel(each.name) for each in seen]
    reads = [number for number, each in enumerate(seen) if real[number] and target in each.pointers]
    last = reads[0] if reads else -1
    found = []
    for number, each in enumerate(seen):
        if not real[number]:
            found.append(MACHINE)
        elif updated & each.pointers:
            found.append(OPTIMIZER)
        else:
            found.append(FORWARD if number <= last else BACKWARD)
    return found


__all__ = ["PHASES", "TimedCall", "Timeline", "record"]
