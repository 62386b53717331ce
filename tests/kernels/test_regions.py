# SPDX-License-Identifier: Apache-2.0
"""Dilations so large that taps are in bounds for parts of the result only: each region computes with its own taps."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.kernels.harness import MACHINE, NATIVE, check_choice, check_exact, computed, kernel_of
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.contract import Plan
from tvm_convgrad.kernels.gemm.plan import ImplicitGemm, invalid
from tvm_convgrad.kernels.gemm.regions import by_regions, by_whole_rows, products, reaches_beyond
from tvm_convgrad.kernels.gemm.tiling import GemmTiling, blocking_of
from tvm_convgrad.kernels.spec import conv_spec
from tvm_convgrad.kernels.wgrad.spec import wgrad_spec
from tvm_convgrad.verify.operators import ALL_DIRECTIONS

PROBLEMS = [
    "mb2ic18ih13iw11oc17kh3kw3ph12pw10dh11dw9",  # an outer tap is in bounds at one row and one column
    "mb2ic18ih9iw11oc20kh3kw3ph17pw22dh16dw21",  # only the middle tap is ever in bounds
    "mb1ic16ih12iw12oc33kh3kw3ph6pw6dh5dw5",  # the first taps are in bounds nearly everywhere, the others at half
    "mb2ic7ih20iw17oc9kh5kw3sh2sw1ph16pw6dh7dw5",  # forward with strides
    "mb2ic20iw40oc20kw3pw30dw29",  # 1-d
    "mb1ic5id6ih7iw9oc6kd3kh3kw3pd5ph6pw8dd4dh5dw7",  # 3-d, as many regions as it may have or more
    "g2mb2ic12ih10iw10oc14kh3kw3ph9pw9dh8dw8",  # groups
    "mb1ic4ih5iw5oc6kh1kw1ph3pw3",  # results that read only padding
    "mb2ic20ih28iw20oc18kh3kw3ph4pw4dh3dw3",  # regions that save less than a tenth, but are wide
]


def _specs(text: str):
    problem = ConvProblem.from_descriptor(text)
    return [conv_spec(problem, direction) for direction in ("forward", "backward_data")]


@pytest.mark.parametrize("text", PROBLEMS)
def test_regions_hold_each_position_once_with_its_taps_in_bounds(text):
    for spec in _specs(text):
        if spec.out_step != (1, 1, 1):
            assert not list(by_regions(spec))
            continue
        wanted = _products_of(spec)
        for split in by_regions(spec):
            found = _products_of(split)
            assert sorted(found) == sorted(wanted)
            assert sum(map(len, found.values())) == sum(map(len, wanted.values()))
            assert products(split) < products(spec)


def _products_of(spec):
    """For each place in the result the (place in the source, kernel) pairs that it sums; each place occurs once."""
    sums = {}
    for phases in spec.phases:
        for phase in phases:
            for q in itertools.product(*(range(axis.count) for axis in phase)):
                at = sum((n + a.base) * s for n, a, s in zip(q, phase, spec.result.spatial, strict=True))
                assert at not in sums
                sums[at] = []
                for taps in itertools.product(*(axis.taps for axis in phase)):
                    places = [n * step + o for n, step, (_, o) in zip(q, spec.in_step, taps, strict=True)]
                    if all(0 <= p < size for p, size in zip(places, spec.source.extents, strict=True)):
                        place = sum(p * s for p, s in zip(places, spec.source.spatial, strict=True))
                        sums[at].append((place, tuple(k for k, _ in taps)))
    return sums


def test_taps_that_are_never_in_bounds_are_skipped():
    forward, _ = _specs("mb8ic64ih28oc32oh28kh3dh35ph36")
    (pointwise,) = by_regions(forward)
    assert products(pointwise) == 28 * 28
    assert [axis.count for axis in pointwise.phases[0][0]] == [1, 1, 28 * 28], "H and W are one axis of a 1x1"


def test_wgrad_skips_them_too():
    for low, high, kernel in ((36, 36, (1, 1, 1)), (0, 72, (1, 1, 1)), (0, 36, (1, 2, 2))):
        problem = ConvProblem.from_descriptor("mb1ic18ih28oc17oh28kh3dh35ph36")
        dilation = (low + high) // 2
        padding = ((low, high),) * 2
        problem = dataclasses.replace(problem, dilation=(dilation,) * 2, padding=padding)
        spec = wgrad_spec(problem)
        assert spec.kernel == kernel
        assert not spec.has_all_taps
        check_exact(problem, "backward_weight")


@pytest.mark.parametrize(
    ("size", "dilation", "wanted"), [(28, 1, []), (7, 1, []), (7, 2, [3, 3, 9]), (28, 4, [3, 3, 9])]
)
def test_the_border_of_a_common_layer_is_not_worth_regions(size, dilation, wanted):
    """As DeepLab's layers of a dilation of 4 are: at batch 32 they take 0.65 to 0.85 of the time by three regions."""
    for spec in _specs(f"mb8ic64ih{size}oc64oh{size}kh3dh{dilation - 1}ph{dilation}"):
        assert [len(split.phases) for split in by_regions(spec)] == wanted


STRIDED = [
    "mb2ic20ih15iw33oc17kh1kw1sh2sw2",  # phases of 17 and 16 columns, three of which have no taps
    "mb2ic17ih16iw33oc20kh3kw3sh2sw2ph1pw1",  # only columns are odd
    "mb1ic33ih17iw50oc18kh3kw3sh3sw3ph1pw1",  # 50 columns are 17, 17 and 16
    "mb1ic16id5ih7iw9oc17kd3kh3kw3sd2sh2sw2pd1ph1pw1",
    "g2mb1ic34ih9iw21oc32kh5kw5sh2sw2ph2pw2",
]


@pytest.mark.parametrize("text", STRIDED)
def test_whole_rows_are_exact(text):
    """In one spatial block a row and in several, in pieces of the staging buffer, and in both orders of the loops."""
    problem, choice, spec = _whole_rows(text)
    tilings = {
        (t.order, t.block_tiles > 1, t.block_h > t.tile_h, t.splits > 1): t
        for t in choice.kernel.candidates(spec, spec.phases[0], MACHINE)
    }
    for tiling in tilings.values():
        assert not tiling.over_pixels
        check_choice(problem, "backward_data", dataclasses.replace(choice, plan=Plan((tiling,), 1)))


@pytest.mark.parametrize("text", STRIDED)
def test_whole_rows_of_bfloat16_are_exact(text):
    """They are stored by words of two columns, of which the last one may be single."""
    problem, choice, spec = _whole_rows(f"{text}_dt=bf16:bf16:bf16")
    operands, wanted = numbers_of(problem, "backward_data", 0)
    for tiling in itertools.islice(choice.kernel.candidates(spec, spec.phases[0], MACHINE), 3):
        found = computed(problem, "backward_data", dataclasses.replace(choice, plan=Plan((tiling,), 1)), operands)
        np.testing.assert_array_equal(found, wanted, str(tiling))


def _whole_rows(text):
    """A problem, the choice of a GEMM for its dgrad, and the decomposition into phases of one size."""
    problem = ConvProblem.from_descriptor(text)
    choice = chooser.choose(problem, "backward_data", MACHINE)
    assert isinstance(choice.kernel, ImplicitGemm)
    _, spec = choice.kernel.regions(problem, "backward_data")
    return problem, choice, spec


def test_only_strided_results_in_rows_have_phases_of_one_size():
    for text in ("mb1ic8ih9oc8kh3ph1", "mb1ic8ih8oc8kh3sh2ph1", "mb1ic8ih9oc8kh3sh2ph1_lay=NHWC:OHWI:NHWC"):
        assert list(by_whole_rows(conv_spec(ConvProblem.from_descriptor(text), "backward_data"))) == []
    odd = conv_spec(ConvProblem.from_descriptor("mb1ic8ih9oc8kh3sh2ph1"), "backward_data")
    (whole,) = by_whole_rows(odd)
    assert [[axis.count for axis in phase] for phase in whole.phases[0]] == [[1, 5, 5]] * 4
    assert [reaches_beyond(whole, phase) for phase in whole.phases[0]] == [False, True, True, True]
    assert "beyond the result" in invalid(whole, whole.phases[0], GemmTiling("pixels", 4, 1, 1, 1), MACHINE)


@pytest.mark.parametrize("direction", ALL_DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_regions_are_exact(text, channels_last, direction):
    problem = ConvProblem.from_descriptor(text)
    if channels_last:
        axes = problem.data_layout[2:]
        problem = problem.with_layouts(f"N{axes}C", f"O{axes}I", f"N{axes}C")
    check_exact(problem, direction)


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_the_plan_multiplies_no_padding_where_dilation_is_large(direction):
    """Of the 84 x 84 products of a pair of channels, 36 x 36 are in bounds: by regions or by tiles that skip them."""
    problem = ConvProblem.from_descriptor("mb2ic64ih28oc64oh28kh3dh23ph24")
    choice, _ = kernel_of(problem, direction, {**NATIVE, "num-cores": 2})
    spec = choice.kernel.regions(problem, direction)[choice.plan.region]
    computed = 0.0
    for phases, tiling in zip(spec.phases, choice.plan.tilings, strict=True):
        share = blocking_of(spec, phases, tiling, MACHINE).ranges.share
        computed += products(dataclasses.replace(spec, phases=(phases,))) * share
    assert computed == pytest.approx(36 * 36)
