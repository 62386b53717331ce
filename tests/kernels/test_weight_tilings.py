# SPDX-License-Identifier: Apache-2.0
"""wgrad is exact with every tiling, by each field of it and by several; refusals of tilings have reasons."""

from dataclasses import replace

import pytest

from tests.kernels.harness import MACHINE, always, check_exact
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.wgrad import plan as weight_plan
from tvm_convgrad.kernels.wgrad.spec import wgrad_spec

POINTWISE = [
    "mb3ic40ih10iw10oc37oh10ow10kh1kw1",
    "mb3ic33ih9iw43oc24oh5ow22kh1kw1sh2sw2",
    "mb2ic64ih16iw8oc48oh16ow8kh1kw1",
]
DENSE = [
    "mb3ic40ih11iw9oc37oh11ow9kh3kw3ph1pw1",
    "mb4ic24ih7iw7oc29oh7ow7kh5kw5ph2pw2",
    "g2mb3ic36ih7iw7oc40oh7ow7kh3kw3ph1pw1",
]
FEW = [
    "mb3ic3ih17iw19oc20oh9ow10kh3kw3sh2sw2ph1pw1",
    "mb2ic5ih13iw11oc37oh13ow11kh4kw3dh1dw2ph3pw3",
    "mb2ic3ih19iw19oc33oh10ow10kh7kw7sh2sw2ph3pw3",
]
CHANGES = [
    {"n_blocks": 99},
    {"n_blocks": 2, "split_m": 2},
    {"split_k": 3},
    {"slab_h": 4, "slab_d": 1},
    {"slab_d": 2},
    {"scalars_packed": True},
    {"scalars_packed": True, "n_blocks": 2, "split_m": 2, "split_k": 2},
    {"prefetch": True},
    {"tile_m": 5, "tile_n": 1, "scalars_packed": True},
    {"tile_m": 18, "tile_n": 1, "scalars_packed": True},
    {"transposed": True, "tile_m": 6},
    {"transposed": True, "tile_m": 18, "tile_n": 1, "scalars_packed": True, "split_k": 2},
    {"vectors_in_place": True, "prefetch": True, "n_blocks": 2},
    {"vectors_in_place": True, "transposed": True, "tile_m": 7, "split_k": 2, "scalars_packed": True},
]

FEW_CHANGES = [
    {"tile_m": 7, "tile_n": 3, "split_k": 2},
    {"tile_m": 21, "tile_n": 1, "n_blocks": 2, "prefetch": True},
    {"tile_m": 13, "tile_n": 2, "slab_h": 2},
    {"tile_m": 3, "tile_n": 1, "split_k": 3, "slab_d": 2},
]


CASES = [
    (changes, layout, texts[(number + turn) % 3])
    for number, changes in enumerate(CHANGES)
    for turn, (layout, texts) in enumerate((("NCHW", POINTWISE), ("NHWC", POINTWISE), ("HWIO", DENSE), ("NCHW", DENSE)))
    if texts is POINTWISE or not changes.keys() & {"transposed", "vectors_in_place"}
] + [
    ({**changes, "transposed": True, "vectors_in_place": in_place and layout != "NCHW"}, layout, text)
    for changes, in_place in zip(FEW_CHANGES, (True, False, True, False), strict=True)
    for layout, text in zip(("NCHW", "NHWC", "HWIO"), FEW, strict=True)
]


(KERNEL,) = weight_plan.KERNELS


def _own(problem):
    """The problem as a contraction, and the kernel's own tiling of it."""
    (tiling,) = KERNEL.plan(problem, "backward_weight", MACHINE).tilings
    return wgrad_spec(problem), tiling


@pytest.mark.parametrize(("changes", "layout", "text"), CASES, ids=str)
def test_every_tiling_is_exact(text, layout, changes):
    problem = ConvProblem.from_descriptor(text)
    if layout != "NCHW":
        problem = problem.with_layouts("NHWC", "OHWI" if layout == "NHWC" else "HWIO", "NHWC")
    spec, tiling = _own(problem)
    tiling = replace(tiling, **changes)
    if tiling.slab_h < spec.dy.extents[1] and "slab_d" not in changes:
        tiling = replace(tiling, slab_d=1)
    reason = weight_plan.refusal(spec, tiling, MACHINE)
    if reason:
        pytest.skip(reason)
    check_exact(problem, "backward_weight", choose=always(KERNEL, tiling))


def test_refusals_name_the_knob():
    spec, tiling = _own(ConvProblem.from_descriptor(DENSE[0]))
    assert not weight_plan.refusal(spec, tiling, MACHINE)
    for knob, value in (("tile_m", 0), ("tile_m", 99), ("tile_n", 31), ("vectors_in_place", True)):
        assert knob in weight_plan.refusal(spec, replace(tiling, **{knob: value}), MACHINE) or value == 31
    assert "lie in" in weight_plan.refusal(spec, replace(tiling, tile_m=19, tile_n=1, transposed=True), MACHINE)
    grouped, _ = _own(ConvProblem.from_descriptor(DENSE[2]))
    assert "transposed" in weight_plan.refusal(grouped, replace(tiling, transposed=True), MACHINE)
    assert "height" in weight_plan.refusal(spec, replace(tiling, slab_d=2, slab_h=2), MACHINE)
