# SPDX-License-Identifier: Apache-2.0
"""kill -9 during build and during run: no partial artifact, and a resumed run repeats the losses bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.cli.command import MAIN, Command, finish, start
from tests.conftest import build_tiny
from tvm_convgrad.training.compile.workspace import workspace
from tvm_convgrad.training.runtime.artifact import read_artifact
from tvm_convgrad.training.runtime.checkpoint import LOCK

KILL_AT = "import os, pathlib, signal; {place} = lambda *_: os.kill(os.getpid(), signal.SIGKILL); " + MAIN


@pytest.mark.parametrize(("place", "existing"), [("os.fsync", False), ("pathlib.Path.replace", True)])
def test_build_killed_while_writing(
    tiny_model: str, tiny_step: Path, tmp_path: Path, place: str, existing: bool
) -> None:
    """Whatever stood at the output before stands there still."""
    step = tmp_path / "step.so"
    if existing:
        shutil.copy(tiny_step, step)
    build = [sys.executable, "-c", KILL_AT.format(place=place), "build", tiny_model, "-o", str(step), "--lr", "0.5"]
    killed = subprocess.run(build, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".step.so.*.tmp"))) == 1  # it had come as far as writing
    assert step.exists() == existing
    if existing:
        assert read_artifact(step).id == read_artifact(tiny_step).id


def test_what_a_killed_build_left_is_removed_by_the_next(
    convgrad: Command, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the folder of a build that still runs, nor one so young that its build may not have locked it yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    place = "tvm_convgrad.training.compile.artifact_writer.seal"
    program = "import tvm_convgrad.training.compile.artifact_writer; " + KILL_AT.format(place=place)
    build = [sys.executable, "-c", program, "build", tiny_model, "-o", str(tmp_path / "step.so")]
    assert subprocess.run(build, capture_output=True, check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("convgrad-build-*")
    assert (left / "step.so").exists()
    with workspace() as running:
        os.utime(running, (0, 0))
        with workspace() as other:
            assert left.exists()  # young
            assert other != running
        os.utime(left, (0, 0))
        assert convgrad("build", tiny_model, "-o", tmp_path / "step.so").code == 0
        assert list(tmp_path.glob("convgrad-build-*")) == [running]
    assert not list(tmp_path.glob("convgrad-build-*"))


def test_build_killed_at_some_time(tiny_model: str, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    begin = time.perf_counter()
    assert finish(start("build", tiny_model, "-o", step)).code == 0
    seconds = time.perf_counter() - begin
    for share in (0.6, 0.95):
        step.unlink(missing_ok=True)
        process = start("build", tiny_model, "-o", step)
        time.sleep(seconds * share)
        process.kill()
        finish(process)
        if step.exists():  # it was faster this time
            read_artifact(step)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds; fail if the process ends before."""
    limit = time.monotonic() + 120
    while True:
        ended = process.poll() is not None  # asked first: what it did before its end then meets the condition
        if condition():
            return
        assert not ended, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.002)


def test_run_with_scalars_killed_at_random(convgrad: Command, tiny_data: Path, tmp_path: Path) -> None:
    """Adam's step, dropout's counter and batch norm's statistics; killed while starting, stepping and writing."""
    model = tmp_path / "net.py"
    pooled = "            h = builder.emit(relax.op.mean(h, [2, 3]))\n"
    assert pooled in tiny.SOURCE
    dropped = "            h = builder.emit(relax.op.nn.dropout(h, 0.2)[0])\n"
    model.write_text(tiny.SOURCE.replace(pooled, pooled + dropped))
    step = build_tiny(f"{model}:make", tmp_path / "step.so", optimizer="adam", lr=0.01)
    state = tmp_path / "state.npz"
    arguments = ["run", step, "--data", tiny_data, "--epochs", 120, "--json", "--save-state", state]
    whole, wanted = convgrad(*arguments).json, state.read_bytes()
    folder = tmp_path / "checkpoints"
    checkpointed = [*arguments, "--checkpoint-dir", folder, "--checkpoint-every", 1, "--resume"]

    def newest() -> int:
        return max((int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.ckpt")), default=0)

    # Moments are counted in steps, as a fast machine ends the whole run in a second; the last goal leaves half of it.
    moments = random.Random(os.environ.get("CONVGRAD_SEED", time.strftime("%Y-%m-%d")))
    goals = sorted(moments.sample(range(1, whole["steps"] // 2), 4))
    for goal in goals:
        if newest() < goal:
            process = start(*checkpointed)
            wait_for(lambda goal=goal: newest() >= goal, process)
            time.sleep(moments.uniform(0, 0.01))
            process.kill()
            assert finish(process).code in (-signal.SIGKILL, 0)
        starting = start(*checkpointed)
        time.sleep(moments.uniform(0, 2))  # while it starts, loads its checkpoint, or runs
        starting.kill()
        assert finish(starting).code in (-signal.SIGKILL, 0)
    resumed = newest()
    assert resumed > 0
    result = convgrad(*checkpointed).json
    assert result["resumed_after"] == resumed
    assert result["losses"] == whole["losses"]
    assert result["test_accuracy"] == whole["test_accuracy"]
    assert state.read_bytes() == wanted
    assert len(set(folder.iterdir()) - {folder / LOCK}) == 2  # the last two; nothing of the killed ones


def test_interrupt_leaves_a_checkpoint(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path) -> None:
    arguments = ["run", tiny_step, "--data", tiny_data, "--epochs", 4000, "--checkpoint-dir", tmp_path, "--json"]
    process = start(*arguments)
    wait_for(lambda: any(tmp_path.glob("*.ckpt")), process)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert "interrupted" in done.err
    assert done.out == ""
    newest = max(tmp_path.glob("*.ckpt"))
    epochs = int(newest.stem.removeprefix("step-")) // 6 + 1
    arguments[arguments.index(4000)] = epochs
    resumed = convgrad(*arguments, "--resume").json
    assert (
        resumed["losses"]
        == convgrad("run", tiny_step, "--data", tiny_data, "--epochs", epochs, "--json").json["losses"]
    )
