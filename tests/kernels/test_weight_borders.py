# SPDX-License-Identifier: Apache-2.0
"""wgrad sums, for each tap, where it meets data, and nothing else: its panel holds NaN wherever X was not packed."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx

from tests.kernels.harness import NATIVE, check_exact
from tvm_convgrad.kernels import plan, weight_plan
from tvm_convgrad.kernels.loops import Loops
from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.kernels.weight_spec import TapPanel, VectorPanel, WeightTiling, weight_spec
from tvm_convgrad.problem import ConvProblem

BORDERS = {
    "even": "mb3ic20id4ih5iw7oc18od4oh5ow7kd3kh3kw3pd1ph1pw1",
    "more padding after": "mb2ic33id3ih5iw6oc17od4oh7ow9kd3kh3kw3ph1pw2",
    "more padding before": "mb2ic17id4ih6iw5oc19od5oh7ow6kd3kh4kw4pd2ph3pw3",
    "stride": "mb2ic17id5ih9iw8oc19od3oh5ow4kd3kh3kw3sd2sh2sw2pd1ph1pw1",
    "stride before kernel": "mb2ic16id7ih8iw9oc14od3oh3ow4kd2kh2kw3sd3sh3sw3pd1ph1pw2",
    "dilation": "mb2ic16id4ih9iw9oc20od4oh9ow9kd3kh3kw3dd1dh3dw2pd2ph4pw3",
    "large dilation": "mb3ic24id9ih4iw4oc15od9oh4ow4kd3kh3kw3dd3dh3dw3pd4ph4pw4",
    "taps between meet nothing": "mb2ic16id1ih1iw5oc20od3oh3ow3kd5kh5kw3sd2sh2sw2pd2ph2pw1",
    "columns between meet nothing": "mb2ic20ih4iw1oc18oh4ow3kh3kw5sw2ph1pw2",
    "taps at ends meet nothing": "mb5ic16id1ih1iw2oc20od1oh1ow2kd3kh3kw3pd1ph1pw1",
    "planes meet nothing": "mb3ic18id2ih3iw3oc16od8oh8ow8kd3kh3kw3pd3ph3pw3",
    "depth only": "mb3ic20id4ih4iw4oc20od4oh4ow4kd3kh1kw1pd1",
    "no taps, padding": "mb2ic16id2ih4iw4oc20od4oh6ow6kd1kh1kw1pd1ph1pw1",
    "groups": "g2mb2ic34id3ih4iw5oc26od3oh4ow5kd3kh3kw3pd1ph1pw1",
}

CUTS = [
    {},
    {"planes": 1},
    {"planes": 1, "lines": 2},
    {"planes": 3, "parts": 2, "columns": 1},
    {"planes": 5, "packed": True},
    {"planes": 99, "inner": 2, "columns": 1},
]

CASES = [
    (name, channels_last, CUTS[(number + turn) % len(CUTS)])
    for number, name in enumerate(BORDERS)
    for turn, channels_last in itertools.product((0, 1, 3), (False, True))
]


ROWS = [12, 9, 16, 8]
"""Rows of pairs of tap and channel: those of one tap, of several, of one tap of depth, of all."""


def _arranged(text, channels_last):
    problem = ConvProblem.from_descriptor(text)
    if not channels_last:
        return problem
    return problem.with_layouts(*(("NDHWC", "ODHWI", "NDHWC") if problem.rank == 3 else ("NHWC", "OHWI", "NHWC")))


def _pairs():
    """Problems whose pairs of tap and channel lie evenly in dW, with some rows and a cut for each."""
    ungrouped = {name: text for name, text in BORDERS.items() if not text.startswith("g")}
    for number, (name, text) in enumerate(ungrouped.items()):
        for turn, rows in enumerate((ROWS[number % 4], (9, 3)[number % 2])):
            channels_last = turn == 0
            problem = _arranged(re.sub(r"ic\d+", f"ic{2 * rows if channels_last else 5}", text), channels_last)
            spec = weight_spec(problem)
            if not weight_plan.swap_refusal(spec) and rows <= len(spec.row_taps):
                tiling = WeightTiling(rows, 1, spec.dy.extents[1], 1, 1, 1, True, swapped=True, direct=channels_last)
                cut = replace(tiling, **CUTS[(number + turn) % 3])
                yield pytest.param(problem, (spec, cut), id=f"{name}-{problem.data_layout}-{rows}")


def _with_nan_in_panels(monkeypatch):
    plain = Loops.buffer

    def poisoned(self, name, size, dtype):
        buffer = plain(self, name, size, dtype)
        if name in ("x_panel", "tap_panel"):
            with self.loop(size, "poison") as e:
                self.store(buffer, e, tirx.const(np.nan, dtype))
        return buffer

    monkeypatch.setattr(Loops, "buffer", poisoned)


def _cut(problem, cut):
    """(spec, tiling) of the plan with some knobs set, as far as they go together."""
    machine = machine_of(tvm.target.Target(NATIVE))
    spec = weight_spec(problem)
    tiling = next(t for t in weight_plan.candidates(spec, machine, True) if not t.swapped and not t.direct)
    tiling = replace(tiling, lines=spec.dy.extents[1])
    tiling = replace(tiling, **cut)
    assert not weight_plan.refusal(spec, tiling, machine)
    return spec, tiling


@pytest.mark.parametrize(("name", "channels_last", "cut"), CASES, ids=str)
def test_borders_are_left_out(name, channels_last, cut, monkeypatch):
    problem = _arranged(BORDERS[name], channels_last)
    chosen = Choice(weight_plan.KIND, "", detail=_cut(problem, cut))
    monkeypatch.setattr(plan, "choose", lambda *_: chosen)
    _with_nan_in_panels(monkeypatch)
    check_exact(problem, "backward_weight")


@pytest.mark.parametrize(("problem", "detail"), list(_pairs()))
def test_rows_of_pairs_sum_where_any_of_their_taps_meets(problem, detail, monkeypatch):
    assert not weight_plan.refusal(*detail, machine_of(tvm.target.Target(NATIVE)))
    chosen = Choice(weight_plan.KIND, "", detail=detail)
    monkeypatch.setattr(plan, "choose", lambda *_: chosen)
    _with_nan_in_panels(monkeypatch)
    check_exact(problem, "backward_weight")


def test_a_block_of_one_tap_sums_its_own_bounds():
    problem = _arranged("mb2ic24id4ih5iw6oc32od4oh5ow6kd3kh3kw3pd1ph1pw1", True)
    spec = weight_spec(problem).swapped
    panel = TapPanel.of(spec, 12, (5, 1), 16)
    source = spec.gathered
    assert panel.met == [bounds for bounds in itertools.product(*source.met) for _ in range(2)]
    assert panel.share == pytest.approx(math.prod(source.shares))
    all_taps = TapPanel.of(weight_spec(_arranged(BORDERS["even"], False)).swapped, 27, (5, 1), 16)
    assert all_taps.share == 1.0


@pytest.mark.parametrize("name", BORDERS)
def test_bounds_are_where_taps_meet_data(name):
    spec = weight_spec(ConvProblem.from_descriptor(BORDERS[name]))
    for axis, bounds in enumerate(spec.met):
        for k, (first, end) in enumerate(bounds):
            offset = k * spec.dilation[axis] - spec.low[axis]
            met = [
                at
                for at in range(spec.dy.extents[axis])
                if 0 <= at * spec.strides[axis] + offset < spec.x.extents[axis]
            ]
            assert list(range(first, end)) == met


@pytest.mark.parametrize("name", BORDERS)
@pytest.mark.parametrize("planes", [1, 2, 3, 5, 8])
def test_panels_have_room_for_the_planes_that_slabs_meet(name, planes):
    spec = weight_spec(ConvProblem.from_descriptor(BORDERS[name]))
    depth, extent, taps = spec.dy.extents[0], spec.x.extents[0], spec.kernel[0]
    panel = VectorPanel.of(spec, 1, planes, 16, 1)
    assert panel.planes <= planes * taps
    for start in range(3 * depth):
        met = {
            number // depth * extent + d
            for number in range(start, start + planes)
            for k in range(taps)
            if 0 <= (d := number % depth * spec.strides[0] + k * spec.dilation[0] - spec.low[0]) < extent
        }
        first, end = spec.planes_met(start, planes)
        assert start // depth * extent <= first
        assert end <= ((start + planes - 1) // depth + 1) * extent
        assert not met or first <= min(met) <= max(met) < end
        assert not panel.shares_planes or end - first <= panel.planes
