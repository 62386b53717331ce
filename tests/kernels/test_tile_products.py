"""Products of tiles of bfloat16 (AMX): which problems, machine code, the permission, and numbers without the hardware.

The loop nests of tiles are interpreted, and compiled with each tile instruction replaced by a function that does the
same (`tile_emulation`); those of processes without the permission, and of machines with AMX, are compiled as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from tests.kernels.harness import compiled, forced, with_tiling
from tests.kernels.test_dot_products import SHAPES, _blank, _problem, _types_with_float32_result
from tests.kernels.tile_emulation import emulated
from tests.kernels.tile_kernels import AVX512, TileKernel, needs_avx512, run_without_tiles
from tvm_convgrad.codegen import tile_product
from tvm_convgrad.codegen.hardware import CPUS, machine_of
from tvm_convgrad.codegen.loops import Loops, make_parameter
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.cpu_features import local_features, tile_refusal
from tvm_convgrad.core.exact import numbers_of, reduction_length
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCES
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gemm.tile_sums import words_of
from tvm_convgrad.kernels.roofline import roofline
from tvm_convgrad.targets import required_features
from tvm_convgrad.training.runtime.artifact import TILES
from tvm_convgrad.verify.interpreter import execute

NAME = "AMX GEMM"
MACHINE = CPUS["AMX-BF16"]
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "cooperlake", "mattr": ["+amx-tile", "+amx-bf16"]})
KERNEL = TileKernel(NAME, MACHINE, TARGET)
_function, _ran = KERNEL.function, KERNEL.ran
SAPPHIRE = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids"})
DENSE = [direction for direction in DIRECTIONS if direction != "backward_weight"]
needs_dots = pytest.mark.skipif(
    "avx512bf16" not in local_features(), reason="compiled only: the rest of these kernels needs AVX512-BF16"
)
needs_tiles = pytest.mark.skipif(tile_refusal() != "", reason=f"no tile instruction is executed: {tile_refusal()}")
WIDE = [
    *SHAPES,
    "mb1ic34ih5iw5oc33kh3kw3ph1pw1",  # 17 words: two steps of 9, the last with a word of zeros
    "mb2ic64ih6iw21oc40kh3kw3sh2sw1ph1pw2",
    "mb1ic74ih3iw41oc17kh1kw1",  # 37 words: three steps of 13
]


def test_the_target_decides():
    """The permission is asked for by a call of Linux: targets of other systems have dot products."""
    wanted = {"sapphirerapids": "AMX-BF16", "graniterapids": "AMX-FP16", "cooperlake": "AVX512-BF16"}
    triple = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
    found = {mcpu: machine_of(tvm.target.Target({**triple, "mcpu": mcpu})).name for mcpu in wanted}
    assert found == wanted
    without = {"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": "x86_64-linux-gnu", "mattr": ["-amx-bf16"]}
    assert machine_of(tvm.target.Target(without)).name == "AVX512-BF16"
    windows = {"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": "x86_64-pc-windows-msvc"}
    assert machine_of(tvm.target.Target(windows)).name == "AVX512-BF16"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", WIDE)
def test_small_integers_are_exact(text, channels_last, direction):
    """Interpreted, in local memory full of NaN: no tile reads what was not packed."""
    problem = _problem(text, channels_last=channels_last)
    operands, wanted = numbers_of(problem, direction, 0)
    result = _blank(problem, direction)
    assert execute(_function(problem, direction), [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


@needs_avx512
@pytest.mark.parametrize(
    ("text", "direction", "granted"),
    [
        (WIDE[-3], "forward", True),
        (WIDE[-3], "forward", False),
        (WIDE[-2], "backward_data", True),
        (WIDE[-2], "backward_data", False),
    ],
)
def test_emulated_instructions_are_exact(text, direction, granted, tmp_path):
    """Machine code on the threads of the pool; a process without the permission runs the loops that convert."""
    problem = _problem(text, channels_last=direction == "forward")
    operands, wanted = numbers_of(problem, direction, 3)
    function = emulated(_function(problem, direction), granted=granted)
    np.testing.assert_array_equal(_ran(function, problem, direction, operands, tmp_path, AVX512), wanted)


@needs_dots
def test_a_refused_process_converts(tmp_path):
    """The kernel as it is, which asks Linux itself; where it grants tiles, they are executed."""
    problem = _problem(WIDE[1], channels_last=True)
    operands, wanted = numbers_of(problem, "forward", 4)
    np.testing.assert_array_equal(_ran(_function(problem, "forward"), problem, "forward", operands, tmp_path), wanted)


@pytest.mark.parametrize("order", ["source", "weights"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("tile_h", "tile_m", "tile_n"),
    [(1, 22, 2), (2, 22, 1), (1, 39, 1), (1, 7, 3), (1, 1, 1), (2, 32, 2), (1, 16, 4), (2, 64, 1), (1, 9, 6)],
)
def test_every_shape_of_tile_is_exact(tile_h, tile_m, tile_n, order, channels_last):
    """Up to four pieces and six columns, pieces of two rows, pieces that overlap the one before, and tiny ones."""
    problem = _problem("mb2ic48ih6iw45oc50kh3kw3ph1pw1", channels_last=channels_last)
    choice = forced(NAME)(problem, "forward", MACHINE)
    tiling = replace(
        choice.plan.tilings[0],
        tile_m=tile_m, tile_n=tile_n, tile_h=tile_h, block_h=2, block_tiles=2, order=order, splits=2, unpacked=False,
    )  # fmt: skip
    choice = with_tiling(choice, tiling)
    assert choice.kernel.invalid(problem, "forward", choice.plan, MACHINE) == ""
    operands, wanted = numbers_of(problem, "forward", 5)
    result = _blank(problem, "forward")
    function = _function(problem, "forward", choice=choice)
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 17}, "a row of the tile has 17 pixels; they must make 2 equal pieces of at most 16"),
        ({"tile_m": 32, "tile_n": 3}, "2 x 3 tiles of sums take 9 registers; there are 8"),
        ({"vector_axis": "pixels", "tile_h": 1}, "it must be channels"),
        ({"unpacked": True, "tile_m": 8}, "an unpacked source must have the type of the sums"),
    ],
)
def test_invalid_tilings_say_why(changes, reason):
    problem = _problem("mb1ic48ih6iw45oc50kh1kw1")
    choice = forced(NAME)(problem, "forward", MACHINE)
    choice = with_tiling(choice, replace(choice.plan.tilings[0], block_h=1, **changes))
    assert reason in choice.kernel.invalid(problem, "forward", choice.plan, MACHINE)


@pytest.mark.parametrize("granted", [True, pytest.param(False, marks=needs_avx512)])
def test_a_batch_of_the_call_and_an_epilogue(granted, tmp_path):
    problem = replace(_problem("mb3ic18ih5oc20kh3ph1", channels_last=True), batch="n")
    known = replace(problem, batch=3)
    function = _function(problem, "forward", Epilogue(bias=True, relu=True, accumulate=True))
    operands, _ = numbers_of(known, "forward", 1)
    blank = _blank(known, "forward")
    result = np.random.default_rng(4).integers(-3, 4, blank.shape).astype(blank.dtype)
    bias = np.random.default_rng(5).integers(-3, 4, problem.out_channels).astype(blank.dtype)
    total = REFERENCES["forward"](known, *operands).astype("float64") + result.astype("float64")
    wanted = np.maximum(total + bias.astype("float64"), 0).astype(blank.dtype)
    arrays = [*map(np.ascontiguousarray, operands), bias, result]
    if granted:
        assert execute(function, arrays, batch=3) == ""
    else:
        run_without_tiles(function, arrays, tmp_path)
    np.testing.assert_array_equal(result, wanted)


def test_steps_have_the_words_that_registers_hold():
    assert [words_of(count) for count in (2, 9, 32, 36, 34, 58)] == [2, 9, 16, 12, 2, 2]
    kernel = forced(NAME)(_problem(SHAPES[0]), "forward", MACHINE).kernel
    found = {}
    for channels in (6, 64, 72, 34, 116, 144, 480):
        spec = kernel.regions(_problem(f"mb1ic{channels}ih8oc16kh1"), "forward")[0]
        found[channels] = spec.source_channels, words_of(spec.source_channels)
    assert found == {6: (3, 3), 64: (32, 16), 72: (36, 12), 34: (18, 9), 116: (60, 15), 144: (72, 12), 480: (240, 16)}
    grouped = kernel.regions(_problem("g2mb1ic68ih8oc16kh1"), "forward")[0]
    assert grouped.source_channels == 17, "words of zeros would be channels of the next group"


@pytest.mark.parametrize("mcpu", ["sapphirerapids", "graniterapids"])
@pytest.mark.parametrize("direction", DENSE)
def test_machine_code(direction, mcpu):
    """The inner loop is loads of tiles and products; a work item sets the shapes once, and clears them at its end."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})
    problem = _problem("mb2ic64ih14oc64kh3ph1", channels_last=True)
    source = compiled(_function(problem, direction), target).mod.inspect_source("s")
    counts = {name: len(re.findall(rf"\t{name}\t?", source)) for name in ("tdpbf16ps", "tileloadd", "ldtilecfg")}
    assert counts["ldtilecfg"] == len(re.findall(r"\ttilerelease", source)) == 1
    assert counts["tdpbf16ps"] >= 4
    assert counts["tileloadd"] == counts["tdpbf16ps"]  # 2 x 2 tiles of sums: each operand is used twice
    assert len(re.findall(r"\ttilestored\t", source)) == len(re.findall(r"\ttilezero\t", source)) == 4
    assert len(re.findall(r"\tsyscall", source)) == 1
    assert "vdpbf16ps" not in source
    assert len(re.findall(r"\tvfmadd\d+ps\t", source)) > 8, "the loops of a process without tiles"
    called = set(re.findall(r"\tcallq?\t\*?(\S*convgrad_tile\w*)", source))
    assert called <= {"convgrad_tile_ready", "convgrad_tile_ready@PLT"}


@needs_tiles
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", WIDE)
def test_executed_instructions_are_exact(text, channels_last, direction, tmp_path):
    problem = _problem(text, channels_last=channels_last)
    operands, wanted = numbers_of(problem, direction, 6)
    np.testing.assert_array_equal(_ran(_function(problem, direction), problem, direction, operands, tmp_path), wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_random_floats_are_within_the_bound_of_the_sum(direction):
    """As dot products: two products, each exact, are added one after the other to a sum in float32."""
    problem = _problem("mb1ic34ih6oc18kh3ph1", *_types_with_float32_result(direction))
    generator = np.random.default_rng(3)
    operands = [
        generator.standard_normal(problem.tensors[name][0]).astype(ml_dtypes.bfloat16)
        for name in DIRECTIONS[direction].operands
    ]
    found = _blank(problem, direction)
    assert execute(_function(problem, direction), [*operands, found]) == ""
    wanted = REFERENCES[direction](problem, *operands).astype("float64")
    magnitudes = REFERENCES[direction](problem, *map(np.abs, operands)).astype("float64")
    unit, count = 2.0**-24, reduction_length(problem, direction) + 1
    assert (np.abs(found - wanted) <= count * unit / (1 - count * unit) * magnitudes).all()
    assert (found != wanted).any()


@pytest.mark.parametrize(
    ("text", "machine", "reason"),
    [
        ("mb1ic8ih4oc8kh1_dt=bf16:bf16:bf16", "AVX512-BF16", "AVX512-BF16 has no tiles of bfloat16"),
        ("mb1ic8ih4oc8kh1_dt=bf16:f32:bf16", "AMX-BF16", "both operands must be bfloat16"),
        ("g8mb1ic8ih4oc8kh1_dt=bf16:bf16:bf16", "AMX-BF16", "one channel a group has no pair"),
    ],
)
def test_refusals_say_why(text, machine, reason):
    choice = forced(NAME)(ConvProblem.from_descriptor(text), "forward", CPUS[machine])
    assert not choice.is_kernel
    assert reason in choice.reason


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dense_layers_take_tiles(direction, layout):
    problem = _problem("mb8ic64ih56oc64kh3ph1", channels_last=layout == "NHWC")
    taken = chooser.choose(problem, direction, MACHINE)
    assert taken.name == f"{NAME} {DIRECTIONS[direction].short}"
    assert taken.name.startswith(TILES)
    assert taken.estimate < chooser.choose(problem, direction, CPUS["AVX512-BF16"]).estimate
    whole, other = problem.with_dtypes(*("float32",) * 3), replace(CPUS["AVX512-BF16"], l2_bytes=MACHINE.l2_bytes)
    found, same = (chooser.choose(whole, direction, machine) for machine in (MACHINE, other))
    assert (found.name, found.plan) == (same.name, same.plan)


def test_the_roofline_counts_whole_tiles():
    problem = ConvProblem.from_descriptor("mb64ic1024ih28oc1024kh3ph1")
    narrow = problem.with_dtypes(*("bfloat16",) * 3)
    assert roofline(narrow, MACHINE) == roofline(problem, MACHINE) / 16
    assert roofline(problem, MACHINE) == roofline(problem, CPUS["AVX512-BF16"])


def test_artifacts_load_without_tiles():
    """A kernel has loops without them, so that they are nothing that a CPU must have."""
    assert "avx512bf16" in required_features(SAPPHIRE)
    assert not {"amx-tile", "amx-bf16"} & set(required_features(SAPPHIRE))
    assert tile_refusal() == tile_refusal()
    if "amx-tile" not in local_features():
        assert "this CPU has no amx-bf16 and no amx-tile" in tile_refusal()


def test_the_interpreter_refuses_what_the_hardware_refuses():
    def fault(shapes: list[tuple[int, int]], *, releases: bool = True) -> str:
        loops = Loops()
        x = make_parameter("x", (256,), "float32")
        if shapes:
            tile_product.configure(loops, shapes)
        tile_product.load_tile(loops, 0, x, 0, 16)
        tile_product.load_tile(loops, 1, x, 0, 16)
        tile_product.add_product(loops, 2, 0, 1, "bfloat16")
        tile_product.store_tile(loops, 2, x, 0, 16)
        if releases:
            tile_product.release(loops)
        return execute(loops.finish([x], "main"), [np.ones(256, "float32")])

    assert fault([(16, 16), (16, 16), (16, 16)]) == ""
    assert fault([]) == "tile register 0 has no shape"
    assert fault([(16, 16), (16, 16)]) == "tile register 2 has no shape"
    assert "whose shapes do not fit" in fault([(16, 8), (16, 16), (16, 16)])
    assert "rows of 64 bytes" in fault([(17, 16), (16, 16), (16, 16)])
    assert fault([(16, 16), (16, 16), (16, 16)], releases=False) == "tile registers are in use at the end"
