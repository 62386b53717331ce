# SPDX-License-Identifier: Apache-2.0
"""Layouts as strings against what numpy does with arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax_ops.layouts import algebra


def store(array, layout):
    return array.transpose(algebra.storage_order(layout))


def numbered(shape):
    return np.arange(math.prod(shape)).reshape(shape)


layouts = st.integers(1, 6).flatmap(lambda n: st.permutations(algebra.initial(n))).map("".join)


def shape_and_reshape(draw):
    """A shape, and another one of as many elements: factors regrouped, ones put in."""
    factors = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def regroup():
        shape, start = [], 0
        while start < len(factors):
            stop = draw(st.integers(start + 1, len(factors)))
            shape.append(math.prod(factors[start:stop]))
            start = stop
        for _ in range(draw(st.integers(0, 2))):
            shape.insert(draw(st.integers(0, len(shape))), 1)
        return shape

    before = regroup()
    return before, regroup(), "".join(draw(st.permutations(algebra.initial(len(before)))))


@given(st.data())
def test_reshape_of_what_is_stored(data):
    """Where the rule finds an order, a plain reshape of the stored array is the stored reshape; else none would be."""
    before, after, layout = shape_and_reshape(data.draw)
    array = numbered(before)
    groups = algebra.reshape_groups(before, after, lambda a, b: a == b)
    assert groups is not None
    order = algebra.reshaped_order(layout, groups)
    right = array.reshape(after)
    if order is not None:
        output = algebra.with_units(order, len(after), [algebra.initial(len(after))])
        want = store(right, output)
        np.testing.assert_array_equal(store(array, layout).reshape(want.shape), want)
    elif len(after) <= 5:
        flat = store(array, layout).ravel()
        every = itertools.permutations(algebra.initial(len(after)))
        assert not any(np.array_equal(flat, store(right, "".join(o)).ravel()) for o in every)


@given(layouts, st.data())
def test_without_is_what_a_reduction_leaves(layout, data):
    array = numbered(range(1, len(layout) + 1))
    axes = data.draw(st.sets(st.sampled_from(range(len(layout)))))
    left = array.sum(axis=tuple(axes))
    places = tuple(algebra.position(layout, axis) for axis in axes)
    np.testing.assert_array_equal(store(array, layout).sum(axis=places), store(left, algebra.without(layout, axes)))


@given(layouts, st.data())
def test_trailing_broadcasts(layout, data):
    ndim = data.draw(st.integers(1, len(layout)))
    shape = range(2, len(layout) + 2)
    array, small = numbered(shape), numbered(list(shape)[len(layout) - ndim :])
    own = algebra.trailing(layout, ndim)
    if own is not None:
        np.testing.assert_array_equal(store(array, layout) + store(small, own), store(array + small, layout))
    else:
        assert set(algebra.storage_order(layout)[len(layout) - ndim :]) != set(range(len(layout) - ndim, len(layout)))


@given(layouts)
def test_relative_and_stored_are_inverse(layout):
    names = "NCDHWX"[: len(layout)]
    assert algebra.relative(names, "".join(algebra.stored(names, layout))) == layout
    assert algebra.is_plain(layout)


def test_packed_layouts_are_not_plain():
    assert not any(map(algebra.is_plain, ["ABCD16b", "AAB", "BCD", "abc"]))
    assert algebra.is_plain("")


def test_symbolic_extents():
    equal = lambda a, b: a == b  # noqa: E731
    assert algebra.reshape_groups(["n", 4, 1, 1], ["n", 4], equal) == [([0], [0]), ([1], [1])]
    assert algebra.reshape_groups(["n", 2, 3], ["n", 6], equal) == [([0], [0]), ([1, 2], [1])]
    assert algebra.reshape_groups(["n", 2], ["m"], equal) is None
    assert algebra.reshape_groups([2, 3], [4], equal) is None
