# SPDX-License-Identifier: Apache-2.0
"""Ranges of indices: which arrays they refuse, by which sentence, and intersections and hulls as sets have them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tvm_convgrad.core.index_range import IndexRange

ROWS = IndexRange.of_rows(10)
SMALL = range(-14, 15)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_rows_count_from_both_ends(dtype: str) -> None:
    array = np.array([[-10, 0, 3], [9, -1, 5]], dtype)
    assert ROWS.refusal(array, "it") == ""
    for value in (10, -11, np.iinfo(dtype).max, np.iinfo(dtype).min):
        array[1, 2] = value
        expected = (
            f"it has the value {value} at [1, 2], which is out of range; the model takes it as an index of 10 rows "
        )
        assert ROWS.refusal(array, "it") == f"{expected}(-10 to 9)."
        assert ROWS.outside(array).tolist() == [[False] * 3, [False, False, True]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_types_without_a_sign(dtype: str) -> None:
    array = np.array([0, 9], dtype)
    assert ROWS.refusal(array, "it") == ""
    array[0] = np.iinfo(dtype).max
    assert f"value {np.iinfo(dtype).max} at [0]," in ROWS.refusal(array, "it")


def test_what_a_type_cannot_hold_does_not_matter() -> None:
    wide = IndexRange.of_rows(50257)
    assert wide.refusal(np.array([-128, 127], "int8"), "it") == ""
    assert wide.refusal(np.array([255], "uint8"), "it") == ""
    assert IndexRange(300, 400).outside(np.array([1, 2], "uint8")).all()
    assert IndexRange(-400, -300).outside(np.array([1, 2], "int8")).all()


def test_scalars_and_empty_arrays() -> None:
    assert ROWS.refusal(np.zeros((0, 3), "int64"), "it") == ""
    assert ROWS.refusal(np.array(3), "it") == ""
    assert ROWS.refusal(np.array(10), "it").startswith("it has the value 10, which is out of range")
    assert IndexRange.of_rows(0).refusal(np.array([0]), "it").endswith("an index of 0 rows (0 to -1).")


def test_ignored_classes() -> None:
    labels = np.array([0, 9, -100])
    assert "--ignore-index -100 if it marks what has no loss" in IndexRange.of_classes(10).refusal(labels, "it")
    ignoring = IndexRange.of_classes(10, -100)
    assert ignoring.refusal(labels, "it") == ""
    sentence = ignoring.refusal(labels - 1, "it")
    assert sentence == (
        "it has the value -1 at [0], which is out of range; the model takes it as one of 10 classes (0 to 9, or -100)."
    )
    assert IndexRange.of_classes(10, 3) == IndexRange.of_classes(10)
    assert "ignore-index" not in IndexRange.of_classes(10).refusal(np.array([10]), "it")


def test_as_sets() -> None:
    dice = random.Random(5)
    for _ in range(300):
        first, second = (
            IndexRange(
                dice.randrange(-9, 4), dice.randrange(-3, 9), "values", tuple(dice.sample(SMALL, dice.randrange(3)))
            )
            for _ in range(2)
        )
        both, either = first & second, first.hull(second)
        array = np.array(SMALL, "int32")
        for range_ in (first, second, both, either):
            inside = [value for value in SMALL if value in range_]
            assert array[~range_.outside(array)].tolist() == inside
            assert IndexRange.from_json(range_.to_json()) == range_
        for value in SMALL:
            assert (value in both) == (value in first and value in second)
            assert value in either or not (value in first or value in second)


def test_kinds_of_both() -> None:
    assert (ROWS & IndexRange.of_rows(7)).kind == "rows"
    assert str(ROWS & IndexRange.of_classes(4, -7)) == "a value from 0 to 3, or -7"
    assert str(IndexRange.of_classes(4, -7) & IndexRange.of_classes(3, -8)) == "one of 3 classes (0 to 2)"
    assert IndexRange.from_json({"low": 1, "high": 2, "kind": "of later"}).kind == "values"
