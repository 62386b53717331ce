# SPDX-License-Identifier: Apache-2.0
"""`convgrad run`: trains with a compiled step, leaves checkpoints, and goes on from them."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.errors import ArtifactError, TrainingError

if TYPE_CHECKING:
    from tvm_convgrad.training.checkpoint import Progress
    from tvm_convgrad.training.data import Samples
    from tvm_convgrad.training.keeper import Keeper
    from tvm_convgrad.training.session import Session

SAVED = ("parameter", "frozen", "running_stat")
"""Roles of the tensors that --save-state writes: those that predictions depend on."""

_INTERRUPTED = 130  # what shells use for a command that Ctrl-C ended


def run(
    step: Annotated[Path, typer.Argument(help="The library that `convgrad build` wrote.")],
    data: Annotated[Path, typer.Option(help=".npz with x_train, y_train (or x, y), and perhaps x_test, y_test.")],
    epochs: Annotated[int, typer.Option(min=1, help="Epochs in all, those before a resume included.")],
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate. Default: the one of the build.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step, if the batch is dynamic. Default: 32.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data order.")] = 0,
    test_data: Annotated[
        Path | None, typer.Option(help=".npz with x_test, y_test. Default: those of --data, if there.")
    ] = None,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Folder for checkpoints; the last two stay.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, metavar="STEPS", help="Steps between checkpoints. Default: an epoch.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads. Default: TVM_NUM_THREADS, or the cores; losses are the same.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the loss curve to write.")] = None,
    save_state: Annotated[
        Path | None, typer.Option(help=".npz of parameters, frozen ones too, and statistics to write.")
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Go on when the loss or the state is NaN or infinite.")
    ] = False,
    require_accuracy: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Fail if the test accuracy is not above this.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Train with the step for a number of epochs; the samples that do not fill a batch sit out (others each epoch)."""
    if resume and checkpoint_dir is None:
        raise typer.BadParameter("--resume needs --checkpoint-dir, the folder with the checkpoints.")

    import numpy as np

    from tvm_convgrad.report.tables import print_json, stderr
    from tvm_convgrad.threads import use_threads
    from tvm_convgrad.training.checkpoint import claimed
    from tvm_convgrad.training.data import load_samples
    from tvm_convgrad.training.envelope import check_destination
    from tvm_convgrad.training.keeper import Keeper
    from tvm_convgrad.training.loop import batch_size_of, evaluate_samples
    from tvm_convgrad.training.session import Session

    if lr is not None and lr > np.finfo("float32").max:
        raise typer.BadParameter(f"--lr {lr:g} is not a finite float32 number.")
    for path in (plot, save_state):
        if path is not None:
            check_destination(path)
    start = time.perf_counter()
    used = use_threads(threads)
    session = Session(step)
    samples = load_samples(data, session.inputs, session.target, "train", session.classes)
    test = load_samples(test_data or data, session.inputs, session.target, "test", session.classes)
    if samples is None or (test is None and test_data is not None):
        raise ArtifactError(f"{test_data}: there are no test arrays; name them x_test and y_test.")
    size = batch_size_of(session, batch_size, len(samples))
    with claimed(checkpoint_dir) if checkpoint_dir is not None else nullcontext():
        keeper = Keeper(checkpoint_dir, checkpoint_every, session.state, allow_nonfinite)
        progress = _begin(session, samples, size, seed, lr, keeper, resume)
        resumed = len(progress.losses)
        finished = _train(session, samples, progress, epochs, keeper, json)
    if not finished:
        remedy = "add --resume to go on" if checkpoint_dir else "without --checkpoint-dir nothing is kept"
        stderr().print(f"interrupted after step {len(progress.losses)}; {remedy}", markup=False)
        raise typer.Exit(_INTERRUPTED)
    result: dict[str, Any] = {
        "artifact": session.artifact.id,
        "epochs": progress.epoch,
        "steps": len(progress.losses),
        "resumed_after": resumed,
        "final_loss": progress.losses[-1],
        "train_samples": len(samples),
        "test_samples": len(test) if test else 0,
        "threads": used,
    }
    # The files come first, so that an error in the evaluation does not lose the trained state.
    if save_state is not None:
        _save_state(session, save_state)
        result["state"] = str(save_state)
    if plot is not None:
        from tvm_convgrad.report.plot import save_loss_curve

        save_loss_curve(plot, progress.losses, len(samples) // size, f"{step.name}, batch {size}, lr {progress.lr:g}")
        result["plot"] = str(plot)
    if test is not None:
        result |= {f"test_{name}": value for name, value in evaluate_samples(session, test).items()}
    result["seconds"] = time.perf_counter() - start
    if json:
        print_json(result | {"losses": progress.losses})
    else:
        _show(f"{epochs} epochs of {step}", result)
    if require_accuracy is not None:
        _require(result.get("test_accuracy"), require_accuracy)


def _show(title: str, result: dict[str, Any]) -> None:
    from tvm_convgrad.report.tables import print_pairs, stderr

    print_pairs(title, ((name.replace("_", " "), _shown(value)) for name, value in result.items()))
    if not result["test_samples"]:
        stderr().print("no x_test, y_test in the data, so nothing was tested", markup=False)


def _require(found: float | None, wanted: float) -> None:
    if found is None:
        raise ArtifactError(
            "--require-accuracy needs test arrays x_test and y_test with class numbers; there are none."
        )
    if found <= wanted:
        raise TrainingError(
            f"the test accuracy is {found:.4f}, not above the {wanted:g} that --require-accuracy asks for."
        )


def _begin(
    session: Session,
    samples: Samples,
    size: int,
    seed: int,
    lr: float | None,
    keeper: Keeper,
    resume: bool,
) -> Progress:
    """The progress to start from: that of a checkpoint, whose state the session then has, or a new one."""
    from tvm_convgrad.report.tables import stderr
    from tvm_convgrad.training.checkpoint import Progress, load_latest

    rate = float(session.artifact.options["lr"] if lr is None else lr)
    fresh = Progress(session.artifact.id, samples.digest, seed, size, rate)
    if keeper.folder is None:
        return fresh
    checkpoint, complaints = load_latest(keeper.folder)
    for complaint in complaints:
        stderr().print(f"passed over: {complaint}", markup=False)
    if checkpoint is None:
        return fresh
    if not resume:
        raise ArtifactError(
            f"{keeper.folder}: there are checkpoints already; add --resume to go on, or use another folder."
        )
    found = checkpoint.progress
    for what, name, old, new in (
        ("the step", "artifact", found.artifact, fresh.artifact),
        ("the training data", "data", found.data, fresh.data),
        ("the seed", "seed", found.seed, fresh.seed),
        ("the batch size", "batch_size", found.batch_size, fresh.batch_size),
    ):
        if old != new:
            raise ArtifactError(
                f"{checkpoint.path}: {what} was another one then ({name} {old}, now {new}), so the run cannot go on "
                "from it; use what it was started with, or another --checkpoint-dir."
            )
    keeper.found(checkpoint)
    session.state = checkpoint.state
    found.lr = found.lr if lr is None else rate
    stderr().print(f"going on after step {len(found.losses)}, from {checkpoint.path}", markup=False)
    return found


def _train(
    session: Session,
    samples: Samples,
    progress: Progress,
    epochs: int,
    keeper: Keeper,
    quiet: bool,
) -> bool:
    """Train with a progress bar; checkpoints when they are due and at Ctrl-C, which makes it False."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from tvm_convgrad.report.tables import stderr
    from tvm_convgrad.training.loop import train

    per_epoch = len(samples) // progress.batch_size
    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )
    right, seen = 0, 0
    with (
        _interruptions() as interrupted,
        Bar(*columns, console=console, disable=quiet or not console.is_terminal) as bar,
    ):
        task = bar.add_task("steps", total=epochs * per_epoch, completed=len(progress.losses), state="")
        for report in keeper.told(train(session, samples, progress, epochs, allow_nonfinite=keeper.allow_nonfinite)):
            steps = len(progress.losses)
            right, seen = right + (report.right or 0), seen + progress.batch_size
            accuracy = f", accuracy {right / seen:.3f}" if report.right is not None else ""
            bar.update(task, completed=steps, state=f"epoch {progress.epoch}, loss {report.loss:.4f}{accuracy}")
            if report.epoch_done:
                if not quiet:
                    mean = sum(progress.losses[-per_epoch:]) / per_epoch
                    line = f"epoch {progress.epoch}/{epochs}: mean loss {mean:.4f}{accuracy} (while training)"
                    bar.console.print(line, markup=False)
                right, seen = 0, 0
            if report.epoch_done or keeper.is_due(steps) or interrupted.is_set():
                keeper.keep(progress, session.state)
            if interrupted.is_set():
                return False
    return True


@contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that the step in progress is finished and its checkpoint written."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda _number, _frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _save_state(session: Session, path: Path) -> None:
    import numpy as np

    from tvm_convgrad.training.envelope import write_atomic

    roles = {spec.name: spec.role for spec in session.artifact.state}
    kept = {name: value for name, value in session.state.items() if roles[name] in SAVED}
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=False, **kept)
    write_atomic(path, archive.getvalue())


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
