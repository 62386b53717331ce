# SPDX-License-Identifier: Apache-2.0
"""The hooks of mkdocs (mkdocs.yml): pages that are made from code are added, and links become those of the site."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from site_pages import api, check, commands, gallery, history, links, nav, output, status, tables  # noqa: E402

_gallery: dict[str, gallery.Shown] = {}
"""What the commands of the gallery's pages gave, by page."""

_earlier: dict[str, list[history.Version]] = {}
"""Earlier versions of pages of results, by page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root and all pages that are made from code."""
    for source, page in links.FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=links.in_site(text, source, page)))
    for page, made in tables.PAGES.items():
        files.append(File.generated(config, page, content=made()))
    for page, described in api.pages():
        files.append(File.generated(config, page, content=api.text_of(described)))
    _gallery.update(gallery.run_all())
    for name, shown in _gallery.items():
        for picture, content in shown.pictures.items():
            files.append(File.generated(config, f"gallery/{name}/{picture}", content=content))
    for page in (f"results/{path.name}" for path in history.recorded()):
        _earlier[page] = history.versions(f"docs/{page}")
        for version in _earlier[page]:
            files.append(File.generated(config, history.name_of(page, version), content=version.text))
    files.append(File.generated(config, "guides/report.html", content=output.report()))
    files.append(File.generated(config, "reference/commands.md", content=commands.page()))
    config.nav = nav.completed(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a document in docs/ to places outside of it, output of commands, earlier versions, and stability."""
    name = page.file.src_uri
    if page.file.generated_by is None:
        folder, _, stem = name.removesuffix(".md").rpartition("/")
        in_gallery = folder == "gallery" and stem in _gallery
        text = gallery.page(stem, markdown, _gallery[stem]) if in_gallery else output.with_output(markdown)
        markdown = links.in_site(text, f"docs/{name}", name)
    markdown = history.with_history(markdown, name, _earlier.get(name, []))
    return status.marked(markdown, name)


def on_post_build(config: MkDocsConfig) -> None:
    """Check the links of all pages, those that mkdocs does not see, too.

    Raises:
        PluginError: some lead nowhere, or a page loads something from elsewhere.
    """
    found = list(check.problems(Path(config.site_dir)))
    if found:
        raise PluginError("\n".join(found))
