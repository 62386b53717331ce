# SPDX-License-Identifier: Apache-2.0
"""The choice among the ways to compute the gradients of a call: each by a kernel or by PyTorch, or both by PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
turns = pytest.importorskip("tvm_convgrad.torch.turns")

from tvm_convgrad.torch.turns import APART, KERNEL, WHOLE, Best, Turns  # noqa: E402

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
