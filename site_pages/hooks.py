# SPDX-License-Identifier: Apache-2.0
"""The hooks of mkdocs (mkdocs.yml): pages that are made from code are added, and links become those of the site."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from site_pages import api, commands, links, nav, output, tables  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root and all pages that are made from code."""
    for source, page in links.FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=links.in_site(text, source, page)))
    for page, made in tables.PAGES.items():
        files.append(File.generated(config, page, content=made()))
    for page, described in api.pages():
        files.append(File.generated(config, page, content=api.text_of(described)))
    files.append(File.generated(config, "reference/commands.md", content=commands.page()))
    config.nav = nav.completed(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a document in docs/ to places outside of it, and the output of its commands."""
    if page.file.generated_by is not None:
        return markdown
    source = f"docs/{page.file.src_uri}"
    return output.with_output(links.in_site(markdown, source, page.file.src_uri))
