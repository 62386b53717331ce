# SPDX-License-Identifier: Apache-2.0
"""Checkpoints come back bit for bit, the last two stay, and a damaged one is passed over out loud."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.checkpoint import Progress, load, load_latest, save

STATE = {
    "conv.weight": np.random.default_rng(0).normal(size=(4, 3, 3)).astype("float32"),
    "step": np.array(7, "int64"),
    "narrow": np.array([1.5, -0.0, np.inf], ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), "float64"),
}


def progress(steps: int) -> Progress:
    losses = [0.1 * step + 1e-17 for step in range(steps)]
    return Progress("a" * 64, "d" * 64, 5, 8, 0.05, epoch=steps // 6, position=steps % 6, losses=losses)


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "folder", progress(8), STATE)
    found = load(path)
    assert found.progress == progress(8)
    assert list(found.state) == list(STATE)
    for name, array in STATE.items():
        assert found.state[name].dtype == array.dtype
        assert found.state[name].shape == array.shape
        assert found.state[name].tobytes() == array.tobytes()


def test_the_last_two_stay(tmp_path: Path) -> None:
    for steps in (1, 9, 10, 100):
        save(tmp_path, progress(steps), STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000010.ckpt", "step-0000000100.ckpt"]
    latest, complaints = load_latest(tmp_path)
    assert latest is not None
    assert len(latest.progress.losses) == 100
    assert complaints == []


@pytest.mark.parametrize("damage", [lambda b: b[:-40], lambda b: b[:100] + b"?" + b[101:], lambda b: b""])
def test_damaged_newest_is_passed_over_with_a_sentence(tmp_path: Path, damage) -> None:
    save(tmp_path, progress(6), STATE)
    newest = save(tmp_path, progress(12), STATE)
    newest.write_bytes(damage(newest.read_bytes()))
    found, complaints = load_latest(tmp_path)
    assert found is not None
    assert len(found.progress.losses) == 6
    assert len(complaints) == 1
    assert newest.name in complaints[0]


def test_only_damaged_ones_are_refused(tmp_path: Path) -> None:
    save(tmp_path, progress(6), STATE).write_bytes(b"rubbish")
    with pytest.raises(ArtifactError, match="remove them to start anew"):
        load_latest(tmp_path)


def test_no_checkpoints(tmp_path: Path) -> None:
    assert load_latest(tmp_path) == (None, [])
    assert load_latest(tmp_path / "missing") == (None, [])
