# SPDX-License-Identifier: Apache-2.0
"""`build --memory LIMIT`: the fewest micro-batches with which the planned memory of a step keeps a limit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from tvm_convgrad.commands.compilation import ModelOptions
from tvm_convgrad.core.errors import ArtifactError, UnsupportedError

if TYPE_CHECKING:
    import tvm

    from tvm_convgrad.training.runtime.memory import StepMemory
    from tvm_convgrad.training.step.module import StepModule

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]?i?B)", re.IGNORECASE)


@dataclass(frozen=True)
class Fitted:
    """A way to keep a limit.

    Attributes:
        source, accumulate: what the model is read with, and its micro-batches.
        step: made of them.
        memory: what is planned.
        batch: samples of a batch without the division.
        parts: into how many micro-batches each batch of the model is divided; 1 is none.
        whole: bytes without the division.
        slower: the estimated time of the convolutions of a step, by that without the division.
    """

    source: ModelOptions
    accumulate: int
    step: StepModule
    memory: StepMemory
    batch: int
    parts: int
    whole: int
    slower: float | None

    def in_words(self, limit: int) -> str:
        """What was chosen and what it costs."""
        from tvm_convgrad.report.tables import byte_count

        planned = f"{byte_count(self.memory.total)} of {byte_count(limit)}"
        if self.parts == 1:
            return f"{planned} without micro-batches"
        time = "" if self.slower is None else f", convolutions take {self.slower:.2f} times as long (estimated)"
        size = self.batch // self.parts
        return (
            f"{planned}, not {byte_count(self.whole)}: each batch as {self.parts} micro-batches of {size}, by whose "
            f"own statistics batch norms normalise{time}"
        )


def parse_size(text: str | None) -> int | None:
    """The value of --memory in bytes; None: no limit.

    Raises:
        typer.BadParameter: not a positive number with a unit.
    """
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    size = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise typer.BadParameter(f"--memory {text}: give a number with a unit, such as 512MB, 1.5GB or 256MiB.")
    return size


def fit(
    source: ModelOptions,
    accumulate: int,
    limit: int,
    make: Callable[[ModelOptions, int], StepModule],
    target: tvm.target.Target,
    backends: Sequence[str],
) -> Fitted:
    """The fewest micro-batches that keep a limit.

    Args:
        source: the model, whose batch is divided.
        accumulate: micro-batches of that batch that are asked for anyhow.
        limit: bytes of state, inputs, targets and all tensors of a step at one moment.
        make: the step of a model with so many micro-batches.
        target, backends: what it is compiled for.

    Raises:
        ArtifactError: none keeps it; the least that was found is named.
        UnsupportedError: the batch is free, or the target a GPU.
    """
    from tvm_convgrad.report.tables import byte_count
    from tvm_convgrad.training.compile.planned_memory import plan_memory

    first = make(source, accumulate)
    rows = first.inputs[0].shape[0]
    if not isinstance(rows, int):
        raise UnsupportedError("--memory: the batch is free, so that sizes follow at run time; add --batch N.")
    batch = rows // accumulate
    found: list[tuple[int, int]] = []
    for parts in (parts for parts in range(1, batch + 1) if batch % parts == 0):
        divided = replace(source, batch=batch // parts) if parts > 1 else source
        step = make(divided, accumulate * parts) if parts > 1 else first
        memory = plan_memory(step, target, backends)
        found.append((memory.total, parts))
        if memory.total <= limit:
            before = _estimate(first, target, backends) if parts > 1 else None
            slower = _estimate(step, target, backends) / before if before else None
            return Fitted(divided, accumulate * parts, step, memory, batch, parts, found[0][0], slower)
    least, parts = min(found)
    raise ArtifactError(
        f"--memory {byte_count(limit)}: {source.source} needs at least {byte_count(least)}, with {parts} micro-batches "
        f"of {batch // parts}; allow that, or build with a smaller --batch."
    )


def _estimate(step: StepModule, target: tvm.target.Target, backends: Sequence[str]) -> float:
    """The estimated seconds of the convolutions of a step, on one core; 0 where there is no estimate of one."""
    from tvm_convgrad.training.compile.lower import plan_of

    estimates = [each.choice.estimate for each in plan_of(step, target, backends)]
    return sum(estimates) if all(estimates) else 0.0


__all__ = ["Fitted", "fit", "parse_size"]
