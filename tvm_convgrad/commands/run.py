# SPDX-License-Identifier: Apache-2.0
"""`convgrad run`: trains with a compiled step, writes checkpoints, and resumes from them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import image_options, option_values, options
from tvm_convgrad.commands.ranks import joined_ranks, shared
from tvm_convgrad.commands.running import End, Kept, Run, Split, begin
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.ranks import AVERAGE, STATISTICS, TIMEOUT
from tvm_convgrad.training.runtime.schedules import KINDS, Schedule
from tvm_convgrad.training.runtime.watch import MEASURES, Watch


def _schedule(text: str | None) -> str | None:
    """A typer callback that refuses what is not a schedule."""
    try:
        return None if text is None else Schedule.parse(text).text
    except UnsupportedError as error:
        raise typer.BadParameter(str(error)) from error


def _measure(name: str) -> str:
    """A typer callback that refuses what is not a measure."""
    if name not in MEASURES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(MEASURES)}.")
    return name


def _statistics(name: str) -> str:
    """A typer callback that refuses what is not one of STATISTICS."""
    if name not in STATISTICS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(STATISTICS)}.")
    return name


_INTERRUPTED = 130  # what shells use for a command that Ctrl-C ended


def run(
    context: typer.Context,
    step: Annotated[Path, typer.Argument(help="The library that `convgrad build` wrote.")],
    data: Annotated[
        Path,
        typer.Option(
            help=".npz with the arrays x_train and y_train (or x and y), of which x_test and y_test are tested at "
            "the end; a folder of images, folder/CLASS/*.png, or with such folders train, val and test in it; or tar "
            "shards of key.png and key.cls, such as 'shards-{000..009}.tar'."
        ),
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Epochs in all, those before --resume included.")],
    lr: Annotated[
        float | None,
        typer.Option(
            min=0.0, callback=option_values.finite_float32, help="Learning rate. Default: the one of the build."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:NAME=N,...]",
            callback=_schedule,
            help=f"How the learning rate changes: {', '.join(KINDS)}, with PyTorch's meaning; lengths are in epochs, "
            "such as cosine:warmup=5, step:every=30,gamma=0.1 or multistep:at=30+60. Default: constant.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples in a batch, for a step with a dynamic batch. Default: 32.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the samples.")] = 0,
    test_data: Annotated[
        Path | None,
        typer.Option(
            help="The same with test samples, x_test and y_test (or x and y). Default: those of --data, if it has them."
        ),
    ] = None,
    mean: image_options.Mean = None,
    std: image_options.Std = None,
    fit: image_options.Fit = "crop",
    convert_channels: image_options.ConvertChannels = False,
    augment: image_options.Augment = None,
    workers: image_options.ImageWorkers = None,
    image_memory: image_options.ImageMemory = 1024,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, of which the last two are kept.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, metavar="STEPS", help="Steps between checkpoints. Default: those of an epoch.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --checkpoint-dir, if there is one.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; losses do not depend on them. Default: TVM_NUM_THREADS, or all cores."),
    ] = None,
    validate: Annotated[
        Path | None,
        typer.Option(
            help="The same with samples to validate with, x_val and y_val (or x and y). Default: those of --data, if "
            "it has them."
        ),
    ] = None,
    validate_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Steps between validations. Default: those of an epoch."),
    ] = None,
    monitor: Annotated[
        str,
        typer.Option(
            "--monitor",
            "--monitor-measure",
            callback=_measure,
            help=f"What makes a validation the best: {', '.join(MEASURES)}.",
        ),
    ] = "loss",
    patience: Annotated[
        int | None, typer.Option(min=1, help="End the run after so many validations in a row that are no better.")
    ] = None,
    use_best: Annotated[
        bool,
        typer.Option("--use-best", help="Test and save the state of the best validation. Needs --checkpoint-dir."),
    ] = False,
    averages: Annotated[
        bool,
        typer.Option("--averages", help="Validate, test and save the moving averages of the parameters (build --ema)."),
    ] = False,
    log: Annotated[
        Path | None, typer.Option("--log", "--log-file", help="Write each step and validation as a line of JSON.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder to write the same to for TensorBoard.")] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="BATCHES",
            help="Batches of an update, in each process; needs build --split. Default: 1, or as resumed.",
        ),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Train with other processes, started by `torchrun -m tvm_convgrad run …`, on a part of each batch of "
            "an update; the step is built with --split. Needs PyTorch.",
        ),
    ] = False,
    statistics: Annotated[
        str,
        typer.Option(
            callback=_statistics,
            help="Running statistics of several processes: average, or first for those of the first one.",
        ),
    ] = AVERAGE,
    rank_timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long processes wait for each other.")
    ] = TIMEOUT,
    plot: Annotated[Path | None, typer.Option(help="Write the loss curve to this PNG.")] = None,
    save_state: Annotated[
        Path | None, typer.Option(help="Write all parameters and running statistics to this .npz.")
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Do not stop when the loss or the state is NaN or infinite.")
    ] = False,
    require_accuracy: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Fail if the test accuracy at the end is not above this.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Train with a step that `build` compiled, for a number of epochs.

    The samples are shuffled in each epoch; those that do not fill the last batch are skipped.
    """
    if resume and checkpoint_dir is None:
        raise typer.BadParameter("--resume needs --checkpoint-dir, the folder with the checkpoints.")
    if checkpoint_every is not None and checkpoint_dir is None:
        raise typer.BadParameter("--checkpoint-every needs --checkpoint-dir, the folder for the checkpoints.")
    if use_best and checkpoint_dir is None:
        raise typer.BadParameter("--use-best needs --checkpoint-dir, where the best validation's state is kept.")

    images = image_options.image_options(mean, std, fit, convert_channels, augment, workers, image_memory)

    from tvm_convgrad.commands.run_data import Decoding
    from tvm_convgrad.commands.run_preparation import Wanted, prepare
    from tvm_convgrad.commands.run_result import Trained, require, show
    from tvm_convgrad.commands.stages import print_warnings
    from tvm_convgrad.core.files import check_destination
    from tvm_convgrad.report.tables import print_json, stderr
    from tvm_convgrad.threads import use_threads
    from tvm_convgrad.training.runtime.artifact import notices
    from tvm_convgrad.training.runtime.checkpoint import claimed
    from tvm_convgrad.training.runtime.journal import open_journals
    from tvm_convgrad.training.runtime.keeper import Keeper
    from tvm_convgrad.training.runtime.loop import batch_size_of
    from tvm_convgrad.training.runtime.ranks import check_agreement, together
    from tvm_convgrad.training.runtime.reader import Reader
    from tvm_convgrad.training.runtime.session import Session
    from tvm_convgrad.training.runtime.validation import measured_samples

    wanted = Wanted(
        data=data,
        test_data=test_data,
        validate=validate,
        validated=use_best or (validate_every, patience) != (None, None),
        epochs=epochs,
        lr=lr,
        schedule=schedule,
        batch_size=batch_size,
        seed=seed,
        accumulate=accumulate,
        distributed=distributed,
        averages=averages,
        monitor=monitor,
        require_accuracy=require_accuracy,
    )
    start = time.perf_counter()
    with ExitStack() as held:
        ranks = held.enter_context(joined_ranks(distributed, rank_timeout))
        first = ranks.rank == 0
        used = use_threads(threads)
        with together(ranks):
            for path in (plot, save_state) if first else ():
                if path is not None:
                    check_destination(path)
            session = Session(step)
            print_warnings(notices(session.artifact) if first else ())
            decoding = Decoding(quiet=json or not first)
            reader = Reader(session, images, decoding.note)
            context.call_on_close(decoding.close)
            context.call_on_close(reader.close)
            prepared = prepare(session, reader, wanted, ranks)
            samples, test, held_out = prepared.data.train, prepared.data.test, prepared.data.held_out
            fresh = prepared.fresh
        check_agreement(
            ranks,
            {
                "the step": fresh.artifact,
                "the training data": fresh.data,
                "the validation data": held_out and held_out.digest,
                "--epochs": epochs,
                "--batch-size": fresh.batch_size,
                "--accumulate": accumulate,
                "--lr": fresh.lr,
                "--schedule": fresh.schedule,
                "--seed": seed,
                "--checkpoint-every": checkpoint_every,
                "--validate-every": validate_every,
                "--monitor": monitor,
                "--patience": patience,
                "--use-best": use_best,
                "--averages": averages,
                "--statistics": statistics,
                "--allow-nonfinite": allow_nonfinite,
            },
        )
        with together(ranks):
            if first and checkpoint_dir is not None:
                held.enter_context(claimed(checkpoint_dir))
            keeper = Keeper(checkpoint_dir if first else None, checkpoint_every, session.state, allow_nonfinite)
            kept = Kept(rate=lr is None, schedule=schedule is None, micro_batches=accumulate is None)
            progress = begin(session, fresh, keeper, kept, epochs, resume=resume)
        progress = shared(session, progress, ranks)
        with together(ranks):
            batch_size_of(session, batch_size, len(samples), progress.micro_batches)  # or it raises
        resumed = len(progress.losses)
        split = Split(ranks, statistics) if distributed or progress.micro_batches > 1 else None
        with together(ranks):
            watch, journals = Watch(monitor, patience), open_journals(log, tensorboard, resumed) if first else []
        training = Run(
            session,
            samples,
            progress,
            epochs,
            keeper,
            held_out,
            validate_every,
            watch,
            journals,
            quiet=json or not first,
            averages=averages,
            split=split,
        )
        try:
            end = training.train()
        finally:
            for journal in journals:
                journal.close()
        if use_best and end is not End.INTERRUPTED and first:
            session.state = keeper.best().state
    if end is End.INTERRUPTED:
        if first:
            remedy = "add --resume to continue" if checkpoint_dir else "without --checkpoint-dir nothing is saved"
            stderr().print(f"interrupted after step {len(progress.losses)}; {remedy}", markup=False)
        raise typer.Exit(_INTERRUPTED)
    if not first:
        return  # the first rank tests, tells and writes
    if end is End.STOPPED:
        best = f"no {monitor} was a finite number; look for NaN in the validation data, or for ignored classes only"
        if progress.best is not None:
            best = f"the best {monitor}, {progress.best:.6g}, was found after step {progress.best_step}"
        stderr().print(f"ended after step {len(progress.losses)}: {best}", markup=False)
    title = f"{step.name}, batch {progress.batch_size}, lr {progress.lr:g}"
    trained = Trained(training, resumed, len(samples), measured_samples(session, test), test, used)
    result = trained.finish(plot, save_state, title) | {"seconds": time.perf_counter() - start}
    if json:
        print_json(result | {"losses": progress.losses})
    else:
        show(f"{epochs} epochs of {step}", result)
    if require_accuracy is not None:
        require(result["test_accuracy"], require_accuracy)
