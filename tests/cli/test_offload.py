# SPDX-License-Identifier: Apache-2.0
"""--offload, and making the runtime ahead of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command


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
    monkeypatch.setattr("tvm_convgrad.offload.onednn.backend._find", lambda package, file: None)
    done = convgrad("build", tiny_model, "-o", str(tmp_path / "s.so"), "--offload", "onednn")
    done.assert_sentence("onednn", "not installed", "pip install 'tvm-convgrad[onednn]'")
    convgrad("build-runtime", "onednn").assert_sentence("not installed", "pip install 'tvm-convgrad[onednn]'")
    (gradient,) = convgrad("explain", tiny_model, "--json").json["gradients"]
    reasons = {other["kernel"]: other["reason"] for other in gradient["refused"]}
    assert reasons["onednn"].startswith("not installed")
