# SPDX-License-Identifier: Apache-2.0
"""Data parallel training beside PyTorch's DistributedDataParallel, by the benchmark that measures both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="it is compared with")

ROOT = Path(__file__).parents[2]


def test_losses_are_those_of_ddp(tmp_path: Path) -> None:
    """Of two ranks and 103 steps with batch norm and momentum; then the table of machines that is computed of it."""
    path = tmp_path / "ddp.json"
    benchmark = [sys.executable, "-m", "benchmarks.data_parallel"]
    measured = [*benchmark, "--model", "smooth", "--batch", "8", "--steps", "100", "--json", str(path)]
    done = subprocess.run(measured, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["ranks"] == 2
    assert result["loss_difference"] < 1e-4
    assert result["losses"][1] < result["losses"][0] / 2
    result |= {"seconds": 1.5, "all_reduce_seconds": 0.5, "small_all_reduce_seconds": 0.01, "gradient_bytes": 125e6}
    path.write_text(json.dumps(result))
    table = subprocess.run([*benchmark, "--scale", str(path)], cwd=ROOT, check=True, capture_output=True, text=True)
    rows = dict(line.strip("| ").split(" | ", 1) for line in table.stdout.splitlines()[2:])
    assert rows["1"] == "8/s, 100% | 8/s, 100%"
    # 1 s, 2 x 3/4 x 125 MB at 1.25 or 12.5 GB/s, and 3 times 10 ms
    assert rows["4"] == f"{32 / 1.18:.0f}/s, {1 / 1.18:.0%} | {32 / 1.045:.0f}/s, {1 / 1.045:.0%}"
