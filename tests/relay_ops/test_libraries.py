# SPDX-License-Identifier: Apache-2.0
"""Regions of oneDNN and of plain C against float64, equal to the last bit; verdicts; what is left to the strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.backends import STRATEGY
from relay_ops.ir import call_of
from relay_ops.partition import partition, partition_for_convgrad, partition_for_onednn, verdicts
from relay_ops.patterns import OPS
from tests.relay_ops.harness import assert_equal, call_program, calls, execute, integers, typed, variables
from tvm_convgrad import ConvProblem, SetupError, UnsupportedError
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD
from tvm_convgrad.offload.registry import backend

LAYOUTS = {
    1: ("NCW:OIW", "NWC:OWI", "NWC:WIO"),
    2: ("NCHW:OIHW", "NHWC:HWIO", "HWCN:IHWO"),
    3: ("NCDHW:OIDHW", "NDHWC:DHWIO"),
}
EPILOGUES = {
    FORWARD: ("", "bias", "accumulate", "bias accumulate relu"),
    BACKWARD_WEIGHT: ("", "accumulate"),
    BACKWARD_DATA: ("", "accumulate"),
}


def compilers(module) -> dict[str, str]:
    """The compiler of each region."""
    functions = module.functions.items()
    return {v.name_hint: str(f.attrs["Compiler"]) for v, f in functions if f.attrs and "Compiler" in f.attrs}


def composites(module) -> list[str]:
    """The names of composite functions, in all regions."""
    found = []

    def visit(node):
        if isinstance(node, relay.Function) and node.attrs and "Composite" in node.attrs:
            found.append(str(node.attrs["Composite"]))

    for function in module.functions.values():
        relay.analysis.post_order_visit(function.body, visit)
    return sorted(found)


def exported(module, path, target="llvm"):
    with tvm.transform.PassContext(opt_level=3):
        relay.build(module, target).export_library(str(path))
    return tvm.runtime.load_module(str(path))


def drawn(rng, rank: int, dtype: str) -> ConvProblem:
    """A small convolution: groups, strides, dilation, asymmetric padding, any of the layouts."""
    groups = int(rng.choice([1, 1, 2, 3]))
    per = [int(each) for each in rng.integers(1, 4, 2)]
    data, weight = str(rng.choice(LAYOUTS[rank])).split(":")
    kernel = tuple(int(each) for each in rng.integers(1, 4, rank))
    dilation = tuple(int(each) for each in rng.integers(1, 3, rank))
    strides = tuple(int(each) for each in rng.integers(1, 4, rank))
    padding = tuple((int(low), int(high)) for low, high in rng.integers(0, 3, (rank, 2)))
    extents = tuple(int(rng.integers((k - 1) * d + 1, (k - 1) * d + 6)) for k, d in zip(kernel, dilation, strict=True))
    made = ConvProblem(
        int(rng.integers(1, 3)), per[0] * groups, per[1] * groups, extents, kernel, strides, padding, dilation, groups,
        data_dtype=dtype, kernel_dtype=dtype, grad_dtype=dtype,
    )  # fmt: skip
    return made.with_layouts(data, weight, data)


class Case:
    """One convolution with an epilogue: its expression, variables, numbers and result."""

    def __init__(self, direction: Any, problem: ConvProblem, epilogue: str, tag: str) -> None:
        arrays = integers(problem)
        shape, dtype = problem.tensors[direction.result]
        layout = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
        rng = np.random.default_rng(len(tag))
        operands = variables(problem, *direction.operands)
        self.arrays: dict[str, Any] = {f"{tag}_{name}": arrays[name] for name in direction.operands}
        self.variables = [relay.var(f"{tag}_{v.name_hint}", v.type_annotation) for v in operands]
        self.expr = call_of(direction, problem, *self.variables)
        self.wanted = reference.DIRECTIONS[direction.name](problem, *(arrays[n] for n in direction.operands))
        for part in epilogue.split():
            if part == "relu":
                self.expr, self.wanted = relay.nn.relu(self.expr), self.wanted.clip(min=0)
                continue
            axis = layout[direction.result].find("C")
            extent = (problem.out_channels,) if part == "bias" else shape
            values = rng.integers(-3, 4, extent).astype(dtype)
            self.variables.append(relay.var(f"{tag}_{part}", shape=extent, dtype=dtype))
            self.arrays[f"{tag}_{part}"] = values
            if part == "bias":
                self.expr = relay.nn.bias_add(self.expr, self.variables[-1], axis=axis)
                values = values.reshape([-1 if i == axis else 1 for i in range(len(shape))])
            else:
                self.expr = relay.add(self.variables[-1], self.expr)
            self.wanted = self.wanted + values.astype("float64")


def widened(problem: ConvProblem, rng: Any) -> ConvProblem:
    """With channels and a row that tiles of registers and vectors do not divide."""
    extents = (*problem.data_extents[:-1], int(problem.data_extents[-1]) + int(rng.integers(8, 30)))
    channels = [problem.groups * int(each) for each in rng.integers(5, 40, 2)]
    return replace(problem, in_channels=channels[0], out_channels=channels[1], data_extents=extents)


def cases_of(rank: int, dtype: str, count: int) -> list[Case]:
    rng = np.random.default_rng([rank, count])
    kinds = [(direction, epilogue) for direction, all_of in EPILOGUES.items() for epilogue in all_of]
    made = []
    for number in range(count):
        direction, epilogue = kinds[number % len(kinds)]
        problem = drawn(rng, rank, dtype)
        made.append(Case(direction, widened(problem, rng) if number % 2 else problem, epilogue, f"case{number}"))
    return made


def together(cases: list[Case]) -> Any:
    every = [variable for case in cases for variable in case.variables]
    return typed(relay.Function(every, relay.Tuple([case.expr for case in cases])))


def numbers(cases: list[Case]) -> dict[str, Any]:
    return {name: array for case in cases for name, array in case.arrays.items()}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("name", "dtype"), [("onednn", "float32"), ("c", "float32"), ("c", "float64")])
def test_regions_are_right(name, dtype, rank, tmp_path):
    """Many convolutions of a rank in one program, with all epilogues: many regions, results and operands."""
    cases = cases_of(rank, dtype, 8 if dtype == "float64" else 12)
    module = partition(together(cases), [name], forward=True)
    assert not calls(tvm.IRModule.from_expr(module["main"]), *OPS)
    taken = [label.partition(".")[2] for label in composites(module)]
    assert sum(label.endswith("accumulate") or "_accumulate" in label for label in taken) >= len(cases) // 4
    for case, found in zip(cases, execute(exported(module, tmp_path / "all.so"), numbers(cases)), strict=True):
        assert_equal(found, case.wanted)


def test_bfloat16_on_onednn(tmp_path):
    """Both results: bfloat16, and float32 of bfloat16 operands."""
    for text in ("mb2ic16ih9oc16kh3ph1_dt=bf16:bf16:bf16", "mb2ic16ih5oc16kh1_dt=bf16:f32:bf16"):
        problem = ConvProblem.from_descriptor(text)
        program = call_program(BACKWARD_WEIGHT, problem)
        (found,) = verdicts(program, ["onednn"])
        if not found.backend:  # the CPU has no instructions for it, and oneDNN only its reference
            assert "on this CPU" in found.refused["onednn"]
            continue
        module = partition_for_onednn(program)
        arrays = integers(problem)
        operands = {n: np.sign(arrays[n].astype("float32")) for n in BACKWARD_WEIGHT.operands}
        symbol, region = next(
            (v.name_hint, f) for v, f in module.functions.items() if f.attrs and "Compiler" in f.attrs
        )
        path = str(tmp_path / f"{problem.kernel_dtype}.so")
        tvm.get_global_func(f"relay.ext.{region.attrs['Compiler']}")(region).export_library(path)
        given = [
            tvm.nd.empty(v.shape, "bfloat16").copyfrom(v.astype(ml_dtypes.bfloat16).view("uint16"))
            for v in operands.values()
        ]
        wide = problem.kernel_dtype == "float32"
        out = tvm.nd.empty(problem.weight_shape, problem.kernel_dtype)
        tvm.runtime.load_module(path)[symbol](*given, out)
        result = out.numpy() if wide else out.numpy().view("uint16").view(ml_dtypes.bfloat16)
        assert_equal(np.asarray(result), reference.backward_weight(problem, *operands.values()))


WITHOUT = """
import sys
import numpy as np, tvm
from tvm.contrib import graph_executor
library, arrays, out = sys.argv[1:]
executor = graph_executor.GraphModule(tvm.runtime.load_module(library)["default"](tvm.cpu()))
for name, array in np.load(arrays).items():
    executor.set_input(name, array)
for _ in range(2):
    executor.run()
assert not [m for m in sys.modules if m.split(".")[0] in ("tvm_convgrad", "relay_ops", "legalize")]
np.savez(out, *(executor.get_output(i).numpy() for i in range(executor.get_num_outputs())))
"""


def test_threads_and_processes_without_the_package(tmp_path):
    """One library with regions of oneDNN, and of C for what that refuses; on one thread and on two."""
    large = ConvProblem.from_descriptor("mb3ic16ih12oc24kh3ph1_dt=f64:f64:f64")
    cases = [*cases_of(2, "float32", 4), *(Case(d, large, "", f"wide_{d.name}") for d in EPILOGUES)]
    module = partition(together(cases), ["onednn", "c"], forward=True)
    assert set(compilers(module).values()) == {"tvm_convgrad_onednn", "tvm_convgrad"}
    library = tmp_path / "step.so"
    exported(module, library)
    np.savez(tmp_path / "arrays.npz", **numbers(cases))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for threads in ("1", "2"):
        out = tmp_path / f"out{threads}.npz"
        subprocess.run(
            [sys.executable, "-c", WITHOUT, str(library), str(tmp_path / "arrays.npz"), str(out)],
            check=True, cwd=tmp_path, env={**environment, "TVM_NUM_THREADS": threads},
        )  # fmt: skip
        with np.load(out) as found:
            for number, case in enumerate(cases):
                assert_equal(found[f"arr_{number}"], case.wanted)


def test_c_is_compiled_for_the_targets_vectors(tmp_path):
    problem = ConvProblem.from_descriptor("mb2ic8ih12oc24kh3ph1")
    machine = "haswell" if "avx2" in Path("/proc/cpuinfo").read_text() else "x86-64"
    texts = {}
    for mcpu in ("skylake-avx512", "haswell", "x86-64"):
        module = partition(call_program(BACKWARD_WEIGHT, problem), ["c"], f"llvm -mcpu={mcpu}")
        ((symbol, compiler),) = compilers(module).items()
        texts[mcpu] = tvm.get_global_func(f"relay.ext.{compiler}")(module[symbol]).get_source()
        if mcpu == machine:
            arrays = integers(problem)
            library = exported(module, tmp_path / "step.so", f"llvm -mcpu={mcpu}")
            (found,) = execute(library, {name: arrays[name] for name in BACKWARD_WEIGHT.operands})
            assert_equal(found, reference.backward_weight(problem, arrays["grad"], arrays["data"]))
    assert 'target("avx512f' in texts["skylake-avx512"]
    assert 'target("avx2,fma")' in texts["haswell"]
    assert "GCC target" not in texts["x86-64"]
    assert all("TVMBackendParallelLaunch(" in text for text in texts.values())


PROBLEM = ConvProblem.from_descriptor("mb2ic4ih9oc4kh3ph1")


def test_nothing_is_taken_unasked_where_strategies_are():
    for direction in DIRECTIONS.values():
        program = call_program(direction, PROBLEM)
        tvm.ir.assert_structural_equal(partition(program), program)
        (verdict,) = verdicts(program)
        assert verdict.backend == ""
        assert verdict.refused["onednn"] == verdict.refused["c"] == STRATEGY
        assert "the target is llvm" in verdict.refused["cudnn"]
        assert "the target is llvm" in verdict.refused["cutlass"]
    assert set(compilers(partition(call_program(BACKWARD_DATA, PROBLEM), target="c")).values()) == {"tvm_convgrad"}


def test_refusals_say_why():
    double = ConvProblem.from_descriptor("mb2ic4ih9oc4kh3ph1_dt=f64:f64:f64")
    with pytest.raises(UnsupportedError, match=r"no convolution can be[^|]*onednn: types float64"):
        partition(call_program(BACKWARD_DATA, double), ["onednn"])
    (verdict,) = verdicts(call_program(BACKWARD_DATA, double), ["onednn", "c"])
    assert verdict.backend == "c"
    assert "types float64" in verdict.refused["onednn"]
    assert str(verdict).startswith("nn.conv2d_backward_data ")
    with pytest.raises(SetupError, match="cuDNN is used on NVIDIA GPUs"):
        partition(call_program(BACKWARD_DATA, PROBLEM), ["cudnn"])
    with pytest.raises(UnsupportedError, match="no backend 'dnnl'"):
        partition(call_program(BACKWARD_DATA, PROBLEM), ["dnnl"])
    with pytest.raises(SetupError, match="C loops are for CPUs"):
        partition(call_program(BACKWARD_DATA, PROBLEM), ["c"], "cuda -arch=sm_90")


def test_runtimes_of_libraries_are_those_of_relax():
    """What is refused or taken is decided by the same object, and the runtime needs nothing of TVM."""
    library = backend("onednn").library()
    assert "relay" in library.name
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "tvm" not in "".join(line for line in needed.splitlines() if "NEEDED" in line)


def test_epilogues_that_are_left_to_relay():
    operands = variables(PROBLEM, "data", "weight")
    bias, summand = relay.var("bias", shape=(4,)), relay.var("summand", shape=(2, 4, 9, 9))
    convolution = call_of(FORWARD, PROBLEM, *operands)
    plain, rows = call_of(FORWARD, PROBLEM, *operands), relay.var("rows", shape=(9,))
    left = {
        # along another axis than the channels
        "tvm_convgrad_onednn.conv2d": relay.nn.bias_add(plain, rows, axis=2),
        # one pass over memory with what makes the summand
        "tvm_convgrad_onednn.conv2d_bias": relay.add(relay.nn.bias_add(convolution, bias), relay.exp(summand)),
        "tvm_convgrad_onednn.conv2d_accumulate": relay.nn.relu(relay.add(convolution, summand)),
    }
    for label, expr in left.items():
        assert composites(partition(typed(relay.Function(relay.analysis.free_vars(expr), expr)), ["onednn"])) == [label]
    own = relay.add(convolution, convolution)
    module = partition(typed(relay.Function(operands, own)), ["onednn"])
    assert composites(module) == ["tvm_convgrad_onednn.conv2d"], "a convolution that is its own summand"
    late = relay.add(relay.nn.bias_add(convolution, bias), convolution)
    module = partition(typed(relay.Function([*operands, bias], late)), ["onednn"])
    assert composites(module) == ["tvm_convgrad_onednn.conv2d"], "a convolution that is read twice"
    # read by something else: it is a result of its own
    both = relay.Tuple([convolution, relay.nn.bias_add(convolution, bias)])
    module = partition(typed(relay.Function([*operands, bias], both)), ["onednn"])
    assert composites(module) == ["tvm_convgrad_onednn.conv2d"]


def test_sums_of_convolutions(tmp_path):
    """Which of two convolutions is the summand, and one that is the operand, too."""
    x, w = variables(PROBLEM, "data", "weight")
    other = relay.var("other", shape=PROBLEM.weight_shape)
    first, second = call_of(FORWARD, PROBLEM, x, w), call_of(FORWARD, PROBLEM, x, other)
    residual = relay.add(call_of(FORWARD, PROBLEM, first, other), first)
    body = relay.Tuple([relay.add(first, second), residual, relay.add(x, call_of(FORWARD, PROBLEM, x, w))])
    module = partition(typed(relay.Function([x, w, other], body)), ["onednn"])
    arrays = {name: np.sign(array) for name, array in integers(PROBLEM).items()}
    values = {"data": arrays["data"], "weight": arrays["weight"], "other": np.sign(integers(PROBLEM, 1)["weight"])}
    a = reference.forward(PROBLEM, values["data"], values["weight"])
    b = reference.forward(PROBLEM, values["data"], values["other"])
    wanted = [a + b, reference.forward(PROBLEM, a, values["other"]) + a, values["data"] + a]
    for found, want in zip(execute(exported(module, tmp_path / "sums.so"), values), wanted, strict=True):
        assert_equal(found, want)


def test_weights_that_are_constants(tmp_path):
    arrays = integers(PROBLEM)
    program = call_program(FORWARD, PROBLEM)
    module = partition_for_convgrad(program, {"weight": tvm.nd.array(arrays["weight"])}, ["onednn"])
    assert [v.name_hint for v in program["main"].params] == ["data", "weight"], "the argument is not changed"
    assert [v.name_hint for v in module["main"].params] == ["data"]
    (found,) = execute(exported(module, tmp_path / "constant.so"), {"data": arrays["data"]})
    assert_equal(found, reference.forward(PROBLEM, arrays["data"], arrays["weight"]))


def test_transposed_convolutions_are_dgrads(tmp_path):
    data, weight = relay.var("data", shape=(2, 6, 5, 5)), relay.var("weight", shape=(6, 2, 3, 3))
    attributes = {"channels": 4, "kernel_size": (3, 3), "strides": (2, 2), "padding": (1, 1), "groups": 2}
    body = relay.nn.conv2d_transpose(data, weight, output_padding=(1, 1), kernel_layout="IOHW", **attributes)
    module = partition(typed(relay.Function([data, weight], body)), ["onednn"])
    assert composites(module) == ["tvm_convgrad_onednn.conv2d_transpose"]
    problem = ConvProblem(2, 4, 6, (10, 10), (3, 3), (2, 2), ((1, 1), (1, 1)), groups=2)
    arrays = integers(problem)
    values = {"data": arrays["grad"], "weight": arrays["weight"]}
    (found,) = execute(exported(module, tmp_path / "transposed.so"), values)
    assert_equal(found, reference.backward_data(problem, arrays["grad"], arrays["weight"]))


def test_regions_survive_a_round_trip_through_json(tmp_path):
    """A region says what it was made for, so that it can be compiled where the program is loaded again."""
    module = partition(call_program(BACKWARD_WEIGHT, PROBLEM), ["onednn"], "llvm -mcpu=haswell")
    again = tvm.ir.load_json(tvm.ir.save_json(module))
    (symbol,) = compilers(again)
    assert "haswell" in str(again[symbol].attrs["convgrad.target"])
    arrays = integers(PROBLEM)
    (found,) = execute(exported(again, tmp_path / "again.so"), {n: arrays[n] for n in BACKWARD_WEIGHT.operands})
    assert_equal(found, reference.backward_weight(PROBLEM, arrays["grad"], arrays["data"]))
