# SPDX-License-Identifier: Apache-2.0
"""wgrad is exact however it is cut, by each knob of the tiling and by several; cuts that are refused say why."""

from dataclasses import replace

import pytest
import tvm

from tests.kernels.harness import NATIVE, check_exact
from tvm_convgrad.kernels import weight_plan
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.problem import ConvProblem

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
CUTS = [
    {"inner": 99},
    {"inner": 2, "splits": 2},
    {"parts": 3},
    {"lines": 4, "planes": 1},
    {"planes": 2},
    {"packed": True},
    {"packed": True, "inner": 2, "splits": 2, "parts": 2},
    {"prefetched": True},
    {"rows": 5, "columns": 1, "packed": True},
    {"rows": 18, "columns": 1, "packed": True},
    {"swapped": True, "rows": 6},
    {"swapped": True, "rows": 18, "columns": 1, "packed": True, "parts": 2},
    {"direct": True, "prefetched": True, "inner": 2},
    {"direct": True, "swapped": True, "rows": 7, "parts": 2, "packed": True},
]

FEW_CUTS = [
    {"rows": 7, "columns": 3, "parts": 2},
    {"rows": 21, "columns": 1, "inner": 2, "prefetched": True},
    {"rows": 13, "columns": 2, "lines": 2},
    {"rows": 3, "columns": 1, "parts": 3, "planes": 2},
]


CASES = [
    (cut, layout, texts[(number + turn) % 3])
    for number, cut in enumerate(CUTS)
    for turn, (layout, texts) in enumerate((("NCHW", POINTWISE), ("NHWC", POINTWISE), ("HWIO", DENSE), ("NCHW", DENSE)))
    if texts is POINTWISE or not cut.keys() & {"swapped", "direct"}
] + [
    ({**cut, "swapped": True, "direct": direct and layout != "NCHW"}, layout, text)
    for cut, direct in zip(FEW_CUTS, (True, False, True, False), strict=True)
    for layout, text in zip(("NCHW", "NHWC", "HWIO"), FEW, strict=True)
]


@pytest.mark.parametrize(("cut", "layout", "text"), CASES, ids=str)
def test_every_cut_is_exact(text, layout, cut, monkeypatch):
    problem = ConvProblem.from_descriptor(text)
    if layout != "NCHW":
        problem = problem.with_layouts("NHWC", "OHWI" if layout == "NHWC" else "HWIO", "NHWC")
    machine = machine_of(tvm.target.Target(NATIVE))
    choice = weight_plan.plan_weight(problem, machine)
    spec, tiling = choice.detail
    tiling = replace(tiling, **cut)
    if tiling.lines < spec.dy.extents[1] and "planes" not in cut:
        tiling = replace(tiling, planes=1)
    reason = weight_plan.refusal(spec, tiling, machine)
    if reason:
        pytest.skip(reason)
    chosen = Choice(choice.kind, "", detail=(spec, tiling))
    monkeypatch.setattr("tvm_convgrad.kernels.plan.choose", lambda *_: chosen)
    check_exact(problem, "backward_weight")


def test_refusals_name_the_knob():
    machine = machine_of(tvm.target.Target(NATIVE))
    spec, tiling = weight_plan.plan_weight(ConvProblem.from_descriptor(DENSE[0]), machine).detail
    assert not weight_plan.refusal(spec, tiling, machine)
    for knob, value in (("rows", 0), ("rows", 99), ("columns", 31), ("direct", True)):
        assert knob in weight_plan.refusal(spec, replace(tiling, **{knob: value}), machine) or value == 31
    assert "lie in" in weight_plan.refusal(spec, replace(tiling, rows=19, columns=1, swapped=True), machine)
    grouped, _ = weight_plan.plan_weight(ConvProblem.from_descriptor(DENSE[2]), machine).detail
    assert "swapped" in weight_plan.refusal(grouped, replace(tiling, swapped=True), machine)
    assert "height" in weight_plan.refusal(spec, replace(tiling, planes=2, lines=2), machine)
