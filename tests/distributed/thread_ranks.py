# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process, so that any number of them can be tried in a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tvm_convgrad.training.runtime.ranks import Ranks
from tvm_convgrad.training.runtime.schema import Array

T = TypeVar("T")


class ThreadRanks:
    """One rank; what it gives the others lies in a list that all share."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def gather(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()  # before anyone writes the next value
        return found

    def first(self, value: T) -> T:
        return self.gather(value)[0]

    def sum(self, array: Array) -> None:
        total = sum(self.gather(array.copy()))
        array[...] = total


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` returns on each of so many ranks; the first error of one that did not just wait is raised."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, size, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
