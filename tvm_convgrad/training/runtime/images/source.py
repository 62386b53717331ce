# SPDX-License-Identifier: Apache-2.0
"""Indexed images as a `Source`: decoded once if they fit into memory, else in advance by other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, DataError
from tvm_convgrad.threads import CPUS
from tvm_convgrad.training.runtime.images.augment import is_quick
from tvm_convgrad.training.runtime.images.decoder import Decoder, Faults, Seeds, fill, shapes_of
from tvm_convgrad.training.runtime.images.index import ImageIndex, listed
from tvm_convgrad.training.runtime.images.options import ImageOptions, parse_augmentations
from tvm_convgrad.training.runtime.images.pillow import pillow
from tvm_convgrad.training.runtime.images.pool import Pool, batch_job
from tvm_convgrad.training.runtime.images.recipe import Recipe, check_table
from tvm_convgrad.training.runtime.images.shared import SharedArrays
from tvm_convgrad.training.runtime.schema import Array
from tvm_convgrad.training.runtime.source import Batch, Order

Note = Callable[[int, int], None]
"""Told how many images have been decoded, of how many."""

Place = tuple[Order, int]
"""A batch: the order of its epoch, and its number there."""

_AHEAD = (2, 64)
"""Batches that each process is ahead of the step, at least and at most: other work may hold it up for long."""

_SLOTS = 64 << 20
"""Bytes of batches ahead, if the least number of them allows."""

_FEW = 512
"""Images that are decoded sooner than processes have started."""


class ImageSource:
    """Images and their targets as batches of a step.

    The order and what augmentations draw follow from seed, epoch and the number of the sample; neither the number of
    processes nor where a run was resumed changes a bit.

    Attributes:
        index: which images there are.
        recipe: what is made of them.
        workers: processes that decode.
        is_kept: whether the decoded images are in memory.

    Raises:
        ArtifactError: images that are kept cannot be used: all of them are counted, the first ones named.
        SetupError: Pillow is not installed, or there is no memory or process to be had.
    """

    def __init__(self, index: ImageIndex, recipe: Recipe, options: ImageOptions, note: Note | None = None) -> None:
        pillow()
        check_table(recipe)
        self.index, self.recipe = index, recipe
        self.workers = max(1, len(CPUS) // 2) if options.workers is None else options.workers
        needed = len(index) * int(np.prod(recipe.pixels))
        self.is_kept = recipe.is_fitted_first and needed <= options.memory
        self._shared = SharedArrays.make(shapes_of(index, recipe, self.is_kept))
        fill(self._shared, index)
        self._decoder = Decoder(recipe, self._shared.arrays)
        self._ahead: _Ahead | None = None
        self._slot: Array | None = None
        if self.is_kept:
            try:
                few = options.workers is None and len(index) <= _FEW
                self._keep(0 if few else self.workers, note or (lambda done, total: None))
            except BaseException:
                self.close()
                raise

    def __len__(self) -> int:
        return len(self.index)

    @property
    def digest(self) -> str:
        """A digest of the index and the recipe."""
        return f"{self.index.digest} {self.recipe}"

    def name(self, number: int) -> str:
        """The image's path or key."""
        return self.index.names[number]

    def steps(self, size: int, total: int = 1) -> int:
        """The updates of an epoch."""
        return len(self) // (size * total)

    def batches(self, order: Order, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on, augmented.

        Raises:
            DataError: an image cannot be used; those of its batch are named.
            SetupError: a process that decodes has ended.
        """
        if not order.rows or not self._is_made_ahead(all(map(is_quick, parse_augmentations(self.recipe.augment)))):
            rows = order.numbers(len(self))[start:]
            yield from self._here(rows, (order.seed, order.epoch))
            return
        if self._ahead is None or self._ahead.size != order.rows:
            self._stop()
            self._ahead = _Ahead(self, order.rows)
        if self._ahead.next != (order, start):
            self._ahead.begin(self._jobs(order, start))
        for _ in range(start, self.steps(order.size, order.total)):
            yield self._ahead.take()

    def in_order(self, size: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """All images as they are, `size` at a time, shared out among ranks; errors as `batches`."""
        begins = range(rank * size, len(self), ranks * size)
        rows = [np.arange(first, min(first + size, len(self))) for first in begins]
        if not self._is_made_ahead(True):
            yield from self._here(rows, None)
            return
        ahead = _Ahead(self, size)
        try:
            ahead.begin(((Order(0, 0, size), number), numbers, None) for number, numbers in enumerate(rows))
            for _ in rows:
                yield ahead.take()
        finally:
            ahead.close()

    def close(self) -> None:
        """End the processes and free the memory."""
        self._stop()
        self._decoder.close()
        if self._shared.arrays:
            self._shared.close()
            self._shared.arrays.clear()

    def _is_made_ahead(self, quick: bool) -> bool:
        """Whether processes make the batches; for quick changes of what is in memory, telling them takes as long."""
        return self.workers > 0 and not (self.is_kept and quick)

    def _keep(self, workers: int, note: Note) -> None:
        """Decode all images."""
        faults: Faults = []
        if workers:
            pool = Pool(workers, self.recipe, self._shared)
            try:
                done = 0
                for images, found in pool.keep(len(self)):
                    faults += found
                    done = min(done + images, len(self))
                    note(done, len(self))
            finally:
                pool.close()
        else:
            faults = self._decoder.keep(range(len(self)))
        if faults:
            raise ArtifactError(f"{self.index.origin}: {len(faults)} of {len(self)} {self._described(faults)}")

    def _described(self, faults: Faults) -> str:
        named = listed([f"{self.name(number)} ({reason})" for number, reason in sorted(faults)])
        return f"images cannot be used: {named}; mend or remove them."

    def _here(self, rows: list[Array] | Array, seeds: Seeds | None) -> Iterator[Batch]:
        """Batches that this process makes."""
        size = max(map(len, rows), default=1) or 1
        slot = self._slot
        if slot is None or len(slot) < size:
            memory = SharedArrays.make({"slot": ((size, *self.recipe.row), self.recipe.dtype)})  # aligned: never copied
            slot = self._slot = memory.arrays["slot"]
            memory.close()  # the array has it still
        for numbers in rows:
            out = slot[: len(numbers)]
            yield self.checked(numbers, out, self._decoder.batch(numbers, seeds, out))

    def checked(self, numbers: Array, out: Array, faults: Faults) -> Batch:
        """A batch that has been written to `out`.

        Raises:
            DataError: some of its images cannot be used.
        """
        if faults:
            raise DataError(f"{self.index.origin}: {len(faults)} of the {len(numbers)} {self._described(faults)}")
        return Batch((out,), self.index.targets[numbers], numbers)

    def _jobs(self, order: Order, start: int) -> Iterator[tuple[Place, Array, Seeds]]:
        """The batches from a position on, without end: those of the next epoch are decoded while this one ends."""
        while True:
            numbers = order.numbers(len(self))
            for number in range(start, len(numbers)):
                yield (order, number), numbers[number], (order.seed, order.epoch)
            order, start = order.following, 0

    def started(self, slots: SharedArrays) -> Pool:
        """Processes that write batches to slots."""
        return Pool(self.workers, self.recipe, self._shared, slots)

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


class _Ahead:
    """Batches that processes make before they are requested, each in a slot that is used again."""

    def __init__(self, source: ImageSource, size: int) -> None:
        self.size = size
        self._source = source
        recipe = source.recipe
        least, most = (number * source.workers for number in _AHEAD)
        batch = size * int(np.prod(recipe.row)) * recipe.table.itemsize
        self._room = min(max(_SLOTS // batch, least), most)
        slots = self._room + 1  # the batch in use has one, too
        self._slots = SharedArrays.make({"slots": ((slots, size, *recipe.row), recipe.dtype)})
        self._pool = source.started(self._slots)
        self._pending: deque[tuple[Place, Array, int]] = deque()
        self._jobs: Iterator[tuple[Place, Array, Seeds | None]] = iter(())
        self._numbers = count()

    @property
    def next(self) -> Place | None:
        """The batch that `take` gives."""
        return self._pending[0][0] if self._pending else None

    def begin(self, jobs: Iterator[tuple[Place, Array, Seeds | None]]) -> None:
        """Have other batches made."""
        self._pool.drain()
        self._pending.clear()
        self._jobs = jobs
        self._fill()

    def take(self) -> Batch:
        """The next batch; the one before gives its slot back."""
        _, numbers, slot = self._pending.popleft()
        faults = self._pool.answer()
        self._fill()
        return self._source.checked(numbers, self._slots.arrays["slots"][slot][: len(numbers)], faults)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
        self._slots.close()

    def _fill(self) -> None:
        """Give jobs once half of the room is free: a process that waits for each of them wakes up on the CPU of the
        step, which then waits for the whole batch."""
        if len(self._pending) > self._room // 2:
            return
        slots = len(self._slots.arrays["slots"])
        while len(self._pending) < self._room and (job := next(self._jobs, None)) is not None:
            place, numbers, seeds = job
            slot = next(self._numbers) % slots
            self._pool.give(batch_job(slot, numbers, seeds))
            self._pending.append((place, numbers, slot))


def open_images(
    index: ImageIndex, recipe: Recipe, options: ImageOptions, part: str, note: Note | None = None
) -> ImageSource:
    """The source of a part: "train" is augmented, others are not; raises as `ImageSource`."""
    return ImageSource(index, recipe if part == "train" else replace(recipe, augment=()), options, note)


__all__ = ["ImageSource", "Note", "open_images"]
