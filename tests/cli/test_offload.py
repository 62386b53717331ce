# SPDX-License-Identifier: Apache-2.0
"""--offload, and making the runtime ahead of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command
from tvm_convgrad.offload.cudnn.devices import DEVICES


@pytest.mark.onednn
def test_build_explain_and_the_runtime(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    assert convgrad("build-runtime", "onednn", "--json").json["library"] == "oneDNN 3.2.0"
    built = convgrad("build", tiny_model, "-o", str(tmp_path / "s.so"), "--offload", "onednn", "--json").json
    assert list(built["runtimes"]) == ["onednn"]
    shown = convgrad("explain", str(tmp_path / "s.so"), "--json").json
    assert [entry["kernel"].split()[0] for entry in shown["gradients"]] == ["onednn"]
    (gradient,) = convgrad("explain", tiny_model, "--json").json["gradients"]  # auto
    reasons = {other["kernel"]: other["reason"] for other in gradient["refused"]}
    assert reasons["onednn"].startswith("auto takes the generated kernel first")


def test_a_library_that_is_not_installed(
    convgrad: Command, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_convgrad.offload.contract.installed_file", lambda package, file: None)
    done = convgrad("build", tiny_model, "-o", str(tmp_path / "s.so"), "--offload", "onednn")
    done.assert_sentence("onednn", "not installed", "pip install 'tvm-convgrad[onednn]'")
    convgrad("build-runtime", "onednn").assert_sentence("not installed", "pip install 'tvm-convgrad[onednn]'")
    (gradient,) = convgrad("explain", tiny_model, "--json").json["gradients"]
    reasons = {other["kernel"]: other["reason"] for other in gradient["refused"]}
    assert reasons["onednn"].startswith("not installed")


@pytest.mark.cuda
def test_explain_asks_cudnn(convgrad: Command, tiny_model: str) -> None:
    found = convgrad("explain", tiny_model, "--target", "cuda:sm_90", "--offload", "cudnn", "--cudnn", "--json").json
    assert all(entry["kernel"].startswith("cudnn engine") for entry in found["gradients"])
    assert {entry["op"] for entry in found["cudnn"]} == {"conv2d", "conv2d_backward_weight"}
    for entry in found["cudnn"]:
        assert entry["device"] == DEVICES["sm_90"].name
        usable = [engine for engine in entry["engines"] if not engine["refusal"]]
        assert usable
        assert not any("not deterministic" in engine["notes"] for engine in usable)
    assert "cuDNN's engines on Tesla T4" in convgrad("explain", tiny_model, "--target", "cuda:sm_75", "--cudnn").out
    convgrad("explain", tiny_model, "--target", "cuda:sm_61", "--cudnn").assert_sentence("sm_61", "sm_75")
    convgrad("explain", tiny_model, "--cudnn").assert_sentence("the target is llvm", "cuda:sm_90")
    assert convgrad("build-runtime", "cudnn", "--json").json["library"].startswith("cuDNN 9.")
