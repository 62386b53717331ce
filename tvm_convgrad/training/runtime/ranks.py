# SPDX-License-Identifier: Apache-2.0
"""The processes that train together, each of which is a rank; one process alone is the case of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from tvm_convgrad.core.errors import ArtifactError

if TYPE_CHECKING:  # loads numpy, which the options of a command do without
    from tvm_convgrad.training.runtime.schema import Array

AVERAGE, FIRST = STATISTICS = ("average", "first")
"""What becomes of running statistics, which each rank moves by its own batches: their mean, or those of rank 0."""

TIMEOUT = 300.0
"""Seconds that a rank waits for the others. It has to be longer than anything that one does while others wait."""

T = TypeVar("T")


class Ranks(Protocol):
    """What ranks do together. Every rank calls the same methods in the same order.

    Attributes:
        rank: the number of this one, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def sum(self, array: Array) -> None:
        """Replace each element of a contiguous array by its sum over all ranks; all ranks get the same bits."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""

    def first(self, value: T) -> T:
        """The value of rank 0."""


class Alone:
    """One process, which is rank 0 of 1."""

    rank = 0
    size = 1

    def sum(self, array: Array) -> None:
        """Leaves the array as it is: one rank's values are the sum."""

    def gather(self, value: T) -> list[T]:
        """A list with the one value."""
        return [value]

    def first(self, value: T) -> T:
        """The value."""
        return value


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Let an error of one rank inside the block end all of them, each with the sentence.

    Nothing inside may wait for another rank.

    Raises:
        ArtifactError: another rank failed. The error of this rank is raised as it is.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    texts = ranks.gather(None if own is None else str(own))
    if own is not None:
        raise own
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise ArtifactError(failed[0])


def check_agreement(ranks: Ranks, settings: Mapping[str, object]) -> None:
    """Check that all ranks have the same step, data and options.

    Args:
        ranks: who must agree.
        settings: what they must agree on, by name.

    Raises:
        ArtifactError: a rank has another value; all ranks raise it, with the first difference.
    """
    everyone = ranks.gather(dict(settings))
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise ArtifactError(
                    f"the ranks disagree on {name}: rank 0 has {value}, rank {rank} has {other[name]}; start all of "
                    "them with the same step, data and options."
                )


__all__ = ["AVERAGE", "FIRST", "STATISTICS", "TIMEOUT", "Alone", "Ranks", "check_agreement", "together"]
