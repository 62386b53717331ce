# SPDX-License-Identifier: Apache-2.0
"""Kernels of CUTLASS without a GPU: their indices on the host, what they can, their machine code, their calls."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tvm

from relax_ops.program import directions_module
from tests.cases.load import ABSENT, FOLDER
from tests.cases.load import cases as problems_of
from tests.offload.cutlass.emulation import Case, Emulated
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.cutlass.backend import arch_number, kernel_library
from tvm_convgrad.offload.cutlass.kernels import FORMS, MATHS, Choice, Instance, choose
from tvm_convgrad.offload.libraries import installed_file
from tvm_convgrad.offload.partition import offload, partition
from tvm_convgrad.offload.registry import backend

pytestmark = pytest.mark.cutlass

NHWC = "_lay=NHWC:OHWI:NHWC"
AMPERE, TURING = (tvm.target.Target({"kind": "cuda", "arch": arch, "host": "llvm"}) for arch in ("sm_80", "sm_75"))

GEOMETRIES = {
    "unity": (
        "mb2ic{c}ih7iw6oc{k}kh3kw2dh1dw0ph3pw0rh1rw1",  # dilated, asymmetric padding
        "mb3ic{c}ih9oc{k}kh1",  # pointwise, a tile and a half of pixels
    ),
    "strided": (
        "mb2ic{c}ih9iw8oc{k}kh3kw2sh2sw3ph1pw0rh0rw2",  # strides that differ
        "mb2ic{c}ih9oc{k}kh2sh4",  # longer than the kernel: pixels that no tap meets
    ),
    "analytic": ("mb1ic{c}ih40iw3oc{k}kh34kw2ph2pw1", "mb2ic{c}ih38oc{k}kh33kw1sh2sw1iw2"),
    "sums": ("mb5ic{c}ih10iw9oc{k}kh3ph1pw0kw2",),  # 450 pixels, or 5 * 10 * 8: long enough for slices
}
CHANNELS = {"f16": ((16, 24), (12, 20), (6, 10), (5, 3), (5, 8)), "f32": ((8, 12), (6, 10), (5, 3))}


def cases() -> list[Case]:
    """A few problems for each kernel of the set: every form with every math and alignment that it may have."""
    found = []

    def add(direction: str, geometry: str, c: int, k: int, dtypes: str, **options: object) -> None:
        found.append(Case(direction, f"{geometry.format(c=c, k=k)}_dt={dtypes}{NHWC}", **options))

    for form in FORMS:
        strided = form.is_strided_dgrad
        kinds = ["strided"] if strided else ["unity"]
        if form.direction != "backward_data":
            kinds.append("strided")
        if form.iterator == "Analytic":
            geometries = GEOMETRIES["analytic"][1:] if strided else GEOMETRIES["analytic"][:1]
        else:
            geometries = tuple(each for kind in kinds for each in GEOMETRIES[kind])
        if form.direction == "backward_weight":
            geometries += GEOMETRIES["sums"]
        for geometry in geometries:
            for c, k in CHANNELS["f16"]:
                if not (strided and (c % 2 or k % 2)):
                    add(form.direction, geometry, c, k, "f16:f16:f16")
                if not (strided and (c % 8 or k % 8)):
                    add(form.direction, geometry, c, k, "f16:f16:f16", arch=75)
            add(form.direction, geometry, 16, 24, "bf16:bf16:bf16")
            for c, k in CHANNELS["f32"]:
                add(form.direction, geometry, c, k, "f32:f32:f32", float32="3xtf32")
            add(form.direction, geometry, 8, 12, "f32:f32:f32", float32="tf32")
            add(form.direction, geometry, 5, 3, "f32:f32:f32")
        wide = {"forward": "f16:f16:f32", "backward_weight": "f16:f32:f16", "backward_data": "f32:f16:f16"}[
            form.direction
        ]
        add(form.direction, geometries[-1], 16, 24, wide, epilogue=Epilogue(accumulate=True))
        add(form.direction, geometries[0], 16, 24, "f16:f16:f16", epilogue=Epilogue(accumulate=True))
    for dtypes in ("f16:f16:f16", "f32:f32:f32"):
        add("forward", GEOMETRIES["unity"][0], 16, 24, dtypes, epilogue=Epilogue(bias=True, relu=True))
    add("backward_weight", "mb1ic24ih5oc136kh3ph1", 0, 0, "f16:f32:f16")  # two tiles of both axes
    add("forward", "mb1ic136ih9oc144kh1", 0, 0, "f16:f16:f16")
    # Slices are counted for some batch; one that is known at run time only may leave a few of them nothing.
    add("backward_weight", GEOMETRIES["unity"][0], 16, 24, "f16:f32:f16", slices=12)
    return found


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return Emulated(case.choice.instance for case in cases())


def test_indices_of_every_kernel(emulated: Emulated) -> None:
    """Each kernel's own iterators, run on the host, give float64's result to the last bit; see cutlass/emulate.h."""
    every = cases()
    reached = {(case.choice.instance.form, case.choice.instance.math) for case in every}
    excused = {(form, name) for form in FORMS for name in MATHS if form.is_strided_dgrad and "narrow" in name}
    excused |= {(form, "bf16_narrow") for form in FORMS}  # f16_narrow with another two bytes
    assert reached | excused == {(form, name) for form in FORMS for name in MATHS}
    for case in every:
        found, wanted = emulated.run(case)
        assert np.array_equal(found, wanted), (case, case.choice.instance.name)


OTHERS = ("cutlass_conv_problems", "cudnn_frontend_conv")
MOST_PRODUCTS = 20_000_000


@pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)
def test_indices_on_the_problems_of_others(emulated: Emulated) -> None:
    """The convolutions that CUTLASS's and cuDNN's own tests compute, as far as they are small."""
    right = Counter()
    for plain in dict.fromkeys(problem for file in OTHERS for _, problem in problems_of(file)):
        if isinstance(plain, str) or plain.rank != 2 or plain.groups > 1 or plain.macs > MOST_PRODUCTS:
            continue
        problem = replace(plain, data_layout="NHWC", kernel_layout="OHWI", grad_layout="NHWC")
        for direction, dtype in product(DIRECTIONS, ("float16", "float32")):
            case = Case(direction, problem.with_dtypes(dtype, dtype, dtype).descriptor)
            if isinstance(case.found, str):
                assert case.found.endswith(("no kernel of CUTLASS has both", "grad has no elements"))
                continue
            found, wanted = emulated.run(case)
            assert np.array_equal(found, wanted), (case, case.choice.instance.name)
            right[direction, dtype] += 1
    assert len(right) == 6
    assert min(right.values()) >= 20


def test_a_kernel_that_is_refused_reads_outside() -> None:
    """Why the rules refuse dgrad with strides to kernels of two stages with narrow accesses, which CUTLASS has."""

    class Narrow(Case):
        @property
        def choice(self) -> Choice:
            form = next(form for form in FORMS if form.name == "dgrad_strided_optimized")
            return Choice(Instance(form, "f16_narrow", "float16", "float16", (1, 1, 1), False, 0), 1)

    case = Narrow("backward_data", f"mb2ic5ih9oc3kh3sh2ph1{NHWC}_dt=f16:f16:f16")
    with pytest.raises(AssertionError, match=r"an access is outside of every tensor"):
        Emulated([case.choice.instance]).run(case)


BUILT = {
    "f16": ("backward_weight", f"mb8ic64ih56oc64kh3ph1{NHWC}_dt=f16:f32:f16", AMPERE),
    "f16_turing": ("forward", f"mb2ic16ih9oc32kh3ph1{NHWC}_dt=f16:f16:f16", TURING),
    "simt": ("backward_data", f"mb2ic16ih9oc32kh3sh2ph1{NHWC}", AMPERE),
}
"""A kernel that nvcc compiles in these tests, by its math: a call that takes it, and the GPU."""


def built(name: str) -> Path:
    direction, descriptor, target = BUILT[name]
    arch = arch_number(target)
    assert arch is not None
    found = choose(direction, ConvProblem.from_descriptor(descriptor), NO_EPILOGUE, arch, "simt", 8)
    assert isinstance(found, Choice)
    assert found.instance.math == name
    return kernel_library(found.instance)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (
            "f16",
            Engine("wgrad_optimized_f16_128x128x32_8x8x4_float32", "TensorOp, deterministic, 21 slices in turn", 20),
        ),
        ("f16_turing", Engine("fprop_optimized_f16_turing_128x128x32_8x8x8_float16", "TensorOp, deterministic", 0)),
        ("simt", Engine("dgrad_strided_optimized_simt_128x128x8_1x1x1_float32", "Simt, deterministic", 0)),
    ],
)
def test_kernels_say_what_they_can(name: str, engine: Engine) -> None:
    """The built kernel's can_implement, on this machine, without a GPU."""
    direction, descriptor, target = BUILT[name]
    cutlass = backend("cutlass")
    problem = ConvProblem.from_descriptor(descriptor)
    assert cutlass.engine(direction, problem, NO_EPILOGUE, target) == engine
    numbers = cutlass.numbers(direction, problem, NO_EPILOGUE, target)
    numbers[3:5] = [12, 12] if name != "simt" else [1 << 16, 1 << 16]  # channels
    library = ctypes.CDLL(str(built(name)))
    library.convgrad_cutlass_check.restype = ctypes.c_char_p
    refused = library.convgrad_cutlass_check((ctypes.c_int64 * len(numbers))(*numbers), ctypes.byref(ctypes.c_int64()))
    assert refused in (b"Error Invalid Problem", b"Error Misaligned Operand")


def test_a_launch_without_a_gpu_is_an_error() -> None:
    direction, descriptor, target = BUILT["f16"]
    numbers = backend("cutlass").numbers(direction, ConvProblem.from_descriptor(descriptor), NO_EPILOGUE, target)
    library = ctypes.CDLL(str(built("f16")))
    library.convgrad_cutlass_launch.restype = ctypes.c_char_p
    tensors = (ctypes.c_void_p * 3)(0, 0, 0)
    why = library.convgrad_cutlass_launch((ctypes.c_int64 * len(numbers))(*numbers), tensors, None, 99, None)
    assert b"CUDA" in why or b"invalid device" in why


@pytest.mark.parametrize(("name", "instruction"), [("f16", "HMMA.16816"), ("f16_turing", "HMMA.1688"), ("simt", "")])
def test_machine_code_uses_tensor_cores(name: str, instruction: str) -> None:
    """Where it should; plain float32 must not."""
    tool = installed_file("nvidia-cuda-cuobjdump", "bin/cuobjdump")
    disassembler = installed_file("nvidia-cuda-nvdisasm", "bin/nvdisasm")
    assert tool is not None
    assert disassembler is not None
    folder = {"PATH": f"{disassembler.parent}:{tool.parent}"}
    done = subprocess.run([tool, "-sass", built(name)], capture_output=True, text=True, check=True, env=folder)
    kernel = done.stdout[done.stdout.index("ImplicitGemmConvolution") :]
    if instruction:
        assert kernel.count(instruction) >= 32
    else:
        assert "HMMA" not in kernel
        assert kernel.count("FFMA") >= 64


def test_programs() -> None:
    """Calls in a compiled program reach the runtime, which wants a GPU's tensors; what was refused is told."""
    direction, descriptor, _ = BUILT["f16"]
    problem = ConvProblem.from_descriptor(descriptor)
    grouped = ConvProblem.from_descriptor(f"g32mb2ic32ih9oc32kh3{NHWC}")
    directions = [("main", DIRECTIONS[direction], problem), ("grouped", DIRECTIONS[direction], grouped)]
    done = offload(directions_module(directions), ("cutlass",), AMPERE)
    (entry,) = done.lowered
    assert entry.form == "cutlass wgrad_optimized_f16_128x128x32_8x8x4_float32"
    assert done.refused == {(direction, grouped.descriptor): {"cutlass": "groups=32; the kernel has no groups"}}
    with pytest.raises(UnsupportedError, match=r"refused by cutlass: groups=32; the kernel has no groups"):
        partition(directions_module(directions[1:]), ["cutlass"], AMPERE)


PROGRAM = """
import sys
import numpy as np, tvm
from tvm import relax
machine = relax.VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
machine["main"](*(tvm.runtime.tensor(np.zeros(shape, "float16")) for shape in ((8, 56, 56, 64), (8, 56, 56, 64))))
"""


def test_an_exported_library_finds_the_runtime_by_itself(tmp_path: Path) -> None:
    direction, descriptor, target = BUILT["f16"]
    module = partition(
        directions_module([("main", DIRECTIONS[direction], ConvProblem.from_descriptor(descriptor))]),
        ["cutlass"],
        target,
    )
    tvm.compile(module, "llvm").export_library(str(tmp_path / "program.so"))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "program.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cutlass: tensor 0 is not in the memory of an NVIDIA GPU" in done.stderr
