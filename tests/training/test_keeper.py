# SPDX-License-Identifier: Apache-2.0
"""The best validation's checkpoint belongs to the run that goes on, wherever it was interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.checkpoint import BEST, Progress, load_latest
from tvm_convgrad.training.runtime.keeper import Keeper
from tvm_convgrad.training.runtime.watch import Watch

EVERY = 4


def progress() -> Progress:
    return Progress(artifact="a" * 64, data="d" * 64, seed=0, batch_size=8, lr=0.1)


def state_after(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(3, step, "float32")}


def train(keeper: Keeper, place: Progress, measures: dict[int, float], until: int) -> None:
    """Steps up to `until`, each validated, with a checkpoint every few; the loss after step i: `measures[i]`, or 9."""
    watch = Watch("loss", None)
    while (step := len(place.losses) + 1) <= until:
        place.losses.append(1.0)
        if watch.note(place, {"loss": measures.get(step, 9.0)}):
            keeper.keep_best(place, state_after(step))
        if step % EVERY == 0:
            keeper.keep(place, state_after(step))


def resumed(folder: Path) -> tuple[Keeper, Progress]:
    keeper = Keeper(folder, EVERY, {}, False)
    checkpoint, _ = load_latest(folder)
    assert checkpoint is not None
    keeper.found(checkpoint)
    return keeper, checkpoint.progress


@pytest.mark.parametrize(
    ("first", "again", "best"),
    [
        # The losses of the steps before the run is killed after step 7, and of those from step 5 on; the best step.
        ({2: 5.0, 6: 3.0}, {}, 2),  # the one that was lost does not count
        ({2: 5.0, 6: 3.0}, {7: 4.0}, 7),
        ({2: 5.0, 6: 3.0, 7: 2.0}, {}, 2),
        ({4: 5.0, 6: 3.0}, {}, 4),  # that of the checkpoint itself
        ({3: 5.0}, {}, 3),
        ({6: 3.0}, {8: 8.0}, 8),  # none was better than 9, the first
    ],
)
def test_the_best_of_the_steps_that_count(
    first: dict[int, float], again: dict[int, float], best: int, tmp_path: Path
) -> None:
    train(Keeper(tmp_path, EVERY, {}, False), progress(), first, 7)
    keeper, place = resumed(tmp_path)
    assert len(place.losses) == 4
    train(keeper, place, again, 8)
    assert place.best_step == best
    found = keeper.best()
    assert (found.progress.best, found.progress.best_step) == (place.best, best)
    np.testing.assert_array_equal(found.state["w"], state_after(best)["w"])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("best")) == [BEST]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_best_state_that_is_lost_is_found_again(tmp_path: Path, damaged: bool) -> None:
    train(Keeper(tmp_path, EVERY, {}, False), progress(), {2: 5.0}, 4)
    if damaged:
        (tmp_path / BEST).write_bytes(b"half of a checkpoint")
    else:
        (tmp_path / BEST).unlink()
    keeper, place = resumed(tmp_path)
    assert (place.best, place.best_step) == (None, 0)
    with pytest.raises(ArtifactError, match="no validation has had a finite measure"):
        keeper.best()
    train(keeper, place, {6: 7.0}, 8)
    assert keeper.best().progress.best_step == place.best_step == 6


def test_a_run_does_not_begin_beside_a_best_state_of_another(tmp_path: Path) -> None:
    train(Keeper(tmp_path, None, {}, False), progress(), {2: 5.0}, 3)  # no checkpoint of a step yet
    with pytest.raises(ArtifactError, match="move it away, or use another folder"):
        Keeper(tmp_path, EVERY, {}, False).begins(resume=False)
    Keeper(tmp_path, EVERY, {}, False).begins(resume=True)
    assert not list(tmp_path.iterdir())
