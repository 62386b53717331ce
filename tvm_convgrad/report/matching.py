# SPDX-License-Identifier: Apache-2.0
"""What a kernel call of a step computes: its name has the operator, and its tensors are the problem's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tvm_convgrad.core.problem import ConvProblem

_OPERATORS = {"wgrad": "d_backward_weight", "dgrad": "d_backward_data", "forward": "d_forward"}
"""Words in the names of kernels, by direction."""

_PRODUCT, _KERNEL, _OF_WEIGHT = "matmul", "_kernel", "backward_weight"
"""Words in the names of matrix products: of all, of those by generated kernels, which have no batch, and of those whose
result may be followed by a bias gradient."""


class Call(Protocol):
    """A kernel call: the name of its function, and the shapes of its tensors, its result among them."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that are known."""


def with_batch(descriptor: str, batch: int) -> str:
    """A descriptor whose symbolic batch, `mb{n}`, is a number."""
    before, opening, rest = descriptor.partition("mb{")
    return descriptor if not opening else f"{before}mb{batch}{rest.partition('}')[2]}"


def direction_of(operator: str) -> str:
    """ "wgrad", "dgrad" or "forward": the direction that an operator computes."""
    return next((name for name, words in _OPERATORS.items() if words in operator), "forward")


def convolutions_of(calls: Sequence[Call], entries: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """The number of the entry that each call computes, from 0; None of other calls.

    Args:
        calls: in the order of the step.
        entries: convolutions with `op` and `descriptor`. Of entries that a call could be, the first that no earlier
            call has is taken; of those that all have been taken the first, which is computed again. Of tensors whose
            extents are not all numbers nothing is demanded.
    """
    shapes = [_shapes(str(entry["descriptor"])) for entry in entries]
    words = [_OPERATORS[direction_of(str(entry["op"]))] for entry in entries]
    free = set(range(len(entries)))
    found: list[int | None] = []
    for call in calls:
        own = set(call.shapes)
        fitting = [
            number
            for number in range(len(entries))
            if shapes[number] <= own and (words[number] in call.name or str(entries[number]["op"]) in call.name)
        ]
        taken = next((number for number in fitting if number in free), fitting[0] if fitting else None)
        found.append(taken)
        free.discard(-1 if taken is None else taken)
    return found


def product_macs(call: Call) -> int:
    """Multiply-adds of a call that is a matrix product; 0 of other calls, and where its tensors do not tell.

    Each of the three extents of a product is one of two of its three matrices, so that the number of its multiply-adds
    is the square root of the product of their sizes; a batch that all three have is one of each of them.

    Example:
        >>> from tvm_convgrad.report.profile import Row
        >>> product_macs(Row("matmul", "forward", ((8, 2, 3), (8, 3, 5), (8, 2, 5)), "", 1, 0.0, 0.0, 0))
        240
    """
    if _PRODUCT not in call.name or len(call.shapes) < 3:
        return 0
    matrices = (*call.shapes[:2], call.shapes[2 if _OF_WEIGHT in call.name else -1])
    leading = {shape[:-2] for shape in matrices}
    batch = math.prod(leading.pop()) if len(leading) == 1 and _KERNEL not in call.name else 1
    square, rest = divmod(math.prod(map(math.prod, matrices)), batch or 1)
    root = math.isqrt(square)
    return root if rest == 0 and root * root == square else 0


def _shapes(descriptor: str) -> frozenset[tuple[int, ...]]:
    """The shapes of a problem's tensors that are numbers."""
    tensors = ConvProblem.from_descriptor(descriptor).tensors.values()
    shapes = [tuple(extent for extent in shape if isinstance(extent, int)) for shape, _ in tensors]
    return frozenset(known for known, (shape, _) in zip(shapes, tensors, strict=True) if len(known) == len(shape))


__all__ = ["Call", "convolutions_of", "direction_of", "product_macs", "with_batch"]
