# SPDX-License-Identifier: Apache-2.0
"""`convgrad run` with a validation: the best checkpoint, early stopping, logs, and all of it across a kill."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command
from tests.cli.test_kill import finish, start, wait_for
from tvm_convgrad.training.runtime.checkpoint import BEST, load


@pytest.fixture
def validated_data(tiny_data: Path, tmp_path: Path) -> Path:
    """Those of the tiny step, whose test samples are to be validated with."""
    with np.load(tiny_data) as arrays:
        found = dict(arrays)
    path = tmp_path / "validated.npz"
    np.savez(path, **found, x_val=found["x_test"], y_val=found["y_test"])
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_best_and_patience(convgrad: Command, tiny_step: Path, validated_data: Path, tmp_path: Path) -> None:
    log, folder, state = tmp_path / "log.jsonl", tmp_path / "checkpoints", tmp_path / "state.npz"
    arguments = ["run", tiny_step, "--data", validated_data, "--epochs", 40, "--patience", 3, "--monitor", "accuracy"]
    arguments += ["--lr", 0.2, "--log", log, "--checkpoint-dir", folder, "--use-best", "--save-state", state]
    done = convgrad(*arguments, "--json")
    result = done.json
    assert "the best accuracy" in done.err
    lines = read(log)
    steps = [line for line in lines if "loss" in line]
    assert [line["loss"] for line in steps] == result["losses"]
    validations = [line for line in lines if "validation" in line]
    assert [line["step"] for line in validations] == list(range(6, result["steps"] + 1, 6))
    measures = [line["validation"]["accuracy"] for line in validations]
    assert result["best_accuracy"] == max(measures)
    assert result["best_step"] == 6 * (measures.index(max(measures)) + 1)
    assert len(measures) == measures.index(max(measures)) + 1 + 3 < 40
    assert result["test_accuracy"] == max(measures)  # of the best state, on the same samples
    best = load(folder / BEST)
    assert best.progress.losses == result["losses"][: result["best_step"]]
    with np.load(state) as arrays:
        assert all((arrays[name] == best.state[name]).all() for name in arrays.files)
    again = convgrad(*arguments, "--resume", "--json").json  # it has ended, and stays so
    assert (again["steps"], again["best_accuracy"]) == (result["steps"], result["best_accuracy"])
    assert read(log) == lines


@pytest.mark.parametrize("monitor", ["loss", "accuracy"])
def test_what_counts_no_label(convgrad: Command, tiny_model: str, tmp_path: Path, monitor: str) -> None:
    """Validation and test data whose labels are all ignored: patience ends the run, and no accuracy is enough."""
    step, data = tmp_path / "step.so", tmp_path / "ignored.npz"
    convgrad("build", tiny_model, "-o", step, "--ignore-index", -1, "--split")
    x, y = tiny.make_arrays(2 * tiny.BATCH, 0)
    none = np.full_like(y, -1)
    np.savez(data, x_train=x, y_train=y, x_val=x, y_val=none, x_test=x, y_test=none)
    done = convgrad("run", step, "--data", data, "--epochs", 9, "--patience", 2, "--monitor", monitor, "--json")
    assert done.json["test_accuracy"] is None
    assert f"no {monitor} was a finite number" in done.err
    done = convgrad("run", step, "--data", data, "--epochs", 1, "--require-accuracy", 0.5)
    assert done.code == 1
    assert "the test accuracy is nan, not above the 0.5" in done.err
    np.savez(data, x_train=x, y_train=none)
    for options in ([], ["--accumulate", 2]):
        done = convgrad("run", step, "--data", data, "--epochs", 1, *options)
        assert done.code == 1
        assert f"all labels of a batch of {tiny.BATCH} samples are -1, the ignored class" in done.err
    convgrad("build", tiny_model, "-o", tmp_path / "divided.so", "--ignore-index", -1, "--accumulate", 2)
    done = convgrad("run", tmp_path / "divided.so", "--data", data, "--epochs", 1)
    assert f"all labels of a batch of {tiny.BATCH} samples are -1, the ignored class" in done.err


def test_killed_and_resumed(convgrad: Command, tiny_step: Path, validated_data: Path, tmp_path: Path) -> None:
    """The log, the best and the schedule are those of a run that was not killed."""
    arguments = ["run", tiny_step, "--data", validated_data, "--epochs", 40, "--schedule", "cosine:warmup=3"]
    arguments += ["--validate-every", 4, "--json"]
    whole = convgrad(*arguments, "--log", tmp_path / "whole.jsonl").json
    folder, log = tmp_path / "checkpoints", tmp_path / "log.jsonl"
    cut = [*arguments, "--log", log, "--checkpoint-dir", folder, "--checkpoint-every", 5, "--resume"]
    for goal in (15, 90):
        process = start(*cut)
        wait_for(lambda goal=goal: any(int(p.stem[5:]) >= goal for p in folder.glob("step-*.ckpt")), process)
        process.kill()
        finish(process)
    result = convgrad(*cut).json
    assert result["resumed_after"] >= 90
    for name in ("losses", "best_loss", "best_step"):
        assert result[name] == whole[name]
    assert read(log) == read(tmp_path / "whole.jsonl")


def test_wrong_options(
    convgrad: Command, tiny_step: Path, tiny_data: Path, validated_data: Path, tmp_path: Path
) -> None:
    arguments = ["run", tiny_step, "--data", tiny_data, "--epochs", 1]
    convgrad(*arguments, "--patience", 2).assert_sentence("no arrays to validate with; name them x_val and y_val")
    convgrad(*arguments, "--validate", tmp_path / "none.npz").assert_sentence("no such data file")
    convgrad(*arguments, "--validate", validated_data, "--monitor", "mean_iou").assert_sentence(
        "the measures loss, acc"
    )
    with np.load(tiny_data) as data:
        np.savez(tmp_path / "plain.npz", x=data["x_train"][:10], y=data["y_train"][:10])
    assert convgrad(*arguments, "--test-data", tmp_path / "plain.npz", "--json").json["test_samples"] == 10
    convgrad(*arguments, "--log", tmp_path / "no" / "log").assert_sentence("make it first")
    for wrong in (["--monitor", "f1"], ["--use-best"]):
        assert convgrad(*arguments, *wrong).code == 2
