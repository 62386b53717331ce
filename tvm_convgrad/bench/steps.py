# SPDX-License-Identifier: Apache-2.0
"""Whole training steps: ours through Session against PyTorch eager, interleaved, with memory and compile time."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tvm_convgrad.bench.measure import MIN_PAIRS, SETTLE, UNITS
from tvm_convgrad.bench.parties import BUILT_IN, Step, Training, alone, our_step, torch_step
from tvm_convgrad.bench.place import Place
from tvm_convgrad.bench.results import FORMAT, environment
from tvm_convgrad.bench.rivals import prepare_rivals
from tvm_convgrad.errors import ModelError, SetupError, UnsupportedError
from tvm_convgrad.kernels.transforms import TRANSFORMS, allow_transforms
from tvm_convgrad.offload.common import NONE
from tvm_convgrad.report.gradients import describe_convolutions
from tvm_convgrad.threads import use_threads
from tvm_convgrad.training.artifact import make_manifest, save_artifact
from tvm_convgrad.training.envelope import write_atomic
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.lower import compile_with_plan
from tvm_convgrad.training.model import Model
from tvm_convgrad.training.step import StepModule, build_step

SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
    "adam": {"lr": 1e-4},
    "adamw": {"lr": 1e-4, "weight_decay": 1e-2},
}
"""What each optimizer is given, by both parties."""

LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class StepMeasurement:
    """A training step.

    Attributes:
        model, batch, layout, optimizer: what was trained; layout is that of our convolutions.
        impl: what computes our convolutions, as `Place`; device, dtype: where, and their operands' type.
        convolutions, taken: how many there are, and how many of them `impl` computes.
        ours, theirs: seconds of a step, medians; theirs and the rest of PyTorch's are null for a model that PyTorch
            cannot run (all but .pt2).
        ratio: the median of theirs / ours of each pair; pairs: how many.
        variant: the better one of PyTorch's layouts.
        loss, rival_loss: of the first step.
        first, rival_first: seconds of the first step in a process of its own.
        memory, rival_memory: bytes beyond the process without the model, null where the system does not tell.
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
    rival_loss: float | None
    first: float
    rival_first: float | None
    memory: int | None
    rival_memory: int | None
    compile_seconds: float

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run_steps(
    model: str,
    batches: Sequence[int] | None,
    layouts: Sequence[str],
    *,
    optimizer: str,
    loss: str,
    place: Place,
    seconds: float,
    threads: int | None,
    path: Path | None,
) -> list[StepMeasurement]:
    """Measure the step of a model for every batch and layout.

    Args:
        model: a name of BUILT_IN, or a model file.
        batches: None is 8 for the built-in ones, and what a file says.
        place: where, by what; a library is given all convolutions that it takes.
        path: of a JSON file to write, or None.

    Raises:
        SetupError: PyTorch or the library is missing, or the losses of the first step differ.
        ModelError, UnsupportedError: the model cannot be read or trained here.
    """
    count = use_threads(threads)
    if optimizer not in SETTINGS:
        raise UnsupportedError(f"bench --step: optimizer {optimizer!r} is unknown; use {', '.join(SETTINGS)}.")
    prepare_rivals(["torch"] if _runs_in_pytorch(model) else [], count, place)
    found = []
    sizes: Sequence[int | None] = batches or ([8] if model in BUILT_IN else [None])
    for batch in sizes:
        loaded = _load(model, batch)
        for layout in layouts:
            found.append(_measure(model, loaded, layout, (optimizer, loss), place, seconds, count))
            if path is not None:
                where = environment(place, count, seconds)
                content = {"format": FORMAT, "environment": where, "steps": [m.plain() for m in found]}
                write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
    return found


def _runs_in_pytorch(model: str) -> bool:
    return model in BUILT_IN or model.endswith(".pt2")


def _load(model: str, batch: int | None) -> Model:
    if model not in BUILT_IN:
        if not Path(model).suffix:
            raise ModelError(f"bench --step {model}: give a model file, or one of {', '.join(BUILT_IN)}.")
        loaded = load_model(model, batch=batch)
        if not isinstance(loaded, Model):
            raise ModelError(f"bench --step {model}: this program has its own gradients; give a model without them.")
        return loaded
    import torch

    from tvm_convgrad.bench.networks import network
    from tvm_convgrad.training.frontends.torch_export import from_exported_program

    module, size = network(model)
    return from_exported_program(torch.export.export(module, (torch.zeros(batch or 8, 3, size, size),)), source=model)


def _measure(
    name: str, model: Model, layout: str, how: tuple[str, str], place: Place, seconds: float, threads: int
) -> StepMeasurement:
    optimizer, loss = how
    begin = time.perf_counter()
    step = build_step(
        model,
        loss=loss,
        optimizer=optimizer,
        layout=layout,
        dtype=place.dtype,
        results="operands" if place.gpu else "float32",
        dropout_mode="off",
        **SETTINGS[optimizer],
    )
    with tempfile.TemporaryDirectory(prefix="convgrad-bench-") as folder:
        library = Path(folder) / "step.so"
        with allow_transforms(place.impl == TRANSFORMS), place.engines():
            executable, plan = compile_with_plan(step, place.target, place.backends or [NONE])
        save_artifact(executable, make_manifest(step, place.target, describe_convolutions(plan)), library)
        compile_seconds = time.perf_counter() - begin
        training = _training(name, str(library), step, (optimizer, loss), place)
        parties: dict[str, Step] = {"ours": our_step(training)}
        if _runs_in_pytorch(name):
            parties["torch contiguous"] = torch_step(training, channels_last=False)
            if len(training.shape) == 4:
                parties["torch channels_last"] = torch_step(training, channels_last=True)
        losses = {party: one() for party, one in parties.items()}
        times = rounds(parties, seconds)
        best = min((party for party in parties if party != "ours"), key=lambda p: median(times[p]), default=None)
        _check_losses(name, losses, LOSS_TOLERANCE + 2 * UNITS[place.numbers])
        parties.clear()
        own = alone("ours", training, threads)
        rival = alone(best, training, threads) if best else None
    ours, theirs = times["ours"], times[best] if best else []
    return StepMeasurement(
        model=name,
        batch=training.shape[0],
        layout=layout,
        optimizer=optimizer,
        impl=place.impl,
        device=place.name or "CPU",
        dtype=place.dtype,
        convolutions=len(plan),
        taken=sum(entry.choice.kind == place.impl for entry in plan) if place.backends else len(plan),
        ours=median(ours),
        theirs=median(theirs) if best else None,
        ratio=median(their / our for our, their in zip(ours, theirs, strict=True)) if best else None,
        pairs=len(ours),
        variant=best,
        loss=losses["ours"],
        rival_loss=losses[best] if best else None,
        first=own.first,
        rival_first=rival.first if rival else None,
        memory=own.memory,
        rival_memory=rival.memory if rival else None,
        compile_seconds=compile_seconds,
    )


def rounds(parties: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Seconds of each party's steps, in turns; between them the threads of the one before come to rest."""
    times: dict[str, list[float]] = {party: [] for party in parties}
    begin = time.perf_counter()
    while len(times["ours"]) < MIN_PAIRS or time.perf_counter() - begin < seconds:
        for party, step in parties.items():
            time.sleep(SETTLE)
            start = time.perf_counter()
            step()
            times[party].append(time.perf_counter() - start)
    return times


def _training(name: str, library: str, step: StepModule, how: tuple[str, str], place: Place) -> Training:
    """What both parties do.

    Raises:
        UnsupportedError: several inputs, or one that is no float32 of fixed extents.
    """
    if len(step.inputs) != 1 or step.inputs[0].dtype != "float32":
        raise UnsupportedError(f"bench --step {name}: only models with one float32 input are measured.")
    shapes = [step.inputs[0].shape, step.target.shape, step.prediction.shape]
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        raise UnsupportedError(f"bench --step {name}: the model has symbolic extents; give --batch N.")
    shape, target, prediction = (tuple(int(extent) for extent in shape) for shape in shapes)
    optimizer, loss = how
    classes = 0 if loss == "mse" else prediction[-1]
    settings = SETTINGS[optimizer]
    return Training(
        name, library, shape, target, classes, optimizer, settings, loss, place.torch, place.dtype, place.tf32
    )


def _check_losses(name: str, losses: dict[str, float], tolerance: float) -> None:
    ours = losses["ours"]
    for party, loss in losses.items():
        if not abs(loss - ours) <= tolerance * max(abs(ours), 1e-3):
            raise SetupError(
                f"{name}: the first loss is {ours:.6g}, that of {party} {loss:.6g}; a model in a file must be exported "
                "in train mode and without dropout for the two to do the same"
            )


def show_steps(found: Sequence[StepMeasurement]) -> None:
    """Print a row for each."""
    from tvm_convgrad.report.tables import byte_count, print_table, quantity

    times = ("ratio", "ours, ms", "torch, ms", "first, ms", "torch's first", "rival", "pairs")
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
            "–" if m.rival_first is None else f"{m.rival_first * 1e3:.0f}",
            m.variant or "none: PyTorch runs .pt2 only",
            m.pairs,
            byte_count(m.memory),
            byte_count(m.rival_memory),
            f"{m.compile_seconds:.1f}",
        )
        for m in found
    ]
    print_table(
        "training steps: time of torch / ours", columns, rows, right=("batch", *times[:5], "pairs", *columns[-3:])
    )
