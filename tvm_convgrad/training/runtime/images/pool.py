# SPDX-License-Identifier: Apache-2.0
"""Processes that decode images in advance: the side of the process that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.threads import CPUS
from tvm_convgrad.training.runtime.images.decoder import Faults, Seeds, setup_of
from tvm_convgrad.training.runtime.images.recipe import Recipe
from tvm_convgrad.training.runtime.images.shared import SharedArrays
from tvm_convgrad.training.runtime.schema import Array

_KEPT_AHEAD = 2
"""Jobs of decoding once that each process has been given and not answered."""

_PIECE = 64
"""Images of a job that decodes them once."""

# A process of its own, not a fork: TVM's threads do not survive one; nor by multiprocessing, which would run the script
# of a user again.
_START = (
    "import sys; fd, cpus, sys.path[:] = int(sys.argv[1]), sys.argv[2], sys.argv[3:]; "
    "from tvm_convgrad.training.runtime.images.worker import serve; serve(fd, [int(n) for n in cpus.split(',')])"
)


class Pool:
    """Some processes; jobs go to them in turns, and answers come in the order of the jobs."""

    def __init__(self, workers: int, recipe: Recipe, *shared: SharedArrays) -> None:
        """Start them; they share the arrays of `shared`. They import while this process goes on."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._given: deque[int] = deque()
        self._next = 0
        try:
            for _ in range(workers):
                self._start(setup_of(recipe, *shared), [each.descriptor for each in shared])
        except OSError as error:
            self.close()
            raise SetupError(f"{workers} processes for images cannot be started ({error.strerror}).") from error

    def give(self, job: tuple[object, ...]) -> None:
        """Give a job to the next process."""
        worker = self._next
        try:
            self._connections[worker].send(job)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended(worker) from None
        self._given.append(worker)
        self._next = (worker + 1) % len(self._processes)

    def answer(self) -> Faults:
        """The answer to the oldest job.

        Raises:
            SetupError: its process has ended.
        """
        worker = self._given.popleft()
        try:
            faults: Faults = self._connections[worker].recv()
        except (EOFError, ConnectionResetError):
            raise self._ended(worker) from None
        return faults

    def keep(self, images: int) -> Iterator[tuple[int, Faults]]:
        """Decode all images into the shared array; yields how many are done, and which of them cannot be used."""
        pieces = [(first, min(first + _PIECE, images)) for first in range(0, images, _PIECE)]
        for number, (first, end) in enumerate(pieces):
            self.give(("keep", first, end))
            if number >= _KEPT_AHEAD * len(self._processes):
                yield _PIECE, self.answer()
        while self._given:
            yield _PIECE, self.answer()

    def drain(self) -> None:
        """Wait for all answers, and drop them."""
        while self._given:
            self.answer()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._connections = [], []
        self._given.clear()

    def _start(self, setup: dict[str, Any], descriptors: list[int]) -> None:
        ours, theirs = Pipe()
        with theirs:
            cpus = ",".join(map(str, sorted(CPUS)))
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), cpus, *sys.path],
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which finishes its step and still needs batches
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._processes.append(process)
        self._connections.append(ours)
        ours.send(setup)

    def _ended(self, worker: int) -> SetupError:
        code = self._processes[worker].wait()
        return SetupError(
            f"a process that decodes images has ended ({f'signal {-code}' if code < 0 else f'exit code {code}'}); is "
            "there memory enough for it? Train with fewer --workers, or with --workers 0, which starts none."
        )


def batch_job(slot: int, numbers: Array, seeds: Seeds | None) -> tuple[object, ...]:
    """The job to write images into a slot."""
    return ("batch", slot, numbers, seeds)


__all__ = ["Pool", "batch_job"]
