# SPDX-License-Identifier: Apache-2.0
"""What `convgrad run` does before the first step: it reads the data, and checks that step, data and options fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.commands.run_data import RunData
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.schedules import CONSTANT, Schedule

if TYPE_CHECKING:  # loads numpy
    from tvm_convgrad.training.runtime.checkpoint import Progress
    from tvm_convgrad.training.runtime.ranks import Ranks
    from tvm_convgrad.training.runtime.reader import Reader
    from tvm_convgrad.training.runtime.session import Session


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of `run` that decide about its beginning; names and meaning are those of the command.

    Attributes:
        validated: whether there have to be samples to validate with.
    """

    data: Path
    test_data: Path | None
    validate: Path | None
    validated: bool
    epochs: int
    lr: float | None
    schedule: str | None
    batch_size: int | None
    seed: int
    accumulate: int | None
    distributed: bool
    averages: bool
    monitor: str
    require_accuracy: float | None


@dataclass(frozen=True)
class Prepared:
    """The data of a run, and its progress if it begins again."""

    data: RunData
    fresh: Progress


def prepare(session: Session, reader: Reader, wanted: Wanted, ranks: Ranks) -> Prepared:
    """Read and check all that a run needs.

    Raises:
        ArtifactError: the data are missing, damaged or do not fit the step, or an option asks for what the step or the
            data do not have; others as `Reader.read`.
    """
    from tvm_convgrad.training.runtime.checkpoint import Progress
    from tvm_convgrad.training.runtime.loop import batch_size_of
    from tvm_convgrad.training.runtime.parallel import check_split
    from tvm_convgrad.training.runtime.validation import check_measure, check_samples

    if wanted.distributed or wanted.accumulate is not None:
        check_split(session, "--distributed" if wanted.distributed else "--accumulate")
    if wanted.averages:
        with session.averaged():
            pass  # or it raises
    data = RunData.read(reader, wanted.data, wanted.test_data, wanted.validate, validated=wanted.validated)
    if data.held_out is not None:
        check_measure(session, wanted.monitor)
        check_samples(session, len(data.held_out), "validation")
    if data.test is not None:
        check_samples(session, len(data.test), "test")
    if wanted.require_accuracy is not None and (data.test is None or session.classes is None):
        raise ArtifactError(
            "--require-accuracy needs test arrays x_test and y_test with class numbers; there are none."
        )
    parts = ranks.size * (wanted.accumulate or 1)
    # One batch: whether there are those of an update is checked when the checkpoint has said how many they are.
    size = batch_size_of(session, wanted.batch_size, len(data.train))
    rates = Schedule.parse(wanted.schedule or CONSTANT)
    fresh = Progress(
        session.artifact.id,
        data.train.digest,
        wanted.seed,
        size * parts,
        float(session.artifact.options["lr"] if wanted.lr is None else wanted.lr),
        rates.text,
        micro_batches=parts,
        planned=wanted.epochs if rates.spans_run else 0,
        step=session.artifact.step,
    )
    return Prepared(data, fresh)


__all__ = ["Prepared", "Wanted", "prepare"]
