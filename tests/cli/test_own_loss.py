# SPDX-License-Identifier: Apache-2.0
"""`build --loss model` and `run` with it: what is measured, what is refused, wrong labels, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command
from tvm_convgrad.training import Session


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with its cross-entropy in it."""
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(tiny.with_own_loss())
    return f"{path}:make"


def test_build_run_and_export(
    convgrad: Command, own_model: str, tiny_step: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The losses are those of the built-in cross-entropy; accuracies are not known."""
    step, folder = tmp_path / "own.so", tmp_path / "checkpoints"
    shown = convgrad("build", own_model, "-o", step, "--loss", "model", "--lr", 0.1, "--momentum", 0.9, "--json").json
    assert shown["options"]["loss"] == "model"
    target = shown["schema"]["target"]
    assert {key: target[key] for key in ("name", "shape", "dtype")} == {
        "name": "target",
        "shape": [tiny.BATCH],
        "dtype": "int64",
    }
    assert target["range"] == {"low": -tiny.CLASSES, "high": tiny.CLASSES - 1, "kind": "rows"}
    with np.load(tiny_data) as arrays:
        found = dict(arrays)
    data, log = tmp_path / "data.npz", tmp_path / "log.jsonl"
    np.savez(data, **found, x_val=found["x_test"], y_val=found["y_test"])
    run = ["run", step, "--data", data, "--epochs", 3]
    result = convgrad(*run, "--checkpoint-dir", folder, "--log", log, "--patience", 2, "--json").json
    plain = convgrad("run", tiny_step, "--data", tiny_data, "--epochs", 3, "--json").json
    assert result["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert [name for name in result if name.startswith("test_")] == ["test_samples", "test_loss"]
    assert result["test_samples"] == 2 * tiny.BATCH  # of 21, in whole batches
    session = Session(step)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(set(line["validation"]) == {"loss"} for line in lines if "validation" in line)
    assert all(line.get("accuracy") is None for line in lines)
    predict = tmp_path / "predict.so"
    made = convgrad("export", step, "--checkpoint", folder, "-o", predict, "--inference", "--model", own_model)
    assert made.code == 0, made.err
    from tvm_convgrad.training.runtime.checkpoint import load_latest

    newest, _ = load_latest(folder)
    assert newest is not None
    session.state = newest.state
    x, y = found["x_test"], found["y_test"]
    np.testing.assert_allclose(Session(predict).predict(x), session.predict(x), rtol=1e-4, atol=1e-5)
    batches = [session.evaluate(x[i : i + tiny.BATCH], y[i : i + tiny.BATCH])[0] for i in (0, tiny.BATCH)]
    assert result["test_loss"] == pytest.approx(np.mean(batches), rel=1e-12)  # the 21 samples have two whole batches
    convgrad(*run, "--monitor", "accuracy").assert_sentence("returns its loss itself", "leave --monitor out")
    convgrad(*run, "--require-accuracy", 0.5).assert_sentence("--require-accuracy needs", "class numbers")
    found["y_train"] = np.where(found["y_train"] == 2, 7, found["y_train"])
    np.savez(data, **found)
    convgrad(*run).assert_sentence("array 'y_train' has the value 7 at [", "an index of 3 rows (-3 to 2)")
    computed = tmp_path / "computed.py"  # of labels that the model computes with, no range is known
    computed.write_text(
        tiny.with_own_loss().replace("label = ", "y = relax.op.negative(relax.op.negative(y)); label = ")
    )
    assert convgrad("build", f"{computed}:make", "-o", tmp_path / "computed.so", "--loss", "model").code == 0
    convgrad("run", tmp_path / "computed.so", "--data", data, "--epochs", 3).assert_sentence(
        "the loss became nan in step 1", "look for labels or indices", "(this batch has target from 0 to 7)"
    )
    few = tmp_path / "few.npz"
    np.savez(few, x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    convgrad("run", step, "--data", few, "--epochs", 1).assert_sentence(
        "3 test samples do not fill one batch of 8", "--batch dynamic"
    )


def test_wrong_options(convgrad: Command, own_model: str, tiny_model: str, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    convgrad("build", own_model, "-o", step).assert_sentence("has 2 outputs", "--loss model if one is the loss")
    done = convgrad("build", tiny_model, "-o", step, "--loss", "model")
    done.assert_sentence("takes its target, too (--loss model)")
    done = convgrad("build", own_model, "-o", step, "--loss", "model", "--model-target", "z")
    done.assert_sentence("has no input 'z' (--model-target); it has x, y.")
    done = convgrad("build", own_model, "-o", step, "--loss", "model", "--ignore-index", 3)
    assert done.code == 2
    assert "model has no setting 'ignore_index'" in done.err
    done = convgrad("build", tiny_model, "-o", step, "--model-target", "y")
    assert done.code == 2
    assert "--model-target y: only a model that returns its loss" in " ".join(done.err.replace("│", " ").split())
    assert not step.exists()
