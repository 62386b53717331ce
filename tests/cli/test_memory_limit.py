# SPDX-License-Identifier: Apache-2.0
"""`build --memory`: micro-batches until the plan keeps the limit, and the least that can be where none does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from tests import tiny
from tests.cli.command import Command
from tvm_convgrad.commands.memory_limit import parse_size
from tvm_convgrad.training.runtime.artifact import read_artifact
from tvm_convgrad.training.runtime.memory import memory_of
from tvm_convgrad.training.runtime.session import Session


@pytest.mark.parametrize(
    ("text", "size"), [("512MB", 512_000_000), ("1.5GB", 1_500_000_000), ("4 KiB", 4096), ("7b", 7), ("2gib", 2**31)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(None) is None


@pytest.mark.parametrize("text", ["", "12", "MB", "-1MB", "0MB", "1TB", "1e9B", "NaNMB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="give a number with a unit"):
        parse_size(text)


def test_limits(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    """The plan is that of the library; the same samples are taken in one update; a limit below all is refused."""
    output = tmp_path / "step.so"
    build: list[object] = ["build", tiny_model, "-o", output, "--json", "--memory"]
    whole = convgrad(*build, "1GB").json["memory"]
    assert whole["total"] == whole["state"] + whole["batch"] + whole["computed"]
    assert whole["choice"].endswith("without micro-batches")
    memory = memory_of(read_artifact(output))
    assert memory.to_json().items() <= whole.items()
    refused = convgrad(*build, "1B")
    refused.assert_sentence("--memory 1 B", "needs at least", "allow that, or build with a smaller --batch")
    output = tmp_path / "less.so"  # a library that is loaded stays the one of its path
    build[3] = output
    least = convgrad(*build, f"{whole['total'] - 1}B").json
    parts = least["options"]["accumulate"]
    assert parts > 1
    assert tiny.BATCH % parts == 0
    assert least["memory"]["total"] < whole["total"]
    assert f"each batch as {parts} micro-batches of {tiny.BATCH // parts}" in least["memory"]["choice"]
    assert re.search(r"convolutions take \d+\.\d\d times as long", least["memory"]["choice"])
    assert memory_of(read_artifact(output)).total == least["memory"]["total"]
    x, y = tiny.make_arrays(tiny.BATCH, 0)
    session = Session(output)
    losses = [session.step(x, y)[0] for _ in range(20)]
    assert losses[-1] < losses[0]


def test_a_free_batch_has_no_plan(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    output = tmp_path / "step.so"
    done = convgrad("build", tiny_model, "-o", output, "--batch", "dynamic", "--memory", "1GB")
    done.assert_sentence("--memory: the batch is free", "add --batch N")
    assert not output.exists()
