# SPDX-License-Identifier: Apache-2.0
"""Kernels whose extents are equal by coincidence: nothing follows from that about which elements are multiplied."""

import itertools

import pytest

from tests.kernels.harness import MACHINE, always, check_exact
from tvm_convgrad.core.geometry import effective_kernel
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.wgrad import plan as weight_plan
from tvm_convgrad.kernels.wgrad.spec import wgrad_spec
from tvm_convgrad.verify.operators import check_problems

ONE_TAP = {
    "strides and padding": "mb1ic48ih3iw3oc48oh3ow3kh1kw1sh2sw2dh1dw0ph2pw1rh1rw1_lay=NHWC:OIHW:NHWC",
    "one of four taps is left": "mb2ic8ih5iw1oc17oh5ow1kh1kw4sh2sw1ph1pw1rh3rw2_lay=NCHW:OHWI:NCHW",
    "one of four taps is left, 1-d": "mb3ic24iw1oc15ow1kw4sw2rw3_lay=NCW:WIO:NCW",
    "strides and padding after": "mb2ic16ih3iw5oc32oh3ow5kh1kw1sh2sw3rh2rw8",
    "padding on both sides of one axis": "mb2ic20ih4iw4oc24oh4ow4kh1kw1sh1sw2pw2rw1",
    "the last of three taps is left": "mb2ic16ih2iw2oc16oh2ow2kh3kw3sh2sw2dh2dw2ph6pw6rh1rw1_lay=NHWC:OHWI:NHWC",
    "depth": "mb2ic17id2ih2iw3oc18od2oh2ow3kd1kh1kw1sd2sh1sw1pd1ph0pw0rd0rh0rw0_lay=NDHWC:ODHWI:NDHWC",
    "all extents alike": "mb3ic3ih3iw3oc3oh3ow3kh1kw1sh3sw3ph3pw3rh1rw1",
}
"""One tap is in bounds, X and dY have equal extents, but not each pixel of dY goes with the pixel of X at its place."""


def test_one_tap_wgrad_with_equal_extents():
    problems = list(map(ConvProblem.from_descriptor, ONE_TAP.values()))
    verdicts = list(check_problems(problems, impls=("kernel", "auto"), directions=("backward_weight",)))
    assert len(verdicts) == 2 * len(problems)
    assert [v for v in verdicts if v.status != "right"] == []


@pytest.mark.parametrize("name", ONE_TAP)
def test_each_way_to_tile_a_one_tap_wgrad(name):
    """Operands swapped, read in place and packed, wherever a tiling of that form is allowed."""
    problem = ConvProblem.from_descriptor(ONE_TAP[name])
    spec = wgrad_spec(problem)
    (kernel,) = weight_plan.KERNELS
    forms = {}
    for tiling in weight_plan.candidates(spec, MACHINE, True):
        forms.setdefault((tiling.transposed, tiling.vectors_in_place, tiling.scalars_packed, tiling.prefetch), tiling)
    for tiling in forms.values():
        check_exact(problem, "backward_weight", choose=always(kernel, tiling))


def _alike():
    """Problems in which extents, channels, the batch and the kernel are one number, or two, in layouts of all kinds."""
    numbers = itertools.count()
    layouts = [
        ("NC{}", "OI{}", "NC{}"),
        ("N{}C", "O{}I", "N{}C"),
        ("N{}C", "{}IO", "NC{}"),
        ("C{}N", "IO{}", "{}NC"),
        ("{}NC", "I{}O", "C{}N"),
    ]
    for rank, extent in ((1, 4), (2, 1), (2, 2), (2, 3), (3, 2)):
        letters = {1: "W", 2: "HW", 3: "DHW"}[rank]
        forms = [
            {},  # strides and padding that keep the extents, and a kernel as large as the data
            {"strides": extent, "padding": (extent * (extent - 1) // 2, (extent * (extent - 1) + 1) // 2)},
            {"dilation": extent, "padding": (extent * (extent - 1) // 2, (extent * (extent - 1) + 1) // 2)},
            {"kernel": 1, "strides": extent, "padding": (extent - 1, (extent - 1) * (extent - 1))},
            {"kernel": 1, "groups": extent},
            {"groups": extent, "padding": (extent - 1, extent - 1)},
            {"groups": extent, "multiplier": extent, "strides": extent, "padding": (0, extent)},
        ]
        for form in forms:
            data, kernel, grad = (text.format(letters) for text in layouts[next(numbers) % len(layouts)])
            yield ConvProblem(
                extent,
                extent,
                extent * form.get("multiplier", 1),
                (extent,) * rank,
                (form.get("kernel", extent),) * rank,
                (form.get("strides", 1),) * rank,
                (form.get("padding", (0, 0)),) * rank,
                (form.get("dilation", 1),) * rank,
                form.get("groups", 1),
                data,
                kernel,
                grad,
            )


def test_kernels_where_all_numbers_are_alike():
    problems = list(_alike())
    assert len(problems) == 35
    verdicts = list(check_problems(problems, impls=("kernel",)))
    assert len(verdicts) == 3 * len(problems)
    assert [v for v in verdicts if v.status != "right"] == []


SQUARES = [
    "mb16ic16ih16oc16oh16kh3ph1",
    "mb3ic17ih3oc17oh3kh3ph1",
    "mb2ic32ih2oc32oh2kh3ph1",
    "mb1ic16ih1oc16oh1kh3ph1",
]


@pytest.mark.skipif(not MACHINE.has_masks, reason="Winograd's kernels need masked stores")
def test_winograd_where_channels_and_extents_are_alike():
    layouts = itertools.cycle([("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("NHWC", "OHWI", "NCHW")])
    problems = [ConvProblem.from_descriptor(text).with_layouts(*next(layouts)) for text in SQUARES]
    verdicts = list(check_problems(problems, impls=("winograd",)))
    assert [v for v in verdicts if v.status == "wrong"] == []
    assert sum(v.status == "right" for v in verdicts) >= 10  # wgrad of one pixel has taps that meet nothing


def _axes():
    """(X, kernel, stride, padding, dilation) of an axis with at most three elements of X, where Y has an element."""
    paddings = itertools.product(range(4), repeat=2)
    for x, kernel, stride, padding, dilation in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 3), paddings, (1, 2)):
        if x + sum(padding) >= effective_kernel(kernel, dilation):
            yield x, kernel, stride, padding, dilation


def _products(axis, extent):
    """The (position of dY, position of X) pairs that the taps of an axis multiply."""
    x, kernel, stride, (low, _), dilation = axis
    reached = ((q, q * stride + k * dilation - low) for q in range(extent) for k in range(kernel))
    return {(q, at) for q, at in reached if 0 <= at < x}


def test_pointwise_means_that_pixels_are_multiplied_in_order():
    """For all small axes, beside one whose three pixels are multiplied in order."""
    seen = set()
    for axis in _axes():
        x, kernel, stride, padding, dilation = axis
        problem = ConvProblem(
            2, 5, 4, (3, x), (1, kernel), (1, stride), ((0, 0), padding), (1, dilation), data_layout="NHWC"
        )
        spec = wgrad_spec(problem)
        if not spec.is_pointwise:
            continue
        (extent,) = problem.grad_extents[1:]
        pace = spec.x.spatial[2] // problem.in_channels
        assert _products(axis, int(extent)) == {(q, q * pace) for q in range(int(extent))}, problem.descriptor
        seen.add((x == extent, kernel, stride))
    assert {(True, 1, 1), (False, 1, 2), (False, 1, 3), (True, 3, 2)} <= seen
