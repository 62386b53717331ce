# SPDX-License-Identifier: Apache-2.0
"""Calls timed in turns, in one process, so that noise of the machine hits all of them alike.

A turn of a short call first calls without looking at the clock until the threads of the call before, which spin a few
milliseconds for more work, sleep; then it calls until the clock can tell, and counts the mean.

On a GPU a turn is as many calls in a row as fill it by what the turn before took, and waits once, for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.core.exact import Array

MIN_PAIRS = 5
"""Rounds of turns, at the least."""

SETTLE = 0.02
"""Seconds after which the threads of the call before do not spin any more.

GNU OpenMP, which PyTorch brings, looks 300,000 times for more work with a `pause` between: of about 50 cycles on AMD's
cores, of 140 on Intel's.
"""

TURN = 0.004
"""Seconds that are counted in a turn, at the least."""

LONG = 0.1
"""Seconds of a call in which spinning threads of others do not count."""


@dataclass(frozen=True)
class Call:
    """One way to compute a direction.

    Attributes:
        name: of what computes it, with its variant, such as "torch channels_last".
        run: computes and returns when the result is there, or, on a GPU, when the work is queued.
        read: what `run` returned as a float array in the problem's layout.
        kernel: the kernel or library that TVM's program calls.
        wait: on a GPU, returns when all queued work is done; None where `run` waits itself.
    """

    name: str
    run: Callable[[], Any]
    read: Callable[[Any], Array]
    kernel: str = ""
    wait: Callable[[], None] | None = None


def pairs(calls: Sequence[Call], seconds: float, beside: Callable[[], None] | None = None) -> dict[str, list[float]]:
    """Seconds of a call of each, round by round; `beside` is called in each, behind the first one's turn."""
    times: dict[str, list[float]] = {call.name: [] for call in calls}
    begin = time.perf_counter()
    while len(times[calls[0].name]) < MIN_PAIRS or time.perf_counter() - begin < seconds:
        for call in calls:
            before = times[call.name]
            before.append(turn(call, before[-1] if before else 0.0))
            if beside is not None and call is calls[0]:
                beside()
    return times


def turn(call: Call, expected: float) -> float:
    """Mean seconds of a call; `expected` of an earlier turn, or 0."""
    if call.wait is not None:
        return _queue(call, max(1, math.ceil(TURN / (expected or _queue(call, 1)))))
    begin = time.perf_counter()
    while expected < LONG and time.perf_counter() - begin < SETTLE:
        call.run()
    runs, begin, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < TURN:
        call.run()
        runs += 1
        elapsed = time.perf_counter() - begin
    return elapsed / runs


def _queue(call: Call, runs: int) -> float:
    """Mean seconds of calls in a row that a GPU works off, after one that is not counted."""
    assert call.wait is not None
    call.run()
    call.wait()
    begin = time.perf_counter()
    for _ in range(runs):
        call.run()
    call.wait()
    return (time.perf_counter() - begin) / runs


__all__ = ["LONG", "MIN_PAIRS", "SETTLE", "TURN", "Array", "Call", "pairs", "turn"]
