# SPDX-License-Identifier: Apache-2.0
"""`convgrad bench --target cuda` on a GPU: cuDNN and CUTLASS beside PyTorch, whose results must agree, and a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command
from tvm_convgrad.offload.cuda import local_target

pytestmark = pytest.mark.gpu

PROBLEM = "mb8ic32ih14oc64kh3ph1"
LAST = "_lay=NHWC:OHWI:NHWC"


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    local_target()  # a sentence where there is no GPU
    return Command(monkeypatch, capfd)


@pytest.mark.parametrize("impl", ["cudnn", "cutlass"])
@pytest.mark.parametrize(("dtype", "suffix"), [("float32", ""), ("float16", "_dt=f16:f16:f16")])
def test_layers(convgrad: Command, tmp_path: Path, impl: str, dtype: str, suffix: str) -> None:
    file = tmp_path / "out.json"
    problem = PROBLEM + suffix + LAST
    done = convgrad(
        "bench", "--target", "cuda", "--impl", impl, "--problem", problem, "--dtype", dtype, "--direction", "all",
        "--against", _baselines("cudnn"), "--seconds", 0.1, "--json", file,
    )  # fmt: skip
    assert done.code == 0, done.err
    content = json.loads(file.read_text())
    assert content["environment"]["gpu"]
    assert len(content["measurements"]) == 3 * len(_baselines("cudnn").split(","))
    for found in content["measurements"]:
        assert 0 < found["gflops"] < content["roofline"]["gflops"] * 1.5
        assert found["pairs"] >= 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step(convgrad: Command, tmp_path: Path, tiny_model: str, dtype: str) -> None:
    """Beside PyTorch where that is installed; the losses of the first step agree, or the command fails."""
    file = tmp_path / "step.json"
    model = "resnet18_cifar" if "torch" in _baselines() else tiny_model
    arguments: list[Any] = ["--layout", "NHWC", "--dtype", dtype, "--seconds", 0.5, "--json", file]
    done = convgrad("bench", "--target", "cuda", "--step", model, *arguments)
    assert done.code == 0, done.err
    (entry,) = json.loads(file.read_text())["steps"]
    assert entry["device"] != "CPU"
    assert (entry["impl"], entry["dtype"]) == ("cudnn", dtype)
    assert entry["first"] > 0
    assert entry["memory"] >= 0


def _baselines(*more: str) -> str:
    """What can be compared with: PyTorch, if it is installed and has CUDA."""
    try:
        import torch
    except ImportError:
        return ",".join(more)
    return ",".join((*more, "torch") if torch.cuda.is_available() else more)
