# SPDX-License-Identifier: Apache-2.0
"""Output of commands: tables for people, JSON for programs, and progress bars."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.progress import track
from rich.table import Table
from rich.text import Text

from tvm_convgrad.core.json_text import json_text

_WIDTH_WITHOUT_TERMINAL = 160

T = TypeVar("T")


def stdout() -> Console:
    """The console for results; 160 columns where neither a terminal nor COLUMNS sets the width."""
    given = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()  # rich reads COLUMNS itself
    return Console(width=None if given else _WIDTH_WITHOUT_TERMINAL, highlight=False)


def stderr() -> Console:
    """The console for progress and messages."""
    return Console(stderr=True, highlight=False)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """Print a table; the columns named in `right` are aligned to the right. Cells are shown as they are."""
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    stdout().print(table)


def print_lines(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """Print a table without a frame, for rows that are to fit on one line of a terminal; longer cells are folded."""
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    stdout().print(table)


def print_item(title: str, lines: Iterable[str]) -> None:
    """Print a heading, and lines that are indented and folded at words."""
    console = stdout()
    console.print(Text(title))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))


def print_pairs(title: str, pairs: Iterable[tuple[str, object]]) -> None:
    """Print names with their values."""
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(str(value)))
    stdout().print(table)


def followed(items: Iterable[T], doing: str, total: int | None = None) -> Iterable[T]:
    """The same items, with a progress bar where standard error is a terminal."""
    console = stderr()
    return track(items, doing, total=total, console=console, disable=not console.is_terminal)


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def print_json(value: object) -> None:
    """Print `value` as JSON, nothing else, by `json_text`."""
    print(json_text(value))


def quantity(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, or a dash for None."""
    return "–" if value is None else f"{value:.{digits}g}"


def byte_count(value: int | None) -> str:
    """Bytes as KiB, MiB or GiB, or a dash for None."""
    if value is None:
        return "–"
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def short_target(text: str) -> str:
    """TVM's target as JSON that `--target` takes, without the fields that TVM adds to all of its kind."""
    fields = json.loads(text)
    shown = {name: value for name, value in fields.items() if name != "keys" and value != ""}
    return json.dumps(shown)


def cores_in_words(cores: int | None) -> str:
    """The number of cores in a manifest as text; manifests of GPUs and of early versions have none."""
    if cores is None:
        return "not recorded"
    return f"{cores} (num-cores of the target; it fixes the order of sums in generated kernels)"
