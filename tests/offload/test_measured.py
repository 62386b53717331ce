# SPDX-License-Identifier: Apache-2.0
"""What was measured decides what `auto` takes; a file that is damaged decides nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tvm

from relax_ops.program import directions_module
from tests.cli.command import Command
from tvm_convgrad.codegen.hardware import cores_of, machine_of
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.entries import VARIABLE
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.measured import Measured, default_path
from tvm_convgrad.offload.partition import offload

PROBLEM = ConvProblem.from_descriptor("mb2ic16ih9oc32kh3ph1")
TARGET = tvm.target.Target("llvm")
MACHINE = machine_of(TARGET)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "tunings.json"))
    return tmp_path / "offload.json"


def record(path: Path, kernel: float, onednn: float, threads: int) -> None:
    Measured(path, threads).record("forward", PROBLEM, MACHINE, {"kernel": kernel, "onednn": onednn})


def test_kept_by_problem_machine_and_threads(path: Path) -> None:
    record(path, 3e-3, 2e-3, 2)
    assert default_path() == path
    found = Measured(path, 2).winner("forward", PROBLEM, MACHINE)
    assert found is not None
    assert (found.name, found.gain) == ("onednn", pytest.approx(1.5))
    assert Measured(path, 3).winner("forward", PROBLEM, MACHINE) is None
    assert Measured(path, 2).winner("backward_data", PROBLEM, MACHINE) is None
    assert Measured(path, 2).winner("forward", PROBLEM, None) is None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2, "entries": {}}', '{"format": 1, "entries": {"a": {"b": 1}}}']
)
def test_damaged(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(ArtifactError, match=r"no measurements that `convgrad tune` wrote \(.*\); remove the file"):
        Measured(path, 2)


@pytest.mark.onednn
@pytest.mark.parametrize("faster", ["kernel", "onednn"])
def test_auto_takes_what_was_faster(path: Path, faster: str) -> None:
    module = directions_module([("main", DIRECTIONS["forward"], PROBLEM)])
    assert not offload(module, ("auto",), TARGET).lowered
    record(path, *((1e-3, 2e-3) if faster == "kernel" else (2e-3, 1e-3)), cores_of(TARGET))
    done = offload(module, ("auto",), TARGET)
    if faster == "onednn":
        (entry,) = done.lowered
        assert entry.choice.reason == "measured: 2.00x the generated kernel"
    else:
        (reasons,) = done.refused.values()
        assert "measured: it is 2.00x as fast" in reasons["onednn"]


@pytest.mark.onednn
def test_tune_measures(path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tvm_convgrad.commands.tune.COMPARE_SECONDS", 0.01)
    convgrad = Command(monkeypatch, capfd)
    arguments = ["--direction", "forward", "--budget", "0s", "--offload", "onednn", "--json", "--target", "llvm"]
    found = convgrad("tune", "--problem", PROBLEM.descriptor, "--problem", "mb2ic16ih{h}oc4kh3", *arguments).json
    first, second = found["compared"]
    assert first["onednn"] > 0
    assert "static" in second["reason"]
    assert len(json.loads(path.read_text())["entries"]) == 1
