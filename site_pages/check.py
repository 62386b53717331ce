# SPDX-License-Identifier: Apache-2.0
"""The check of the site that was built: every link and picture is there, and no page loads anything from elsewhere."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("source", "srcset"),
}
"""What a browser fetches with a page."""

NO_FETCH = ("canonical", "next", "prev", "alternate")
"""Kinds of `link` that name a page and load none."""


class _Page(HTMLParser):
    """The addresses of a page, those that are loaded with it apart, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, loads, and is called."""
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        for name in ("href", "src", "srcset"):
            if name in values and values.get("rel") not in NO_FETCH:
                (self.loads if (tag, name) in LOADS else self.links).append(values[name])


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a site: one sentence for each link that leads nowhere and each thing from elsewhere."""

    @cache
    def page(path: Path) -> _Page:
        return _Page(path.read_text(encoding="utf-8"))

    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if name == "404.html":  # its addresses are those of the root of a server
            continue
        for address in page(path).loads:
            if urlsplit(address).scheme in ("http", "https") or address.startswith("//"):
                yield f"{name} loads {address}, which is not of the site"
        for address in (*page(path).links, *page(path).loads):
            parts = urlsplit(address)
            if parts.scheme or address.startswith("//"):
                continue
            file = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            target = site / file
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name} links to {address}, which does not exist"
            elif target.suffix == ".html" and unquote(parts.fragment) not in page(target).anchors:
                yield f"{name} links to {address}, which has no such anchor"
