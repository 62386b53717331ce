# SPDX-License-Identifier: Apache-2.0
"""cuDNN's backend without a GPU: what is refused and why, a call as numbers, engines, programs that are compiled."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

from relax_ops.program import directions_module
from tests.cli.command import Command
from tests.conftest import build_tiny
from tests.relax.net import Net, module_of
from tvm_convgrad import evaluate, partition
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload import contract
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.cudnn import backend, rules
from tvm_convgrad.offload.cudnn.devices import DEVICES, arch_of
from tvm_convgrad.offload.cudnn.engines import COMPILED
from tvm_convgrad.offload.cudnn.settings import VARIABLE, Settings, parse_settings
from tvm_convgrad.offload.partition import offload
from tvm_convgrad.offload.registry import require
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.runtime.artifact import read_artifact
from tvm_convgrad.training.runtime.session import Session

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
PLAIN = ConvProblem.from_descriptor("mb2ic16ih9oc32kh3ph1")
CARRIED = (
    "mb4ic32ih14oc64kh3ph1_dt=f16:f16:f16_lay=NHWC:OHWI:NHWC",
    "g32mb4ic32ih14oc32kh3sh2ph1",
    "mb2ic3ih9oc4kh3dh1ph0rh1_lay=CHWN:IHWO:CHWN",
    "mb4ic32id8oc64kd3pd1_dt=f64:f64:f64",
)
FIXED = 54
"""Numbers of a call before the list of engines: Spec::kCount of runtime/spec.h."""


@pytest.mark.parametrize(
    ("direction", "descriptor", "epilogue", "version", "reason"),
    [
        ("forward", "g4mb{n}ic4ih9oc12kh3sh2ph0rh1", Epilogue(bias=True, relu=True, accumulate=True), 75, ""),
        ("backward_weight", "mb2ic3ih9oc4kh3_lay=NHWC:OIHW:NCHW", Epilogue(accumulate=True), 75, ""),
        ("backward_weight", "mb2ic3ih9oc4kh3_lay=CNHW:OIHW:NCHW", NO_EPILOGUE, 75, "the layout CNHW of data"),
        ("forward", "mb2ic3ih9oc4kh3_lay=NHWC:HWIO:NHWC", NO_EPILOGUE, 90, "the layout HWIO of weight"),
        ("forward", "mb2ic4ih9oc4kh3_dt=bf16:bf16:bf16", NO_EPILOGUE, 75, "sm_75 has no bfloat16; sm_80 is the first"),
        ("forward", "mb2ic4ih9oc4kh3_dt=bf16:bf16:bf16", NO_EPILOGUE, 80, ""),
        ("forward", "mb2ic4ih9oc4kh3_dt=f16:f16:f32", NO_EPILOGUE, 90, "types float16, float32; it takes one type"),
        ("forward", "mb2ic4ih{h}oc4kh3", NO_EPILOGUE, 90, "height or width is known only at run time"),
        ("forward", "mb0ic4ih9oc4kh3", NO_EPILOGUE, 90, "data has no elements"),
        ("forward", "mb2ic4ih9oc4kh3", Epilogue(relu=True), 90, "relu with a bias only"),
        ("backward_weight", "mb2ic4ih9oc4kh3", Epilogue(bias_grad=True), 90, "backward_weight takes no bias_grad"),
    ],
)
def test_rules(direction: str, descriptor: str, epilogue: Epilogue, version: int, reason: str) -> None:
    found = rules.refusal(direction, ConvProblem.from_descriptor(descriptor), epilogue, version)
    assert reason in found
    assert bool(found) == bool(reason)


def test_settings() -> None:
    assert parse_settings("") == Settings(deterministic=True, tf32=False, transforms=False, workspace=1 << 30)
    assert parse_settings("tf32, workspace=16MiB") == Settings(tf32=True, workspace=16 << 20)
    assert not parse_settings("nondeterministic").deterministic
    for wrong in ("fast", "workspace=", "workspace=1GB"):
        with pytest.raises(UnsupportedError, match=rf"{VARIABLE}=.* is not a setting; use nondeterministic, tf32"):
            parse_settings(wrong)


def test_targets() -> None:
    assert arch_of(parse_target("cuda:sm_90a", gpus=True)) == "sm_90"
    with pytest.raises(UnsupportedError, match=r"such as cuda:sm_90"):
        parse_target("rocm", gpus=True)
    if not Path("/dev/nvidia0").exists():
        with pytest.raises(SetupError, match=r"for another, name its architecture: --target cuda:sm_90"):
            parse_target("cuda", gpus=True)
    with pytest.raises(UnsupportedError, match="use llvm or native"):
        parse_target("cuda:sm_90")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        contract, "installed_file", lambda package, file: None if package == "nvidia-cublas" else Path(file)
    )
    with pytest.raises(SetupError, match=r"cudnn: not installed \(the package nvidia-cublas with .*\[cuda\]'"):
        require(["cudnn"], TARGET)
    with pytest.raises(
        SetupError,
        match=r"cannot be built: not installed \(the package nvidia-cublas.*\): pip install 'tvm-convgrad\[cuda\]'",
    ):
        backend.CuDnn().library()
    assert backend.CuDnn().digest() == ""


def test_without_a_gpu_a_sentence() -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU: make test-gpu")
    with pytest.raises(SetupError, match=r"(libcuda\.so\.1|undefined symbol).*NVIDIA's driver|\[cuda\]"):
        local_target()
    with pytest.raises(SetupError, match=r"GPU|\[cuda\]"):
        evaluate("conv2d", *numbers_of(PLAIN, "forward")[0], padding=1, impl="cudnn", target=TARGET)


@pytest.mark.cuda
def test_a_call_carries_the_engines_that_cudnn_ranks() -> None:
    cudnn = backend.CuDnn()
    listed = [each for each in cudnn.engines("backward_weight", PLAIN, NO_EPILOGUE, "sm_90", 4) if not each.refusal]
    assert len(listed) == 4
    numbers = cudnn.numbers("backward_weight", PLAIN, NO_EPILOGUE, TARGET)
    version, sm, count, *ranked = numbers[FIXED:]
    assert (version // 10000, sm, count) == (9, 90, 4)
    for each in listed:
        index, knobs, *ranked = ranked
        assert (index, knobs) == (each.index, len(each.knobs))
        assert list(zip(ranked[: 2 * knobs : 2], ranked[1 : 2 * knobs : 2], strict=True)) == list(each.knobs)
        ranked = ranked[2 * knobs :]
    assert ranked == []
    any_batch = ConvProblem.from_descriptor("mb{n}ic16ih9oc32kh3ph1")
    assert cudnn.numbers("forward", any_batch, NO_EPILOGUE, TARGET)[FIXED:] == [0, 0, 0]
    other = tvm.target.Target({"kind": "cuda", "arch": "sm_86"})  # not among DEVICES
    assert cudnn.numbers("forward", PLAIN, NO_EPILOGUE, other)[FIXED:] == [0, 0, 0]
    assert cudnn.engine("forward", PLAIN, NO_EPILOGUE, other) == Engine(
        "by its heuristics", "engine chosen at run time", None
    )


@pytest.mark.cuda
@pytest.mark.parametrize("arch", DEVICES)
def test_plans_are_made_again_from_what_a_program_carries(arch: str) -> None:
    """All of them, with the workspace that they had, as the program will on the GPU."""
    cudnn, target = backend.CuDnn(), tvm.target.Target({"kind": "cuda", "arch": arch})
    sizes = set()
    for descriptor, direction in itertools.product((PLAIN.descriptor, *CARRIED), DIRECTIONS):
        problem = ConvProblem.from_descriptor(descriptor)
        found = cudnn.engines(direction, problem, NO_EPILOGUE, arch, backend.RANKED)
        listed = [each for each in found if not each.refusal]
        numbers = cudnn.numbers(direction, problem, NO_EPILOGUE, target)
        block = (ctypes.c_int64 * len(numbers))(*numbers)
        remade = tvm_ffi.get_global_func("convgrad.cudnn.2.remade")
        lines = str(remade(ctypes.c_void_p(ctypes.addressof(block)), DEVICES[arch].json())).splitlines()
        assert listed
        assert lines == [f"{each.workspace}|" for each in listed]
        sizes.update(each.workspace for each in listed)
    assert len(sizes) > 2


@pytest.mark.cuda
def test_settings_decide_what_engines_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(text: str) -> Any:
        monkeypatch.setenv(VARIABLE, text)
        found = backend.CuDnn().engines("backward_data", PLAIN, NO_EPILOGUE, "sm_90", 1)
        return next(each for each in found if not each.refusal), {each.refusal for each in found}

    strict, reasons = first("")
    assert "tensor cores" not in strict.notes
    assert {"rounds float32 to tf32", "not deterministic"} & reasons
    assert "tensor cores" in first("tf32")[0].notes
    every = "tf32,nondeterministic,transforms"
    assert first(every)[1] <= {"", "compiled when it is first called, which the setting compiled permits"}
    assert first(f"{every},compiled")[1] == {""}
    monkeypatch.setenv(VARIABLE, "workspace=0")
    found = backend.CuDnn().engines("backward_weight", PLAIN, NO_EPILOGUE, "sm_80", 8)
    assert all(each.workspace == 0 for each in found if not each.refusal)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_depthwise_engines_may_be_compiled(direction: str, dtype: str) -> None:
    """They are 5 to 16 times as fast as those that cuDNN has in compiled form, and the workspace is known before."""
    suffix = f"_dt={dtype}:{dtype}:{dtype}_lay=NHWC:OHWI:NHWC"
    depthwise = ConvProblem.from_descriptor(f"g96mb32ic96ih56oc96oh56kh7ph3{suffix}")
    grouped = ConvProblem.from_descriptor(f"g48mb32ic96ih56oc96oh56kh7ph3{suffix}")
    cudnn = backend.CuDnn()
    best, *_ = cudnn.engines(direction, depthwise, NO_EPILOGUE, "sm_90", 1)
    assert (best.refusal, COMPILED in best.notes) == ("", True)
    assert (best.workspace > 0) == (direction == "backward_weight")
    found = cudnn.engines(direction, grouped, NO_EPILOGUE, "sm_90", 8)
    assert not any(COMPILED in each.notes for each in found if not each.refusal)


def forward(net: Net) -> list[Any]:
    return [net.emit(tvm.relax.op.nn.relu(net.biased(net.forward())))]


def gradients(net: Net) -> list[Any]:
    return [net.wgrad(), net.bias_gradient(net.grad), net.emit(tvm.relax.op.add(net.dgrad(), net.other))]


@pytest.mark.cuda
def test_what_becomes_a_call() -> None:
    for body, fused in ((forward, [("bias", "relu")]), (gradients, [(), ("accumulate",)])):
        done = offload(module_of(PLAIN, body)[0], ["cudnn"], TARGET)
        assert [entry.fused for entry in done.lowered] == fused
        assert all(entry.form.startswith("cudnn engine ") for entry in done.lowered)
        assert all("deterministic" in entry.choice.engine.detail for entry in done.lowered)
    double = directions_module([("main", DIRECTIONS["forward"], PLAIN.with_dtypes("float16", "float16", "float32"))])
    with pytest.raises(UnsupportedError, match=r"no convolution can be; .* refused by cudnn: types float16, float32"):
        partition(double, ["cudnn"], TARGET)


PROGRAM = """
import sys
import numpy as np, tvm
from tvm import relax
machine = relax.VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
arrays = np.load(sys.argv[2])
machine["main"](*(tvm.runtime.tensor(arrays[name]) for name in ("a", "b")))
"""


@pytest.mark.cuda
def test_an_exported_program_comes_as_far_as_the_gpu(tmp_path: Path) -> None:
    """Its code finds the runtime, which reads the call and refuses memory that is not a GPU's."""
    module = partition(directions_module([("main", DIRECTIONS["forward"], PLAIN)]), ["cudnn"], TARGET)
    tvm.compile(module, tvm.target.Target(TARGET, host="llvm")).export_library(str(tmp_path / "program.so"))
    operands, _ = numbers_of(PLAIN, "forward")
    np.savez(tmp_path / "arrays.npz", a=operands[0], b=operands[1])
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "program.so"), str(tmp_path / "arrays.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cudnn: tensor 0 is not on an NVIDIA GPU" in done.stderr


@pytest.mark.cuda
def test_a_step_is_compiled_for_a_gpu_and_refused_where_there_is_none(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    step = build_tiny(tiny_model, tmp_path / "step.so", backends=("auto",), target=TARGET, lr=0.1, momentum=0.9)
    artifact = read_artifact(step)
    entries = [*artifact.gradients, *artifact.forward]
    assert {entry["kernel"].split()[0] for entry in entries} == {"cudnn"}
    assert all("deterministic" in entry["plan"] for entry in entries)
    assert Path(artifact.manifest["runtimes"]["cudnn"]).name == backend.FILE
    arguments = ["explain", tiny_model, "--target", "cuda:sm_90", "--offload", "cudnn", "--dtype", "float16", "--json"]
    half = Command(monkeypatch, capfd)(*arguments)
    found = half.json["gradients"] + half.json["forward"]
    assert {entry["kernel"].split()[0] for entry in found} == {"cudnn"}
    assert all("_dt=f16:f16:f16" in entry["descriptor"] for entry in found)
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU: make test-gpu")
    with pytest.raises(SetupError, match=r"GPU with NVIDIA's driver for CUDA 13"):
        Session(step)
