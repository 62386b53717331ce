# SPDX-License-Identifier: Apache-2.0
"""Forward and dgrad leave out planes and lines of a border: no product is lost, and only what is packed is read."""

import random
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx

from tests.kernels.harness import NATIVE, compiled, run_in_red_zones
from tests.kernels.test_exact import _problem
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.gather_met import NEARLY_ALL, met_taps
from tvm_convgrad.kernels.gather_plan import candidates, estimate
from tvm_convgrad.kernels.gather_shape import GatherTiling, shape_of
from tvm_convgrad.kernels.gather_source import TileAhead
from tvm_convgrad.kernels.loops import Loops
from tvm_convgrad.kernels.spec import data_gather, forward_gather
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.verification import numbers_of

TARGET = tvm.target.Target(NATIVE)
MACHINE = machine_of(TARGET)
PROBLEMS = [
    "mb1ic4id4ih6iw5oc4kd3kh3kw3pd1ph1pw1",
    "mb1ic4id2ih2iw5oc4kd3kh3kw3pd1ph1pw1",  # no plane and no line that all taps meet
    "mb1ic4id5ih9iw9oc4kd3kh3kw3sd2sh2sw2pd1ph1pw1",  # phases of dgrad with unlike taps
    "mb1ic4id3ih8iw9oc4kd1kh5kw1ph4",  # the same taps for every plane
    "mb1ic4id7ih7iw7oc4kd3kh3kw3pd2ph3pw1dd1dh2dw2",
    "mb1ic4id1ih1iw6oc4kd3kh3kw3pd2ph2pw1",  # most results meet nothing
    "mb1ic4ih60iw9oc4kh3kw3ph1pw1",  # so many lines that those of the border are summed, too
]


@pytest.mark.parametrize("make", [forward_gather, data_gather])
@pytest.mark.parametrize("text", PROBLEMS)
def test_ranges_have_all_taps_that_meet_the_source_and_few_others(text, make):
    gather = make(ConvProblem.from_descriptor(text))
    for phases in gather.phases:
        height = phases[0][1].count
        for tile_lines in (n for n in range(1, height + 1) if height % n == 0):
            met = met_taps(phases, gather.in_step, gather.source.extents, tile_lines)
            every = left = 0
            for number, phase in enumerate(phases):
                lost, exact = _compare(gather, phase, number, met, tile_lines)
                assert not lost
                assert exact or not met.clear
                every += np.prod([len(axis.taps) for axis in phase[:2]]) * phase[0].count * (height // tile_lines)
                left += _left(met, number, phase, height // tile_lines)
            assert met.share == pytest.approx(left / every if every else 1.0)
            assert (met.lines is None) == (_share_of_lines(gather, phases, tile_lines) > NEARLY_ALL)


def _share_of_lines(gather, phases, tile_lines):
    """The part of the (tile, tap along the height) pairs of which one line at least meets the source."""
    meets = [
        any(0 <= q * gather.in_step[1] + offset < gather.source.extents[1] for q in range(first, first + tile_lines))
        for phase in phases
        for first in range(0, phase[1].count, tile_lines)
        for _, offset in phase[1].taps
    ]
    return sum(meets) / len(meets) if meets else 1.0


def _kept(ranges, number, at, count):
    """The numbers of the taps along an axis that are summed there."""
    return range(*ranges[number][at]) if ranges is not None else range(count)


def _compare(gather, phase, number, met, tile_lines):
    """Taps that meet the source and are left out; whether all others are."""
    lost, exact = [], True
    for axis, ranges, each in ((0, met.planes, 1), (1, met.lines, tile_lines)):
        offsets = sorted(offset for _, offset in phase[axis].taps)
        for q in range(phase[axis].count):
            kept = _kept(ranges, number, q // each, len(offsets))
            for tap, offset in enumerate(offsets):
                meets = 0 <= q * gather.in_step[axis] + offset < gather.source.extents[axis]
                if meets and tap not in kept:
                    lost.append((axis, q, tap))
                exact = exact and (meets or tap not in kept)
    return lost, exact


def _left(met, number, phase, tiles):
    of_planes, of_lines = (
        sum(len(_kept(ranges, number, at, len(phase[axis].taps))) for at in range(count))
        for axis, ranges, count in ((0, met.planes, phase[0].count), (1, met.lines, tiles))
    )
    return of_planes * of_lines


def _poisoned(self, name, size, dtype, whole=Loops.buffer):
    """A buffer; panels of the source are full of NaN before anything is packed."""
    buffer = whole(self, name, size, dtype)
    if name.startswith("s_panel"):
        with self.loop(size, "poison") as i:
            self.store(buffer, i, tirx.const(float("nan"), dtype))
    return buffer


@pytest.mark.parametrize("face", ["forward", "backward_data"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize(
    "text",
    [
        "mb2ic17id3ih6iw18oc20kd3kh3kw3pd1ph1pw1",
        "mb2ic18id5ih9iw9oc17kd3kh3kw3sh2pd1ph1pw1",
        "mb2ic9id2ih4iw17oc20kd3kh3kw3pd2ph3pw1dd1dh2dw2",
        "mb3ic17ih7iw7oc33kh3kw3ph1pw1",
    ],
)
def test_panels_have_all_that_is_read(monkeypatch, text, channels_last, face):
    problem = _problem(text, channels_last)
    choice = plan.choose(problem, face, MACHINE)
    gather, best = choice.detail
    height = gather.phases[0][0][1].count
    kinds = {
        (t.order, t.orientation, t.lines < height, t.tile_lines > 1, t.splits > 1): t
        for t in candidates(gather, gather.phases[0], MACHINE)
        if not t.direct
    }
    assert {kind[0] for kind in kinds} == {"source", "weights"}
    assert {kind[2] for kind in kinds} == {False, True}, "slabs of some lines, and of all"
    operands, wanted = numbers_of(problem, face, 0)
    monkeypatch.setattr(Loops, "buffer", _poisoned)
    for tiling in random.Random(text + face).sample(list(kinds.values()), 4):
        function = plan.build(problem, face, MACHINE, replace(choice, detail=(gather, (tiling, *best[1:]))), "main")
        assert "poison" in str(function)
        found = run_in_red_zones(problem, face, compiled(function, TARGET), operands)
        np.testing.assert_array_equal(found, wanted, str(tiling))


@pytest.mark.parametrize(
    "text",
    [
        "mb1ic512ih7iw7oc16kh3kw3ph1pw1",  # one slab
        "mb3ic512ih7iw7oc16kh3kw3ph1pw1",
        "mb1ic2048ih1iw1oc16kh1kw1",
    ],
)
def test_slabs_are_not_split_into_more_pieces_than_there_are(text):
    for channels_last in (False, True):
        problem = _problem(text, channels_last)
        for face in ("forward", "backward_data"):
            gather, tilings = plan.choose(problem, face, MACHINE).detail
            for phases, own in zip(gather.phases, tilings, strict=True):
                for tiling in (own, *candidates(gather, phases, MACHINE)):
                    if tiling.order == "weights":
                        shape = shape_of(gather, phases, tiling, MACHINE)
                        assert tiling.splits <= gather.batch * phases[0][0].count * shape.slabs


def test_two_uneven_pieces_cost_as_much_as_the_larger_one():
    gather = forward_gather(ConvProblem.from_descriptor("mb3ic512ih7iw7oc16kh3kw3ph1pw1"))
    whole = GatherTiling("channels", 7, 1, 7, 1, order="weights")
    one, two = (estimate(gather, gather.phases[0], replace(whole, splits=n), replace(MACHINE, parts=2)) for n in (1, 2))
    assert 0.6 < two / one < 0.8


@pytest.mark.parametrize("text", [*PROBLEMS, "mb1ic8ih28iw28oc8kh3kw3ph12pw12dh11dw11"])
def test_lines_packed_are_counted_as_the_kernel_packs_them(text):
    gather = forward_gather(ConvProblem.from_descriptor(text))
    phases = gather.phases[0]
    for tiling in {(t.lines, t.tile_lines): t for t in candidates(gather, phases, MACHINE) if not t.direct}.values():
        shape = shape_of(gather, phases, tiling, MACHINE)
        inside = [
            0
            <= slab * tiling.lines * gather.in_step[1] + shape.low[1] + line * shape.fetch[1]
            < gather.source.extents[1]
            for slab in range(shape.line_slabs)
            for line in range(shape.panel_lines)
        ]
        wanted = sum(inside) / len(inside) if shape.met.clear else 1.0
        assert shape.lines_packed(gather, tiling.lines) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "text", ["mb8ic32id8ih28iw28oc32kd3kh3kw3pd1ph1pw1", "mb8ic32id9ih14iw14oc32kd3kh3kw3pd2ph1pw1dd1"]
)
def test_tiles_of_joint_panels_ask_for_the_planes_that_their_taps_reach(text):
    gather = forward_gather(_problem(text, True))
    phases = gather.phases[0]
    tiling = GatherTiling("channels", 14, 2, phases[0][1].count, 1, order="weights")
    shape = shape_of(gather, phases, tiling, MACHINE)
    assert shape.joint
    ahead = TileAhead(Loops(), gather, 1, shape, tiling, replace(MACHINE, l2_bytes=1 << 10))
    assert ahead.of_lines
    offsets = sorted({offset[0] for _, offset in shape.taps[0]})
    assert [offsets[0] * shape.plane_pitch + k * ahead.plane for k in range(3)] == [
        d * shape.plane_pitch for d in offsets
    ]
    assert ahead.taps == len(shape.taps[0]) // 3
