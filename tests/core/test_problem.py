# SPDX-License-Identifier: Apache-2.0
"""ConvProblem: normalisation, extents, derived numbers, and what it refuses."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from tvm_convgrad.core.errors import ConvGradError, DTypeError, ProblemError
from tvm_convgrad.core.geometry import flat_padding, normalize_padding, same_padding
from tvm_convgrad.core.problem import ConvProblem


def make(**changes: object) -> ConvProblem:
    fields: dict[str, object] = {
        "batch": 2,
        "in_channels": 4,
        "out_channels": 6,
        "data_extents": (9, 8),
        "kernel": (3, 2),
    }
    return ConvProblem(**{**fields, **changes})  # type: ignore[arg-type]


def test_defaults_and_shapes() -> None:
    problem = make(groups=2)
    assert (problem.strides, problem.dilation, problem.padding) == ((1, 1), (1, 1), ((0, 0), (0, 0)))
    assert problem.data_shape == (2, 4, 9, 8)
    assert problem.weight_shape == (6, 2, 3, 2)
    assert problem.grad_shape == (2, 6, 7, 7)
    assert problem.rank == 2
    assert problem.is_static


def test_layouts_permute_shapes() -> None:
    problem = make(groups=2).with_layouts("NHWC", "HWIO", "CHWN")
    assert problem.data_shape == (2, 9, 8, 4)
    assert problem.weight_shape == (3, 2, 2, 6)
    assert problem.grad_shape == (6, 7, 7, 2)


@pytest.mark.parametrize(
    ("extent", "kernel", "stride", "dilation", "padding", "result"),
    [
        (7, 3, 2, 1, (0, 0), 3),
        (8, 3, 2, 1, (0, 0), 3),  # the last element is hidden
        (8, 3, 2, 1, (0, 1), 4),
        (5, 3, 1, 2, (0, 0), 1),
        (1, 3, 1, 1, (1, 1), 1),
        (1, 1, 4, 1, (0, 0), 1),
        (1, 2, 3, 1, (100, 1), 34),  # from oneDNN's large_padding
    ],
)
def test_output_extents(
    extent: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int], result: int
) -> None:
    problem = ConvProblem(1, 1, 1, (extent,), (kernel,), (stride,), (padding,), (dilation,))
    assert problem.grad_extents == (result,)


def test_macs_bytes_accumulator() -> None:
    problem = make(groups=2)
    assert problem.macs == 2 * 6 * 7 * 7 * (4 // 2 * 3 * 2)
    assert problem.bytes == 4 * (2 * 4 * 9 * 8 + 6 * 2 * 3 * 2 + 2 * 6 * 7 * 7)
    assert problem.accumulator == "float32"
    assert problem.with_dtypes("float16", "bfloat16", "float16").accumulator == "float32"
    assert problem.with_dtypes("float16", "float64", "float16").accumulator == "float64"
    half = problem.with_dtypes("float16", "float16", "float16")
    assert half.bytes * 2 == problem.bytes


def test_equal_problems_hash_alike_and_pickle() -> None:
    assert make() == make(strides=(1, 1), padding=((0, 0), (0, 0)))
    assert hash(make()) == hash(make(strides=(1, 1)))
    assert pickle.loads(pickle.dumps(make(groups=2))) == make(groups=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().groups = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "pairs"),
    [
        (1, ((1, 1), (1, 1))),
        ((1, 2), ((1, 1), (2, 2))),
        ((1, 2, 3, 4), ((1, 3), (2, 4))),  # top, left, bottom, right
        (((1, 2), (3, 4)), ((1, 2), (3, 4))),
        ("VALID", ((0, 0), (0, 0))),
        ("same", ((1, 1), (0, 1))),
    ],
)
def test_padding_forms(given: object, pairs: tuple[tuple[int, int], ...]) -> None:
    found = normalize_padding(
        given,  # type: ignore[arg-type]
        data_extents=(9, 8),
        kernel=(3, 2),
        strides=(1, 1),
        dilation=(1, 1),
    )
    assert found == pairs
    assert flat_padding(found) == tuple(p[0] for p in pairs) + tuple(p[1] for p in pairs)


@pytest.mark.parametrize(
    ("extent", "kernel", "stride", "dilation", "pads"),
    [  # worked out by TensorFlow's formula: total = max((ceil(x/s) - 1) * s + (k-1) * d + 1 - x, 0)
        (5, 2, 2, 1, (0, 1)),
        (6, 3, 2, 1, (0, 1)),
        (7, 3, 2, 1, (1, 1)),
        (4, 1, 2, 1, (0, 0)),  # stride beyond the kernel: nothing to pad, never negative
        (5, 3, 1, 2, (2, 2)),
        (8, 4, 3, 1, (1, 1)),
    ],
)
def test_same_padding(extent: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> None:
    assert same_padding(extent, kernel, stride, dilation, "W") == pads
    problem = ConvProblem(1, 1, 1, (extent,), (kernel,), (stride,), (pads,), (dilation,))
    assert problem.grad_extents == (-(-extent // stride),)


def test_same_padding_of_a_symbolic_extent() -> None:
    assert same_padding("w", 4, 1, 2, "W") == (3, 3)
    with pytest.raises(ProblemError, match=r"axis W.*symbolic \(w\); give the padding as numbers"):
        same_padding("w", 4, 2, 1, "W")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"groups": 3}, ["4 input channels", "groups=3"]),
        ({"groups": 4}, ["6 output channels", "groups=4"]),
        ({"groups": 0}, ["groups=0", "at least 1"]),
        ({"groups": -1}, ["groups=-1", "at least 1"]),
        ({"strides": (0, 1)}, ["strides", "axis H", "at least 1"]),
        ({"dilation": (1, 0)}, ["dilation", "axis W", "at least 1"]),
        ({"kernel": (3, 0)}, ["kernel_size", "axis W", "at least 1"]),
        ({"strides": (1, 2, 3)}, ["strides", "3 entries", "2"]),
        ({"padding": ((0, 0), (-1, 0))}, ["(-1, 0)", "axis W", "negative", "slice the data"]),
        ({"padding": (1, 2, 3)}, ["padding", "3 entries"]),
        ({"padding": "FULL"}, ["FULL", "SAME", "VALID"]),
        ({"data_extents": (-1, 8)}, ["extent of H is -1", "negative"]),
        ({"batch": -1}, ["extent of batch is -1"]),
        ({"in_channels": -2}, ["-2 input channels"]),
        ({"data_layout": "NCHH"}, ["data_layout='NCHH'", "permutation", "NCHW"]),
        ({"kernel_layout": "OIH"}, ["kernel_layout='OIH'", "OIHW"]),
        ({"grad_layout": "NCDHW"}, ["grad_layout='NCDHW'"]),
        ({"batch": 2**40, "data_extents": (2**20, 2**20)}, ["more than 2**63 - 1 elements"]),
        ({"data_extents": (9,)}, ["1, 2 or 3 entries"]),
    ],
)
def test_refusals(changes: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ProblemError) as caught:
        make(**changes)
    assert isinstance(caught.value, ConvGradError)
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bool", "complex64", "", "f32"])
def test_dtypes_refused(dtype: str) -> None:
    with pytest.raises(DTypeError, match="accepted are float16, bfloat16, float32, float64"):
        make(kernel_dtype=dtype)


def test_symbolic_extents() -> None:
    problem = make(batch="n", data_extents=("h", 8), strides=(2, 1), padding=1)
    assert not problem.is_static
    assert problem.grad_extents == ("(h-1)//2+1", 9)
    assert problem.data_shape == ("n", 4, "h", 8)
    for name in ("macs", "bytes"):
        with pytest.raises(ProblemError, match=f"{name} .* needs static extents"):
            getattr(problem, name)


def test_from_shapes_reads_layouts() -> None:
    problem = ConvProblem.from_shapes(
        (2, 9, 8, 4),
        (3, 2, 2, 6),
        groups=2,
        padding="SAME",
        strides=2,
        data_layout="NHWC",
        kernel_layout="HWIO",
    )
    assert (problem.batch, problem.in_channels, problem.out_channels) == (2, 4, 6)
    assert problem.grad_shape == (2, 5, 4, 6)
    assert problem.grad_layout == "NHWC"


@pytest.mark.parametrize(
    ("data", "weight", "groups", "part"),
    [
        ((2, 4, 9, 8), (6, 4, 3, 2), 2, "4 channels in 2 groups need 2"),
        ((2, 4, 9, 8), (6, 4, 3), 1, "must have equally many axes"),
        ((2, 4), (6, 4), 1, "must have 3, 4 or 5 axes each"),
        ((2, "c", 9, 8), (6, 4, 3, 2), 1, "channels of data are symbolic"),
    ],
)
def test_from_shapes_refuses(data: tuple[int, ...], weight: tuple[int, ...], groups: int, part: str) -> None:
    with pytest.raises(ProblemError, match=part):
        ConvProblem.from_shapes(data, weight, groups=groups)


def test_two_to_the_31_elements_is_a_problem() -> None:
    problem = ConvProblem(2**20, 2**11, 1, (1,), (1,))
    assert problem.macs == 2**31
