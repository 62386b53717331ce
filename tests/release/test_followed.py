# SPDX-License-Identifier: Apache-2.0
"""What `make test-wheel` follows in README is all of it, but for sections that are named with a reason."""

from __future__ import annotations

from pathlib import Path

from tests.readme import sections
from tests.release import extras, five_minutes

WHEEL = Path("dist", "tvm_convgrad-0.2.0-py3-none-any.whl")
PIP = "python -m pip install --quiet --disable-pip-version-check"
ROOT = Path(__file__).parents[2]


def test_sections_that_are_left_out_exist() -> None:
    assert set(five_minutes.LEFT_OUT) < set(sections())


def test_lines_are_run_as_they_stand_but_for_the_wheel() -> None:
    lines = [line for section in sections().values() for line in section.commands]
    changed = {line: five_minutes.for_user(line, WHEEL) for line in lines}
    changed = {line: command for line, command in changed.items() if command != line}
    (torchrun,) = [line for line in lines if line.startswith("torchrun ")]
    assert changed == {
        "pip install .": f"{PIP} '{WHEEL}'",
        "pip install '.[onnx]'": f"{PIP} '{WHEEL}[onnx]'",
        torchrun: None,
    }


def test_the_first_line_installs_the_package() -> None:
    first = next(iter(sections().values()))
    assert first.commands == ["pip install ."]
    assert first.python == []


def test_the_table_of_extras_has_each_one() -> None:
    """That of docs/SUPPORT.md lists what `python -m tests.release.extras --all` lists."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    declared = [
        line.split(" = ")[0] for line in text.partition("\n[project.scripts]")[0].splitlines() if " = [" in line
    ]
    support = (ROOT / "docs" / "SUPPORT.md").read_text(encoding="utf-8").partition("## What is installed")[2]
    rows = [line.split("|")[1].strip() for line in support.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert sorted(rows[2:]) == sorted({"(none)", *declared} - set(extras.DEVELOPMENT))
    assert set(extras.DEVELOPMENT) | set(extras.LARGE) < set(declared)
