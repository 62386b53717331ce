# SPDX-License-Identifier: Apache-2.0
"""What the planner and the tuner choose is never refused when it is read from a file; for large problems, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import candidates, chooser
from tvm_convgrad.kernels.depthwise.channels import ChannelsTiling
from tvm_convgrad.kernels.depthwise.channels_wgrad import ChannelsWgradTiling
from tvm_convgrad.kernels.gemm.plan import invalid
from tvm_convgrad.kernels.gemm.tiling import GemmTiling, blocking_of
from tvm_convgrad.kernels.spec import conv_spec
from tvm_convgrad.kernels.transforms import allow_transforms
from tvm_convgrad.kernels.wgrad.spec import WgradTiling

PROBLEMS = (
    "g64mb32ic64ih57oc128oh28kh3sh2",
    "g32mb32ic32ih112oc32kh3ph1",
    "g144mb64ic144ih57oc144oh29kh7sh2ph3_dt=f64:f64:f64",
    "g96mb8ic96ih56oc96kh7ph3_lay=NHWC:OHWI:NHWC",
    "g32mb8ic128ih28oc128kh3ph1_lay=NHWC:OHWI:NHWC",
    "mb8ic256ih14oc256kh3ph1",
    "mb8ic64ih56oc256kh1_lay=NHWC:OHWI:NHWC",
    "mb2ic3id8oc64kd3pd1",
    "g2mb64ic4ih28oc4kh2ph1_lay=NHWC:HWIO:NHWC_dt=f16:f16:f16",
    "g8mb32ic16ih13oc16kh1_dt=bf16:bf16:bf16",
)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("text", PROBLEMS)
def test_no_choice_is_refused(text: str, cpu: str) -> None:
    problem = ConvProblem.from_descriptor(text)
    for direction in DIRECTIONS:
        for parts in (2, 8, 64):
            machine = replace(CPUS[cpu], parts=parts)
            with allow_transforms():
                chosen = chooser.choices(problem, direction, machine)
            for choice in chosen:
                assert choice.kernel.invalid(problem, direction, choice.plan, machine) == ""
        for choice in candidates.candidates(problem, direction, replace(CPUS[cpu], parts=8)):
            assert choice.kernel.invalid(problem, direction, choice.plan, machine) == "", str(choice.plan)


@pytest.mark.parametrize(
    ("text", "pixels", "cpu"),
    [
        ("mb32ic768ih7oc3072kh1", 49, "AVX-512"),  # tiles of 13 would overlap by 3 pixels
        ("mb32ic3072ih7oc768kh1", 49, "AVX-512"),
        ("mb8ic96ih14oc576kh1", 196, "AVX512-BF16"),  # vectors of pixels would be 14 for 12.25
    ],
)
def test_tiles_of_a_small_image_hardly_overlap(text: str, pixels: int, cpu: str) -> None:
    """A forward kernel for channels first computes at most 2 % of the pixels twice, which costs a transposed store."""
    machine = replace(CPUS[cpu], parts=2)
    (tiling,) = chooser.choose(ConvProblem.from_descriptor(text), "forward", machine).plan.tilings
    assert isinstance(tiling, GemmTiling)
    assert tiling.vector_axis == "channels"
    assert -(-pixels // tiling.tile_m) * tiling.tile_m / pixels < 1.021


@pytest.mark.parametrize(("cpu", "axis"), [("AVX-512", "pixels"), ("AMX-BF16", "pixels"), ("AVX512-BF16", "channels")])
def test_pixels_are_the_vectors_where_transposed_stores_are_slow(cpu: str, axis: str) -> None:
    """On Intel's CPUs, where one port shuffles, vectors of pixels are 1.13 to 1.35 times as fast for these."""
    for direction, text in (("forward", "mb8ic96ih14oc576kh1"), ("backward_data", "mb8ic576ih14oc96kh1")):
        machine = replace(CPUS[cpu], parts=2)
        (tiling,) = chooser.choose(ConvProblem.from_descriptor(text), direction, machine).plan.tilings
        assert isinstance(tiling, GemmTiling)
        assert tiling.vector_axis == axis


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_small_layers_hand_nothing_over_where_that_is_slow(direction: str) -> None:
    """A core of an Intel CPU reads slowly what another has just packed: kernels without that are twice as fast here."""
    text = "mb1ic384ih14oc64kh1" if direction == "forward" else "mb1ic64ih14oc384kh1"
    machine = replace(CPUS["AVX-512"], parts=2)
    (tiling,) = chooser.choose(ConvProblem.from_descriptor(text), direction, machine).plan.tilings
    assert isinstance(tiling, GemmTiling)
    assert (tiling.order, tiling.unpacked) == ("weights", True)
    (tiling,) = chooser.choose(
        ConvProblem.from_descriptor(text), direction, replace(machine, handover_rate=10.0)
    ).plan.tilings
    assert isinstance(tiling, GemmTiling)
    assert tiling.order == "source"


def test_channels_whole_pages_apart_are_packed() -> None:
    """They fall into the same sets of a cache: 512 channels of 32x32 pixels are 1.8 times as fast from a panel."""
    for size, unpacked in ((32, False), (28, True)):
        problem = ConvProblem.from_descriptor(f"mb8ic512ih{size}oc128kh1")
        (tiling,) = chooser.choose(problem, "forward", replace(CPUS["AVX-512"], parts=2)).plan.tilings
        assert isinstance(tiling, GemmTiling)
        assert (tiling.vector_axis, tiling.unpacked) == ("pixels", unpacked)


def test_wgrad_prefetches_slabs_that_the_cache_keeps() -> None:
    """Other slabs are read without prefetches, which took 1.2 times as long for 416 to 1024 channels."""
    machine = replace(CPUS["AVX-512"], parts=2)
    for channels, prefetch in (("ic416ih14oc1024", False), ("ic512ih14oc1024", True)):
        problem = ConvProblem.from_descriptor(f"mb8{channels}kh1_lay=NHWC:OHWI:NHWC")
        (tiling,) = chooser.choose(problem, "backward_weight", machine).plan.tilings
        assert isinstance(tiling, WgradTiling)
        assert tiling.prefetch == prefetch


def test_cores_store_whole_rows_where_memory_bounds() -> None:
    """Two cores that each store half of every pixel took 1.9 times as long on an Emerald Rapids."""
    problem = ConvProblem.from_descriptor("mb1ic16ih112oc96kh1_lay=NHWC:OHWI:NHWC")
    for cpu in ("AVX-512", "AVX512-BF16"):
        (tiling,) = chooser.choose(problem, "forward", replace(CPUS[cpu], parts=2)).plan.tilings
        assert isinstance(tiling, GemmTiling)
        assert tiling.order == "source"


@pytest.mark.parametrize(("channels", "tile_n", "last"), [(80, 2, 1), (112, 2, 1), (81, 2, 2), (96, 2, 2), (176, 3, 2)])
def test_the_last_block_has_no_vectors_without_channels(channels: int, tile_n: int, last: int) -> None:
    machine = CPUS["AVX-512"]
    spec = conv_spec(ConvProblem.from_descriptor(f"mb8ic64ih14oc{channels}kh3ph1_lay=NHWC:OHWI:NHWC"), "forward")
    blocking = blocking_of(spec, spec.phases[0], GemmTiling("channels", 7, tile_n, 14, 2), machine)
    assert blocking.last_vectors == last
    pixels = blocking_of(spec, spec.phases[0], GemmTiling("pixels", 9, tile_n, 14, 1), machine)
    assert pixels.last_vectors == tile_n, "the last block of channels overlaps the one before"


def test_columns_of_a_stride_are_packed_apart() -> None:
    machine = replace(CPUS["AVX-512"], parts=2)
    for text, residues in (("ih224oc32kh3sh2ph1", (0, 1)), ("ih224oc96kh4sh4", (0, 1, 2, 3)), ("ih56oc16kh1sh3", (0,))):
        problem = ConvProblem.from_descriptor(f"mb8ic3{text}")
        spec = conv_spec(problem, "forward")
        blocking = blocking_of(spec, spec.phases[0], GemmTiling("pixels", 8, 1, 1, 1), machine)
        assert (blocking.residues, blocking.step_w) == (residues, 1)
    (tiling,) = chooser.choose(ConvProblem.from_descriptor("mb8ic3ih224oc32kh3sh2ph1"), "forward", machine).plan.tilings
    assert isinstance(tiling, GemmTiling)
    assert tiling.vector_axis == "pixels", "its results need not be transposed"
    spec = conv_spec(ConvProblem.from_descriptor("mb8ic3ih224oc768kh16sh16"), "forward")
    refusal = invalid(spec, spec.phases[0], GemmTiling("pixels", 8, 1, 1, 1), machine)
    assert refusal == "consecutive results do not read consecutive pixels"


@pytest.mark.parametrize(
    ("text", "direction", "far"),
    [
        ("g32mb32ic256ih28oc256kh3ph1", "forward", True),
        ("g32mb8ic128ih56oc128kh3ph1", "backward_data", True),
        ("g32mb8ic256ih28oc256kh3ph1", "forward", False),  # from the shared cache
        ("g32mb32ic512ih14oc512kh3ph1", "forward", False),  # a tile is as wide as a row
    ],
)
def test_small_groups_from_memory_are_prefetched(text: str, direction: str, far: bool) -> None:
    problem = ConvProblem.from_descriptor(f"{text}_lay=NHWC:OHWI:NHWC")
    choice = chooser.choose(problem, direction, replace(CPUS["AVX-512"], parts=2))
    assert choice.name.startswith("small groups")
    (tiling,) = choice.plan.tilings
    assert isinstance(tiling, ChannelsTiling)
    assert (tiling.prefetch, tiling.channels_inner, tiling.tile_w <= 7) == (far, far, far)


def test_the_tuner_tries_both_orders_of_channels_and_pixels() -> None:
    problem = ConvProblem.from_descriptor("g144mb8ic144ih56oc144kh3ph1_lay=NHWC:OHWI:NHWC")
    machine = replace(CPUS["AVX-512"], parts=2)
    own = chooser.choose(problem, "forward", machine)
    tilings = {plan.tilings[0] for plan in own.kernel.tilings(problem, "forward", own.plan, machine)}
    fields = {(each.channels_inner, each.prefetch) for each in tilings}
    assert fields == {(False, False), (False, True), (True, False), (True, True)}
    assert {7, 4, 14} <= {each.tile_w for each in tilings}
    assert own.plan.tilings[0] not in tilings


@pytest.mark.parametrize(
    ("text", "inner", "width"),
    [
        ("g512mb8ic512ih28oc512oh14kh3sh2ph1", True, 4),
        ("g512mb8ic512ih14oc512kh3ph1", False, 14),  # no stride
        ("g528mb8ic528ih28oc528oh14kh3sh2ph1", True, 7),  # pixels lie in all sets
        ("g528mb8ic528ih28oc528oh14kh5sh2ph2", False, 14),  # more products for each byte
    ],
)
def test_strided_pixels_are_few_at_a_time_with_all_channels(text: str, inner: bool, width: int) -> None:
    """Fewer where they share sets of a cache."""
    problem = ConvProblem.from_descriptor(f"{text}_lay=NHWC:OHWI:NHWC")
    for direction in ("forward", "backward_data"):
        (tiling,) = chooser.choose(problem, direction, replace(CPUS["AVX-512"], parts=2)).plan.tilings
        assert isinstance(tiling, ChannelsTiling)
        assert (tiling.channels_inner, tiling.tile_w) == (inner, width), direction


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("mb8ic64ih14oc64kh3ph1", True),
        ("mb8ic64ih28oc64kh3ph1", True),
        ("mb8ic64ih56oc64kh3ph1", False),  # saves 1.2 % of the products
        ("mb8ic64ih17iw17oc64oh17ow17kh1kw7ph0pw3", True),
        ("mb4ic64ih1iw500oc64oh1ow500kh1kw31ph0pw15", False),  # its code would take 20 s to compile
        ("mb8ic64ih16oc64kh9ph4", False),
    ],
)
def test_ends_of_rows_have_code_of_their_own_where_that_gains(text: str, exact: bool) -> None:
    problem = ConvProblem.from_descriptor(f"{text}_lay=NHWC:OHWI:NHWC")
    for direction in ("forward", "backward_data"):
        (tiling,) = chooser.choose(problem, direction, replace(CPUS["AVX-512"], parts=2)).plan.tilings
        assert isinstance(tiling, GemmTiling)
        assert tiling.exact_columns == exact


def test_wgrad_of_small_groups_from_memory_has_short_pieces() -> None:
    machine = replace(CPUS["AVX-512"], parts=2)
    for text, wanted in (("g32mb8ic128ih56oc128kh3ph1", (4, 7)), ("g32mb32ic128ih28oc128kh3ph1", None)):
        problem = ConvProblem.from_descriptor(f"{text}_lay=NHWC:OHWI:NHWC")
        (tiling,) = chooser.choose(problem, "backward_weight", machine).plan.tilings
        assert isinstance(tiling, ChannelsWgradTiling)
        assert ((tiling.tile_w, tiling.slab_h) == (4, 7)) == (wanted is not None)


def test_strided_dgrad_of_small_groups_is_computed_by_pixels_and_forward_is_not() -> None:
    problem = ConvProblem.from_descriptor("g32mb8ic512ih28oc512kh3sh2ph1_lay=NHWC:OHWI:NHWC")
    found = {}
    for direction in ("forward", "backward_data"):
        (tiling,) = chooser.choose(problem, direction, replace(CPUS["AVX-512"], parts=2)).plan.tilings
        assert isinstance(tiling, ChannelsTiling)
        found[direction] = (tiling.channels_inner, tiling.tile_w)
    assert found == {"forward": (False, 14), "backward_data": (True, 7)}
