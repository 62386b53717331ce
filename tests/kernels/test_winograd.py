# SPDX-License-Identifier: Apache-2.0
"""Kernels by Winograd's transform: exact on small integers, else within its own bound, and only where allowed."""

from dataclasses import replace

import numpy as np
import pytest
import tvm

from tests.kernels.harness import MACHINE, built, check_choice, forced, with_tiling
from tvm_convgrad import allow_transforms, evaluate
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import evaluate_problem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.winograd.plan import tilings

pytestmark = pytest.mark.skipif(
    MACHINE is None or not MACHINE.has_masks, reason="this CPU has no masked stores, and the kernels refuse it"
)

LAYOUTS = {"NCHW": ("NCHW", "OIHW", "NCHW"), "NHWC": ("NHWC", "OHWI", "NHWC")}
SHAPES = [
    "mb3ic40ih9iw13oc24oh9ow13kh3kw3ph1pw1",  # odd extents, channels beyond whole vectors
    "mb1ic17ih5iw6oc33oh3ow4kh3kw3",  # no padding
    "mb2ic16ih4iw5oc48oh6ow7kh3kw3ph2pw2",  # more padding than a tap
    "mb1ic64ih2iw2oc32oh2ow2kh3kw3ph1pw1",  # one tile
    "mb4ic20ih7iw40oc20oh7ow40kh3kw3ph1pw1",
]


winograd = forced("winograd")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", SHAPES)
def test_small_integers_are_exact(text, layout, direction):
    problem = ConvProblem.from_descriptor(text).with_layouts(*LAYOUTS[layout])
    if problem.in_channels == 40:
        problem = problem.with_layouts(layout, "HWIO", layout)
    choice = winograd(problem, direction, MACHINE)
    assert choice.is_kernel, choice.reason
    check_choice(problem, direction, choice)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_kind_of_tiling_is_exact(direction):
    problem = ConvProblem.from_descriptor("mb4ic24ih12iw9oc40oh12ow9kh3kw3ph1pw1")
    choice = winograd(problem, direction, MACHINE)
    kinds = {}
    for tiling in tilings(problem, direction, MACHINE):
        whole = "images" if tiling.slab_images > 1 else "rows" if tiling.slab_rows > 1 else "row"
        kinds.setdefault((whole, tiling.cores_share_slab), replace(tiling, tile_n=1 + len(kinds) % 2))
    assert len(kinds) == 6
    for tiling in kinds.values():
        check_choice(problem, direction, with_tiling(choice, tiling))


def test_float64_is_exact_too():
    problem = ConvProblem.from_descriptor(SHAPES[1]).with_dtypes("float64", "float64", "float64")
    for direction in DIRECTIONS:
        operands, wanted = numbers_of(problem, direction, 2)
        found = evaluate_problem(direction, problem, *operands, impl="winograd", target="native")
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_what_is_fused_is_exact(layout):
    problem = ConvProblem.from_descriptor("mb2ic20ih7iw9oc24oh7ow9kh3kw3ph1pw1").with_layouts(*LAYOUTS[layout])
    rng = np.random.default_rng(0)

    def tensor(values):
        return tvm.runtime.tensor(values.astype("float32"))

    for direction in ("forward", "backward_data"):
        operands, wanted = numbers_of(problem, direction, 3)
        axis = layout.index("C")
        bias = rng.integers(-9, 9, wanted.shape[axis])
        before = rng.integers(-9, 9, wanted.shape)
        epilogue = Epilogue(bias=True, relu=True, accumulate=True)
        library = built(problem, direction, winograd(problem, direction, MACHINE), epilogue)
        result = tensor(before)
        library["main"](*map(tvm.runtime.tensor, operands), tensor(bias), result)
        along = bias.reshape([-1 if a == axis else 1 for a in range(4)])
        np.testing.assert_array_equal(result.numpy(), np.maximum(wanted + before + along, 0))
    operands, wanted = numbers_of(problem, "backward_weight", 3)
    before, bias = rng.integers(-9, 9, wanted.shape), rng.integers(-9, 9, problem.out_channels)
    epilogue = Epilogue(accumulate=True, bias_grad=True, bias_accumulate=True)
    library = built(problem, "backward_weight", winograd(problem, "backward_weight", MACHINE), epilogue)
    result, bias_grad = tensor(before), tensor(bias)
    library["main"](*map(tvm.runtime.tensor, operands), result, bias_grad)
    np.testing.assert_array_equal(result.numpy(), wanted + before)
    others = tuple(a for a, letter in enumerate(layout) if letter != "C")
    np.testing.assert_array_equal(bias_grad.numpy(), bias + operands[0].sum(axis=others))


B = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], float)
G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
A = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], float)


def test_rounding_stays_within_the_bound_of_the_transform():
    """|error| <= gamma(C + 11) A'(|G| |W| |G'| * |B'| |S| |B|)A: 2 roundings of the source, 4 of W, 1 of the product,
    C of the sum over channels, 4 of the result. Both sides are computed in float64."""
    problem = ConvProblem.from_descriptor("mb2ic48ih12iw12oc32oh12ow12kh3kw3ph1pw1")
    rng = np.random.default_rng(4)
    data, weight = (rng.standard_normal(problem.tensors[name][0]) for name in ("data", "weight"))
    found = evaluate_problem(
        "forward", problem, data.astype("f4"), weight.astype("f4"), impl="winograd", target="native"
    )
    data, weight = data.astype("f4").astype(float), weight.astype("f4").astype(float)
    padded = np.pad(data, ((0, 0), (0, 0), (1, 1), (1, 1)))
    tiles = np.stack(
        [np.stack([padded[:, :, i : i + 12 : 2, j : j + 12 : 2] for j in range(4)]) for i in range(4)]
    )  # i j n c y x

    def transformed(b, g, a, of):
        v = np.einsum("pi,qj,ijncyx->pqncyx", b, b, of(tiles))
        u = np.einsum("pi,qj,ocij->pqoc", g, g, of(weight))
        m = np.einsum("pqoc,pqncyx->pqnoyx", u, v)
        y = np.einsum("ip,jq,pqnoyx->noyixj", a, a, m)
        return y.reshape(2, 32, 12, 12)

    exact = transformed(B, G, A, lambda values: values)
    bound = transformed(*map(np.abs, (B, G, A)), np.abs)
    steps = (48 + 11) * 2.0**-24
    error = np.abs(found - exact)
    assert (error <= bound * steps / (1 - steps)).all()
    assert error.max() > 0


def test_the_plan_takes_it_only_where_it_is_allowed():
    problem = ConvProblem.from_descriptor("mb8ic64ih28iw28oc64oh28ow28kh3kw3ph1pw1")
    for direction in DIRECTIONS:
        before = chooser.choose(problem, direction, MACHINE)
        with allow_transforms():
            inside = chooser.choose(problem, direction, MACHINE)
            with allow_transforms(False):
                assert chooser.choose(problem, direction, MACHINE) == before
        assert inside.kernel.name == "winograd"
        assert inside.estimate < before.estimate
        assert inside.refused[before.name] == "estimated to be slower"
        assert before.kernel.name == "implicit GEMM"
        assert chooser.choose(problem, direction, MACHINE) == before


REFUSED = {
    "mb2ic16ih8iw8oc16oh8ow8kh5kw5ph2pw2": "a kernel of 5x5; it is made for 3x3",
    "mb2ic16ih8iw8oc16oh4ow4kh3kw3sh2sw2ph1pw1": "a stride of 2x2; it is made for 1",
    "mb2ic16ih8iw8oc16oh6ow6kh3kw3ph1pw1dh1dw1": "a dilation of 2x2; it is made for 1",
    "g2mb2ic32ih8iw8oc32oh8ow8kh3kw3ph1pw1": "2 groups; it is made for one",
    "mb2ic3ih8iw8oc16oh8ow8kh3kw3ph1pw1": "3 channels do not fill a vector of",
    "mb2ic16iw8oc16ow8kw3pw1": "a kernel of 3; it is made for 3x3",
}


def test_wgrad_of_one_pixel_is_refused():
    problem = ConvProblem.from_descriptor("mb1ic64ih1iw1oc32oh1ow1kh3kw3ph1pw1")
    assert winograd(problem, "backward_weight", MACHINE).reason == "some of the taps read padding only"
    operands, wanted = numbers_of(problem, "backward_data", 0)
    found = evaluate_problem("backward_data", problem, *operands, impl="winograd", target="native")
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("layouts", [("NCWH", "OIWH", "NHCW"), ("NHCW", "IHWO", "NCWH"), ("NWHC", "WHIO", "NWCH")])
def test_other_orders_of_axes_are_exact_or_refused(layouts):
    problem = ConvProblem.from_descriptor(SHAPES[0]).with_layouts(*layouts)
    for direction in DIRECTIONS:
        choice = winograd(problem, direction, MACHINE)
        result = problem.data_layout if direction == "backward_data" else problem.grad_layout
        if direction != "backward_weight" and result[-1] not in "CW":
            assert choice.reason == "neither channels nor columns of the result are contiguous"
            continue
        check_choice(problem, direction, choice)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_weights_are_refused(direction):
    problem = ConvProblem.from_descriptor("mb1ic2064ih4iw4oc2064oh4ow4kh3kw3ph1pw1")
    choice = winograd(problem, direction, MACHINE)
    assert choice.reason == "the transformed weight would take more than 256 MiB"


@pytest.mark.parametrize("text", REFUSED)
def test_what_it_does_not_cover_is_refused_with_the_reason(text):
    problem = ConvProblem.from_descriptor(text)
    operands, _ = numbers_of(problem, "forward", 0)
    with pytest.raises(UnsupportedError, match=REFUSED[text]):
        evaluate_problem("forward", problem, *operands, impl="winograd", target="native")
    with allow_transforms():
        choice = chooser.choose(problem, "forward", MACHINE)
    assert REFUSED[text] in choice.refused["winograd forward"]
    assert choice.kernel.name != "winograd"


def test_float16_is_refused():
    x, w = np.zeros((1, 16, 8, 8), "float16"), np.zeros((16, 16, 3, 3), "float16")
    with pytest.raises(UnsupportedError, match="tensors of float16; it is made for float32 or float64"):
        evaluate("conv2d", x, w, padding=1, impl="winograd", target="native")
