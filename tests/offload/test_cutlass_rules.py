# SPDX-License-Identifier: Apache-2.0
"""What CUTLASS's rules say yes and no to, and which kernel of the set computes what. Needs no library and no GPU."""

from __future__ import annotations

import pytest
import tvm

from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.cutlass import backend, rules, toolchain
from tvm_convgrad.offload.cutlass.kernels import Choice, choose

NHWC = "_lay=NHWC:OHWI:NHWC"
F16 = "_dt=f16:f16:f16"
PLAIN = f"mb2ic16ih9oc32kh3ph1{NHWC}{F16}"
DIRECTIONS = ("forward", "backward_weight", "backward_data")


def problem(descriptor: str) -> ConvProblem:
    return ConvProblem.from_descriptor(descriptor)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "descriptor",
    [
        PLAIN,
        f"mb2ic16ih9oc32kh3ph1{NHWC}",
        f"mb2ic16ih9oc32kh3sh2ph1{NHWC}_dt=bf16:bf16:bf16",
        f"mb2ic3ih9oc5kh3ph1rh0dh1{NHWC}{F16}",
        f"mb{{n}}ic16ih9oc32kh40ph20{NHWC}",
        f"mb2ic16iw9oc32kw3_lay=NWC:OWI:NWC{F16}",
    ],
)
def test_taken(direction: str, descriptor: str) -> None:
    assert rules.refusal(direction, problem(descriptor), NO_EPILOGUE) == ""


@pytest.mark.parametrize(
    ("direction", "descriptor", "reason"),
    [
        ("forward", f"g32mb2ic32ih9oc32kh3{NHWC}", "groups=32; the kernel has no groups"),
        ("forward", f"g2mb2ic32ih9oc32kh3{NHWC}", "groups=2; the kernel has no groups"),
        ("forward", "mb2ic16ih9oc32kh3", "layouts NCHW, OIHW, NCHW; it has NHWC, OHWI, NHWC alone"),
        ("forward", "mb2ic16ih9oc32kh3_lay=NHWC:HWIO:NHWC", "layouts NHWC, HWIO, NHWC"),
        ("forward", "mb1ic2id5oc3kd3pd1", "3-D; the kernels of the set are of two dimensions"),
        ("forward", f"mb2ic16ih9oc32kh3{NHWC}_dt=f64:f64:f64", "types float64; it takes float16, bfloat16 or float32"),
        ("forward", f"mb2ic16ih9oc32kh3{NHWC}_dt=f16:bf16:f32", "types bfloat16, float16, float32"),
        ("backward_weight", f"mb2ic16ih9oc32kh3{NHWC}_dt=f32:f16:f32", "types float16, float32"),
        ("backward_data", f"mb2ic16ih9oc32kh3sh2dh1ph2{NHWC}", "dgrad with strides [2, 2] and dilation [2, 2]; no"),
        ("forward", f"mb2ic16ih{{h}}oc32kh3{NHWC}", "height or width is known only at run time"),
        ("forward", f"mb0ic16ih9oc32kh3ph1{NHWC}", "data has no elements"),
        ("forward", f"mb20000ic64ih32oc4kh1sh4{NHWC}", "data has more bytes than an int32 counts"),
    ],
)
def test_refused(direction: str, descriptor: str, reason: str) -> None:
    assert reason in rules.refusal(direction, problem(descriptor), NO_EPILOGUE)


@pytest.mark.parametrize(
    ("direction", "epilogue", "reason"),
    [
        ("forward", Epilogue(bias=True, relu=True), ""),
        ("forward", Epilogue(accumulate=True, relu=True), ""),
        ("forward", Epilogue(bias=True, accumulate=True), "a bias and a sum"),
        ("backward_weight", Epilogue(accumulate=True), ""),
        ("backward_weight", Epilogue(bias_grad=True), "backward_weight takes no bias_grad"),
        ("backward_data", Epilogue(accumulate=True), ""),
        ("backward_data", Epilogue(relu=True), "backward_data takes no relu"),
    ],
)
def test_epilogues(direction: str, epilogue: Epilogue, reason: str) -> None:
    found = rules.refusal(direction, problem(PLAIN), epilogue)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


WGRAD = f"mb8ic64ih56oc64kh3ph1{NHWC}"


@pytest.mark.parametrize(
    ("direction", "descriptor", "arch", "float32", "name", "slices"),
    [
        ("forward", PLAIN, 90, "simt", "fprop_optimized_f16_128x128x32_8x8x8_float16", 1),
        ("forward", PLAIN, 75, "simt", "fprop_optimized_f16_turing_128x128x32_8x8x8_float16", 1),
        (
            "forward",
            f"mb2ic3ih9oc32kh3{NHWC}{F16}",
            80,
            "simt",
            "fprop_optimized_f16_narrow_128x128x32_1x1x8_float16",
            1,
        ),
        ("forward", f"mb2ic6ih99oc32kh33{NHWC}", 80, "tf32", "fprop_analytic_tf32_128x128x16_2x2x4_float32", 1),
        ("forward", f"mb2ic6ih9oc32kh3{NHWC}", 75, "tf32", "fprop_optimized_simt_128x128x8_1x1x1_float32", 1),
        ("backward_data", PLAIN, 80, "simt", "dgrad_unity_optimized_f16_128x128x32_8x8x8_float16", 1),
        (
            *("backward_data", f"mb2ic4ih9oc6kh3sh2{NHWC}_dt=f32:bf16:bf16", 80, "simt"),
            *("dgrad_strided_optimized_bf16_128x128x32_2x4x4_float32", 1),
        ),
        (
            *("backward_weight", f"{WGRAD}_dt=f16:f32:f16", 80, "simt"),
            *("wgrad_optimized_f16_128x128x32_8x8x4_float32", 21),
        ),
        (
            *("backward_weight", f"{WGRAD}{F16}", 80, "simt"),
            *("wgrad_optimized_f16_128x128x32_8x8x4_float16_of_float32_slices", 21),
        ),
        ("backward_weight", PLAIN, 80, "simt", "wgrad_optimized_f16_128x128x32_8x8x8_float16", 1),
    ],
)
def test_kernels(direction: str, descriptor: str, arch: int, float32: str, name: str, slices: int) -> None:
    found = choose(direction, problem(descriptor), NO_EPILOGUE, arch, float32, 8)
    assert isinstance(found, Choice)
    assert (found.instance.name, found.slices) == (name, slices)


@pytest.mark.parametrize(
    ("descriptor", "arch", "reason"),
    [
        (f"mb2ic8ih9oc8kh3{NHWC}_dt=bf16:bf16:bf16", 75, "bfloat16 on sm_75; tensor cores have it from sm_80 on"),
        (
            f"mb2ic3ih9oc8kh3sh2{NHWC}{F16}",
            80,
            "strides with 3 and 8 channels; on sm_80 its strided kernel for float16",
        ),
        (f"mb2ic12ih9oc8kh3sh2{NHWC}{F16}", 75, "strides with 12 and 8 channels; on sm_75"),
    ],
)
def test_no_kernel_for_a_gpu(descriptor: str, arch: int, reason: str) -> None:
    found = choose("backward_data", problem(descriptor), NO_EPILOGUE, arch, "simt", 8)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_targets() -> None:
    cutlass = backend.Cutlass()
    assert cutlass.unavailable(tvm.target.Target("llvm")).startswith("the target is llvm; CUTLASS is used on NVIDIA")
    old = tvm.target.Target({"kind": "cuda", "arch": "sm_70"})
    assert cutlass.unavailable(old) == "the target's arch is sm_70; its kernels are for sm_75 and newer"
    assert backend.arch_number(tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})) == 90


def test_how_float32_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    assert backend.float32_math() == "simt"
    monkeypatch.setenv(backend.VARIABLE, "tf32")
    assert backend.float32_math() == "tf32"
    monkeypatch.setenv(backend.VARIABLE, "fast")
    with pytest.raises(UnsupportedError, match=r"CONVGRAD_CUTLASS=fast: use simt, 3xtf32, tf32"):
        backend.float32_math()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "installed_file", lambda package, file: None)
    monkeypatch.setattr(toolchain, "_DEFAULT_TOOLKIT", "/no/such/folder")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    toolchain.toolchain.cache_clear()
    try:
        why = backend.Cutlass().unavailable(tvm.target.Target({"kind": "cuda", "arch": "sm_90"}))
        assert why.startswith("not installed (nvcc and its headers: the packages nvidia-cuda-nvcc, ")
        assert why.endswith("): pip install 'tvm-convgrad[cutlass]'")
        with pytest.raises(SetupError, match=r"the kernels of cutlass cannot be compiled: not installed"):
            toolchain.required()
    finally:
        toolchain.toolchain.cache_clear()
