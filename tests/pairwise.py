# SPDX-License-Identifier: Apache-2.0
"""Choices of levels of factors in which any two levels of any two factors occur together at least once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]

_CANDIDATES = 60


def covering(
    factors: Mapping[str, Sequence[str]], seed: int, allowed: Callable[[Row], bool] = lambda _: True
) -> list[Row]:
    """Rows of one level for each factor, which together have all pairs of levels that `allowed` lets be.

    Each row is the one with the most pairs that no row before has, of some that are drawn; it begins with such a pair.

    >>> rows = covering({"a": "xy", "b": "xyz", "c": "xy"}, seed=0)
    >>> {(row["a"], row["b"]) for row in rows} == set(product("xy", "xyz")), len(rows) < 12
    (True, True)
    """
    dice, rows = random.Random(seed), []
    missing = {
        ((one, first), (other, second))
        for one, other in combinations(factors, 2)
        for first, second in product(factors[one], factors[other])
    }
    while missing:
        pair = dice.choice(sorted(missing))
        drawn = [
            {name: dice.choice(list(levels)) for name, levels in factors.items()} | dict(pair)
            for _ in range(_CANDIDATES)
        ]
        rated = [(len(missing & pairs_of(row)), index) for index, row in enumerate(drawn) if allowed(row)]
        if not rated:
            missing.discard(pair)
            continue
        row = drawn[max(rated)[1]]
        missing -= pairs_of(row)
        rows.append(row)
    return rows


def pairs_of(row: Row) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of (factor, level) of a row."""
    return set(combinations(row.items(), 2))
