# SPDX-License-Identifier: Apache-2.0
"""`build --memory LIMIT`: the cheapest recomputation and micro-batches with which the planned memory keeps a limit.

Recomputation leaves all results as they are. So do micro-batches, but for batch norms, which take the statistics of
each, for losses that are no plain mean over the batch, and for models whose samples depend on each other. A model with
such batch norms has therefore as few micro-batches as keep the limit with any recomputation; with such a loss, or such
samples, the batch is not divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from tvm_convgrad.commands.compilation import ModelOptions
from tvm_convgrad.core.errors import ArtifactError, ModelError, UnsupportedError
from tvm_convgrad.training.model.own_loss import MODEL_LOSS

if TYPE_CHECKING:
    import tvm

    from relax_ops.per_sample.states import Mixed
    from tvm_convgrad.training.compile.planned_memory import Planner
    from tvm_convgrad.training.ir.recomputation import Recomputation
    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.model.program import TrainingProgram
    from tvm_convgrad.training.passes.rematerialise import Repeated
    from tvm_convgrad.training.runtime.memory import StepMemory
    from tvm_convgrad.training.step.module import StepModule

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]?i?B)", re.IGNORECASE)
_WEIGHTED = {"class_weights": "--class-weights", "ignore_index": "--ignore-index"}
"""Settings of a loss that is a mean over weights, of which micro-batches have different sums."""
_ATTEMPTS = 4
"""Budgets that are tried until the plan, which loses a little to gaps, keeps the limit."""


@dataclass(frozen=True)
class Fitted:
    """A way to keep a limit.

    Attributes:
        source, accumulate: what the model is read with, and its micro-batches.
        step: made of them, and its recomputation.
        memory: what is planned.
        repeated: what is computed again.
        batch: samples of a batch without the division.
        parts: into how many micro-batches each batch of the model is divided; 1 is none.
        normalises: whether batch norms take the statistics of each.
        unknown: why it is not known whether the model's samples depend on each other, or nothing.
        whole: bytes without division and recomputation.
        slower: the estimated time of a step, by that without.
    """

    source: ModelOptions
    accumulate: int
    step: StepModule
    memory: StepMemory
    repeated: Repeated
    batch: int
    parts: int
    normalises: bool
    unknown: str
    whole: int
    slower: float

    def in_words(self, limit: int) -> str:
        """What was chosen and what it costs."""
        from tvm_convgrad.report.tables import byte_count

        planned = f"{byte_count(self.memory.total)} of {byte_count(limit)}"
        if self.parts == 1 and not self.repeated.calls:
            return f"{planned} without recomputation and micro-batches"
        chosen = []
        if self.repeated.calls:
            chosen.append(f"{self.repeated.calls} values ({byte_count(self.repeated.bytes)}) are computed again")
        if self.parts > 1:
            statistics = ", by whose own statistics batch norms normalise" if self.normalises else ""
            other = f", which change results if samples depend on each other ({self.unknown})" if self.unknown else ""
            chosen.append(f"each batch as {self.parts} micro-batches of {self.batch // self.parts}{statistics}{other}")
        time = f"a step takes {self.slower:.2f} times as long (estimated)"
        return f"{planned}, not {byte_count(self.whole)}: {'; '.join(chosen)}; {time}"


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
    make: Callable[[ModelOptions, int], tuple[StepModule, Model | TrainingProgram]],
    target: tvm.target.Target,
    backends: Sequence[str],
    values: str,
) -> Fitted:
    """The cheapest way to keep a limit.

    Args:
        source: the model, whose batch may be divided.
        accumulate: micro-batches of that batch that are asked for anyhow.
        limit: bytes of state, inputs, targets and all tensors of a step at one moment.
        make: the step of a model with so many micro-batches, and the model.
        target, backends: what it is compiled for.
        values: which may be computed again, of `names.RECOMPUTED`.

    Raises:
        ArtifactError: none keeps it; the least that was found is named.
        UnsupportedError: the batch is free, or the target a GPU.
    """
    from tvm_convgrad.report.tables import byte_count
    from tvm_convgrad.training.compile.planned_memory import Planner
    from tvm_convgrad.training.ir.recomputation import Recomputation, with_recomputation
    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.model.sample_mixing import mixing_of

    first, model = make(source, accumulate)
    rows = first.inputs[0].shape[0]
    if not isinstance(rows, int):
        raise UnsupportedError(
            "--memory: the batch is symbolic, so that sizes are known only at run time; add --batch N."
        )
    batch = rows // accumulate
    normalises = first.options["bn"] != "frozen" and any(each.role == "running_stat" for each in first.state)
    least: list[tuple[int, int]] = []
    fitting: list[Fitted] = []
    whole, seconds, undivided = 0, 0.0, ""
    mixed = mixing_of(model) if isinstance(model, Model) else None
    indivisible = _indivisible(first.options, mixed)
    unknown = mixed.reason if mixed is not None and not mixed.is_known else ""
    for parts in (parts for parts in range(1, batch + 1) if batch % parts == 0):
        if parts > 1 and indivisible:
            undivided = f" without micro-batches, {indivisible}"
            break
        divided = replace(source, batch=batch // parts) if parts > 1 else source
        try:
            step = make(divided, accumulate * parts)[0] if parts > 1 else first
        except (ModelError, UnsupportedError) as error:  # a batch that the model fixes; recomputation may do
            undivided = f" without micro-batches, which the model does not take ({str(error).rstrip('.')})"
            break
        planner = Planner(step, target, backends)
        plain = planner.plan(Recomputation())
        if parts == 1:
            whole, seconds = plain[0].total, plain[1].total
        for recomputation, memory, repeated in _attempts(planner, plain, limit, values):
            least.append((memory.total, parts))
            if memory.total <= limit:
                step = replace(step, module=with_recomputation(step.module, recomputation))
                fitting.append(
                    Fitted(
                        source=divided,
                        accumulate=accumulate * parts,
                        step=step,
                        memory=memory,
                        repeated=repeated,
                        batch=batch,
                        parts=parts,
                        normalises=normalises,
                        unknown=unknown,
                        whole=whole,
                        slower=repeated.total / seconds,
                    )
                )
                break
        # Without recomputation, more micro-batches only take longer.
        if fitting and (normalises or not fitting[-1].repeated.calls):
            break
    if fitting:
        return min(fitting, key=lambda each: each.slower)
    total, parts = min(least)
    divided_into = f", with {parts} micro-batches of {batch // parts}" if parts > 1 else undivided
    raise ArtifactError(
        f"--memory {byte_count(limit)}: {source.source} takes more; the least that was found is {byte_count(total)}"
        f"{divided_into}; allow that, or build with a smaller --batch."
    )


def _indivisible(options: Mapping[str, object], mixed: Mixed | None) -> str:
    """Why the mean of the losses of micro-batches is not the loss of the batch, as a clause, or nothing.

    Args:
        options: of the step.
        mixed: how samples of the model depend on each other.
    """
    weighted = [option for name, option in _WEIGHTED.items() if name in options]
    reason = "the loss is the model's own" if options["loss"] == MODEL_LOSS else ""
    reason = f"{' and '.join(weighted)}: it is a weighted mean" if weighted else reason
    if reason:
        return f"whose losses would have another mean than the batch ({reason})"
    if mixed is not None and mixed.is_known:
        return f"as samples of a batch depend on each other ({mixed.reason})"
    return ""


def _attempts(
    planner: Planner, plain: tuple[StepMemory, Repeated], limit: int, values: str
) -> Iterator[tuple[Recomputation, StepMemory, Repeated]]:
    """Recomputations with their plans: none, then as little as may keep a limit, at last the one of least memory."""
    from tvm_convgrad.training.ir.recomputation import NONE, Recomputation

    memory, repeated = plain
    yield Recomputation(), memory, repeated
    budget = limit - memory.state - memory.batch
    if values == NONE:
        return
    for _ in range(_ATTEMPTS):
        if budget <= 0:
            break
        recomputation = Recomputation(values, budget)
        memory, repeated = planner.plan(recomputation)
        yield recomputation, memory, repeated
        over = memory.total - limit
        if over > limit // 10:  # more than gaps: this budget is out of reach
            break
        budget -= max(over, limit // 100)
    recomputation = Recomputation(values)
    yield recomputation, *planner.plan(recomputation)


__all__ = ["Fitted", "fit", "parse_size"]
