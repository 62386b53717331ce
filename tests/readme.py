# SPDX-License-Identifier: Apache-2.0
"""The snippets of README, by section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parents[1] / "README.md"


class Section(NamedTuple):
    """The fenced blocks of a section: Python programs, and command lines."""

    python: list[str]
    commands: list[str]


def sections() -> dict[str, Section]:
    """The sections that have fenced blocks, by their headings."""
    found = {}
    for part in README.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        blocks = {
            language: re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S) for language in ("python", "bash")
        }
        lines = [line.partition("    #")[0].rstrip() for block in blocks["bash"] for line in block.splitlines()]
        if blocks["python"] or lines:
            found[heading] = Section(blocks["python"], lines)
    return found


def execute(program: str, names: dict[str, object]) -> None:
    """Run a program of README with names that it takes for given."""
    exec(compile(program, "README.md", "exec"), names)
