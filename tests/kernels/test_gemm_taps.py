# SPDX-License-Identifier: Apache-2.0
"""Forward and dgrad skip depth slices, rows and columns of padding: no product is lost, only what is packed is read."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import tvm

from tests.kernels.harness import NATIVE, check_choice, kernel_of, with_tiling
from tests.kernels.test_exact import _problem
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.codegen.loops import Loops
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.gemm.cycles import estimate
from tvm_convgrad.kernels.gemm.plan import candidates, invalid, regions_of
from tvm_convgrad.kernels.gemm.prefetch import TilePrefetch
from tvm_convgrad.kernels.gemm.taps import SKIP_BELOW, tap_ranges
from tvm_convgrad.kernels.gemm.tile_sums import invalid_tile
from tvm_convgrad.kernels.gemm.tiling import GemmTiling, blocking_of
from tvm_convgrad.kernels.spec import conv_spec
from tvm_convgrad.verify.interpreter import execute

TARGET = tvm.target.Target(NATIVE)
MACHINE = machine_of(TARGET)
PROBLEMS = [
    "mb1ic4id4ih6iw5oc4kd3kh3kw3pd1ph1pw1",
    "mb1ic4id2ih2iw5oc4kd3kh3kw3pd1ph1pw1",  # no depth slice and no row at which all taps are in bounds
    "mb1ic4id5ih9iw9oc4kd3kh3kw3sd2sh2sw2pd1ph1pw1",  # phases of dgrad with different taps
    "mb1ic4id3ih8iw9oc4kd1kh5kw1ph4",  # the same taps for every depth slice
    "mb1ic4id7ih7iw7oc4kd3kh3kw3pd2ph3pw1dd1dh2dw2",
    "mb1ic4id1ih1iw6oc4kd3kh3kw3pd2ph2pw1",  # most results read only padding
    "mb1ic4ih60iw9oc4kh3kw3ph1pw1",  # so many rows that the padding is not skipped
    "mb1ic4ih8iw12oc4kh3kw3ph3pw8dh2dw7",  # columns 0 to 3, 4 to 7 and 8 to 11 have other taps
    "mb1ic4id2ih6iw9oc4kd3kh3kw5pd1ph1pw12dw5",
    "mb1ic4ih9iw24oc4kh3kw3sh2sw2ph1pw8dw7",
]


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_ranges_have_all_taps_in_bounds_and_few_others(text, direction):
    spec = conv_spec(ConvProblem.from_descriptor(text), direction)
    for phases in spec.phases:
        height, width = (axis.count for axis in phases[0][1:])
        for tile_h, tile_w in itertools.product(_divisors(height), (0, *range(1, width + 1))):
            ranges = tap_ranges(phases, spec.in_step, spec.source.extents, tile_h, tile_w)
            assert ranges.along_w is None or width % tile_w == 0, "tiles that overlap skip no columns"
            tiles = (1, tile_h, tile_w)
            every = computed = 0
            for number, phase in enumerate(phases):
                lost, exact = _compare(spec, phase, number, ranges, tiles)
                assert not lost
                assert exact[1] or not ranges.skips_rows
                assert exact[2] or not ranges.skips_columns
                assert ranges.along_h is None or tile_h > 1 or ranges.skips_rows
                assert ranges.along_w is None or tile_w > 1 or ranges.skips_columns
                every += math.prod(len(axis.taps) for axis in phase) * _tiles(phase, tiles)
                computed += _computed(ranges, number, phase, tiles)
            assert ranges.share == pytest.approx(computed / every if every else 1.0)
            assert (ranges.along_h is None) == (_share_of_rows(spec, phases, tile_h) > SKIP_BELOW)


def test_columns_are_skipped_where_dilation_is_large():
    spec = conv_spec(ConvProblem.from_descriptor("mb1ic4ih8iw12oc4kh3kw3ph3pw8dh2dw7"), "forward")
    shares = {
        tile_w: tap_ranges(spec.phases[0], spec.in_step, spec.source.extents, 8, tile_w).share
        for tile_w in (0, 1, 2, 3, 4, 5, 6)
    }
    assert shares[4] == shares[2] == shares[1] == pytest.approx(5 / 9)
    assert shares[3] == shares[6] == pytest.approx(6 / 9)
    assert shares[0] == shares[5] == 1.0


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_ends_of_rows_sum_the_pixels_that_are_in_bounds(text, direction):
    spec = conv_spec(ConvProblem.from_descriptor(text), direction)
    for phase in (phase for phases in spec.phases for phase in phases if phase[2].taps):
        count, extent, step = phase[2].count, spec.source.extents[2], spec.in_step[2]
        offsets = sorted(offset for _, offset in phase[2].taps)

        def inside(q, offset, step=step, extent=extent):
            return 0 <= q * step + offset < extent

        for tile_w in range(1, count + 1):
            ranges = tap_ranges((phase,), spec.in_step, spec.source.extents, 1, tile_w, exact_columns=True)
            starts = [min(t * tile_w, count - tile_w) for t in range(-(-count // tile_w))]
            ends = [starts[0], *starts[1:][-1:]]
            assert ranges.along_w is None
            assert len(ranges.pixels) == len(ends)
            for start, taps in zip(ends, ranges.pixels, strict=True):
                for offset, (first, end) in zip(offsets, taps, strict=True):
                    wanted = [p for p in range(tile_w) if inside(start + p, offset)]
                    assert list(range(first, end)) == wanted
            between = [q for start in starts[1:-1] for q in range(start, start + tile_w)]
            assert ranges.skips_columns == all(inside(q, offset) for q in between for offset in offsets)


def test_a_source_is_read_in_place_where_its_padding_never_is():
    problem = ConvProblem.from_descriptor("mb8ic64ih14oc64kh3ph1_lay=NHWC:OHWI:NHWC")
    spec = conv_spec(problem, "forward")
    tiling = GemmTiling("channels", 14, 2, 14, 1, unpacked=True)
    assert "padding" in invalid(spec, spec.phases[0], tiling, MACHINE)
    assert not invalid(spec, spec.phases[0], replace(tiling, exact_columns=True), MACHINE)
    five = conv_spec(ConvProblem.from_descriptor("mb8ic64ih14oc64kh5ph2_lay=NHWC:OHWI:NHWC"), "forward")
    single = GemmTiling("channels", 1, 2, 14, 14, unpacked=True, exact_columns=True)
    assert "padding" in invalid(five, five.phases[0], single, MACHINE), "the second tile of a row reads it"


def test_exact_columns_are_refused_where_a_tile_has_no_pixels_of_its_own():
    strided = conv_spec(ConvProblem.from_descriptor("mb1ic16ih14oc16kh3sh2sw2ph1pw1"), "backward_data")
    phases = next(phases for phases in strided.phases if len(phases) > 1)
    assert "one phase" in invalid(strided, phases, GemmTiling("channels", 7, 1, 7, 1, exact_columns=True), MACHINE)
    spec = conv_spec(ConvProblem.from_descriptor("mb1ic16ih14oc16kh3ph1"), "forward")
    pixels = GemmTiling("pixels", 7, 1, 7, 1, exact_columns=True)
    assert "vectors of channels" in invalid(spec, spec.phases[0], pixels, MACHINE)
    assert "tile registers" in invalid_tile(GemmTiling("channels", 14, 1, 14, 1, exact_columns=True))


def _divisors(count):
    return [n for n in range(1, count + 1) if count % n == 0]


def _tiles(phase, tiles):
    """How many tiles a phase has, where columns are not skipped as if each were as wide as the result."""
    return math.prod(axis.count // (each or axis.count) for axis, each in zip(phase, tiles, strict=True))


def _share_of_rows(spec, phases, tile_h):
    """The part of the (row of tiles, tap along h) pairs that are in bounds at one row at least."""
    valid = [
        any(0 <= q * spec.in_step[1] + offset < spec.source.extents[1] for q in range(first, first + tile_h))
        for phase in phases
        for first in range(0, phase[1].count, tile_h)
        for _, offset in phase[1].taps
    ]
    return sum(valid) / len(valid) if valid else 1.0


def _kept(along, number, at, count):
    """The numbers of the taps along an axis that are computed there."""
    return range(*along[number][at]) if along is not None else range(count)


def _along(ranges):
    return ranges.along_d, ranges.along_h, ranges.along_w


def _compare(spec, phase, number, ranges, tiles):
    """Taps that are in bounds and skipped; whether all others are skipped, along each axis."""
    lost, exact = [], [True, True, True]
    for axis, (along, each) in enumerate(zip(_along(ranges), tiles, strict=True)):
        offsets = sorted(offset for _, offset in phase[axis].taps)
        for q in range(phase[axis].count):
            kept = _kept(along, number, q // (each or 1), len(offsets))
            for tap, offset in enumerate(offsets):
                valid = 0 <= q * spec.in_step[axis] + offset < spec.source.extents[axis]
                if valid and tap not in kept:
                    lost.append((axis, q, tap))
                exact[axis] = exact[axis] and (valid or tap not in kept)
    return lost, exact


def _computed(ranges, number, phase, tiles):
    return math.prod(
        sum(len(_kept(along, number, at, len(axis.taps))) for at in range(axis.count // (each or axis.count)))
        for axis, along, each in zip(phase, _along(ranges), tiles, strict=True)
    )


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize(
    "text",
    [
        "mb2ic17id3ih6iw18oc20kd3kh3kw3pd1ph1pw1",
        "mb2ic18id5ih9iw9oc17kd3kh3kw3sh2pd1ph1pw1",
        "mb2ic9id2ih4iw17oc20kd3kh3kw3pd2ph3pw1dd1dh2dw2",
        "mb3ic17ih7iw7oc33kh3kw3ph1pw1",
        "mb2ic17ih12iw28oc33kh3kw3ph6pw12dh5dw11",  # columns of padding are never read
        "mb2ic17id3ih6iw12oc33kd3kh3kw3pd1ph1pw10dw9",
    ],
)
def test_panels_have_all_that_is_read(text, channels_last, direction):
    """Interpreted, as local memory is then full of NaN before anything is packed."""
    problem = _problem(text, channels_last)
    choice = chooser.choose(problem, direction, MACHINE)
    spec, best = regions_of(problem, direction)[choice.plan.region], choice.plan.tilings
    height = spec.phases[0][0][1].count
    kinds = {
        (t.order, t.vector_axis, t.block_h < height, t.tile_h > 1, t.splits > 1): t
        for t in candidates(spec, spec.phases[0], MACHINE)
        if not t.unpacked
    }
    assert {kind[0] for kind in kinds} == {"source", "weights"}
    assert {kind[2] for kind in kinds} == {False, True}, "spatial blocks of some rows, and of all"
    operands, wanted = numbers_of(problem, direction, 0)
    for tiling in random.Random(text + direction).sample(list(kinds.values()), 4):
        function = chooser.build(
            problem, direction, MACHINE, replace(choice, plan=replace(choice.plan, tilings=(tiling, *best[1:]))), "main"
        )
        found = np.full_like(wanted, np.nan)
        assert execute(function, [*map(np.ascontiguousarray, operands), found]) == ""
        np.testing.assert_array_equal(found, wanted, str(tiling))


@pytest.mark.parametrize("text", ["mb2ic3ih19oc17kh4sh4ph1", "mb2ic5ih20oc18kh3sh3ph1", "mb1ic3ih33oc20kh5sh2ph2"])
def test_vectors_of_pixels_of_a_strided_source_are_exact(text):
    problem = ConvProblem.from_descriptor(text)
    choice = kernel_of(problem, "forward")[0]
    spec = conv_spec(problem, "forward")
    tilings = [t for t in candidates(spec, spec.phases[0], MACHINE) if t.over_pixels]
    for tiling in tilings[:: max(1, len(tilings) // 3)]:
        check_choice(problem, "forward", with_tiling(choice, tiling))


@pytest.mark.parametrize(
    "text",
    [
        "mb1ic512ih7iw7oc16kh3kw3ph1pw1",  # one spatial block
        "mb3ic512ih7iw7oc16kh3kw3ph1pw1",
        "mb1ic2048ih1iw1oc16kh1kw1",
    ],
)
def test_blocks_are_not_split_into_more_items_than_there_are(text):
    for channels_last in (False, True):
        problem = _problem(text, channels_last)
        for direction in ("forward", "backward_data"):
            own = chooser.choose(problem, direction, MACHINE).plan
            spec, tilings = regions_of(problem, direction)[own.region], own.tilings
            for phases, own in zip(spec.phases, tilings, strict=True):
                for tiling in (own, *candidates(spec, phases, MACHINE)):
                    if tiling.order == "weights":
                        blocking = blocking_of(spec, phases, tiling, MACHINE)
                        assert tiling.splits <= spec.batch * phases[0][0].count * blocking.spatial_blocks


def test_two_uneven_pieces_cost_as_much_as_the_larger_one():
    spec = conv_spec(ConvProblem.from_descriptor("mb3ic512ih7iw7oc16kh3kw3ph1pw1"), "forward")
    whole = GemmTiling("channels", 7, 1, 7, 1, order="weights")
    one, two = (estimate(spec, spec.phases[0], replace(whole, splits=n), replace(MACHINE, parts=2)) for n in (1, 2))
    assert 0.6 < two / one < 0.8


@pytest.mark.parametrize("text", [*PROBLEMS, "mb1ic8ih28iw28oc8kh3kw3ph12pw12dh11dw11"])
def test_rows_packed_are_counted_as_the_kernel_packs_them(text):
    spec = conv_spec(ConvProblem.from_descriptor(text), "forward")
    phases = spec.phases[0]
    for tiling in {(t.block_h, t.tile_h): t for t in candidates(spec, phases, MACHINE) if not t.unpacked}.values():
        blocking = blocking_of(spec, phases, tiling, MACHINE)
        inside = [
            0
            <= block * tiling.block_h * spec.in_step[1] + blocking.panel_first[1] + row * blocking.panel_step[1]
            < spec.source.extents[1]
            for block in range(blocking.blocks_h)
            for row in range(blocking.panel_h)
        ]
        wanted = sum(inside) / len(inside) if blocking.ranges.skips_rows else 1.0
        assert blocking.packed_share(spec, tiling.block_h) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "text", ["mb8ic32id8ih28iw28oc32kd3kh3kw3pd1ph1pw1", "mb8ic32id9ih14iw14oc32kd3kh3kw3pd2ph1pw1dd1"]
)
def test_tiles_of_whole_depth_panels_prefetch_the_slices_that_their_taps_read(text):
    spec = conv_spec(_problem(text, True), "forward")
    phases = spec.phases[0]
    tiling = GemmTiling("channels", 14, 2, phases[0][1].count, 1, order="weights")
    blocking = blocking_of(spec, phases, tiling, MACHINE)
    assert blocking.whole_depth
    prefetch = TilePrefetch(Loops(), spec, 1, blocking, tiling, replace(MACHINE, l2_bytes=1 << 10))
    assert prefetch.of_rows
    offsets = sorted({offset[0] for _, offset in blocking.taps[0]})
    assert [offsets[0] * blocking.stride_d + k * prefetch.stride_d for k in range(3)] == [
        d * blocking.stride_d for d in offsets
    ]
    assert prefetch.taps == len(blocking.taps[0]) // 3
