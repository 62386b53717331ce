# SPDX-License-Identifier: Apache-2.0
"""Moving averages of parameters: their formula in float64, and that only predictions by them change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command
from tests.conftest import build_tiny
from tvm_convgrad.core.errors import ArtifactError, UnsupportedError
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.options import StepOptions

X, Y = tiny.make_arrays(tiny.BATCH, 0)
DECAY = 0.9
NAMES = ("w", "gamma", "beta", "out")


@pytest.fixture(scope="module")
def averaging(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adam, so that averages stand between slots and the counter; split, so that `apply` has them, too."""
    path = tmp_path_factory.mktemp("step") / "ema.so"
    return build_tiny(tiny_model, path, optimizer="adam", lr=0.05, ema=DECAY, split=True)


@pytest.mark.parametrize("split", [False, True])
def test_averages_follow_their_formula(averaging: Path, split: bool) -> None:
    """float32 rounds each of 6 updates by at most 3 x 2**-24 of the largest number."""
    session = Session(averaging)
    averages = {name: session.state[name].astype("float64") for name in NAMES}
    for _ in range(6):
        if split:
            session.apply(session.gradients(X, Y).flat)
        else:
            session.step(X, Y)
        state = session.state
        for name in NAMES:
            averages[name] = DECAY * averages[name] + (1 - DECAY) * state[name]
    for name in NAMES:
        bound = 6 * 3 * 2**-24 * max(np.abs(averages[name]).max(), np.abs(state[name]).max())
        np.testing.assert_allclose(state[f"{name}.ema"], averages[name], rtol=0, atol=bound)
        assert not np.allclose(state[f"{name}.ema"], state[name], atol=1e-3)


def test_training_is_that_without_averages(averaging: Path, tiny_model: str, tmp_path: Path) -> None:
    plain = Session(build_tiny(tiny_model, tmp_path / "plain.so", optimizer="adam", lr=0.05))
    session = Session(averaging)
    assert [session.step(X, Y)[0] for _ in range(4)] == [plain.step(X, Y)[0] for _ in range(4)]
    for name, value in plain.state.items():
        np.testing.assert_array_equal(session.state[name], value, err_msg=name)


def test_predictions_by_averages(averaging: Path) -> None:
    session = Session(averaging)
    for _ in range(3):
        session.step(X, Y)
    state, own = session.state, session.predict(X)
    with session.averaged():
        averaged, loss = session.predict(X), session.evaluate(X, Y)[0]
        np.testing.assert_array_equal(session.state["w"], state["w.ema"])
    assert loss != session.evaluate(X, Y)[0]
    session.state = state | {name: state[f"{name}.ema"] for name in NAMES}
    np.testing.assert_array_equal(session.predict(X), averaged)
    session.state = state
    np.testing.assert_array_equal(session.predict(X), own)
    assert not np.array_equal(own, averaged)


def test_runs_test_and_save_averages(
    convgrad: Command, averaging: Path, tiny_step: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """A run that is resumed has the averages of one that was not."""
    run = ["run", averaging, "--data", tiny_data, "--averages", "--json"]
    whole = convgrad(*run, "--epochs", 4, "--save-state", tmp_path / "whole.npz").json
    resumed = [*run, "--checkpoint-dir", tmp_path / "kept"]
    assert convgrad(*resumed, "--epochs", 2).code == 0
    again = convgrad(*resumed, "--epochs", 4, "--resume", "--save-state", tmp_path / "again.npz").json
    assert (again["losses"], again["test_loss"]) == (whole["losses"], whole["test_loss"])
    plain = convgrad(*run[:-2], "--json", "--epochs", 4, "--save-state", tmp_path / "plain.npz").json
    assert plain["losses"] == whole["losses"]
    assert plain["test_loss"] != whole["test_loss"]
    arrays = [dict(np.load(tmp_path / f"{name}.npz")) for name in ("whole", "again", "plain")]
    assert set(arrays[0]) == {*NAMES, "mean", "var"}
    for name in NAMES:
        np.testing.assert_array_equal(arrays[0][name], arrays[1][name])
        assert not np.array_equal(arrays[0][name], arrays[2][name])
    arguments = ["run", tiny_step, "--data", tiny_data, "--epochs", 1, "--averages"]
    convgrad(*arguments).assert_sentence("the step keeps no averages of its parameters; build it with --ema")


def test_wrong_use(tiny_step: Path) -> None:
    with pytest.raises(ArtifactError, match="build it with --ema"), Session(tiny_step).averaged():
        pass
    for wrong in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UnsupportedError, match="ema must be between 0 and 1"):
            StepOptions(ema=wrong)
