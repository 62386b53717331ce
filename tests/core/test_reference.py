# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle, against the definition written as plain loops, against PyTorch, and against itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.core.strategies import problems
from tvm_convgrad.core import reference
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.problem import ConvProblem

Array = np.ndarray[Any, Any]

CHOSEN = [
    "mb2ic3iw7oc4kw3sw2dw1pw2",
    "g2mb2ic4ih5iw6oc6kh2kw3sh2sw1dh0dw1ph0pw2rh1rw0",
    "g3mb1ic3ih4iw5oc6kh3kw2_lay=NHWC:HWIO:CWHN",
    "g2mb1ic2id3ih4iw3oc2kd2kh3kw1sd2sh1sw1pd1ph1pw0",
    "mb2ic1ih1oc1kh1",
]


def numbers(problem: ConvProblem, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-4, 5, [int(e) for e in shape]).astype("float64")
        for name, (shape, _) in problem.tensors.items()
    }


def loops(problem: ConvProblem, arrays: dict[str, Array]) -> dict[str, Array]:
    """The three directions from the definition: one pass over every product x * w that belongs to an output element."""
    rank = problem.rank
    axes = "DHW"[3 - rank :]
    out = {name: np.zeros(array.shape) for name, array in arrays.items()}
    per_group_in = problem.in_channels // problem.groups
    per_group_out = problem.out_channels // problem.groups
    for n, o, i in itertools.product(range(int(problem.batch)), range(problem.out_channels), range(per_group_in)):
        for y in itertools.product(*(range(int(e)) for e in problem.grad_extents)):
            for k in itertools.product(*(range(e) for e in problem.kernel)):
                x = tuple(
                    y[a] * problem.strides[a] + k[a] * problem.dilation[a] - problem.padding[a][0] for a in range(rank)
                )
                if any(not 0 <= x[a] < int(problem.data_extents[a]) for a in range(rank)):
                    continue
                place = {
                    "data": index(problem.data_layout, axes, N=n, C=o // per_group_out * per_group_in + i, spatial=x),
                    "weight": index(problem.kernel_layout, axes, O=o, I=i, spatial=k),
                    "grad": index(problem.grad_layout, axes, N=n, C=o, spatial=y),
                }
                value = {name: arrays[name][place[name]] for name in place}
                out["grad"][place["grad"]] += value["data"] * value["weight"]
                out["data"][place["data"]] += value["grad"] * value["weight"]
                out["weight"][place["weight"]] += value["grad"] * value["data"]
    return out


def index(layout: str, axes: str, spatial: tuple[int, ...], **letters: int) -> tuple[int, ...]:
    known = {**letters, **dict(zip(axes, spatial, strict=True))}
    return tuple(known[letter] for letter in layout)


@pytest.mark.parametrize("descriptor", CHOSEN)
def test_equals_the_definition(descriptor: str) -> None:
    problem = ConvProblem.from_descriptor(descriptor)
    arrays = numbers(problem)
    want = loops(problem, arrays)
    np.testing.assert_array_equal(reference.forward(problem, arrays["data"], arrays["weight"]), want["grad"])
    np.testing.assert_array_equal(reference.backward_weight(problem, arrays["grad"], arrays["data"]), want["weight"])
    np.testing.assert_array_equal(reference.backward_data(problem, arrays["grad"], arrays["weight"]), want["data"])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_the_three_directions_are_adjoint(problem: ConvProblem) -> None:
    arrays = numbers(problem)
    x, w, dy = arrays["data"], arrays["weight"], arrays["grad"]
    inner = (dy * reference.forward(problem, x, w)).sum()
    assert inner == (reference.backward_data(problem, dy, w) * x).sum()
    assert inner == (reference.backward_weight(problem, dy, x) * w).sum()


def test_equals_pytorch() -> None:
    torch = pytest.importorskip("torch")
    for descriptor in CHOSEN:
        problem = ConvProblem.from_descriptor(descriptor).with_layouts()
        arrays = numbers(problem)
        x, w = (torch.tensor(arrays[name], requires_grad=True) for name in ("data", "weight"))
        widths = [p for low, high in reversed(problem.padding) for p in (low, high)]
        function = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
        y = function[problem.rank - 1](
            torch.nn.functional.pad(x, widths),
            w,
            stride=problem.strides,
            dilation=problem.dilation,
            groups=problem.groups,
        )
        dx, dw = torch.autograd.grad(y, (x, w), torch.tensor(arrays["grad"]))
        got = reference.forward(problem, arrays["data"], arrays["weight"])
        np.testing.assert_array_equal(got, y.detach().numpy())
        np.testing.assert_array_equal(reference.backward_data(problem, arrays["grad"], arrays["weight"]), dx.numpy())
        np.testing.assert_array_equal(reference.backward_weight(problem, arrays["grad"], arrays["data"]), dw.numpy())


def test_refuses_other_shapes_and_symbols() -> None:
    problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3")
    arrays = numbers(problem)
    with pytest.raises(ProblemError, match=r"grad has shape \(2, 3, 5, 5\).*needs \(2, 4, 3, 3\)"):
        reference.backward_weight(problem, arrays["data"], arrays["data"])
    with pytest.raises(ProblemError, match="weight has shape"):
        reference.forward(problem, arrays["data"], arrays["grad"])
    with pytest.raises(ProblemError, match="needs static extents"):
        reference.forward(ConvProblem.from_descriptor("mb{n}ic3ih5oc4kh3"), arrays["data"], arrays["weight"])
