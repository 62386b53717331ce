# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rate, as strings: `cosine:warmup=5`, `step:every=30,gamma=0.1`.

A schedule gives the factor on the learning rate of a step from the number of the step, the losses before it, and the
length of the run, so a run that resumes goes on with the same rates. The formulas are those of torch.optim.lr_scheduler
with a call of `scheduler.step()` after each step of the optimizer; `step`, `multistep` and `plateau` change between
epochs, as their users call them.

    constant                                    1
    step:every=30,gamma=0.1                     StepLR: times gamma after every 30 epochs
    multistep:at=30+60,gamma=0.1                MultiStepLR: times gamma after 30 and after 60 epochs
    cosine:end=0                                CosineAnnealingLR: from 1 to `end` over the run
    linear:start=1,end=0                        LinearLR: from `start` to `end` over the run
    onecycle:up=0.3,start=0.04,end=4e-6         OneCycleLR: from `start` to 1 over a part of the run, then to `end`
    plateau:factor=0.1,patience=10              ReduceLROnPlateau: times `factor` when the mean loss of an epoch has not
                                                fallen by a part of `threshold` for more than `patience` epochs

`warmup=N` may be added to each but onecycle: over the first N epochs (a fraction, too) the rate grows linearly to what
the schedule begins with, which then has the rest of the run. A run that goes on with more epochs keeps the length that
its schedule was begun with, as the state_dict of PyTorch's schedulers does; cosine, linear and onecycle then stay at
what they end with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm_convgrad.core.errors import UnsupportedError


@dataclass(frozen=True)
class Run:
    """The position of a step in the run.

    Attributes:
        step: its number from 0, behind the warm-up.
        per_epoch: steps of an epoch.
        steps: of the run, without those of the warm-up.
        losses: of all steps before it, those of the warm-up among them.
    """

    step: int
    per_epoch: int
    steps: int
    losses: Sequence[float]

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self.step // self.per_epoch


Factor = Callable[[Run, Mapping[str, float], Sequence[float]], float]


def _constant(_run: Run, _values: Mapping[str, float], _at: Sequence[float]) -> float:
    return 1.0


def _step(run: Run, values: Mapping[str, float], _at: Sequence[float]) -> float:
    return values["gamma"] ** (run.epoch // int(values["every"]))


def _multistep(run: Run, values: Mapping[str, float], at: Sequence[float]) -> float:
    return values["gamma"] ** sum(run.epoch >= epoch for epoch in at)


def _cosine(run: Run, values: Mapping[str, float], _at: Sequence[float]) -> float:
    return values["end"] + (1 - values["end"]) * (1 + math.cos(math.pi * min(run.step / run.steps, 1.0))) / 2


def _linear(run: Run, values: Mapping[str, float], _at: Sequence[float]) -> float:
    return values["start"] + (values["end"] - values["start"]) * min(run.step / run.steps, 1.0)


def _onecycle(run: Run, values: Mapping[str, float], _at: Sequence[float]) -> float:
    peak, last = values["up"] * run.steps - 1, run.steps - 1
    if run.step <= peak or last <= peak:
        begin, end, part = values["start"], 1.0, run.step / peak if peak > 0 else 1.0
    else:
        begin, end, part = 1.0, values["end"], (run.step - peak) / (last - peak)
    return end + (begin - end) * (1 + math.cos(math.pi * min(part, 1.0))) / 2


def _plateau(run: Run, values: Mapping[str, float], _at: Sequence[float]) -> float:
    factor, best, bad = 1.0, math.inf, 0
    for epoch in range(len(run.losses) // run.per_epoch):
        mean = sum(run.losses[epoch * run.per_epoch : (epoch + 1) * run.per_epoch]) / run.per_epoch
        if mean < best * (1 - values["threshold"]):
            best, bad = mean, 0
        else:
            bad += 1
        if bad > values["patience"]:
            factor, bad = factor * values["factor"], 0
    return factor


@dataclass(frozen=True)
class _Kind:
    """A kind of schedule, the numbers that it takes and their defaults (None: it must be given), and its factor.

    `spans_run`: the factor depends on the length of the run.
    """

    factor: Factor
    values: Mapping[str, float | None] = field(default_factory=dict)
    milestones: bool = False
    spans_run: bool = False
    warms_up: bool = True


KINDS: Mapping[str, _Kind] = {
    "constant": _Kind(_constant),
    "step": _Kind(_step, {"every": None, "gamma": 0.1}),
    "multistep": _Kind(_multistep, {"gamma": 0.1}, milestones=True),
    "cosine": _Kind(_cosine, {"end": 0.0}, spans_run=True),
    "linear": _Kind(_linear, {"start": 1.0, "end": 0.0}, spans_run=True),
    "onecycle": _Kind(_onecycle, {"up": 0.3, "start": 1 / 25, "end": 1 / 25 / 1e4}, spans_run=True, warms_up=False),
    "plateau": _Kind(_plateau, {"factor": 0.1, "patience": 10.0, "threshold": 1e-4}),
}
"""By name."""

CONSTANT = "constant"
"""The schedule without any."""


@dataclass(frozen=True)
class Schedule:
    """A schedule that has been read from a text.

    Attributes:
        text: it.
        kind: one of KINDS.
        values: its numbers.
        at: epochs of `multistep`.
        warmup: epochs over which the rate grows.
    """

    text: str
    kind: str
    values: Mapping[str, float]
    at: tuple[float, ...] = ()
    warmup: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule of a text.

        Raises:
            UnsupportedError: no such kind, a name that it does not take, or no number where there must be one.
        """
        name, _, rest = text.partition(":")
        if name not in KINDS:
            raise UnsupportedError(f"schedule {text!r}: {name!r} is unknown; choose one of {', '.join(KINDS)}.")
        kind = KINDS[name]
        known = [*kind.values, *(["at"] if kind.milestones else []), *(["warmup"] if kind.warms_up else [])]
        given: dict[str, tuple[float, ...]] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key not in known or key in given:
                raise UnsupportedError(
                    f"schedule {text!r}: {name} takes {' and '.join(known) or 'nothing'}, each once, but not {part!r}."
                )
            given[key] = _numbers(text, key, value)
        at, warmup = given.pop("at", ()), given.pop("warmup", (0.0,))[0]
        values = {**kind.values, **{key: numbers[0] for key, numbers in given.items()}}
        missing = [key for key, value in values.items() if value is None]
        if missing or (kind.milestones and not at):
            wanted = f"{missing[0]}=N" if missing else "at=N+M"
            raise UnsupportedError(f"schedule {text!r}: give {wanted}, such as {_EXAMPLES[name]}.")
        numbers = {key: value for key, value in values.items() if value is not None}
        every = numbers.get("every", 1.0)
        if every < 1 or every % 1 or not 0 < numbers.get("up", 0.5) < 1:
            raise UnsupportedError(
                f"schedule {text!r}: every is a whole number of epochs, at least 1, and up a part of the run, 0 to 1."
            )
        return cls(text, name, numbers, tuple(sorted(at)), warmup)

    @property
    def spans_run(self) -> bool:
        """Whether the factor depends on the length of the run."""
        return KINDS[self.kind].spans_run

    def factor(self, step: int, per_epoch: int, epochs: int, losses: Sequence[float]) -> float:
        """The factor on the learning rate of a step.

        Args:
            step: its number from 0.
            per_epoch: steps of an epoch.
            epochs: that the schedule was laid out for.
            losses: of the steps before it.
        """
        warming = round(self.warmup * per_epoch)
        steps = max(per_epoch * epochs - warming, 1)
        behind = KINDS[self.kind].factor
        if step < warming:
            first = behind(Run(0, per_epoch, steps, ()), self.values, self.at)
            return first * (step + 1) / (warming + 1)
        return behind(Run(step - warming, per_epoch, steps, losses), self.values, self.at)


_EXAMPLES = {"step": "step:every=30,gamma=0.1", "multistep": "multistep:at=30+60,gamma=0.1"}


def _numbers(text: str, key: str, value: str) -> tuple[float, ...]:
    try:
        found = tuple(float(number) for number in value.split("+"))
    except ValueError:
        found = (math.nan,)
    if not all(math.isfinite(number) and number >= 0 for number in found) or (key != "at" and len(found) > 1):
        raise UnsupportedError(f"schedule {text!r}: {key} needs a number from 0 on, but is {value!r}.")
    return found


__all__ = ["CONSTANT", "KINDS", "Run", "Schedule"]
