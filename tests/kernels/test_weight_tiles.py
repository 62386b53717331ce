"""wgrad by products of tiles (AMX): panels, steps, tilings, epilogues, machine code, and numbers without the hardware.

What all directions have in common is in test_tile_products.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from tests.kernels.harness import compiled, forced, with_tiling
from tests.kernels.test_dot_products import _blank, _problem
from tests.kernels.test_tile_products import MACHINE, NAME, _function, _ran, needs_dots, needs_tiles
from tests.kernels.tile_emulation import emulated
from tests.kernels.tile_kernels import AVX512, needs_avx512, run_without_tiles
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCES
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.wgrad.tile_shape import TileShape, steps_of
from tvm_convgrad.verify.interpreter import execute

WGRAD = BACKWARD_WEIGHT.name
STEM = "mb3ic3ih21iw22oc20oh11ow11kh7kw7sh2sw2ph3pw3"
PROBLEMS = [
    STEM,  # 21 pairs of tap along the width and channel
    "mb1ic5ih9iw13oc17kh3kw3ph1pw1",
    "mb3ic33ih11iw10oc35oh7ow6kh3kw3dh2dw2",
    "mb1ic19ih13iw14oc6oh5ow5kh3kw3sh3sw3ph1pw1",  # pixels three apart: word by word
    "mb5ic20iw1oc7kw1",  # one pixel
    "mb5ic70ih5iw7oc50kh1kw1",  # rows are joined: 35 pixels
    "mb1ic17ih1iw66oc33kh1kw1",  # three steps of 11
    "mb2ic40ih13iw8oc24oh7ow4kh1kw1sh2sw2",
    "mb2ic18ih14iw9oc20oh7ow9kh5kw3sh2sw1ph2pw1dh1dw1",  # rows of both parities
    "mb1ic24ih5iw6oc18oh1ow6kh3kw3dh5dw1ph3pw1",  # taps that read padding only
    "g8mb2ic8ih7iw7oc8kh3kw3ph1pw1",  # depthwise
    "g3mb2ic12ih6iw7oc15kh3kw3ph1pw1",
]


def _exact(problem: ConvProblem, function, seed: int = 0) -> None:
    operands, wanted = numbers_of(problem, WGRAD, seed)
    result = _blank(problem, WGRAD)
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("types", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_small_integers_are_exact(text, channels_last, types):
    """Interpreted, in local memory full of NaN: no tile reads what was not packed."""
    problem = _problem(text, "bfloat16", types, "bfloat16", channels_last=channels_last)
    _exact(problem, _function(problem, WGRAD))


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        (("NCHW", "HWIO", "NHWC"), "mb2ic18ih6iw7oc20kh3kw3ph1pw1"),
        (("NHWC", "OIHW", "NCHW"), "mb2ic18ih6iw7oc20kh3kw3ph1pw1"),
        (("NHWC", "HWIO", "NHWC"), STEM),
        (("NHWC", "OIHW", "NHWC"), STEM),
        (("CNHW", "IHWO", "HWNC"), "mb2ic18ih6iw7oc20kh3kw3ph1pw1"),  # neither channels nor pixels of dY are contiguous
        (("HWCN", "OHWI", "CHWN"), "mb3ic3ih6iw7oc20kh3kw3ph1pw1"),
    ],
)
def test_layouts_are_exact(layouts, text):
    problem = _problem(text).with_layouts(*layouts)
    _exact(problem, _function(problem, WGRAD))


@pytest.mark.parametrize(("tile_m", "tile_n"), [(32, 2), (30, 2), (48, 1), (39, 1), (16, 3), (7, 3), (1, 1)])
@pytest.mark.parametrize("slab_h", [6, 4, 1])
def test_every_shape_of_tile_is_exact(tile_m, tile_n, slab_h):
    """Up to three pieces, blocks of m that overlap the one before, slabs of unequal height, sums from slab to slab."""
    problem = _problem("mb3ic45ih6iw11oc50kh3kw3ph1pw1", channels_last=tile_n == 2)
    choice = forced(NAME)(problem, WGRAD, MACHINE)
    tiling = replace(
        choice.plan.tilings[0],
        tile_m=tile_m, tile_n=tile_n, slab_h=slab_h, slab_d=2 if slab_h == 6 else 1, split_k=2, split_m=3, n_blocks=2,
    )  # fmt: skip
    choice = with_tiling(choice, tiling)
    assert choice.kernel.invalid(problem, WGRAD, choice.plan, MACHINE) == ""
    _exact(problem, _function(problem, WGRAD, choice=choice), 5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 17}, "tile_m is 17; it must make 2 equal pieces of at most 16"),
        ({"tile_m": 32, "tile_n": 3}, "2 x 3 tiles of sums take 9 registers; there are 8"),
        ({"tile_m": 51}, "tile_m is 51; there are 50 rows"),
        ({"transposed": True}, "transposed is not for tiles"),
        ({"prefetch": True}, "prefetch is not for tiles"),
        ({"slab_h": 2, "slab_d": 2}, "slab_h is not the whole height"),
    ],
)
def test_invalid_tilings_say_why(changes, reason):
    problem = _problem("mb2ic48ih6iw45oc50kh3kw3ph1pw1")
    choice = forced(NAME)(problem, WGRAD, MACHINE)
    choice = with_tiling(choice, replace(choice.plan.tilings[0], **changes))
    assert reason in choice.kernel.invalid(problem, WGRAD, choice.plan, MACHINE)


@pytest.mark.parametrize("granted", [True, pytest.param(False, marks=needs_avx512)])
@pytest.mark.parametrize("text", [STEM, "mb3ic18ih5iw7oc20kh3kw3ph1pw1"])
def test_a_batch_of_the_call_and_an_epilogue(text, granted, tmp_path):
    """One image, and more than the batch that is planned for: dW and the bias gradient are added to."""
    problem = replace(_problem(text, "bfloat16", "float32", "bfloat16", channels_last=True), batch="n")
    function = _function(problem, WGRAD, Epilogue(accumulate=True, bias_grad=True, bias_accumulate=True))
    for batch in (1, 3, 11) if granted else (11,):
        known = replace(problem, batch=batch)
        (grad, data), _ = numbers_of(known, WGRAD, 1)
        before, bias = np.full(known.weight_shape, 2.0, "float32"), np.full(known.out_channels, 3.0, "float32")
        wanted = REFERENCES[WGRAD](known, grad, data).astype("float64") + before
        wanted_bias = grad.astype("float64").sum(axis=(0, 1, 2)) + bias
        arrays = [np.ascontiguousarray(grad), np.ascontiguousarray(data), before, bias]
        if granted:
            assert execute(function, arrays, batch) == ""
        else:
            run_without_tiles(function, arrays, tmp_path)
        np.testing.assert_array_equal(before, wanted)
        np.testing.assert_array_equal(bias, wanted_bias)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", [STEM, "mb1ic18ih4iw7oc16kh3kw3ph1pw1", "mb1ic17ih1iw13oc16kh1kw1"])
def test_a_nan_of_x_stays_with_its_taps(text, channels_last):
    """The zeros that fill words and steps are multiplied with zeros, and with no pixel of X."""
    problem = _problem(text, "bfloat16", "float32", "bfloat16", channels_last=channels_last)
    function = _function(problem, WGRAD)
    (grad, data), _ = numbers_of(problem, WGRAD, 2)
    grad = np.abs(grad) + 1  # the reference multiplies each pixel with what is in bounds
    for column in (0, 1, int(problem.data_extents[1]) - 1):
        spoiled = data.copy()
        spoiled[(0, 0, column, 0) if channels_last else (0, 0, 0, column)] = np.nan
        wanted = REFERENCES[WGRAD](problem, grad, spoiled)
        assert np.isnan(wanted).any()
        assert not np.isnan(wanted).all()
        result = _blank(problem, WGRAD)
        assert execute(function, [np.ascontiguousarray(grad), np.ascontiguousarray(spoiled), result]) == ""
        np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))


def test_steps_run_across_rows():
    """(words of a row with zeros, of a step) for rows of so many words: 7 x 7, 14 x 14, 28 x 28, 56 x 56, 13 x 13."""
    assert [steps_of(words, rows) for words, rows in ((4, 7), (7, 14), (14, 28), (28, 8), (7, 13))] == [
        (4, 14), (7, 14), (14, 14), (28, 16), (7, 13),
    ]  # fmt: skip
    assert steps_of(25, 1) == (26, 13), "a word of zeros makes two steps of 13"
    assert steps_of(17, 1) == (18, 9)
    assert steps_of(1, 1) == (1, 1)
    kernel = forced(NAME)(_problem(STEM), WGRAD, MACHINE).kernel
    spec = kernel.spec(_problem("mb1ic16ih14oc16oh7kh3sh2ph1"), MACHINE)
    tiling = kernel.plan(_problem("mb1ic16ih14oc16oh7kh3sh2ph1"), WGRAD, MACHINE).tilings[0]
    shape = TileShape.of(spec, replace(tiling, tile_n=1, slab_h=7))
    assert (shape.phases, shape.phase_rows) == ((0, 1), 8), "rows of a stride of 2 by their parity"
    assert shape.grad_pitch // 16 % 2 == 1, "rows of a tile do not share a set of the cache"


@needs_avx512
@pytest.mark.parametrize(
    ("text", "channels_last", "granted"),
    [
        (STEM, True, True),
        (STEM, False, True),
        ("mb2ic64ih14iw14oc64kh3kw3ph1pw1", False, True),
        ("mb2ic64ih14iw14oc64kh3kw3ph1pw1", True, True),
        ("mb5ic70ih13iw13oc50oh7ow7kh1kw1sh2sw2", True, False),
        ("mb1ic4id4ih5iw6oc6kd2kh3kw3pd1ph1pw1", False, True),
    ],
)
def test_emulated_instructions_are_exact(text, channels_last, granted, tmp_path):
    """Machine code on the threads of the pool; a process without the permission runs the loops that convert."""
    problem = _problem(text, channels_last=channels_last)
    operands, wanted = numbers_of(problem, WGRAD, 3)
    function = emulated(_function(problem, WGRAD), granted=granted)
    np.testing.assert_array_equal(_ran(function, problem, WGRAD, operands, tmp_path, AVX512), wanted)


@needs_dots
def test_a_refused_process_converts(tmp_path):
    """The kernel as it is, which asks Linux itself; where it grants tiles, they are executed."""
    problem = _problem(PROBLEMS[2], channels_last=True)
    operands, wanted = numbers_of(problem, WGRAD, 4)
    np.testing.assert_array_equal(_ran(_function(problem, WGRAD), problem, WGRAD, operands, tmp_path), wanted)


@needs_tiles
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_executed_instructions_are_exact(text, channels_last, tmp_path):
    problem = _problem(text, channels_last=channels_last)
    operands, wanted = numbers_of(problem, WGRAD, 6)
    np.testing.assert_array_equal(_ran(_function(problem, WGRAD), problem, WGRAD, operands, tmp_path), wanted)


@pytest.mark.parametrize("mcpu", ["sapphirerapids", "graniterapids"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_machine_code(channels_last, mcpu):
    """The inner loop is loads of tiles and products; a work item sets the shapes once, and clears them at its end."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})
    problem = _problem("mb2ic64ih14iw14oc64kh3kw3ph1pw1", channels_last=channels_last)
    own = forced(NAME)(problem, WGRAD, MACHINE)
    choice = with_tiling(own, replace(own.plan.tilings[0], tile_m=32, tile_n=2))
    source = compiled(_function(problem, WGRAD, choice=choice), target).mod.inspect_source("s")
    counts = {name: len(re.findall(rf"\t{name}\t?", source)) for name in ("tdpbf16ps", "tileloadd", "ldtilecfg")}
    assert counts["ldtilecfg"] == len(re.findall(r"\ttilerelease", source)) == 1
    assert counts["tdpbf16ps"] >= 4
    assert counts["tdpbf16ps"] % 4 == 0
    assert counts["tileloadd"] in (counts["tdpbf16ps"], counts["tdpbf16ps"] + 4)  # 2 x 2, and sums of other slabs
    assert len(re.findall(r"\ttilestored\t", source)) == len(re.findall(r"\ttilezero\t", source)) == 4
    assert len(re.findall(r"\tsyscall", source)) == 1
    assert "vdpbf16ps" not in source
    assert len(re.findall(r"\tvfmadd\d+ps\t", source)) > 8, "the loops of a process without tiles"
    called = set(re.findall(r"\tcallq?\t\*?(\S*convgrad_tile\w*)", source))
    assert called <= {"convgrad_tile_ready", "convgrad_tile_ready@PLT"}


@pytest.mark.parametrize(
    ("text", "machine", "reason"),
    [
        ("mb1ic8ih4oc8kh1_dt=bf16:bf16:bf16", "AVX512-BF16", "AVX512-BF16 has no tiles of bfloat16"),
        ("mb1ic8ih4oc8kh1_dt=f32:bf16:bf16", "AMX-BF16", "both operands must be bfloat16"),
    ],
)
def test_refusals_say_why(text, machine, reason):
    choice = forced(NAME)(ConvProblem.from_descriptor(text), WGRAD, CPUS[machine])
    assert not choice.is_kernel
    assert reason in choice.reason


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_depthwise_layers_take_no_tiles(channels_last):
    """One channel a group fills a sixteenth of a row and of a column of a tile."""
    taken = chooser.choose(_problem("g64mb8ic64ih28oc64kh3ph1", channels_last=channels_last), WGRAD, MACHINE)
    assert not taken.name.startswith(NAME)


def test_random_floats_of_several_slabs_are_within_the_bound():
    """Sums go to memory and back between slabs, which rounds nothing."""
    problem = _problem("mb4ic18ih9iw10oc18kh3kw3ph1pw1", "bfloat16", "float32", "bfloat16")
    choice = forced(NAME)(problem, WGRAD, MACHINE)
    choice = with_tiling(choice, replace(choice.plan.tilings[0], slab_h=2, slab_d=1, split_k=2))
    generator = np.random.default_rng(3)
    grad, data = (
        generator.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in (problem.grad_shape, problem.data_shape)
    )
    found = _blank(problem, WGRAD)
    assert execute(_function(problem, WGRAD, choice=choice), [grad, data, found]) == ""
    wanted = REFERENCES[WGRAD](problem, grad, data).astype("float64")
    magnitudes = REFERENCES[WGRAD](problem, np.abs(grad), np.abs(data)).astype("float64")
    unit, count = 2.0**-24, 4 * 9 * 10 + 1
    assert (np.abs(found - wanted) <= count * unit / (1 - count * unit) * magnitudes).all()
    assert (found != wanted).any()
