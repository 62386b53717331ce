# SPDX-License-Identifier: Apache-2.0
"""The gallery: pages whose commands are run when the site is built, with what they print and draw.

The commands of a page are run in order in one folder; they are convgrad's, or scripts of examples/. `<!-- picture:
FILE: words -->` shows a file that they have written, `<!-- source: SCRIPT -->` the text of a script. What they gave is
kept in out/gallery by a hash of the page, the examples and the packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from site_pages.output import CONSOLE, ROOT, run_python

PAGES = ROOT / "docs" / "gallery"
EXAMPLES = ROOT / "examples"
PICTURE = re.compile(r"^<!-- picture: (\S+): (.*?) -->$", re.MULTILINE)
SOURCE = re.compile(r"^<!-- source: (\S+) -->$", re.MULTILINE)
KEPT = ROOT / "out" / "gallery"
PACKAGES = ("tvm_convgrad", "relax_ops", "legalize")
_PARALLEL = 3
"""Pages at a time, at most one for each CPU."""


@dataclass(frozen=True)
class Shown:
    """What the commands of a page gave: output by command, and the files that it shows, by their names."""

    printed: dict[str, str]
    pictures: dict[str, bytes]


def run_all() -> dict[str, Shown]:
    """What each page's commands gave, by the page's name without its ending.

    Raises:
        RuntimeError: a command fails.
    """
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))}
    pages = {name: text for name, text in texts.items() if CONSOLE.search(text)}
    common = _hash_of_sources()
    with ThreadPoolExecutor(min(_PARALLEL, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda text: _kept(text, common), pages.values())
        return dict(zip(pages, found, strict=True))


def page(name: str, text: str, shown: Shown) -> str:
    """The text of a page with outputs, pictures and sources; pictures lie in a folder of its name."""

    def printed(block: re.Match[str]) -> str:
        lines = (f"{line}\n{shown.printed[line.removeprefix('$ ')]}" for line in block[1].splitlines())
        return f"```console\n{''.join(lines)}```"

    def source(match: re.Match[str]) -> str:
        body = (EXAMPLES / match[1]).read_text(encoding="utf-8")
        indented = "".join(f"    {line}".rstrip() + "\n" for line in f"```python\n{body}```".splitlines())
        return f'??? note "examples/{match[1]}"\n\n{indented}'

    text = CONSOLE.sub(printed, text)
    text = PICTURE.sub(lambda match: f"![{match[2]}]({name}/{match[1]})\n\n*{match[2]}.*\n", text)
    return SOURCE.sub(source, text)


def _kept(text: str, common: str) -> Shown:
    """What the commands of a page gave, now or in an earlier build of the same sources."""
    folder = KEPT / hashlib.sha256(f"{common}{text}".encode()).hexdigest()[:32]
    record = folder / "printed.json"
    if record.is_file():
        printed = json.loads(record.read_text(encoding="utf-8"))
        return Shown(printed, {name: (folder / name).read_bytes() for name, _ in PICTURE.findall(text)})
    shown = _run(text)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in shown.pictures.items():
        (folder / name).write_bytes(content)
    record.write_text(json.dumps(shown.printed), encoding="utf-8")  # last: it makes the others valid
    return shown


def _run(text: str) -> Shown:
    printed = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command in _commands(text):
            program, *words = shlex.split(command)
            arguments = ("-m", "tvm_convgrad") if program == "convgrad" else (str(EXAMPLES / words.pop(0)),)
            output = run_python(folder, *arguments, *words)
            printed[command] = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
        return Shown(printed, {file: (folder / file).read_bytes() for file, _ in PICTURE.findall(text)})


def _commands(text: str) -> Iterator[str]:
    for block in CONSOLE.findall(text):
        yield from (line.removeprefix("$ ") for line in block.splitlines())


def _hash_of_sources() -> str:
    """A hash of the examples and the packages."""
    digest = hashlib.sha256()
    for folder in (EXAMPLES, *(ROOT / package for package in PACKAGES)):
        for path in sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".cc", ".h")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
