# SPDX-License-Identifier: Apache-2.0
"""`build` takes what earlier builds compiled: the same library, bit for bit, and only where all is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command, finish, start
from tests.training.small_models import onnx_model
from tvm_convgrad.commands import compilation
from tvm_convgrad.core.kept_objects import VARIABLE, KeptObjects

pytest.importorskip("onnx")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "objects"))
    path = tmp_path / "net.onnx"
    onnx_model(str(path), batch=4)
    return path


def test_an_equal_build_is_taken(
    convgrad: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (tmp_path / f"{name}.so" for name in ("first", "second", "third"))
    cold = convgrad("build", model, "-o", first, "--json").json
    kept = convgrad("env", "--json").json["compiled objects"]
    assert (kept["folder"], kept["count"]) == (str(tmp_path / "objects"), KeptObjects().size()[0])
    assert kept["bytes"] > first.stat().st_size

    other = convgrad("build", model, "-o", tmp_path / "other.so", "--lr", 0.25, "--json").json
    assert other["options"]["lr"] == 0.25
    assert other["id"] != cold["id"]
    with monkeypatch.context() as other_processes:
        other_processes.setenv("CONVGRAD_JOBS", "3")
        assert convgrad("build", model, "-o", third, "--no-cache", "--json").json["id"] == cold["id"]
        other_processes.setenv("CONVGRAD_JOBS", "0")
        convgrad("build", model, "-o", third, "--no-cache").assert_sentence("CONVGRAD_JOBS is '0'", "such as 1")
    assert third.read_bytes() == first.read_bytes()

    monkeypatch.setenv("CONVGRAD_JOBS", "2")  # does not decide about the library
    monkeypatch.setattr(compilation.ModelOptions, "load", lambda _: pytest.fail("the model is read again"))
    warm = convgrad("build", model, "-o", second, "--json").json
    assert second.read_bytes() == first.read_bytes()
    assert {**warm, "seconds": 0, "output": ""} == {**cold, "seconds": 0, "output": ""}


def test_another_file_of_the_same_name_is_compiled(convgrad: Command, model: Path, tmp_path: Path) -> None:
    first = convgrad("build", model, "-o", tmp_path / "step.so", "--json").json
    onnx_model(str(model), batch=2)
    second = convgrad("build", model, "-o", tmp_path / "step.so", "--json").json
    shapes = [each["schema"]["inputs"][0]["shape"][0] for each in (first, second)]
    assert shapes == [4, 2]


def test_tensors_in_another_file_are_part_of_the_model(
    convgrad: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    proto = onnx.load(model)
    onnx.save(proto, model, save_as_external_data=True, location="net.data", size_threshold=0)
    cold = convgrad("build", model, "-o", tmp_path / "first.so", "--json").json
    with monkeypatch.context() as patch:
        patch.setattr(compilation.ModelOptions, "load", lambda _: pytest.fail("the model is read again"))
        assert convgrad("build", model, "-o", tmp_path / "again.so", "--json").json["id"] == cold["id"]
    data = bytearray((tmp_path / "net.data").read_bytes())
    data[3] ^= 1  # the exponent of a weight
    (tmp_path / "net.data").write_bytes(data)
    assert convgrad("build", model, "-o", tmp_path / "other.so", "--json").json["id"] != cold["id"]


def test_a_cache_that_cannot_be_written_is_one_line(
    convgrad: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "objects"))
    done = convgrad("build", model, "-o", tmp_path / "step.so")
    assert done.code == 0
    assert (tmp_path / "step.so").exists()
    (line,) = done.err.splitlines()
    assert line.startswith(f"convgrad: warning: {tmp_path / 'file'}")
    assert convgrad("build", model, "-o", tmp_path / "step.so", "--no-cache").err == ""


def test_two_builds_at_once(model: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / f"{number}.so" for number in range(2)]
    running = [start("build", model, "-o", output, "--json") for output in outputs]
    first, second = (json.loads(done.out) for done in map(finish, running) if done.code == 0)
    assert first["id"] == second["id"]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert not list((tmp_path / "objects").glob("*/*.tmp"))
