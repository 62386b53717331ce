# SPDX-License-Identifier: Apache-2.0
"""2,000 random problems against float64, to the last bit: of each, compiled, one gradient in one of its compositions.

Drawn by hypothesis with a fixed seed; `convgrad verify --fuzz N --seed S` draws others and compiles every direction.
tests/core/test_compositions.py runs every composition without a compiler. 50 problems are one example, as compiling is
what costs.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.strategies import problems
from tvm_convgrad.verify.operators import check_problems

GRADIENTS = ("backward_weight", "backward_data")  # of the problems in even and in odd places
TOGETHER = 50
SHARDS = [
    # rank, element types, problems: 2,000 in all
    (1, ("float32", "float64"), 200),
    (1, ("float16", "bfloat16", "float32"), 200),
    (2, ("float32",), 400),
    (2, ("float32", "float64"), 400),
    (2, ("float16", "bfloat16", "float32"), 400),
    (3, ("float32", "float64"), 200),
    (3, ("float16", "bfloat16", "float32"), 200),
]


def test_the_shards_are_two_thousand_problems() -> None:
    assert sum(count for *_, count in SHARDS) == 2000
    assert all(count % TOGETHER == 0 for *_, count in SHARDS)


@pytest.mark.parametrize(("rank", "dtypes", "count"), SHARDS, ids=lambda value: str(value).replace(" ", ""))
def test_random_problems(rank: int, dtypes: tuple[str, ...], count: int) -> None:
    seen = 0

    @settings(
        max_examples=count // TOGETHER,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),  # an example is a compilation: slow and large on purpose
    )
    @given(st.lists(problems(rank, dtypes), min_size=TOGETHER, max_size=TOGETHER))
    def run(batch: list) -> None:  # type: ignore[type-arg]
        nonlocal seen
        seen += len(batch)
        for place, direction in enumerate(GRADIENTS):
            assert [v for v in check_problems(batch[place::2], directions=(direction,)) if v.status != "right"] == []

    run()
    assert seen >= count
