# SPDX-License-Identifier: Apache-2.0
"""The training, test and validation data of a run, read from what its options name, with a bar for the decoding."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ArtifactError

if TYPE_CHECKING:  # loads numpy
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from tvm_convgrad.training.runtime.data import Samples
    from tvm_convgrad.training.runtime.images.source import ImageSource
    from tvm_convgrad.training.runtime.reader import Reader


@dataclass(frozen=True)
class RunData:
    """What a run trains on, tests with and validates with; None: there is none."""

    train: Samples | ImageSource
    test: Samples | ImageSource | None
    held_out: Samples | ImageSource | None

    @classmethod
    def read(
        cls, reader: Reader, data: Path, test_data: Path | None, validate: Path | None, *, validated: bool
    ) -> RunData:
        """Read all parts.

        Args:
            reader: for the step that is trained.
            data: that of --data, which may have all parts.
            test_data, validate: those of other data, or None.
            validated: whether there have to be samples to validate with.

        Raises:
            ArtifactError: a part is missing, damaged, or does not fit the step; options for images where there are
                arrays only; others as `Reader.read`.
        """
        train = reader.read(data, "train", given=True)
        assert train is not None  # `given` parts are there, or an error
        test = reader.read(test_data or data, "test", given=test_data is not None)
        held_out = reader.read(validate or data, "val", given=validate is not None)
        if held_out is None and (validated or validate is not None):
            raise ArtifactError(
                f"{validate or data}: there are no arrays to validate with; name them x_val and y_val, or give images "
                "in a folder val, or as --validate."
            )
        if test is None and test_data is not None:
            raise ArtifactError(f"{test_data}: there are no test arrays; name them x_test and y_test, or x and y.")
        reader.check_options_are_used()
        return cls(train, test, held_out)


class Decoding:
    """Shows how many images have been decoded before a run: a bar on a terminal, else a line when all have been."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: tuple[Bar, TaskID] | None = None
        self._begun = 0.0

    def note(self, done: int, total: int) -> None:
        """So many have been decoded."""
        from rich.progress import Progress as Bar

        from tvm_convgrad.report.tables import stderr

        if self._quiet:
            return
        if self._bar is None:
            console = stderr()
            bar = Bar(console=console, disable=not console.is_terminal, transient=True)
            self._bar, self._begun = (bar, bar.add_task("decoding images", total=total)), time.perf_counter()
            bar.start()
        bar, task = self._bar
        bar.update(task, completed=done)
        if done == total:
            self.close()
            seconds = time.perf_counter() - self._begun
            stderr().print(f"decoded {total} images in {seconds:.1f} s", markup=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


__all__ = ["Decoding", "RunData"]
