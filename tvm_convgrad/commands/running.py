# SPDX-License-Identifier: Apache-2.0
"""A run from its start or from a checkpoint to its end, with a progress bar; `convgrad run` is made of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ArtifactError

if TYPE_CHECKING:  # loads numpy
    from tvm_convgrad.training.runtime.checkpoint import Progress
    from tvm_convgrad.training.runtime.journal import Journal
    from tvm_convgrad.training.runtime.keeper import Keeper
    from tvm_convgrad.training.runtime.loop import StepReport, Update
    from tvm_convgrad.training.runtime.ranks import Ranks
    from tvm_convgrad.training.runtime.session import Session
    from tvm_convgrad.training.runtime.source import Source
    from tvm_convgrad.training.runtime.watch import Watch


@dataclass(frozen=True)
class Kept:
    """Which settings of a checkpoint stay, as this command was given no others."""

    rate: bool
    schedule: bool
    micro_batches: bool


def begin(session: Session, fresh: Progress, keeper: Keeper, kept: Kept, epochs: int, *, resume: bool) -> Progress:
    """The progress to start from: that of a checkpoint, whose state the session then has, or `fresh`.

    Args:
        session: of the step that is trained.
        fresh: the progress of a run that begins, with what this command was given.
        keeper: of the checkpoints.
        kept: what of a checkpoint's settings stays.
        epochs: of the run, that of before --resume included.
        resume: whether to go on from a checkpoint.

    Raises:
        ArtifactError: there are checkpoints and `resume` is False, or they are of another run.
    """
    from tvm_convgrad.report.tables import stderr
    from tvm_convgrad.training.runtime.checkpoint import load_latest

    if keeper.folder is None:
        return fresh
    checkpoint, complaints = load_latest(keeper.folder)
    for complaint in complaints:
        stderr().print(f"passed over: {complaint}", markup=False)
    if checkpoint is None:
        keeper.begins(resume=resume)
        return fresh
    if not resume:
        raise ArtifactError(
            f"{keeper.folder}: there are checkpoints already; add --resume to continue, or use another folder."
        )
    found = checkpoint.progress
    for what, name, old, new in (
        ("the step", "artifact", found.artifact, fresh.artifact),
        ("the training data", "data", found.data, fresh.data),
        ("the seed", "seed", found.seed, fresh.seed),
        ("the batch size", "batch_size", *(each.batch_size // each.micro_batches for each in (found, fresh))),
        ("the number of batches of an update", "micro_batches", found.micro_batches, fresh.micro_batches),
    ):
        if name == "artifact" and old != new and found.is_of(fresh.artifact, fresh.step):
            stderr().print(f"{checkpoint.path}: of a build for another machine", markup=False)
        elif name == "data" and not old:
            stderr().print(f"{checkpoint.path}: a C program has trained on data of its own", markup=False)
        elif old != new and not (name == "micro_batches" and kept.micro_batches):
            raise ArtifactError(
                f"{checkpoint.path}: {what} differs from that of the checkpoint ({name} {old}, now {new}), so the run "
                "cannot be resumed; use the original one, or another --checkpoint-dir."
            )
    keeper.found(checkpoint)
    session.state = checkpoint.state
    found.artifact, found.data, found.step = fresh.artifact, fresh.data, fresh.step
    found.lr = found.lr if kept.rate else fresh.lr
    if not kept.schedule:
        found.schedule, found.planned = fresh.schedule, fresh.planned
    elif found.planned not in (0, epochs):
        stderr().print(
            f"the schedule {found.schedule} goes on over the {found.planned} epochs that it was begun with, not the "
            f"{epochs} of --epochs; give --schedule, too, to lay it out for these",
            markup=False,
            soft_wrap=True,
        )
    stderr().print(f"going on after step {len(found.losses)}, from {checkpoint.path}", markup=False)
    return found


_SILENCE = 30.0
"""Seconds after which a run in which no epoch ends says how far it is, where there is no terminal for a bar."""


class End(Enum):
    """How a run ended."""

    DONE = "all epochs are done"
    STOPPED = "the validations got no better"
    INTERRUPTED = "Ctrl-C, or SIGTERM to a rank"


@dataclass(frozen=True)
class Split:
    """How a split step is trained.

    Attributes:
        ranks: who train.
        statistics: what becomes of their running statistics, one of `ranks.STATISTICS`.
    """

    ranks: Ranks
    statistics: str


@dataclass
class Waiting:
    """How long a run has trained, and waited for its data meanwhile, in seconds."""

    waited: float = 0.0
    trained: float = 0.0

    @property
    def share(self) -> float:
        """The part of the time that was spent waiting."""
        return self.waited / self.trained if self.trained else 0.0


@dataclass(frozen=True)
class Run:
    """What is trained, on what, and what is kept and told of it.

    Attributes:
        session, samples: the step and the training data.
        progress: where the run stands, which `train` brings up to date.
        epochs: in all.
        keeper: of the checkpoints.
        held_out: the samples of the validations; None: there are none.
        validate_every: steps between validations; None: those of an epoch.
        watch: which validation is the best, and when the run ends before its last epoch.
        journals: what is told of each step and validation.
        quiet: whether nothing is printed.
        averages: whether the averages of the parameters are validated.
        split: how a split step is trained by several ranks, or by several batches an update; None: the whole step.
        waiting: how long the steps waited for their data, which `train` counts.
    """

    session: Session
    samples: Source
    progress: Progress
    epochs: int
    keeper: Keeper
    held_out: Source | None
    validate_every: int | None
    watch: Watch
    journals: Sequence[Journal]
    quiet: bool
    averages: bool = False
    split: Split | None = None
    waiting: Waiting = field(default_factory=Waiting)

    def train(self) -> End:
        """Train with a progress bar; write checkpoints when they are due and at Ctrl-C."""
        from tvm_convgrad.training.runtime.loop import train

        progress, keeper = self.progress, self.keeper
        if self.watch.is_over(progress):
            return End.STOPPED
        with _interruptions(self._signals) as interrupted, self._bar() as show:
            update = self._update(interrupted.is_set)
            reports = train(
                self.session,
                self.samples,
                progress,
                self.epochs,
                update=update,
                allow_nonfinite=keeper.allow_nonfinite,
            )
            for report in self._timed(keeper.told(reports)):
                steps = len(progress.losses)
                epoch = progress.epoch + (0 if report.epoch_done else 1)
                for journal in self.journals:
                    journal.step(steps, epoch, report)
                show(report)
                validated = self.held_out is not None and self._is_validated(report, steps)
                if validated:
                    self._validate(steps)
                over = validated and self.watch.is_over(progress)
                # Ranks must end together, so that what counts is what all of them were told in the update.
                ended = interrupted.is_set() if self.split is None else report.interrupted
                if report.epoch_done or keeper.is_due(steps) or over or ended:
                    self._synchronise()
                    keeper.keep(progress, self.session.state)
                if ended:
                    return End.INTERRUPTED
                if over:
                    return End.STOPPED
        return End.DONE

    @property
    def _signals(self) -> tuple[signal.Signals, ...]:
        """Launchers of ranks end them by SIGTERM."""
        return (signal.SIGINT,) if self.split is None else (signal.SIGINT, signal.SIGTERM)

    def _update(self, is_interrupted: Callable[[], bool]) -> Update | None:
        """How the session is trained on a batch; None: by the whole step."""
        from tvm_convgrad.training.runtime.parallel import ParallelStep

        if self.split is None:
            return None
        return ParallelStep(self.session, self.split.ranks, self.progress.micro_batches, is_interrupted)

    def _synchronise(self) -> None:
        """Give all ranks the same running statistics, before they are read."""
        from tvm_convgrad.training.runtime.parallel import synchronise

        if self.split is not None:
            with self.keeper.telling():
                synchronise(self.session, self.split.ranks, self.progress.micro_batches, self.split.statistics)

    def _timed(self, reports: Iterator[StepReport]) -> Iterator[StepReport]:
        """The reports; the time that each took to come is counted, and what of it was waiting."""
        while True:
            begin = time.perf_counter()
            report = next(reports, None)
            if report is None:
                return
            self.waiting.trained += time.perf_counter() - begin
            self.waiting.waited += report.waited
            yield report

    def _is_validated(self, report: StepReport, steps: int) -> bool:
        return report.epoch_done if self.validate_every is None else steps % self.validate_every == 0

    def _validate(self, steps: int) -> None:
        from tvm_convgrad.report.tables import stderr
        from tvm_convgrad.training.runtime.validation import validate

        assert self.held_out is not None
        self._synchronise()
        with self.keeper.telling(), self.session.averaged() if self.averages else nullcontext():
            measures = validate(self.session, self.held_out, self.split.ranks if self.split else None)
        best = self.watch.note(self.progress, measures)
        for journal in self.journals:
            journal.validation(steps, measures, best)
        if best:
            self.keeper.keep_best(self.progress, self.session.state)
        if not self.quiet:
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in measures.items())
            stderr().print(f"validation after step {steps}: {shown}{' (best)' if best else ''}", markup=False)

    @contextmanager
    def _bar(self) -> Iterator[Callable[[StepReport], None]]:
        """A function that shows a step: in a bar on a terminal, else a line each half minute; a line for each epoch."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from tvm_convgrad.report.tables import stderr

        progress, size = self.progress, self.progress.batch_size
        per_epoch = self.samples.steps(size)
        total = self.epochs * per_epoch
        console = stderr()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
        )
        found: list[float] = []
        begun, first = time.perf_counter(), len(progress.losses)
        told = begun
        with Bar(*columns, console=console, disable=self.quiet or not console.is_terminal) as bar:
            task = bar.add_task("steps", total=total, completed=first, state="")

            def show(report: StepReport) -> None:
                nonlocal told
                steps = len(progress.losses)
                found.extend([] if report.accuracy is None else [report.accuracy])
                accuracy = f", accuracy {sum(found) / len(found):.3f}" if found else ""
                now = time.perf_counter()
                rate = (steps - first) * size / (now - begun)
                state = f"epoch {progress.epoch}, loss {report.loss:.4f}{accuracy}, lr {report.lr:.3g}, {rate:.3g}/s"
                bar.update(task, completed=steps, state=state)
                left = timedelta(seconds=round((total - steps) * size / rate))
                pace = f"{rate:.3g}/s, {left} left, waited {self.waiting.share:.1%}"
                line = ""
                if report.epoch_done:
                    mean = sum(progress.losses[-per_epoch:]) / per_epoch
                    line = f"epoch {progress.epoch}/{self.epochs}: mean loss {mean:.4f}{accuracy} (while training)"
                    found.clear()
                elif not console.is_terminal and now - told >= _SILENCE:
                    line = f"step {steps}/{total}, epoch {progress.epoch + 1}: loss {report.loss:.4f}{accuracy}"
                if line and not self.quiet:
                    bar.console.print(f"{line}, {pace}", markup=False, soft_wrap=True)
                    told = now

            yield show


@contextmanager
def _interruptions(signals: Sequence[signal.Signals]) -> Iterator[threading.Event]:
    """An event that these signals set, so that the step in progress is finished and its checkpoint written."""
    event = threading.Event()
    before = {each: signal.signal(each, lambda _number, _frame: event.set()) for each in signals}
    try:
        yield event
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
