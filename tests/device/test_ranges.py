# SPDX-License-Identifier: Apache-2.0
"""The C library refuses what Python refuses, by the same sentences, and accepts the same values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests import tokens
from tests.device.binding import Open, RefusedError
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.runtime.artifact import ARTIFACT, inspect_artifact
from tvm_convgrad.training.runtime.envelope import seal
from tvm_convgrad.training.runtime.session import Session

X, Y = tokens.make_arrays()
SCORES = (tokens.BATCH, tokens.CLASSES)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens.build(tmp_path_factory.mktemp("tokens"), split=True)


def sentences(step: Path, open_c: Open, x: np.ndarray, y: np.ndarray) -> set[str]:
    """What Python and C say of a batch in each of their calls; "" where it is accepted."""
    ours, theirs = open_c(step), Session(step)
    found = set()
    for call in (theirs.step, theirs.gradients, theirs.evaluate):
        try:
            call(x, y)
            found.add("")
        except ArtifactError as error:
            found.add(str(error))
    for name in ("train_step", "eval_step", "gradients"):
        try:
            ours.gradients(x, y) if name == "gradients" else ours.step(x, y, name=name)
            found.add("")
        except RefusedError as error:
            found.add(str(error))
    return found


@pytest.mark.parametrize("value", [10, -11, 2**31 - 1, -(2**31), 9, -10])
def test_tokens(step: Path, open_c: Open, value: int) -> None:
    x = X.copy()
    x[2, 3] = value
    (sentence,) = sentences(step, open_c, x, Y)
    assert bool(sentence) == (not -10 <= value < 10)
    session, out = open_c(step), np.empty(SCORES, "float32")
    if sentence:
        assert sentence.startswith(f"the input 'tokens' has the value {value} at [2, 3], which is out of range; ")
        before = session.state()
        with pytest.raises(RefusedError, match=re.escape(sentence)):
            session.predict(x, out)
        assert all(np.array_equal(session.state()[name], array) for name, array in before.items())
    else:
        np.testing.assert_array_equal(session.predict(x, out), Session(step).predict(x))


@pytest.mark.parametrize("limits", [[2, 4], [6, 9], [6, 2**31 - 1]])
def test_extents(step: Path, open_c: Open, tmp_path: Path, limits: list[int]) -> None:
    """Of a free axis, five long here, on whose limits the model relies."""
    manifest = inspect_artifact(step).manifest
    batch, length = X.shape
    assert length == 5
    manifest["schema"]["inputs"][0] |= {"shape": [batch, "length"], "limits": {"length": limits}}
    path = tmp_path / "free.so"
    path.write_bytes(seal(ARTIFACT, step.read_bytes(), manifest)[0])
    (sentence,) = sentences(path, open_c, X, Y)
    low, high = limits
    assert sentence.startswith("the input 'tokens' has extent 5 on axis 1, but")
    shown = f"at least {low}" if high == 2**31 - 1 else f"{low} to {high}"
    assert sentence.endswith(f"was exported for {shown} there, and relies on it.")
    for number, taken in enumerate(([5, 5], [4, 6], [5, 2**31 - 1])):
        manifest["schema"]["inputs"][0]["limits"] = {"length": taken}
        path = tmp_path / f"{number}.so"
        path.write_bytes(seal(ARTIFACT, step.read_bytes(), manifest)[0])
        assert sentences(path, open_c, X, Y) == {""}


@pytest.mark.parametrize("value", [3, -1, -100, 255, 7, np.iinfo("int64").min, 2])
@pytest.mark.parametrize("ignored", [None, -100])
def test_labels(step: Path, open_c: Open, tmp_path: Path, value: int, ignored: int | None) -> None:
    """Of libraries of now, and of those whose manifest has no ranges yet."""
    for old in (False, True):
        manifest = inspect_artifact(step).manifest
        manifest["options"]["ignore_index"] = ignored
        target = manifest["schema"]["target"]
        target["range"] = IndexRange.of_classes(tokens.CLASSES, ignored).to_json()
        if old:
            del target["range"]
        path = tmp_path / f"{old}.so"
        path.write_bytes(seal(ARTIFACT, step.read_bytes(), manifest)[0])
        y = Y.copy()
        y[1] = value
        (sentence,) = sentences(path, open_c, X, y)
        assert bool(sentence) == (value not in (0, 1, 2, ignored))
        if sentence:
            assert f"the target has the value {value} at [1]" in sentence
            assert ("--ignore-index" in sentence) == (ignored is None and value in (-1, -100, 255))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_types(step: Path, open_c: Open, tmp_path: Path, dtype: str) -> None:
    """The least and the greatest value of a type of 32 bits and others, before anything runs."""
    manifest = inspect_artifact(step).manifest
    limits = np.iinfo(dtype)
    low, high = (-3, 5) if limits.min < 0 else (0, 5)
    manifest["schema"]["inputs"][0] |= {"dtype": dtype, "range": {"low": low, "high": high, "kind": "of later"}}
    path = tmp_path / "other.so"
    path.write_bytes(seal(ARTIFACT, step.read_bytes(), manifest)[0])
    for value in {limits.min, limits.max, low - 1, high + 1} - {0}:
        if not limits.min <= value <= limits.max:
            continue
        x = np.zeros(X.shape, dtype)
        x[0, 4] = value
        with pytest.raises(RefusedError) as refused:
            open_c(path).step(x, Y)
        with pytest.raises(ArtifactError) as refused_too:
            Session(path).step(x, Y)
        assert str(refused.value) == str(refused_too.value)
        assert f"the value {value} at [0, 4]" in str(refused.value)
        assert f"takes it as a value from {low} to {high}." in str(refused.value)


@pytest.mark.parametrize(
    ("range_", "message"),
    [
        ({"low": "a", "high": 9}, "low"),
        ({"low": 0}, "high"),
        ([], "range"),
        ({"low": 0, "high": 9, "others": 3}, "others"),
        ({"low": 0, "high": 9, "kind": 3}, "kind"),
    ],
)
def test_damaged_ranges(step: Path, open_c: Open, tmp_path: Path, range_: object, message: str) -> None:
    manifest = inspect_artifact(step).manifest
    manifest["schema"]["inputs"][0]["range"] = range_
    path = tmp_path / "damaged.so"
    path.write_bytes(seal(ARTIFACT, step.read_bytes(), manifest)[0])
    with pytest.raises(RefusedError, match=message):
        open_c(path)
