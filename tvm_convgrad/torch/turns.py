# SPDX-License-Identifier: Apache-2.0
"""`Turns`: the calls of a signature timed by turns, PyTorch's and the kernels', and the choice that follows.

PyTorch computes the gradients of data and weight in one call in less time than in two, where it copies the operands
into another layout for both. So its call for all results has turns of its own, and kernels must beat that, too.

On one thread it is processor time that is counted: what other programs take of the core meanwhile does not count.

Memory for a result that comes from the operating system takes longer to be written first than many a convolution to be
computed, and who gets it is chance: turns that had such memory are compared with each other, and so are those without.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from tvm_convgrad.bridge.choice import is_faster, is_open, measured

TURNS = 4
"""Timed calls of each kind, at the least; the first is not counted: it brings the code into caches."""

MOST_TURNS = 10
"""Timed calls of each kind where the best are close."""

NEW_PAGES = 32
"""Pages that a turn gets from the operating system, from which on its memory counts as new."""

NEAR = 1.15
"""Where the kernels' best turns gain less than this, medians have to agree."""

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


@dataclass(frozen=True)
class Sample:
    """One timed call.

    Attributes:
        seconds: that it took.
        is_new: whether memory of its results came from the operating system.
    """

    seconds: float
    is_new: bool


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
    _samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Whose turn it is."""
        kinds = [KERNEL, APART] if len(self.parts) == 1 else [KERNEL, APART, WHOLE]
        return min(kinds, key=lambda kind: len(self._of(kind, self._first(kind))))

    def timed(self, kind: str, name: str, work: Callable[[], object]) -> float:
        """Do the work of a part in a turn; its seconds."""
        clock = time.thread_time if self.threads == 1 else time.perf_counter
        pages, begin = _pages(), clock()
        work()
        seconds = clock() - begin
        self._of(kind, name).append(Sample(seconds, _pages() - pages >= NEW_PAGES))
        return seconds

    @property
    def finished(self) -> bool:
        """Whether a choice can be made."""
        if len(self.parts) > 1 and len(self._of(WHOLE, "")) < self.least:
            return False
        pairs = ((self._alike(KERNEL, name), self._alike(APART, name)) for name in self.ready)
        least, most = self.least - 1, self.most - 1
        if min(len(self._of(kind, self._first(kind))) for kind in (KERNEL, APART)) > most:
            return True
        return not any(is_open(ours, own, least, most) for ours, own in pairs)

    def best(self) -> Best:
        """The least seconds of all turns alike but the first of each kind; medians where these gain less by kernels.

        The least time of a few turns is that of luck, too: medians decide where the kernels' gain is small.
        """
        least, typical = self._best(min), self._best(median)
        taken = least.taken
        if not taken or least.seconds(taken) * NEAR < least.own:
            return least
        return max(least, typical, key=lambda best: best.seconds(taken) / best.own)

    def _best(self, of: Callable[[Sequence[float]], float]) -> Best:
        return Best(
            kernels={name: of(self._alike(KERNEL, name)) for name in self.ready},
            apart={name: of(self._alike(APART, name)) for name in self.parts},
            whole=of(self._alike(WHOLE, "")) if len(self.parts) > 1 else None,
            rest=of(self._alike(APART, "") or [0.0]),
        )

    def _alike(self, kind: str, name: str) -> list[float]:
        """The seconds of all turns but the first that had new memory, or of those that had none.

        Of which of the two depends on which each kind has more of; a kind that has none of them gives all.
        """
        samples = self._of(kind, name)[1:]
        alike = [each.seconds for each in samples if each.is_new == self._is_new]
        return alike or [each.seconds for each in samples]

    @property
    def _is_new(self) -> bool:
        """Whether turns with new memory are compared: where there are more of them for each kind that has any."""
        counted = [samples[1:] for samples in self._samples.values()]
        new = [sum(each.is_new for each in samples) for samples in counted]
        old = [len(samples) - count for samples, count in zip(counted, new, strict=True) if count]
        return min((count for count in new if count), default=0) > min(old, default=0)

    def _first(self, kind: str) -> str:
        return {KERNEL: self.ready[0], APART: self.parts[0], WHOLE: ""}[kind]

    def _of(self, kind: str, name: str) -> list[Sample]:
        return self._samples.setdefault((kind, name), [])


def _pages() -> int:
    """Pages that the process has got from the operating system without reading a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


__all__ = ["APART", "KERNEL", "MOST_TURNS", "NEAR", "NEW_PAGES", "TURNS", "WHOLE", "Best", "Sample", "Turns"]
