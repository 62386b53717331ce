# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rate: those of torch.optim.lr_scheduler, and runs that resume with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.checkpoint import Progress
from tvm_convgrad.training.runtime.data import load_samples
from tvm_convgrad.training.runtime.loop import train
from tvm_convgrad.training.runtime.schedules import Schedule
from tvm_convgrad.training.runtime.session import Session

PER_EPOCH, EPOCHS = 7, 9
LOSSES = [1.0, 0.9, 0.95, 0.91, 0.9, 0.5, 0.49999, 0.6, 0.7]
"""Of epochs."""


def factors(text: str) -> list[float]:
    """Of all steps of a run."""
    schedule, steps = Schedule.parse(text), [loss for loss in LOSSES for _ in range(PER_EPOCH)]
    return [schedule.factor(step, PER_EPOCH, EPOCHS, steps[:step]) for step in range(PER_EPOCH * EPOCHS)]


def torch_factors(make: Callable[..., object], each_epoch: bool = False, with_loss: bool = False) -> list[float]:
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(torch.optim.lr_scheduler, optimizer), []
    for step in range(PER_EPOCH * EPOCHS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if not each_epoch or step % PER_EPOCH == PER_EPOCH - 1:
            scheduler.step(*([LOSSES[step // PER_EPOCH]] if with_loss else []))  # type: ignore[attr-defined]
    return found


STEPS = PER_EPOCH * EPOCHS
CASES = [
    ("constant", lambda s, o: s.ConstantLR(o, 1.0), {}),
    ("step:every=3", lambda s, o: s.StepLR(o, 3), {"each_epoch": True}),
    ("step:gamma=0.5,every=2", lambda s, o: s.StepLR(o, 2, 0.5), {"each_epoch": True}),
    ("multistep:at=6+2,gamma=0.3", lambda s, o: s.MultiStepLR(o, [2, 6], 0.3), {"each_epoch": True}),
    ("cosine", lambda s, o: s.CosineAnnealingLR(o, STEPS), {}),
    ("cosine:end=0.1", lambda s, o: s.CosineAnnealingLR(o, STEPS, 0.1), {}),
    ("linear:start=0.5,end=0.05", lambda s, o: s.LinearLR(o, 0.5, 0.05, STEPS), {}),
    ("onecycle", lambda s, o: s.OneCycleLR(o, 1.0, STEPS, cycle_momentum=False), {}),
    ("onecycle:up=0.5", lambda s, o: s.OneCycleLR(o, 1.0, STEPS, pct_start=0.5, cycle_momentum=False), {}),
    (
        "plateau:patience=1,factor=0.5",
        lambda s, o: s.ReduceLROnPlateau(o, factor=0.5, patience=1),
        {"each_epoch": True, "with_loss": True},
    ),
]


@pytest.mark.parametrize(("text", "make", "options"), CASES)
def test_factors_are_those_of_pytorch(text: str, make: Callable[..., object], options: dict[str, bool]) -> None:
    pytest.importorskip("torch")
    found = factors(text)
    assert found == pytest.approx(torch_factors(make, **options), rel=1e-9, abs=1e-12)
    assert text == "constant" or len(set(found)) > 1


def test_a_warm_up_grows_to_what_the_schedule_begins_with() -> None:
    found = factors("cosine:end=0.1,warmup=1.5")
    warming = round(1.5 * PER_EPOCH)
    assert found[:warming] == pytest.approx([(step + 1) / (warming + 1) for step in range(warming)])
    assert found[warming] == 1.0
    assert found[-1] == pytest.approx(0.1, abs=1e-2)
    assert sorted(found[warming:], reverse=True) == found[warming:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", "'cosin' is unknown; choose one of constant, step,"),
        ("step", "give every=N, such as step:every=30,gamma=0.1"),
        ("multistep:gamma=0.1", "give at=N+M"),
        ("cosine:end=x", "end needs a number from 0 on, but is 'x'"),
        ("cosine:end=-1", "end needs a number from 0 on, but is '-1'"),
        ("cosine:stop=1", "cosine takes end and warmup, each once, but not 'stop=1'"),
        ("onecycle:warmup=2", "onecycle takes up and start and end, each once"),
        ("step:every=0", "every is a whole number of epochs, at least 1"),
        ("step:every=1.5", "every is a whole number of epochs, at least 1"),
        ("cosine:end=0.1,end=0.2", "each once"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        Schedule.parse(text)


@pytest.mark.parametrize("text", ["cosine:warmup=0.5", "onecycle", "plateau:patience=0,threshold=0.9", "step:every=1"])
def test_a_run_in_two_parts_is_the_run_in_one(tiny_step: Path, tiny_data: Path, text: str) -> None:
    session = Session(tiny_step)
    samples = load_samples(tiny_data, session.inputs, session.target, "train")
    assert samples is not None

    def progress() -> Progress:
        return Progress("", "", 3, tiny.BATCH, 0.1, text)

    whole = progress()
    rates = [report.lr for report in train(session, samples, whole, 3)]
    wanted = session.state
    session.reset()
    parts = progress()
    for number, _ in enumerate(train(session, samples, parts, 3)):
        if number == 7:
            break
    state, again = session.state, progress()
    again.losses, again.epoch, again.position = list(parts.losses), parts.epoch, parts.position
    session.reset()
    session.state = state
    assert [report.lr for report in train(session, samples, again, 3)] == rates[8:]
    assert again.losses == whole.losses
    assert len(set(rates)) > 1
    for name, value in session.state.items():
        np.testing.assert_array_equal(value, wanted[name])
