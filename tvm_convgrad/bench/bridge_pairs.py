# SPDX-License-Identifier: Apache-2.0
"""A framework's work with a bridge and without, timed in turns in one process, in seconds and in processor time.

Processor time, that of all threads of the process together, changes little where other programs want the same cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

MIN_PAIRS = 5
CALL_PAIRS = 11
"""Of a single call: shorter work has more noise."""

TURN = 0.004
"""Seconds of a turn, at the least: shorter work is done several times, and the mean is taken."""

Run = Callable[[], object]
"""Does the work once, and returns when it is done."""


@dataclass(frozen=True)
class Turn:
    """A turn of one of the two.

    Attributes:
        seconds: until the work is done.
        processor: seconds of processor time.
    """

    seconds: float
    processor: float


@dataclass(frozen=True)
class Pairs:
    """Turns with the bridge and without, pair by pair.

    Attributes:
        with_bridge, without: as many turns of each.
    """

    with_bridge: tuple[Turn, ...]
    without: tuple[Turn, ...]

    @property
    def seconds(self) -> tuple[float, float]:
        """Medians, with the bridge and without."""
        return median(each.seconds for each in self.with_bridge), median(each.seconds for each in self.without)

    @property
    def processor(self) -> tuple[float, float]:
        """Medians of the processor time, with the bridge and without."""
        return median(each.processor for each in self.with_bridge), median(each.processor for each in self.without)

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios: time without the bridge / with it."""
        both = zip(self.with_bridge, self.without, strict=True)
        return median(own.seconds / ours.seconds for ours, own in both)

    @property
    def processor_ratio(self) -> float:
        """The same of processor time."""
        both = zip(self.with_bridge, self.without, strict=True)
        return median(own.processor / ours.processor for ours, own in both)


def in_turns(
    with_bridge: Run,
    without: Run,
    seconds: float,
    enabled: Callable[[], AbstractContextManager[object]] = nullcontext,
    least: int = MIN_PAIRS,
) -> Pairs:
    """Time the work with the bridge and without, pair by pair.

    Args:
        with_bridge, without: the work, warm.
        seconds: of all pairs.
        enabled: what a turn with the bridge is in; entering and leaving it is not timed.
        least: pairs, at the least.
    """
    ours: list[Turn] = []
    own: list[Turn] = []
    begin = time.perf_counter()
    while len(own) < least or time.perf_counter() - begin < seconds:
        with enabled():
            ours.append(_turn(with_bridge))
        own.append(_turn(without))
    return Pairs(tuple(ours), tuple(own))


def _turn(run: Run) -> Turn:
    runs, processor, begin, elapsed = 0, time.process_time(), time.perf_counter(), 0.0
    while elapsed < TURN:
        run()
        runs += 1
        elapsed = time.perf_counter() - begin
    return Turn(elapsed / runs, (time.process_time() - processor) / runs)


__all__ = ["CALL_PAIRS", "MIN_PAIRS", "Pairs", "Run", "Turn", "in_turns"]
