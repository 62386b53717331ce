# SPDX-License-Identifier: Apache-2.0
"""What is wrong is said in one sentence, with exit code 1; wrong usage has exit code 2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests import tiny
from tests.artifact.test_artifact import resealed
from tests.cli.command import Command, finish, start
from tvm_convgrad.training.artifact import versions


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
        (["build", "MODEL", "-o", "no/folder/s.so"], ["no/folder"]),
        (["build", "MODEL", "-o", "s.so", "--offload", "cutlass"], ["cutlass", "the target is llvm", "cuda:sm_90"]),
        (["build", "MODEL", "-o", "s.so", "--offload", "cudnn"], ["cudnn", "the target is llvm", "cuda:sm_90"]),
        pytest.param(
            ["build", "MODEL", "-o", "s.so", "--target", "cuda"],
            ["GPU", "cuda:sm_90"],
            marks=pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU"),
        ),
        (["bench", "--suite", "vgg16", "--target", "cuda:sm_10"], ["GPU"]),
        (["build", "MODEL", "-o", "s.so", "--target", "rubbish"], ["rubbish", "use llvm"]),
        (["build", "MODEL", "-o", "s.so", "--optimizer", "rubbish"], ["rubbish"]),
        (["build", "MODEL", "-o", "s.so", "--loss", "rubbish"], ["rubbish"]),
        (["build", "MODEL", "-o", "s.so", "--dtype", "int8"], ["int8"]),
        (["build", "MODEL", "-o", "s.so", "--layout", "NCWH"], ["NCWH"]),
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
    convgrad(command, bad, *rest).assert_sentence("Apache TVM 0.25.1", "build the step anew")


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
    convgrad(*arguments, "--plot", tmp_path / "no" / "p.png").assert_sentence("does not exist")
    convgrad(*arguments, "--test-data", data).assert_sentence("no test arrays")


def test_require_accuracy(convgrad: Command, tiny_step: Path, tiny_data: Path) -> None:
    done = convgrad("run", tiny_step, "--data", tiny_data, "--epochs", 1, "--require-accuracy", 1)
    assert done.code == 1
    assert "not above the 1 that --require-accuracy asks for" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["build"],
        ["build", "m.onnx", "-o", "s.so", "--batch", "many"],
        ["build", "m.onnx", "-o", "s.so", "--offload", "rubbish"],
        ["run", "s.so", "--data", "d.npz", "--epochs", "0"],
        ["run", "s.so", "--data", "d.npz", "--epochs", "1", "--resume"],
        ["verify"],
        ["verify", "--all", "--op", "sideways"],
        ["verify", "--all", "--impl", "rubbish"],
        ["build-runtime", "rubbish"],
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


def test_a_defect_is_not_a_success(convgrad: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("something")

    monkeypatch.setattr("tvm_convgrad.report.tables.print_json", fail)
    done = convgrad("env", "--json")
    assert done.code == 1
    assert "unexpected KeyError" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("CONVGRAD_TRACEBACK", "1")
    assert "Traceback" in convgrad("env", "--json").err


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    finish(start("explain", tmp_path / "missing.so")).assert_sentence("missing.so")
