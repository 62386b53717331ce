# SPDX-License-Identifier: Apache-2.0
"""The exact oracle: operands of small integers, whose sums every implementation must give to the last bit.

Every partial sum is exact in float32, whatever the order of summation; so a result is compared with that of float64 for
equality, and no tolerance hides a wrong element. It needs numpy alone.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCE

Array = np.ndarray[Any, Any]

EXACT_TERMS = 2**24
"""Below so many ones, a sum is exact in float32."""


def numbers_of(problem: ConvProblem, direction: str, seed: int = 0) -> tuple[list[Array], Array]:
    """Operands of small integers for a direction of a problem, and its result by float64, rounded once to its type.

    The numbers depend on the seed, the direction and the problem alone, so that a failure can be repeated by its
    descriptor.

    Raises:
        ProblemError: symbolic extents, or sums too long to be exact in float32.
    """
    problem.require_static("verification")
    terms = reduction_length(problem, direction)
    if terms >= EXACT_TERMS:
        raise ProblemError(
            f"{problem.descriptor}: sums of {terms} terms are not exact in float32; verify a smaller one"
        )
    operands, _ = integers(problem, direction, seed)
    result = problem.tensors[DIRECTIONS[direction].result][1]
    return operands, REFERENCE[direction](problem, *operands).astype(numpy_dtype(result))


def integers(problem: ConvProblem, direction: str, seed: int = 0) -> tuple[list[Array], int]:
    """Operands of small integers for a direction of a problem, and their greatest magnitude.

    It is such that every partial sum is exact in float32, if the sums have less than EXACT_TERMS terms.

    Raises:
        ProblemError: symbolic extents.
    """
    problem.require_static("verification")
    shapes = problem.tensors
    # Products of integers up to `limit` add up to less than 2^24, so float32 holds every partial sum.
    limit = max(1, min(3, math.isqrt((EXACT_TERMS - 1) // max(reduction_length(problem, direction), 1))))
    generator = np.random.default_rng([seed, zlib.crc32(f"{direction} {problem.descriptor}".encode())])
    operands = []
    for name in DIRECTIONS[direction].operands:
        shape, dtype = shapes[name]
        operands.append(generator.integers(-limit, limit + 1, [int(e) for e in shape]).astype(numpy_dtype(dtype)))
    return operands, limit


def reduction_length(problem: ConvProblem, direction: str) -> int:
    """The most products that one element of a direction's result sums."""
    if direction == "backward_weight":
        return int(problem.batch) * math.prod(int(y) for y in problem.grad_extents)
    channels = problem.in_channels if direction == "forward" else problem.out_channels
    return channels // problem.groups * math.prod(problem.kernel)


def compare(found: Array, wanted: Array) -> tuple[str, str]:
    """Status and detail of a Verdict: every element, the shape and the type must be equal; NaN equals nothing."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return "wrong", f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    differing = found != wanted
    if not differing.any():
        return "right", f"{wanted.size} elements equal"
    where = tuple(int(index) for index in np.argwhere(differing)[0])
    return "wrong", (
        f"{int(differing.sum())} of {wanted.size} elements differ, the first at {list(where)}: {found[where]} instead "
        f"of {wanted[where]}"
    )


__all__ = ["EXACT_TERMS", "Array", "compare", "integers", "numbers_of", "reduction_length"]
