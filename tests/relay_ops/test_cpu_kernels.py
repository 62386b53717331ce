# SPDX-License-Identifier: Apache-2.0
"""Generated CPU kernels in Relay: chosen as in Relax, right for every problem, fused, threaded, exported.

Small integers are compared with float64, every element; outputs hold NaN before a program runs. Calls are compiled
together, as compiling is what costs time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relay, te
from tvm.contrib import graph_executor

from relay_ops.cpu_kernels import without_kernels
from relay_ops.fusion import FUSED, FuseEpilogues
from relay_ops.ir import call_of
from tests.pairwise import covering
from tests.relay_ops.harness import assert_equal, call_program, calls, integers, typed, variables
from tvm_convgrad import ConvProblem, allow_transforms
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.geometry import SPATIAL, flat_padding, hidden_extent
from tvm_convgrad.kernels.registry import all_kernels

TARGETS = {
    "AVX-512": "llvm -mcpu=skylake-avx512",
    "AVX2": "llvm -mcpu=haswell",
    "SSE": "llvm",
}
TRANSPOSED = {1: relay.nn.conv1d_transpose, 2: relay.nn.conv2d_transpose, 3: relay.nn.conv3d_transpose}


def cpu_has(name):
    """Whether this CPU runs what is compiled for a target."""
    flags = Path("/proc/cpuinfo").read_text()
    return {"AVX-512": " avx512f ", "AVX2": " avx2 ", "SSE": " sse2 "}[name] in flags


def random_problem(rng, rank, dtype):
    axes = SPATIAL[rank]
    groups = rng.choice([1, 1, 2, 3])
    inner, outer = rng.choice([1, 2, 5, 17]), rng.choice([1, 3, 16, 19])
    if groups == 3 and rng.random() < 0.5:
        groups, inner, outer = rng.choice([3, 20]), 1, 1
    kernel = tuple(rng.choice([1, 2, 3]) for _ in axes)
    dilation = tuple(rng.choice([1, 1, 2]) for _ in axes)
    padding = tuple((rng.randrange(3), rng.randrange(3)) for _ in axes)
    extents = tuple(rng.choice([5, 6, 9, 18 if rank < 3 else 7]) for _ in axes)
    strides = tuple(rng.choice([1, 1, 2, 3]) for _ in axes)
    problem = ConvProblem(
        rng.choice([1, 2, 3]), groups * inner, groups * outer, extents, kernel, strides, padding, dilation, groups
    )
    data, weight = rng.choice([(f"NC{axes}", f"OI{axes}"), (f"N{axes}C", f"O{axes}I"), (f"N{axes}C", f"{axes}IO")])
    problem = problem.with_layouts(data, weight, data)
    return replace(problem, data_dtype=dtype, kernel_dtype=dtype, grad_dtype=dtype)


def transposed_call(problem, data, weight):
    """dgrad of a problem in canonical layouts as nn.conv{1,2,3}d_transpose."""
    axes = zip(problem.data_extents, problem.kernel, problem.strides, problem.dilation, problem.padding, strict=True)
    return TRANSPOSED[problem.rank](
        data,
        weight,
        strides=problem.strides,
        dilation=problem.dilation,
        padding=flat_padding(problem.padding),
        output_padding=tuple(hidden_extent(int(x), k, s, d, *pad) for x, k, s, d, pad in axes),
        groups=problem.groups,
        channels=problem.in_channels,
        kernel_size=problem.kernel,
    )


def built(module, target):
    with tvm.transform.PassContext(opt_level=3):
        return relay.build(module, target)


def filled(factory, arrays):
    """The outputs of a program, which hold NaN before it runs."""
    executor = graph_executor.GraphModule(factory["default"](tvm.cpu()))
    for name, array in arrays.items():
        executor.set_input(name, array)
    outputs = [executor.get_output(i) for i in range(executor.get_num_outputs())]
    for output in outputs:
        output.copyfrom(np.full(output.shape, np.nan, output.dtype))
    executor.run()
    return [output.numpy() for output in outputs]


def everything(problems):
    """One program of all directions of all problems, its inputs, and its results in float64."""
    parameters, results, arrays, wanted = [], [], {}, []
    for number, problem in enumerate(problems):
        own = {}
        for name, array in integers(problem, number).items():
            parameter = relay.var(f"{name}{number}", shape=problem.tensors[name][0], dtype=problem.tensors[name][1])
            own[name] = parameter
            arrays[parameter.name_hint] = array
        parameters += own.values()
        values = {name: arrays[f"{name}{number}"] for name in own}
        for direction in DIRECTIONS.values():
            first, second = (own[name] for name in direction.operands)
            results.append(call_of(direction, problem, first, second))
            wanted.append(reference.DIRECTIONS[direction.name](problem, *(values[n] for n in direction.operands)))
        axes = SPATIAL[problem.rank]
        canonical = (problem.data_layout, problem.kernel_layout) == (f"NC{axes}", f"OI{axes}")
        if canonical and (problem.groups == 1 or problem.rank == 2) and set(problem.dilation) == {1}:
            results.append(transposed_call(problem, own["grad"], own["weight"]))
            wanted.append(reference.backward_data(problem, values["grad"], values["weight"]))
    return typed(relay.Function(parameters, relay.Tuple(results))), arrays, wanted


RANDOM = covering({"rank": "123", "dtype": ["float32", "float64", "float16"], "instructions": list(TARGETS)}, seed=0)


@pytest.mark.parametrize(("rank", "dtype", "instructions"), [row.values() for row in RANDOM])
def test_random_problems_are_right(rank, dtype, instructions):
    """Each two of rank, type and instruction set together; the fuzzer has all three, of the same kernels in Relax."""
    rng = random.Random(f"{rank} {dtype} {instructions}")
    problems = [random_problem(rng, int(rank), dtype) for _ in range(1 if rank == "3" else 2)]
    module, arrays, wanted = everything(problems)
    library = built(module, TARGETS[instructions])
    assert library.lib is not None
    if cpu_has(instructions):
        for found, want in zip(filled(library, arrays), wanted, strict=True):
            assert_equal(found, want)


NAMED = [
    "mb8ic64ih14oc64oh14kh3ph1",
    "mb8ic64ih14oc64oh14kh3ph1_lay=NHWC:OHWI:NHWC",
    "g64mb8ic64ih28oc64kh3ph1",
    "g64mb8ic64ih28oc64kh3ph1_lay=NHWC:OHWI:NHWC",
    "g32mb8ic128ih28oc128kh3ph1_lay=NHWC:OHWI:NHWC",
]


def implementations(direction, problem, target):
    """Relay's implementations of a call with their priorities; without records of tuning it takes the highest."""
    call = call_program(direction, problem)["main"].body
    inputs = [te.placeholder(problem.tensors[name][0], problem.tensors[name][1]) for name in direction.operands]
    with target:
        found = call.op.get_attr("FTVMStrategy")(call.attrs, inputs, call.checked_type, target)
    return {i.name: i.plevel for specialized in found.specializations for i in specialized.implementations}


def implementation(direction, problem, target):
    """The name of what Relay takes for a call."""
    found = implementations(direction, problem, target)
    return max(found, key=found.get)


def test_relay_takes_every_kernel():
    """But those of 16-bit types only: these problems are in float32, and Relay calls no kernel in bfloat16."""
    target = tvm.target.Target(TARGETS["AVX-512"])
    found = set()
    for problem in map(ConvProblem.from_descriptor, NAMED):
        for direction in DIRECTIONS.values():
            found.add(implementation(direction, problem, target).partition(".")[2])
            with allow_transforms():
                found.add(implementation(direction, problem, target).partition(".")[2])
    kernels = [kernel for kernel in all_kernels() if "float32" in kernel.dtypes]
    labels = {kernel.label(direction).replace(" ", "_") for kernel in kernels for direction in kernel.directions}
    assert found == labels


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=lambda direction: direction.name)
def test_where_no_kernel_is_taken(direction):
    """On other targets, in bfloat16 and where kernels are off: TVM's own, or the composition and the formula."""
    problem = ConvProblem.from_descriptor("mb2ic4ih9oc6kh3ph1")
    kernel, cpu = f".implicit_GEMM_{direction.short}", tvm.target.Target("llvm")
    assert implementation(direction, problem, cpu).endswith(kernel)
    with without_kernels():
        assert kernel not in implementation(direction, problem, cpu)
    narrow = replace(problem, data_dtype="bfloat16", kernel_dtype="bfloat16", grad_dtype="bfloat16")
    if direction is not FORWARD:  # TVM has no bfloat16 convolution on x86
        assert kernel not in implementation(direction, narrow, cpu)
    program = call_program(direction, problem)
    name = program["main"].body.op.name
    with cpu:
        assert calls(relay.transform.Legalize()(program), name)
    with tvm.target.Target("cuda"):
        assert bool(calls(relay.transform.Legalize()(program), name)) == (direction is FORWARD)


def test_a_tuned_stock_convolution_stays_in_the_strategy():
    problem = ConvProblem.from_descriptor("mb2ic16ih9oc16kh3ph1")
    target = tvm.target.Target("llvm")
    found = implementations(FORWARD, problem, target)
    with without_kernels():
        stock = implementations(FORWARD, problem, target)
    (own,) = found.keys() - stock.keys()
    assert own.endswith(".implicit_GEMM_forward")
    assert found[own] > max(stock.values())
    assert {name: found[name] for name in stock} == stock


CHAINS = [
    ("g2mb2ic4ih9oc6kh3sh2dh1ph1", FORWARD),
    ("g2mb2ic4ih9oc6kh3sh2dh1ph1_lay=NHWC:HWIO:NHWC", FORWARD),
    ("mb2ic3iw17oc4kw5sw2pw2", BACKWARD_DATA),
    ("g4mb2ic4ih9oc4kh3ph1_lay=NHWC:OHWI:NHWC", BACKWARD_DATA),
    ("mb8ic64ih28oc64oh28kh3ph1", FORWARD),
    ("mb1ic2id6oc3kd3dd1pd1", BACKWARD_WEIGHT),
    ("mb2ic16ih9oc32kh3ph1", BACKWARD_WEIGHT),
]


def chains():
    """(program, inputs, result) of convolutions with all that can be fused, in several spellings."""
    parameters, results, arrays, wanted = [], [], {}, []
    for number, (text, direction) in enumerate(CHAINS):
        problem = ConvProblem.from_descriptor(text)
        own = integers(problem, number)
        shape, dtype = problem.tensors[direction.result]
        total = reference.DIRECTIONS[direction.name](problem, *(own[name] for name in direction.operands))
        rng = np.random.default_rng(number)
        extra = {"acc": rng.integers(-3, 4, shape).astype(dtype)}
        layouts = {"data": problem.data_layout, "grad": problem.grad_layout}
        axis = layouts.get(direction.result, "").find("C")
        if axis >= 0:
            extra["bias"] = rng.integers(-3, 4, shape[axis]).astype(dtype)
        names = {}
        for name in (*direction.operands, *extra):
            array = own.get(name, extra.get(name))
            names[name] = relay.var(f"{name}{number}", shape=array.shape, dtype=dtype)
            arrays[f"{name}{number}"] = array
        parameters += names.values()
        value = call_of(direction, problem, *(names[name] for name in direction.operands))
        expected = total + extra["acc"]
        along = [-1 if i == axis else 1 for i in range(len(shape))]
        value = relay.add(value, names["acc"]) if number % 2 else relay.add(names["acc"], value)
        if axis >= 0:
            if number % 2:
                value = relay.add(
                    value, relay.reshape(names["bias"], [shape[axis] if extent < 0 else 1 for extent in along])
                )
            else:
                value = relay.nn.bias_add(value, names["bias"], axis)
            value = relay.nn.relu(value)
            expected = np.maximum(expected + extra["bias"].reshape(along), 0)
        results.append(value)
        wanted.append(expected)
    return typed(relay.Function(parameters, relay.Tuple(results))), arrays, wanted


def fused(module, target):
    with target:
        return FuseEpilogues()(module)


@pytest.mark.parametrize("instructions", TARGETS)
def test_bias_relu_and_sums_are_fused(instructions):
    module, arrays, wanted = chains()
    target = tvm.target.Target(TARGETS[instructions])
    changed = fused(module, target)
    assert len(calls(changed, FUSED)) == len(CHAINS)
    assert not calls(changed, "add", "nn.bias_add", "nn.relu")
    library = built(changed, target)
    if cpu_has(instructions):
        for found, want in zip(filled(library, arrays), wanted, strict=True):
            assert_equal(found, want)


def test_what_was_fused_is_taken_apart_where_the_kernel_is_not():
    module, arrays, wanted = chains()
    changed = fused(module, tvm.target.Target("llvm"))
    with without_kernels():
        assert not calls(relay.transform.Legalize()(changed), FUSED)
        for found, want in zip(filled(built(changed, "llvm"), arrays), wanted, strict=True):
            assert_equal(found, want)


def test_a_channel_multiplier_is_a_kernels_too():
    data, weight = relay.var("data", shape=(2, 4, 9, 7)), relay.var("weight", shape=(4, 3, 3, 3))
    conv = relay.nn.conv2d(data, weight, channels=12, kernel_size=(3, 3), groups=4, padding=(1, 1))
    module = typed(relay.Function([data, weight], relay.nn.relu(conv)))
    changed = fused(module, tvm.target.Target("llvm"))
    assert len(calls(changed, FUSED)) == 1
    problem = ConvProblem.from_descriptor("g4mb2ic4ih9iw7oc12kh3kw3ph1pw1")
    own = integers(problem)
    arrays = {"data": own["data"], "weight": own["weight"].reshape(4, 3, 3, 3)}
    want = np.maximum(reference.forward(problem, own["data"], own["weight"]), 0)
    for program in (module, changed):
        assert_equal(filled(built(program, "llvm"), arrays)[0], want)
    with without_kernels():
        assert_equal(filled(built(changed, "llvm"), arrays)[0], want)


def test_what_somebody_reads_is_not_fused():
    problem = ConvProblem.from_descriptor("mb2ic4ih9oc4kh3ph1")
    data, weight = variables(problem, "data", "weight")
    value = call_of(FORWARD, problem, data, weight)
    other = relay.var("other", shape=(4,))
    read_twice = relay.Tuple([relay.nn.relu(value), value])
    wrong_axis = relay.nn.bias_add(value, relay.var("long", shape=(9,)), 2)
    after_relu = relay.nn.bias_add(relay.nn.relu(value), other)
    target = tvm.target.Target("llvm")
    for result, count in ((read_twice, 0), (wrong_axis, 0), (after_relu, 1)):
        module = typed(relay.Function(relay.analysis.free_vars(result), result))
        assert len(calls(fused(module, target), FUSED)) == count
        tvm.ir.assert_structural_equal(fused(fused(module, target), target), fused(module, target))
    assert calls(fused(typed(relay.Function([data, weight, other], after_relu)), target), "nn.bias_add")
    with pytest.raises(SetupError, match="no target is in scope"):
        FuseEpilogues()(module)


ALONE = """
import sys, importlib.util
import numpy as np, tvm
from tvm.contrib import graph_executor
assert importlib.util.find_spec("tvm_convgrad") is importlib.util.find_spec("relay_ops") is None
library, arrays, threads = sys.argv[1:]
assert tvm.get_global_func("runtime.NumThreads")() == int(threads)
executor = graph_executor.GraphModule(tvm.runtime.load_module(library)["default"](tvm.cpu()))
with np.load(arrays) as inputs:
    for name in inputs.files:
        executor.set_input(name, inputs[name])
executor.run()
np.savez(f"{threads}.npz", *(executor.get_output(i).numpy() for i in range(executor.get_num_outputs())))
"""


def test_library_alone_on_one_thread_and_on_two(tmp_path):
    """The same bits on any number of threads, in processes without this package."""
    module, arrays, wanted = chains()
    target = tvm.target.Target("llvm")
    rng = np.random.default_rng(0)
    with_fractions = {name: array + rng.random(array.shape, "float32") for name, array in arrays.items()}
    built(fused(module, target), target).export_library(str(tmp_path / "library.so"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    results = []
    for number, values in enumerate((arrays, with_fractions)):
        np.savez(tmp_path / "arrays.npz", **values)
        for threads in (1, 2):
            subprocess.run(
                [sys.executable, "-c", ALONE, "library.so", "arrays.npz", str(threads)],
                check=True,
                cwd=tmp_path,
                env={**environment, "TVM_NUM_THREADS": str(threads)},
            )
            with np.load(tmp_path / f"{threads}.npz") as found:
                results.append([found[name] for name in found.files])
            if number == 0:
                for found, want in zip(results[-1], wanted, strict=True):
                    assert_equal(found, want)
    for one, two in zip(results[2], results[3], strict=True):
        np.testing.assert_array_equal(one, two)
