# SPDX-License-Identifier: Apache-2.0
"""Tokens out of range: a sentence with the value, its place and the rows, wherever a model takes them, and no step."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import tokens
from tests.cli.command import Command
from tests.conftest import build_tiny
from tests.distributed.thread_ranks import on_ranks
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.ensemble import ensemble
from tvm_convgrad.training.runtime.artifact import ARTIFACT, inspect_artifact
from tvm_convgrad.training.runtime.envelope import seal
from tvm_convgrad.training.runtime.origin import Origin
from tvm_convgrad.training.runtime.parallel import DataParallel
from tvm_convgrad.training.runtime.ranks import Ranks
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.build import build_step

X, Y = tokens.make_arrays()
SENTENCE = (
    "the input 'tokens' has the value {} at [2, 3], which is out of range; the model takes it as an index of 10 rows "
    "(-10 to 9)."
)


def bad(value: int, samples: int = tokens.BATCH) -> np.ndarray:
    """Tokens of which one has this value, at [2, 3]."""
    x = tokens.make_arrays(samples)[0]
    x[2, 3] = value
    return x


def without_ranges(step: Path, path: Path) -> Path:
    """The same as versions before had it."""
    manifest = inspect_artifact(step).manifest
    for entry in (*manifest["schema"]["inputs"], manifest["schema"]["target"]):
        entry.pop("range", None)
    path.write_bytes(seal(ARTIFACT, step.read_bytes(), manifest)[0])
    return path


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens.build(tmp_path_factory.mktemp("tokens"), split=True)


@pytest.mark.parametrize("value", [10, -11, 2**31 - 1])
@pytest.mark.parametrize("call", ["step", "gradients", "evaluate", "predict"])
def test_every_call_refuses(step: Path, call: str, value: int) -> None:
    session = Session(step)
    before = session.state
    calls: dict[str, Callable[[np.ndarray], object]] = {
        "step": lambda x: session.step(x, Y),
        "gradients": lambda x: session.gradients(x, Y),
        "evaluate": lambda x: session.evaluate(x, Y),
        "predict": session.predict,
    }
    with pytest.raises(ArtifactError, match=re.escape(SENTENCE.format(value)) + "$"):
        calls[call](bad(value))
    assert all(np.array_equal(session.state[name], array) for name, array in before.items())
    calls[call](X)


def test_negative_tokens_count_from_the_end(step: Path) -> None:
    session = Session(step)
    found = session.predict(np.where(X == 0, X, X - tokens.WORDS))
    np.testing.assert_array_equal(found, session.predict(X))
    np.testing.assert_array_equal(session.predict(bad(-10)), session.predict(bad(-10).astype("int64")))


def test_other_types_that_are_given(step: Path) -> None:
    """Before they are converted: what would overflow, and what would not."""
    session = Session(step)
    with pytest.raises(ArtifactError, match=re.escape(SENTENCE.format(200))):
        session.predict(bad(200).astype("uint8"))
    x = X.astype("int64")
    x[2, 3] = 2**40
    with pytest.raises(ArtifactError, match=rf"value {2**40} at \[2, 3\], which overflows in int32"):
        session.predict(x)


@pytest.mark.parametrize(("rows", "range_"), [("both", IndexRange.of_rows(7)), ("clipped", None), ("next", None)])
def test_what_else_models_make_of_tokens(tmp_path: Path, rows: str, range_: IndexRange | None) -> None:
    session = Session(tokens.build(tmp_path, rows))
    assert session.inputs[0].range == range_
    if rows == "both":
        with pytest.raises(ArtifactError, match=r"the value 8 at \[2, 3\], .* an index of 7 rows \(-7 to 6\)"):
            session.predict(bad(8))
        return
    np.testing.assert_array_equal(
        np.isfinite(session.predict(bad(9))).all(axis=1), [True, True, rows == "clipped", True]
    )
    assert np.isfinite(session.step(bad(9), Y)[0]) == (rows == "clipped")  # the token behind the last is computed: NaN


def test_padding_that_the_model_replaces(tmp_path: Path) -> None:
    """It is in range; what else is not a row is not."""
    session = Session(tokens.build(tmp_path, "padded"))
    found, same = session.predict(bad(tokens.PADDING)), session.predict(bad(0))
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(same, 2, 0))
    assert np.isfinite(found).all()
    assert np.isfinite(session.step(bad(tokens.PADDING), Y)[0])
    with pytest.raises(ArtifactError, match=r"the value -11 at \[2, 3\], .* 10 rows \(-10 to 9, or -100\)\.$"):
        session.step(bad(-11), Y)


def test_a_free_batch_and_micro_batches(tmp_path: Path) -> None:
    """Places are those in the batch that is given."""
    for folder, batch, accumulate in (("free", "dynamic", 1), ("micro", None, 3)):
        (tmp_path / folder).mkdir()
        session = Session(tokens.build(tmp_path / folder, batch=batch, accumulate=accumulate))
        x, y = tokens.make_arrays(12)
        session.step(x, y)
        x[11, 4] = -99
        with pytest.raises(ArtifactError, match=r"value -99 at \[11, 4\], .*10 rows"):
            session.step(x, y)
        many = np.concatenate([tokens.make_arrays(12)[0], x])
        with pytest.raises(ArtifactError, match=r"value -99 at \[23, 4\], .*10 rows"):
            session.predict(many)


def test_an_ensemble(tmp_path: Path) -> None:
    """Of two members with three classes: labels of all three, and no more, are in range."""
    model = ensemble([load_model(tokens.write_model(tmp_path))] * 2)
    built, target = build_step(model), parse_target("llvm")
    executable, _ = compile_with_plan(built, target)
    save_artifact(executable, make_manifest(built, target, []), tmp_path / "step.so")
    session = Session(tmp_path / "step.so")
    session.step(X, np.array([0, 1, 2, 2]))
    with pytest.raises(ArtifactError, match=r"target has the value 3 at \[1\], .* one of 3 classes \(0 to 2\)"):
        session.step(X, np.array([0, 3, 2, 2]))
    with pytest.raises(ArtifactError, match=re.escape(SENTENCE.format(10))):
        session.step(bad(10), Y)


def test_a_rank_of_several(step: Path) -> None:
    def work(ranks: Ranks) -> None:
        parallel = DataParallel(Session(step), ranks)
        parallel.step(X, Y)
        parallel.step(bad(10) if ranks.rank == 1 else X, Y)

    with pytest.raises(ArtifactError, match=re.escape(SENTENCE.format(10))):
        on_ranks(2, work)


def test_libraries_of_before(step: Path, tmp_path: Path) -> None:
    """They load; tokens out of range are NaN there, and class numbers are refused by the same sentence."""
    session = Session(without_ranges(step, tmp_path / "old.so"))
    assert np.isnan(session.step(bad(10), Y)[0])
    with pytest.raises(ArtifactError, match=r"the target has the value 3 at \[0\], .*one of 3 classes \(0 to 2\)\.$"):
        session.step(X, Y * 0 + 3)


def test_the_step_is_the_same_as_before(tmp_path: Path) -> None:
    """Ranges follow from the model, so that checkpoints of before go on: they are not part of the step's digest."""
    built, target = build_step(load_model(tokens.write_model(tmp_path))), parse_target("llvm")
    plain = replace(
        built,
        inputs=tuple(replace(schema, range=None) for schema in built.inputs),
        target=replace(built.target, range=None),
    )
    origin = Origin((("a.py", "0" * 64),), "make")
    now, before = (make_manifest(each, target, [], origin) for each in (built, plain))
    assert now["schema"]["inputs"][0]["range"] == {"low": -10, "high": 9, "kind": "rows"}
    assert now["schema"]["target"]["range"] == {"low": 0, "high": 2, "kind": "classes"}
    assert "range" not in str(before)
    assert now["step"] == before["step"]


def test_run_explain_and_export(convgrad: Command, step: Path, tmp_path: Path) -> None:
    model, data = tokens.write_model(tmp_path), tmp_path / "data.npz"
    x, y = tokens.make_arrays(24)
    np.savez(data, x_train=x, y_train=y)
    folder = tmp_path / "checkpoints"
    assert convgrad("run", step, "--data", data, "--epochs", 1, "--checkpoint-dir", folder).code == 0
    x[17, 2] = 10
    np.savez(data, x_train=x, y_train=y)
    done = convgrad("run", step, "--data", data, "--epochs", 1)
    done.assert_sentence("data.npz: array 'x_train' has the value 10 at [17, 2]", "index of 10 rows (-10 to 9)")
    np.savez(data, x_train=x % 10, y_train=y * 0 - 100)
    done = convgrad("run", step, "--data", data, "--epochs", 1)
    done.assert_sentence("'y_train' has the value -100 at [0]", "one of 3 classes", "build with --ignore-index -100")
    for source in (step, model):
        assert "an index of 10 rows (-10 to 9)" in convgrad("explain", source).out
        assert convgrad("explain", source, "--json").json["ranges"] == {
            "tokens": {"low": -10, "high": 9, "kind": "rows"}
        }
    assert convgrad("profile", step).code == 0


def test_inference_libraries(convgrad: Command, tmp_path: Path) -> None:
    model, path, data = tokens.write_model(tmp_path), tmp_path / "step.so", tmp_path / "data.npz"
    assert convgrad("build", model, "-o", path).code == 0
    x, y = tokens.make_arrays(24)
    np.savez(data, x_train=x, y_train=y)
    folder, library = tmp_path / "checkpoints", tmp_path / "predict.so"
    assert convgrad("run", path, "--data", data, "--epochs", 1, "--checkpoint-dir", folder).code == 0
    done = convgrad("export", path, "--checkpoint", folder, "-o", library, "--model", model, "--inference")
    assert done.code == 0, done.err
    predictor = Session(library)
    with pytest.raises(ArtifactError, match=re.escape(SENTENCE.format(10))):
        predictor.predict(bad(10))
    assert np.isfinite(predictor.predict(X)).all()


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.parametrize("batch", [None, "dynamic"])
def test_models_of_pytorch(tmp_path: Path, suffix: str, batch: str | None) -> None:
    """An embedding with padding, positions, and a mask of the padding."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(10, 4, padding_idx=0), nn.Embedding(5, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            used = (tokens != 0).float().unsqueeze(-1)
            rows = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
            return self.head((rows * used).sum(1) / used.sum(1))

    model, path = Words(), tmp_path / f"words.{suffix}"
    given, free = torch.ones(4, 5, dtype=torch.int64), {"tokens": {0: torch.export.Dim("n", min=1, max=64)}}
    shapes = free if batch else None
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
        torch.onnx.export(model, (given,), path, input_names=["tokens"], dynamic_shapes=shapes, verbose=False)
    else:
        torch.export.save(torch.export.export(model, (given,), dynamic_shapes=shapes), path)
    session = Session(build_tiny(str(path), tmp_path / "step.so", batch))
    x = np.maximum(X, 1).astype("int64")
    np.testing.assert_allclose(session.predict(x), model(torch.from_numpy(x)).detach().numpy(), atol=1e-5)
    x[2, 3] = 10
    with pytest.raises(ArtifactError, match=re.escape(SENTENCE.format(10))):
        session.step(x, Y)
