# SPDX-License-Identifier: Apache-2.0
"""A run's history in files: JSON lines, and events for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tvm_convgrad.core.errors import ArtifactError, SetupError
from tvm_convgrad.core.files import check_destination, write_atomic
from tvm_convgrad.core.json_text import json_text
from tvm_convgrad.training.runtime.loop import StepReport


class Journal(Protocol):
    """What is recorded of each step and each validation."""

    def step(self, number: int, epoch: int, report: StepReport) -> None:
        """After step `number`, counted from 1, of an epoch counted from 1."""

    def validation(self, number: int, measures: Mapping[str, float], is_best: bool) -> None:
        """A validation after step `number`."""

    def close(self) -> None:
        """Called at the end of the run."""


class JsonLines:
    """One JSON object a line: `{"step", "epoch", "loss", "lr", "accuracy"}`, `{"step", "validation", "best"}`.

    Numbers that are not finite are null. A run that is resumed after step `resumed` keeps the lines up to there.
    """

    def __init__(self, path: Path, resumed: int) -> None:
        check_destination(path)
        try:
            kept = (
                [line for line in path.read_text("utf-8").splitlines() if _is_before(line, resumed)] if resumed else []
            )
        except (FileNotFoundError, UnicodeDecodeError):
            kept = []
        write_atomic(path, "".join(f"{line}\n" for line in kept).encode())
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ArtifactError(f"{path}: the log cannot be written ({error.strerror}).") from error

    def step(self, number: int, epoch: int, report: StepReport) -> None:
        """One line."""
        line: dict[str, object] = {"step": number, "epoch": epoch, "loss": report.loss, "lr": report.lr}
        self._write(line if report.accuracy is None else line | {"accuracy": report.accuracy})

    def validation(self, number: int, measures: Mapping[str, float], is_best: bool) -> None:
        """One line."""
        self._write({"step": number, "validation": dict(measures), "best": is_best})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json_text(line, indent=None) + "\n")
        self._file.flush()


def _is_before(line: str, resumed: int) -> bool:
    """Whether a line is one of ours, of a step up to `resumed`; the last one of a killed run may be cut off."""
    try:
        return 0 < int(json.loads(line)["step"]) <= resumed
    except (ValueError, KeyError, TypeError):
        return False


class TensorBoard:
    """Scalars `train/loss`, `train/lr`, `train/accuracy` and `validation/…` in a folder that TensorBoard shows.

    A run that is resumed goes on behind the step it is resumed after; TensorBoard drops what was logged behind that.

    Raises:
        SetupError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, resumed: int) -> None:
        try:
            from tensorboardX import SummaryWriter  # optional
        except ModuleNotFoundError as error:
            raise SetupError("--tensorboard needs tensorboardX: pip install 'tvm-convgrad[tensorboard]'.") from error
        if folder.exists() and not folder.is_dir():
            raise ArtifactError(f"{folder}: a file is in the place of the folder for TensorBoard; name another.")
        self._writer = SummaryWriter(str(folder), purge_step=resumed + 1 if resumed else None)

    def step(self, number: int, epoch: int, report: StepReport) -> None:
        """Loss, learning rate, accuracy."""
        self._writer.add_scalar("train/loss", report.loss, number)
        self._writer.add_scalar("train/lr", report.lr, number)
        if report.accuracy is not None:
            self._writer.add_scalar("train/accuracy", report.accuracy, number)

    def validation(self, number: int, measures: Mapping[str, float], is_best: bool) -> None:
        """All measures."""
        for name, value in measures.items():
            self._writer.add_scalar(f"validation/{name}", value, number)
        self._writer.flush()

    def close(self) -> None:
        """Write what has not been written yet."""
        self._writer.close()


def open_journals(log: Path | None, tensorboard: Path | None, resumed: int) -> list[Journal]:
    """The journals that the options of a run name.

    Args:
        log: the file for JSON lines.
        tensorboard: the folder for TensorBoard.
        resumed: the steps that were done before.
    """
    journals: list[Journal] = []
    if log is not None:
        journals.append(JsonLines(log, resumed))
    if tensorboard is not None:
        journals.append(TensorBoard(tensorboard, resumed))
    return journals
