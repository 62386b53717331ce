# SPDX-License-Identifier: Apache-2.0
"""When a run writes checkpoints; none is written with numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tvm_convgrad.core.errors import ArtifactError, DataError, TrainingError
from tvm_convgrad.training.runtime.checkpoint import BEST, BEST_BEFORE, Checkpoint, Progress, load, save
from tvm_convgrad.training.runtime.loop import StepReport, nonfinite
from tvm_convgrad.training.runtime.schema import Array

_NAMED = 3  # tensors that a message names


class Keeper:
    """The checkpoints of one run.

    A state with NaN or infinity is not kept, and ends the run: each later step could only spread it. Tensors that are
    not finite in the initial state, such as a mask with -inf, may stay so.

    Attributes:
        folder: of the checkpoints, or None to keep none.
        allow_nonfinite: go on in spite of NaN and infinity; the last finite checkpoint then stays beside the last two.
    """

    def __init__(
        self, folder: Path | None, every: int | None, initial: Mapping[str, Array], allow_nonfinite: bool
    ) -> None:
        self.folder, self.allow_nonfinite = folder, allow_nonfinite
        self._every = every
        self._exempt = set(nonfinite(initial))
        self._good: Path | None = None
        # The step of the best validation that the last checkpoint knows of, and that of best.ckpt; 0: none.
        self._best_known = self._best_saved = 0

    def begins(self, *, resume: bool) -> None:
        """Begin in a folder without checkpoints of steps.

        Args:
            resume: whether a run is continued, of which only the best validation was kept; that is dropped.

        Raises:
            ArtifactError: there is such a checkpoint, of another run.
        """
        if self.folder is not None and (self.folder / BEST).exists() and not resume:
            raise ArtifactError(
                f"{self.folder}: there is a {BEST} already, without checkpoints of steps; move it away, or use another "
                "folder."
            )
        self._drop(BEST, BEST_BEFORE)

    def found(self, checkpoint: Checkpoint) -> None:
        """Resume from this checkpoint, with the best validation that it knows of.

        One that was found after it is dropped: those steps are done again, perhaps with other settings. Without the
        one that it knows of, the next finite validation is the best.

        Raises:
            ArtifactError: its state is not finite.
        """
        wrong = self._wrong(checkpoint.state)
        if wrong and not self.allow_nonfinite:
            raise ArtifactError(
                f"{checkpoint.path}: the state is not finite ({wrong}); remove this checkpoint to go on from the one "
                "before it, or add --allow-nonfinite."
            )
        self._good = None if wrong else checkpoint.path
        self._restore_best(checkpoint)

    def _restore_best(self, checkpoint: Checkpoint) -> None:
        if self.folder is None:
            return
        progress = checkpoint.progress
        if progress.best is not None and progress.best_step == len(progress.losses):
            save(self.folder, progress, checkpoint.state, file=BEST)
        elif self._is_best(BEST_BEFORE, progress):
            (self.folder / BEST_BEFORE).replace(self.folder / BEST)
        elif not self._is_best(BEST, progress):
            self._drop(BEST)
            progress.best, progress.best_step, progress.stale = None, 0, 0
        self._drop(BEST_BEFORE)
        self._best_known = self._best_saved = progress.best_step

    def _is_best(self, file: str, progress: Progress) -> bool:
        """Whether this file is the checkpoint of the best validation that `progress` tells of; a damaged one is not."""
        if self.folder is None or progress.best is None or not (self.folder / file).exists():
            return False
        try:
            found = load(self.folder / file).progress
        except ArtifactError:
            return False
        return (found.best, found.best_step) == (progress.best, progress.best_step)

    def _drop(self, *files: str) -> None:
        if self.folder is not None:
            for file in files:
                (self.folder / file).unlink(missing_ok=True)

    def is_due(self, steps: int) -> bool:
        """Whether a checkpoint is to be written after so many steps, besides those at the end of epochs."""
        return self._every is not None and steps % self._every == 0

    def keep(self, progress: Progress, state: dict[str, Array]) -> None:
        """Check the state and write a checkpoint.

        Raises:
            TrainingError: the state is not finite.
            ArtifactError: the checkpoint cannot be written.
        """
        wrong = self._wrong(state)
        if wrong and not self.allow_nonfinite:
            raise TrainingError(
                f"the state is not finite after step {len(progress.losses)} ({wrong}), though its loss was, "
                f"{progress.losses[-1]:g}; train with a smaller learning rate than {progress.lr:g}.{self.kept}"
            )
        if self.folder is not None:
            path = save(self.folder, progress, state, self._good)
            self._good = self._good if wrong else path
            self._best_known = progress.best_step
            self._drop(BEST_BEFORE)

    def keep_best(self, progress: Progress, state: dict[str, Array]) -> None:
        """Write the checkpoint of the best validation, beside the others; none of a state that is not finite.

        The one before stays until a checkpoint knows of this one.
        """
        if self.folder is not None and not self._wrong(state):
            best = self.folder / BEST
            if self._best_saved == self._best_known and best.exists():
                best.replace(self.folder / BEST_BEFORE)
            self._best_saved = progress.best_step
            save(self.folder, progress, state, file=BEST)

    def best(self) -> Checkpoint:
        """The checkpoint of the best validation.

        Raises:
            ArtifactError: there is none, or it is damaged.
        """
        if self.folder is None or not (self.folder / BEST).exists():
            raise ArtifactError(f"{self.folder}: there is no {BEST}; no validation has had a finite measure yet.")
        return load(self.folder / BEST)

    def told(self, reports: Iterable[StepReport]) -> Iterator[StepReport]:
        """The reports; the message of a TrainingError gets a sentence on how to continue."""
        with self.telling():
            yield from reports

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Add how to continue to the message of a TrainingError in the block, such as that another rank has ended."""
        try:
            yield
        except DataError as error:
            place = "" if self.folder is None else f", in another folder than {self.folder}"
            raise DataError(f"{error} A run with corrected data starts from the beginning{place}.") from error
        except TrainingError as error:
            raise TrainingError(f"{error}{self.kept}") from error

    @property
    def kept(self) -> str:
        """The end of a message: the last checkpoint."""
        if self.folder is None:
            return ""
        if self._good is None:
            return f" There is no checkpoint in {self.folder} yet."
        return f" The last checkpoint, {self._good}, was written before that; --resume goes on from it."

    def _wrong(self, state: Mapping[str, Array]) -> str:
        names = [name for name in nonfinite(state) if name not in self._exempt]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more


__all__ = ["Keeper"]
