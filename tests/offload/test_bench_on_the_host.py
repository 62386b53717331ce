# SPDX-License-Identifier: Apache-2.0
"""`convgrad bench --target cuda`, run: on a GPU that is the host (host_gpu/), in each type that cuDNN takes there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBLEM = "mb2ic3ih5oc4kh3ph1"


def bench(folder: str) -> None:
    """What runs in a process of its own: the command, without the limits of a GPU, which take the host an hour."""
    from tests.offload import host_gpu
    from tvm_convgrad.bench import layers
    from tvm_convgrad.bench.roofline import Roofline
    from tvm_convgrad.cli import main

    host_gpu.load()
    layers.measure_gpu_roofline = lambda place: Roofline(
        100.0, 10.0, 1, str(place.target.attrs["arch"]), "matrix product"
    )
    files = [option for name in ("json", "markdown") for option in (f"--{name}", f"{folder}/out.{name}")]
    sys.argv = ["convgrad", "bench", "--target", "cuda", "--problem", PROBLEM, "--direction", "all", "--seconds", "0"]
    sys.argv += ["--against", "cudnn", *files]
    main()


@pytest.mark.cuda
def test_on_the_host(tmp_path: Path) -> None:
    program = f"import tvm; from tests.offload.test_bench_on_the_host import bench; bench({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    where, found = content["environment"], content["measurements"]
    assert (where["gpu"], where["impl"], where["numbers"]) == ("the host", "cudnn", "float32")
    assert where["nvidia-cudnn-cu13"]
    assert [(m["direction"], m["baseline"]) for m in found] == [
        (direction, "cudnn") for direction in ("backward_weight", "backward_data", "forward")
    ]
    assert all(m["pairs"] >= 5 and min(m["ours"], m["theirs"], m["ratio"]) > 0 for m in found)
    assert all(m["kernel"] for m in found)
    assert all(m["variant"] == "cudnn" for m in found)
    assert any(m["ours"] != m["theirs"] for m in found)  # each was measured by itself
    assert "on the host (sm_90), apache-tvm" in (tmp_path / "out.markdown").read_text()
