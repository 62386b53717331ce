# SPDX-License-Identifier: Apache-2.0
"""The choice among the ways to compute the gradients of a call: each by a kernel or by PyTorch, or both by PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
turns = pytest.importorskip("tvm_convgrad.torch.turns")

from tvm_convgrad.torch.turns import APART, KERNEL, WHOLE, Best, Turns  # noqa: E402

pytestmark = pytest.mark.torch
BOTH = {"data", "weight"}


@pytest.mark.parametrize(
    ("kernels", "apart", "whole", "rest", "taken"),
    [
        ((1.0, 1.0), (2.0, 2.0), 3.0, 0.0, BOTH),
        ((1.0, 3.0), (2.0, 2.0), 4.0, 0.0, {"data"}),
        ((1.8, 1.8), (2.0, 2.0), 3.5, 0.0, set()),  # each beats PyTorch, but not its one call
        ((1.8, 1.0), (2.0, 2.0), 3.5, 0.0, BOTH),  # the second one pays for the first
        ((1.0, None), (2.0, 2.0), 3.5, 0.0, {"data"}),
        ((1.0, None), (2.0, 2.0), 2.9, 0.0, set()),
        ((1.0, 1.0), (2.0, 2.0), 3.5, 1.0, BOTH),
        ((1.0, 1.0), (2.0, 2.0), 3.0, 1.0, set()),  # the bias's gradient is in PyTorch's one call
        ((1.96, 1.96), (2.0, 2.0), 4.0, 0.0, set()),  # within the noise
    ],
)
def test_the_fastest_way_is_taken(kernels, apart, whole: float, rest: float, taken: set[str]) -> None:
    names = ("data", "weight")
    known = {name: each for name, each in zip(names, kernels, strict=True) if each is not None}
    assert Best(known, dict(zip(names, apart, strict=True)), whole, rest).taken == taken


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, turns.TURNS), (0.9, turns.MOST_TURNS)])
def test_close_times_have_more_turns(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int) -> None:
    """All kinds have as many turns; the first one, which is slow, is not counted."""
    now = {"seconds": 0.0}
    monkeypatch.setattr(turns.time, "thread_time", lambda: now["seconds"])
    timed, kinds = Turns(["data", "weight"], ["data", "weight"], threads=1), []

    def work(taken: float) -> None:
        now["seconds"] += taken if len(kinds) > 3 else 100.0

    while not timed.finished:
        kind = timed.kind
        kinds.append(kind)
        for name in ("data", "weight") if kind != WHOLE else ("",):
            timed.timed(kind, name, lambda kind=kind: work({KERNEL: seconds, APART: 1.0, WHOLE: 2.0}[kind]))
    assert kinds[: 3 * rounds - 1] == [KERNEL, APART, WHOLE] * (rounds - 1) + [KERNEL, APART]
    assert len(kinds) <= 3 * rounds
    best = timed.best()
    assert best.kernels == {"data": pytest.approx(seconds), "weight": pytest.approx(seconds)}
    assert (best.apart["data"], best.whole) == (pytest.approx(1.0), pytest.approx(2.0))
    assert best.taken == BOTH


NEW, OLD = turns.NEW_PAGES, 0


def measured(monkeypatch: pytest.MonkeyPatch, kernel: list[tuple[float, int]], own: list[tuple[float, int]]) -> Turns:
    """Turns of one part, each of some seconds and pages, after a first one of each kind that is not counted."""
    now = {"seconds": 0.0, "pages": 0}
    monkeypatch.setattr(turns.time, "thread_time", lambda: now["seconds"])
    monkeypatch.setattr(turns, "_pages", lambda: now["pages"])
    timed, left = Turns(["result"], ["result"], threads=1), {KERNEL: [(9.0, NEW), *kernel], APART: [(9.0, NEW), *own]}

    def work(kind: str) -> None:
        seconds, pages = left[kind].pop(0)
        now["seconds"] += seconds
        now["pages"] += pages

    while left[timed.kind]:
        kind = timed.kind
        timed.timed(kind, "result", lambda kind=kind: work(kind))
    return timed


@pytest.mark.parametrize(
    ("kernel", "own", "taken"),
    [
        # as a depthwise layer of MobileNetV2 at batch 32: one turn of PyTorch's found memory that it had had before
        ([(3.4, NEW), (3.5, NEW), (3.6, NEW)], [(4.6, NEW), (4.2, NEW), (1.4, OLD)], True),
        ([(1.4, OLD), (4.6, NEW), (4.2, NEW)], [(3.4, NEW), (3.5, NEW), (3.6, NEW)], False),
        ([(1.0, OLD), (1.1, OLD), (4.0, NEW)], [(2.0, OLD), (2.1, OLD), (2.2, OLD)], True),
        ([(4.0, NEW), (4.1, NEW), (4.2, NEW)], [(2.0, OLD), (2.1, OLD), (2.2, OLD)], False),  # it always has new memory
        ([(2.0, OLD), (2.1, OLD), (2.2, OLD)], [(4.0, NEW), (4.1, NEW), (4.2, NEW)], True),
        # the kernel's best turn was luck: its gain is less than NEAR, and medians do not agree
        ([(0.9, OLD), (1.1, OLD), (1.1, OLD)], [(1.0, OLD), (1.0, OLD), (1.1, OLD)], False),
        ([(0.9, OLD), (0.9, OLD), (1.1, OLD)], [(1.0, OLD), (1.0, OLD), (1.1, OLD)], True),
        ([(0.5, OLD), (1.1, OLD), (1.1, OLD)], [(1.0, OLD), (1.0, OLD), (1.1, OLD)], True),  # others had the core
        ([(1.0, OLD), (1.0, OLD), (1.1, OLD)], [(0.9, OLD), (1.2, OLD), (1.2, OLD)], False),
    ],
)
def test_like_is_compared_with_like(monkeypatch: pytest.MonkeyPatch, kernel, own, taken: bool) -> None:
    best = measured(monkeypatch, kernel, own).best()
    assert best.taken == ({"result"} if taken else set())


def test_turns_go_on_until_there_are_enough_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the most MOST_TURNS: a choice is made then, whatever memory there was."""
    new, old = (4.0, NEW), (1.0, OLD)
    kernel, own = [new, old, old, old, old], [(8.0, NEW), (8.0, NEW), (2.0, OLD), (2.0, OLD), (2.0, OLD)]
    assert not measured(monkeypatch, kernel[:3], own[:3]).finished
    assert measured(monkeypatch, kernel[1:], own[2:]).finished
    assert measured(monkeypatch, kernel, own).finished
    assert measured(monkeypatch, [new, old] * 5, [old, new] * 5).finished
