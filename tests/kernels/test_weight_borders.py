# SPDX-License-Identifier: Apache-2.0
"""wgrad sums, for each tap, where it is in bounds, and nothing else: its panel is NaN wherever X was not packed."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx

from tests.kernels.harness import MACHINE, always, check_exact
from tvm_convgrad.codegen.loops import Loops
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.wgrad import plan as weight_plan
from tvm_convgrad.kernels.wgrad.panel_shapes import Im2colPanel, VectorPanel
from tvm_convgrad.kernels.wgrad.spec import WgradTiling, wgrad_spec

BORDERS = {
    "even": "mb3ic20id4ih5iw7oc18od4oh5ow7kd3kh3kw3pd1ph1pw1",
    "more padding after": "mb2ic33id3ih5iw6oc17od4oh7ow9kd3kh3kw3ph1pw2",
    "more padding before": "mb2ic17id4ih6iw5oc19od5oh7ow6kd3kh4kw4pd2ph3pw3",
    "stride": "mb2ic17id5ih9iw8oc19od3oh5ow4kd3kh3kw3sd2sh2sw2pd1ph1pw1",
    "stride before kernel": "mb2ic16id7ih8iw9oc14od3oh3ow4kd2kh2kw3sd3sh3sw3pd1ph1pw2",
    "dilation": "mb2ic16id4ih9iw9oc20od4oh9ow9kd3kh3kw3dd1dh3dw2pd2ph4pw3",
    "large dilation": "mb3ic24id9ih4iw4oc15od9oh4ow4kd3kh3kw3dd3dh3dw3pd4ph4pw4",
    "taps between read padding": "mb2ic16id1ih1iw5oc20od3oh3ow3kd5kh5kw3sd2sh2sw2pd2ph2pw1",
    "columns between read padding": "mb2ic20ih4iw1oc18oh4ow3kh3kw5sw2ph1pw2",
    "taps at ends read padding": "mb5ic16id1ih1iw2oc20od1oh1ow2kd3kh3kw3pd1ph1pw1",
    "slices of padding": "mb3ic18id2ih3iw3oc16od8oh8ow8kd3kh3kw3pd3ph3pw3",
    "depth only": "mb3ic20id4ih4iw4oc20od4oh4ow4kd3kh1kw1pd1",
    "no taps, padding": "mb2ic16id2ih4iw4oc20od4oh6ow6kd1kh1kw1pd1ph1pw1",
    "groups": "g2mb2ic34id3ih4iw5oc26od3oh4ow5kd3kh3kw3pd1ph1pw1",
}

CHANGES = [
    {},
    {"slab_d": 1},
    {"slab_d": 1, "slab_h": 2},
    {"slab_d": 3, "split_k": 2, "tile_n": 1},
    {"slab_d": 5, "scalars_packed": True},
    {"slab_d": 99, "n_blocks": 2, "tile_n": 1},
]

CASES = [
    (name, channels_last, CHANGES[(number + turn) % len(CHANGES)])
    for number, name in enumerate(BORDERS)
    for turn, channels_last in itertools.product((0, 1, 3), (False, True))
]

(KERNEL,) = weight_plan.KERNELS


ROWS = [12, 9, 16, 8]
"""Rows of pairs of tap and channel: those of one tap, of several, of one tap of depth, of all."""


def _arranged(text, channels_last):
    problem = ConvProblem.from_descriptor(text)
    if not channels_last:
        return problem
    return problem.with_layouts(*(("NDHWC", "ODHWI", "NDHWC") if problem.rank == 3 else ("NHWC", "OHWI", "NHWC")))


def _pairs():
    """Problems whose pairs of tap and channel lie evenly in dW, with some rows and a tiling for each."""
    ungrouped = {name: text for name, text in BORDERS.items() if not text.startswith("g")}
    for number, (name, text) in enumerate(ungrouped.items()):
        for turn, rows in enumerate((ROWS[number % 4], (9, 3)[number % 2])):
            channels_last = turn == 0
            problem = _arranged(re.sub(r"ic\d+", f"ic{2 * rows if channels_last else 5}", text), channels_last)
            spec = wgrad_spec(problem)
            if not weight_plan.swap_refusal(spec) and rows <= len(spec.im2col_rows):
                tiling = WgradTiling(
                    rows, 1, spec.dy.extents[1], 1, 1, 1, True, transposed=True, vectors_in_place=channels_last
                )
                tiling = replace(tiling, **CHANGES[(number + turn) % 3])
                yield pytest.param(problem, (spec, tiling), id=f"{name}-{problem.data_layout}-{rows}")


def _with_nan_in_panels(monkeypatch):
    plain = Loops.buffer

    def poisoned(self, name, size, dtype):
        buffer = plain(self, name, size, dtype)
        if name in ("x_panel", "im2col_panel"):
            with self.loop(size, "poison") as e:
                self.store(buffer, e, tirx.const(np.nan, dtype))
        return buffer

    monkeypatch.setattr(Loops, "buffer", poisoned)


def _changed(problem, changes):
    """The tiling of a candidate with some fields changed."""
    spec = wgrad_spec(problem)
    tiling = next(t for t in weight_plan.candidates(spec, MACHINE, True) if not t.transposed and not t.vectors_in_place)
    tiling = replace(tiling, **{"slab_h": spec.dy.extents[1], **changes})
    assert not weight_plan.refusal(spec, tiling, MACHINE)
    return tiling


@pytest.mark.parametrize(("name", "channels_last", "changes"), CASES, ids=str)
def test_padding_is_skipped(name, channels_last, changes, monkeypatch):
    problem = _arranged(BORDERS[name], channels_last)
    _with_nan_in_panels(monkeypatch)
    check_exact(problem, "backward_weight", choose=always(KERNEL, _changed(problem, changes)))


@pytest.mark.parametrize(("problem", "detail"), list(_pairs()))
def test_rows_of_pairs_sum_where_any_of_their_taps_meets(problem, detail, monkeypatch):
    assert not weight_plan.refusal(*detail, MACHINE)
    _with_nan_in_panels(monkeypatch)
    check_exact(problem, "backward_weight", choose=always(KERNEL, detail[1]))


def test_a_block_of_one_tap_sums_its_own_bounds():
    problem = _arranged("mb2ic24id4ih5iw6oc32od4oh5ow6kd3kh3kw3pd1ph1pw1", True)
    spec = wgrad_spec(problem).transposed
    panel = Im2colPanel.of(spec, 12, (5, 1), 16)
    source = spec.im2col_of
    assert panel.valid_ranges == [bounds for bounds in itertools.product(*source.valid_ranges) for _ in range(2)]
    assert panel.valid_fraction == pytest.approx(math.prod(source.valid_fractions))
    all_taps = Im2colPanel.of(wgrad_spec(_arranged(BORDERS["even"], False)).transposed, 27, (5, 1), 16)
    assert all_taps.valid_fraction == 1.0


@pytest.mark.parametrize("name", BORDERS)
def test_valid_ranges_are_where_taps_read_data(name):
    spec = wgrad_spec(ConvProblem.from_descriptor(BORDERS[name]))
    for axis, bounds in enumerate(spec.valid_ranges):
        for k, (first, end) in enumerate(bounds):
            offset = k * spec.dilation[axis] - spec.low[axis]
            valid = [
                at
                for at in range(spec.dy.extents[axis])
                if 0 <= at * spec.strides[axis] + offset < spec.x.extents[axis]
            ]
            assert list(range(first, end)) == valid


@pytest.mark.parametrize("name", BORDERS)
@pytest.mark.parametrize("slab_d", [1, 2, 3, 5, 8])
def test_panels_have_room_for_the_slices_that_slabs_read(name, slab_d):
    spec = wgrad_spec(ConvProblem.from_descriptor(BORDERS[name]))
    depth, extent, taps = spec.dy.extents[0], spec.x.extents[0], spec.kernel[0]
    panel = VectorPanel.of(spec, 1, slab_d, 16, 1)
    assert panel.slices <= slab_d * taps
    for start in range(3 * depth):
        valid = {
            number // depth * extent + d
            for number in range(start, start + slab_d)
            for k in range(taps)
            if 0 <= (d := number % depth * spec.strides[0] + k * spec.dilation[0] - spec.low[0]) < extent
        }
        first, end = spec.x_slices(start, slab_d)
        assert start // depth * extent <= first
        assert end <= ((start + slab_d - 1) // depth + 1) * extent
        assert not valid or first <= min(valid) <= max(valid) < end
        assert not panel.shares_slices or end - first <= panel.slices
