# SPDX-License-Identifier: Apache-2.0
"""A session steps, predicts, and refuses what does not fit with a sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests import tiny
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ArtifactError, TrainingError
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.runtime.checkpoint import Progress
from tvm_convgrad.training.runtime.data import Samples, load_samples
from tvm_convgrad.training.runtime.loop import batch_size_of, train
from tvm_convgrad.training.runtime.pages import give_back
from tvm_convgrad.training.runtime.schema import TensorSpec
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.source import batches_of_epoch
from tvm_convgrad.training.runtime.validation import validate
from tvm_convgrad.training.step.build import build_step

X, Y = tiny.make_arrays(tiny.BATCH, 0)


@pytest.fixture(scope="module")
def session(tiny_step: Path) -> Session:
    return Session(tiny_step)


def test_a_tuple_of_the_one_input_is_that_input(session: Session) -> None:
    """A tuple that is one sample is a batch of one."""
    np.testing.assert_array_equal(session.predict((X,)), session.predict(X))
    np.testing.assert_array_equal(session.predict((X[0],)), session.predict(X[:1]))
    session.reset()
    first = session.step((X,), Y)[0]
    session.reset()
    assert first == session.step(X, Y)[0]


def test_loss_falls_and_state_changes(session: Session) -> None:
    session.reset()
    before = session.state
    losses = [session.step(X, Y)[0] for _ in range(30)]
    assert losses[0] == pytest.approx(np.log(3), rel=1.0)
    assert losses[-1] < losses[0] / 2
    assert not np.array_equal(before["w"], session.state["w"])


def test_same_state_gives_the_same_bits(session: Session) -> None:
    session.reset()
    session.step(X, Y)
    kept = session.state
    first = [session.step(X, Y, 0.05) for _ in range(3)]
    session.state = kept
    second = [session.step(X, Y, 0.05) for _ in range(3)]
    assert [loss for loss, _ in first] == [loss for loss, _ in second]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


def test_predictions_of_another_batch_are_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries gave that were built of models with a fixed batch in a shape."""
    call = session._call
    session.reset()
    assert session.predict(X[:3]).shape[0] == 3

    def first_row(function: str, *arguments: Any) -> Any:
        return tvm.runtime.tensor(call(function, *arguments).numpy()[:1])

    monkeypatch.setattr(session, "_call", first_row)
    with pytest.raises(ArtifactError, match=rf"predict gave \[1, 3\] for {tiny.BATCH} samples"):
        session.predict(X)


def test_state_is_a_copy(session: Session) -> None:
    session.reset()
    state = session.state
    state["w"][:] = 0
    assert session.state["w"].any()


def test_zero_rate_leaves_parameters(session: Session) -> None:
    session.reset()
    before = session.state
    session.step(X, Y, 0.0)
    after = session.state
    for spec in session.artifact.state:
        if spec.role == "parameter":
            assert np.array_equal(before[spec.name], after[spec.name])
    assert not np.array_equal(before["mean"], after["mean"])  # running statistics do move


@pytest.mark.parametrize("size", [0, -1])
def test_batches_of_no_samples_are_refused(session: Session, size: int) -> None:
    with pytest.raises(ArtifactError, match=f"batch_size is {size}; it must be at least 1"):
        session.predict(X, batch_size=size)


def test_predict_takes_any_number_of_samples(session: Session) -> None:
    x, _ = tiny.make_arrays(21, 3)
    whole = session.predict(x)
    assert whole.shape == (21, 3)
    single = np.concatenate([session.predict(x[i : i + 1]) for i in range(21)])
    assert np.array_equal(whole, single)  # predict uses running statistics, so samples do not see one another


def test_dynamic_batch(tiny_dynamic_step: Path, session: Session) -> None:
    dynamic = Session(tiny_dynamic_step)
    assert dynamic.batch is None
    session.reset()
    fixed = session.step(X, Y)
    free = dynamic.step(X, Y)
    assert free[0] == pytest.approx(fixed[0], rel=1e-6)
    x, y = tiny.make_arrays(5, 2)
    loss, predictions = dynamic.step(x, y)
    assert np.isfinite(loss)
    assert predictions.shape == (5, 3)
    with pytest.raises(ArtifactError, match="target"):
        dynamic.step(x, Y)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:5], Y[:5], r"extent 5 on axis 0, shape \[5, 1, 6, 6\].* takes 8"),
        (X[:, 0], Y, "3 axes"),
        (X[..., :4], Y, "takes 6 there"),
        ((X * 10).astype("uint8"), Y, "element type uint8.*convert it first"),
        (X, Y.astype("float32"), "element type float32"),
        (X, Y * 0 + 3, r"the target has the value 3 at \[0\], .* the model takes it as one of 3 classes \(0 to 2\)\.$"),
        (X, Y * 0 - 100, r"value -100 at \[0\], .* \(0 to 2\); build with --ignore-index -100 if it marks what has no"),
    ],
)
def test_wrong_arrays(session: Session, x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        session.step(x, y)


def test_wider_types_are_converted(session: Session) -> None:
    session.reset()
    wanted = session.step(X, Y)[0]
    session.reset()
    assert session.step(X.astype("float64"), Y.astype("int8"))[0] == wanted


def test_wrong_state(session: Session) -> None:
    state = session.state
    with pytest.raises(ArtifactError, match=r"missing \['w'\]"):
        session.state = {name: array for name, array in state.items() if name != "w"}
    with pytest.raises(ArtifactError, match="axis 0"):
        session.state = state | {"w": state["w"][:2]}
    with pytest.raises(ArtifactError, match="no samples"):
        session.predict(X[:0])


def test_order_of_data_follows_from_seed_and_epoch() -> None:
    first = batches_of_epoch(3, 5, 53, 8)
    assert first.shape == (6, 8)
    assert len(set(first.flat)) == 48
    assert np.array_equal(first, batches_of_epoch(3, 5, 53, 8))
    assert not np.array_equal(first, batches_of_epoch(3, 6, 53, 8))
    assert not np.array_equal(first, batches_of_epoch(4, 5, 53, 8))
    left_out = {
        sample for epoch in range(20) for sample in set(range(53)) - set(batches_of_epoch(0, epoch, 53, 8).flat)
    }
    assert len(left_out) > 30  # not the same five each time


def test_batch_size(session: Session, tiny_dynamic_step: Path) -> None:
    assert batch_size_of(session, None, 53) == 8
    assert batch_size_of(Session(tiny_dynamic_step), None, 53) == 32
    with pytest.raises(ArtifactError, match="--batch-size 16 contradicts"):
        batch_size_of(session, 16, 53)
    with pytest.raises(ArtifactError, match="7 training samples do not fill one batch of 8"):
        batch_size_of(session, None, 7)


def test_divergence_is_a_sentence(session: Session) -> None:
    session.reset()
    progress = Progress("", "", 0, 8, 1e30)
    with pytest.raises(TrainingError, match="smaller learning rate than 1e\\+30"):
        list(train(session, Samples((X,), Y), progress, 50))


def test_accuracy_counts_every_sample(session: Session, tiny_data: Path) -> None:
    test = load_samples(tiny_data, session.inputs, session.target, "test")
    assert test is not None
    assert len(test) == 21
    right = (session.predict(test.inputs[0]).argmax(axis=1) == test.target).sum()
    assert validate(session, test)["accuracy"] == right / 21


@pytest.mark.parametrize(("classes", "width"), [(5, 3), (3, 7)])
def test_classes_of_pixels_are_in_axis_1(tmp_path: Path, classes: int, width: int) -> None:
    """More classes than columns, and more columns than classes."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 1, 4, width), "float32"))
    w = relax.Var("w", relax.TensorType((classes, 1, 1, 1), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.conv2d(x, w))
        builder.emit_func_output(y)
    weights = {"w": np.arange(classes, dtype="float32").reshape(classes, 1, 1, 1)}
    step = build_step(from_module(builder.get(), parameters=weights), ignore_index=255)
    executable, _ = compile_with_plan(step, native_target())
    save_artifact(executable, make_manifest(step, native_target(), []), tmp_path / "step.so")
    session = Session(tmp_path / "step.so")
    assert session.classes == classes
    images = np.array([1.0, -1.0], "float32")[:, None, None, None] * np.ones((2, 1, 4, width), "float32")
    target = np.full((2, 4, width), classes - 1)  # the largest prediction where the image is positive
    target[0, 0, 0] = 0
    assert validate(session, Samples((images,), target))["accuracy"] == (4 * width - 1) / (8 * width)
    with pytest.raises(ArtifactError, match=rf"one of {classes} classes \(0 to {classes - 1}, or 255\)"):
        session.step(images, target + 1)
    target[1, 0, 0] = 255  # has no loss, and does not count
    assert validate(session, Samples((images,), target))["accuracy"] == (4 * width - 1) / (8 * width - 1)
    session.step(images, target)
    target[1, 2, 1] = -100
    with pytest.raises(ArtifactError, match=r"the value -100 at \[1, 2, 1\]"):
        session.step(images, target)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": X}, r"no array for 'target'.*y_train.*the file has x_train"),
        ({"y_train": Y}, "no array for 'x'"),
        ({"x_train": X, "y_train": Y[:5]}, r"different numbers of samples, \[5, 8\]"),
        ({"x_train": X[..., :3], "y_train": Y}, "extent 3 on axis 3"),
        ({"x_train": X, "y_train": Y + 7}, r"array 'y_train' has the value \d at \[0\], which is out of range"),
        (
            {"x_train": X, "y_train": Y.astype("uint64") + 2**63},
            r"'y_train' has the value 92\d+ at .* overflows in int64",
        ),
        (
            {"x_train": X.astype("float64") * 1e39, "y_train": Y},
            r"array 'x_train' has the value .* overflows in float32",
        ),
        ({"x_train": X[:0], "y_train": Y[:0]}, "the train arrays have no samples"),
        ({"x_train": np.array([None, 1]), "y_train": Y}, "not an .npz archive of plain arrays"),
    ],
)
def test_wrong_data(session: Session, tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(ArtifactError, match=message):
        load_samples(tmp_path / "d.npz", session.inputs, session.target, "train")


@pytest.mark.parametrize(
    ("given", "model", "value"),
    [
        ("float64", "float32", 1e39),
        ("float64", "float16", -7e4),
        ("float32", "float16", 65520.0),
        ("float64", "bfloat16", 1e39),
        ("bfloat16", "float16", 1e6),
        ("uint64", "int64", 2**63 + 5),
        ("int64", "int32", -(2**31) - 1),
        ("int64", "uint8", -1),
        ("uint8", "int8", 128),
    ],
)
def test_values_that_overflow_are_named(given: str, model: str, value: float) -> None:
    array = np.ones((2, 3), numpy_dtype(given))
    spec = TensorSpec("x", (2, 3), model)
    assert spec.accept(array, {}, "it").dtype == numpy_dtype(model)
    array[1, 2] = value
    with pytest.raises(ArtifactError, match=rf"has the value \S+ at \[1, 2\], which overflows in {model}, .* of 'x'"):
        spec.accept(array, {}, "it")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_what_is_not_finite_already_does_not_overflow(value: float) -> None:
    array = np.array([1.0, value], "float64")
    np.testing.assert_array_equal(TensorSpec("x", (2,), "float32").accept(array, {}, "it"), array.astype("float32"))
    assert TensorSpec("x", (0,), "int8").accept(np.zeros(0, "int64"), {}, "it").size == 0


def test_damaged_data(session: Session, tiny_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    content = tiny_data.read_bytes()
    single = tmp_path / "single.npy"
    np.save(single, X)
    flipped = content[:200] + bytes([content[200] ^ 1]) + content[201:]
    for damaged in (b"", b"rubbish", content[: len(content) // 2], flipped, single.read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"d\.npz"):
            load_samples(path, session.inputs, session.target, "train")
    with pytest.raises(ArtifactError, match="no such data file"):
        load_samples(tmp_path / "none.npz", session.inputs, session.target, "train")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc/self/smaps")
def test_the_librarys_constants_are_not_resident_twice(tiny_step: Path) -> None:
    session = Session(tiny_step)
    before = session.state
    assert give_back(tiny_step) > 0
    text = re.sub(" +", " ", Path("/proc/self/smaps").read_text())
    mapped = re.findall(rf"r--p \S+ \S+ \d+ +{re.escape(str(tiny_step.resolve()))}\n((?:\w+: .*\n)*)", text)
    untouched = [facts for facts in mapped if "Anonymous: 0 kB" in facts]
    resident = [int(number) for facts in untouched for number in re.findall(r"^Rss: (\d+) kB$", facts, re.MULTILINE)]
    assert resident
    assert set(resident) == {0}
    session.reset()  # the constants are read from the file again where that is needed
    for name, value in session.state.items():
        np.testing.assert_array_equal(value, before[name])
