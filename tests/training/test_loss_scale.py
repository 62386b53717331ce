# SPDX-License-Identifier: Apache-2.0
"""The loss scale that adapts, by the rule of torch.amp.GradScaler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command
from tests.conftest import build_tiny
from tests.distributed.thread_ranks import on_ranks
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.parallel import DataParallel
from tvm_convgrad.training.runtime.ranks import Ranks
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.options import StepOptions
from tvm_convgrad.training.step.scaling import INITIAL, INTERVAL, NAMES

X, Y = tiny.make_arrays(tiny.BATCH, 0)
SCALE, GOOD, SKIPPED = NAMES
SETTINGS = {"optimizer": "adam", "lr": 0.05, "ema": 0.9, "clip_norm": 1.0, "dtype": "float16", "split": True}
OVERFLOWS = 2.0**40
"""No gradient of the tiny model times this is finite in float16."""


@pytest.fixture(scope="module")
def adaptive(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a state can have stands before, between and behind the scale."""
    path = tmp_path_factory.mktemp("step") / "scaled.so"
    return build_tiny(tiny_model, path, loss_scale="dynamic", **SETTINGS)


def set_state(session: Session, **values: float) -> None:
    named = {"scale": SCALE, "good": GOOD, "skipped": SKIPPED}
    state = session.state
    changed = {named[name]: np.array(value, state[named[name]].dtype) for name, value in values.items()}
    session.state = state | changed


def update(session: Session, split: bool) -> float:
    if not split:
        return session.step(X, Y)[0]
    found = session.gradients(X, Y)
    session.apply(found.flat)
    return found.loss


@pytest.mark.parametrize("split", [False, True])
def test_overflows_are_left_out(adaptive: Path, split: bool) -> None:
    session = Session(adaptive)
    assert session.state[SCALE] == INITIAL
    update(session, split)
    set_state(session, scale=OVERFLOWS, good=7)
    before = session.state
    for number in range(3):
        loss = update(session, split)
        assert np.isfinite(loss)
        assert [session.state[name] for name in NAMES] == [OVERFLOWS / 2 ** (number + 1), 0, number + 1]
    for name, value in session.state.items():
        if name not in (*NAMES, "mean", "var"):  # running statistics move with each forward pass
            np.testing.assert_array_equal(value, before[name], err_msg=name)
    set_state(session, scale=256.0)
    update(session, split)
    state = session.state
    assert [state[name] for name in NAMES] == [256.0, 1, 3]
    assert all(not np.array_equal(state[name], before[name]) for name in ("w", "w.exp_avg", "w.ema", "step"))


def test_long_luck_doubles_the_scale(adaptive: Path) -> None:
    session = Session(adaptive)
    set_state(session, scale=64.0, good=INTERVAL - 2)
    found = []
    for _ in range(3):
        session.step(X, Y)
        found.append([float(session.state[name]) for name in NAMES])
    assert found == [[64.0, INTERVAL - 1, 0], [128.0, 0, 0], [128.0, 1, 0]]


def test_a_scale_that_stays_is_a_static_one(adaptive: Path, tiny_model: str, tmp_path: Path) -> None:
    """To the bit, as both are powers of two."""
    static = Session(build_tiny(tiny_model, tmp_path / "static.so", loss_scale=512.0, **SETTINGS))
    session = Session(adaptive)
    set_state(session, scale=512.0)
    assert [session.step(X, Y)[0] for _ in range(4)] == [static.step(X, Y)[0] for _ in range(4)]
    state = session.state
    for name, value in static.state.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert state[GOOD] == 4


def test_ranks_leave_out_the_same_updates(adaptive: Path) -> None:
    """Only one rank's gradients overflow; the sum does for all."""

    def work(ranks: Ranks) -> tuple[float, ...]:
        parallel = DataParallel(Session(adaptive), ranks)
        set_state(parallel.session, scale=OVERFLOWS if ranks.rank else 2.0**10)
        for _ in range(3):
            parallel.step(X, Y)
        state = parallel.session.state
        return (float(state[GOOD]), float(state["w"].sum()), float(state[SKIPPED]))

    first, second = on_ranks(2, work)
    assert first == second
    assert first[2] == 3


def test_runs_tell_what_was_left_out(convgrad: Command, adaptive: Path, tiny_data: Path) -> None:
    found = convgrad("run", adaptive, "--data", tiny_data, "--epochs", 2, "--json").json
    assert 0 <= found["left_out_updates"] <= 12
    assert found["loss_scale"] == INITIAL / 2 ** found["left_out_updates"]


@pytest.mark.parametrize("wrong", ["adaptive", "", "1024"])
def test_other_words_are_refused(wrong: str) -> None:
    with pytest.raises(UnsupportedError, match=f"loss_scale = '{wrong}'; give a positive number, or 'dynamic'"):
        StepOptions(loss_scale=wrong)
