# SPDX-License-Identifier: Apache-2.0
"""The training loop: a data order that follows from seed and epoch alone, so that a resumed run repeats the losses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, DataError, TrainingError
from tvm_convgrad.training.runtime.checkpoint import Progress
from tvm_convgrad.training.runtime.schedules import Schedule
from tvm_convgrad.training.runtime.schema import Array, finite
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.source import Batch, Order, Source


@dataclass(frozen=True)
class Updated:
    """What an update reports: loss, accuracy in its batch (None: no classes), and whether to end."""

    loss: float
    accuracy: float | None
    interrupted: bool = False


class Update(Protocol):
    """How a session is trained on the batches of an update."""

    @property
    def numbers(self) -> range:
        """The batches of an update that this process computes."""

    def __call__(self, batch: Batch, done: int, rate: float) -> Updated:
        """Train on these batches, one after another in `batch`, after so many updates, with a learning rate."""

    def cause(self, found: str) -> str:
        """What is wrong with the data of an update: what this process found, or another one; "" if nothing is."""


@dataclass(frozen=True)
class StepReport:
    """One finished step.

    Attributes:
        loss: of its batch.
        accuracy: the part of its batch that was classified rightly; None: no classes.
        lr: the learning rate.
        epoch_done: whether it was the last one of its epoch.
        waited: seconds before it in which nothing was done but to wait for its batch.
        interrupted: whether a process was asked to end.
    """

    loss: float
    accuracy: float | None
    lr: float
    epoch_done: bool
    waited: float = 0.0
    interrupted: bool = False


@dataclass(frozen=True)
class WholeStep:
    """An update by the whole step of one process."""

    session: Session
    numbers: range = range(1)

    def __call__(self, batch: Batch, done: int, rate: float) -> Updated:
        """Train on a batch."""
        inputs = batch.inputs
        loss, predictions = self.session.step(inputs if len(inputs) > 1 else inputs[0], batch.target, rate)
        return Updated(loss, accuracy_of(self.session, predictions, batch.target))

    def cause(self, found: str) -> str:
        """What was found."""
        return found


def batch_size_of(session: Session, wanted: int | None, samples: int, micro_batches: int = 1) -> int:
    """The batch size of a run: the model's fixed one, else `wanted`, else 32, times the micro-batches of an update.

    Raises:
        ArtifactError: `wanted` contradicts the fixed batch, or there are fewer samples than an update needs.
    """
    size = session.batch or wanted or 32
    if wanted not in (None, size):
        raise ArtifactError(
            f"--batch-size {wanted} contradicts {session.artifact.path}, whose batch is fixed to {size}; leave the "
            "option out, or build with --batch dynamic."
        )
    if samples < size * micro_batches:
        batches = (
            f"one batch of {size}" if micro_batches == 1 else f"the {micro_batches} batches of {size} of an update"
        )
        smaller = "build with a smaller --batch" if session.batch else "choose a smaller --batch-size"
        raise ArtifactError(f"{samples} training samples do not fill {batches}; give more samples, or {smaller}.")
    return size * micro_batches


def train(
    session: Session,
    source: Source,
    progress: Progress,
    epochs: int,
    *,
    update: Update | None = None,
    allow_nonfinite: bool = False,
) -> Iterator[StepReport]:
    """Train until `epochs` epochs are done, from where `progress` stands; it is brought up to date before each yield.

    Args:
        session: of the step.
        source: of the training samples.
        progress: where the run stands.
        epochs: in all.
        update: how the session is trained on a batch; default: by the whole step.
        allow_nonfinite: go on when a loss is not finite.

    Raises:
        TrainingError: a loss is not finite, unless `allow_nonfinite`; a DataError if the samples are the cause.
        ArtifactError: an epoch has no batch, or the step does not take one.
    """
    schedule = Schedule.parse(progress.schedule)
    update = update or WholeStep(session)
    total = progress.micro_batches
    size = progress.batch_size // total
    part = size // int(session.artifact.options.get("accumulate", 1))  # of what the step divides itself
    steps = source.steps(size, total)
    if not steps:
        raise ArtifactError(f"the data do not fill one batch of {progress.batch_size}; give more samples.")
    if progress.position >= steps:
        raise ArtifactError(
            f"{progress.position} batches of epoch {progress.epoch + 1} are done, but the data have {steps} in an "
            "epoch; go on with the data that the run was started with."
        )
    while progress.epoch < epochs:
        order = Order(progress.seed, progress.epoch, size, update.numbers.start, total, len(update.numbers))
        for batch, waited in _timed(source.batches(order, progress.position)):
            done = len(progress.losses)
            rate = progress.lr * schedule.factor(done, steps, progress.planned or epochs, progress.losses)
            found = update(batch, done, rate)
            if not math.isfinite(found.loss) and not allow_nonfinite:
                event = f"the loss became {found.loss} in step {done + 1} (epoch {progress.epoch + 1});"
                if cause := update.cause(_bad_samples(session, source, batch) or _ignored(session, batch, part)):
                    raise DataError(f"{event} {cause}: correct the data.")
                raise TrainingError(
                    f"{event} train with a smaller learning rate than {rate:g}{_indices(session, batch)}."
                )
            progress.losses.append(found.loss)
            is_last = progress.position + 1 == steps
            progress.epoch, progress.position = (
                (progress.epoch + 1, 0) if is_last else (progress.epoch, progress.position + 1)
            )
            yield StepReport(found.loss, found.accuracy, rate, is_last, waited, found.interrupted)


def _timed(batches: Iterator[Batch]) -> Iterator[tuple[Batch, float]]:
    """The batches, each with the seconds that it took to come."""
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - begin


def _indices(session: Session, batch: Batch) -> str:
    """A further possible cause if the model takes integers of which it is not known which ones are in range."""
    pairs = zip((*session.inputs, session.target), (*batch.inputs, batch.target), strict=True)
    found = [
        f"{spec.name} from {array.min()} to {array.max()}"
        for spec, array in pairs
        if array.dtype.kind in "iu" and array.size and spec.range is None
    ]
    if not found:
        return ""
    return f", or look for labels or indices that the model does not take (this batch has {', '.join(found)})"


def _bad_samples(session: Session, source: Source, batch: Batch) -> str:
    """Which samples of this batch have values that are not finite; "" if none has."""
    names = [*(spec.name for spec in session.inputs), session.target.name]
    for name, array in zip(names, (*batch.inputs, batch.target), strict=True):
        wrong = [int(sample) for sample, row in zip(batch.numbers, array, strict=True) if not is_finite(row)]
        if wrong:
            return (
                f"{name!r} of the training samples {', '.join(map(source.name, sorted(wrong)))} (counted from 0) has "
                "values that are not finite"
            )
    return ""


def _ignored(session: Session, batch: Batch, size: int) -> str:
    """That all labels of one of the micro-batches, of `size` samples each, are the ignored class; "" if none is so."""
    if session.ignored is None:
        return ""
    parts = [batch.target[at : at + size] for at in range(0, len(batch.target), size)]
    if not any((part == session.ignored).all() for part in parts):
        return ""
    return (
        f"all labels of a batch of {size} samples are {session.ignored}, the ignored class, so that its loss is a mean "
        "over none, and larger batches or other samples are needed"
    )


def is_finite(array: Array) -> bool:
    """Whether an array has neither NaN nor infinity; integers never have."""
    return array.dtype.kind in "iub" or bool(finite(array).all())


def nonfinite(state: Mapping[str, Array]) -> list[str]:
    """The names of the tensors of a state that are not finite throughout."""
    return [name for name, array in state.items() if not is_finite(array)]


def accuracy_of(session: Session, predictions: Array, target: Array) -> float | None:
    """The part of the samples, or of their pixels, whose largest prediction is of the target's class.

    Positions of the class that has no loss do not count. None if the model has no classes; NaN if nothing counts.
    """
    counts = rightly_classified(session, predictions, target)
    if counts is None:
        return None
    right, counted = counts
    return right / counted if counted else math.nan


def rightly_classified(session: Session, predictions: Array, target: Array) -> tuple[int, int] | None:
    """How many positions are rightly classified, and how many count; None if the model has no classes."""
    if session.classes is None:
        return None
    counted = np.ones(target.shape, bool) if session.ignored is None else target != session.ignored
    return int((predictions.argmax(axis=1) == target)[counted].sum()), int(counted.sum())
