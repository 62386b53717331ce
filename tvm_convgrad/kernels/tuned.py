# SPDX-License-Identifier: Apache-2.0
"""Tuned cuts: what a measurement found better than the cost model, as plain values, and where the plan asks for them.

The plan asks only inside `with use_winners(...)`. The order is: a forced implementation, then a tuned winner, then the
cost model. A winner is another cut of the kernel that the plan has chosen; where Winograd's transform is allowed, of
one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm_convgrad.problem import ConvProblem

if TYPE_CHECKING:
    from tvm_convgrad.kernels.plan import Choice
    from tvm_convgrad.kernels.target import Machine

Winners = Callable[[ConvProblem, str, "Machine", "Sequence[Choice]"], "Choice | None"]
"""From problem, face, machine and the plan's own cut of each kernel that may win to the tuned one, if there is one."""

TUNED = "tuned"
"""How the reason of a tuned choice begins."""

_winners: ContextVar[Winners | None] = ContextVar("tvm_convgrad_winners", default=None)


@contextmanager
def use_winners(winners: Winners | None) -> Iterator[None]:
    """Let the plan ask `winners` inside the block; None lets it ask nobody."""
    token = _winners.set(winners)
    try:
        yield
    finally:
        _winners.reset(token)


def winner(problem: ConvProblem, face: str, machine: Machine, choices: Sequence[Choice]) -> Choice | None:
    """The tuned choice where winners are asked and have one, of one of the kernels of `choices`."""
    winners = _winners.get()
    return None if winners is None else winners(problem, face, machine, choices)


def tilings_of(detail: Any) -> list[Any]:
    """The tilings in a kernel's plan, in order, whatever is around them."""
    if isinstance(detail, tuple):
        return [tiling for part in detail for tiling in tilings_of(part)]
    return [detail] if _is_tiling(detail) else []


def with_tilings(detail: Any, tilings: Sequence[Any]) -> Any:
    """A kernel's plan with other tilings in the places of its own.

    Raises:
        ValueError: there are more or fewer of them.
    """
    left = list(tilings)

    def put(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(put(each) for each in part)
        return left.pop(0) if _is_tiling(part) and left else part

    if len(left) != len(tilings_of(detail)):
        raise ValueError(f"{len(left)} tilings for the {len(tilings_of(detail))} of this plan")
    return put(detail)


def plain_tilings(choice: Choice) -> list[dict[str, Any]]:
    """The tilings of a choice as values for JSON."""
    return [
        {"type": type(tiling).__name__, **{item.name: getattr(tiling, item.name) for item in fields(tiling)}}
        for tiling in tilings_of(choice.detail)
    ]


def with_plain_tilings(choice: Choice, plain: Sequence[dict[str, Any]], reason: str) -> Choice:
    """The choice with tilings that `plain_tilings` wrote.

    Raises:
        ValueError: they are not of this kernel.
    """
    own = tilings_of(choice.detail)
    if len(own) != len(plain):
        raise ValueError(f"{len(plain)} tilings for the {len(own)} of this plan")
    made = []
    for tiling, values in zip(own, plain, strict=True):
        names = {item.name for item in fields(tiling)}
        kinds = {name: type(getattr(tiling, name)) for name in names}
        if set(values) != names | {"type"} or values["type"] != type(tiling).__name__:
            raise ValueError(f"a tiling of other fields than {type(tiling).__name__} has")
        if any(type(values[name]) is not kinds[name] for name in names):
            raise ValueError(f"a field of {type(tiling).__name__} is of another type")
        made.append(replace(tiling, **{name: values[name] for name in names}))
    return replace(choice, detail=with_tilings(choice.detail, made), reason=reason)


def _is_tiling(value: Any) -> bool:
    return is_dataclass(value) and type(value).__name__.endswith("Tiling")


__all__ = [
    "TUNED",
    "Winners",
    "plain_tilings",
    "tilings_of",
    "use_winners",
    "winner",
    "with_plain_tilings",
    "with_tilings",
]
