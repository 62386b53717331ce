# SPDX-License-Identifier: Apache-2.0
"""The range of positions at which a tap is in bounds."""

import itertools

import pytest

from tvm_convgrad.kernels.borders import valid_range


@pytest.mark.parametrize("step", [1, 2, 3])
def test_ranges_are_the_positions_in_bounds(step):
    for offset, count, extent in itertools.product(range(-9, 10), range(1, 6), range(1, 7)):
        inside = [q for q in range(count) if 0 <= q * step + offset < extent]
        first, end = valid_range(offset, step, count, extent)
        assert list(range(first, end)) == inside
        assert 0 <= first <= end <= count
