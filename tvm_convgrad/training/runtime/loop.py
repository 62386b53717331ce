# SPDX-License-Identifier: Apache-2.0
"""The training loop: a data order that follows from seed and epoch alone, so that a resumed run repeats the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, DataError, TrainingError
from tvm_convgrad.training.runtime.checkpoint import Progress
from tvm_convgrad.training.runtime.data import Samples
from tvm_convgrad.training.runtime.schedules import Schedule
from tvm_convgrad.training.runtime.schema import Array, finite
from tvm_convgrad.training.runtime.session import Session


@dataclass(frozen=True)
class Updated:
    """What an update tells: loss, part of its batch that was classified rightly (None: no classes), whether to end."""

    loss: float
    accuracy: float | None
    interrupted: bool = False


Update: TypeAlias = Callable[[Array, int, float], Updated]
"""Trains on the samples with the given numbers, after so many updates, with the given learning rate."""


@dataclass(frozen=True)
class StepReport:
    """One finished step of a run: what `Updated` has, the learning rate, whether it ends an epoch."""

    loss: float
    accuracy: float | None
    lr: float
    epoch_done: bool
    interrupted: bool = False


@dataclass(frozen=True)
class WholeStep:
    """An update by the whole step of one process."""

    session: Session
    samples: Samples

    def __call__(self, batch: Array, done: int, rate: float) -> Updated:
        """Train on the samples with these numbers."""
        inputs, target = self.samples.rows(batch)
        loss, predictions = self.session.step(inputs if len(inputs) > 1 else inputs[0], target, rate)
        return Updated(loss, accuracy_of(self.session, predictions, target))


def batches_of_epoch(seed: int, epoch: int, samples: int, batch_size: int) -> Array:
    """The sample numbers of each batch of an epoch, shape [samples // batch_size, batch_size].

    The order is a permutation drawn from `seed` and `epoch`; the samples that do not fill a batch are left out, and
    since every epoch is shuffled anew these are others each time.
    """
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    steps = samples // batch_size
    return order[: steps * batch_size].reshape(steps, batch_size)


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
        raise ArtifactError(
            f"{samples} training samples do not fill {batches}; give more samples, or build with a smaller --batch."
        )
    return size * micro_batches


def train(
    session: Session,
    samples: Samples,
    progress: Progress,
    epochs: int,
    *,
    update: Update | None = None,
    allow_nonfinite: bool = False,
) -> Iterator[StepReport]:
    """Train until `epochs` epochs are done, from where `progress` stands; it is brought up to date before each yield.

    Args:
        session: of the step.
        samples: all training samples.
        progress: where the run stands.
        epochs: in all.
        update: how the session is trained on a batch; default: by the whole step.
        allow_nonfinite: go on when a loss is not finite.

    Raises:
        TrainingError: a loss is not finite, unless `allow_nonfinite`; a DataError if the samples are the cause.
    """
    schedule = Schedule.parse(progress.schedule)
    update = update or WholeStep(session, samples)
    while progress.epoch < epochs:
        batches = batches_of_epoch(progress.seed, progress.epoch, len(samples), progress.batch_size)
        for number in range(progress.position, len(batches)):
            done = len(progress.losses)
            rate = progress.lr * schedule.factor(done, len(batches), epochs, progress.losses)
            found = update(batches[number], done, rate)
            loss = found.loss
            if not math.isfinite(loss) and not allow_nonfinite:
                event = f"the loss became {loss} in step {done + 1} (epoch {progress.epoch + 1});"
                if cause := _bad_samples(session, samples, batches[number]):
                    raise DataError(f"{event} {cause}: mend the data.")
                raise TrainingError(f"{event} train with a smaller learning rate than {rate:g}.")
            progress.losses.append(loss)
            is_last = number + 1 == len(batches)
            progress.epoch, progress.position = (progress.epoch + 1, 0) if is_last else (progress.epoch, number + 1)
            yield StepReport(loss, found.accuracy, rate, is_last, found.interrupted)


def _bad_samples(session: Session, samples: Samples, batch: Array) -> str:
    """Which samples of this batch have values that are not finite; "" if none has."""
    inputs, target = samples.rows(batch)
    names = [*(spec.name for spec in session.inputs), session.target.name]
    for name, array in zip(names, (*inputs, target), strict=True):
        wrong = [int(sample) for sample, row in zip(batch, array, strict=True) if not is_finite(row)]
        if wrong:
            return (
                f"{name!r} of the training samples {', '.join(map(str, sorted(wrong)))} (counted from 0) has values "
                "that are not finite"
            )
    return ""


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
