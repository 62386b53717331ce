# SPDX-License-Identifier: Apache-2.0
"""Which convolution a kernel call of a step computes: its name has the operator, and its tensors are the problem's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tvm_convgrad.core.problem import ConvProblem

_OPERATORS = {"wgrad": "d_backward_weight", "dgrad": "d_backward_data", "forward": "d_forward"}
"""Words in the names of kernels, by direction."""


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


def _shapes(descriptor: str) -> frozenset[tuple[int, ...]]:
    """The shapes of a problem's tensors that are numbers."""
    tensors = ConvProblem.from_descriptor(descriptor).tensors.values()
    shapes = [tuple(extent for extent in shape if isinstance(extent, int)) for shape, _ in tensors]
    return frozenset(known for known, (shape, _) in zip(shapes, tensors, strict=True) if len(known) == len(shape))


__all__ = ["Call", "convolutions_of", "direction_of", "with_batch"]
