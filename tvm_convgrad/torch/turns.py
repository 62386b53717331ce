# SPDX-License-Identifier: Apache-2.0
"""`Turns`: the calls of a signature timed by turns, PyTorch's and the kernels', and the choice that follows.

PyTorch computes the gradients of data and weight in one call in less time than in two, where it copies the operands
into another layout for both. So its call for all results has turns of its own, and kernels must beat that, too.

On one thread it is processor time that is counted: what other programs take of the core meanwhile does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from tvm_convgrad.bridge.choice import is_faster, is_open, measured

TURNS = 4
"""Timed calls of each kind, at the least; the first is not counted: it brings the code into caches."""

MOST_TURNS = 10
"""Timed calls of each kind where the best are close."""

KERNEL, APART, WHOLE = "kernel", "apart", "whole"
"""Kinds of turns: results by kernels; by PyTorch, a call for each; by PyTorch, one call for all."""


@dataclass(frozen=True)
class Best:
    """The least seconds of each kind.

    Attributes:
        kernels: by the name of the part; parts without a kernel are missing.
        apart: of PyTorch, for each part in a call of its own.
        whole: of PyTorch for all parts in one call; None where there is one part.
        rest: of what is left beside parts, such as the bias's gradient, where `whole` has it.
    """

    kernels: dict[str, float]
    apart: dict[str, float]
    whole: float | None = None
    rest: float = 0.0

    @property
    def taken(self) -> frozenset[str]:
        """The parts that kernels are to compute: of all ways the fastest, if it is faster than PyTorch's one call."""
        names = sorted(self.kernels)
        ways = [frozenset(some) for count in range(1, len(names) + 1) for some in combinations(names, count)]
        fastest = min(ways, key=self.seconds, default=frozenset())
        return fastest if fastest and is_faster(self.seconds(fastest), self.own) else frozenset()

    @property
    def own(self) -> float:
        """Seconds of a call that PyTorch computes alone."""
        return sum(self.apart.values()) if self.whole is None else self.whole

    def seconds(self, taken: frozenset[str]) -> float:
        """Seconds of a call of which kernels compute some parts."""
        return self.rest + sum(self.kernels[name] if name in taken else own for name, own in self.apart.items())

    def why(self, name: str) -> str:
        """The sentence about a part that has a kernel."""
        sentence = measured(self.kernels[name], self.apart[name], "PyTorch")
        together = f", and {self.whole * 1e6:.0f} us for all results together" if self.whole is not None else ""
        return sentence + together


@dataclass
class Turns:
    """Timed calls.

    Attributes:
        parts: names of all results that the calls want.
        ready: of those that have a kernel.
        threads: of PyTorch.
        least, most: turns of each kind, and where the best are close.
    """

    parts: Sequence[str]
    ready: Sequence[str]
    threads: int
    least: int = TURNS
    most: int = MOST_TURNS
    _seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Whose turn it is."""
        kinds = [KERNEL, APART] if len(self.parts) == 1 else [KERNEL, APART, WHOLE]
        return min(kinds, key=lambda kind: len(self._of(kind, self._first(kind))))

    def timed(self, kind: str, name: str, work: Callable[[], object]) -> float:
        """Do the work of a part in a turn; its seconds."""
        clock = time.thread_time if self.threads == 1 else time.perf_counter
        begin = clock()
        work()
        seconds = clock() - begin
        self._of(kind, name).append(seconds)
        return seconds

    @property
    def finished(self) -> bool:
        """Whether a choice can be made."""
        if len(self.parts) > 1 and len(self._of(WHOLE, "")) < self.least:
            return False
        pairs = ((self._of(KERNEL, name)[1:], self._of(APART, name)[1:]) for name in self.ready)
        return not any(is_open(ours, own, self.least - 1, self.most - 1) for ours, own in pairs)

    def best(self) -> Best:
        """The least seconds of all turns but the first of each kind."""
        return Best(
            kernels={name: min(self._of(KERNEL, name)[1:]) for name in self.ready},
            apart={name: min(self._of(APART, name)[1:]) for name in self.parts},
            whole=min(self._of(WHOLE, "")[1:]) if len(self.parts) > 1 else None,
            rest=min(self._of(APART, "")[1:], default=0.0),
        )

    def _first(self, kind: str) -> str:
        return {KERNEL: self.ready[0], APART: self.parts[0], WHOLE: ""}[kind]

    def _of(self, kind: str, name: str) -> list[float]:
        return self._seconds.setdefault((kind, name), [])


__all__ = ["APART", "KERNEL", "MOST_TURNS", "TURNS", "WHOLE", "Best", "Turns"]
