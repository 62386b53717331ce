"""Kernels of dot products of bfloat16: which problems, exact and bounded sums, epilogues, machine code."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from relax_ops.single_run import QUICK_CONFIG
from tests.kernels.harness import _blank, forced, with_tiling
from tvm_convgrad.codegen.hardware import CPUS, machine_of
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.exact import numbers_of, reduction_length
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCES
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.roofline import roofline
from tvm_convgrad.kernels.wgrad.panel_shapes import VectorPanel
from tvm_convgrad.kernels.wgrad.spec import WgradTiling
from tvm_convgrad.verify.interpreter import execute

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "cooperlake"})
MACHINE = CPUS["AVX512-BF16"]
NAME = "dot product GEMM"
HAS_INSTRUCTION = "avx512bf16" in local_features()
needs_instruction = pytest.mark.skipif(not HAS_INSTRUCTION, reason="compiled only: this CPU has no AVX512-BF16")

SHAPES = [
    "mb2ic18ih7iw7oc20oh4ow4kh3kw3sh2sw2ph1pw1",
    "mb2ic17ih9iw11oc19oh9ow11kh3kw3ph1pw1",  # odd channels: a zero in the last pair
    "mb2ic40ih8iw8oc24oh8ow8kh1kw1",
    "mb2ic18ih9iw9oc17oh5ow5kh1kw1sh2sw2",  # wgrad: pairs begin at even pixels, the last one has no partner
    "mb1ic5ih6iw9oc4oh6ow9kh3kw1ph1pw0",
    "g2mb1ic12ih6oc20kh3ph1",
    "mb2ic6iw37oc5kw3pw1",  # 1-d
    "mb1ic4id4ih5iw6oc6kd2kh3kw3pd1ph1pw1",
]


def _problem(text: str, *types: str, channels_last: bool = False) -> ConvProblem:
    problem = ConvProblem.from_descriptor(text).with_dtypes(*(types or ("bfloat16",) * 3))
    axes = problem.data_layout[2:]
    return problem.with_layouts(f"N{axes}C", f"O{axes}I", f"N{axes}C") if channels_last else problem


def _function(problem: ConvProblem, direction: str, epilogue: Epilogue = NO_EPILOGUE):
    choice = forced(NAME)(problem, direction, MACHINE)
    assert choice.is_kernel, choice
    return chooser.build(problem, direction, MACHINE, choice, "main", epilogue)


def _compiled(function):
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        return tvm.compile(tvm.IRModule({"main": function}), TARGET)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", SHAPES)
def test_small_integers_are_exact(text, channels_last, direction):
    """Interpreted everywhere, and executed where the CPU has the instruction."""
    problem = _problem(text, channels_last=channels_last)
    function = _function(problem, direction)
    operands, wanted = numbers_of(problem, direction, 0)
    result = _blank(problem, direction)
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)
    if HAS_INSTRUCTION:
        found = tvm.runtime.tensor(_blank(problem, direction))
        _compiled(function)["main"](*map(tvm.runtime.tensor, operands), found)
        np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_pointwise_layers_of_nchw_run_over_pixels(direction):
    """No squares are transposed; words are made while packing, and the next block is prefetched from far channels."""
    problem = _problem("mb8ic64ih56oc64kh1")
    choice = forced(NAME)(problem, direction, MACHINE)
    assert "vector axis pixels" in str(choice.plan)
    assert "prefetch" in str(_function(problem, direction))
    small = _problem("mb1ic66ih9iw13oc50kh1kw1")  # the same tiling, with ragged blocks of channels and pixels
    tiling = replace(choice.plan.tilings[0], tile_m=10, tile_n=2, block_tiles=2)
    function = chooser.build(small, direction, MACHINE, with_tiling(choice, tiling), "main")
    operands, wanted = numbers_of(small, direction, 0)
    result = _blank(small, direction)
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


@needs_instruction
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_random_floats_are_within_the_bound_of_the_sum(direction):
    """Products of two bfloat16 are exact in float32; each of n additions rounds by 2^-24 of the magnitudes at most."""
    problem = _problem("mb2ic33ih9oc18kh3ph1", *_types_with_float32_result(direction))
    generator = np.random.default_rng(3)
    operands = [
        generator.standard_normal(problem.tensors[name][0]).astype(ml_dtypes.bfloat16)
        for name in DIRECTIONS[direction].operands
    ]
    found = tvm.runtime.tensor(_blank(problem, direction))
    _compiled(_function(problem, direction))["main"](*map(tvm.runtime.tensor, operands), found)
    reference = REFERENCES[direction]
    wanted = reference(problem, *operands).astype("float64")
    magnitudes = reference(problem, *map(np.abs, operands)).astype("float64")
    unit, count = 2.0**-24, reduction_length(problem, direction) + 1
    assert (np.abs(found.numpy() - wanted) <= count * unit / (1 - count * unit) * magnitudes).all()
    assert (found.numpy() != wanted).any()


def _types_with_float32_result(direction: str) -> tuple[str, str, str]:
    result = {"data": 0, "weight": 1, "grad": 2}[DIRECTIONS[direction].result]
    types = ["bfloat16"] * 3
    types[result] = "float32"
    return types[0], types[1], types[2]


@needs_instruction
def test_denormals_are_taken_as_zero():
    """The smallest normal bfloat16 halved is lost; twice it is kept, as the documents say."""
    problem = _problem("mb1ic2iw4oc16kw1", "bfloat16", "bfloat16", "float32")
    library = _compiled(_function(problem, "forward"))
    for exponent, kept in ((-127, False), (-126, True)):
        data = np.full(problem.data_shape, 2.0**exponent).astype(ml_dtypes.bfloat16)
        weight = np.full(problem.weight_shape, 2.0**20).astype(ml_dtypes.bfloat16)
        found = tvm.runtime.tensor(_blank(problem, "forward"))
        library["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(weight), found)
        assert (found.numpy() == (2.0 ** (exponent + 21) if kept else 0.0)).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_epilogues_in_bfloat16(direction, channels_last, accumulate):
    problem = _problem("mb2ic22ih5oc18kh3ph1", channels_last=channels_last)
    function = _function(problem, direction, Epilogue(bias=True, relu=True, accumulate=accumulate))
    operands, _ = numbers_of(problem, direction, 1)
    blank = _blank(problem, direction)
    generator = np.random.default_rng(4)
    result = generator.integers(-3, 4, blank.shape).astype(blank.dtype) if accumulate else blank
    channels = problem.out_channels if direction == "forward" else problem.in_channels
    bias = generator.integers(-3, 4, channels).astype(blank.dtype)
    layout = problem.grad_layout if direction == "forward" else problem.data_layout
    total = REFERENCES[direction](problem, *operands).astype("float64")
    total = total + (result.astype("float64") if accumulate else 0.0)
    total = total + bias.astype("float64").reshape([-1 if letter == "C" else 1 for letter in layout])
    wanted = np.maximum(total, 0).astype(blank.dtype)
    assert execute(function, [*map(np.ascontiguousarray, operands), bias, result]) == ""
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_bias_gradients_and_accumulation_in_bfloat16(channels_last):
    problem = _problem("mb2ic19ih7oc18kh3ph1", channels_last=channels_last)
    function = _function(problem, "backward_weight", Epilogue(accumulate=True, bias_grad=True))
    operands, _ = numbers_of(problem, "backward_weight", 1)
    result = np.random.default_rng(5).integers(-3, 4, problem.tensors["weight"][0]).astype(ml_dtypes.bfloat16)
    bias = np.full(problem.out_channels, np.nan, ml_dtypes.bfloat16)
    total = REFERENCES["backward_weight"](problem, *operands).astype("float64") + result.astype("float64")
    axes = tuple(i for i, letter in enumerate(problem.grad_layout) if letter != "C")
    of_bias = operands[0].astype("float64").sum(axis=axes).astype(bias.dtype)
    wanted = total.astype(result.dtype)
    assert execute(function, [*map(np.ascontiguousarray, operands), result, bias]) == ""
    np.testing.assert_array_equal(result, wanted)
    np.testing.assert_array_equal(bias, of_bias)


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_pixel_without_partner_is_not_multiplied(place):
    """A row of 5 pixels and a tap that is in bounds at 4 or 5: a NaN reaches only the sums that it is a term of."""
    problem = _problem("mb1ic2iw5oc3kw3pw1")
    operands, _ = numbers_of(problem, "backward_weight", 0)
    x = np.ascontiguousarray(operands[1])
    x[0, 1, 0 if place == "first" else -1] = np.nan
    result = _blank(problem, "backward_weight")
    assert execute(_function(problem, "backward_weight"), [np.ascontiguousarray(operands[0]), x, result]) == ""
    found = np.isnan(result.astype("float32"))
    assert not found[:, 0].any()
    # tap k multiplies x[p + k - 1] with dY[p]: x's first pixel has no p at tap 2, its last none at tap 0
    assert found[:, 1].tolist() == [[True, True, False] if place == "first" else [False, True, True]] * 3


@pytest.mark.parametrize("changes", [{}, {"transposed": True}, {"slab_h": 2, "split_k": 2}])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_panels_hold_even_pairs_only(channels_last, changes):
    """With one column tap, always in bounds, a panel has a word for two pixels; each kind of packing is exact."""
    problem = _problem("mb3ic19ih5iw14oc21oh3ow7kh1kw1sh2sw2", channels_last=channels_last)
    choice = forced(NAME)(problem, "backward_weight", MACHINE)
    spec = choice.kernel.spec(problem, MACHINE)
    assert spec.even_pairs
    sizes = [VectorPanel.of(each, 3, 1, 16, 1).size for each in (spec, replace(spec, dots=False))]
    assert sizes == [3 * 4 * 16, 3 * 7 * 16]
    assert not choice.kernel.spec(_problem("mb3ic19ih5oc21kh3ph1"), MACHINE).even_pairs
    own = WgradTiling(3, 1, 3, 1, 1, 1, parallel=False, scalars_packed=True)
    choice = with_tiling(choice, replace(own, **changes))
    assert choice.kernel.invalid(problem, "backward_weight", choice.plan, MACHINE) == ""
    function = chooser.build(problem, "backward_weight", MACHINE, choice, "main")
    operands, wanted = numbers_of(problem, "backward_weight", 0)
    result = _blank(problem, "backward_weight")
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


def test_several_kernels_share_the_helper_functions():
    """Each PrimFunc defines them; a module of several links, and its inner loops are the instruction itself."""
    functions = {}
    for number, text in enumerate(SHAPES[:2]):
        function = _function(_problem(text), "forward")
        functions[f"main{number}"] = function.with_attr("global_symbol", f"main{number}")
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        library = tvm.compile(tvm.IRModule(functions), TARGET)
    text = library.mod.inspect_source("s")
    assert len(re.findall(r"\tvdpbf16ps\t", text)) > 8
    assert "call" not in {line.split()[0] for line in text.splitlines() if "convgrad_dot" in line}


@pytest.mark.parametrize(
    ("text", "machine", "reason"),
    [
        ("mb1ic8ih4oc8kh1_dt=bf16:bf16:bf16", "AVX-512", "AVX-512 has no dot product of bfloat16"),
        ("mb1ic8ih4oc8kh1_dt=bf16:f32:bf16", "AVX512-BF16", "both operands must be bfloat16"),
        ("g8mb1ic8ih4oc8kh1_dt=bf16:bf16:bf16", "AVX512-BF16", "one channel a group has no pair"),
        ("g2mb1ic6ih4oc8kh1_dt=bf16:bf16:bf16", "AVX512-BF16", "3 channels a group: pairs would reach"),
    ],
)
def test_refusals_say_why(text, machine, reason):
    choice = forced(NAME)(ConvProblem.from_descriptor(text), "forward", CPUS[machine])
    assert not choice.is_kernel
    assert reason in choice.reason


def test_the_target_decides():
    """CPUs with the instruction have the record with it; float32's choices are the same with and without."""
    wanted = {"cooperlake": "AVX512-BF16", "znver4": "AVX512-BF16", "cascadelake": "AVX-512", "haswell": "AVX2"}
    found = {mcpu: machine_of(tvm.target.Target({"kind": "llvm", "mcpu": mcpu})).name for mcpu in wanted}
    assert found == wanted
    problem = ConvProblem.from_descriptor("mb8ic64ih56oc64kh3ph1")
    cpu = CPUS["AVX512-BF16"]
    for direction in DIRECTIONS:
        with_dots, without = (chooser.choose(problem, direction, machine) for machine in (cpu, replace(cpu, dots=())))
        assert (with_dots.name, with_dots.plan) == (without.name, without.plan)
        assert with_dots.estimate == without.estimate


@pytest.mark.parametrize(
    ("mcpu", "mattr", "cost"),
    [
        ("cooperlake", [], 1),
        ("znver5", [], 1),
        ("znver5", ["+avx512fp16"], 1),
        ("sapphirerapids", ["-amx-bf16"], 4),
        ("graniterapids", ["-amx-tile"], 4),
        ("sapphirerapids", ["-amx-tile", "-avx512fp16"], 4),
    ],
)
def test_dot_products_of_cores_with_amx_are_slow(mcpu, mattr, cost):
    """Whether tiles are allowed or not: then dense layers are converted, 1.8 to 2.1 times as fast on such a core."""
    target = {"kind": "llvm", "mcpu": mcpu, "mattr": mattr, "mtriple": "x86_64-linux-gnu", "num-cores": 2}
    machine = machine_of(tvm.target.Target(target))
    assert (machine.name, machine.dot_cost) == ("AVX512-BF16", cost)
    alike = CPUS["AVX512-BF16" if mcpu == "znver5" else "AMX-BF16"]
    assert (machine.transposed_store, machine.handover_rate) == (alike.transposed_store, alike.handover_rate)
    for direction in DIRECTIONS:
        taken = chooser.choose(_problem("mb8ic256ih14oc256kh3ph1"), direction, machine)
        kernel = NAME if cost == 1 else "implicit GEMM"
        assert taken.name == f"{kernel} {DIRECTIONS[direction].short}"


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dense_layers_take_dot_products(direction, layout):
    """They are estimated to take less than 0.7 of float32's time."""
    problem = _problem("mb8ic64ih56oc64kh3ph1", channels_last=layout == "NHWC")
    taken = chooser.choose(problem, direction, MACHINE)
    assert taken.name == f"{NAME} {DIRECTIONS[direction].short}"
    converted = chooser.choose(problem.with_dtypes(*("float32",) * 3), direction, MACHINE)
    assert taken.estimate < 0.7 * converted.estimate


def test_the_roofline_counts_two_multiply_adds_a_lane():
    problem = ConvProblem.from_descriptor("mb8ic256ih14oc256kh3ph1")
    narrow = problem.with_dtypes(*("bfloat16",) * 3)
    assert roofline(narrow, MACHINE) == roofline(problem, MACHINE) / 2
    assert roofline(narrow, CPUS["AVX-512"]) == roofline(problem, MACHINE)
