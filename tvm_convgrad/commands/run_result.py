# SPDX-License-Identifier: Apache-2.0
"""What `convgrad run` does after the last step: the files that were asked for, the test, and the table."""

from __future__ import annotations

import io
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_convgrad.core.errors import TrainingError

if TYPE_CHECKING:  # loads numpy
    from tvm_convgrad.commands.running import Run
    from tvm_convgrad.training.runtime.session import Session
    from tvm_convgrad.training.runtime.source import Source

Result = dict[str, Any]
"""What a run tells, for --json."""


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and what is made of it.

    Attributes:
        run: it.
        resumed: the steps that were done before it began.
        train_samples, test_samples: how many there are.
        test: the samples to test with, or None.
        threads: that it had.
    """

    run: Run
    resumed: int
    train_samples: int
    test_samples: int
    test: Source | None
    threads: int

    def result(self) -> Result:
        """What is known without a test."""
        run, progress = self.run, self.run.progress
        found: Result = {
            "artifact": run.session.artifact.id,
            "epochs": progress.epoch,
            "steps": len(progress.losses),
            "resumed_after": self.resumed,
            "final_loss": progress.losses[-1],
            "train_samples": self.train_samples,
            "test_samples": self.test_samples,
            "threads": self.threads,
            "input_share": run.waiting.share,
        }
        if run.split is not None:
            found |= {"ranks": run.split.ranks.size, "batches_of_an_update": progress.micro_batches}
        found |= run.session.scaling
        if progress.monitor:
            found |= {"best_step": progress.best_step, f"best_{progress.monitor}": progress.best}
        return found

    def finish(self, plot: Path | None, save_state: Path | None, title: str) -> Result:
        """Write the files and test; gives the whole result. `title` is that of the plot."""
        from tvm_convgrad.training.runtime.validation import validate

        found, run = self.result(), self.run
        # The files come first, so that an error in the evaluation does not lose the trained state.
        if plot is not None:
            from tvm_convgrad.report.plot import save_loss_curve

            progress = run.progress
            save_loss_curve(plot, progress.losses, self.train_samples // progress.batch_size, title)
            found["plot"] = str(plot)
        with run.session.averaged() if run.averages else nullcontext():
            if save_state is not None:
                _save_state(run.session, save_state)
                found["state"] = str(save_state)
            tested = {} if self.test is None else validate(run.session, self.test)
        return found | {f"test_{name}": value for name, value in tested.items()}


def show(title: str, result: Result) -> None:
    """Print the table of a run's results."""
    from tvm_convgrad.report.tables import print_pairs, stderr

    print_pairs(title, ((name.replace("_", " "), _shown(value)) for name, value in result.items()))
    if not result["test_samples"]:
        stderr().print("no x_test, y_test or folder test in the data, so nothing was tested", markup=False)


def require(found: float, wanted: float) -> None:
    """Refuse a test accuracy that is not above what --require-accuracy wants. NaN, of no labels that count, is not.

    Raises:
        TrainingError: it is not.
    """
    if not found > wanted:
        remedy = "no label of the test data counts" if math.isnan(found) else "train longer, or ask for less"
        raise TrainingError(
            f"the test accuracy is {found:.4f}, not above the {wanted:g} of --require-accuracy; {remedy}."
        )


def _save_state(session: Session, path: Path) -> None:
    """Write the tensors of the session's state that predictions depend on, as .npz."""
    import numpy as np

    from tvm_convgrad.core.files import write_atomic
    from tvm_convgrad.training.runtime.schema import SAVED

    roles = {spec.name: spec.role for spec in session.artifact.state}
    kept = {name: value for name, value in session.state.items() if roles[name] in SAVED}
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=False, **kept)
    write_atomic(path, archive.getvalue())


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


__all__ = ["Trained", "require", "show"]
