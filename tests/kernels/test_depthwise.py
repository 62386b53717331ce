# SPDX-License-Identifier: Apache-2.0
"""Depthwise kernels and those of small groups: over columns, channels in place, panels; fused epilogues; any batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.harness import (
    MACHINE,
    ZONE,
    _zoned,
    built,
    check_choice,
    check_machine_code,
    run_in_red_zones,
    with_tiling,
)
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.contract import Plan
from tvm_convgrad.kernels.depthwise.columns import ColumnsTiling
from tvm_convgrad.kernels.depthwise.columns_plan import invalid_wgrad, wgrad_rows_per_vector
from tvm_convgrad.kernels.depthwise.columns_wgrad import ColumnsWgradTiling
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.registry import kernel_named

FORWARD_AND_DGRAD = ("forward", "backward_data")

COLUMNS = {
    "strided, the second vector of columns outside": "g7mb2ic7ih3iw17oc7oh3ow8kh1kw4sw2pw1",
    "plain": "g20mb2ic20ih19iw21oc20kh3kw3ph1pw1",
    "strided": "g5mb3ic5ih12iw37oc5kh3kw3sh2sw2ph1pw1",
    "multiplier": "g3mb2ic3ih9iw16oc6kh3kw3ph1pw1",
    "several rows a vector": "g5mb2ic5ih7iw7oc5kh3kw3ph1pw1",
    "several rows a vector, rolled": "g3mb2ic3ih6iw5oc3kh7kw5ph3pw2",
    "groups of kernel rows": "g5mb2ic5ih17iw23oc5kh5kw6ph2pw2",
    "rolled": "g18mb2ic18ih16iw16oc18kh7kw7ph3pw3",
}
SHORT_ROWS = {
    "square": "g5mb2ic5ih7iw7oc5kh3kw3ph1pw1",
    "many taps": "g3mb2ic3ih6iw4oc3kh7kw5ph3pw2",
    "no padding of rows": "g4mb2ic4ih9iw3oc4oh7ow3kh3kw3ph0pw1",
    "padding on one side": "g4mb3ic4ih6iw4oh8ow4oc4kh1kw3ph1pw1",
    "dilated, a multiplier": "g3mb2ic3ih7iw4oc6oh7ow4kh3kw3ph2pw2dh1dw1",
    "taps beyond all rows": "g3mb2ic3ih3iw4oc3oh3ow4kh3kw3ph6pw1dh5",
    "3-D": "g4mb2ic4id3ih5iw4oc4kd3kh3kw3pd1ph1pw1",
}
"""Depthwise problems whose rows are at most half of a vector, and contiguous in both tensors."""
CHANNELS = {
    "panels": "g40mb2ic40ih7iw10oc40kh3kw3sh2sw3ph1pw1",
    "panels, multiplier": "g18mb2ic18ih6iw7oc36kh3kw3sh1sw3ph1pw1",
    "half": "g20mb3ic20ih6iw9oc20kh3kw3sh2sw3ph1pw1_dt=f16:f16:f16",
    "in place": "g40mb3ic40ih9iw11oc40kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC",
    "in place, strided": "g32mb2ic32ih9iw9oc32kh3kw3sh2sw2ph1pw1_lay=NHWC:OHWI:NHWC",
}
GROUPS = {
    "groups of 4": "g12mb2ic48ih9iw12oc48kh3kw3ph1pw1",
    "groups of 8, strided": "g5mb2ic40ih9iw12oc40kh3kw3sh2sw2ph1pw1",
    "groups of 2, channels last": "g20mb2ic40ih8iw7oc40kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC",
    "groups of 16, channels last": "g3mb2ic48ih8iw7oc48kh3kw3sh2sw2ph1pw1_lay=NHWC:HWIO:NHWC",
    "groups of 4, 3-d": "g8mb1ic32id4ih6iw7oc32kd3kh3kw3sd2pd1ph1pw1",
}
CASES = {**{name: ("depthwise columns", text) for name, text in COLUMNS.items()}} | {
    name: ("depthwise", text) for name, text in CHANNELS.items()
}
CASES |= {name: ("small groups", text) for name, text in GROUPS.items()}


def choice_of(problem: ConvProblem, direction: str, family: str) -> Choice:
    choice = chooser.choose(problem, direction, MACHINE)
    assert choice.kernel is not None
    assert choice.kernel.name == family, choice
    return choice


@pytest.mark.parametrize("direction", FORWARD_AND_DGRAD)
@pytest.mark.parametrize("name", CASES)
def test_epilogues_of_every_batch(name, direction):
    family, text = CASES[name]
    fixed = ConvProblem.from_descriptor(text)
    symbolic = replace(fixed, batch="n")
    epilogue = Epilogue(bias=True, relu=True, accumulate=True)
    library = built(symbolic, direction, choice_of(symbolic, direction, family), epilogue)
    axis = (fixed.grad_layout if direction == "forward" else fixed.data_layout).index("C")
    for batch in (1, 3):
        problem = replace(fixed, batch=batch)
        operands, sums = numbers_of(problem, direction, 0)
        rng = np.random.default_rng(batch)
        bias = rng.integers(-9, 10, sums.shape[axis]).astype(sums.dtype)
        before = rng.integers(-9, 10, sums.shape).astype(sums.dtype)
        along = [-1 if i == axis else 1 for i in range(sums.ndim)]
        found = run_in_red_zones(problem, direction, library, [*operands, bias], before)
        np.testing.assert_array_equal(found, np.maximum(sums + before + bias.reshape(along), 0))


@pytest.mark.parametrize("name", [name for name in CASES if "rolled" not in name])
def test_sums_and_bias_gradients_of_every_batch(name):
    family, text = CASES[name]
    fixed = ConvProblem.from_descriptor(text)
    symbolic = replace(fixed, batch="n")
    choice = choice_of(symbolic, "backward_weight", family)
    adds = text.startswith(("g20", "g40"))  # of each family and way
    epilogue = Epilogue(accumulate=True, bias_grad=True, bias_accumulate=adds)
    library = built(symbolic, "backward_weight", choice, epilogue)
    for batch in (1, 5):
        operands, wanted = numbers_of(replace(fixed, batch=batch), "backward_weight", 0)
        axes = tuple(i for i, letter in enumerate(fixed.grad_layout) if letter != "C")
        bias_grad = operands[0].astype("float64").sum(axes).astype(wanted.dtype)
        zones = [
            _zoned(np.full_like(array, 3 if holds else np.nan), 77.0)
            for array, holds in ((wanted, True), (bias_grad, adds))
        ]
        library["main"](*(_zoned(array, np.nan)[1] for array in operands), *(result for _, result in zones))
        for (zone, _), right in zip(
            zones, (wanted + wanted.dtype.type(3), bias_grad + bias_grad.dtype.type(3 * adds)), strict=True
        ):
            np.testing.assert_array_equal(zone[ZONE : ZONE + right.size].reshape(right.shape), right)
            assert (zone[:ZONE] == 77.0).all()
            assert (zone[ZONE + right.size :] == 77.0).all()


@pytest.mark.parametrize("tile_h", [1, 4, 9])
@pytest.mark.parametrize("direction", FORWARD_AND_DGRAD)
def test_columns_in_any_tiles_and_splits(direction, tile_h):
    problem = ConvProblem.from_descriptor(COLUMNS["strided"])
    choice = choice_of(problem, direction, "depthwise columns")
    for split_h in (2, 3, 40):
        check_choice(problem, direction, with_tiling(choice, ColumnsTiling(tile_h, split_h, 1)))


@pytest.mark.parametrize("direction", [*FORWARD_AND_DGRAD, "backward_weight"])
def test_prefetching_changes_nothing(direction):
    problem = ConvProblem.from_descriptor(CHANNELS["in place, strided"])
    choice = choice_of(problem, direction, "depthwise")
    check_choice(problem, direction, with_tiling(choice, replace(choice.plan.tilings[0], prefetch=True)))


@pytest.mark.parametrize("direction", FORWARD_AND_DGRAD)
@pytest.mark.parametrize("name", ["in place", "in place, strided", "groups of 2, channels last"])
def test_all_channels_of_a_pixel_before_the_next(name, direction):
    """Also with a block of channels that is not whole, parts of the channels, and tiles that do not divide a row."""
    family, text = CASES[name]
    problem = ConvProblem.from_descriptor(text)
    choice = choice_of(problem, direction, family)
    own = choice.plan.tilings[0]
    for tile_w, slab_h, splits in ((1, 2, 1), (4, 8, 2), (3, 4, 3)):
        fields = {"tile_w": tile_w, "slab_h": slab_h, "channel_splits": min(splits, 2), "prefetch": splits > 1}
        check_choice(problem, direction, with_tiling(choice, replace(own, channels_inner=True, **fields)))


@pytest.mark.parametrize(
    ("layout", "field", "near", "far"),
    [("NCHW", "tile_h", 14, 4), ("NHWC", "channels_inner", False, True)],
)
def test_few_streams_from_memory(layout, field, near, far):
    """Planned by bytes: the same layer of a batch whose tensors are in the shared cache, and of one whose are not."""
    lay = "" if layout == "NCHW" else "_lay=NHWC:OHWI:NHWC"
    for batch, wanted in ((1, near), (64, far)):
        problem = ConvProblem.from_descriptor(f"g32mb{batch}ic32ih56oc32oh56kh3ph1{lay}")
        for direction in FORWARD_AND_DGRAD:
            choice = chooser.choose(problem, direction, CPUS["AVX-512"])
            assert getattr(choice.plan.tilings[0], field) == wanted, (batch, direction)


@pytest.mark.parametrize("tiling", [(1, 1, 1), (5, 2, 3), (12, 20, 2), (7, 7, 5)])
def test_wgrad_of_columns_in_any_parts(tiling):
    problem = ConvProblem.from_descriptor(COLUMNS["plain"])
    choice = choice_of(problem, "backward_weight", "depthwise columns")
    check_choice(problem, "backward_weight", with_tiling(choice, ColumnsWgradTiling(*tiling, 1)))


@pytest.mark.parametrize("text", SHORT_ROWS.values(), ids=SHORT_ROWS)
def test_wgrad_of_several_rows_a_vector(text):
    problem = ConvProblem.from_descriptor(text)
    several = wgrad_rows_per_vector(problem, MACHINE)
    if several == 1:
        pytest.skip(f"two rows of {problem.grad_extents[-1]} columns do not fit into a vector of this machine")
    height = problem.grad_extents[-2]
    choice = Choice("", "", kernel=kernel_named("depthwise columns", "backward_weight"), plan=Plan(()))
    for block, split_k in ((1, 1), (2, 2)):
        tiling = ColumnsWgradTiling(-(-height // several), block, split_k, several)
        check_choice(problem, "backward_weight", replace(choice, plan=Plan((tiling,))))


def test_a_vector_has_all_rows_that_fit_or_one():
    problem = ConvProblem.from_descriptor(SHORT_ROWS["square"])
    for tiling, said in (
        (ColumnsWgradTiling(2, 1, 1, 5), "rows_per_vector is 5; it must be 1 or 2"),
        (ColumnsWgradTiling(3, 1, 1, 2), "tile_h is 3; with 2 rows in a vector it must be all vectors"),
    ):
        assert said in invalid_wgrad(problem, tiling, CPUS["AVX-512"])


@pytest.mark.parametrize("direction", [*FORWARD_AND_DGRAD, "backward_weight"])
def test_columns_of_shorter_vectors(direction):
    if not MACHINE.name.startswith("AVX512") and MACHINE.name != "AVX-512":
        pytest.skip("this machine's own vectors are the shorter ones")
    for name in ("strided", "several rows a vector"):
        check_machine_code(ConvProblem.from_descriptor(COLUMNS[name]), direction, {"kind": "llvm", "mcpu": "haswell"})


def test_columns_that_no_tap_reads_do_not_count():
    problem = ConvProblem.from_descriptor("g4mb1ic4ih6iw28oc4kh1kw1sh3sw2")  # every third row, every second column
    (grad, data), wanted = numbers_of(problem, "backward_weight", 0)
    data[:, :, :, 1::2] = np.inf
    library = built(problem, "backward_weight", choice_of(problem, "backward_weight", "depthwise columns"))
    np.testing.assert_array_equal(run_in_red_zones(problem, "backward_weight", library, [grad, data]), wanted)


def test_why_planes_do_not_serve():
    for text, direction, reason in (
        ("g20mb2ic20ih9iw9oc20kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC", "forward", ""),
        ("g40mb2ic40ih4iw4oc40kh3kw3ph1pw1", "backward_weight", "estimated to be slower"),
        ("g40mb2ic40ih19iw19oc40kh1kw17pw8", "backward_weight", "more sums than registers"),
        ("g40mb2ic40ih19iw19oc40kh3kw3sh3sw3ph1pw1", "forward", "strides of more than two"),
        ("g40mb2ic40ih19iw19oc40kh3kw3ph1pw1_dt=f64:f64:f32", "forward", "no masked loads and stores of elements"),
    ):
        choice = chooser.choose(ConvProblem.from_descriptor(text), direction, MACHINE)
        assert choice.kernel is not None
        assert choice.kernel.name == "depthwise"
        (refused,) = (why for name, why in choice.refused.items() if name.startswith("depthwise columns"))
        assert reason in refused
