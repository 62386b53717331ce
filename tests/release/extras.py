# SPDX-License-Identifier: Apache-2.0
"""What the package and each of its extras install: packages, and megabytes of wheels and of files.

    python -m tests.release.extras DIST [--all] [EXTRA ...]

pip resolves each extra in an environment that has the package without extras, so that a row has only what the extra
adds. Sizes are those of the wheels and of the files in them, without the bytecode that Python writes. LARGE extras are
listed with --all only, as their wheels are hundreds of megabytes. docs/SUPPORT.md has the table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

LARGE = ("torch", "bench", "cuda", "cutlass", "zoo")
"""Extras with PyTorch or CUDA's tools."""

DEVELOPMENT = ("docs", "browser", "test", "release", "lint", "jax-models", "federated")
"""Extras of make targets; nobody needs them to use the package."""

MIB = 2**20


class Size(NamedTuple):
    """Bytes of a wheel, and of the files in it."""

    wheel: int
    files: int


def extras_of(wheel: Path) -> list[str]:
    """The extras that a wheel's metadata name."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode()).get_all("Provides-Extra", [])


def size_of(wheel: Path) -> Size:
    """The size of a wheel, which is a zip archive."""
    with zipfile.ZipFile(wheel) as archive:
        return Size(wheel.stat().st_size, sum(entry.file_size for entry in archive.infolist()))


def normal(name: str) -> str:
    """A package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(python: Path, *words: object) -> None:
    """A command of pip that must not fail."""
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([str(python), "-m", "pip", *map(str, words), *quiet], check=True)


def added(python: Path, requirement: str, report: Path) -> dict[str, str]:
    """The packages that a requirement adds to an environment, with their versions."""
    pip(python, "install", "--dry-run", "--report", report, requirement)
    found = [each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {normal(each["name"]): each["version"] for each in found if normal(each["name"]) != "tvm-convgrad"}


def sizes(python: Path, packages: dict[str, str], folder: Path) -> dict[str, Size]:
    """The sizes of packages, of which the wheels are put into a folder."""
    if packages:
        names = [f"{name}=={version}" for name, version in packages.items()]
        pip(python, "wheel", "--no-deps", "--wheel-dir", folder, *names)
    return {normal(path.name.split("-")[0]): size_of(path) for path in folder.glob("*.whl")}


def row(extra: str, packages: Iterable[str], known: dict[str, Size]) -> str:
    """A line of the table, with the four largest packages named."""
    names = sorted(packages, key=lambda name: -known[name].wheel)
    wheel, files = (sum(known[name][place] for name in names) / MIB for place in (0, 1))
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"| {extra} | {len(names)} | {wheel:.1f} | {files:.1f} | {', '.join(names[:4]) + rest or 'nothing'} |"


def table(wheel: Path, wanted: Iterable[str]) -> list[str]:
    """The lines of the table: the package without extras, and what each extra adds to it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        rows = {"(none)": added(python, str(wheel), folder / "report.json")}
        pip(python, "install", wheel)
        rows |= {extra: added(python, f"{wheel}[{extra}]", folder / "report.json") for extra in wanted}
        every = {package: version for packages in rows.values() for package, version in packages.items()}
        known = sizes(python, every, folder / "wheels")
        known["tvm-convgrad"] = size_of(wheel)
        lines = ["| extra | packages | wheels, MiB | files, MiB | the largest of them |", "|---|---|---|---|---|"]
        lines.append(row("(none)", ["tvm-convgrad", *rows.pop("(none)")], known))
        return [*lines, *(row(extra, packages, known) for extra, packages in rows.items())]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--all", action="store_true", help="list large extras, too")
    options = parser.parse_args()
    (wheel,) = options.dist.absolute().glob("*.whl")
    left_out = DEVELOPMENT if options.all else (*DEVELOPMENT, *LARGE)
    extras = options.extras or [extra for extra in extras_of(wheel) if extra not in left_out]
    print("\n".join(table(wheel, extras)))


if __name__ == "__main__":
    main()
