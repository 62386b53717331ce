# SPDX-License-Identifier: Apache-2.0
"""Gradients of operators that move elements; all exact."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gradients.harness import batch, check, integers, relax

op = relax.op
X = integers(2, 3, 6, 8)

CASES = {
    "flatten": (op.flatten, lambda x: x.reshape(-1)),
    "batch_flatten": (op.nn.batch_flatten, lambda x: x.reshape(x.shape[0], -1)),
    "squeeze_axes": (
        lambda x: op.squeeze(op.expand_dims(x, [0, 3]), [0, -3]),
        lambda x: x * 1,
    ),
    "expand_dims": (lambda x: op.expand_dims(x, [1, -1]), lambda x: x[:, None, ..., None]),
    "permute": (lambda x: op.permute_dims(x, [0, -2, -1, 1]), lambda x: x.permute(0, 2, 3, 1)),
    "flip": (lambda x: op.flip(x, -1), lambda x: x.flip(-1)),
    "tile": (lambda x: op.tile(x, (2, 1, 3, 1)), lambda x: x.repeat(2, 1, 3, 1)),
    "tile_new_axis": (lambda x: op.tile(x, (2, 1, 3, 1, 2)), lambda x: x.repeat(2, 1, 3, 1, 2)),
    "repeat": (lambda x: op.repeat(x, 2, 2), lambda x: x.repeat_interleave(2, 2)),
    "repeat_all": (lambda x: op.repeat(x, 3), lambda x: x.repeat_interleave(3)),
    "triu": (lambda x: op.triu(x, 1), lambda x: x.triu(1)),
    "tril": (lambda x: op.tril(x, -1), lambda x: x.tril(-1)),
    "slice_open_end": (lambda x: op.strided_slice(x, [2], [1], [1000]), lambda x: x[:, :, 1:]),
    "slice_two_axes": (
        lambda x: op.strided_slice(x, [3, 1], [1, -2], [7, 3], [2, 1]),
        lambda x: x[:, -2:3, :, 1:7:2],
    ),
    "slice_from_the_end": (
        lambda x: op.strided_slice(x, [2], [-4], [-1], [2]),
        lambda x: x[:, :, -4:-1:2],
    ),
    "slice_backwards": (lambda x: op.strided_slice(x, [2], [5], [0], [-2]), lambda x: x.flip(2)[:, :, 0:5:2]),
    "slice_all": (lambda x: op.strided_slice(x, [2], [0], [6]), lambda x: x * 1),
}


@pytest.mark.parametrize("axes", [{}, {0: "n", 2: "h", 3: "w"}], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_one_argument(name, axes):
    pytest.importorskip("torch")
    build, oracle = CASES[name]
    check(lambda _, x: build(x), oracle, [X], symbolic=batch([X], axes), exact=True)


def test_negative_slice_axis():
    pytest.importorskip("torch")
    check(lambda _, x: op.strided_slice(x, [-1], [2], [5]), lambda x: x[..., 2:5], [X], exact=True)


def test_squeeze_of_every_unit_axis():
    pytest.importorskip("torch")
    arrays = [integers(2, 1, 3, 1)]
    check(lambda _, x: op.squeeze(x), lambda x: x.squeeze(), arrays, exact=True)


def test_reshape():
    pytest.importorskip("torch")
    check(lambda _, x: op.reshape(x, (2, -1, 4)), lambda x: x.reshape(2, -1, 4), [X], exact=True)


@pytest.mark.parametrize("axis", [1, -2])
def test_concat_and_stack(axis):
    torch = pytest.importorskip("torch")
    arrays = [X, integers(2, 3, 6, 8, seed=1)]
    check(
        lambda _, x, y: op.concat([x, y], axis),
        lambda x, y: torch.cat([x, y], axis),
        arrays,
        symbolic=batch(arrays),
        exact=True,
    )
    if axis > 0:
        check(
            lambda _, x, y: op.stack([x, y], axis),
            lambda x, y: torch.stack([x, y], axis),
            arrays,
            symbolic=batch(arrays),
            exact=True,
        )


def test_split_of_which_one_part_is_used():
    pytest.importorskip("torch")

    def build(builder, x):
        return relax.TupleGetItem(builder.emit(op.split(x, [2, 3], 2)), 1)

    check(build, lambda x: x[:, :, 2:3], [X], symbolic=batch([X]), exact=True)


def test_slice_by_finite_differences():
    arrays = [integers(3, 7)]
    check(
        lambda _, x: op.square(op.strided_slice(x, [1], [1], [7], [3])),
        lambda x: x[:, 1:7:3] ** 2,
        arrays,
        numeric=True,
    )
    assert np.prod(arrays[0].shape) == 21
