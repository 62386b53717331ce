# SPDX-License-Identifier: Apache-2.0
"""Options of training, any two of them together: a run that is killed and goes on has the losses of one that is not."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.pairwise import Row, covering, pairs_of
from tvm_convgrad.report.gradients import describe_convolutions
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.model.own_loss import OwnLoss
from tvm_convgrad.training.model.trained_part import train_only
from tvm_convgrad.training.runtime.checkpoint import Progress, load_latest, save
from tvm_convgrad.training.runtime.data import Samples
from tvm_convgrad.training.runtime.loop import train
from tvm_convgrad.training.runtime.parallel import ParallelStep
from tvm_convgrad.training.runtime.ranks import Alone
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.build import build_step

FACTORS = {
    "model": ("tiny", "grouped"),
    "loss": ("cross_entropy", "huber", "model"),
    "optimizer": ("sgd", "adamw", "lamb"),
    "clip": ("none", "norm", "value"),
    "ema": ("none", "0.9"),
    "dtype": ("float32", "bfloat16", "float16"),
    "layout": ("NCHW", "NHWC:OHWI"),
    "micro": ("one", "in the step", "between steps"),
    "train": ("all", "out,gamma"),
    "bn": ("train", "frozen"),
}
SEED = 26
"""Of 400 seeds one of three with the fewest rows."""

MICRO = 2
STEPS, SAVED, KILLED = 6, 3, 5
"""Of a run; after which the checkpoint is written; after which the run ends without another."""

LEVELS = {
    "loss": {
        "cross_entropy": {"label_smoothing": 0.1, "class_weights": (1.0, 0.5, 2.0)},
        "huber": {"delta": 0.5},
        "model": {},
    },
    "optimizer": {
        "sgd": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        "adamw": {"lr": 0.01, "weight_decay": 0.1, "decayed": "matrices"},
        "lamb": {"lr": 0.01},
    },
    "clip": {"none": {}, "norm": {"clip_norm": 0.3}, "value": {"clip_value": 0.02}},
    "ema": {"none": {}, "0.9": {"ema": 0.9}},
    "dtype": {"float32": {}, "bfloat16": {"results": "operands"}, "float16": {"loss_scale": "dynamic"}},
    "micro": {"one": {}, "in the step": {"accumulate": MICRO}, "between steps": {"split": True}},
}

ROWS = covering(FACTORS, SEED)


def test_rows_have_all_pairs() -> None:
    found = set().union(*map(pairs_of, ROWS))
    assert len(found) == sum(len(one) * len(other) for one, other in combinations(FACTORS.values(), 2))
    assert len(ROWS) == 13


def grouped(source: str) -> str:
    """The network with dropout, and another convolution, of two groups, around which there is a shortcut."""
    source = source.replace('"gamma": (4,)', '"v": (4, 2, 3, 3), "gamma": (4,)')
    more = """
            side = builder.emit(relax.op.nn.conv2d(h, p["v"], padding=1, groups=2))
            h = builder.emit(relax.op.nn.dropout(builder.emit(relax.op.add(h, side)), 0.25)[0])
"""
    pooled = "            h = builder.emit(relax.op.mean("
    return source.replace(pooled, more.lstrip("\n") + pooled)


def model_of(row: Row, folder: Path) -> Model:
    source = tiny.with_own_loss() if row["loss"] == "model" else tiny.SOURCE
    path = folder / "net.py"
    path.write_text(grouped(source) if row["model"] == "grouped" else source)
    model = load_model(f"{path}:make", outputs=OwnLoss() if row["loss"] == "model" else None)
    assert isinstance(model, Model)
    return model if row["train"] == "all" else train_only(model, row["train"].split(","))


def built(row: Row, folder: Path) -> Path:
    options = {name: row[name] for name in ("loss", "optimizer", "dtype", "layout", "bn")}
    for name, levels in LEVELS.items():
        options |= levels[row[name]]
    step = build_step(model_of(row, folder), **options)
    target = parse_target("llvm")
    executable, plan = compile_with_plan(step, target, ("none",))
    save_artifact(executable, make_manifest(step, target, describe_convolutions(plan)), folder / "step.so")
    return folder / "step.so"


def samples_of(row: Row) -> Samples:
    """Enough for two updates an epoch."""
    x, y = tiny.make_arrays(2 * tiny.BATCH * (1 if row["micro"] == "one" else MICRO) + 3, 0)
    return Samples((x,), np.eye(tiny.CLASSES, dtype="float32")[y] if row["loss"] == "huber" else y)


def losses_of(session: Session, row: Row, progress: Progress, steps: int, folder: Path | None = None) -> list[float]:
    """Train until there were so many steps; after SAVED of them write a checkpoint, if there is a folder for it."""
    apart = row["micro"] == "between steps"
    update = ParallelStep(session, Alone(), MICRO, lambda: False) if apart else None
    for _ in train(session, samples_of(row), progress, STEPS, update=update):
        if folder is not None and len(progress.losses) == SAVED:
            save(folder, progress, session.state)
        if len(progress.losses) == steps:
            break
    return progress.losses


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()).replace(" ", "_"))
def test_killed_runs_repeat_their_losses(row: Row, tmp_path: Path) -> None:
    path = built(row, tmp_path)
    whole, killed, resumed = Session(path), Session(path), Session(path)
    begin = whole.state
    size = tiny.BATCH * (1 if row["micro"] == "one" else MICRO)
    parts = MICRO if row["micro"] == "between steps" else 1

    def fresh() -> Progress:
        return Progress(whole.artifact.id, "", 3, size, 0.05, schedule="cosine:warmup=2", micro_batches=parts)

    losses = losses_of(whole, row, fresh(), STEPS)
    assert losses_of(killed, row, fresh(), KILLED, tmp_path) == losses[:KILLED]
    found, warnings = load_latest(tmp_path)
    assert found is not None
    assert not warnings
    assert found.progress.losses == losses[:SAVED]
    resumed.state = found.state
    assert losses_of(resumed, row, found.progress, STEPS) == losses
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == STEPS

    end = whole.state
    for name, value in resumed.state.items():
        np.testing.assert_array_equal(value, end[name], err_msg=name)
    moved = {name for name in ("w", "v", "gamma", "beta", "out") if name in end and (end[name] != begin[name]).any()}
    all_of_them = {"w", "gamma", "beta", "out"} | ({"v"} if row["model"] == "grouped" else set())
    assert moved == (all_of_them if row["train"] == "all" else {"out", "gamma"})
    statistics_move = row["bn"] == "train"
    assert (end["mean"] != begin["mean"]).any() == statistics_move
    assert {name for name in end if name.endswith(".ema")} == (
        {f"{name}.ema" for name in moved} if row["ema"] != "none" else set()
    )
