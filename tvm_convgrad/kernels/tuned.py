# SPDX-License-Identifier: Apache-2.0
"""Tuned plans, which were measured to be faster than the plan of least estimate, and the context that enables them.

A forced kernel comes before a tuned plan, and a tuned plan before the estimate. A tuned plan is one of the kernel of
least estimate, or of a kernel that is not exact where such are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.tuned import TUNED
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.contract import Plan

Winners = Callable[[ConvProblem, str, Machine, Sequence[Choice]], "Choice | None"]
"""A function of problem, direction, machine and choices: one of the choices with a tuned plan, or None."""

PlainTiling = dict[str, int | bool | str]
"""The fields of a tiling by their names, and the name of its class as "type"."""

_winners: ContextVar[Winners | None] = ContextVar("tvm_convgrad_winners", default=None)


@contextmanager
def use_winners(winners: Winners | None) -> Iterator[None]:
    """Take tuned plans from `winners` inside the block; None takes none."""
    token = _winners.set(winners)
    try:
        yield
    finally:
        _winners.reset(token)


def winner(problem: ConvProblem, direction: str, machine: Machine, choices: Sequence[Choice]) -> Choice | None:
    """The tuned plan of one of the choices, inside `use_winners`; None if there is none."""
    winners = _winners.get()
    return None if winners is None else winners(problem, direction, machine, choices)


def plain_tilings(plan: Plan) -> list[PlainTiling]:
    """The tilings of a plan as values for JSON."""
    return [
        {"type": type(tiling).__name__, **{item.name: getattr(tiling, item.name) for item in fields(tiling)}}
        for tiling in plan.tilings
    ]


def with_plain_tilings(own: Plan, plain: Sequence[PlainTiling]) -> Plan:
    """The plan with tilings that `plain_tilings` wrote.

    Raises:
        ValueError: they are not of this kernel.
    """
    if len(own.tilings) != len(plain):
        raise ValueError(f"{len(plain)} tilings for the {len(own.tilings)} of this plan")
    made = []
    for tiling, values in zip(own.tilings, plain, strict=True):
        kinds = {item.name: type(getattr(tiling, item.name)) for item in fields(tiling)}
        if set(values) != {*kinds, "type"} or values["type"] != type(tiling).__name__:
            raise ValueError(f"a tiling of other fields than {type(tiling).__name__} has")
        if any(type(values[name]) is not kind for name, kind in kinds.items()):
            raise ValueError(f"a field of {type(tiling).__name__} is of another type")
        made.append(replace(tiling, **{name: values[name] for name in kinds}))
    return replace(own, tilings=tuple(made))


__all__ = ["TUNED", "Winners", "plain_tilings", "use_winners", "winner", "with_plain_tilings"]
