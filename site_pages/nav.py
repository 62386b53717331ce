# SPDX-License-Identifier: Apache-2.0
"""The navigation: pages that mkdocs.yml does not name are added to the section of their folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import TypeAlias

Nav: TypeAlias = "list[str | dict[str, str | Nav]]"
"""The navigation as mkdocs.yml has it: paths, titles with a path, and titles with a navigation of their own."""

SECTIONS = {
    "guides": "Guides",
    "gallery": "Gallery",
    "results": "Results",
    "reference/api": "Reference",
    ".": "Reference",
}
"""The section of each folder below docs/."""

BY_FILE = ("Results",)
"""Sections whose pages are called by their files: titles of tables differ in a machine or a batch only."""


def paths_of(nav: Nav) -> Iterator[str]:
    """The paths that a navigation names."""
    for item in nav:
        for value in [item] if isinstance(item, str) else item.values():
            if isinstance(value, str):
                yield value
            else:
                yield from paths_of(value)


def completed(nav: Nav, pages: Iterable[str]) -> Nav:
    """The navigation with the pages that it does not name, in the order of their paths.

    Raises:
        KeyError: a page is in a folder that has no section.
    """
    named = set(paths_of(nav))
    added: dict[str, Nav] = {}
    for page in sorted(pages):
        if page not in named:
            section = SECTIONS[str(PurePosixPath(page).parent)]
            added.setdefault(section, []).append({PurePosixPath(page).stem: page} if section in BY_FILE else page)
    made: Nav = []
    for item in nav:
        (title, inside), *_ = item.items() if isinstance(item, dict) else [("", item)]
        made.append({title: [*inside, *added.get(title, [])]} if isinstance(inside, list) else item)
    return made
