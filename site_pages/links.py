# SPDX-License-Identifier: Apache-2.0
"""Links between documents, from how the repository has them to how the site has them."""

from __future__ import annotations

import posixpath
import re

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")

SOURCE = re.compile(r'(<(?:img|source)\b[^>]*?\bsrc(?:set)?=")([^"]+)(?=")')
"""The address of a picture in HTML, which Markdown has no form for where a browser chooses among several."""

SITE_ONLY = re.compile(r"^<!-- site: (.*) -->$", re.MULTILINE)
"""What is a comment in the repository and text in the site: links to pages that only the site has."""

FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
"""Documents of the repository's root, and their pages in the site."""


def in_site(text: str, source: str, page: str) -> str:
    """The text of a document with links that work in the site.

    Args:
        text: Markdown.
        source: the document's path from the root of the repository.
        page: its path in the site.

    Returns:
        The text; a link to a file that is not a page becomes its path as code.
    """

    def moved(link: str) -> str | None:
        """The address in the site; None if the site does not have the file."""
        if re.match(r"[a-z]+:|#", link):
            return link
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in FROM_ROOT:
            target = FROM_ROOT[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return None
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{relative}{f'#{anchor}' if anchor else ''}"

    def changed(match: re.Match[str]) -> str:
        shown, link = match.groups()
        address = moved(link)
        if address is None:
            return f"`{posixpath.normpath(posixpath.join(posixpath.dirname(source), link.partition('#')[0]))}`"
        return f"{shown}({address})"

    def with_source(match: re.Match[str]) -> str:
        return f"{match[1]}{moved(match[2]) or match[2]}"

    return SITE_ONLY.sub(r"\1", SOURCE.sub(with_source, LINK.sub(changed, text)))
