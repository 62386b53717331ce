# SPDX-License-Identifier: Apache-2.0
"""Earlier versions of recorded results, from the history of the repository: a list below a page, and their texts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_COMMIT = re.compile(r"commit (\w+) ([\d-]+)\n")


class Version(NamedTuple):
    """A version of a file: the short name of its commit, the day, and the text."""

    commit: str
    day: str
    text: str


def recorded() -> list[Path]:
    """The pages of recorded results."""
    return sorted(page for page in (ROOT / "docs" / "results").glob("*.md") if page.name != "README.md")


def versions(path: str) -> list[Version]:
    """The versions of a file before the present one, the latest first; none where there is no history.

    Args:
        path: from the root of the repository.
    """
    try:
        listed = _git("log", "--format=commit %h %as", "--", path)
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or a source distribution
        return []
    now = (ROOT / path).read_text(encoding="utf-8")
    found: list[Version] = []
    for commit, day in _COMMIT.findall(listed):
        text = _git("show", f"{commit}:./{path}")
        if text != now and all(text != version.text for version in found):
            found.append(Version(commit, day, text))
    return found


def name_of(page: str, version: Version) -> str:
    """Where the text of a version is in the site: results/history/layers-669417b.txt."""
    path = Path(page)
    return (path.parent / "history" / f"{path.stem}-{version.commit}.txt").as_posix()


def with_history(text: str, page: str, earlier: list[Version]) -> str:
    """A page with a list of its earlier versions at the end."""
    if not earlier:
        return text
    folder = Path(page).parent.as_posix()
    lines = [
        f"- [{each.day}, commit {each.commit}]({name_of(page, each).removeprefix(f'{folder}/')})" for each in earlier
    ]
    return "\n".join([text.rstrip(), "", "## Earlier versions", "", *lines, ""])


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, encoding="utf-8", errors="replace"
    ).stdout
