# SPDX-License-Identifier: Apache-2.0
"""What is repeated: random programs with overwriting calls and views compute the same, in less memory; and offsets."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tvm_convgrad.training.passes.arena import ALIGNMENT, Span, offsets_of
from tvm_convgrad.training.passes.remat_choice import Call, Program, Schedule

LAYERS = 24


def chain(layers: int = LAYERS) -> Program:
    """Forward calls of 100 bytes, and backward calls that read the one before and the forward call of their layer."""
    forward = [Call((place - 1,) if place else (), 100, None, 1.0, True) for place in range(layers)]
    backward = [Call((layers + n - 1, layers - 1 - n) if n else (layers - 1,), 10, None, 2.0) for n in range(layers)]
    return Program([*forward, *backward], [2 * layers - 1])


def results(program: Program, schedule: Schedule) -> dict[int, int]:
    """What the calls of a program compute, where each memory is really overwritten by those that do so.

    A call gives a number that depends on its place and on what it reads at that moment.
    """
    memory: dict[tuple[int, bool], list[int]] = {}
    found = {}
    for entry in schedule.entries:
        call = program.calls[entry.call]
        value = hash((entry.call, tuple(memory[read][0] for read in entry.reads)))
        if call.view is None:
            memory[entry.call, entry.again] = [value]
        else:
            cell = memory[entry.reads[call.view]]
            if call.overwrites:
                cell[0] = value
            memory[entry.call, entry.again] = cell
        if not entry.again:
            found[entry.call] = memory[entry.call, False][0]
    return found


def random_program(seed: int) -> Program:
    draw = random.Random(seed)
    calls: list[Call] = []
    gone: set[int] = set()  # overwritten, or views of what is
    root: list[int] = []
    for place in range(draw.randrange(5, 60)):
        there = [n for n in range(place) if root[n] not in gone and calls[n].until >= place]
        reads = tuple(draw.sample(there, min(len(there), draw.randrange(4))))
        size, seconds = draw.choice((0, 10, 100, 1000)), draw.random()
        kind = draw.random() if reads else 1.0
        if kind < 0.1:
            calls.append(Call(reads, 0, 0, seconds, False, overwrites=(0,)))
            gone.add(root[reads[0]])
            root.append(place)  # what is behind it is a value of its own
            root[-1] = place
        elif kind < 0.2:
            calls.append(Call(reads[:1], 0, 0, 0.0, True))
            root.append(root[reads[0]])
        else:
            until = place + draw.randrange(1, 40) if draw.random() < 0.1 else 1 << 60
            calls.append(Call(reads, size, None, seconds, draw.random() < 0.8, until=until))
            root.append(place)
    return Program(calls, [len(calls) - 1])


@pytest.mark.parametrize("seed", range(150))
def test_programs_compute_the_same(seed: int) -> None:
    program = random_program(seed)
    plain = program.schedule({})
    assert plain is not None
    wanted = results(program, plain)
    for schedule in (program.least()[1], program.within(plain.peak * 2 // 3)[1], program.affordable(0.2)[1]):
        assert results(program, schedule) == wanted
        assert schedule.peak <= plain.peak
        repeated = schedule.repeated
        assert len(set(repeated)) == len(repeated), "each at most once"
        assert all(program.calls[call].repeatable for call in repeated)
        for entry in schedule.entries:
            assert all(again or program.calls[read].until >= entry.place for read, again in entry.reads)


def test_a_chain_takes_little_of_its_memory() -> None:
    """A budget is kept, for the price of one forward pass at most."""
    program = chain()
    plain = program.schedule({})
    assert plain is not None
    assert plain.peak == LAYERS * 100 + 10
    for budget in (plain.peak * 3 // 4, plain.peak // 2):
        schedule = program.within(budget)[1]
        assert schedule.peak <= budget
        dropped = (plain.peak - budget + 99) // 100
        assert dropped <= len(schedule.repeated) <= LAYERS
    least = program.least()[1]
    assert least.peak < plain.peak // 2
    assert program.seconds(least.repeated) <= LAYERS


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_what_may_cost_a_share(share: float) -> None:
    """The cost stays within the share; more of it brings less memory; values that take no time are all repeated."""
    program = chain(60)
    plain = program.schedule({})
    assert plain is not None
    schedule = program.affordable(share)[1]
    assert program.seconds(schedule.repeated) <= share * program.seconds()
    saved = (plain.peak - schedule.peak) / plain.peak
    if share > 0.05:  # a forward call is a third of a layer's time and nearly all of its memory
        assert saved >= min(share * 2, 0.45)
    assert not program.affordable(0.0)[1].repeated
    assert not program.affordable(share, price=0.2)[1].repeated, "a value takes a third of the share that it frees"
    assert program.affordable(share, price=0.5)[1].repeated == schedule.repeated
    free = Program([replace(call, seconds=0.0) if call.repeatable else call for call in program.calls], [119])
    assert free.affordable(0.0)[1].peak < plain.peak * 2 // 3


def test_nothing_is_repeated_without_need() -> None:
    program = chain()
    schedule = program.within(LAYERS * 100 + 10)[1]
    assert not schedule.repeated
    assert program.within(LAYERS * 100 + 9)[1].repeated, "one byte less, and something is"


def test_the_cheaper_of_two_values_is_repeated() -> None:
    slow, fast, between = Call((), 100, None, 5.0, True), Call((), 100, None, 1.0, True), Call((), 100, None, 1.0)
    program = Program([slow, fast, between, Call((0,), 1), Call((1,), 1)], [])
    schedule = program.within(250)[1]
    assert schedule.repeated == [1]


@pytest.mark.parametrize("seed", range(40))
def test_tensors_that_live_at_the_same_time_do_not_overlap(seed: int) -> None:
    draw = random.Random(seed)
    spans = []
    for _ in range(draw.randrange(1, 60)):
        first = draw.randrange(100)
        spans.append(Span(draw.choice((1, 64, 100, 4096, 70000)), first, draw.randrange(first, 101)))
    offsets, total = offsets_of(spans)
    taken = np.full((101, total), False)
    for offset, (size, first, last) in zip(offsets, spans, strict=True):
        assert offset % ALIGNMENT == 0
        place = taken[first : last + 1, offset : offset + size]
        assert not place.any()
        place[:] = True
    assert taken[:, -1].any(), "nothing behind the last tensor"
    assert total <= sum(-(-span.bytes // ALIGNMENT) * ALIGNMENT for span in spans)


def test_tensors_after_each_other_share_their_place() -> None:
    offsets, total = offsets_of([Span(64, 0, 1), Span(128, 2, 3), Span(64, 2, 2), Span(192, 4, 5)])
    assert (offsets, total) == ([0, 0, 128, 0], 192)


@pytest.mark.parametrize(("seconds", "is_taken"), [(3.0, True), (5.0, False)])
def test_a_large_value_may_cost_what_it_frees(seconds: float, is_taken: bool) -> None:
    """A fifth of the peak, at a fifth of that share: 4 % of the time, though a step of the budget is only 1 %."""
    calls = [
        Call((), 40, seconds=seconds, repeatable=True),
        Call((0,), 1, seconds=10.0),
        Call((1,), 158, seconds=90.0 - seconds),
        Call((2,), 1),
        Call((0, 3), 1),
    ]
    program = Program(calls, [4])
    assert bool(program.affordable(0.2, price=0.2)[1].repeated) == is_taken
