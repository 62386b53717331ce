# SPDX-License-Identifier: Apache-2.0
"""Tuning on a GPU: cuDNN's engines in guarded memory, against float64, by the GPU's clock, and the commands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.cudnn.call import Call, Tensor
from tvm_convgrad.offload.cudnn.devices import arch_of
from tvm_convgrad.offload.cudnn.gpu import Gpu
from tvm_convgrad.offload.cudnn.guarded import Guarded
from tvm_convgrad.offload.cudnn.settings import VARIABLE, settings
from tvm_convgrad.offload.cudnn.store import EngineStore
from tvm_convgrad.offload.cudnn.tuner import tune
from tvm_convgrad.offload.cudnn.tuning_device import EngineError, Place
from tvm_convgrad.training.runtime.session import Session

pytestmark = pytest.mark.gpu

CONV = ConvProblem.from_descriptor("mb8ic32ih28oc48kh3ph1")
HALF = ConvProblem.from_descriptor("mb8ic32ih28oc48kh3ph1_dt=f16:f16:f16_lay=NHWC:OHWI:NHWC")
CALLS = (
    *(
        Call(direction, problem)
        for direction in ("forward", "backward_weight", "backward_data")
        for problem in (CONV, HALF)
    ),
    Call("forward", HALF, Epilogue(bias=True, relu=True)),
    Call("backward_weight", CONV, Epilogue(accumulate=True)),
    Call("backward_data", ConvProblem.from_descriptor("g32mb4ic32ih14oc32kh3sh2ph1")),
    Call("backward_weight", ConvProblem.from_descriptor("mb2ic8ih9oc12kh3_dt=f64:f64:f64")),
)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(local_target())


def guarded(gpu: Gpu, call: Call, number: int = 0) -> tuple[Guarded, Any]:
    """Memory of a call, and a plan of one of its engines."""
    listed = gpu.candidates(call, 8)
    assert not isinstance(listed, str), listed
    plan = gpu.plan(call, [each for each in listed if not each.refusal][number])
    memory = Guarded(gpu, call, call.numbers()[0], plan.workspace)
    memory.blank(plan)
    return memory, plan


@pytest.mark.parametrize("words", ["", "tf32,transforms,nondeterministic"])
def test_every_call_is_tuned(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Winners are kept, engines that are thrown out are shown, and without settings no engine is."""
    monkeypatch.setenv(VARIABLE, words)
    store = EngineStore(tmp_path / "t.json")
    outcomes = list(tune([(call, 1) for call in CALLS], gpu, settings(), store, 60.0))
    for outcome in outcomes:
        print(outcome.status, f"{outcome.gain:.2f}", outcome.call, outcome.detail)
        for engine, reason in outcome.thrown_out:
            print("   thrown out:", engine, reason)
    assert {outcome.status for outcome in outcomes} <= {"own", "better"}
    assert len(store) == len(CALLS)
    assert max(outcome.tried for outcome in outcomes) > 1
    if not words:
        assert [outcome.thrown_out for outcome in outcomes if outcome.thrown_out] == []


@pytest.mark.parametrize("call", [call for call in CALLS if not call.fused], ids=str)
def test_engines_are_exact(gpu: Gpu, call: Call) -> None:
    memory, plan = guarded(gpu, call)
    assert memory.run(plan, 1) > 0
    assert np.array_equal(memory.result(), numbers_of(call.problem, call.direction)[1])
    assert memory.trespass(plan) == memory.changed_operand() == ""


def test_guards_on_the_gpu(gpu: Gpu) -> None:
    """A byte that anything writes beside the result is seen, and a plan cannot run in less workspace than it wants."""
    call = CALLS[0]
    memory, plan = guarded(gpu, call)
    assert np.isnan(memory.result()).all()
    place = memory._result
    end = place.offset + place.tensor.bytes
    place.memory.write(~place.memory.read(end, 1), end)
    assert memory.trespass(plan) == "writes outside: 1 bytes behind its result"
    for number in range(8):
        try:
            _, plan = guarded(gpu, call, number)
        except IndexError:
            break
        if plan.workspace > 1:
            small = Place(gpu.memory(1), 0, Tensor((1,), "uint8"))
            tensors = [Place(gpu.memory(each.bytes), 0, each) for each in (*call.operands, call.result)]
            with pytest.raises(EngineError, match="bytes of workspace for an engine that needs"):
                plan.run(tensors, small, 1)
            return
    pytest.fail("no engine of the call wants workspace: take another call for this test")


def test_the_clock(gpu: Gpu) -> None:
    memory, plan = guarded(gpu, Call("forward", ConvProblem.from_descriptor("mb16ic64ih56oc64kh3ph1")))
    memory.run(plan, 10)
    begin = time.perf_counter()
    many = memory.run(plan, 200)
    assert 0 < many < time.perf_counter() - begin
    assert memory.run(plan, 20) < many / 3


def test_commands(gpu: Gpu, tiny_model: str, tiny_step: Path, tmp_path: Path, convgrad: Command) -> None:
    """Tuned, built, explained, run: the losses are the CPU's."""
    options = ["--target", f"cuda:{arch_of(local_target())}", "--store", tmp_path / "t.json"]
    report = convgrad("tune", tiny_model, *options, "--cudnn", "--budget", "10s", "--json").json
    assert report["device"] == gpu.device
    assert set(report["counts"]) <= {"own", "better"}
    build = [
        "build",
        tiny_model,
        *options,
        "--offload",
        "cudnn",
        "-o",
        tmp_path / "s.so",
        "--lr",
        0.1,
        "--momentum",
        0.9,
    ]
    assert convgrad(*build, "--json").json["tuned"] >= len(report["outcomes"])
    assert "tuned: " in convgrad("explain", tmp_path / "s.so").out
    x, y = tiny.make_arrays(tiny.BATCH, 3)
    found = [[session.step(x, y)[0] for _ in range(8)] for session in (Session(tmp_path / "s.so"), Session(tiny_step))]
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_another_gpu(gpu: Gpu, convgrad: Command) -> None:
    other = "sm_75" if gpu.arch != "sm_75" else "sm_80"
    done = convgrad("tune", "--problem", CONV.descriptor, "--target", f"cuda:{other}", "--cudnn")
    done.assert_sentence(f"the target is {other}, and the GPU of this machine is {gpu.arch}")
