# SPDX-License-Identifier: Apache-2.0
"""A budget of time, shared among pieces of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def shares(
    work: Sequence[tuple[T, float]], budget: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[T, float | None]]:
    """Each piece, the heaviest first, with the time at which its share ends; None once the budget is spent.

    A piece gets a share of the time that is left by its weight among those that are left, when its turn has come.

    Args:
        work: pieces and their weights.
        budget: seconds in all; clock: in seconds.
    """
    end = clock() + budget
    left = sum(weight for _, weight in work) or 1.0
    for each, weight in sorted(work, key=lambda pair: -pair[1]):
        now = clock()
        share = (end - now) * weight / left
        left = max(left - weight, 1e-30)
        yield each, None if now >= end else now + share


__all__ = ["shares"]
