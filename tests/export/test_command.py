# SPDX-License-Identifier: Apache-2.0
"""`convgrad export`: what was trained predicts the same elsewhere, and what does not fit is refused in a sentence."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import helper, numpy_helper  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from tests import tiny  # noqa: E402
from tests.cli.command import Command  # noqa: E402
from tests.export import models  # noqa: E402
from tvm_convgrad.cli import app  # noqa: E402
from tvm_convgrad.commands.compilation import ModelOptions  # noqa: E402
from tvm_convgrad.commands.export import _defaults  # noqa: E402
from tvm_convgrad.core.errors import ArtifactError  # noqa: E402
from tvm_convgrad.training.export.onnx_file import data_file, export_onnx  # noqa: E402
from tvm_convgrad.training.runtime.checkpoint import Progress, load, save  # noqa: E402
from tvm_convgrad.training.runtime.origin import Origin  # noqa: E402
from tvm_convgrad.training.runtime.session import Session  # noqa: E402

LENGTH = (18 + 1) + 8 + (9 + 1 + 1) + (9 + 1) + (4 + 1)
"""Roundings on the way through `models.network`: two convolutions, batch norm, sum, pool, linear."""


@dataclass(frozen=True)
class Trained:
    """A step, its model, a checkpoint after three steps, and what it predicts then."""

    model: Path
    step: Path
    checkpoint: Path
    session: Session

    @property
    def arguments(self) -> list[object]:
        return ["export", self.step, "--checkpoint", self.checkpoint, "--model", self.model]


def train(folder: Path, proto: onnx.ModelProto, steps: int = 3, **options: object) -> Trained:
    model = folder / "net.onnx"
    onnx.save(proto, model)
    step = models.build(model, folder / "step.so", outputs={"scores": 1.0}, lr=0.1, **options)
    session = Session(step)
    losses = []
    for number in range(steps):
        x, z, y = models.batch_of(number)
        losses.append(session.step((x, z), y)[0])
    progress = Progress(session.artifact.id, "0" * 64, 0, models.BATCH, 0.1, losses=losses)
    return Trained(model, step, save(folder / "checkpoints", progress, session.state), session)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    proto = models.network(models.values(), batch="n", training=True)
    return train(tmp_path_factory.mktemp("trained"), proto, optimizer="adam", batch="dynamic", ema=0.75)


def runtime_scores(path: Path, *inputs: np.ndarray) -> np.ndarray:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (scores,) = session.run(["scores"], dict(zip(("x", "z"), inputs, strict=True)))
    return scores


def check_predictions(path: Path, session: Session) -> None:
    """Predictions of ONNX Runtime and of the session are apart by rounding at most."""
    x, z, _ = models.batch_of(7)
    bound = models.rounding_bound(onnx.load(path), "scores", {"x": x, "z": z}, LENGTH)
    apart = np.abs(runtime_scores(path, x, z) - session.predict((x, z)))
    assert (apart <= bound).all(), (apart, bound)
    assert bound.max() < 1e-3  # it says something: scores are of the order of 1


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_onnx_has_the_trained_state(convgrad: Command, trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "trained.onnx"
    report = convgrad(*trained.arguments, "-o", output, "--json").json
    found, before, state = initializers(output), models.values(), trained.session.state
    assert found.keys() == before.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, state[name], err_msg=name)
        assert not np.array_equal(value, before[name]), name
    assert sorted(report["tensors"]) == sorted(before)
    assert report["steps"] == 3
    check_predictions(output, trained.session)
    assert runtime_scores(output, *models.batch_of(1, samples=3)[:2]).shape == (3, models.CLASSES)


def test_averages(convgrad: Command, trained: Trained, tmp_path: Path, tiny_step: Path) -> None:
    output = tmp_path / "averages.onnx"
    assert convgrad(*trained.arguments, "-o", output, "--averages").code == 0
    found, state, averages = initializers(output), trained.session.state, trained.session.artifact.averages
    for name, value in found.items():
        np.testing.assert_array_equal(value, state[averages.get(name, name)], err_msg=name)
    assert any(not np.array_equal(found[name], state[name]) for name in averages)
    with trained.session.averaged():
        check_predictions(output, trained.session)
    progress = Progress(Session(tiny_step).artifact.id, "0" * 64, 0, 8, 0.1, losses=[1.0])
    checkpoint = save(tmp_path, progress, Session(tiny_step).state)
    arguments = ["export", tiny_step, "--checkpoint", checkpoint, "-o", tmp_path / "x.safetensors", "--averages"]
    convgrad(*arguments).assert_sentence("the step keeps no averages of its parameters; build it with --ema")


def test_all_else_of_the_file_stays(convgrad: Command, trained: Trained, tmp_path: Path) -> None:
    """Nodes, opset, other outputs and metadata are the file's, except for the mode of its batch norm."""
    output = tmp_path / "trained.onnx"
    assert convgrad(*trained.arguments, "-o", output).code == 0
    before, after = onnx.load(trained.model), onnx.load(output)
    norm = next(node for node in before.graph.node if node.op_type == "BatchNormalization")
    del norm.output[1:]
    norm.attribute.remove(next(each for each in norm.attribute if each.name == "training_mode"))
    for proto in (before, after):
        del proto.graph.initializer[:]
    assert after == before


def test_external_data(convgrad: Command, tmp_path: Path) -> None:
    """A model whose tensors lie in another file, of which a part is trained."""
    done = train(tmp_path, models.network(models.values()), trained=("fc",), steps=1, bn="frozen")
    model = tmp_path / "apart.onnx"
    onnx.save(onnx.load(done.model), model, save_as_external_data=True, location="tensors.bin", size_threshold=0)
    step = models.build(model, tmp_path / "apart.so", outputs={"scores": 1.0}, trained=("fc",), lr=0.1, bn="frozen")
    session = Session(step)
    session.state = done.session.state
    progress = Progress(session.artifact.id, "0" * 64, 0, models.BATCH, 0.1, losses=[1.0])
    checkpoint = save(tmp_path / "apart", progress, session.state)
    output = tmp_path / "trained.onnx"
    beside = tmp_path / "trained.onnx.data"
    arguments = ["export", step, "--checkpoint", checkpoint, "--model", model, "-o", output]
    beside.write_text("another's")
    report = convgrad(*arguments, "--json").json
    assert sorted(report["tensors"]) == ["fc.bias", "fc.weight"]
    assert beside.read_text() == "another's", "all tensors are small"
    check_predictions(output, session)

    tensors = tmp_path / "tensors.bin"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
    convgrad(*arguments, "--force").assert_sentence("tensors.bin: not the file that", "build the step again")
    tensors.unlink()
    convgrad(*arguments, "--force").assert_sentence("tensors.bin: cannot be read")
    check_predictions(output, session)  # what was there is whole


def test_tensors_can_be_read_by_whoever_can_read_their_model(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.ones((32, 32), "float32"), "w")  # small ones stay in the model's file
    inputs, outputs = (
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (2, 32))] for name in ("x", "y")
    )
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    model, output = tmp_path / "apart.onnx", tmp_path / "trained.onnx"
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "net", inputs, outputs, [value]))
    onnx.save(proto, model, save_as_external_data=True, location="tensors.bin")
    export_onnx(model, Origin.of(str(model)), {"w": np.zeros((32, 32), "float32")}, output)
    with pytest.raises(
        ArtifactError, match=r"trained\.onnx\.data: exists already; choose another name, or add --force"
    ):
        export_onnx(model, Origin.of(str(model)), {"w": np.ones((32, 32), "float32")}, output, replace=False)
    assert not numpy_helper.to_array(onnx.load(output).graph.initializer[0]).any(), "the first one's zeros"
    assert data_file(output).stat().st_mode == output.stat().st_mode


def test_safetensors(convgrad: Command, trained: Trained, tmp_path: Path) -> None:
    numpy_format = pytest.importorskip("safetensors.numpy")
    output = tmp_path / "trained.safetensors"
    report = convgrad(*trained.arguments, "-o", output, "--json").json
    found, state = numpy_format.load_file(output), trained.session.state
    assert found.pop("norm.num_batches_tracked") == 3
    assert any("num_batches_tracked of 1 batch norms is 3" in note for note in report["notes"])
    assert found.keys() == models.values().keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, state[name], err_msg=name)
    whole = load(trained.checkpoint).progress
    several = replace(whole, batch_size=2 * whole.batch_size, micro_batches=2)  # of `run --accumulate 2`
    divided = save(tmp_path / "divided", several, state)
    convgrad(*trained.arguments[:3], divided, *trained.arguments[4:], "-o", output, "--force")
    assert numpy_format.load_file(output)["norm.num_batches_tracked"] == 6
    alone = convgrad("export", trained.step, "--checkpoint", trained.checkpoint, "-o", output, "--force", "--json").json
    assert any("give --model" in note for note in alone["notes"])


def test_the_newest_checkpoint_of_a_folder(convgrad: Command, trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained.checkpoint.parent, folder)
    (folder / "step-0000000009.ckpt").write_bytes(b"cut")
    arguments = ["export", trained.step, "--checkpoint", folder, "--model", trained.model, "--json"]
    found = convgrad(*arguments, "-o", tmp_path / "a.onnx")
    assert found.json["checkpoint"].endswith("step-0000000003.ckpt")
    assert "step-0000000009.ckpt" in found.err
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments[3] = empty
    convgrad(*arguments, "-o", tmp_path / "b.onnx").assert_sentence("there is no checkpoint")


@pytest.fixture(scope="module")
def predictor(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An inference library of the trained step."""
    output = tmp_path_factory.mktemp("predict") / "predict.so"
    done = CliRunner().invoke(app, [str(each) for each in (*trained.arguments, "--inference", "-o", output)])
    assert done.exit_code == 0, done.output
    return output


def test_an_inference_library_predicts_the_same(trained: Trained, predictor: Path) -> None:
    session = Session(predictor)
    assert session.artifact.options["dtype"] == "float32"
    assert (session.state, session.batch) == ({}, None)
    for samples in (1, 3):
        x, z, _ = models.batch_of(7, samples)
        inputs = {"x": x, "z": z}
        bound = models.rounding_bound(models.network(trained.session.state, "n"), "scores", inputs, LENGTH)
        assert (np.abs(session.predict((x, z)) - trained.session.predict((x, z))) <= bound).all()
        assert bound.max() < 1e-3
    session.reset()
    assert session.state == {}


def test_an_inference_library_has_no_step(convgrad: Command, trained: Trained, predictor: Path, tmp_path: Path) -> None:
    assert predictor.stat().st_size < trained.step.stat().st_size / 2
    shown = convgrad("explain", predictor, "--json").json
    assert shown["gradients"] == []
    assert len(shown["forward"]) == 2
    assert all("bias" in entry["fused"] for entry in shown["forward"])  # the batch norm became one
    assert convgrad("explain", predictor).code == 0
    session = Session(predictor)
    x, z, y = models.batch_of(0)
    calls = (
        lambda: session.step((x, z), y),
        lambda: session.gradients((x, z), y),
        lambda: session.evaluate((x, z), y),
        lambda: session.apply(y),
    )
    for call in calls:
        with pytest.raises(ArtifactError, match="an inference library, which has predict alone"):
            call()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    for arguments in (
        ("run", predictor, "--data", tmp_path / "data.npz", "--epochs", 1),
        ("profile", predictor),
        ("export", predictor, *trained.arguments[2:], "-o", tmp_path / "trained.onnx"),
    ):
        convgrad(*arguments).assert_sentence("predict.so: an inference library")


def test_options_of_inference(convgrad: Command, trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "predict.so"
    arguments = [*trained.arguments, "-o", output, "--inference", "--batch", 2]
    assert convgrad(*arguments, "--target", "llvm").code == 0
    assert Session(output).batch == 2
    convgrad(*arguments).assert_sentence("predict.so: exists already")
    without = [*trained.arguments[:4], "-o", tmp_path / "other.so", "--inference"]
    convgrad(*without).assert_sentence("give it by --model")
    assert convgrad(*trained.arguments, "-o", tmp_path / "a.onnx", "--inference").code == 2
    assert convgrad(*trained.arguments, "-o", tmp_path / "a.onnx", "--batch", 2).code == 2
    assert convgrad(*trained.arguments, "-o", tmp_path / "a.so").code == 2


def test_what_is_there_is_not_overwritten(convgrad: Command, trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "trained.onnx"
    output.write_text("mine")
    convgrad(*trained.arguments, "-o", output).assert_sentence("trained.onnx: exists already", "--force")
    assert output.read_text() == "mine"
    assert convgrad(*trained.arguments, "-o", output, "--force").code == 0
    check_predictions(output, trained.session)


def test_what_does_not_fit_is_refused(convgrad: Command, trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "trained.onnx"
    changed = tmp_path / "changed.onnx"
    onnx.save(models.network(models.values(1), batch="n", training=True), changed)
    arguments = trained.arguments
    convgrad(*arguments[:4], "--model", changed, "-o", output).assert_sentence("changed.onnx: not the file that")
    convgrad(*arguments[:4], "-o", output).assert_sentence("give it by --model")
    convgrad(*arguments[:4], "--model", tmp_path / "none.onnx", "-o", output).assert_sentence("none.onnx: cannot be")
    convgrad(*arguments, "-o", tmp_path / "trained.pt").assert_sentence("the suffix '.pt' is not one of .onnx")
    convgrad(*arguments, "-o", tmp_path / "no" / "trained.onnx").assert_sentence("make it first")
    convgrad(*arguments, "-o", "/proc/trained.onnx").assert_sentence("/proc/trained.onnx: cannot be written")
    convgrad(*arguments, "-o", tmp_path).assert_sentence("the suffix '' is not one of")
    foreign = save(tmp_path, Progress("f" * 64, "0" * 64, 0, 4, 0.1, losses=[1.0]), trained.session.state)
    convgrad("export", trained.step, "--checkpoint", foreign, *arguments[4:], "-o", output).assert_sentence(
        "a checkpoint of another artifact (ffffffffffff…)"
    )
    missing = tmp_path / "missing.ckpt"
    convgrad("export", trained.step, "--checkpoint", missing, *arguments[4:], "-o", output).assert_sentence(
        "missing.ckpt: no such file"
    )
    convgrad("export", missing, *arguments[2:], "-o", output).assert_sentence("missing.ckpt: no such file")
    assert not output.exists()


def test_a_step_of_a_python_function_is_no_onnx_model(
    convgrad: Command, tiny_model: str, tiny_step: Path, tmp_path: Path
) -> None:
    session = Session(tiny_step)
    checkpoint = save(tmp_path, Progress(session.artifact.id, "0" * 64, 0, 8, 0.1, losses=[1.0]), session.state)
    arguments = ["export", tiny_step, "--checkpoint", checkpoint, "-o", tmp_path / "t.onnx"]
    convgrad(*arguments, "--model", tiny_model).assert_sentence("does not record the model file that it was built from")


def test_a_step_that_the_command_built(convgrad: Command, tiny_model: str, tiny_data: Path, tmp_path: Path) -> None:
    """Of a Python function: `build` records the file, and the model is checked by file and function."""
    step, checkpoints = tmp_path / "step.so", tmp_path / "checkpoints"
    report = convgrad("build", tiny_model, "-o", step, "--accumulate", 2, "--json").json
    assert report["model"]["files"][0][0] == "net.py"
    assert report["model"]["function"] == "make"
    run = ("run", step, "--data", tiny_data, "--epochs", 1, "--checkpoint-dir", checkpoints)
    assert convgrad(*run).code == 0
    output, arguments = tmp_path / "predict.so", ["export", step, "--checkpoint", checkpoints, "--inference"]
    assert convgrad(*arguments, "--model", tiny_model, "-o", output).code == 0
    assert Session(output).batch == tiny.BATCH  # of a micro-batch
    other = tiny_model.replace(":make", ":other")
    convgrad(*arguments, "--model", other, "-o", output, "--force").assert_sentence("built of the function 'make'")
    convgrad(*arguments[:4], "--model", tiny_model, "-o", tmp_path / "t.onnx").assert_sentence("not from an ONNX file")


def test_the_first_of_several_outputs_predicts(convgrad: Command, tmp_path: Path) -> None:
    """Whatever the order of their names: in the step, in an equal build that is taken, and in an inference library."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(4, 3)).astype("f4") for name in "az"}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", f"{name}_weight"], [name]) for name in weights],
        "heads",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [5, 4])],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [5, len(w[0])]) for name, w in weights.items()],
        [numpy_helper.from_array(w, f"{name}_weight") for name, w in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    x = rng.normal(size=(5, 4)).astype("f4")
    step, library = tmp_path / "step.so", tmp_path / "predict.so"
    for first, second in (("z", "a"), ("a", "z")):
        options = ("--loss", "mse", "--model-output", first, "--model-output", second, "--json")
        for _ in range(2):
            built = convgrad("build", tmp_path / "m.onnx", "-o", step, *options).json
        session = Session(step)
        np.testing.assert_allclose(session.predict(x), x @ weights[first], rtol=1e-5)
        file = save(tmp_path / first, Progress(built["id"], "0" * 64, 0, 5, 0.1, losses=[1.0]), session.state)
        arguments = ("export", step, "--checkpoint", file, "--model", tmp_path / "m.onnx", "--inference", "--force")
        assert convgrad(*arguments, "-o", library).code == 0
        np.testing.assert_array_equal(Session(library).predict(x), session.predict(x))
    manifest = session.artifact.manifest
    options = {name: value for name, value in manifest["options"].items() if name != "predicted"}
    before = replace(session.artifact, manifest={**manifest, "options": options})
    with pytest.raises(ArtifactError, match="which of its outputs a, z is the prediction; build it again"):
        _defaults(before, ModelOptions(str(tmp_path / "m.onnx")))
