# SPDX-License-Identifier: Apache-2.0
"""The C++ example, compiled by its own Makefile, prints the losses that Python gets, to the last bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.conftest import build_tiny
from tvm_convgrad.training.runtime.session import Session

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cpp"
STEPS = 12


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cpp") / "train"
    make = ["make", "-C", str(FOLDER), f"OUT={path}", f"PYTHON={sys.executable}", "CXXFLAGS=-O0"]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return path


def losses(program: Path, *arguments: object) -> list[np.float32]:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, STEPS + 1))
    return [np.float32(loss) for _, loss in found]


def python_losses(step: Path, x: np.ndarray, y: np.ndarray) -> list[np.float32]:
    session = Session(step)
    return [np.float32(session.step(x, y)[0]) for _ in range(STEPS)]


def test_losses_equal_those_of_python(program: Path, tiny_step: Path, tmp_path: Path) -> None:
    x, y = tiny.make_arrays(tiny.BATCH, 4)
    x.tofile(tmp_path / "x.raw")
    y.tofile(tmp_path / "y.raw")
    found = losses(program, tiny_step, STEPS, tmp_path / "x.raw", tmp_path / "y.raw")
    assert found == python_losses(tiny_step, x, y)
    assert found[-1] < found[0]


@pytest.mark.onednn
def test_a_step_that_calls_onednn(program: Path, tiny_model: str, tmp_path: Path) -> None:
    step = build_tiny(tiny_model, tmp_path / "step.so", backends=("onednn",), lr=0.1, momentum=0.9)
    x = ((np.arange(tiny.BATCH * tiny.SIZE**2) * 7919 % 1001 - 500).astype("float32") / np.float32(500)).reshape(
        -1, 1, tiny.SIZE, tiny.SIZE
    )
    assert losses(program, step, STEPS) == python_losses(step, x, np.arange(tiny.BATCH) % tiny.CLASSES)


def test_made_up_data(program: Path, tiny_step: Path) -> None:
    count = tiny.BATCH * tiny.SIZE**2
    x = ((np.arange(count) * 7919 % 1001 - 500).astype("float32") / np.float32(500)).reshape(
        -1, 1, tiny.SIZE, tiny.SIZE
    )
    y = np.arange(tiny.BATCH) % tiny.CLASSES
    assert losses(program, tiny_step, STEPS) == python_losses(tiny_step, x, y)


def test_only_the_runtime_is_linked(program: Path) -> None:
    listed = subprocess.run(["readelf", "-d", str(program)], capture_output=True, text=True, check=True).stdout
    needed = {name for name in re.findall(r"NEEDED.*\[(.*)\]", listed) if "tvm" in name or "python" in name}
    assert needed == {"libtvm_runtime.so", "libtvm_ffi.so"}


@pytest.mark.parametrize("arguments", [["missing.so", "3"], ["X", "3", "x.raw", "y.raw"]])
def test_errors(program: Path, tiny_step: Path, arguments: list[str]) -> None:
    arguments = [str(tiny_step) if argument == "X" else argument for argument in arguments]
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "train: " in done.stderr
    assert subprocess.run([program], capture_output=True, check=False).returncode == 2
