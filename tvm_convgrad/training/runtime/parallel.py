# SPDX-License-Identifier: Apache-2.0
"""Data parallel training: ranks compute the gradients of their samples, and update by the mean of all of them.

An update is of `micro_batches` batches, which the ranks share out. Nothing is sent between the batches of one rank. The
gradients are then summed in the one flat buffer that they lie in, and divided by `micro_batches`, so that N ranks with
one batch each train as one rank with N of them: to the bit if the sums are in the same order, as for two ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, TrainingError
from tvm_convgrad.training.runtime.loop import Updated, rightly_classified
from tvm_convgrad.training.runtime.ranks import AVERAGE, FIRST, Alone, Ranks
from tvm_convgrad.training.runtime.schema import Array
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.source import Batch


class DataParallel:
    """A session of a split step on each rank, for the user's own training loop.

    The ranks must begin with the same state, as sessions of one artifact do, and make the same calls.

    Example, under `torchrun --nproc-per-node 2 loop.py`:

        torch.distributed.init_process_group("gloo")
        parallel = DataParallel(Session("step.so"), TorchRanks())
        for x, y in batches_of(parallel.ranks.rank):
            loss, predictions = parallel.step(x, y, lr=0.1)
        torch.distributed.destroy_process_group()    # without it PyTorch may abort the process at its end

    Attributes:
        session, ranks: as given.
        updates: done so far, from which dropout draws its masks.
    """

    def __init__(self, session: Session, ranks: Ranks | None = None, updates: int = 0) -> None:
        self.session, self.ranks, self.updates = session, ranks or Alone(), updates

    def step(self, x: Any, y: Any, lr: float | None = None) -> tuple[float, Array]:
        """Train on one batch of each rank, all of the same number of samples.

        Returns:
            The mean loss of all ranks before the update, and the predictions of this rank's batch.

        Raises:
            ArtifactError: the batches have different numbers of samples, whose mean gradient would weigh them wrongly.
                All ranks raise it, before the update.
        """
        size = self.ranks.size
        found = self.session.gradients(x, y, self.updates * size + self.ranks.rank)
        samples = (*np.shape(x[0] if isinstance(x, tuple) else x), 1)[0]
        sums = np.array([found.loss / size, samples, samples * samples])
        self.ranks.sum(sums)
        loss, total, squares = sums.tolist()
        if total * total != size * squares:
            raise ArtifactError(
                f"DataParallel.step: the batch of rank {self.ranks.rank} has {samples} samples, and those of {size} "
                f"ranks have {total:.0f}; give all ranks batches of the same size, or leave the last ones out."
            )
        self.ranks.sum(found.flat)
        np.divide(found.flat, np.float32(size), out=found.flat)
        self.session.apply(found.flat, lr)
        self.updates += 1
        return loss, found.predictions


@dataclass(frozen=True)
class ParallelStep:
    """One update of all ranks on the batches of a run; see `loop.Update`.

    Attributes:
        session: of the split step.
        ranks: who share the batches.
        micro_batches: of an update, over all ranks.
        is_interrupted: whether this rank is asked to end; all of them end with the update.
    """

    session: Session
    ranks: Ranks
    micro_batches: int
    is_interrupted: Callable[[], bool]

    @property
    def numbers(self) -> range:
        """The batches of this rank."""
        return shares(self.micro_batches, self.ranks.size)[self.ranks.rank]

    def __call__(self, batch: Batch, done: int, rate: float) -> Updated:
        """Train on this rank's batches, and on the others' gradients."""
        total, numbers = self.micro_batches, self.numbers
        losses, right = np.zeros(total), np.zeros((2, total))
        flat: Array | None = None
        for number, part in zip(numbers, _parts(batch, len(numbers)), strict=True):
            inputs = part.inputs if len(part.inputs) > 1 else part.inputs[0]
            found = self.session.gradients(inputs, part.target, done * total + number)
            losses[number] = found.loss
            counts = rightly_classified(self.session, found.predictions, part.target)
            right[:, number] = (0, 0) if counts is None else counts
            flat = found.flat if flat is None else np.add(flat, found.flat, out=flat)
        layout = self.session.artifact.flat
        assert layout is not None  # as gradients were computed, or `check_split` has said so
        flat = np.zeros(layout.size, "float32") if flat is None else flat
        told = np.concatenate([losses, right.ravel(), [float(self.is_interrupted())]])
        self.ranks.sum(told)
        self.ranks.sum(flat)
        if total > 1:
            np.divide(flat, np.float32(total), out=flat)
        self.session.apply(flat, rate)
        loss = sum(told[:total].tolist()) / total
        rightly, counted = told[total:-1].reshape(2, total).sum(axis=1).tolist()
        accuracy = None if self.session.classes is None else rightly / counted if counted else float("nan")
        return Updated(loss, accuracy, bool(told[-1]))

    def cause(self, found: str) -> str:
        """What the first rank found whose data are wrong."""
        return next(filter(None, self.ranks.gather(found)), "")


def _parts(batch: Batch, count: int) -> list[Batch]:
    """A batch in so many parts of the same number of samples."""
    size = len(batch.target) // count if count else 0
    cuts = [slice(number * size, (number + 1) * size) for number in range(count)]
    return [Batch(tuple(array[cut] for array in batch.inputs), batch.target[cut], batch.numbers[cut]) for cut in cuts]


def shares(micro_batches: int, size: int) -> list[range]:
    """The numbers of the micro-batches of each rank: consecutive ones, as many for each as can be.

    Example:
        >>> shares(4, 3)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    least, more = divmod(micro_batches, size)
    begins = [rank * least + min(rank, more) for rank in range(size + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def check_split(session: Session, what: str) -> None:
    """Refuse a step that is not split.

    Raises:
        ArtifactError: it was built without --split.
    """
    if session.artifact.flat is None:
        raise ArtifactError(f"{session.artifact.path}: {what} needs a step in two; build it with --split.")


def synchronise(session: Session, ranks: Ranks, micro_batches: int, statistics: str = AVERAGE) -> None:
    """Give all ranks the same running statistics, and check that the rest of their states is equal.

    Running statistics follow linear recurrences, so that the mean over ranks at the end is that of averaging after each
    step. It is weighted by the micro-batches of each rank.

    Args:
        session: whose state is read and written.
        ranks: who have one.
        micro_batches: of an update.
        statistics: AVERAGE, or FIRST for those of rank 0.

    Raises:
        TrainingError: parameters differ, which no sequence of the same updates does.
    """
    if ranks.size == 1:
        return
    moving = session.statistics
    digest = 0
    for name, value in session.state.items():
        if name not in moving:
            digest = zlib.crc32(value.tobytes(), digest)
    if len(set(ranks.gather(digest))) > 1:
        raise TrainingError(
            "the ranks have different parameters after the same updates; a machine among them computes wrongly, or "
            "the state of one was changed."
        )
    weight = len(shares(micro_batches, ranks.size)[ranks.rank]) / micro_batches
    if statistics == FIRST:
        weight = float(ranks.rank == 0)
    for value in moving.values():
        if value.dtype.kind == "f":
            wide = value.astype("float64") * weight
            ranks.sum(wide)
            value[...] = wide


__all__ = [
    "DataParallel",
    "ParallelStep",
    "check_split",
    "shares",
    "synchronise",
]
