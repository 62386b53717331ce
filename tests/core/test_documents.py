# SPDX-License-Identifier: Apache-2.0
"""The documents are true of the tree: paths, modules, links and command lines in them exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from tvm_convgrad.cli import app

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(
        page.relative_to(ROOT).as_posix()
        for page in (ROOT / "docs").rglob("*.md")
        if page.parent.name != "results" or page.name == "README.md"
    ),
)
"""Documents of the present state. CHANGELOG.md has old names as well, so that only its links are checked."""

PACKAGES = ("tvm_convgrad", "relax_ops", "relay_ops", "legalize")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples", "docs", "site_pages", ".ci")
BESIDE = (
    "",
    "tvm_convgrad/",
    "tvm_convgrad/kernels/",
    "tvm_convgrad/training/",
    "tvm_convgrad/offload/cudnn/",
    "docs/",
)
"""Where a path that is not from the root may begin: `kernels/plan.py` is below tvm_convgrad."""

PLACEHOLDERS = ("NAME", "file.py")
"""What stands for a name of the reader's choice."""

STANDARD_HEADERS = frozenset({"stdio.h", "stdlib.h"})
"""Files of C that programs in documents include."""

FILE = re.compile(r"[\w.][\w./-]*/[\w.-]*\.(?:py|cc|h|md)(?![\w-])|[\w.][\w./-]*/(?=[`\s])")
BARE_FILE = re.compile(r"(?<![\w./*-])\w+\.(?:py|cc|h)(?![\w-])")
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?<![\w/.-])convgrad(?: [^`#|\n]*)?")
OLD_WORDS = "## Old words"
"""From here on the glossary has names that exist no longer."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8").partition(OLD_WORDS)[0]


def spans(page: str) -> Iterator[str]:
    """The code in a page: between backquotes, and lines of blocks."""
    text = text_of(page)
    blocks = re.findall(r"^```.*?^```|^(?: {4}.*\n)+", text, flags=re.MULTILINE | re.DOTALL)
    yield from (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    for block in blocks:
        text = text.replace(block, "\n")
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))


@cache
def file_names() -> frozenset[str]:
    """The names of all our source files, without folders."""
    return frozenset(file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file())


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    missing = set()
    for span in spans(page):
        for path in FILE.findall(span):
            ours = path.split("/")[0] in FOLDERS or path.endswith((".py", ".h", ".cc"))
            if ours and not any((ROOT / start / path).exists() for start in BESIDE):
                missing.add(path)
        missing.update(name for name in BARE_FILE.findall(span) if name not in file_names() | STANDARD_HEADERS)
    missing = {path for path in missing if not any(word in path for word in PLACEHOLDERS)}
    assert missing == set()


@cache
def names_of(file: Path) -> frozenset[str]:
    """What a module binds at its top: definitions, assignments, imports, entries of a table of lazy names."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            if isinstance(node.value, ast.Dict):
                found.update(key.value for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset(map(str, found))


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module binds (and perhaps an attribute of that)."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if file.is_file():
            return count == len(parts) or parts[count] in names_of(file) or parts[count] == "__path__"
    return False


@pytest.mark.parametrize("page", PAGES)
def test_modules_exist(page: str) -> None:
    found = {name for name in MODULE.findall(text_of(page)) if not name.endswith((".py", ".so"))}
    assert {name for name in found if not is_there(name)} == set()


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_resolve(page: str) -> None:
    broken = []
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


COMMANDS = typer.main.get_command(app).commands


def commands_of(page: str) -> list[list[str]]:
    """The words of each command line that begins with a command of convgrad."""
    found = []
    for span in spans(page):
        for line in COMMAND.findall(span):
            words = line.rstrip(":;,").split()[1:]
            if words and words[0] in COMMANDS:
                found.append(words)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_their_options(page: str) -> None:
    wrong = []
    for command, *words in commands_of(page):
        known = {name for item in COMMANDS[command].params for name in (*item.opts, *item.secondary_opts)}
        known.add("--help")
        wrong += [
            f"convgrad {command} {word}"
            for word in words
            if word.startswith("-") and word.partition("=")[0] not in known
        ]
    assert wrong == []


def test_pages_have_commands_and_modules() -> None:
    """What the tests above look for is found at all."""
    assert len(commands_of("README.md")) > 4
    assert len(commands_of("docs/BUILD.md")) > 7
    assert len(commands_of("docs/BENCH.md")) > 10
    assert is_there("tvm_convgrad.core.errors.ModelError")
    assert not is_there("tvm_convgrad.errors")
    assert not is_there("tvm_convgrad.core.errors.NoSuchError")


def test_the_program_of_the_architecture_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", text_of("docs/ARCHITECTURE.md"), flags=re.MULTILINE | re.DOTALL)
    exec(compile(program, "docs/ARCHITECTURE.md", "exec"), {})
    assert "mb8ic64ih56oc64oh56kh3ph1 implicit GEMM wgrad" in capsys.readouterr().out
