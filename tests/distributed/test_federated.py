# SPDX-License-Identifier: Apache-2.0
"""The federated example: a server and two clients on the loopback learn to read digits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.federated
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_clients_learn_digits(tmp_path: Path) -> None:
    """Three rounds; the model before the first is no better than chance."""
    subprocess.run([sys.executable, EXAMPLES / "digits_cnn.py", "--out", tmp_path], check=True, capture_output=True)
    step = tmp_path / "step.so"
    build = [sys.executable, "-m", "tvm_convgrad", "build", tmp_path / "digits_cnn.onnx", "-o", step]
    build += ["--momentum", "0.9"]
    subprocess.run(build, check=True, capture_output=True)
    loopback = [sys.executable, EXAMPLES / "federated" / "loopback.py", step, tmp_path / "digits.npz"]
    done = subprocess.run(loopback, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"round (\d): test accuracy ([\d.]+)", done.stdout))
    assert set(found) == set("0123"), done.stdout
    assert float(found["0"]) < 0.3
    assert float(found["3"]) >= 0.95
