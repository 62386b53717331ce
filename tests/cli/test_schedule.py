# SPDX-License-Identifier: Apache-2.0
"""`run --schedule` resumed with another number of epochs: the length of the schedule is that of its beginning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command


def rates(log: Path) -> list[float]:
    return [line["lr"] for line in map(json.loads, log.read_text().splitlines()) if "lr" in line]


@pytest.mark.parametrize("schedule", ["cosine:warmup=1,end=0.1", "linear:end=0.25", "onecycle"])
def test_more_epochs_keep_the_length(
    convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path, schedule: str
) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    run = ["run", tiny_step, "--data", tiny_data, "--log", log, "--checkpoint-dir", folder, "--json", "--epochs"]
    convgrad(*run, 3, "--schedule", schedule)
    first = rates(log)
    same = convgrad(*run, 3, "--resume")
    assert "the schedule" not in same.err
    done = convgrad(*run, 5, "--resume")
    assert f"the schedule {schedule} goes on over the 3 epochs that it was begun with, not the 5" in done.err
    found = rates(log)
    assert found[: len(first)] == first
    assert len(set(found[len(first) :])) == 1
    assert found[-1] <= first[-1]  # it stays at its end
    again = convgrad(*run, 8, "--resume", "--schedule", "linear:end=0.5")
    assert "the schedule" not in again.err
    steps = len(first) // 3
    wanted = [0.1 * (1 - 0.5 * step / (8 * steps)) for step in range(5 * steps, 8 * steps)]
    assert rates(log)[5 * steps :] == pytest.approx(wanted)


def test_a_constant_rate_says_nothing(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path) -> None:
    run = ["run", tiny_step, "--data", tiny_data, "--checkpoint-dir", tmp_path / "checkpoints", "--epochs"]
    convgrad(*run, 1)
    assert "schedule" not in convgrad(*run, 2, "--resume").err
