# SPDX-License-Identifier: Apache-2.0
"""Training steps whose convolutions are calls of oneDNN: the same losses, what is reported, what a library needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.conftest import build_tiny
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.training.runtime.artifact import load_module, read_artifact
from tvm_convgrad.training.runtime.session import Session

pytestmark = pytest.mark.onednn


def losses(step: Path) -> list[float]:
    session = Session(step)
    x, y = tiny.make_arrays(tiny.BATCH, 3)
    return [session.step(x, y)[0] for _ in range(8)]


@pytest.fixture(scope="module")
def offloaded_step(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step") / "step.so"
    return build_tiny(tiny_model, path, backends=("onednn",), lr=0.1, momentum=0.9)


def test_the_losses_are_those_of_the_kernels(tiny_step: Path, offloaded_step: Path) -> None:
    np.testing.assert_allclose(losses(offloaded_step), losses(tiny_step), rtol=1e-5)
    assert losses(offloaded_step) == losses(offloaded_step)


def test_any_batch(tiny_model: str, tiny_step: Path, tmp_path: Path) -> None:
    step = build_tiny(tiny_model, tmp_path / "any.so", batch="dynamic", backends=("onednn",), lr=0.1, momentum=0.9)
    np.testing.assert_allclose(losses(step), losses(tiny_step), rtol=1e-5)
    session = Session(step)
    assert np.isfinite(session.step(*tiny.make_arrays(3, 0))[0])


def test_what_is_reported(offloaded_step: Path) -> None:
    artifact = read_artifact(offloaded_step)
    entries = [*artifact.gradients, *artifact.forward]
    assert {entry["op"] for entry in entries} == {"conv2d", "conv2d_backward_weight"}
    for entry in entries:
        assert entry["kernel"].startswith("onednn ")
        assert entry["reason"] == "requested"
        assert "workspace" in entry["plan"]
        assert any("onednn is requested" in other["reason"] for other in entry["refused"])
    assert Path(artifact.manifest["runtimes"]["onednn"]).name == "libconvgrad_onednn.so.2"


def test_a_runtime_that_is_gone(offloaded_step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = read_artifact(offloaded_step)
    artifact.manifest["runtimes"]["onednn"] = "/no/such/library.so"
    load_module(artifact)  # the one of this machine
    monkeypatch.setattr("tvm_convgrad.offload.contract.installed_file", lambda package, file: None)
    with pytest.raises(SetupError, match=r"the runtime for onednn cannot be built: not installed .*: pip install"):
        load_module(artifact)
