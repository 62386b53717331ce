# SPDX-License-Identifier: Apache-2.0
"""The descriptor string: round trip for every problem, benchdnn's own lines, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import problems
from tvm_convgrad.core.errors import DescriptorError
from tvm_convgrad.core.problem import ConvProblem


@settings(max_examples=500, deadline=None)
@given(problems(), st.data())
def test_round_trip(problem: ConvProblem, data: st.DataObject) -> None:
    names = ("n", "batch_size", "(h+1)//2", "2*k", "T.max(n_1, m)", "a == b")
    if data.draw(st.booleans()):
        problem = replace(problem, batch=data.draw(st.sampled_from(names)))
    if data.draw(st.booleans()):
        extents = list(problem.data_extents)
        extents[data.draw(st.integers(0, problem.rank - 1))] = data.draw(st.sampled_from(names))
        problem = replace(problem, data_extents=tuple(extents))
    assert ConvProblem.from_descriptor(problem.descriptor) == problem
    assert str(problem) == problem.descriptor


@pytest.mark.parametrize(
    ("text", "data", "weight", "grad"),
    [
        ("g2mb8ic96ih27oc256oh27kh5ph2", (8, 96, 27, 27), (256, 48, 5, 5), (8, 256, 27, 27)),
        ("ic3ih224oc64oh112kh7sh2ph3", (2, 3, 224, 224), (64, 3, 7, 7), (2, 64, 112, 112)),
        (
            'mb128_ic3oc64_ih224oh112kh7sh2dh0ph3_iw224ow112kw7sw2dw0pw3_n"resnext_101:conv1*1"',
            (128, 3, 224, 224),
            (64, 3, 7, 7),
            (128, 64, 112, 112),
        ),
        ('mb1_g1ic32oc32_iw84350ow84349kw2sw1dw0pw0n"wavenet"', (1, 32, 84350), (32, 32, 2), (1, 32, 84349)),
        ("mb20ic4ih8oc6oh3kh3sh2ph1dh1", (20, 4, 8, 8), (6, 4, 3, 3), (20, 6, 3, 3)),
        ("ic16oc16_iw1kw3ow100pw100", (2, 16, 1), (16, 16, 3), (2, 16, 100)),
    ],
)
def test_benchdnn_lines(text: str, data: tuple[int, ...], weight: tuple[int, ...], grad: tuple[int, ...]) -> None:
    problem = ConvProblem.from_descriptor(text)
    assert (problem.data_shape, problem.weight_shape, problem.grad_shape) == (data, weight, grad)
    assert ConvProblem.from_descriptor(problem.descriptor) == problem


def test_what_benchdnn_cannot_say() -> None:
    problem = ConvProblem(
        batch="n",
        in_channels=4,
        out_channels=6,
        data_extents=("h", 8),
        kernel=(3, 2),
        padding=((0, 1), (2, 0)),
        groups=2,
        data_layout="NHWC",
        kernel_layout="HWIO",
        grad_layout="NHWC",
        data_dtype="bfloat16",
        kernel_dtype="float32",
        grad_dtype="bfloat16",
    )
    assert problem.descriptor == ("g2mb{n}ic4ih{h}iw8oc6kh3kw2ph0pw2rh1rw0_lay=NHWC:HWIO:NHWC_dt=bf16:f32:bf16")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not understood"),
        ("hello world", "not understood from"),
        ("mb2ic3ih5oc4", "lacks 'kh'"),
        ("mb2ic3oc4kh3", "no data extent"),
        ("mb2ih5oc4kh3", "lacks 'ic'"),
        ("mb2ic3ih5oc4kh3kh3", "'kh' twice"),
        ("mb2ic3ih5oc4oh9kh3rh1", "states output (9, 9)"),
        ("mb2ic3ih5oc4oh1kh3", "trailing elements"),
        ("mb2ic3ih5oc4kh3zz4", "zz not understood"),
        ("mb2ic3ih5oc4kh{k}", "must be a number"),
        ("mb2ic3ih5oc4kh3_lay=NCHW", "option 'lay=NCHW'"),
        ("mb2ic3ih5oc4kh3_dt=f8:f8:f8", "option 'dt=f8:f8:f8'"),
        ("mb2ic3ih5oc4kh3_color=red:blue:red", "not understood"),
        ("mb2ic3ih5oc4kh9", "kernel 9 covers more of axis H"),
        ("g2mb2ic3ih5oc4kh3", "groups=2"),
        ("mb2ic3ih5oc4oh{y}kh3", "output"),
    ],
)
def test_refusals(text: str, part: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        ConvProblem.from_descriptor(text)
    assert part in str(caught.value)
    assert repr(text) in str(caught.value)
