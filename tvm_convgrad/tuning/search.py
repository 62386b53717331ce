# SPDX-License-Identifier: Apache-2.0
"""The tuner: for each problem, candidates that compute exactly are timed against the plan's own tiling.

A candidate is first compared with float64 on small integers, where equality is demanded to the last bit. Only then it
is timed, in turns with the best so far, and it has to win by more than noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import tvm

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ConvGradError, ProblemError
from tvm_convgrad.core.exact import Array, compare, numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.shares import shares
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.candidates import candidates
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.tuning.store import Store

MARGIN = 1.03
"""How many times faster a candidate has to be than the best so far."""

PAIRS = 7
TURN_SECONDS = 0.002

Run = Callable[[], None]


class TuningError(ConvGradError, AssertionError):
    """A candidate that computes something else than the convolution: a defect of a kernel."""


@dataclass(frozen=True)
class Work:
    """A direction of a problem, and how often it occurs."""

    direction: str
    problem: ConvProblem
    count: int = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a direction of a problem.

    Attributes:
        status: "better" (a candidate won), "own" (the plan's own tiling did), "skipped" (with the reason).
        gain: how many times faster the winner is than the plan's own tiling; 1 for that.
        tried: candidates that were timed, the plan's own included.
        detail: the winner's tiling in words, or the reason.
    """

    direction: str
    descriptor: str
    status: str
    gain: float
    tried: int
    detail: str


def tune(
    work: Sequence[Work], machine: Machine, target: tvm.target.Target, store: Store, budget: float
) -> Iterator[Outcome]:
    """Tune the problems, those with the most work first, for about `budget` seconds in all, and keep the winners.

    What is in the store already is skipped, and so is what gets no share of the time.

    Raises:
        TuningError: a candidate computes something else.
        ArtifactError: the store cannot be written.
    """
    for each, end in shares([(each, _weight(each)) for each in work], budget):
        text = each.problem.descriptor
        if not each.problem.is_static:
            yield Outcome(each.direction, text, "skipped", 1.0, 0, "an extent is known only at run time")
        elif store.entry(each.problem, each.direction, machine) is not None:
            yield Outcome(each.direction, text, "skipped", 1.0, 0, "tuned before")
        elif end is None:
            yield Outcome(each.direction, text, "skipped", 1.0, 0, "the budget is spent")
        else:
            yield _tune(each, machine, target, store, end)


def _weight(work: Work) -> float:
    return float(work.problem.macs * work.count) if work.problem.is_static else 0.0


def _tune(work: Work, machine: Machine, target: tvm.target.Target, store: Store, end: float) -> Outcome:
    problem, direction, text = work.problem, work.direction, work.problem.descriptor
    choices = candidates(problem, direction, machine)
    own = next(choices, None)
    if own is None:
        reason = chooser.choose(problem, direction, machine).reason
        return Outcome(direction, text, "skipped", 1.0, 0, f"no generated kernel: {reason}")
    try:
        operands, wanted = numbers_of(problem, direction)
    except ProblemError as error:
        return Outcome(direction, text, "skipped", 1.0, 0, str(error))
    trial = _Trial(work, machine, target, operands, wanted)
    first = best = trial.ready(own)
    winner, tried, complete = own, 1, True
    for choice in choices:
        if tried > 1 and time.monotonic() >= end:
            complete = False
            break
        call = trial.ready(choice)
        tried += 1
        if _gain(best, call) > MARGIN:
            best, winner = call, choice
    gain = 1.0 if winner is own else _gain(first, best)
    if gain < 1:  # what won in turns lost at the end: noise
        best, winner, gain = first, own, 1.0
    seconds = _turn(best)
    if complete or winner is not own:  # the plan's own tiling is only kept as the winner over all others
        store.record(problem, direction, machine, winner, seconds=seconds, own_seconds=seconds * gain, candidates=tried)
    return Outcome(direction, text, "own" if winner is own else "better", gain, tried, str(winner.plan))


class _Trial:
    """Compiles and checks candidates for one direction of a problem."""

    def __init__(
        self, work: Work, machine: Machine, target: tvm.target.Target, operands: Sequence[Array], wanted: Array
    ) -> None:
        self.work, self.machine, self.target, self.wanted = work, machine, target, wanted
        self._tensors = [tvm.runtime.tensor(np.ascontiguousarray(operand)) for operand in operands]

    def ready(self, choice: Choice) -> Run:
        """The compiled candidate as a function of no arguments, after it has computed exactly.

        Raises:
            TuningError: it does not.
        """
        function = chooser.build(self.work.problem, self.work.direction, self.machine, choice, "main")
        main = tvm.compile(tvm.IRModule({"main": function}), self.target)["main"]
        blank = np.full(self.wanted.shape, np.nan, numpy_dtype(str(self.wanted.dtype)))
        result = tvm.runtime.tensor(blank)
        main(*self._tensors, result)
        status, detail = compare(np.asarray(result.numpy()), self.wanted)
        if status != "right":
            raise TuningError(
                f"{self.work.direction} of {self.work.problem.descriptor}, {choice.name} tiled as "
                f"{choice.plan}: {detail}; this is a defect of the kernel, please report it"
            )
        return lambda: main(*self._tensors, result)


def _gain(reference: Run, call: Run) -> float:
    """How many times faster `call` is than `reference`, the median of pairs."""
    return median(_turn(reference) / _turn(call) for _ in range(PAIRS))


def _turn(call: Run) -> float:
    """Mean seconds of a call over a time that the clock can tell."""
    call()
    runs, begin, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < TURN_SECONDS:
        call()
        runs += 1
        elapsed = time.perf_counter() - begin
    return elapsed / runs
