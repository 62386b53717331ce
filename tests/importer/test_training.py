# SPDX-License-Identifier: Apache-2.0
"""Relay programs as training steps: gradient graphs, steps of SGD, and models without gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.command import Command
from tests.importer import corpus
from tests.importer.test_programs import HEADER, main_of, params_bytes
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_step
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.model.program import TrainingProgram
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.build import build_step

RNG = np.random.default_rng(5)
W = RNG.standard_normal((2, 3)).astype("float32")
X = RNG.standard_normal((4, 3)).astype("float32")
Y = np.eye(2, dtype="float32")[[0, 1, 1, 0]]


def program(results: str) -> str:
    return f"""{HEADER}def @main(%data: Tensor[(4, 3), float32], %w: Tensor[(2, 3), float32],
        %label: Tensor[(4, 2), float32]) {{
      %0 = nn.dense(%data, %w, units=2);
      %1 = nn.log_softmax(%0);
      %2 = nn.cross_entropy_with_logits(%1, %label);
      %3 = subtract(exp(%1), %label);
      %4 = multiply(0.25f, %3);
      %5 = transpose(%4, axes=None);
      %6 = transpose(%data, axes=None);
      %7 = nn.dense(%5, %6, units=3);
      {results}
    }}"""


def write(folder: Path, results: str) -> Path:
    path = folder / "net.relay"
    path.write_text(program(results))
    path.with_suffix(".params").write_bytes(params_bytes(w=W))
    return path


def session_of(path: Path, folder: Path, **options: Any) -> Session:
    step = build_step(load_model(path), **options)
    target = parse_target("llvm")
    save_artifact(compile_step(step, target), make_manifest(step, target, []), folder / "step.so")
    return Session(folder / "step.so")


def expected(rate: float) -> tuple[float, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    logits = X.astype("float64") @ W.T.astype("float64")
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    gradient = ((np.exp(logs) - Y) / 4).T @ X
    return float(-(logs * Y).sum() / 4), logs, W - rate * gradient


@pytest.mark.parametrize(
    ("results", "options", "rate"),
    [
        ("(%2, %7)", {}, 0.1),
        ("(%2, %7)", {"lr": 0.3}, 0.3),
        ("(%2, subtract(%w, multiply(0.5f, %7)))", {}, 0.5),
        ("(%2, subtract(%w, multiply(%7, 0.5f)))", {"lr": 0.2}, 0.2),
        ("(%2, (zeros_like(%data), %7, zeros_like(%label)))", {}, 0.1),
    ],
)
def test_a_step_of_the_program_itself(tmp_path: Path, results: str, options: dict[str, Any], rate: float) -> None:
    session = session_of(write(tmp_path, results), tmp_path, **options)
    loss, prediction = session.step(X, Y)
    wanted = expected(rate)
    assert loss == pytest.approx(wanted[0], rel=1e-5)
    np.testing.assert_allclose(prediction, wanted[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.state["w"], wanted[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.predict(X)[0].sum(), session.predict(X[:1])[0].sum(), rtol=1e-6)


def test_other_optimizers_take_the_gradients(tmp_path: Path) -> None:
    step = build_step(load_model(write(tmp_path, "(%2, subtract(%w, multiply(0.5f, %7)))")), optimizer="adam")
    assert step.options["lr"] == 1e-3
    assert [schema.name for schema in step.state] == ["w", "w.exp_avg", "w.exp_avg_sq", "step"]


def test_what_is_no_training_program_of_a_known_form(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no evident selection"):
        load_model(write(tmp_path, "(%2, %3, %3)"))
    with pytest.raises(UnsupportedError, match="differentiated already"):
        build_step(load_model(write(tmp_path, "(%2, %7)")), loss_scale=8.0)
    with pytest.raises(ModelError, match="batch"):
        load_model(write(tmp_path, "(%2, %7)"), batch=8)


def test_a_model_without_gradients(tmp_path: Path) -> None:
    path = tmp_path / "net.relay"
    path.write_text(program("%0").replace("(4, 3)", "(?, 3)").replace(",\n        %label: Tensor[(4, 2), float32]", ""))
    body = path.read_text().split("%1 =")[0] + "%0\n}"
    path.write_text(body)
    path.with_suffix(".params").write_bytes(params_bytes(w=W))
    model = load_model(path, batch=5)
    assert isinstance(model, Model)
    assert [schema.describe() for schema in model.inputs] == ["data: float32[5, 3]"]
    np.testing.assert_array_equal(model.parameters["w"], W)


def test_some_weights_without_a_value(tmp_path: Path) -> None:
    path = tmp_path / "net.relay"
    types = "%x: Tensor[(4, 3), float32], %w: Tensor[(2, 3), float32], %v: Tensor[(5, 2), float32]"
    path.write_text(main_of(types, "nn.dense(nn.dense(%x, %w, units=2), %v, units=5)"))
    path.with_suffix(".params").write_bytes(params_bytes(w=W))
    with pytest.raises(ModelError, match=r"different extents \(x 4, v 5\).* the values of all weights"):
        load_model(path)
    path.with_suffix(".params").unlink()
    model = load_model(path)
    assert isinstance(model, Model)
    assert set(model.parameters) == {"w", "v"}  # initialised


def test_the_command_import(tmp_path: Path, convgrad: Command) -> None:
    path = write(tmp_path, "%0")
    report = convgrad("import", path, "-o", tmp_path / "out.json", "--json").json
    assert report["operators"] == {"relax.permute_dims": 1, "relax.matmul": 1}
    with np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_array_equal(archive["w"], W)
    assert load_model(tmp_path / "out.json").inputs[0].name == "data"
    path.write_text("def @main(%x: float32) { vision.nms(%x) }\n")
    convgrad("import", path, "-o", tmp_path / "out.json").assert_sentence("1 vision.nms", "docs/RELAY_IMPORT.md")
    write(tmp_path, "(%2, %7)")
    done = convgrad("build", path, "--params", tmp_path / "none.params", "-o", tmp_path / "step.so")
    done.assert_sentence("none.params does not exist; check the path of the parameters (--params).")
    done = convgrad("build", path, "-o", tmp_path / "step.so", "--lr", "0.25", "--json").json
    assert done["options"]["loss"] == "program"
    assert Session(tmp_path / "step.so").step(X, Y)[0] == pytest.approx(expected(0.25)[0], rel=1e-5)


@pytest.mark.skipif(not corpus.entries(), reason=corpus.ABSENT)
def test_networks_with_gradients_are_recognised() -> None:
    for name, count, rate in (("resnet20_cifar_sgd", 64, 0.05), ("variant/convnet_bwd_raw_lets", 7, None)):
        (entry,) = [entry for entry in corpus.entries() if entry.name == name]
        path, params = entry.path("json"), entry.path("params_file")
        assert path is not None
        model = load_model(path, params=params)
        assert isinstance(model, TrainingProgram)
        assert len(model.parameters) == count
        assert model.rate is None if rate is None else model.rate == pytest.approx(rate)
        assert len(build_step(model).gradients) > 4


def test_halves_of_a_program_s_step(tmp_path: Path) -> None:
    """Its own gradients, in the buffer and applied; the same bits as the whole step's."""
    session = session_of(write(tmp_path, "(%2, %7)"), tmp_path, split=True, momentum=0.9)
    whole = [session.step(X, Y, 0.1)[0] for _ in range(2)]
    state = session.state
    session.reset()
    first = session.gradients(X, Y)
    (found,) = session.artifact.flat.views(first.flat).values()
    loss, _, moved = expected(0.1)
    np.testing.assert_allclose(W - 0.1 * found, moved, rtol=0, atol=1e-6)
    assert session.evaluate(X, Y)[0] == first.loss == pytest.approx(loss, rel=1e-6)
    session.apply(first.flat, 0.1)
    second = session.gradients(X, Y)
    session.apply(second.flat, 0.1)
    assert [first.loss, second.loss] == whole
    for name, value in session.state.items():
        np.testing.assert_array_equal(value, state[name])
