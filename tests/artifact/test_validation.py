# SPDX-License-Identifier: Apache-2.0
"""Measures of held-out samples, which validation is the best, when a run ends, and what is written of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.training.runtime.checkpoint import Progress, load, save
from tvm_convgrad.training.runtime.journal import JsonLines, TensorBoard
from tvm_convgrad.training.runtime.loop import StepReport
from tvm_convgrad.training.runtime.validation import Quality
from tvm_convgrad.training.runtime.watch import Watch

CROSS_ENTROPY = {"loss": "cross_entropy"}


def measured(predictions, target, options, classes, parts=2):
    """The measures of a batch that comes in parts."""
    quality = Quality()
    for part in np.array_split(np.arange(len(target)), parts):
        quality.add(predictions[part], target[part], options, classes)
    return quality.measures(classes, target.ndim > 1)


def test_accuracy_and_top5_are_those_of_their_definition() -> None:
    random = np.random.default_rng(0)
    scores, target = random.standard_normal((40, 9)).astype("float32"), random.integers(0, 9, 40)
    order = np.argsort(-scores, axis=1)
    found = measured(scores, target, CROSS_ENTROPY, 9)
    assert found["accuracy"] == (order[:, 0] == target).mean()
    assert found["top5"] == (order[:, :5] == target[:, None]).any(1).mean()
    exact = np.log(np.exp(scores.astype("f8")).sum(1)) - scores[np.arange(40), target]
    assert found["loss"] == pytest.approx(exact.mean(), rel=1e-12)
    assert found == pytest.approx(measured(scores, target, CROSS_ENTROPY, 9, parts=1), rel=1e-12)
    assert "top5" not in measured(scores[:, :5], target % 5, CROSS_ENTROPY, 5)


def test_mean_iou_is_that_of_its_definition() -> None:
    """Over classes that are predicted or there; pixels of the ignored class count nowhere."""
    random = np.random.default_rng(1)
    scores, target = random.standard_normal((6, 4, 5, 3)).astype("float32"), random.integers(0, 3, (6, 5, 3))
    scores[:, 3] = -9.0  # neither predicted nor there
    target[random.random(target.shape) < 0.2] = 255
    chosen, counted = scores.argmax(1), target != 255
    overlaps = []
    for number in range(3):
        here, there = (chosen == number) & counted, (target == number) & counted
        overlaps.append((here & there).sum() / (here | there).sum())
    found = measured(scores, target, CROSS_ENTROPY | {"ignore_index": 255}, 4)
    assert found["mean_iou"] == pytest.approx(np.mean(overlaps), rel=1e-12)
    assert found["accuracy"] == (chosen == target)[counted].mean()


def test_extreme_scores_and_nothing_to_count() -> None:
    scores = np.array([[1e4, -1e4, -np.inf]], "float32")
    assert measured(scores, np.array([0]), CROSS_ENTROPY, 3, 1)["loss"] == 0
    assert measured(scores, np.array([1]), CROSS_ENTROPY, 3, 1)["loss"] == 2e4
    assert math.isnan(measured(scores * np.nan, np.array([1]), CROSS_ENTROPY, 3, 1)["loss"])
    empty = measured(scores, np.array([2]), CROSS_ENTROPY | {"ignore_index": 2}, 3, 1)
    assert all(math.isnan(value) for value in empty.values())
    values = measured(np.array([[1.0, 3.0]], "float32"), np.array([[0.0, 1.0]], "float32"), {"loss": "l1"}, None, 1)
    assert values == {"loss": 1.5, "mse": 2.5}


@pytest.mark.parametrize(
    ("monitor", "values", "best", "over"),
    [
        ("loss", [3.0, 2.0, 2.5, 2.0], 2.0, True),
        ("loss", [3.0, 2.0, 2.5, 1.0], 1.0, False),
        ("loss", [math.nan, math.nan], None, True),
        ("loss", [math.inf, math.inf], None, True),
        ("accuracy", [math.inf, 0.5, 0.6], 0.6, False),
        ("accuracy", [0.5, math.nan, 0.6, 0.6], 0.6, False),
        ("accuracy", [0.5, 0.4, 0.3], 0.5, True),
        ("mse", [1.0], 1.0, False),
    ],
)
def test_the_best_and_patience(monitor: str, values: list[float], best: float | None, over: bool) -> None:
    watch, progress = Watch(monitor, patience=2), Progress("", "", 0, 1, 0.1)
    for number, value in enumerate(values):
        assert not watch.is_over(progress)
        progress.losses += [0.0] * 3
        seen = progress.best
        assert watch.note(progress, {monitor: value}) == (progress.best is not seen)
        if progress.stale == 0:
            assert progress.best_step == 3 * (number + 1)
    assert (progress.best, watch.is_over(progress)) == (best, over)
    assert not Watch(monitor).is_over(progress)


def test_another_monitor_starts_anew() -> None:
    progress = Progress("", "", 0, 1, 0.1, monitor="loss", best=0.5, best_step=7, stale=5)
    assert not Watch("accuracy", 2).is_over(progress)
    assert Watch("accuracy", 2).note(progress, {"loss": 1.0, "accuracy": 0.2})
    assert (progress.monitor, progress.best, progress.stale) == ("accuracy", 0.2, 0)


def test_checkpoints_keep_the_best_and_without_a_validation_are_as_before(tmp_path: Path) -> None:
    plain = Progress("a", "d", 1, 4, 0.1, losses=[0.5])
    watched = Progress("a", "d", 1, 4, 0.1, losses=[0.5, 0.4], monitor="accuracy", best=0.25, best_step=1, stale=1)
    state = {"w": np.ones(2, "float32")}
    found = {
        name: load(save(tmp_path / name, progress, state)).progress
        for name, progress in (("plain", plain), ("watched", watched))
    }
    assert found == {"plain": plain, "watched": watched}
    assert b"monitor" not in next((tmp_path / "plain").glob("*.ckpt")).read_bytes()
    named = save(tmp_path / "watched", plain, state, file="best.ckpt")
    assert {path.name for path in (tmp_path / "watched").iterdir()} == {named.name, "step-0000000002.ckpt"}


def report(loss: float) -> StepReport:
    return StepReport(loss, None, 0.1, False)


def test_json_lines_go_on_behind_the_step_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLines(path, 0)
    for number, loss in enumerate([1.0, math.nan, 3.0], 1):
        log.step(number, 1, report(loss))
    log.validation(3, {"loss": 2.0}, True)
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it was written
    log = JsonLines(path, 2)
    log.step(3, 1, report(4.0))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, None), (3, 4.0)]
    JsonLines(path, 0).close()
    assert path.read_text() == ""


def test_tensorboard_has_all_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    journal = TensorBoard(tmp_path / "events", 0)
    journal.step(1, 1, StepReport(0.5, 0.25, 0.1, False))
    journal.validation(1, {"loss": 0.75, "top5": 1.0}, True)
    journal.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "events").iterdir())
    for name in ("train/loss", "train/lr", "train/accuracy", "validation/loss", "validation/top5"):
        assert name.encode() in content


def test_tensorboard_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(SetupError, match=r"tvm-convgrad\[tensorboard\]"):
        TensorBoard(tmp_path, 0)
