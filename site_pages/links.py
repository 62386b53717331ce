# SPDX-License-Identifier: Apache-2.0
"""Links between documents, from how the repository has them to how the site has them."""

from __future__ import annotations

import posixpath
import re

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")

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
        The text; a link to a file that is no page becomes its path as code.
    """

    def changed(match: re.Match[str]) -> str:
        shown, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match.group()
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in FROM_ROOT:
            target = FROM_ROOT[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return f"`{target}`"
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{shown}({relative}{f'#{anchor}' if anchor else ''})"

    return LINK.sub(changed, text)
