# SPDX-License-Identifier: Apache-2.0
"""Legalization: both compositions of each gradient, symbolic extents at run time, CPU and CUDA targets."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir import dlight

from relax_ops.lowering import chosen_form, forced_forms
from relax_ops.program import directions_module
from relax_ops.single_run import quick_machine
from tests.relax.programs import call, module, sizes, tensor
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.operators import check_problems, random_problems

PROBLEM = ConvProblem.from_descriptor("g2mb2ic4ih7iw6oc6kh3kw2sh2sw1ph1pw0")
BOTH = [("a", DIRECTIONS["backward_weight"], PROBLEM), ("b", DIRECTIONS["backward_data"], PROBLEM)]


def ops_of(mod: Any) -> set[str]:
    found: set[str] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            found.add(str(expr.op.name).removeprefix("relax.").removeprefix("nn."))

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return found


STOCK = {
    "nn.conv2d",
    "nn.conv2d_transpose",
    "permute_dims",
    "reshape",
    "tile",
    "nn.pad",
    "strided_slice",
    "flip",
    "sum",
}


@pytest.mark.parametrize(
    ("forms", "present", "absent"),
    [
        ({}, {"conv2d", "conv2d_transpose"}, {"tile", "flip"}),
        ({"backward_weight": "tiled"}, {"conv2d", "conv2d_transpose", "tile", "sum"}, {"flip"}),
        ({"backward_data": "dilated"}, {"conv2d", "flip", "pad"}, {"conv2d_transpose", "tile"}),
        ({"backward_weight": "tiled", "backward_data": "dilated"}, {"tile", "flip"}, {"conv2d_transpose"}),
    ],
    ids=lambda value: "+".join(sorted(value.values() if isinstance(value, dict) else value)) or "default",
)
def test_the_forced_composition_is_the_one_emitted(forms: dict[str, str], present: set[str], absent: set[str]) -> None:
    with forced_forms(**forms):
        for direction, form in forms.items():
            assert chosen_form(direction) == form
        found = ops_of(
            relax.transform.LegalizeOps(skip_ops=[f"relax.{name}" for name in STOCK])(directions_module(BOTH))
        )
    assert present <= found
    assert not absent & found
    assert not {"conv2d_backward_weight", "conv2d_backward_data"} & found


def test_forms_are_forced_for_their_block_only() -> None:
    assert (chosen_form("backward_weight"), chosen_form("backward_data")) == ("swapped", "transposed")
    with forced_forms(backward_weight="tiled"):
        with forced_forms(backward_data="dilated"):
            assert (chosen_form("backward_weight"), chosen_form("backward_data")) == ("tiled", "dilated")
        assert chosen_form("backward_data") == "transposed"
    assert chosen_form("backward_weight") == "swapped"
    with (
        pytest.raises(UnsupportedError, match=r"there is no form 'fft'; there are .*transposed, dilated"),
        forced_forms(backward_data="fft"),
    ):
        pass


def test_all_compositions_agree_bit_for_bit() -> None:
    """Equal to float64, hence to each other; compiled as users compile."""
    impls = ("composition:swapped", "composition:tiled", "composition:transposed", "composition:dilated")
    verdicts = list(check_problems(random_problems(15, 31), impls=impls))
    assert len(verdicts) == 60
    assert [v for v in verdicts if v.status != "right"] == []


# --------------------------------------------------------------------------------------------- symbolic extents


def symbolic_module(strides: tuple[int, int]) -> tuple[Any, list[str]]:
    """Both gradients with symbolic batch, height and width; grad's extents are formulas in them."""
    n, h, w = (tvm.tirx.Var(name, "int64") for name in "nhw")
    grad = tensor("grad", [n, (h - 1) // strides[0] + 1, (w - 1) // strides[1] + 1, 4], "float32")
    data, weight = tensor("data", [n, h, w, 2]), tensor("weight", [3, 3, 2, 4])
    common = {
        "strides": strides,
        "padding": 1,
        "grad_layout": "NHWC",
        "data_layout": "NHWC",
        "kernel_layout": "HWIO",
    }

    def expression(builder: Any) -> Any:
        dw = builder.emit(call("conv2d_backward_weight", grad, data, kernel_size=3, **common))
        dx = builder.emit(call("conv2d_backward_data", grad, weight, data_shape=[n, h, w, 2], **common))
        return relax.Tuple([dw, dx])

    return module(expression, [grad, data, weight]), ["grad", "data", "weight"]


@pytest.mark.parametrize("form", ["transposed", "dilated"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_one_program_for_all_extents(strides: tuple[int, int], form: str) -> None:
    mod, order = symbolic_module(strides)
    with forced_forms(backward_data=form):
        machine = quick_machine(mod)
    rng = np.random.default_rng(0)
    for batch, h, w in ((1, 1, 1), (2, 5, 4), (3, 6, 9), (1, 8, 7)):
        problem = ConvProblem(batch, 2, 4, (h, w), (3, 3), strides, ((1, 1), (1, 1))).with_layouts(
            "NHWC", "HWIO", "NHWC"
        )
        arrays = {name: rng.integers(-4, 5, shape).astype("float32") for name, (shape, _) in problem.tensors.items()}
        dw, dx = machine["main"](*(tvm.runtime.tensor(arrays[name]) for name in order))
        np.testing.assert_array_equal(dw.numpy(), reference.backward_weight(problem, arrays["grad"], arrays["data"]))
        np.testing.assert_array_equal(dx.numpy(), reference.backward_data(problem, arrays["grad"], arrays["weight"]))


@cache
def stock_fuses_formulas() -> bool:
    """Whether TVM itself fuses two operators on a tensor of h - 1 elements; TVM 0.26 raises an internal error."""
    x = tensor("x", [tvm.tirx.Var("h", "int64") - 1])
    mod = module(lambda builder: relax.op.negative(builder.emit(relax.op.exp(x))), [x])
    try:
        with tvm.target.Target("llvm"):
            for make in ("LegalizeOps", "AnnotateTIROpPattern", "FuseOps", "FuseTIR"):
                mod = getattr(relax.transform, make)()(mod)
    except tvm.error.InternalError:
        return False
    return True


def unrelated_module(direction: str) -> Any:
    """grad's height has a name of its own: nothing says at compile time that it is the right one."""
    y, h = (tvm.tirx.Var(name, "int64") for name in "yh")
    grad, data, weight = tensor("grad", [2, 4, y, 4]), tensor("data", [2, 2, h, 4]), tensor("weight", [4, 2, 3, 1])
    if direction == "backward_weight":
        made = call("conv2d_backward_weight", grad, data, kernel_size=(3, 1))
        return module(lambda _: made, [grad, data])
    attributes = {"data_shape": [2, 2, h, 4]}
    made = call("conv2d_backward_data", grad, weight, **attributes)
    return module(lambda _: made, [grad, weight, *sizes(attributes)])


@pytest.mark.parametrize("direction", ["backward_weight", "backward_data"])
def test_extents_that_contradict_at_run_time_are_refused(direction: str) -> None:
    machine = quick_machine(unrelated_module(direction))

    def run(y: int, h: int) -> Any:
        other = np.ones((2, 2, h, 4) if direction == "backward_weight" else (4, 2, 3, 1), "float32")
        arguments = [tvm.runtime.tensor(a) for a in (np.ones((2, 4, y, 4), "float32"), other)]
        if direction == "backward_data":
            arguments.append(tvm.runtime.ShapeTuple([h]))
        return machine["main"](*arguments).numpy()

    result = run(5, 7)
    assert result.shape == ((4, 2, 3, 1) if direction == "backward_weight" else (2, 2, 7, 4))
    for y, h in ((4, 7), (6, 7), (5, 8)):
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)match_?cast|mismatch"):
            run(y, h)


def test_a_tensor_with_checked_extents_keeps_its_memory() -> None:
    """TVM 0.26 takes the memory of a tensor for free once a match_cast has given it another name."""
    y, h = (tvm.tirx.Var(name, "int64") for name in "yh")
    grad, data = tensor("grad", [2, 4, y, 4]), tensor("data", [2, 2, h, 4])

    def expression(builder: Any) -> Any:
        upstream = builder.emit(relax.op.add(grad, grad))
        other = builder.emit(relax.op.multiply(grad, relax.const(100.0)))
        dw = builder.emit(call("conv2d_backward_weight", upstream, data, kernel_size=(3, 1)))
        return relax.Tuple([builder.emit(relax.op.sum(other)), dw])

    machine = relax.VirtualMachine(tvm.compile(module(expression, [grad, data]), "llvm"), tvm.cpu())
    problem = ConvProblem(2, 2, 4, (7, 4), (3, 1))
    rng = np.random.default_rng(0)
    dy, x = (rng.integers(-4, 5, shape).astype("float32") for shape in (problem.grad_shape, problem.data_shape))
    total, dw = machine["main"](tvm.runtime.tensor(dy), tvm.runtime.tensor(x))
    assert total.numpy() == 100 * dy.sum()
    np.testing.assert_array_equal(dw.numpy(), 2 * reference.backward_weight(problem, dy, x))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("symbolic", ["H", "HW", "NHW"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_formulas_as_extents_compile(symbolic: str, layout: str, fused: bool) -> None:
    """Two unpadded convolutions leave extents such as h - 4, on whose transposes stock passes fail."""
    names = {letter: tvm.tirx.Var(letter.lower(), "int64") for letter in symbolic}
    sizes_of = {"N": 2, "C": 2, "H": 9, "W": 8}
    x = tensor("x", [names.get(letter, sizes_of[letter]) for letter in layout])
    w0, w1 = tensor("w0", (4, 2, 3, 3)), tensor("w1", (3, 4, 3, 3))
    builder = relax.BlockBuilder()
    with builder.function("main"):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, w0, data_layout=layout))
            z = builder.emit(relax.op.nn.conv2d(y, w1, data_layout=layout))
            upstream = relax.Var("upstream", relax.TensorType(z.ty.shape, "float32"))
            loss = builder.emit_output(relax.op.sum(relax.op.multiply(z, upstream)))
        builder.emit_func_output(loss, [x, w0, w1, upstream])
    if fused and not stock_fuses_formulas():
        pytest.skip("this TVM cannot fuse operators whose extents are formulas (0.26; docs/SUPPORT.md)")
    mod = relax.transform.Gradient("main", require_grads=[x, w0, w1])(builder.get())
    machine = quick_machine(mod) if fused else relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    first = ConvProblem(2, 2, 4, (9, 8), (3, 3)).with_layouts(layout, "OIHW", layout)
    second = ConvProblem(2, 4, 3, (7, 6), (3, 3)).with_layouts(layout, "OIHW", layout)
    rng = np.random.default_rng(0)
    shapes = (first.data_shape, first.weight_shape, second.weight_shape, second.grad_shape)
    data, a, b, grad = (rng.integers(-2, 3, shape).astype("float32") for shape in shapes)
    found = machine["main_adjoint"](*(tvm.runtime.tensor(array) for array in (data, a, b, grad)))[1]
    between = reference.backward_data(second, grad, b)
    middle = reference.forward(first, data, a)
    np.testing.assert_array_equal(found[0].numpy(), reference.backward_data(first, between, a))
    np.testing.assert_array_equal(found[1].numpy(), reference.backward_weight(first, between, data))
    np.testing.assert_array_equal(found[2].numpy(), reference.backward_weight(second, grad, middle))


def test_a_form_that_refuses_says_why() -> None:
    mod, _ = symbolic_module((1, 1))
    with forced_forms(backward_weight="tiled"), pytest.raises(UnsupportedError, match="batch is symbolic"):
        relax.transform.LegalizeOps()(mod)


# ------------------------------------------------------------------------------------------------------ targets


def cuda_target() -> Any:
    return tvm.target.Target({"kind": "cuda", "arch": "sm_80", "max_num_threads": 1024, "thread_warp_size": 32})


def modules_of(root: Any) -> list[Any]:
    return [root, *(inner for imported in root.imports for inner in modules_of(imported))]


def nvcc() -> str | None:
    home = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    beside = Path(home) / "bin" / "nvcc"
    return shutil.which("nvcc") or (str(beside) if beside.exists() else None)


NVCC = pytest.mark.skipif(nvcc() is None, reason="building CUDA kernels needs nvcc, not found on PATH or in CUDA_PATH")


@NVCC
def test_cuda_kernels_build_without_a_device() -> None:
    depthwise = ConvProblem.from_descriptor("g4mb2ic4id4oc4kd2_dt=f16:f16:f16")
    directions = [*BOTH, ("c", DIRECTIONS["backward_weight"], depthwise), ("d", DIRECTIONS["backward_data"], depthwise)]
    check_kernels(tvm.compile(directions_module(directions), cuda_target()), least=8)


@NVCC
def test_the_other_compositions_build_for_cuda() -> None:
    """With dlight's fallback schedule: its reduction schedule fails on stock's own grouped conv2d as well."""
    target = cuda_target()
    with forced_forms(backward_weight="tiled", backward_data="dilated"), target:
        mod = relax.transform.LegalizeOps()(directions_module(BOTH))
        mod = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(mod)
        check_kernels(tvm.compile(mod, target), least=8)


def check_kernels(executable: Any, least: int) -> None:
    """nvcc has compiled at least so many kernels, convolutions among them."""
    (kernels,) = [inner for inner in modules_of(executable.mod) if inner.kind == "cuda"]
    source = kernels.inspect_source("cuda")
    assert source.count("__global__") >= least
    assert "conv2d" in source
