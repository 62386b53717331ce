# SPDX-License-Identifier: Apache-2.0
"""Checkpoints come back bit for bit, the last two stay, and a damaged one is passed over out loud."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.checkpoint import CHECKPOINT, Progress, load, load_latest, save
from tvm_convgrad.training.runtime.envelope import Manifest, seal, unseal

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
    with pytest.raises(ArtifactError, match="remove them to start again"):
        load_latest(tmp_path)


def test_no_checkpoints(tmp_path: Path) -> None:
    assert load_latest(str(tmp_path)) == (None, [])
    assert load_latest(tmp_path / "missing") == (None, [])


def array(**fields: object) -> Manifest:
    """The manifest's change of its first array, the losses."""
    return {"arrays": [{"name": "losses", "dtype": "float64", "shape": [6], "offset": 0} | fields]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"progress": None}, "TypeError"),
        ({"progress": {}}, "TypeError"),
        ({"progress": {"seed": 1}}, "TypeError"),
        ({"seed": "five"}, "seed is 'five'"),
        ({"seed": True}, "seed is True"),
        ({"epoch": -1}, "epoch is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"position": 1.5}, "position is 1.5"),
        ({"lr": None}, "lr is None"),
        ({"data": 3}, "data is 3"),
        ({"surplus": 3}, "TypeError"),
        ({"arrays": None}, "TypeError"),
        ({"arrays": []}, "KeyError"),
        ({"arrays": [7]}, "TypeError"),
        (array(dtype="floaty"), "TypeError"),
        (array(dtype="object"), "ValueError"),
        (array(dtype="int64"), "losses are not"),
        (array(shape=[2, 3]), "losses are not"),
        (array(shape=[-1]), "negative extent"),
        (array(shape=[1 << 40]), "ValueError"),
        (array(offset=1 << 40), "ValueError"),
        (array(offset=-8), "ValueError"),
        (array(name=3), "KeyError"),
    ],
)
def test_a_wrong_manifest_under_a_right_digest_is_refused(tmp_path: Path, change: Manifest, named: str) -> None:
    path = save(tmp_path, progress(6), STATE)
    sealed = unseal(CHECKPOINT, path)
    manifest = dict(sealed.manifest)
    if change.keys() <= manifest.keys():
        manifest |= change
    else:
        manifest["progress"] |= change
    path.write_bytes(seal(CHECKPOINT, sealed.payload(), manifest)[0])
    with pytest.raises(ArtifactError, match=f"does not describe one .*{named}.*make it again"):
        load(path)


@pytest.mark.parametrize("manifest", [[], "text", 3, None])
def test_a_manifest_that_is_no_object_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    path = tmp_path / "step-0000000006.ckpt"
    path.write_bytes(seal(CHECKPOINT, b"", manifest)[0])
    with pytest.raises(ArtifactError, match="manifest is not a JSON object"):
        load(path)
