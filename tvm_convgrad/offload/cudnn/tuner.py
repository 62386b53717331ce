# SPDX-License-Identifier: Apache-2.0
"""The tuner: engines for a call that compute right, and write where they should, are timed; the best is kept.

Each engine runs twice in guarded memory before it is timed. It is thrown out, by name and with the reason, if there is
no plan of it, if it fails, leaves NaN, writes outside of result and workspace, gives other bits when called again
where the settings want deterministic engines, or differs from what most engines compute. Those that remain take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.exact import Array
from tvm_convgrad.core.shares import shares
from tvm_convgrad.offload.cudnn.agreement import Agreement, bound
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.engines import Listed
from tvm_convgrad.offload.cudnn.guarded import Guarded
from tvm_convgrad.offload.cudnn.settings import Settings
from tvm_convgrad.offload.cudnn.store import EngineStore
from tvm_convgrad.offload.cudnn.tuning_device import EngineError, Plan, TuningDevice

MOST = 16
"""Engines of the heuristics' list that are tried for a call."""

MARGIN = 1.03
"""How many times faster than the heuristics' first an engine has to be."""

ROUNDS = 5
"""Turns of each engine, at the least; MOST_ROUNDS: at the most."""

MOST_ROUNDS = 50
TURN_SECONDS = 0.002
MOST_CALLS = 1000

Clock = Callable[[], float]


class ThrownOut(NamedTuple):
    """An engine that is not used, and why."""

    engine: Listed
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What became of a call.

    Attributes:
        status: "better" (than the heuristics' first), "own" (that was the best), "skipped" (not tried, with the reason)
            or "failed" (no engine can be trusted).
        gain: how many times faster the winner is than the heuristics' first that computes right.
        tried: engines that were timed.
        detail: the winner, or the reason.
    """

    call: Call
    status: str
    gain: float
    tried: int
    detail: str
    thrown_out: tuple[ThrownOut, ...] = ()


def tune(
    work: Sequence[tuple[Call, int]],
    device: TuningDevice,
    settings: Settings,
    store: EngineStore,
    budget: float,
    clock: Clock = time.monotonic,
) -> Iterator[Outcome]:
    """Tune calls, those with the most work first, for about `budget` seconds in all, and keep the winners.

    What is in the store already for this device is skipped, and so is what gets no share of the time.

    Args:
        work: calls, and how often each occurs.

    Raises:
        ArtifactError: the store cannot be written.
        SetupError: an engine has broken the GPU for this process; tuning again skips it.
    """
    weighed = [(call, float(call.problem.macs * count) if call.problem.is_static else 0.0) for call, count in work]
    for call, end in shares(weighed, budget, clock):
        if not call.problem.is_static:
            yield Outcome(call, "skipped", 1.0, 0, "an extent is known only at run time")
        elif store.winner(call, device.arch, device.version, settings, device.device) is not None:
            yield Outcome(call, "skipped", 1.0, 0, "tuned before")
        elif end is None:
            yield Outcome(call, "skipped", 1.0, 0, "the budget is spent")
        else:
            yield _Trial(call, device, settings, store, clock, end).outcome()


@dataclass
class _Candidate:
    engine: Listed
    plan: Plan
    calls: int = 1
    """In a turn."""
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return str(self.engine)


class _Trial:
    """The engines of one call."""

    def __init__(
        self, call: Call, device: TuningDevice, settings: Settings, store: EngineStore, clock: Clock, end: float
    ) -> None:
        self._call, self._device, self._settings, self._store = call, device, settings, store
        self._clock, self._end = clock, end
        self._thrown: list[ThrownOut] = []
        self._broke = store.broke(call, device.arch, device.version)

    def outcome(self) -> Outcome:
        """Try, time, keep."""
        listed = self._device.candidates(self._call, MOST)
        usable = () if isinstance(listed, str) else [each for each in listed if not each.refusal]
        if not usable:
            return self._ended("skipped", listed if isinstance(listed, str) else "cuDNN has no engine that may be used")
        candidates = [found for found in map(self._planned, usable) if found is not None]
        operands, limit = self._call.numbers()
        workspace = max((each.plan.workspace for each in candidates), default=0)
        try:
            memory = Guarded(self._device, self._call, operands, workspace)
        except EngineError as error:
            return self._ended("skipped", str(error))
        sound = self._agreeing(candidates, memory, limit)
        sound = self._timed(sound, memory)
        if not sound:
            return self._ended("failed", "no engine can be trusted")
        return self._kept(usable[0], sound)

    def _ended(self, status: str, detail: str) -> Outcome:
        return Outcome(self._call, status, 1.0, 0, detail, tuple(self._thrown))

    def _throw_out(self, engine: Listed, reason: str) -> None:
        self._thrown.append(ThrownOut(engine, reason))

    def _planned(self, engine: Listed) -> _Candidate | None:
        if (engine.index, engine.knobs) in self._broke:
            self._throw_out(engine, "broke the GPU for its process when it was tuned before")
            return None
        try:
            return _Candidate(engine, self._device.plan(self._call, engine))
        except EngineError as error:
            self._throw_out(engine, f"has no plan: {error}")
            return None

    def _agreeing(self, candidates: Sequence[_Candidate], memory: Guarded, limit: int) -> list[_Candidate]:
        """Those that compute what most do, of as many as the share of time allows; two at the least."""
        agreement: Agreement[_Candidate] = Agreement(bound(self._call, limit, self._settings))
        for number, candidate in enumerate(candidates):
            if number > 1 and self._clock() >= self._end:
                break
            result = self._checked(candidate, memory)
            if result is not None:
                agreement.add(candidate, result)
        for candidate, detail in agreement.others():
            self._throw_out(candidate.engine, detail)
        return agreement.majority()

    def _checked(self, candidate: _Candidate, memory: Guarded) -> Array | None:
        """The result of a candidate, after two calls in blank memory; None where it is thrown out."""
        results = []
        for _ in range(2):
            memory.blank(candidate.plan)
            try:
                self._run(candidate, memory, 1)
            except EngineError as error:
                self._throw_out(candidate.engine, f"fails: {error}")
                return None
            result = memory.result()
            missing = int(np.isnan(result).sum())
            reason = memory.trespass(candidate.plan) or memory.changed_operand()
            if reason or missing:
                self._throw_out(candidate.engine, reason or f"leaves {missing} of {result.size} elements NaN")
                return None
            results.append(result)
        if self._settings.deterministic and results[0].tobytes() != results[1].tobytes():
            self._throw_out(candidate.engine, "gives other bits when it is called again")
            return None
        return results[0]

    def _timed(self, candidates: Sequence[_Candidate], memory: Guarded) -> list[_Candidate]:
        """Those that remain after their turns, each with seconds of a call in each round."""
        left = list(candidates)
        for candidate in candidates:
            once = self._turn(candidate, memory)
            if once is None:
                left.remove(candidate)
            else:
                candidate.calls = max(1, min(MOST_CALLS, round(TURN_SECONDS / max(once, 1e-9))))
        for done in range(MOST_ROUNDS):
            if len(left) < 2 and done:
                break
            if done >= ROUNDS and self._clock() >= self._end:
                break
            first = done % len(left) if left else 0
            for candidate in [*left[first:], *left[:first]]:
                seconds = self._turn(candidate, memory)
                if seconds is None:
                    left.remove(candidate)
                else:
                    candidate.seconds.append(seconds)
        return left

    def _turn(self, candidate: _Candidate, memory: Guarded) -> float | None:
        """Seconds of a call, the mean of a turn; None if it is thrown out."""
        memory.guard(candidate.plan)
        try:
            seconds = self._run(candidate, memory, candidate.calls) / candidate.calls
        except EngineError as error:
            self._throw_out(candidate.engine, f"fails: {error}")
            return None
        reason = memory.trespass(candidate.plan)
        if reason:
            self._throw_out(candidate.engine, reason)
            return None
        return seconds

    def _run(self, candidate: _Candidate, memory: Guarded, calls: int) -> float:
        """Seconds of some calls; what breaks the GPU is kept as that before the error goes on."""
        try:
            return memory.run(candidate.plan, calls)
        except SetupError:
            self._store.record_broke(self._call, self._device, candidate.engine)
            raise

    def _kept(self, first: Listed, sound: Sequence[_Candidate]) -> Outcome:
        own = sound[0]
        best = min(sound, key=lambda candidate: median(candidate.seconds))
        gain = median(a / b for a, b in zip(own.seconds, best.seconds, strict=True))
        if gain < MARGIN:
            best, gain = own, 1.0
        seconds = median(best.seconds)
        self._store.record(
            self._call,
            self._device,
            self._settings,
            best.engine,
            self._thrown,
            seconds=seconds,
            own_seconds=seconds * gain,
            candidates=len(sound),
        )
        alone = "; no other engine computes it" if len(sound) == 1 else ""
        instead = "" if own.engine == first else f"; the heuristics' first, {first}, is thrown out"
        status = "own" if best.engine == first else "better"
        detail = f"{best}, {seconds * 1e3:.3f} ms{alone}{instead}"
        return Outcome(self._call, status, gain, len(sound), detail, tuple(self._thrown))


__all__ = ["MOST", "Outcome", "ThrownOut", "tune"]
