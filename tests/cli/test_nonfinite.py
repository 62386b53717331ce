# SPDX-License-Identifier: Apache-2.0
"""A run ends at the first loss or state that is not finite, and its last good checkpoint stays as it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command, Done
from tests.conftest import build_tiny
from tvm_convgrad.training.runtime.checkpoint import Progress, load, load_latest, save
from tvm_convgrad.training.runtime.source import batches_of_epoch

BAD = 30
"""The number of a sample that is not finite in `bad_data`."""


@pytest.fixture(scope="module")
def adam_step(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tiny_model, tmp_path_factory.mktemp("step") / "adam.so", optimizer="adam", bn="frozen")


def bad_data(path: Path, value: float) -> Path:
    x, y = tiny.make_arrays(53, 0)
    x[BAD, 0, 2, 3] = value
    np.savez(path, x_train=x, y_train=y)
    return path


def assert_ends(done: Done, *parts: str) -> None:
    """Exit code 1, and a last line on standard error with all `parts`; a resumed run says before where it goes on."""
    last = done.err.strip().splitlines()[-1]
    assert (done.code, done.out) == (1, ""), done
    assert last.startswith("convgrad: ")
    for part in parts:
        assert part in last, (part, last)


def first_bad_step(epochs: int) -> int:
    """The number, from 1, of the first step of a run with seed 0 that reads the sample."""
    order = np.concatenate([batches_of_epoch(0, epoch, 53, tiny.BATCH) for epoch in range(epochs)])
    return 1 + int(np.flatnonzero((order == BAD).any(axis=1))[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", ["tiny_step", "tiny_dynamic_step", "adam_step"])
def test_a_bad_sample_ends_the_run_and_is_named(
    convgrad: Command, tmp_path: Path, request: pytest.FixtureRequest, step: str, value: float
) -> None:
    data, folder = bad_data(tmp_path / "bad.npz", value), tmp_path / "checkpoints"
    arguments = ["run", request.getfixturevalue(step), "--data", data, "--epochs", 9, "--checkpoint-dir", folder]
    arguments += ["--checkpoint-every", 1, "--batch-size", tiny.BATCH, "--json"]
    number = first_bad_step(9)
    assert number > 1
    done = convgrad(*arguments)
    remedy = f"correct the data. A run with corrected data starts from the beginning, in another folder than {folder}."
    assert_ends(done, f"in step {number} ", f"'x' of the training samples {BAD} ", remedy)
    assert "--resume" not in done.err
    newest = max(folder.glob("*.ckpt"))
    assert int(newest.stem.removeprefix("step-")) == number - 1
    content = newest.read_bytes()
    assert all(np.isfinite(array).all() for array in load(newest).state.values())
    assert_ends(convgrad(*arguments, "--resume"), f"in step {number} ")
    assert newest.read_bytes() == content
    text = convgrad(*arguments, "--resume", "--allow-nonfinite").out
    losses = json.loads(text, parse_constant=pytest.fail)["losses"]
    assert len(losses) == 9 * 6
    assert all(map(math.isfinite, losses[: number - 1]))
    assert losses[number - 1] is None
    assert newest.read_bytes() == content  # the last good one stays beside the last two
    assert len(list(folder.glob("*.ckpt"))) == 3


def test_without_checkpoints_the_remedy_names_no_folder(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    done = convgrad("run", tiny_step, "--data", bad_data(tmp_path / "bad.npz", math.nan), "--epochs", 9, "--json")
    assert_ends(done, "correct the data. A run with corrected data starts from the beginning.")


def test_a_state_that_is_not_finite_is_not_kept(
    convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The loss of the last step is finite, but its update is not."""
    folder, state = tmp_path / "checkpoints", tmp_path / "state.npz"
    arguments = ["run", tiny_step, "--data", tiny_data, "--checkpoint-dir", folder, "--checkpoint-every", 1]
    assert convgrad(*arguments, "--epochs", 1).code == 0
    before = {path.name: path.read_bytes() for path in folder.glob("*.ckpt")}
    arguments += ["--epochs", 2, "--resume", "--lr", 3e38, "--save-state", state, "--json"]
    assert_ends(convgrad(*arguments), "the state is not finite after step 7", "--resume goes on")
    assert {path.name: path.read_bytes() for path in folder.glob("*.ckpt")} == before
    assert not state.exists()


def test_a_checkpoint_that_is_not_finite_is_refused(
    convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Versions before wrote such ones."""
    arguments = ["run", tiny_step, "--data", tiny_data, "--checkpoint-dir", tmp_path]
    assert convgrad(*arguments, "--epochs", 1).code == 0
    good, _ = load_latest(tmp_path)
    assert good is not None
    state = good.state | {"w": np.full_like(good.state["w"], np.nan)}
    progress = Progress(**{**vars(good.progress), "losses": [*good.progress.losses, 1.0], "position": 1})
    bad = save(tmp_path, progress, state)
    convgrad(*arguments, "--epochs", 2, "--resume").assert_sentence(bad.name, "not finite (w)", "--allow-nonfinite")
    bad.unlink()
    assert convgrad(*arguments, "--epochs", 2, "--resume").code == 0
