# SPDX-License-Identifier: Apache-2.0
"""The 68 convolutions through every way that there is in Relay, equal to float64.

Each is converted to one of two layouts, in turns, so that each family meets both. Programs are compiled without LLVM's
optimiser, which test_cpu_kernels.py has.
"""

from __future__ import annotations

import pytest

from tests.relay_ops.harness import load_grid

GRID = load_grid()
GRID.TARGET = "llvm -opt-level=0"
PROBLEMS = list(GRID.problems())
LAYOUTS = [f"to {name}" for name in GRID.LAYOUTS]


def test_the_problems_differ() -> None:
    assert len({problem for _, problem in PROBLEMS}) == len(PROBLEMS) == 65 + len(GRID.CONFIGURATIONS["coinciding"])


def ways():
    """(problem, path), where extents coincide with both layouts."""
    for number, (family, problem) in enumerate(PROBLEMS):
        layouts = LAYOUTS if family == "coinciding" else LAYOUTS[number % 2 :][:1]
        yield from ((problem, path) for path in ("gradient", "library", *layouts))


@pytest.mark.parametrize(("problem", "path"), ways(), ids=str)
def test_right(problem, path) -> None:
    expected = ["data", "weight"] if path.startswith("to") else ["data", "weight", "grad"]
    assert GRID.outcome(problem, path) == ("right", ", ".join(expected))


@pytest.mark.parametrize("problem", [p for _, p in PROBLEMS if p.groups > 1 and max(p.strides) > 1], ids=str)
@pytest.mark.parametrize("path", ["gradient of NHWC", "wgrad", "wgrad in NHWC"])
def test_grouped_and_strided_in_other_ways(problem, path) -> None:
    assert GRID.outcome(problem, path)[0] == "right"
