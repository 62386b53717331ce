# SPDX-License-Identifier: Apache-2.0
"""Measurements of whole training steps: ours through Session against PyTorch eager, with memory and compile time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tvm_convgrad.bench.baselines import prepare_baselines
from tvm_convgrad.bench.configuration import Configuration
from tvm_convgrad.bench.contenders import BUILT_IN, Step, Training, alone, our_step, torch_step
from tvm_convgrad.bench.measure import UNITS
from tvm_convgrad.bench.results import save_measurements
from tvm_convgrad.bench.run_options import RunOptions
from tvm_convgrad.core.errors import ModelError, SetupError, UnsupportedError
from tvm_convgrad.kernels.transforms import TRANSFORMS, allow_transforms
from tvm_convgrad.measure.timing import MIN_PAIRS, SETTLE
from tvm_convgrad.offload.registry import NONE
from tvm_convgrad.report.gradients import describe_convolutions
from tvm_convgrad.report.tables import byte_count, print_table, quantity
from tvm_convgrad.threads import use_threads
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_to_link
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.module import StepModule
from tvm_convgrad.training.step.names import usual_results

SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
    "adam": {"lr": 1e-4},
    "adamw": {"lr": 1e-4, "weight_decay": 1e-2},
}
"""The settings of each optimizer, for both contenders."""

LOSS_TOLERANCE = 1e-3
"""Largest difference of the two losses of the first step, relative to ours."""


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained.

    Attributes:
        layouts: layouts of our convolutions; each is a measurement.
        optimizer: a key of SETTINGS.
        loss: "cross_entropy" or "mse".
    """

    layouts: Sequence[str]
    optimizer: str = "sgd"
    loss: str = "cross_entropy"


@dataclass(frozen=True)
class StepMeasurement:
    """The measurement of a training step.

    Attributes:
        model, batch, layout, optimizer: what was trained; layout is that of our convolutions.
        impl: what computes our convolutions, as in `Configuration`.
        device, dtype: where they are computed, and the type of their operands.
        convolutions, taken: how many there are, and how many of them `impl` computes.
        ours, theirs: seconds of a step, medians; theirs and the rest of PyTorch's are None for a model that PyTorch
            cannot run (all but .pt2).
        ratio: the median of theirs / ours of each pair; pairs: how many.
        variant: the faster one of PyTorch's layouts.
        loss, baseline_loss: of the first step.
        first, baseline_first: seconds of the first step in a process of its own.
        memory, baseline_memory: bytes beyond the process without the model; None without /proc/self/status.
        compile_seconds: from the imported model to the shared library.
    """

    model: str
    batch: int
    layout: str
    optimizer: str
    impl: str
    device: str
    dtype: str
    convolutions: int
    taken: int
    ours: float
    theirs: float | None
    ratio: float | None
    pairs: int
    variant: str | None
    loss: float
    baseline_loss: float | None
    first: float
    baseline_first: float | None
    memory: int | None
    baseline_memory: int | None
    compile_seconds: float


def run_steps(
    models: Sequence[str], batches: Sequence[int] | None, training: TrainingOptions, options: RunOptions
) -> list[StepMeasurement]:
    """Measure the training step of every model, batch and layout.

    Args:
        models: names of BUILT_IN, or model files.
        batches: batch sizes; None is 8 for the built-in ones, and the batch that a file has.
        training: layouts, optimizer and loss.
        options: where to measure, how long, and the file to write; a library is given all convolutions that it takes.

    Raises:
        SetupError: PyTorch or the library is missing, or the losses of the first step differ.
        ModelError, UnsupportedError: the model cannot be read or trained here.
    """
    count = use_threads(options.threads)
    if training.optimizer not in SETTINGS:
        raise UnsupportedError(f"bench --step: optimizer {training.optimizer!r} is unknown; use {', '.join(SETTINGS)}.")
    for model in models:
        if model not in BUILT_IN and not Path(model).suffix:
            raise ModelError(f"bench --step {model}: give model files, or names of {', '.join(BUILT_IN)}.")
    prepare_baselines(["torch"] if any(map(_runs_in_pytorch, models)) else [], count, options.config)
    found = []
    for model in models:
        sizes: Sequence[int | None] = batches or ([8] if model in BUILT_IN else [None])
        for batch in sizes:
            loaded = _load(model, batch)
            for layout in training.layouts:
                found.append(_measure(model, loaded, replace(training, layouts=(layout,)), options, count))
                save_measurements("steps", found, options, count)
    return found


def _runs_in_pytorch(model: str) -> bool:
    return model in BUILT_IN or model.endswith(".pt2")


def _load(model: str, batch: int | None) -> Model:
    """The model of a name or file; a built-in one is exported by PyTorch, which is optional."""
    if model not in BUILT_IN:
        loaded = load_model(model, batch=batch)
        if not isinstance(loaded, Model):
            raise ModelError(f"bench --step {model}: this program has its own gradients; give a model without them.")
        return loaded
    import torch

    from tvm_convgrad.bench.networks import network
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    module, size = network(model)
    return from_exported_program(torch.export.export(module, (torch.zeros(batch or 8, 3, size, size),)), source=model)


def _measure(name: str, model: Model, training: TrainingOptions, options: RunOptions, threads: int) -> StepMeasurement:
    """The measurement of a model's step in the one layout of `training`."""
    (layout,), config = training.layouts, options.config
    begin = time.perf_counter()
    step = build_step(
        model,
        loss=training.loss,
        optimizer=training.optimizer,
        layout=layout,
        dtype=config.dtype,
        results=usual_results(config.dtype, on_gpu=config.gpu),
        dropout_mode="off",
        **SETTINGS[training.optimizer],
    )
    with tempfile.TemporaryDirectory(prefix="convgrad-bench-") as folder:
        library = Path(folder) / "step.so"
        with allow_transforms(config.impl == TRANSFORMS), config.engines():
            executable, plan, initial = compile_to_link(step, config.target, config.backends or [NONE])
        manifest = make_manifest(step, config.target, describe_convolutions(plan))
        save_artifact(executable, manifest, library, initial=initial)
        compile_seconds = time.perf_counter() - begin
        both = _training(name, library, step, training, config)
        contenders: dict[str, Step] = {"ours": our_step(both)}
        if _runs_in_pytorch(name):
            contenders["torch contiguous"] = torch_step(both, channels_last=False)
            if len(both.shape) == 4:
                contenders["torch channels_last"] = torch_step(both, channels_last=True)
        losses = {contender: one() for contender, one in contenders.items()}
        times = rounds(contenders, options.seconds)
        best = min([name for name in contenders if name != "ours"], key=lambda name: median(times[name]), default=None)
        _check_losses(name, losses, LOSS_TOLERANCE + 2 * UNITS[config.numbers])
        contenders.clear()
        own = alone("ours", both, threads)
        baseline = alone(best, both, threads) if best else None
    ours, theirs = times["ours"], times[best] if best else []
    return StepMeasurement(
        model=name,
        batch=both.shape[0],
        layout=layout,
        optimizer=training.optimizer,
        impl=config.impl,
        device=config.gpu_name or "CPU",
        dtype=config.dtype,
        convolutions=len(plan),
        taken=sum(entry.choice.name == config.impl for entry in plan) if config.backends else len(plan),
        ours=median(ours),
        theirs=median(theirs) if best else None,
        ratio=median(their / our for our, their in zip(ours, theirs, strict=True)) if best else None,
        pairs=len(ours),
        variant=best,
        loss=losses["ours"],
        baseline_loss=losses[best] if best else None,
        first=own.first,
        baseline_first=baseline.first if baseline else None,
        memory=own.memory,
        baseline_memory=baseline.memory if baseline else None,
        compile_seconds=compile_seconds,
    )


def rounds(contenders: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Seconds of each contender's steps, in turns; between turns the threads of the one before get time to sleep."""
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    begin = time.perf_counter()
    while len(times["ours"]) < MIN_PAIRS or time.perf_counter() - begin < seconds:
        for contender, step in contenders.items():
            time.sleep(SETTLE)
            start = time.perf_counter()
            step()
            times[contender].append(time.perf_counter() - start)
    return times


def _training(name: str, library: Path, step: StepModule, training: TrainingOptions, config: Configuration) -> Training:
    """What both contenders train.

    Raises:
        UnsupportedError: several inputs, or one that is not a float32 of fixed extents.
    """
    if len(step.inputs) != 1 or step.inputs[0].dtype != "float32":
        raise UnsupportedError(f"bench --step {name}: only models with one float32 input are measured.")
    shapes = [step.inputs[0].shape, step.target.shape, step.prediction.shape]
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        raise UnsupportedError(f"bench --step {name}: the model has symbolic extents; give --batch N.")
    shape, target, prediction = (tuple(int(extent) for extent in shape) for shape in shapes)
    return Training(
        model=name,
        library=str(library),
        shape=shape,
        target=target,
        classes=0 if training.loss == "mse" else prediction[-1],
        optimizer=training.optimizer,
        settings=SETTINGS[training.optimizer],
        loss=training.loss,
        device=config.torch_device,
        dtype=config.dtype,
        tf32=config.tf32,
    )


def _check_losses(name: str, losses: dict[str, float], tolerance: float) -> None:
    """Raise SetupError if the losses of the first step differ."""
    ours = losses["ours"]
    for contender, loss in losses.items():
        if not abs(loss - ours) <= tolerance * max(abs(ours), 1e-3):
            raise SetupError(
                f"{name}: the first loss is {ours:.6g}, that of {contender} {loss:.6g}; a model in a file must be "
                "exported in train mode and without dropout for the two to do the same"
            )


def show_steps(found: Sequence[StepMeasurement]) -> None:
    """Print a table of the measurements, a row each."""
    times = ("ratio", "ours, ms", "torch, ms", "first, ms", "torch's first", "baseline", "pairs")
    columns = ("model", "batch", "layout", *times, "memory", "torch's memory", "compile, s")
    rows = [
        (
            m.model,
            m.batch,
            m.layout,
            quantity(m.ratio),
            f"{m.ours * 1e3:.1f}",
            "–" if m.theirs is None else f"{m.theirs * 1e3:.1f}",
            f"{m.first * 1e3:.0f}",
            "–" if m.baseline_first is None else f"{m.baseline_first * 1e3:.0f}",
            m.variant or "none: PyTorch runs .pt2 only",
            m.pairs,
            byte_count(m.memory),
            byte_count(m.baseline_memory),
            f"{m.compile_seconds:.1f}",
        )
        for m in found
    ]
    print_table(
        "training steps: time of torch / ours", columns, rows, right=("batch", *times[:5], "pairs", *columns[-3:])
    )
