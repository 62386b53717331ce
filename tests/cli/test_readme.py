# SPDX-License-Identifier: Apache-2.0
"""Every snippet of README runs as it stands; that of Relay in tests/relay_ops/test_readme.py."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import Command
from tests.readme import README, execute, sections

ROOT = README.parent
SECTIONS = sections()
BATCH = 8


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.onnx and data.npz, as README takes them for given."""
    folder = tmp_path_factory.mktemp("readme")
    subprocess.run(
        [sys.executable, ROOT / "examples" / "digits_cnn.py", "--out", folder, "--batch", str(BATCH)], check=True
    )
    (folder / "digits_cnn.onnx").rename(folder / "model.onnx")
    with np.load(folder / "digits.npz") as whole:
        np.savez(folder / "data.npz", **{name: whole[name][: 3 * BATCH] for name in whole})
    return folder


@pytest.fixture
def names(digits: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the programs take for given; they run in the folder."""
    monkeypatch.chdir(digits)
    with np.load(digits / "data.npz") as data:
        return {"images": data["x_train"][:BATCH], "labels": data["y_train"][:BATCH], "mean_over_ranks": lambda g: g}


def run_commands(heading: str, convgrad: Command) -> None:
    for words in map(shlex.split, SECTIONS[heading].commands):
        if words[0] == "convgrad":
            done = convgrad(*words[1:])
            assert done.code == 0, done.err


def test_every_section_is_run_somewhere() -> None:
    assert set(SECTIONS) == {
        "Two commands",
        "Operators in Relax",
        "In Relay",
        "A training step from ONNX",
        "Under PyTorch",
        "Under JAX",
        "Data parallel",
        "On a device",
    }
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_operators_in_relax() -> None:
    given: dict[str, object] = {}
    (program,) = SECTIONS["Operators in Relax"].python
    execute(program, given)
    text = str(given["module"])
    assert "nn.conv2d_backward_weight" in text
    assert "nn.conv2d_backward_data" in text
    assert given["dw"].shape == (16, 4, 3, 3)  # type: ignore[attr-defined]


def test_a_training_step(convgrad: Command, digits: Path, names: dict[str, object]) -> None:
    run_commands("A training step from ONNX", convgrad)
    (program,) = SECTIONS["A training step from ONNX"].python
    execute(program, names)
    assert np.isfinite(names["loss"])  # type: ignore[call-overload]
    assert names["classes"].shape == (BATCH,)  # type: ignore[attr-defined]
    assert (digits / "loss.png").exists()


def test_data_parallel(convgrad: Command, digits: Path, names: dict[str, object]) -> None:
    run_commands("Data parallel", convgrad)
    (program,) = SECTIONS["Data parallel"].python
    execute(program, names)
    first = names["loss"]
    execute("loss, _, _ = session.gradients(images, labels)", names)
    assert names["loss"] != first, "apply has changed nothing"


def test_data_parallel_with_torchrun(convgrad: Command, digits: Path, names: dict[str, object]) -> None:
    pytest.importorskip("torch")
    run_commands("Data parallel", convgrad)
    (line,) = [line for line in SECTIONS["Data parallel"].commands if line.startswith("torchrun")]
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the target of the section is an x86 CPU")
def test_on_a_device(convgrad: Command, digits: Path, names: dict[str, object]) -> None:
    run_commands("On a device", convgrad)
    (line,) = [line for line in SECTIONS["On a device"].commands if line.startswith("tar")]
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, cwd=digits, env=clean)
    assert done.returncode == 0, done.stderr
    assert "step 20 loss" in done.stdout


def test_under_pytorch(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    import tvm_convgrad.torch

    (program,) = SECTIONS["Under PyTorch"].python
    try:
        execute(program, {})
    finally:
        tvm_convgrad.torch.disable()
    assert "4x8x16x16" in capsys.readouterr().out


def test_under_jax() -> None:
    jax = pytest.importorskip("jax")
    import tvm_convgrad.jax

    (program,) = SECTIONS["Under JAX"].python
    execute(program, {})
    x, w = np.ones((2, 3, 9, 9), "float32"), np.ones((4, 3, 3, 3), "float32")
    try:
        loss = jax.jit(lambda weight: jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME").sum())
        assert float(jax.grad(loss)(w)[0, 0, 1, 1]) == 2 * 9 * 9
        assert tvm_convgrad.jax.explain()
    finally:
        tvm_convgrad.jax.unpatch()


def test_the_picture_is_of_the_tables() -> None:
    """Its graphs are what TVM makes, its bars rows of docs/results."""
    command = [sys.executable, str(ROOT / "benchmarks" / "front_picture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
