# SPDX-License-Identifier: Apache-2.0
"""Code blocks of the pages are intact: fences are closed, Python compiles, command lines parse.

A comment that is wrapped onto a second line, for example, makes a program that does not compile.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Iterator

import pytest

from tests.core.test_documents import PAGES, ROOT

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|(?<=\n\n))(?: {4}.*\n)+")


def blocks_of(text: str) -> Iterator[tuple[str, str]]:
    """The language of each block ("" where it is indented) and its text."""
    for _, language, block in FENCED.findall(text):
        yield language, textwrap.dedent(block)
    yield from (("", textwrap.dedent(block)) for block in INDENTED.findall(FENCED.sub("", text)))


def python_error(program: str) -> str:
    try:
        compile(program, "page", "exec")
    except SyntaxError as error:
        return str(error)
    return ""


def shell_error(commands: str) -> str:
    return subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True, check=False).stderr


def faults(text: str) -> list[str]:
    """Blocks that are neither Python nor command lines, although their language, or their indentation, says so."""
    if text.count("```") % 2:
        return ["a fence is not closed"]
    found = []
    for language, block in blocks_of(text):
        if language == "python" and (error := python_error(block)):
            found.append(f"{error}\n{block}")
        if language == "bash" and (error := shell_error(block)):
            found.append(f"{error}\n{block}")
        if not language and python_error(block) and (error := shell_error(block)):
            found.append(f"{error}\n{block}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_intact(page: str) -> None:
    assert faults((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = f(y)  # a comment that is\nwrapped too early\n```\n",
        "```bash\nconvgrad run 'step.so\n```\n",
        "\n\n    y = f(x)  # its\n    comment goes on\n\n",
        "```python\nx = 1\n",
    ],
)
def test_damage_is_found(text: str) -> None:
    assert len(faults(text)) == 1
