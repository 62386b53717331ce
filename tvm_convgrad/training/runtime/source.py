# SPDX-License-Identifier: Apache-2.0
"""Sources of batches: the order of an epoch, the contract of a source of samples, and batches of user code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, DataError
from tvm_convgrad.training.runtime.arrays import as_array
from tvm_convgrad.training.runtime.schema import Array


class Batch(NamedTuple):
    """Inputs and targets with one sample a row, and the numbers of these samples; valid until the next is requested."""

    inputs: tuple[Array, ...]
    target: Array
    numbers: Array


@dataclass(frozen=True)
class Order:
    """Which samples make up the batches of an epoch for one of several ranks; it follows from these numbers alone.

    An update is of `total` batches, which are consecutive parts of a piece of a permutation that all ranks share, and
    of which each rank has `count`. So the ranks together train on what one rank with all of the batches would.

    Attributes:
        seed, epoch: from which the permutation is drawn; epochs count from 0.
        size: samples of a batch.
        first, total: the first of the rank's batches in an update, and how many batches all ranks have.
        count: the batches of the rank in an update; none, if there are more ranks than batches.
    """

    seed: int
    epoch: int
    size: int
    first: int = 0
    total: int = 1
    count: int = 1

    @property
    def rows(self) -> int:
        """The samples that the rank has in an update."""
        return self.size * self.count

    def steps(self, samples: int) -> int:
        """The updates of the epoch; the samples that do not fill one are omitted."""
        return samples // (self.size * self.total)

    def numbers(self, samples: int) -> Array:
        """The numbers of the samples that the rank has in each update, shape [steps, rows].

        >>> Order(seed=0, epoch=0, size=2, first=1, total=2).numbers(9).shape
        (2, 2)
        """
        whole = batches_of_epoch(self.seed, self.epoch, samples, self.size * self.total)
        begin = self.first * self.size
        return np.ascontiguousarray(whole[:, begin : begin + self.rows])

    @property
    def following(self) -> Order:
        """That of the next epoch."""
        return replace(self, epoch=self.epoch + 1)


def batches_of_epoch(seed: int, epoch: int, samples: int, batch_size: int) -> Array:
    """The sample numbers of each batch of an epoch, shape [samples // batch_size, batch_size].

    The order is a permutation drawn from `seed` and `epoch`; the samples that do not fill a batch are omitted, and
    since every epoch is shuffled again these are others each time.
    """
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    steps = samples // batch_size
    return order[: steps * batch_size].reshape(steps, batch_size)


class Source(Protocol):
    """Samples of a run. The same order gives the same batches, bit for bit, from any position in the epoch."""

    @property
    def digest(self) -> str:
        """A digest of the data; a run resumes only with equal data."""

    def steps(self, size: int, total: int = 1) -> int:
        """The updates of an epoch, each of `total` batches of `size` samples."""

    def batches(self, order: Order, start: int = 0) -> Iterator[Batch]:
        """What the rank has in each update of an epoch, shuffled and augmented, from update `start` on."""

    def in_order(self, size: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """All samples as they are, `size` at a time and fewer at last: for validation and tests.

        Of several ranks each has every `ranks`-th of these batches, from number `rank` on.
        """

    def name(self, number: int) -> str:
        """The name of a sample in messages."""

    def close(self) -> None:
        """End the processes that it has started."""


@dataclass(frozen=True)
class IterableSource:
    """Batches that a program of the user makes: of a list, a DataLoader, or a function that gives them for an epoch.

    Each is a tuple (x, …, target) of arrays of numpy, PyTorch, JAX or TVM. An update of several takes them in turn. A
    run that resumes in the midst of an epoch passes over the first batches of that epoch, so they have to come in the
    same order again: draw the shuffle from the number of the epoch.

    Attributes:
        make: what is iterated in each epoch, or a function of the epoch's number, from 0, that gives it.
        count: the batches of an epoch; None: its len().
        digest: of the data; a run resumes only with equal data.

    Raises:
        ArtifactError: an iterator, which would be used up after one epoch; or no number of batches.

    >>> source = IterableSource(lambda epoch: [(np.full((2, 1), epoch), np.zeros(2))] * 3, count=3)
    >>> [batch.inputs[0][0, 0] for batch in source.batches(Order(seed=0, epoch=4, size=2), start=1)]
    [np.int64(4), np.int64(4)]
    """

    make: Callable[[int], Iterable[Sequence[Any]]] | Iterable[Sequence[Any]]
    count: int | None = None
    digest: str = "iterable"

    def __post_init__(self) -> None:
        if isinstance(self.make, Iterator):
            raise ArtifactError(
                f"batches from an iterator ({type(self.make).__name__}) are used up after one epoch; give a list, a "
                "loader, or a function of the epoch's number that makes the iterator."
            )
        if self.count is None and not hasattr(self.make, "__len__"):
            raise ArtifactError(
                "the number of batches of an epoch is unknown, as what gives them has no len(); give it as count=."
            )

    def steps(self, size: int, total: int = 1) -> int:
        """The updates of an epoch; `size` is not used, as the user's program makes the batches."""
        count = len(self.make) if self.count is None else self.count  # type: ignore[arg-type]
        return count // total

    def batches(self, order: Order, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch as the user's program gives them.

        Raises:
            DataError: there are fewer than announced.
            ArtifactError: one is not a tuple of arrays.
        """
        steps, total = self.steps(order.size, order.total), order.total
        rows = islice(self._of_epoch(order.epoch), start * total, None)
        for step in range(start, steps):
            update = [self._batch(row, step * total + place) for place, row in enumerate(islice(rows, total))]
            if len(update) < total:
                raise DataError(
                    f"epoch {order.epoch + 1} of the data had {step * total + len(update)} batches, but "
                    f"{self.steps(order.size)} were announced; give the number that every epoch has as count=."
                )
            yield _joined(update[order.first : order.first + order.count] or [_none_of(update[0])])

    def in_order(self, size: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """The batches of epoch 0."""
        for number, row in islice(enumerate(self._of_epoch(0)), rank, None, ranks):
            yield self._batch(row, number)

    def name(self, number: int) -> str:
        """The sample's place in its batch."""
        return f"{number} of its batch"

    def close(self) -> None:
        """Nothing needs to be closed."""

    def _of_epoch(self, epoch: int) -> Iterable[Sequence[Any]]:
        return self.make(epoch) if callable(self.make) else self.make

    def _batch(self, row: Sequence[Any], number: int) -> Batch:
        if not isinstance(row, tuple | list) or len(row) < 2:
            raise ArtifactError(
                f"batch {number} of the data is a {type(row).__name__}; give a tuple (x, ..., target) of arrays."
            )
        arrays = [as_array(array, f"an array of batch {number} of the data") for array in row]
        if not arrays[-1].ndim:
            raise ArtifactError(f"the target of batch {number} of the data is a single number; give one row a sample.")
        return Batch(tuple(arrays[:-1]), arrays[-1], np.arange(len(arrays[-1])))


def _joined(batches: Sequence[Batch]) -> Batch:
    """Several batches as one."""
    if len(batches) == 1:
        return batches[0]
    inputs = tuple(np.concatenate(parts) for parts in zip(*(batch.inputs for batch in batches), strict=True))
    targets, numbers = [batch.target for batch in batches], [batch.numbers for batch in batches]
    return Batch(inputs, np.concatenate(targets), np.concatenate(numbers))


def _none_of(batch: Batch) -> Batch:
    """A batch without samples."""
    return Batch(tuple(array[:0] for array in batch.inputs), batch.target[:0], batch.numbers[:0])


__all__ = ["Batch", "IterableSource", "Order", "Source", "batches_of_epoch"]
