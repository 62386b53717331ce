# SPDX-License-Identifier: Apache-2.0
"""Which values of a program are computed again, so that the tensors in memory at one time keep a budget.

The program is a list of calls in the order of their execution. Like XLA's HloRematerialization, the choice looks at the
place of the peak and takes a value that waits there for a later reader: it is dropped after its last reader before that
place, and its call is repeated at the first reader after it, from operands that are there or are repeated as well. The
candidate that frees most bytes over the budget, times the calls for which it frees them, by its estimated seconds comes
first; only a whole schedule shows whether it helps. Choices that prove unnecessary are undone at the end.

A value is repeated at most once, so that a repeated program costs at most one more forward pass. Loads no TVM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FOREVER = 1 << 60
_TRIED = 6
"""Candidates of the highest scores of which the best is taken."""
_MOST = 12
"""Candidates that are tried before the search ends, where it must not take long."""
_SMALL = 16
"""An operand with less than this part of what is freed is kept for the repetition, not repeated itself."""
_TINY = 1000
"""A value with less than this part of the peak is kept."""
_RUNG = 0.05
"""By which part of the peak the budget is lowered at a time, where seconds are what is limited."""
_STEPS, _NEAR = 6, 0.02
"""Of the search for the least peak: attempts, and the part of it that is not worth another one."""

Cuts: TypeAlias = dict[int, int]
"""For each call that is repeated the place after which readers take the repetition."""


@dataclass(frozen=True)
class Call:
    """One binding of a program.

    Attributes:
        reads: places of the bindings that it reads; parameters and the state are there all the time, and not listed.
        bytes: of its result; 0 of a view.
        view: which of `reads` has the memory of the result; None: it has memory of its own.
        seconds: estimated.
        repeatable: whether it may be computed a second time.
        overwrites: which of `reads` it overwrites.
        until: the place of a call that overwrites the result in another way, such as a weight by its update.
    """

    reads: tuple[int, ...]
    bytes: int
    view: int | None = None
    seconds: float = 0.0
    repeatable: bool = False
    overwrites: tuple[int, ...] = ()
    until: int = FOREVER


@dataclass(frozen=True)
class Entry:
    """A call of a schedule.

    Attributes:
        call: its place in the program; again: whether it is the repetition.
        place: of the call of the program that it comes before, or is.
        reads: as `Call.reads`, with True for those of which the repetition is read.
    """

    call: int
    again: bool
    place: int
    reads: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Schedule:
    """A program with repetitions.

    Attributes:
        entries: in the order of execution.
        bytes: in memory during each.
        spans: for each memory the entries that make it and read it last, and its size; by its call, and whether that is
            the repetition.
    """

    entries: list[Entry]
    bytes: NDArray[np.int64]
    spans: Mapping[tuple[int, bool], tuple[int, int, int]] = field(repr=False)

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return int(self.bytes.max(initial=0))

    @property
    def repeated(self) -> list[int]:
        """The calls that are made twice."""
        return [entry.call for entry in self.entries if entry.again]


class Program:
    """Calls in their order, and what stays in memory behind them."""

    def __init__(self, calls: Sequence[Call], kept: Iterable[int] = ()) -> None:
        """A program whose results are the values of the calls `kept`."""
        self.calls, self.kept = list(calls), sorted(set(kept))
        self._root: list[int] = []
        self._members: dict[int, list[int]] = {}
        for place, call in enumerate(self.calls):
            root = place if call.view is None else self._root[call.reads[call.view]]
            self._root.append(root)
            self._members.setdefault(root, []).append(place)
        self._fixed = {self._root[place] for place in self.kept}
        self._until = [call.until for call in self.calls]  # the last place at which a value can be read
        overwriting: dict[int, int] = {}
        for place in reversed(range(len(self.calls))):
            root = self._root[place]
            self._until[place] = min(self._until[place], overwriting.get(root, FOREVER))
            for each in self.calls[place].overwrites:
                overwriting[self._root[self.calls[place].reads[each]]] = place

    def seconds(self, calls: Iterable[int] | None = None) -> float:
        """The estimate of some of the calls, or of all."""
        return sum(self.calls[call].seconds for call in (range(len(self.calls)) if calls is None else calls))

    def schedule(self, cuts: Cuts) -> Schedule | None:
        """The program with these repetitions; None if one of them would read what is overwritten by then."""
        entries: list[Entry] = []
        made: set[int] = set()
        calls, until = self.calls, self._until
        for place in range(len(calls)):
            waiting = [read for read in calls[place].reads if cuts.get(read, place) < place and read not in made]
            while waiting:
                call = waiting[-1]
                missing = [read for read in calls[call].reads if cuts.get(read, place) < place and read not in made]
                if missing and call not in made:
                    waiting += missing
                    continue
                waiting.pop()
                if call in made:
                    continue
                made.add(call)
                reads = tuple((read, cuts.get(read, place) < place) for read in calls[call].reads)
                if any(not again and until[read] < place for read, again in reads):
                    return None
                entries.append(Entry(call, True, place, reads))
            reads = tuple((read, cuts.get(read, place) < place) for read in calls[place].reads)
            entries.append(Entry(place, False, place, reads))
        return self._measured(entries)

    def _measured(self, entries: list[Entry]) -> Schedule:
        memory: dict[tuple[int, bool], tuple[int, bool]] = {}
        first: dict[tuple[int, bool], int] = {}
        last: dict[tuple[int, bool], int] = {}
        for number, entry in enumerate(entries):
            own, view = (entry.call, entry.again), self.calls[entry.call].view
            memory[own] = own if view is None else memory[entry.reads[view]]
            first.setdefault(memory[own], number)
            last[memory[own]] = number
            for read in entry.reads:
                last[memory[read]] = number
        for place in self.kept:
            last[memory[place, False]] = len(entries)
        change = np.zeros(len(entries) + 2, np.int64)
        spans = {}
        for own, begin in first.items():
            size = self.calls[own[0]].bytes
            spans[own] = (begin, last[own], size)
            change[begin] += size
            change[last[own] + 1] -= size
        return Schedule(entries, np.cumsum(change)[: len(entries)], spans)

    def within(self, budget: int) -> tuple[Cuts, Schedule]:
        """Repetitions with which the peak keeps a budget of bytes, or those after which none helps any more."""
        cuts: Cuts = {}
        schedule = self.schedule(cuts)
        assert schedule is not None, "what was made by this class is a schedule"
        while schedule.peak > budget:
            found = self._better(budget, cuts, schedule)
            if found is None:
                return cuts, schedule
            cuts, schedule = found
        return self._without_needless(budget, cuts, schedule)

    def affordable(self, share: float, price: float = math.inf) -> tuple[Cuts, Schedule]:
        """Repetitions that lower the peak and take at most this share of the program's seconds.

        The budget is lowered in steps of `_RUNG`, each on top of the repetitions of the last one; what lowers the peak
        by less than a step is not taken. A value that lowers it by several steps may cost as much as those.

        Args:
            price: what a step may cost: the share of the seconds by the share of the peak.
        """
        cuts: Cuts = {}
        schedule = self.schedule(cuts)
        assert schedule is not None, "a program without repetitions is a schedule"
        best, whole = (cuts, schedule), self.seconds()
        while True:
            budget = int(best[1].peak * (1 - _RUNG))
            before = self.seconds(best[1].repeated)
            while schedule.peak > budget:
                found = self._better(budget, cuts, schedule, tried=1, most=_MOST)
                if found is None:
                    return self._without_needless(best[1].peak, *best)
                paid = price * max(_RUNG, 1 - found[1].peak / best[1].peak) * whole
                if self.seconds(found[1].repeated) > min(share * whole, before + paid):
                    return self._without_needless(best[1].peak, *best)
                cuts, schedule = found
            best = cuts, schedule

    def least(self) -> tuple[Cuts, Schedule]:
        """Repetitions with the least peak that is found, by bisection."""
        best = self.within(FOREVER)
        low = max((call.bytes + self._read(call) for call in self.calls), default=0)
        for _ in range(_STEPS):
            high = best[1].peak
            if high - low <= _NEAR * high:
                break
            budget = (low + high) // 2
            found = self.within(budget)
            if found[1].peak < high:
                best = found
            if found[1].peak > budget:
                low = budget
        return self._without_needless(best[1].peak, *best)

    def _read(self, call: Call) -> int:
        return sum(self.calls[root].bytes for root in {self._root[read] for read in call.reads})

    def _better(
        self, budget: int, cuts: Cuts, schedule: Schedule, tried: int = _TRIED, most: int | None = None
    ) -> tuple[Cuts, Schedule] | None:
        """The best of the first `tried` repetitions, or of the next ones if none of those helps, up to `most` in all.

        None if none of them brings the bytes over the budget down.
        """
        over = np.maximum(schedule.bytes - budget, 0)
        peak = int(schedule.bytes.argmax())
        before, scored = int(over.sum()), []
        for own, cut, cost, score in self._candidates(peak, over, cuts, schedule):
            scored.append((-score, own, cut, cost))
        scored.sort(key=lambda each: (each[0], each[1]))
        for begin in range(0, len(scored[:most]), tried):
            helping = []
            for _, own, cut, cost in scored[begin : begin + tried]:
                changed = cuts | cut
                made = self.schedule(changed)
                if made is None:
                    continue
                gain = before - int(np.maximum(made.bytes - budget, 0).sum())
                if gain > 0:
                    helping.append((gain / cost, -own, changed, made))
            if helping:
                _, _, changed, made = max(helping, key=lambda each: each[:2])
                return changed, made
        return None

    def _candidates(
        self, peak: int, over: NDArray[np.int64], cuts: Cuts, schedule: Schedule
    ) -> Iterable[tuple[int, Cuts, float, float]]:
        """The values that wait at an entry: the call, its cuts with those of its operands, their seconds, a score."""
        place = schedule.entries[peak].place
        uses: dict[int, list[int]] = {}
        for number, entry in enumerate(schedule.entries):
            for read, again in entry.reads:
                if not again:
                    uses.setdefault(self._root[read], []).append(number)
        for (root, again), (begin, end, size) in schedule.spans.items():
            if again or size * _TINY < schedule.peak or not begin < peak < end:
                continue
            if root in self._fixed or not self._is_repeatable(root):
                continue
            last = max((use for use in uses[root] if use <= peak), default=begin)
            if last == peak:
                continue
            following = min(use for use in uses[root] if use > peak)
            where = schedule.entries[following].place
            after = place - 1 if schedule.entries[peak].again else place
            cut = {member: after for member in self._members[root] if member <= after}
            found = self._with_operands(cut, where, size, cuts, schedule)
            if found is None:
                continue
            added, held = found
            freed = over[last + 1 : following]
            score = float(np.minimum(freed, size).sum() - held * np.count_nonzero(freed))
            cost = 1e-9 + sum(self.calls[call].seconds for call in added if call not in cuts)
            if score > 0:
                yield root, added, cost, score / cost

    def _is_repeatable(self, root: int) -> bool:
        return all(self.calls[member].repeatable for member in self._members[root])

    def _with_operands(
        self, cut: Cuts, where: int, size: int, cuts: Cuts, schedule: Schedule
    ) -> tuple[Cuts, int] | None:
        """Cuts with those of operands that are gone at a place, and the bytes of those that are kept until then."""
        added, held = dict(cut), 0
        waiting = [read for call in cut for read in self.calls[call].reads]
        while waiting:
            read = waiting.pop()
            if read in added or cuts.get(read, FOREVER) < where:
                continue
            root = self._root[read]
            _, end, own = schedule.spans[root, False]
            last = schedule.entries[end].place if end < len(schedule.entries) else FOREVER
            if last >= where:
                continue
            overwritten = self._until[read] < where
            if not overwritten and own * _SMALL <= size:
                continue
            if self._is_repeatable(root) and root not in self._fixed:
                for member in self._members[root]:
                    if member not in cuts and member <= last:
                        added[member] = last
                        waiting += self.calls[member].reads
            elif overwritten:
                return None
            else:
                held += own
        return added, held

    def _without_needless(self, budget: int, cuts: Cuts, schedule: Schedule) -> tuple[Cuts, Schedule]:
        """The repetitions without those that the budget does not need, the slowest first."""
        budget = max(budget, schedule.peak)
        roots = sorted({self._root[call] for call in cuts}, key=lambda root: (-self.calls[root].seconds, root))
        for root in roots:
            fewer = {call: cut for call, cut in cuts.items() if self._root[call] != root}
            made = self.schedule(fewer)
            if (
                made is not None
                and made.peak <= budget
                and self.seconds(made.repeated) < self.seconds(schedule.repeated)
            ):
                cuts, schedule = fewer, made
        return cuts, schedule


__all__ = ["FOREVER", "Call", "Cuts", "Entry", "Program", "Schedule"]
