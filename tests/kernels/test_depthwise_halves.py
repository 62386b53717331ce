# SPDX-License-Identifier: Apache-2.0
"""Depthwise kernels and small groups of bfloat16 and float16: vectors of two bytes an element, sums in float32."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from tests.kernels.harness import MACHINE, TARGET, _blank, always, compiled, forced
from tests.kernels.test_depthwise import CASES, CHANNELS, COLUMNS, GROUPS, SHORT_ROWS
from tvm_convgrad.codegen.dot_product import NAME
from tvm_convgrad.codegen.hardware import CPUS, Machine, machine_of
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.exact import numbers_of, reduction_length
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCES
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.contract import Plan
from tvm_convgrad.kernels.depthwise import columns_plan
from tvm_convgrad.kernels.depthwise.columns_plan import wgrad_rows_per_vector
from tvm_convgrad.kernels.depthwise.columns_wgrad import ColumnsWgradTiling
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.registry import kernel_named
from tvm_convgrad.verify.fuzzing.cases import KernelCase
from tvm_convgrad.verify.fuzzing.compiled import compile_and_check
from tvm_convgrad.verify.interpreter import execute

TYPES = (
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float16", "float16", "float16"),
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "bfloat16", "float16"),
    ("float16", "float32", "bfloat16"),
    ("bfloat16", "float64", "bfloat16"),
)
"""Of X, W and dY: one type, or weights in float32, or sums in float64."""

PAIRED = {
    "7x7": "g3mb2ic3ih17iw21oc3kh7kw7ph3pw3",
    "7x7, several rows a vector": "g3mb2ic3ih7iw7oc3kh7kw7ph3pw3",
    "5x5, a multiplier": "g2mb2ic2ih9iw33oc6kh5kw5ph2pw2",
    "5x5, two phases": "g3mb1ic3ih11iw35oc3kh5kw5sh2sw2ph2pw2",
    "an even width, padding on one side": "g4mb1ic4ih8iw18oh8ow18oc4kh3kw4ph1pw2",
    "dilated": "g2mb1ic2ih13iw40oc2kh3kw3dh1dw3ph2pw4",
    "wider than a vector apart": "g2mb1ic2ih4iw60oc2kh1kw3dw15",
    "3-D, one tap more than two": "g2mb1ic2id4ih5iw6oc2kd2kh2kw3pd1ph1pw1",
}
"""Depthwise problems whose column taps are summed by dot products, two at once."""

PAIRED_CHANNELS = {
    "7x7": "g40mb2ic40ih9iw17oc40kh7kw7ph3pw3_lay=NHWC:OHWI:NHWC",
    "5x5, two phases": "g24mb1ic24ih9iw12oc24kh5kw5sh2sw2ph2pw2_lay=NHWC:HWIO:NHWC",
    "dilated, padding on one side": "g16mb1ic16ih8iw30oc16oh8ow26kh3kw4dh1dw2ph2pw3_lay=NHWC:OHWI:NHWC",
    "3-D, one and two taps": "g18mb1ic18id3ih5iw6oc18kd2kh2kw3sd1sh2sw2pd1ph1pw1_lay=NDHWC:ODHWI:NDHWC",
}
"""The same over vectors of channels, whole and with masks."""

PAIRED_GROUPS = {
    "groups of 2, a mask": "g19mb2ic38ih7iw9oc38kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC",
    "groups of 4, two phases": "g12mb1ic48ih9iw12oc48kh3kw5sh2sw2ph1pw2_lay=NHWC:HWIO:NHWC",
    "groups of 8, dilated": "g5mb2ic40ih8iw10oc40kh3kw3dh1dw1ph2pw2_lay=NHWC:OHWI:NHWC",
    "groups of 16, padding on one side": "g2mb1ic32ih6iw15oc32oh6ow14kh3kw4ph1pw2_lay=NHWC:OHWI:NHWC",
    "groups of 8, 3-D": "g2mb1ic16id3ih5iw6oc16kd2kh2kw3sd1sh2sw2pd1ph1pw1_lay=NDHWC:ODHWI:NDHWC",
}
"""Small groups in place, whose words are two channels of a group, or two pixels in wgrad."""

AVX512 = tvm.target.Target({"kind": "llvm", "mcpu": "cascadelake"})
"""A CPU with vectors of 16-bit elements, but no instruction that rounds to bfloat16."""

needs_avx512 = pytest.mark.skipif("avx512bw" not in local_features(), reason="compiled only: this CPU has no AVX-512")


def _problem(text: str, types: tuple[str, str, str]) -> ConvProblem:
    return ConvProblem.from_descriptor(text).with_dtypes(*types)


def _function(problem: ConvProblem, direction: str, machine: Machine, epilogue: Epilogue = NO_EPILOGUE):
    choice = chooser.choose(problem, direction, machine)
    assert choice.is_kernel, choice
    return choice.kernel.name, chooser.build(problem, direction, machine, choice, "main", epilogue)


def _samples() -> list:
    """Each case in each direction, with two of the types in turn."""
    cases = [(name, direction) for name in CASES for direction in DIRECTIONS]
    return [
        pytest.param(*case, TYPES[(number + number // 6 + turn) % len(TYPES)], id=f"{case[0]}-{case[1]}-{turn}")
        for number, case in enumerate(cases)
        for turn in (0, 3)
    ]


@pytest.mark.parametrize(("name", "direction", "types"), _samples())
def test_small_integers_are_exact(name, direction, types):
    """Interpreted on CPUs with and without the rounding instruction, at whichever the number of the case falls."""
    problem = _problem(CASES[name][1], types)
    machine = CPUS["AVX512-BF16" if len(name) % 2 else "AVX-512"]
    family, function = _function(problem, direction, machine)
    operands, wanted = numbers_of(problem, direction, 0)
    result = _blank(problem, direction)
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted, f"{family}, {machine.name}")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", [CHANNELS["in place"], GROUPS["groups of 2, channels last"]])
def test_sums_in_float64(text, direction):
    """bfloat16 is then no vector of half words: it is converted to float64 and back."""
    problem = _problem(text, ("bfloat16", "float64", "bfloat16"))
    _, function = _function(problem, direction, CPUS["AVX-512"])
    operands, wanted = numbers_of(problem, direction, 5)
    result = _blank(problem, direction)
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("target", [TARGET, pytest.param(AVX512, marks=needs_avx512)], ids=["native", "AVX-512"])
@pytest.mark.parametrize("types", TYPES[:2], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_machine_code_is_exact(direction, types, target):
    machine = machine_of(target)
    for text in (COLUMNS["strided"], COLUMNS["several rows a vector"], CHANNELS["in place"], CHANNELS["panels"]):
        problem = _problem(text, types)
        _, function = _function(problem, direction, machine)
        operands, wanted = numbers_of(problem, direction, 2)
        found = tvm.runtime.tensor(_blank(problem, direction))
        compiled(function, target)["main"](*map(tvm.runtime.tensor, operands), found)
        np.testing.assert_array_equal(found.numpy(), wanted, text)


CONVERTED = {
    "rows": "g6mb2ic6ih9iw21oc6kh3kw5ph1pw2",
    "one row of a vector left": "g5mb3ic5ih5iw17oc5kh5kw5ph2pw2",
    "rolled": "g7mb2ic7ih16iw16oc7kh7kw7ph3pw3",
    "several rows a vector": "g11mb2ic11ih7iw7oc11kh3kw3ph1pw1",
    "several rows a vector, rolled": "g3mb2ic3ih6iw5oc3kh7kw5ph3pw2",
    "strided": "g5mb2ic5ih9iw20oc5kh5kw5sh2sw2ph2pw2",
    "weights that are not contiguous": "g6mb2ic6ih9iw21oc6kh3kw5ph1pw2_lay=NCHW:HWIO:NCHW",
}
"""Problems whose source may be converted into a panel, a work item's channels at a time."""


def _converted_cases() -> list:
    """Each problem in each direction with each of the types, and one, two or all channels at a time, in turn."""
    every = itertools.product(CONVERTED, DIRECTIONS, [*TYPES[:2], ("bfloat16", "float16", "bfloat16")])
    return [
        pytest.param(*case, (number + number // 3) % 3, id=f"{case[0]}-{case[1]}-{number % 3}")
        for number, case in enumerate(every)
    ]


@pytest.mark.parametrize(("name", "direction", "types", "turn"), _converted_cases())
def test_converted_channels(name, direction, types, turn):
    """Of every batch; what is not a number stays in its channel."""
    machine, problem = machine_of(AVX512), _problem(CONVERTED[name], types)
    symbolic = replace(problem, batch="n")
    choice = forced("depthwise columns")(symbolic, direction, machine)
    own, block = choice.plan.tilings[0], (1, 2, problem.groups)[turn]
    apart = {"split_k": 1} if direction == "backward_weight" else {"split_h": 1}
    plan = Plan((replace(own, converted=True, block_channels=block, **apart),))
    assert not choice.kernel.invalid(problem, direction, plan, machine)
    choice = replace(choice, plan=plan)
    function = chooser.build(symbolic, direction, machine, choice, "main", Epilogue(accumulate=True))
    operands, wanted = numbers_of(problem, direction, turn)
    source = DIRECTIONS[direction].operands.index("grad" if direction == "backward_data" else "data")
    operands[source][:, turn] = np.nan
    result = np.ones(wanted.shape, wanted.dtype)
    if "avx512bw" in local_features():
        found = tvm.runtime.tensor(result)
        compiled(function, AVX512)["main"](*map(tvm.runtime.tensor, operands), found)
        result = found.numpy()
    else:
        assert execute(function, [*operands, result]) == ""
    axis = problem.kernel_layout.index("O") if direction == "backward_weight" else 1
    result, wanted = (np.moveaxis(array, axis, 0) for array in (result, wanted + wanted.dtype.type(1)))
    others = [channel for channel in range(problem.groups) if channel != turn]
    np.testing.assert_array_equal(result[others], wanted[others])
    assert np.isnan(result[turn].astype("float32")).any()


def test_channels_that_cannot_be_converted():
    """The reason is given where several channels make one, and where a channel is too large."""
    machine, kernel = CPUS["AVX-512"], columns_plan.DepthwiseColumns()
    for text, reason in (
        ("g6mb2ic6ih9iw21oc12kh3kw5ph1pw2", "not that of one slice"),
        ("g6mb2ic6ih99iw99oc6kh3kw5ph1pw2", "more than 16384 bytes"),
        ("g6mb2ic6id3ih9iw9oc6kd3kh3kw3pd1ph1pw1", "not that of one slice"),
    ):
        problem = _problem(text, ("float16",) * 3)
        own = kernel.plan(problem, "forward", machine).tilings[0]
        plan = Plan((replace(own, split_h=1, converted=True, block_channels=2),))
        assert reason in kernel.invalid(problem, "forward", plan, machine)
        for converted, most in ((True, 6), (False, 1)):
            seven = Plan((replace(plan.tilings[0], converted=converted, block_channels=7),))
            reason = f"block_channels is 7; it must be from 1 to {most}"
            assert kernel.invalid(problem, "forward", seven, machine) == reason
        own = kernel.plan(problem, "backward_weight", machine).tilings[0]
        reason = kernel.invalid(problem, "backward_weight", Plan((replace(own, converted=True),)), machine)
        assert reason.startswith("X cannot be converted: ")


PAIRS = pytest.mark.parametrize(
    "text",
    [*PAIRED.values(), *PAIRED_CHANNELS.values(), *PAIRED_GROUPS.values()],
    ids=[*PAIRED, *map("NHWC: {}".format, PAIRED_CHANNELS), *PAIRED_GROUPS],
)


def _paired(text: str, direction: str, epilogue: Epilogue = NO_EPILOGUE):
    """The problem, and the kernel over columns, channels or small groups whatever the estimate."""
    problem = _problem(text, TYPES[0])
    machine = CPUS["AVX512-BF16"]
    family = "depthwise" if "C:" in text else "depthwise columns"
    choice = forced("small groups" if text in PAIRED_GROUPS.values() else family)(problem, direction, machine)
    return problem, chooser.build(problem, direction, machine, choice, "main", epilogue)


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@PAIRS
def test_pairs_of_columns_are_exact(text, direction):
    """Interpreted, and compiled where this CPU has the instruction; small integers, then one that is not a number."""
    problem, function = _paired(text, direction)
    assert NAME in str(function)
    operands, wanted = numbers_of(problem, direction, 4)
    operands = [np.array(array) for array in operands]
    source = operands[0]
    for place in (None, (0, 1, *(extent // 2 for extent in source.shape[2:-1]), source.shape[-1] - 1)):
        if place is not None:
            source[place] = np.nan
            operands[1][...] = 1  # without zeros: the taps that read it are not numbers
            wanted = REFERENCES[direction](problem, *operands).astype(wanted.dtype)
        result = _blank(problem, direction)
        assert execute(function, [*operands, result]) == ""
        np.testing.assert_array_equal(result.astype("f4"), wanted.astype("f4"))
        if "bfloat16" in MACHINE.dots:
            found = tvm.runtime.tensor(_blank(problem, direction))
            compiled(function, TARGET)["main"](*map(tvm.runtime.tensor, operands), found)
            np.testing.assert_array_equal(found.numpy().astype("f4"), wanted.astype("f4"))


@PAIRS
def test_pairs_of_pixels_are_exact(text):
    """wgrad, whose pairs are neighbouring columns, of an even or odd number; with a bias gradient."""
    problem, function = _paired(text, "backward_weight", Epilogue(bias_grad=True))
    is_adjacent = "C:" in text or problem.strides[-1] == 1
    assert (NAME in str(function)) == is_adjacent, "in a row of contiguous columns those two apart are none"
    operands, wanted = numbers_of(problem, "backward_weight", 4)
    axes = tuple(axis for axis, letter in enumerate(problem.grad_layout) if letter != "C")
    of_bias = operands[0].astype("float64").sum(axes).astype(wanted.dtype)
    results = _blank(problem, "backward_weight"), np.full_like(of_bias, np.nan)
    assert execute(function, [*map(np.ascontiguousarray, operands), *results]) == ""
    np.testing.assert_array_equal(results[0], wanted)
    np.testing.assert_array_equal(results[1], of_bias)
    if "bfloat16" in MACHINE.dots:
        found = [tvm.runtime.tensor(np.full_like(array, np.nan)) for array in results]
        compiled(function, TARGET)["main"](*map(tvm.runtime.tensor, operands), *found)
        np.testing.assert_array_equal(found[0].numpy(), wanted)
        np.testing.assert_array_equal(found[1].numpy(), of_bias)


@pytest.mark.parametrize("text", SHORT_ROWS.values(), ids=SHORT_ROWS)
def test_pairs_of_pixels_of_several_rows_are_exact(text):
    """wgrad whose words are pairs of pixels, even of two rows; what is behind the rows of dY is not a number."""
    problem, machine = _problem(text, TYPES[0]), CPUS["AVX512-BF16"]
    several, height = wgrad_rows_per_vector(problem, machine), problem.grad_extents[-2]
    assert several > 1
    tiling = ColumnsWgradTiling(-(-height // several), 2, 1, several)
    choose = always(kernel_named("depthwise columns", "backward_weight"), tiling)
    function = chooser.build(problem, "backward_weight", machine, choose(), "main")
    assert NAME in str(function)
    operands, wanted = numbers_of(problem, "backward_weight", 4)
    result = _blank(problem, "backward_weight")
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result.astype("f4"), wanted.astype("f4"))
    if "bfloat16" in MACHINE.dots:
        found = tvm.runtime.tensor(_blank(problem, "backward_weight"))
        compiled(function, TARGET)["main"](*map(tvm.runtime.tensor, operands), found)
        np.testing.assert_array_equal(found.numpy().astype("f4"), wanted.astype("f4"))


@pytest.mark.parametrize("text", [COLUMNS["strided"], CHANNELS["in place"], CHANNELS["panels"]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_epilogues(direction, dtype, text):
    problem = _problem(text, (dtype,) * 3)
    _, function = _function(problem, direction, CPUS["AVX512-BF16"], Epilogue(bias=True, relu=True, accumulate=True))
    operands, sums = numbers_of(problem, direction, 1)
    axis = (problem.grad_layout if direction == "forward" else problem.data_layout).index("C")
    generator = np.random.default_rng(7)
    result = generator.integers(-9, 10, sums.shape).astype(sums.dtype)
    bias = generator.integers(-9, 10, sums.shape[axis]).astype(sums.dtype)
    along = [-1 if i == axis else 1 for i in range(sums.ndim)]
    total = REFERENCES[direction](problem, *operands).astype("float64") + result.astype("float64")
    wanted = np.maximum(total + bias.astype("float64").reshape(along), 0).astype(sums.dtype)
    assert execute(function, [*map(np.ascontiguousarray, operands), bias, result]) == ""
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("text", [COLUMNS["plain"], CHANNELS["in place"], CHANNELS["panels"]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bias_gradients_and_accumulation(dtype, text):
    problem = _problem(text, (dtype,) * 3)
    epilogue = Epilogue(accumulate=True, bias_grad=True, bias_accumulate=True)
    _, function = _function(problem, "backward_weight", CPUS["AVX-512"], epilogue)
    operands, sums = numbers_of(problem, "backward_weight", 1)
    axes = tuple(i for i, letter in enumerate(problem.grad_layout) if letter != "C")
    of_bias = operands[0].astype("float64").sum(axes)
    wanted = (REFERENCES["backward_weight"](problem, *operands).astype("float64") + 3).astype(sums.dtype)
    result, bias = np.full_like(sums, 3), np.full(of_bias.shape, -2, sums.dtype)
    assert execute(function, [*map(np.ascontiguousarray, operands), result, bias]) == ""
    np.testing.assert_array_equal(result, wanted)
    np.testing.assert_array_equal(bias, (of_bias - 2).astype(sums.dtype))


@pytest.mark.parametrize("machine", ["AVX-512", "AVX512-BF16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_floats_are_within_the_bound_of_the_sum(dtype, direction, machine):
    """Products are exact in float32; each of n additions rounds by 2^-24 of the magnitudes at most."""
    result = {"data": 0, "weight": 1, "grad": 2}[DIRECTIONS[direction].result]
    types = tuple("float32" if i == result else dtype for i in range(3))
    problem = _problem(COLUMNS["strided"], types)
    generator = np.random.default_rng(3)
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    operands = [
        generator.standard_normal(problem.tensors[name][0]).astype(narrow) for name in DIRECTIONS[direction].operands
    ]
    found = _blank(problem, direction)
    assert execute(_function(problem, direction, CPUS[machine])[1], [*operands, found]) == ""
    wanted = REFERENCES[direction](problem, *operands).astype("float64")
    magnitudes = REFERENCES[direction](problem, *map(np.abs, operands)).astype("float64")
    unit, count = 2.0**-24, reduction_length(problem, direction) + 1
    assert (np.abs(found - wanted) <= count * unit / (1 - count * unit) * magnitudes).all()


@pytest.mark.parametrize("text", [COLUMNS["strided"], CHANNELS["in place"]])
@pytest.mark.parametrize(
    ("dtype", "mcpu", "loads", "stores"),
    [
        ("bfloat16", "cooperlake", "vpmovzxwd|vmovdqu16|vpslld", "vcvtneps2bf16"),
        ("bfloat16", "cascadelake", "vpmovzxwd|vmovdqu16|vpslld", "vpmovdw|vpackusdw|vpshufb"),
        ("float16", "cascadelake", "vcvtph2ps", "vcvtps2ph"),
    ],
)
def test_two_bytes_are_moved(dtype, mcpu, loads, stores, text):
    """Forward reads and writes vectors of 16-bit elements, and converts in registers; nothing is called for it."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu})
    _, function = _function(_problem(text, (dtype,) * 3), "forward", machine_of(target))
    source = compiled(function, target).mod.inspect_source("s")
    code = source[source.index("_compute_:") :]
    assert len(re.findall(rf"\t(?:{loads})\t", code)) > 8
    assert len(re.findall(rf"\t(?:{stores})\t", code)) > 2
    assert not re.findall(r"call\w*\t.*(?:truncsfhf2|extendhfsf2|truncsfbf2)", code)


@needs_avx512
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_is_written_behind_one_column(dtype):
    """LLVM compiles a masked store of one truncated lane to one of four bytes, if it recognises it."""
    problem = _problem("g3mb2ic3ih9iw3oc3oh9ow1kh3kw3ph1", (dtype,) * 3)
    choice = chooser.choose(problem, "forward", CPUS["AVX-512"])
    assert choice.kernel.name == "depthwise columns"
    case = KernelCase(problem, "forward", CPUS["AVX-512"], choice.kernel, choice.plan)
    for optimised in (False, True):
        assert compile_and_check([case], 0, optimised=optimised) == [""]


def test_masked_pixels_do_not_spread():
    """NaN behind the end of a row, in columns that no tap reads, reach no sum."""
    problem = _problem("g4mb1ic4ih6iw28oc4kh1kw1sh3sw2", ("bfloat16",) * 3)
    (grad, data), wanted = numbers_of(problem, "backward_weight", 0)
    data = np.array(data)
    data[:, :, :, 1::2] = np.inf
    result = _blank(problem, "backward_weight")
    name, function = _function(problem, "backward_weight", MACHINE if MACHINE.has_half_masks else CPUS["AVX-512"])
    assert name == "depthwise columns"
    assert execute(function, [np.ascontiguousarray(grad), data, result]) == ""
    np.testing.assert_array_equal(result, wanted)
