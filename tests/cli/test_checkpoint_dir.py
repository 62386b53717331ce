# SPDX-License-Identifier: Apache-2.0
"""A --checkpoint-dir that cannot be used is refused before the first step; a run locks its own as long as it lives."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command, finish, start
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.checkpoint import claimed
from tvm_convgrad.training.runtime.session import Session


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: Any) -> Any:
        raise AssertionError("a step was trained")

    monkeypatch.setattr(Session, "step", step)


def arguments(step: Path, data: Path, folder: Path, epochs: int = 1) -> list[Any]:
    return ["run", step, "--data", data, "--epochs", epochs, "--checkpoint-dir", folder, "--json"]


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/convgrad", "/proc/self/fdinfo", "/dev/null", "/sys/x"])
def test_unusable_folders(
    convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path, place: str, resume: list[str]
) -> None:
    (tmp_path / "file").write_text("a file")
    folder = tmp_path / place
    convgrad(*arguments(tiny_step, tiny_data, folder), *resume).assert_sentence(str(folder), "another --checkpoint-dir")
    assert (tmp_path / "file").read_text() == "a file"


@pytest.mark.usefixtures("no_step")
def test_folder_without_write_permission(
    convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's file may be there already, so that it can be opened; root may write anywhere, hence the patch."""

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refused)
    convgrad(*arguments(tiny_step, tiny_data, tmp_path)).assert_sentence(str(tmp_path), "(Permission denied)")


@pytest.mark.usefixtures("no_step")
def test_second_run_is_refused(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path) -> None:
    with claimed(tmp_path):
        done = convgrad(*arguments(tiny_step, tiny_data, tmp_path))
        done.assert_sentence(str(tmp_path), "another run writes its checkpoints there")
        with pytest.raises(ArtifactError, match="another run"), claimed(tmp_path):
            pass
    with claimed(tmp_path):
        pass


def test_lock_ends_with_a_killed_process(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path) -> None:
    process = start(*arguments(tiny_step, tiny_data, tmp_path, 100000))
    try:
        limit = time.monotonic() + 120
        while not list(tmp_path.glob("*.ckpt")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.01)
        convgrad(*arguments(tiny_step, tiny_data, tmp_path), "--resume").assert_sentence("another run")
    finally:
        process.send_signal(signal.SIGKILL)
        finish(process)
    steps = max(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("*.ckpt"))
    assert convgrad(*arguments(tiny_step, tiny_data, tmp_path, steps // 6 + 1), "--resume").code == 0
