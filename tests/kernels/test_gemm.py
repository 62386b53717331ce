# SPDX-License-Identifier: Apache-2.0
"""Implicit GEMMs of forward and dgrad: every kind of tiling, fused epilogues, and batches known only at run time."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.harness import MACHINE, TARGET, check_choice, compiled, computed, run_in_red_zones, with_tiling
from tests.kernels.test_exact import SHAPES, _problem
from tests.threads import run_with_threads
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.contract import planned
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.gemm.plan import candidates, invalid, regions_of
from tvm_convgrad.verify.interpreter import execute

GEMMS = ("forward", "backward_data")
EPILOGUES = [
    Epilogue(bias=True),
    Epilogue(relu=True, accumulate=True),
    Epilogue(bias=True, relu=True, accumulate=True),
    Epilogue(bias=True, relu6=True),
]
FUSED = [
    "mb2ic17ih9iw11oc19oh9ow11kh3kw3ph1pw1",
    "mb2ic40ih8iw8oc24oh8ow8kh1kw1",
    "mb2ic32ih7iw37oc48oh7ow37kh1kw1",
    "mb2ic16ih12iw14oc32oh6ow7kh3kw3sh2sw2ph1pw1",
    "mb1ic3ih33iw33oc20oh17ow17kh5kw5sh2sw2ph2pw2",  # a stem of fewer taps: code for 7x7 compiles twice as long
    "g2mb2ic32ih13iw53oc36oh13ow53kh3kw3ph1pw1",
]


def _tilings(spec, phases, count, seed, machine=MACHINE):
    every = list(candidates(spec, phases, machine))
    kinds = {(t.vector_axis, t.order, t.unpacked, t.splits > 1, t.block_tiles > 1, t.tile_h > 1): t for t in every}
    return random.Random(seed).sample(list(kinds.values()), min(count, len(kinds)))


@pytest.mark.parametrize("direction", GEMMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", [*SHAPES[:5], *FUSED[2:4]])
def test_every_kind_of_tiling_is_exact(text, channels_last, direction):
    problem = _problem(text, channels_last)
    choice = chooser.choose(problem, direction, MACHINE)
    spec = regions_of(problem, direction)[choice.plan.region]
    for tiling in _tilings(spec, spec.phases[0], 3, text):
        check_choice(problem, direction, with_tiling(choice, tiling))


@pytest.mark.parametrize("direction", GEMMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", ["mb2ic24ih6iw21oc17oh6ow21kh1kw1", "mb1ic19ih7iw18oc20oh7ow18kh3kw3ph1pw1"])
def test_vectors_of_float16_are_converted_in_registers(text, channels_last, direction):
    """In all three tensors, in place where vectors run over pixels, and whatever the CPU that the tests run on."""
    machine = CPUS["AVX-512"]
    problem = _problem(text, channels_last).with_dtypes("float16", "float16", "float16")
    choice = chooser.choose(problem, direction, machine)
    spec = regions_of(problem, direction)[choice.plan.region]
    tilings = _tilings(spec, spec.phases[0], 3, text, machine)
    operands, wanted = numbers_of(problem, direction, 0)
    for tiling in tilings:
        function = chooser.build(problem, direction, machine, with_tiling(choice, tiling), "main")
        assert "float16x16" in str(function)
        result = np.full_like(wanted, np.nan)
        assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
        np.testing.assert_array_equal(result, wanted, str(tiling))


def test_float16_is_read_in_place_by_vectors_only():
    for channels_last, axis in ((False, "pixels"), (True, "channels")):
        problem = _problem("mb2ic144ih56iw56oc24oh56ow56kh1kw1", channels_last).with_dtypes(*["float16"] * 3)
        (spec,) = regions_of(problem, "forward")
        found = [t for t in candidates(spec, spec.phases[0], CPUS["AVX-512"]) if t.unpacked]
        assert {t.vector_axis for t in found} <= {"pixels"}
        assert bool(found) == (axis == "pixels")


def _prefetches(tiling, channels_last, text):
    """Whether tiles prefetch the source of the next one."""
    if tiling.over_pixels:
        return tiling.unpacked and "kh1" in text
    one_slice = "kd" not in text  # of a source that is read in place
    return channels_last and one_slice if tiling.unpacked else tiling.order == "weights"


@pytest.mark.parametrize("direction", GEMMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", [FUSED[1], "mb2ic17id3ih5iw6oc18od3oh5ow6kd3kh3kw3pd1ph1pw1"])
def test_tiles_that_prefetch_the_next_are_exact(text, channels_last, direction):
    problem = _problem(text, channels_last)
    choice = chooser.choose(problem, direction, MACHINE)
    spec = regions_of(problem, direction)[choice.plan.region]
    kinds = {
        (t.vector_axis, t.unpacked, t.block_tiles > 1): t
        for t in candidates(spec, spec.phases[0], MACHINE)
        if _prefetches(t, channels_last, text)
    }
    assert kinds
    operands, wanted = numbers_of(problem, direction, 0)
    for number, tiling in enumerate(kinds.values()):
        with_it = with_tiling(choice, tiling)
        near, far = (
            chooser.build(problem, direction, replace(MACHINE, l2_bytes=size), with_it, "main")
            for size in (1 << 30, 1 << 7)
        )
        assert str(far).count("prefetch") > str(near).count("prefetch"), tiling
        result = np.full_like(wanted, np.nan)
        assert execute(far, [*map(np.ascontiguousarray, operands), result]) == ""
        np.testing.assert_array_equal(result, wanted, str(tiling))
        if number == 0:
            result = run_in_red_zones(problem, direction, compiled(far, TARGET), operands)
            np.testing.assert_array_equal(result, wanted, str(tiling))


def test_why_a_tiling_is_not_valid():
    problem = ConvProblem.from_descriptor("mb2ic32ih9iw11oc48oh9ow11kh3kw3ph1pw1")
    own = chooser.choose(problem, "forward", MACHINE).plan
    spec, (chosen,) = regions_of(problem, "forward")[own.region], own.tilings
    phases, tiling = spec.phases[0], replace(chosen, exact_columns=False)
    assert not invalid(spec, phases, chosen, MACHINE)
    assert not invalid(spec, phases, tiling, MACHINE)
    for changes, reason in (
        ({"tile_m": 30, "tile_n": 3}, "registers"),
        ({"block_h": 2}, "block_h is 2; it must divide the 9 rows of the result"),
        ({"unpacked": True}, "taps read padding"),
        ({"vector_axis": "rows"}, "vector_axis"),
        ({"order": "random"}, "order"),
        ({"splits": 0}, "less than 1"),
        ({"vector_axis": "channels", "tile_m": 12, "tile_n": 1}, "fewer than a row of the tile"),
        ({"vector_axis": "pixels", "tile_h": 3, "block_h": 3}, "a vector of pixels lies in one row"),
    ):
        assert reason in invalid(spec, phases, replace(tiling, **changes), MACHINE)


def _with_epilogue(wanted, epilogue, axis, seed):
    """(bias, what the result holds before, what it should hold after) on small integers."""
    rng = np.random.default_rng(seed)
    shape = [1] * wanted.ndim
    shape[axis] = -1
    bias = rng.integers(-9, 10, wanted.shape[axis]).astype(wanted.dtype)
    before = rng.integers(-9, 10, wanted.shape).astype(wanted.dtype)
    total = wanted.copy()
    if epilogue.accumulate:
        total += before
    if epilogue.bias:
        total += bias.reshape(shape)
    return bias, before, _activated(total, epilogue)


def _activated(total, epilogue):
    """What relu or relu6 makes of it."""
    if epilogue.relu6:
        return np.clip(total, 0, 6)
    return np.maximum(total, 0) if epilogue.relu else total


@pytest.mark.parametrize("direction", GEMMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", FUSED)
def test_epilogues_are_exact(text, channels_last, direction):
    problem = _problem(text, channels_last)
    choice = chooser.choose(problem, direction, MACHINE)
    operands, sums = numbers_of(problem, direction, 0)
    layout = problem.grad_layout if direction == "forward" else problem.data_layout
    spec = regions_of(problem, direction)[choice.plan.region]
    for seed, tiling in enumerate(_tilings(spec, spec.phases[0], 2, text)):
        epilogue = EPILOGUES[(FUSED.index(text) + seed) % len(EPILOGUES)]
        bias, before, wanted = _with_epilogue(sums, epilogue, layout.index("C"), seed)
        with_bias = [*operands, bias] if epilogue.bias else operands
        there = before if epilogue.accumulate else None
        found = computed(problem, direction, with_tiling(choice, tiling), with_bias, there, epilogue=epilogue)
        np.testing.assert_array_equal(found, wanted, str(tiling))


def test_kernels_without_epilogue_say_so():
    problem = ConvProblem.from_descriptor("mb2ic17ih9oc19oh9kh3ph1")
    for direction, epilogue in (("backward_weight", Epilogue(relu=True)), ("forward", Epilogue(bias_grad=True))):
        choice = chooser.choose(problem, direction, MACHINE)
        with pytest.raises(UnsupportedError, match=r"does no (relu|bias_grad); apply it to the result"):
            chooser.build(problem, direction, MACHINE, choice, "main", epilogue)


@pytest.mark.parametrize("direction", GEMMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", FUSED)
def test_a_batch_known_only_at_run_time(text, channels_last, direction):
    fixed = _problem(text, channels_last)
    symbolic = replace(fixed, batch="n")
    choice = chooser.choose(symbolic, direction, MACHINE)
    assert choice.is_kernel
    spec, best = regions_of(planned(symbolic), direction)[choice.plan.region], choice.plan.tilings
    for tiling in (*best[:1], *_tilings(spec, spec.phases[0], 1, text)):
        varied, epilogue = with_tiling(choice, tiling), Epilogue(relu=True)
        for batch in (1, 3):
            problem = replace(fixed, batch=batch)
            operands, wanted = numbers_of(problem, direction, 0)
            found = computed(problem, direction, varied, operands, epilogue=epilogue, symbolic=symbolic)
            np.testing.assert_array_equal(found, np.maximum(wanted, 0), str(tiling))


def test_batches_that_int32_does_not_reach_are_refused():
    problem = replace(ConvProblem.from_descriptor("mb1ic64ih512oc1oh512kh1"), batch="n")
    choice = chooser.choose(problem, "forward", MACHINE)
    function = chooser.build(problem, "forward", MACHINE, choice, "main")
    assert "batches of at most 63" in function.script()
    inside = chooser.choose(problem.with_layouts("CNHW", "OIHW", "CNHW"), "forward", MACHINE)
    assert not inside.is_kernel
    assert "outermost" in inside.reason


def test_estimates_grow_with_the_work():
    small, large = (ConvProblem.from_descriptor(f"mb{n}ic64ih56oc64oh56kh3ph1") for n in (4, 16))
    for direction in GEMMS:
        times = [chooser.choose(problem, direction, MACHINE).estimate for problem in (small, large)]
        assert 0 < times[0] < times[1] < 6 * times[0]


PROGRAM = """
import numpy as np, tvm
from tests.kernels.harness import MACHINE, built
from tests.threads import check_same_bits
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.core.problem import ConvProblem
for text in ("mb3ic20ih20iw21oc24oh20ow21kh3kw3ph1pw1", "mb3ic40ih13iw53oc36oh13ow53kh1kw1"):
    for problem in (p := ConvProblem.from_descriptor(text), p.with_layouts("NHWC", "OHWI", "NHWC")):
        for direction in ("forward", "backward_data"):
            choice = chooser.choose(problem, direction, MACHINE)
            library = built(problem, direction, choice, Epilogue(True, True, True))
            result = problem.tensors[DIRECTIONS[direction].result][0]
            channels = problem.out_channels if direction == "forward" else problem.in_channels
            shapes = [*(problem.tensors[name][0] for name in DIRECTIONS[direction].operands), (channels,), result]
            def run():
                rng = np.random.default_rng(0)
                arrays = [tvm.runtime.tensor(rng.standard_normal(s).astype("float32")) for s in shapes]
                library["main"](*arrays)
                return [arrays[-1].numpy()]
            check_same_bits(run)
"""


def test_threads_do_not_change_bits():
    run_with_threads(PROGRAM, checks=8)
