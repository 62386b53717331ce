# SPDX-License-Identifier: Apache-2.0
"""What is wrong is said in one sentence, with exit code 1; wrong usage has exit code 2."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests import tiny
from tests.artifact.test_artifact import resealed
from tests.cli.command import Command, finish, start
from tvm_convgrad.commands import options
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.report.tables import print_json
from tvm_convgrad.training.runtime.artifact import versions
from tvm_convgrad.training.step.layout import KERNEL_LAYOUTS
from tvm_convgrad.training.step.losses.table import LOSS_FUNCTIONS
from tvm_convgrad.training.step.names import OPTIMIZER_DEFAULTS
from tvm_convgrad.training.step.optimizers import UPDATE_RULES


@pytest.fixture
def onnx_model(tmp_path: Path) -> Path:
    """A convolution and a sum over its pictures."""
    weight = np.random.default_rng(0).normal(size=(3, 1, 3, 3)).astype("float32")
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3]),
            helper.make_node("GlobalAveragePool", ["y"], ["m"]),
            helper.make_node("Flatten", ["m"], ["z"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 1, 6, 6])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 3])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_build_from_onnx(convgrad: Command, onnx_model: Path, tmp_path: Path) -> None:
    """The file that the tests below spoil is good."""
    assert convgrad("build", onnx_model, "-o", tmp_path / "s.so", "--json").json["gradients"]


def test_build_truncated_onnx(convgrad: Command, onnx_model: Path, tmp_path: Path) -> None:
    content = onnx_model.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        onnx_model.write_bytes(content[:length])
        convgrad("build", onnx_model, "-o", tmp_path / "s.so").assert_sentence("net.onnx")
    assert not (tmp_path / "s.so").exists()


def test_build_unsupported_operator(convgrad: Command, onnx_model: Path, tmp_path: Path) -> None:
    model = onnx.load(onnx_model)
    model.graph.node[1].op_type = "HardSwishOfTheFuture"
    onnx.save(model, onnx_model)
    for command in (("build", onnx_model, "-o", tmp_path / "s.so"), ("explain", onnx_model)):
        convgrad(*command).assert_sentence("HardSwishOfTheFuture")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["build", "missing.onnx", "-o", "s.so"], ["missing.onnx", "does not exist"]),
        (["build", "missing.txt", "-o", "s.so"], [".txt", ".onnx"]),
        (["build", "missing.onnx", "-o", "no/folder/s.so"], ["no/folder", "does not exist"]),
        (["build", "missing.onnx", "-o", "."], ["this is a folder"]),
        (["build", "missing.onnx", "-o", "/"], ["/: this is a folder"]),
        (["run", "missing.so", "--data", "d.npz", "--epochs", "1", "--save-state", "."], ["this is a folder"]),
        (["run", "missing.so", "--data", "d.npz", "--epochs", "1", "--plot", "/"], ["this is a folder"]),
        (["build", "MODEL", "-o", "s.so", "--offload", "cutlass"], ["cutlass", "the target is llvm", "cuda:sm_90"]),
        (["build", "MODEL", "-o", "s.so", "--offload", "cudnn"], ["cudnn", "the target is llvm", "cuda:sm_90"]),
        pytest.param(
            ["build", "MODEL", "-o", "s.so", "--target", "cuda"],
            ["GPU", "cuda:sm_90"],
            marks=pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU"),
        ),
        (["bench", "--suite", "vgg16", "--target", "cuda:sm_10"], ["GPU"]),
        (["bench", "--problem", "mb1ic1ih4oc1oh4kh3ph1", "--json", "."], ["this is a folder"]),
        (["bench", "--problem", "mb1ic1ih4oc1oh4kh3ph1", "--markdown", "."], ["this is a folder"]),
        (["bundle", "missing.so", "-o", "a.zip"], ["a.zip", "ends in .tar"]),
        (["explain", "missing.so"], ["missing.so", "no such file"]),
        (["explain", "missing.onnx"], ["missing.onnx", "does not exist"]),
        (["run", "missing.so", "--data", "d.npz", "--epochs", "1"], ["missing.so", "convgrad build"]),
        (["verify", "--problem", "rubbish"], ["rubbish", "not understood"]),
        (["verify", "--problem", "mb1ic3ih2oc4kh5"], ["kernel 5"]),
        (["verify", "--problem", "mb{n}ic3ih8oc4kh3"], ["static extents"]),
    ],
    ids=lambda value: " ".join(value) if value and len(value) > 2 else "",
)
def test_sentences(
    convgrad: Command,
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    convgrad(*(tiny_model if argument == "MODEL" else argument for argument in arguments)).assert_sentence(*parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "explain"])
def test_bad_artifacts(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path, command: str) -> None:
    bad, content = tmp_path / "bad.so", tiny_step.read_bytes()
    rest = ["--data", tiny_data, "--epochs", 1] if command == "run" else []
    library = Path(np.__file__).parent / "_core"
    foreign = next(library.glob("_multiarray_umath*.so"))
    for damaged in (b"", content[:1000], content[:-1], content[:5000] + b"?" + content[5001:], foreign.read_bytes()):
        bad.write_bytes(damaged)
        convgrad(command, bad, *rest).assert_sentence("bad.so", "convgrad build")
    resealed(tiny_step, bad, versions=versions() | {"tvm": "0.25.1"})
    convgrad(command, bad, *rest).assert_sentence("Apache TVM 0.25.1", "build the step again")


def test_files_of_other_content(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    """A sentence that names the file, and no advice of a library to load it unsafely."""
    text, module = tmp_path / "text.npz", tmp_path / "list.json"
    text.write_text("hello", encoding="utf-8")
    module.write_text("[1]", encoding="utf-8")
    done = convgrad("run", tiny_step, "--data", text, "--epochs", 1)
    done.assert_sentence("text.npz: not an .npz archive", "no zip archive")
    assert "unsafe" not in done.err
    convgrad("build", module, "-o", tmp_path / "s.so").assert_sentence("list.json is not Relax JSON")
    module.write_text("", encoding="utf-8")
    convgrad("import", module, "-o", tmp_path / "a.json").assert_sentence("no function main", "no function at all")


def test_build_with_numbers_of_other_channels(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    done = convgrad("build", tiny_model, "-o", tmp_path / "s.so", "--mean", "0.5,0.4,0.3")
    done.assert_sentence("--mean has 3 numbers", "no input of", "3 channels (x: float32[8, 1, 6, 6])", "one for all")


def test_run_wrong_data(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    x, y = tiny.make_arrays(20, 0)
    data = tmp_path / "d.npz"
    arguments = ["run", tiny_step, "--data", data, "--epochs", 1]
    convgrad(*arguments).assert_sentence("no such data file")
    np.savez(data, x_train=x[..., :5], y_train=y)
    convgrad(*arguments).assert_sentence("extent 5 on axis 3", "'x' of the model takes 6")
    np.savez(data, x_train=x[:7], y_train=y[:7])
    convgrad(*arguments).assert_sentence("7 training samples do not fill one batch of 8")
    np.savez(data, x_train=x, y_train=y)
    convgrad(*arguments, "--batch-size", 4).assert_sentence("--batch-size 4 contradicts")
    done = convgrad(*arguments, "--augment", "flip", "--fit", "pad", "--mean", "0.5")
    done.assert_sentence("--mean, --fit, --augment: for images in folders", "data are arrays")
    convgrad(*arguments, "--plot", tmp_path / "no" / "p.png").assert_sentence("does not exist")
    convgrad(*arguments, "--test-data", data).assert_sentence("no test arrays")
    np.savez(data, x_train=x, y_train=y, x_test=x[:0], y_test=y[:0])
    convgrad(*arguments).assert_sentence("the test arrays have no samples")
    np.savez(data, x_train=x[:0], y_train=y[:0])
    convgrad(*arguments).assert_sentence("the train arrays have no samples")


def test_an_error_in_the_evaluation_leaves_the_state_and_the_plot(
    convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ArtifactError("the evaluation fails")

    monkeypatch.setattr("tvm_convgrad.training.runtime.validation.validate", fail)
    state, plot = tmp_path / "state.npz", tmp_path / "loss.png"
    done = convgrad(
        "run", tiny_step, "--data", tiny_data, "--epochs", 1, "--save-state", state, "--plot", plot, "--json"
    )
    done.assert_sentence("the evaluation fails")
    with np.load(state) as arrays:
        assert "w" in arrays.files
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_require_accuracy(convgrad: Command, tiny_step: Path, tiny_data: Path) -> None:
    done = convgrad("run", tiny_step, "--data", tiny_data, "--epochs", 1, "--require-accuracy", 1)
    assert done.code == 1
    assert "not above the 1 of --require-accuracy" in done.err


def test_require_accuracy_without_test_arrays_fails_before_training(
    convgrad: Command, tiny_step: Path, tmp_path: Path
) -> None:
    """Nothing is trained or written, not even a checkpoint."""
    x, y = tiny.make_arrays(20, 0)
    data, folder = tmp_path / "d.npz", tmp_path / "checkpoints"
    np.savez(data, x_train=x, y_train=y)
    arguments = ["--data", data, "--epochs", 1, "--require-accuracy", 0.5, "--checkpoint-dir", folder]
    convgrad("run", tiny_step, *arguments).assert_sentence("--require-accuracy needs test arrays x_test and y_test")
    assert not folder.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["build"],
        ["build", "m.onnx", "-o", "s.so", "--batch", "many"],
        ["build", "m.onnx", "-o", "s.so", "--offload", "rubbish"],
        ["run", "s.so", "--data", "d.npz", "--epochs", "0"],
        *(["run", "s.so", "--data", "d.npz", "--epochs", "1", "--lr", lr] for lr in ("inf", "nan", "1e39", "-1")),
        *(["build", "m.onnx", "-o", "s.so", "--lr", lr] for lr in ("inf", "nan", "1e39", "-1")),
        ["run", "s.so", "--data", "d.npz", "--epochs", "1", "--resume"],
        ["verify"],
        ["verify", "--all", "--direction", "sideways"],
        ["verify", "--all", "--impl", "rubbish"],
        ["build-runtime", "rubbish"],
        ["explain", "s.so", "--batch", "3"],
        ["explain", "s.so", "--target", "native"],
        ["explain", "s.so", "--no-tuned", "--dtype", "float16"],
        ["verify", "--fuzz", "1", "--impl", "onednn"],
        ["env", "--rubbish"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(convgrad: Command, arguments: list[str]) -> None:
    done = convgrad(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "Usage" in done.err
    assert "Traceback" not in done.err


BUILD, EXPLAIN = ["build", "missing.onnx", "-o", "s.so"], ["explain", "missing.onnx"]
TUNE, STEP = ["tune", "missing.onnx"], ["bench", "--step", "missing.onnx"]


@pytest.mark.parametrize(
    ("command", "option", "value", "listed"),
    [
        *((command, "--loss", "hinge", options.LOSSES) for command in (BUILD, EXPLAIN, TUNE, STEP)),
        *((command, "--optimizer", "lion", options.OPTIMIZERS) for command in (BUILD, STEP)),
        *((command, "--dtype", "int8", options.DTYPES) for command in (BUILD, EXPLAIN, TUNE, STEP)),
        *((command, "--layout", "NCWH", options.LAYOUTS) for command in (BUILD, EXPLAIN, TUNE, STEP)),
        *((command, "--results", "half", options.RESULTS) for command in (BUILD, EXPLAIN, TUNE)),
        *((command, "--offload", "mkl", ("onednn", "cudnn", "cutlass")) for command in (BUILD, EXPLAIN, TUNE)),
        *((command, "--target", "rubbish", ("llvm", "native")) for command in (BUILD, EXPLAIN, TUNE, STEP)),
        (["verify", "--all"], "--target", "rubbish", ("llvm", "native")),
        (BUILD, "--target", '{"kind": "llvm", "mcpu": "haswel"}', ("LLVM has no CPU 'haswel'", "haswell")),
        (["verify", "--all"], "--direction", "sideways", ("forward", "wgrad", "dgrad")),
        (["verify", "--all"], "--impl", "mkl", ("onednn", "cudnn", "cutlass")),
        (STEP, "--impl", "mkl", ("kernel", "onednn", "cudnn", "cutlass")),
        (BUILD, "--bn", "off", options.BATCH_NORMS),
        *((BUILD, "--lr", lr, ("is not a finite float32 number",)) for lr in ("inf", "1e+39")),
        *((BUILD, option, "inf", ("float32",)) for option in ("--weight-decay", "--loss-scale")),
        (BUILD, "--dropout", "0.5", options.DROPOUTS),
        (BUILD, "--batch", "some", ("dynamic",)),
        (BUILD, "--model-output", "logits=much", ("NAME=WEIGHT",)),
        (BUILD, "--model-output", "logits=-1", ("NAME=WEIGHT",)),
        (BUILD, "--model-output", "=1", ("NAME=WEIGHT",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_choices_are_checked_before_the_model_is_read(
    convgrad: Command, command: list[str], option: str, value: str, listed: tuple[str, ...]
) -> None:
    done = convgrad(*command, option, value)
    assert (done.code, done.out) == (2, "")
    said = " ".join(done.err.replace("│", " ").split())
    for part in (option, value, *listed):
        assert part in said, (part, said)
    assert "missing.onnx" not in said


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--optimizer", "adam", "--momentum", "0.9"], "adam has no setting 'momentum'"),
        (["--optimizer", "sgd", "--nesterov"], "nesterov needs a momentum above 0"),
        (["--optimizer", "adam", "--betas", "0.9", "1.0"], "two betas in [0, 1)"),
        (["--loss", "mse", "--ignore-index", "1"], "mse has no setting 'ignore_index' (given 1); it has none."),
        (["--clip-norm", "1", "--clip-value", "2"], "clip_norm and clip_value are both given"),
        (["--clip-value", "0"], "clip_value must be a positive number, but is 0.0"),
        (["--class-weights", "1,x"], "give numbers with commas between them"),
        (["--label-smoothing", "0.1", "--loss", "nll"], "nll has no setting 'label_smoothing'"),
        (["--model-output", "a", "--model-output", "a=2"], "--model-output a is given twice"),
        (["--ignore-index", str(2**63)], f"ignore_index must be an int64 number, but is {2**63}"),
        (["--train", ""], "--train names no parameter"),
        (["-o", "step"], "--output step: give a name that ends with .so"),
    ],
)
def test_settings_are_checked_before_the_model_is_read(convgrad: Command, arguments: list[str], part: str) -> None:
    done = convgrad(*BUILD, *arguments)
    assert (done.code, done.out) == (2, "")
    assert part in " ".join(done.err.replace("│", " ").split())


def test_choices_are_those_of_the_library() -> None:
    assert (*LOSS_FUNCTIONS, "model") == options.LOSSES
    assert tuple(UPDATE_RULES) == tuple(OPTIMIZER_DEFAULTS) == options.OPTIMIZERS
    assert ("NCHW", *KERNEL_LAYOUTS) == options.LAYOUTS


FUNCTIONS = """
from tvm import relax

def asserts(): assert False
def leaves(): raise SystemExit(0)

def function(body, *shapes):
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(body(builder, *params))
        builder.emit_func_output(output)
    return builder.get()

def mismatch(): return function(lambda b, x, w: relax.op.matmul(x, w), (4, 8), (7, 3))
def scalar(): return function(lambda b, x, w: relax.op.mean(relax.op.matmul(x, w)), (4, 8), (8, 3))
def vector(): return function(lambda b, x, w: relax.op.mean(relax.op.matmul(x, w), 1), (4, 8), (8, 3))
def no_batch(): return function(lambda b, x, w: relax.op.matmul(x, w), (8,), (8, 3))
def classes(): return function(lambda b, x, w: relax.op.argmax(relax.op.matmul(x, w), 1), (4, 8), (8, 3))
def no_gradient(): return function(lambda b, x, w: relax.op.cumprod(relax.op.matmul(x, w), 0), (4, 8), (8, 3))
def several(): return function(lambda b, x, w: relax.Tuple([x, w]), (4, 8), (4, 8))
"""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("asserts", ["AssertionError without a message (functions.py, line 4)"]),
        ("leaves", ["SystemExit", "line 5"]),
        ("mismatch", ["ValueError: Matmul requires", "dimensions of 8 and 7 are not equal"]),
        ("scalar", ["its predictions are a scalar"]),
        ("vector", ["cross_entropy needs predictions of the shape [batch, classes, ...]", "are [4]"]),
        ("no_batch", ["batch of its inputs is 8, but its predictions are [3]"]),
        ("classes", ["is int64[4], but a loss needs floating-point numbers"]),
        ("no_gradient", ["no gradient: relax.cumprod"]),
        ("several", ["has 2 outputs", "--model-output"]),
    ],
)
def test_functions_that_are_no_models(convgrad: Command, tmp_path: Path, name: str, parts: list[str]) -> None:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    convgrad("build", f"{path}:{name}", "-o", tmp_path / "s.so").assert_sentence("functions.py", *parts)


def test_no_message_of_tvm_beside_ours(convgrad: Command, onnx_model: Path, tmp_path: Path) -> None:
    """In a process of its own: TVM warns of the importer's builder when that dies, so after our sentence."""
    model = onnx.load(onnx_model)
    model.graph.node[0].attribute[0].ints[:] = [3]
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros((3, 2, 3, 3), "float32"), "w"))
    onnx.save(model, onnx_model)
    finish(start("build", onnx_model, "-o", tmp_path / "s.so")).assert_sentence("net.onnx", "importer fails")


def test_folded_layers_are_a_warning(convgrad: Command, onnx_model: Path, tmp_path: Path) -> None:
    model = onnx.load(onnx_model)
    model.graph.node[0].input[:] = ["x", "onnx::Conv_1", "onnx::Conv_2"]
    model.graph.initializer[0].name = "onnx::Conv_1"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, "float32"), "onnx::Conv_2"))
    onnx.save(model, onnx_model)
    for command in (("build", onnx_model, "-o", tmp_path / "s.so"), ("explain", onnx_model)):
        done = convgrad(*command, "--json")
        (warning,) = done.json["warnings"]
        assert "folded batch norms into 1 of 1 convolutions" in warning
        assert done.err == f"convgrad: warning: {warning}\n"


def test_a_defect_is_not_a_success(convgrad: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("something")

    monkeypatch.setattr("tvm_convgrad.report.tables.print_json", fail)
    done = convgrad("env", "--json")
    assert done.code == 1
    assert "unexpected KeyError: 'something' (" in done.err
    assert "tests/cli/test_wrong_input.py:" in done.err
    assert "called from tvm_convgrad/commands/env.py:" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("CONVGRAD_TRACEBACK", "1")
    assert "Traceback" in convgrad("env", "--json").err


def test_what_fails_after_an_interrupt_is_no_defect(convgrad: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM makes a RuntimeError without a message of a KeyboardInterrupt in a pass that is written in Python."""

    def interrupted(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    try:
        monkeypatch.setattr("tvm_convgrad.report.tables.print_json", interrupted)
        done = convgrad("env", "--json")
        assert (done.code, done.out, done.err) == (130, "", "")
        monkeypatch.undo()
        assert convgrad("env", "--json").code == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_full_disk_is_no_defect(convgrad: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tvm_convgrad.report.tables.print_json", full)
    done = convgrad("env", "--json")
    assert done.code == 1
    assert done.err == (
        "convgrad: nothing more can be written (No space left on device); make room, and run the command again.\n"
    )


def test_a_defect_without_a_message_has_a_place(
    convgrad: Command, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("tvm_convgrad.training.compile.lower.compile_to_link", fail)
    done = convgrad("build", tiny_model, "-o", tmp_path / "s.so")
    assert (done.code, done.out) == (1, "")
    (line,) = done.err.splitlines()
    assert "unexpected AssertionError while compiling: no message (" in line
    assert "tests/cli/test_wrong_input.py:" in line
    assert "called from tvm_convgrad/commands/build.py:" in line
    assert "CONVGRAD_TRACEBACK=1" in line


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [1.5, -np.inf], "c": ({"d": np.float64("inf")}, 2, True, None, "NaN")})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, None], "c": [{"d": None}, 2, True, None, "NaN"]}


def test_the_module_is_the_command() -> None:
    for module in ("tvm_convgrad", "tvm_convgrad.cli"):
        done = subprocess.run([sys.executable, "-m", module, "explain", "missing.onnx"], capture_output=True, text=True)
        assert done.returncode == 1
        assert "missing.onnx does not exist" in done.stderr


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    finish(start("explain", tmp_path / "missing.so")).assert_sentence("missing.so")
