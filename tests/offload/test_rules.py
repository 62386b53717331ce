# SPDX-License-Identifier: Apache-2.0
"""What oneDNN's rules say yes and no to, and what `--offload` takes. No library is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm

from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload import contract
from tvm_convgrad.offload.call_source import call_source
from tvm_convgrad.offload.onednn import backend, rules
from tvm_convgrad.offload.registry import parse_offload, require

PLAIN = "mb2ic16ih9oc32kh3ph1"
DIRECTIONS = ("forward", "backward_weight", "backward_data")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "descriptor",
    [
        PLAIN,
        "g4mb2ic4ih9oc12kh3sh2ph1",
        "mb2ic3iw17oc4kw5sw2pw2dw1",
        "mb1ic2id5oc3kd3pd1",
        "mb{n}ic3ih7oc4kh3ph0rh1",
        "mb2ic3ih9oc4kh3ph1_lay=CNHW:IHWO:NCHW",
        f"{PLAIN}_dt=bf16:bf16:bf16",
    ],
)
def test_taken(direction: str, descriptor: str) -> None:
    assert rules.refusal(direction, ConvProblem.from_descriptor(descriptor), NO_EPILOGUE) == ""


@pytest.mark.parametrize(
    ("descriptor", "reason"),
    [
        (f"{PLAIN}_dt=f64:f64:f64", "types float64; it takes float32, or bfloat16"),
        (f"{PLAIN}_dt=f16:f16:f16", "types float16"),
        (f"{PLAIN}_dt=f32:bf16:f32", "types bfloat16, float32"),
        ("mb2ic16ih{h}oc32kh3", "height or width is known only at run time"),
        ("mb0ic16ih9oc32kh3ph1", "data has no elements"),
        ("mb60000ic64ih32oc4kh1sh4", "data has more elements than an int32 counts"),
    ],
)
def test_refused(descriptor: str, reason: str) -> None:
    assert reason in rules.refusal("forward", ConvProblem.from_descriptor(descriptor), NO_EPILOGUE)


def test_mixed_precision_goes_by_direction() -> None:
    wide = ConvProblem.from_descriptor(f"{PLAIN}_dt=bf16:f32:bf16")  # a float32 weight gradient of bfloat16 operands
    assert rules.refusal("backward_weight", wide, NO_EPILOGUE) == ""
    assert "types bfloat16, float32" in rules.refusal("forward", wide, NO_EPILOGUE)


@pytest.mark.parametrize(
    ("direction", "epilogue", "reason"),
    [
        ("forward", Epilogue(bias=True, accumulate=True), ""),
        ("forward", Epilogue(bias=True, relu=True), "relu turns NaN into zero in oneDNN"),
        ("backward_weight", Epilogue(bias_grad=True), ""),
        ("backward_weight", Epilogue(accumulate=True), ""),
        ("backward_data", Epilogue(accumulate=True), ""),
        ("backward_data", Epilogue(bias=True, relu=True), "backward_data takes no bias, relu"),
    ],
)
def test_epilogues(direction: str, epilogue: Epilogue, reason: str) -> None:
    found = rules.refusal(direction, ConvProblem.from_descriptor(PLAIN), epilogue)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("descriptor", "direction", "formats"),
    [
        (PLAIN, "forward", rules.ANY),
        (f"{PLAIN}_lay=NHWC:OHWI:NHWC", "forward", rules.PLAIN_DATA),
        ("mb2ic16ih9oc32kh1", "backward_weight", rules.PLAIN_DATA),
        ("mb2ic16ih9oc32kh1", "backward_data", rules.ANY),
        ("mb2ic16ih14oc32kh1", "backward_data", rules.PLAIN_DATA),
        ("mb2ic16ih14oc32kh1sh2", "forward", rules.ANY),
        ("g16mb2ic16ih9oc16kh1", "forward", rules.ANY),
        ("mb2ic3ih9oc32kh3", "backward_data", rules.PLAIN_DATA),
        ("mb2ic3ih9oc32kh3", "backward_weight", rules.ANY),
        (f"{PLAIN}_lay=CNHW:OIHW:NCHW", "forward", rules.ANY),
    ],
)
def test_formats(descriptor: str, direction: str, formats: str) -> None:
    assert rules.formats(direction, ConvProblem.from_descriptor(descriptor)) == formats


def test_offload_option() -> None:
    assert parse_offload("auto") == ("auto",)
    assert parse_offload("onednn") == ("onednn",)
    for text in ("rocdnn", "auto,onednn", ""):
        with pytest.raises(UnsupportedError, match=r"use auto, none, or backends: onednn, cudnn, cutlass"):
            parse_offload(text)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "installed_file", lambda package, file: None)
    with pytest.raises(SetupError, match=r"onednn: not installed \(the package onednn-cpu-gomp.*\): pip install '"):
        require(["onednn"], tvm.target.Target("llvm"))


def test_targets_other_than_cpus_are_refused() -> None:
    class Gpu:
        kind = type("Kind", (), {"name": "cuda"})

    assert backend.OneDnn().unavailable(Gpu()) == "the target is cuda; oneDNN is used on CPUs"
    other = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu"})
    assert "aarch64-linux-gnu; its packages are for x86-64" in backend.OneDnn().unavailable(other)


def test_paths_survive_in_generated_code() -> None:
    source = call_source([("f", [1, -2])], "x.run", "x", Path('/a "b"\\c/lib.so'), ("WAIT", "no"))
    assert r'dlopen("/a \"b\"\\c/lib.so"' in source
    assert "f_call[] = {1, -2};" in source
    assert 'if (unset) setenv("WAIT", "no", 1);' in source
